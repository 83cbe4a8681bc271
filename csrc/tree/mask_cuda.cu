// pack_mask, unpack_mask, tree_from_mask on the GPU.
//
// pack_mask: a warp a word, a lane a column; the ballot is the word. unpack_mask: a thread a column.
// tree_from_mask: a block a request, a thread a node, and one block for the rows behind the batch.
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "tree/args.h"

namespace specdec {

constexpr int kMaskThreads = 128;

// Grid: (blocks of words, rows).
__global__ void __launch_bounds__(kMaskThreads) pack_mask_kernel(const MaskArgs p) {
  const int lane = threadIdx.x % 32;
  const int64_t word = int64_t{blockIdx.x} * (kMaskThreads / 32) + threadIdx.x / 32, column = 32 * word + lane;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const bool set = column < p.columns && p.mask[row * p.stride + column] != 0;
    const uint32_t bits = __ballot_sync(kFullWarp, set);
    if (lane == 0 && word < p.width) p.words[row * p.width + word] = static_cast<int32_t>(bits);
  }
}

// Grid: (blocks of columns, rows).
__global__ void __launch_bounds__(kMaskThreads) unpack_mask_kernel(const MaskArgs p) {
  const int64_t column = int64_t{blockIdx.x} * kMaskThreads + threadIdx.x;
  if (column >= p.columns) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) p.mask[row * p.stride + column] = p.bit(row, column);
}

// Grid: requests + 1.
__global__ void __launch_bounds__(kMaskThreads) tree_from_mask_kernel(const TreeFromMaskArgs p) {
  const int32_t b = blockIdx.x;
  if (b == p.num_requests) {
    const int64_t from = tail_begin(p.cu_nodes, b, p.total_nodes);
    for (int64_t row = from + threadIdx.x; row < p.total_nodes; row += kMaskThreads) p.parents[row] = -1;
    return;
  }
  const NodeRange range = node_range(p.cu_nodes, b, p.total_nodes);
  for (int32_t i = threadIdx.x; i < range.count; i += kMaskThreads)
    p.parents[int64_t{range.begin} + i] = p.parent(range, i);
}

// ------------------------------------------------------------------ host
static unsigned row_blocks(int64_t rows) {
  return static_cast<unsigned>(rows < 65535 ? rows : 65535);
}

void pack_mask_cuda(Tensor mask, Tensor words) {
  const MaskArgs p = check_pack_mask(mask, words);
  if (p.rows == 0 || p.width == 0) return;
  const unsigned blocks = static_cast<unsigned>((p.width + kMaskThreads / 32 - 1) / (kMaskThreads / 32));
  DeviceGuard guard(words);
  SPECDEC_LAUNCH(pack_mask_kernel, dim3(blocks, row_blocks(p.rows)), dim3(kMaskThreads), 0, current_stream(words), p);
  check_launch("pack_mask");
}

void unpack_mask_cuda(Tensor words, Tensor mask) {
  const MaskArgs p = check_unpack_mask(words, mask);
  if (p.rows == 0 || p.columns == 0) return;
  const unsigned blocks = static_cast<unsigned>((p.columns + kMaskThreads - 1) / kMaskThreads);
  DeviceGuard guard(words);
  SPECDEC_LAUNCH(unpack_mask_kernel, dim3(blocks, row_blocks(p.rows)), dim3(kMaskThreads), 0, current_stream(words), p);
  check_launch("unpack_mask");
}

void tree_from_mask_cuda(Tensor tree_mask, Tensor cu_nodes, int64_t max_nodes, Tensor parents) {
  const TreeFromMaskArgs p = check_tree_from_mask(tree_mask, cu_nodes, max_nodes, parents);
  DeviceGuard guard(parents);
  SPECDEC_LAUNCH(tree_from_mask_kernel, dim3(p.num_requests + 1), dim3(kMaskThreads), 0, current_stream(parents), p);
  check_launch("tree_from_mask");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("pack_mask", TORCH_BOX(&specdec::pack_mask_cuda));
  m.impl("unpack_mask", TORCH_BOX(&specdec::unpack_mask_cuda));
  m.impl("tree_from_mask", TORCH_BOX(&specdec::tree_from_mask_cuda));
}
