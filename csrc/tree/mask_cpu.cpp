// pack_mask, unpack_mask, tree_from_mask on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "tree/args.h"

namespace specdec {
namespace {

constexpr int64_t kGrainBits = 1 << 18;

int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, kGrainBits / std::max<int64_t>(1, columns));
}

void pack_mask_cpu(Tensor mask, Tensor words) {
  const MaskArgs p = check_pack_mask(mask, words);
  torch::stable::parallel_for(0, p.rows, row_grain(p.columns), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
      for (int64_t w = 0; w < p.width; w++) {
        const uint8_t* source = p.mask + row * p.stride + 32 * w;
        const int64_t count = std::min<int64_t>(32, p.columns - 32 * w);
        uint32_t word = 0;
        for (int64_t j = 0; j < count; j++) word |= static_cast<uint32_t>(source[j] != 0) << j;
        p.words[row * p.width + w] = static_cast<int32_t>(word);
      }
  });
}

void unpack_mask_cpu(Tensor words, Tensor mask) {
  const MaskArgs p = check_unpack_mask(words, mask);
  torch::stable::parallel_for(0, p.rows, row_grain(p.columns), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
      for (int64_t j = 0; j < p.columns; j++) p.mask[row * p.stride + j] = p.bit(row, j);
  });
}

void tree_from_mask_cpu(Tensor tree_mask, Tensor cu_nodes, int64_t max_nodes, Tensor parents) {
  const TreeFromMaskArgs p = check_tree_from_mask(tree_mask, cu_nodes, max_nodes, parents);
  for (int64_t b = 0; b < p.num_requests; b++) {
    const NodeRange range = node_range(p.cu_nodes, b, p.total_nodes);
    for (int32_t i = 0; i < range.count; i++) p.parents[range.begin + i] = p.parent(range, i);
  }
  for (int64_t row = tail_begin(p.cu_nodes, p.num_requests, p.total_nodes); row < p.total_nodes; row++)
    p.parents[row] = -1;
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("pack_mask", TORCH_BOX(&specdec::pack_mask_cpu));
  m.impl("unpack_mask", TORCH_BOX(&specdec::unpack_mask_cpu));
  m.impl("tree_from_mask", TORCH_BOX(&specdec::tree_from_mask_cpu));
}
