// commit_kv, advance, copy_pages on the CPU. Rows are moved as bytes, so every cache dtype is served by one loop.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "common/dispatch.h"
#include "kv/copy_cpu.h"
#include "kv/kv.h"
#include "tree/tree.h"

namespace specdec {
namespace {

constexpr int64_t kGrainBytes = 1 << 17;  // what a thread should move to be worth its wake-up

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
void add_caches(const char* op, const char* argument, const std::vector<Tensor>& caches, bool hnd, Group& group) {
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

Group group_of(const char* op, const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches, bool hnd) {
  Group group;
  group.layers.reserve(k_caches.size() + v_caches.size());
  add_caches(op, "k_caches", k_caches, hnd, group);
  add_caches(op, "v_caches", v_caches, hnd, group);
  if (group.page_size == 0) fail(op, "k_caches", "at least one cache, got none");
  return group;
}

// A move with its slots taken apart once for all layers.
struct RowMove {
  int32_t source_page, source_row, target_page, target_row;
};

inline char* row_of(const Layer& layer, int32_t page, int32_t row) {
  return layer.base + page * layer.stride_page + row * layer.stride_row;
}

void move_row(const Layer& layer, const RowMove& move, const RowMove* next, bool stream) {
  const char* source = row_of(layer, move.source_page, move.source_row);
  char* target = row_of(layer, move.target_page, move.target_row);
  if (next) prefetch_bytes(row_of(layer, next->source_page, next->source_row), layer.piece);
  for (int64_t h = 0; h < layer.num_heads; h++)
    copy_bytes(target + h * layer.stride_head, source + h * layer.stride_head, layer.piece, stream);
}

void commit_kv_cpu(Tensor page_table, Tensor context_lens, Tensor cu_nodes, Tensor accepted_nodes, Tensor num_emitted,
                   std::optional<Tensor> request_order, std::string kv_layout, std::vector<Tensor> k_caches,
                   std::vector<Tensor> v_caches) {
  const char* op = "commit_kv";
  const int64_t requests = context_lens.numel();
  check_index(op, "context_lens", context_lens, {kAny});
  check_index(op, "page_table", page_table, {requests, kAny});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "accepted_nodes", accepted_nodes, {requests, kAny});
  check_index(op, "num_emitted", num_emitted, {requests});
  check_index(op, "request_order", request_order, {kAny});
  const Group group = group_of(op, k_caches, v_caches, is_hnd(op, kv_layout));

  const int32_t *table = data<int32_t>(page_table), *lens = data<int32_t>(context_lens), *cu = data<int32_t>(cu_nodes),
                *accepted = data<int32_t>(accepted_nodes), *emitted = data<int32_t>(num_emitted),
                *order = data_or_null<int32_t>(request_order);
  const int32_t max_pages = static_cast<int32_t>(page_table.size(1)),
                width = static_cast<int32_t>(accepted_nodes.size(1)), page_size = static_cast<int32_t>(group.page_size),
                num_pages = static_cast<int32_t>(group.num_pages);

  // Planned once, then replayed for every layer. A path's moves stay together and in order (see kv.h).
  static thread_local std::vector<RowMove> plan;
  static thread_local std::vector<int32_t> path_starts;
  plan.clear();
  path_starts.clear();
  const bool ordered = request_order.has_value();  // an empty order has no data pointer and means: nobody
  const int64_t handled = ordered ? request_order->numel() : requests;
  for (int64_t n = 0; n < handled; n++) {
    const int64_t b = ordered ? order[n] : n;
    if (b < 0 || b >= requests) continue;
    const NodeRange range = node_range(cu, b, INT32_MAX);
    const int32_t* path = accepted + b * width;
    const int32_t length = path_length(path, emitted[b], width, range.count);
    const size_t start = plan.size();
    for (int32_t j = 0; j < length; j++) {
      Move move = accepted_move(table + b * max_pages, max_pages, page_size, num_pages, lens[b], path[j], j);
      if (moves(move))
        plan.push_back(
            {move.source / page_size, move.source % page_size, move.target / page_size, move.target % page_size});
    }
    if (plan.size() > start) path_starts.push_back(static_cast<int32_t>(start));
  }
  if (plan.empty()) return;
  path_starts.push_back(static_cast<int32_t>(plan.size()));

  const RowMove* move = plan.data();  // thread_local: the workers must see this thread's arrays
  const int32_t* starts = path_starts.data();
  const int64_t paths = static_cast<int64_t>(path_starts.size()) - 1, units = paths * group.layers.size();
  const Layer& first = group.layers[0];
  const int64_t row_bytes = first.piece * first.num_heads, moved = static_cast<int64_t>(plan.size());
  const int64_t unit_bytes = std::max<int64_t>(1, moved * row_bytes / paths);
  const bool stream =
      isa() >= Isa::avx2 && moved * row_bytes * static_cast<int64_t>(group.layers.size()) > kStreamBytes;
  torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrainBytes / unit_bytes), [&](int64_t from, int64_t to) {
    for (int64_t unit = from; unit < to; unit++) {
      const Layer& layer = group.layers[unit / paths];
      const int64_t path = unit % paths;
      for (int32_t m = starts[path]; m < starts[path + 1]; m++)
        move_row(layer, move[m], m + 1 < moved ? move + m + 1 : nullptr, stream);
    }
    if (stream) stream_fence();
  });
}

void advance_cpu(Tensor num_emitted, Tensor context_lens) {
  check_index("advance", "num_emitted", num_emitted, {kAny});
  check_index("advance", "context_lens", context_lens, {num_emitted.numel()});
  const int32_t* emitted = data<int32_t>(num_emitted);
  int32_t* lens = mutable_data<int32_t>(context_lens);
  for (int64_t b = 0; b < num_emitted.numel(); b++)
    lens[b] = static_cast<int32_t>(std::min<int64_t>(INT32_MAX, int64_t{lens[b]} + std::max(emitted[b], 0)));
}

void copy_pages_cpu(Tensor src, Tensor dst, std::vector<Tensor> k_caches, std::vector<Tensor> v_caches) {
  const char* op = "copy_pages";
  check_index(op, "src", src, {kAny});
  check_index(op, "dst", dst, {src.numel()});
  const Group group = group_of(op, k_caches, v_caches, false);  // both layouts: a page is a page
  const int32_t *from_page = data<int32_t>(src), *to_page = data<int32_t>(dst);
  const int64_t pairs = src.numel(), units = pairs * group.layers.size();
  const Layer& first = group.layers[0];
  const int64_t page_bytes = std::max<int64_t>(1, group.page_size * first.piece * first.num_heads);
  torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrainBytes / page_bytes), [&](int64_t from, int64_t to) {
    for (int64_t unit = from; unit < to; unit++) {
      const Layer& layer = group.layers[unit / pairs];
      const int32_t a = from_page[unit % pairs], b = to_page[unit % pairs];
      if (a < 0 || b < 0 || a >= group.num_pages || b >= group.num_pages || a == b) continue;
      const char* source = layer.base + a * layer.stride_page;
      char* target = layer.base + b * layer.stride_page;
      if (layer.num_heads == 1 && layer.stride_row == layer.piece) {
        std::memcpy(target, source, group.page_size * layer.piece);
        continue;
      }
      for (int64_t r = 0; r < group.page_size; r++)
        for (int64_t h = 0; h < layer.num_heads; h++) {
          const int64_t offset = r * layer.stride_row + h * layer.stride_head;
          std::memcpy(target + offset, source + offset, layer.piece);
        }
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("commit_kv", TORCH_BOX(&specdec::commit_kv_cpu));
  m.impl("advance", TORCH_BOX(&specdec::advance_cpu));
  m.impl("copy_pages", TORCH_BOX(&specdec::copy_pages_cpu));
}
