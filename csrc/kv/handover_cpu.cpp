// truncate, gather_accepted, prepare_next on the CPU: from one step's outcome to the next step's inputs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "kv/args.h"
#include "tree/tree.h"

namespace specdec {
namespace {

void truncate_cpu(Tensor limit, Tensor output_token_ids, Tensor num_emitted, Tensor accepted_nodes) {
  const TruncateArgs p = check_truncate(limit, output_token_ids, num_emitted, accepted_nodes);
  for (int32_t b = 0; b < p.requests; b++) {
    const int32_t kept = p.kept(b);
    const int64_t row = int64_t{b} * p.width;
    p.emitted[b] = kept;
    std::fill(p.tokens + row + kept, p.tokens + row + p.width, -1);
    std::fill(p.nodes + row + kept, p.nodes + row + p.width, -1);
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
  const GatherArgs p = check_gather_accepted(x, cu_nodes, accepted_nodes, num_emitted, out, cu_out);
  offsets_of(p.emitted, p.requests, p.width, p.total, p.cu_out);
  for (int32_t b = 0; b < p.requests; b++) {
    const NodeRange range = node_range(p.cu_nodes, b, p.x_rows);
    for (int64_t row = p.cu_out[b]; row < p.cu_out[b + 1]; row++) {
      const int32_t node = p.nodes[int64_t{b} * p.width + row - p.cu_out[b]];
      if (node >= 0 && node < range.count)
        std::memcpy(p.out + row * p.out_stride, p.x + (int64_t{range.begin} + node) * p.x_stride, p.bytes);
      else
        std::memset(p.out + row * p.out_stride, 0, p.bytes);
    }
  }
  for (int64_t row = p.cu_out[p.requests]; row < p.total; row++) std::memset(p.out + row * p.out_stride, 0, p.bytes);
}

void prepare_next_cpu(Tensor output_token_ids, Tensor num_emitted, Tensor context_lens, Tensor page_table,
                      int64_t page_size, int64_t position_offset, Tensor root_token_ids, Tensor token_ids,
                      Tensor positions, Tensor slots, Tensor cu_tokens) {
  const PrepareArgs p = check_prepare_next(output_token_ids, num_emitted, context_lens, page_table, page_size,
                                           position_offset, root_token_ids, token_ids, positions, slots, cu_tokens);
  offsets_of(p.emitted, p.requests, p.width, p.total, p.cu_tokens);
  for (int32_t b = 0; b < p.requests; b++) {
    const int32_t count = emitted_count(p.emitted[b], p.width);
    if (count > 0) p.roots[b] = p.tokens[int64_t{b} * p.width + count - 1];
    for (int64_t row = p.cu_tokens[b]; row < p.cu_tokens[b + 1]; row++)
      p.write(row, b, static_cast<int32_t>(row - p.cu_tokens[b]));
  }
  for (int64_t row = p.cu_tokens[p.requests]; row < p.total; row++) p.write_tail(row);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("truncate", TORCH_BOX(&specdec::truncate_cpu));
  m.impl("gather_accepted", TORCH_BOX(&specdec::gather_accepted_cpu));
  m.impl("prepare_next", TORCH_BOX(&specdec::prepare_next_cpu));
}
