// Arguments of the kv room's ops: the checks that every native backend runs before its first write.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/dispatch.h"
#include "kv/kv.h"

namespace specdec {

// One layer of a K or V cache, in bytes: rows of `num_heads` pieces of `piece` bytes.
struct Layer {
  char* base;
  int64_t stride_page, stride_row, stride_head, num_heads, piece;
};

struct Group {  // the caches of one call: they share pages and page size
  std::vector<Layer> layers;
  int64_t num_pages = 0, page_size = 0;
};

// Caches [pages, page, heads, dim] (HND: [pages, heads, page, dim]), optionally with a leading layer dimension.
inline void add_caches(const char* op, const char* argument, const std::vector<Tensor>& caches, bool hnd,
                       Group& group) {
  for (const Tensor& cache : caches) {
    const int64_t lead = cache.dim() - 4;
    if (lead != 0 && lead != 1) fail(op, argument, "4 dimensions (5 with layers in front), got ", shape_text(cache));
    check_dense_rows(op, argument, cache);
    const int64_t page_size = cache.size(lead + (hnd ? 2 : 1)), num_pages = cache.size(lead);
    if (page_size < 1) fail(op, argument, "at least one row a page, got ", shape_text(cache));
    if (group.page_size == 0) group.num_pages = num_pages, group.page_size = page_size;
    if (num_pages != group.num_pages || page_size != group.page_size)
      fail(op, argument, "the same pages in every cache (", group.num_pages, " of ", group.page_size, " rows), got ",
           shape_text(cache));
    const int64_t bytes = static_cast<int64_t>(cache.element_size());
    Layer layer = {static_cast<char*>(cache.mutable_data_ptr()),
                   cache.stride(lead) * bytes,
                   cache.stride(lead + (hnd ? 2 : 1)) * bytes,
                   cache.stride(lead + (hnd ? 1 : 2)) * bytes,
                   cache.size(lead + (hnd ? 1 : 2)),
                   cache.size(lead + 3) * bytes};
    if (layer.stride_head == layer.piece) layer.piece *= layer.num_heads, layer.num_heads = 1;  // one dense row
    const int64_t count = lead ? cache.size(0) : 1, stride = lead ? cache.stride(0) * bytes : 0;
    for (int64_t l = 0; l < count; l++, layer.base += stride) group.layers.push_back(layer);
  }
}

inline Group group_of(const char* op, const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                      bool hnd) {
  Group group;
  group.layers.reserve(k_caches.size() + v_caches.size());
  add_caches(op, "k_caches", k_caches, hnd, group);
  add_caches(op, "v_caches", v_caches, hnd, group);
  if (group.page_size == 0) fail(op, "k_caches", "at least one cache, got none");
  return group;
}

inline CommitArgs check_commit_kv(const Tensor& page_table, const Tensor& context_lens, const Tensor& cu_nodes,
                                  const Tensor& accepted_nodes, const Tensor& num_emitted,
                                  const std::optional<Tensor>& request_order, const Group& group) {
  const char* op = "commit_kv";
  const int64_t requests = context_lens.numel();
  check_index(op, "context_lens", context_lens, {kAny});
  check_index(op, "page_table", page_table, {requests, kAny});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "accepted_nodes", accepted_nodes, {requests, kAny});
  check_index(op, "num_emitted", num_emitted, {requests});
  check_index(op, "request_order", request_order, {kAny});
  CommitArgs args = {};
  args.page_table = data<int32_t>(page_table);
  args.context_lens = data<int32_t>(context_lens);
  args.cu_nodes = data<int32_t>(cu_nodes);
  args.accepted_nodes = data<int32_t>(accepted_nodes);
  args.num_emitted = data<int32_t>(num_emitted);
  args.request_order = data_or_null<int32_t>(request_order);  // null also for an empty order: then handled is 0
  args.requests = static_cast<int32_t>(requests);
  args.handled = static_cast<int32_t>(request_order ? request_order->numel() : requests);
  args.max_pages = static_cast<int32_t>(page_table.size(1));
  args.width = static_cast<int32_t>(accepted_nodes.size(1));
  args.page_size = static_cast<int32_t>(group.page_size);
  args.num_pages = static_cast<int32_t>(group.num_pages);
  return args;
}

inline void check_copy_pages(const Tensor& src, const Tensor& dst) {
  check_index("copy_pages", "src", src, {kAny});
  check_index("copy_pages", "dst", dst, {src.numel()});
}

inline void check_advance(const Tensor& num_emitted, const Tensor& context_lens) {
  check_index("advance", "num_emitted", num_emitted, {kAny});
  check_index("advance", "context_lens", context_lens, {num_emitted.numel()});
}

inline TruncateArgs check_truncate(const Tensor& limit, const Tensor& output_token_ids, const Tensor& num_emitted,
                                   const Tensor& accepted_nodes) {
  const char* op = "truncate";
  const int64_t requests = limit.numel();
  check_index(op, "limit", limit, {kAny});
  check_index(op, "output_token_ids", output_token_ids, {requests, kAny});
  const int64_t width = output_token_ids.size(1);
  check_index(op, "num_emitted", num_emitted, {requests});
  check_index(op, "accepted_nodes", accepted_nodes, {requests, width});
  return {data<int32_t>(limit),
          mutable_data<int32_t>(output_token_ids),
          mutable_data<int32_t>(accepted_nodes),
          mutable_data<int32_t>(num_emitted),
          static_cast<int32_t>(requests),
          static_cast<int32_t>(width)};
}

inline GatherArgs check_gather_accepted(const Tensor& x, const Tensor& cu_nodes, const Tensor& accepted_nodes,
                                        const Tensor& num_emitted, const Tensor& out, const Tensor& cu_out) {
  const char* op = "gather_accepted";
  const int64_t requests = num_emitted.numel();
  check_index(op, "num_emitted", num_emitted, {kAny});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "accepted_nodes", accepted_nodes, {requests, kAny});
  check_index(op, "cu_out", cu_out, {requests + 1});
  check_tensor(op, "x", x, x.scalar_type(), {kAny, kAny});
  check_dense_rows(op, "x", x);
  check_tensor(op, "out", out, x.scalar_type(), {kAny, x.size(1)});
  check_dense_rows(op, "out", out);
  const int64_t unit = static_cast<int64_t>(x.element_size());
  GatherArgs args = {};
  args.x = data<char>(x);
  args.out = mutable_data<char>(out);
  args.cu_nodes = data<int32_t>(cu_nodes);
  args.nodes = data<int32_t>(accepted_nodes);
  args.emitted = data<int32_t>(num_emitted);
  args.cu_out = mutable_data<int32_t>(cu_out);
  args.x_rows = x.size(0);
  args.x_stride = x.stride(0) * unit;
  args.out_stride = out.stride(0) * unit;
  args.bytes = x.size(1) * unit;
  args.total = out.size(0);
  args.requests = static_cast<int32_t>(requests);
  args.width = static_cast<int32_t>(accepted_nodes.size(1));
  return args;
}

inline PrepareArgs check_prepare_next(const Tensor& output_token_ids, const Tensor& num_emitted,
                                      const Tensor& context_lens, const Tensor& page_table, int64_t page_size,
                                      int64_t position_offset, const Tensor& root_token_ids, const Tensor& token_ids,
                                      const Tensor& positions, const Tensor& slots, const Tensor& cu_tokens) {
  const char* op = "prepare_next";
  const int64_t requests = num_emitted.numel(), total = token_ids.numel();
  check_index(op, "num_emitted", num_emitted, {kAny});
  check_index(op, "output_token_ids", output_token_ids, {requests, kAny});
  check_index(op, "context_lens", context_lens, {requests});
  check_index(op, "page_table", page_table, {requests, kAny});
  check_range(op, "page_size", page_size, 1, INT32_MAX);
  check_range(op, "position_offset", position_offset, 0, INT32_MAX);
  check_index(op, "root_token_ids", root_token_ids, {requests});
  check_index(op, "token_ids", token_ids, {kAny});
  check_index(op, "positions", positions, {total});
  check_index(op, "slots", slots, {total});
  check_index(op, "cu_tokens", cu_tokens, {requests + 1});
  PrepareArgs args = {};
  args.tokens = data<int32_t>(output_token_ids);
  args.emitted = data<int32_t>(num_emitted);
  args.context_lens = data<int32_t>(context_lens);
  args.page_table = data<int32_t>(page_table);
  args.roots = mutable_data<int32_t>(root_token_ids);
  args.ids = mutable_data<int32_t>(token_ids);
  args.positions = mutable_data<int32_t>(positions);
  args.slots = mutable_data<int32_t>(slots);
  args.cu_tokens = mutable_data<int32_t>(cu_tokens);
  args.total = total;
  args.position_offset = position_offset;
  args.requests = static_cast<int32_t>(requests);
  args.width = static_cast<int32_t>(output_token_ids.size(1));
  args.max_pages = static_cast<int32_t>(page_table.size(1));
  args.page_size = static_cast<int32_t>(page_size);
  return args;
}

}  // namespace specdec
