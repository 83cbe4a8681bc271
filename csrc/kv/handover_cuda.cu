// truncate, gather_accepted, prepare_next on the GPU: one block a request, and one for the rows behind the batch.
//
// Where a request's rows begin is the sum of the emitted counts before it; every block adds them up for itself (B
// words, read from L2), which costs less than a second launch. Integers and copied bytes only.
#include "common/copy.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "kv/args.h"
#include "tree/tree.h"

namespace specdec {

constexpr int kTruncateThreads = 32;

// Grid: requests. One warp: all lanes have read the count before one writes it.
__global__ void __launch_bounds__(kTruncateThreads) truncate_kernel(const TruncateArgs p) {
  const int32_t b = blockIdx.x, kept = p.kept(b);
  __syncwarp();
  if (threadIdx.x == 0) p.emitted[b] = kept;
  for (int32_t i = kept + static_cast<int32_t>(threadIdx.x); i < p.width; i += kTruncateThreads)
    p.tokens[int64_t{b} * p.width + i] = p.nodes[int64_t{b} * p.width + i] = -1;
}

// First row of request b: the emitted counts before it, cut at `total`. Every thread of the block gets it.
__device__ __forceinline__ int64_t first_row(const int32_t* emitted, int32_t b, int32_t width, int64_t total,
                                             int64_t* scratch) {
  const int32_t thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  int64_t mine = 0;
  for (int32_t j = thread; j < b; j += threads) mine += emitted_count(emitted[j], width);
  mine = warp_sum(mine);
  if (thread % 32 == 0) scratch[thread / 32] = mine;
  __syncthreads();
  int64_t sum = 0;
  for (int32_t w = 0; w < threads / 32; w++) sum += scratch[w];
  return sum < total ? sum : total;
}

// Grid: (requests + 1, rows of a request). Block: x threads a row, y rows.
__global__ void __launch_bounds__(kCopyThreads) gather_accepted_kernel(const GatherArgs p, const int32_t word) {
  SPECDEC_SHARED(int64_t, scratch, kCopyThreads / 32);
  const int32_t b = blockIdx.x, step = gridDim.y * blockDim.y;
  const int64_t begin = first_row(p.emitted, b, p.width, p.total, scratch);
  if (blockIdx.y == 0 && threadIdx.y == 0 && threadIdx.x == 0) p.cu_out[b] = static_cast<int32_t>(begin);
  const bool tail = b == p.requests;
  const NodeRange range = tail ? NodeRange{0, 0, 0} : node_range(p.cu_nodes, b, p.x_rows);
  int64_t rows = p.total - begin;
  if (!tail) {
    const int32_t count = emitted_count(p.emitted[b], p.width);
    rows = count < rows ? count : rows;
  }
  for (int64_t i = blockIdx.y * blockDim.y + threadIdx.y; i < rows; i += step) {
    const int32_t node = tail ? -1 : p.nodes[int64_t{b} * p.width + i];
    const bool exists = node >= 0 && node < range.count;
    copy_row(p.out + (begin + i) * p.out_stride, exists ? p.x + (int64_t{range.begin} + node) * p.x_stride : nullptr,
             p.bytes, word, threadIdx.x, blockDim.x);
  }
}

// Grid: requests + 1.
__global__ void __launch_bounds__(kCopyThreads) prepare_next_kernel(const PrepareArgs p) {
  SPECDEC_SHARED(int64_t, scratch, kCopyThreads / 32);
  const int32_t b = blockIdx.x;
  const int64_t begin = first_row(p.emitted, b, p.width, p.total, scratch);
  if (threadIdx.x == 0) p.cu_tokens[b] = static_cast<int32_t>(begin);
  if (b == p.requests) {
    for (int64_t row = begin + threadIdx.x; row < p.total; row += kCopyThreads) p.write_tail(row);
    return;
  }
  const int32_t count = emitted_count(p.emitted[b], p.width);
  if (threadIdx.x == 0 && count > 0) p.roots[b] = p.tokens[int64_t{b} * p.width + count - 1];
  for (int32_t i = threadIdx.x; i < count && begin + i < p.total; i += kCopyThreads) p.write(begin + i, b, i);
}

// ------------------------------------------------------------------ host
void truncate_cuda(Tensor limit, Tensor output_token_ids, Tensor num_emitted, Tensor accepted_nodes) {
  const TruncateArgs p = check_truncate(limit, output_token_ids, num_emitted, accepted_nodes);
  if (p.requests == 0) return;
  DeviceGuard guard(limit);
  SPECDEC_LAUNCH(truncate_kernel, dim3(p.requests), dim3(kTruncateThreads), 0, current_stream(limit), p);
  check_launch("truncate");
}

void gather_accepted_cuda(Tensor x, Tensor cu_nodes, Tensor accepted_nodes, Tensor num_emitted, Tensor out,
                          Tensor cu_out) {
  const GatherArgs p = check_gather_accepted(x, cu_nodes, accepted_nodes, num_emitted, out, cu_out);
  const int32_t word = word_of({address_of(p.x), address_of(p.out), p.x_stride, p.out_stride, p.bytes});
  const dim3 block = copy_block(p.bytes, word);
  DeviceGuard guard(x);
  SPECDEC_LAUNCH(gather_accepted_kernel, dim3(p.requests + 1, copy_blocks(p.width, block.y)), block, 0,
                 current_stream(x), p, word);
  check_launch("gather_accepted");
}

void prepare_next_cuda(Tensor output_token_ids, Tensor num_emitted, Tensor context_lens, Tensor page_table,
                       int64_t page_size, int64_t position_offset, Tensor root_token_ids, Tensor token_ids,
                       Tensor positions, Tensor slots, Tensor cu_tokens) {
  const PrepareArgs p = check_prepare_next(output_token_ids, num_emitted, context_lens, page_table, page_size,
                                           position_offset, root_token_ids, token_ids, positions, slots, cu_tokens);
  DeviceGuard guard(context_lens);
  SPECDEC_LAUNCH(prepare_next_kernel, dim3(p.requests + 1), dim3(kCopyThreads), 0, current_stream(context_lens), p);
  check_launch("prepare_next");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("truncate", TORCH_BOX(&specdec::truncate_cuda));
  m.impl("gather_accepted", TORCH_BOX(&specdec::gather_accepted_cuda));
  m.impl("prepare_next", TORCH_BOX(&specdec::prepare_next_cuda));
}
