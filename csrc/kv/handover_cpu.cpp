// truncate, gather_accepted, prepare_next on the CPU: from one step's outcome to the next step's inputs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "kv/kv.h"
#include "tree/tree.h"

namespace specdec {
namespace {

void truncate_cpu(Tensor limit, Tensor output_token_ids, Tensor num_emitted, Tensor accepted_nodes) {
  const char* op = "truncate";
  const int64_t requests = limit.numel();
  check_index(op, "limit", limit, {kAny});
  check_index(op, "output_token_ids", output_token_ids, {requests, kAny});
  const int64_t width = output_token_ids.size(1);
  check_index(op, "num_emitted", num_emitted, {requests});
  check_index(op, "accepted_nodes", accepted_nodes, {requests, width});

  const int32_t* cut = data<int32_t>(limit);
  int32_t *tokens = mutable_data<int32_t>(output_token_ids), *nodes = mutable_data<int32_t>(accepted_nodes),
          *emitted = mutable_data<int32_t>(num_emitted);
  for (int64_t b = 0; b < requests; b++) {
    const int32_t kept = std::min(std::max(cut[b], 0), emitted_count(emitted[b], static_cast<int32_t>(width)));
    emitted[b] = kept;
    std::fill(tokens + b * width + kept, tokens + (b + 1) * width, -1);
    std::fill(nodes + b * width + kept, nodes + (b + 1) * width, -1);
  }
}

// Exclusive prefix sum of the emitted counts, cut at `total` rows: shared by the two ops below, whose rows pair up.
void offsets_of(const int32_t* emitted, int64_t requests, int32_t width, int64_t total, int32_t* cu) {
  int64_t row = 0;
  for (int64_t b = 0; b <= requests; b++) {
    cu[b] = static_cast<int32_t>(row);
    if (b < requests) row = std::min(total, row + emitted_count(emitted[b], width));
  }
}

void gather_accepted_cpu(Tensor x, Tensor cu_nodes, Tensor accepted_nodes, Tensor num_emitted, Tensor out,
                         Tensor cu_out) {
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

  const int64_t bytes = static_cast<int64_t>(x.element_size()), row_bytes = x.size(1) * bytes, total = out.size(0);
  const int32_t width = static_cast<int32_t>(accepted_nodes.size(1));
  const int32_t *nodes = data<int32_t>(accepted_nodes), *cu = data<int32_t>(cu_nodes);
  int32_t* offsets = mutable_data<int32_t>(cu_out);
  offsets_of(data<int32_t>(num_emitted), requests, width, total, offsets);
  const char* source = data<char>(x);
  char* target = mutable_data<char>(out);
  const int64_t x_stride = x.stride(0) * bytes, out_stride = out.stride(0) * bytes;
  for (int64_t b = 0; b < requests; b++) {
    const NodeRange range = node_range(cu, b, x.size(0));
    for (int64_t row = offsets[b]; row < offsets[b + 1]; row++) {
      const int32_t node = nodes[b * width + row - offsets[b]];
      if (node >= 0 && node < range.count)
        std::memcpy(target + row * out_stride, source + (int64_t{range.begin} + node) * x_stride, row_bytes);
      else
        std::memset(target + row * out_stride, 0, row_bytes);
    }
  }
  for (int64_t row = offsets[requests]; row < total; row++) std::memset(target + row * out_stride, 0, row_bytes);
}

void prepare_next_cpu(Tensor output_token_ids, Tensor num_emitted, Tensor context_lens, Tensor page_table,
                      int64_t page_size, int64_t position_offset, Tensor root_token_ids, Tensor token_ids,
                      Tensor positions, Tensor slots, Tensor cu_tokens) {
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

  const int32_t width = static_cast<int32_t>(output_token_ids.size(1)),
                max_pages = static_cast<int32_t>(page_table.size(1));
  const int32_t *tokens = data<int32_t>(output_token_ids), *emitted = data<int32_t>(num_emitted),
                *lens = data<int32_t>(context_lens), *table = data<int32_t>(page_table);
  int32_t *roots = mutable_data<int32_t>(root_token_ids), *ids = mutable_data<int32_t>(token_ids),
          *position = mutable_data<int32_t>(positions), *slot = mutable_data<int32_t>(slots),
          *cu = mutable_data<int32_t>(cu_tokens);
  offsets_of(emitted, requests, width, total, cu);
  for (int64_t b = 0; b < requests; b++) {
    const int32_t count = emitted_count(emitted[b], width);
    if (count > 0) roots[b] = tokens[b * width + count - 1];
    for (int64_t row = cu[b]; row < cu[b + 1]; row++) {
      const int64_t i = row - cu[b], at = int64_t{lens[b]} + position_offset + i;
      const bool valid = lens[b] >= 0 && at <= INT32_MAX;
      ids[row] = tokens[b * width + i];
      position[row] = valid ? static_cast<int32_t>(at) : 0;
      slot[row] = valid ? slot_of(table + b * max_pages, max_pages, static_cast<int32_t>(page_size), at) : -1;
    }
  }
  for (int64_t row = cu[requests]; row < total; row++) ids[row] = slot[row] = -1, position[row] = 0;
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("truncate", TORCH_BOX(&specdec::truncate_cpu));
  m.impl("gather_accepted", TORCH_BOX(&specdec::gather_accepted_cpu));
  m.impl("prepare_next", TORCH_BOX(&specdec::prepare_next_cpu));
}
