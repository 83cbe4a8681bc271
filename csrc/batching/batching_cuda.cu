// plan_buckets, pack_rows, unpack_rows, padding_stats on the GPU.
//
// plan_buckets: a thread a request. Its place in the stable order is the number of requests with a smaller (bucket,
// index), which it counts over all of them, a tile in shared memory at a time; the offsets of the buckets and of the
// requests are counts and sums over the same tiles. B squared comparisons, but no second launch and no block waits for
// another: 64 requests take 64 steps.
//
// pack_rows, unpack_rows: x threads a row, so that 128 threads always have work, whatever a row's bytes.
// padding_stats: a block a bucket.
#include "batching/args.h"
#include "common/copy.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "tree/tree.h"

namespace specdec {

constexpr int kPlanThreads = 128;

// Grid: blocks of requests; thread `requests` takes cu_nodes[B], and block 0 the offsets of the buckets.
__global__ void __launch_bounds__(kPlanThreads) plan_buckets_kernel(const PlanBucketsArgs p) {
  SPECDEC_SHARED(int32_t, buckets, kPlanThreads);
  SPECDEC_SHARED(int32_t, nodes, kPlanThreads);
  const int32_t thread = threadIdx.x, b = blockIdx.x * kPlanThreads + thread;
  const int32_t bucket = b < p.requests ? p.buckets.of(p.num_nodes[b]) : p.buckets.count;
  int32_t before = 0, smaller = 0;  // requests before this one in the order; in buckets below number `thread`
  int64_t total = 0;                // nodes of the requests before this one
  for (int32_t first = 0; first < p.requests; first += kPlanThreads) {
    const int32_t j = first + thread, count = min(kPlanThreads, p.requests - first);
    __syncthreads();  // the tile is free again
    if (j < p.requests) {
      nodes[thread] = node_count(p.num_nodes[j]);
      buckets[thread] = p.buckets.of(p.num_nodes[j]);
    }
    __syncthreads();
    for (int32_t i = 0; i < count; i++) {
      const int32_t other = buckets[i];
      before += other < bucket || (other == bucket && first + i < b);
      smaller += other < thread;
      total += first + i < b ? nodes[i] : 0;
    }
  }
  if (b < p.requests) p.order[before] = b;
  if (b <= p.requests) p.cu_nodes[b] = static_cast<int32_t>(total < 2147483647 ? total : 2147483647);
  if (blockIdx.x == 0 && thread <= p.buckets.count) p.bucket_offsets[thread] = smaller;
}

// Grid: buckets.
__global__ void __launch_bounds__(kPlanThreads) padding_stats_kernel(const PaddingStatsArgs p) {
  SPECDEC_SHARED(int64_t, scratch, kPlanThreads / 32);
  const int32_t k = blockIdx.x;
  const NodeRange range = node_range(p.bucket_offsets, k, p.requests);
  int64_t sums[kStatColumns] = {};
  for (int32_t i = threadIdx.x; i < range.count; i += kPlanThreads) p.add(p.order[range.begin + i], k, sums);
#pragma unroll
  for (int column = 0; column < kStatColumns; column++) {
    const int64_t sum = block_reduce(sums[column], Sum{}, int64_t{0}, scratch);
    if (threadIdx.x == 0) p.stats[int64_t{k} * kStatColumns + column] = sum;
  }
}

// Grid: (requests + 1, blocks of rows); the last request stands for the rows behind the batch.
__global__ void __launch_bounds__(kCopyThreads) pack_rows_kernel(const RowsArgs p, const int32_t word) {
  const int32_t b = blockIdx.x, step = gridDim.y * blockDim.y;
  int64_t begin, count;
  if (b == p.requests) {
    begin = tail_begin(p.cu, b, p.total);
    count = p.total - begin;
  } else {
    const NodeRange range = node_range(p.cu, b, p.total);
    begin = range.begin;
    count = range.count;
  }
  for (int64_t i = blockIdx.y * blockDim.y + threadIdx.y; i < count; i += step)
    copy_row(p.packed_row(begin + i), b < p.requests && i < p.rows ? p.padded_row(b, i) : nullptr, p.bytes, word,
             threadIdx.x, blockDim.x);
}

// Grid: (requests, blocks of rows).
__global__ void __launch_bounds__(kCopyThreads) unpack_rows_kernel(const RowsArgs p, const int32_t word) {
  const int32_t b = blockIdx.x, step = gridDim.y * blockDim.y;
  const NodeRange range = node_range(p.cu, b, p.total);
  for (int32_t i = blockIdx.y * blockDim.y + threadIdx.y; i < p.rows; i += step)
    copy_row(p.padded_row(b, i), i < range.count ? p.packed_row(int64_t{range.begin} + i) : nullptr, p.bytes, word,
             threadIdx.x, blockDim.x);
}

// ------------------------------------------------------------------ host
void plan_buckets_cuda(Tensor num_nodes, std::vector<int64_t> bucket_sizes, Tensor order, Tensor bucket_offsets,
                       Tensor cu_nodes) {
  const PlanBucketsArgs p = check_plan_buckets(num_nodes, bucket_sizes, order, bucket_offsets, cu_nodes);
  DeviceGuard guard(num_nodes);
  SPECDEC_LAUNCH(plan_buckets_kernel, dim3(p.requests / kPlanThreads + 1), dim3(kPlanThreads), 0,
                 current_stream(num_nodes), p);
  check_launch("plan_buckets");
}

void padding_stats_cuda(Tensor num_nodes, Tensor order, Tensor bucket_offsets, std::vector<int64_t> bucket_sizes,
                        int64_t tile_rows, int64_t group_size, Tensor stats) {
  const PaddingStatsArgs p =
      check_padding_stats(num_nodes, order, bucket_offsets, bucket_sizes, tile_rows, group_size, stats);
  DeviceGuard guard(num_nodes);
  SPECDEC_LAUNCH(padding_stats_kernel, dim3(p.buckets.count), dim3(kPlanThreads), 0, current_stream(num_nodes), p);
  check_launch("padding_stats");
}

static int32_t row_word(const RowsArgs& p) {
  return word_of(
      {address_of(p.padded), address_of(p.packed), p.stride_request, p.stride_row, p.stride_packed, p.bytes});
}

void pack_rows_cuda(Tensor x, Tensor cu, Tensor out) {
  const RowsArgs p = check_rows_of("pack_rows", x, "x", out, "out", cu);
  if (p.total == 0) return;
  const int32_t word = row_word(p);
  const dim3 block = copy_block(p.bytes, word);
  DeviceGuard guard(x);
  SPECDEC_LAUNCH(pack_rows_kernel, dim3(p.requests + 1, copy_blocks(p.rows, block.y)), block, 0, current_stream(x), p,
                 word);
  check_launch("pack_rows");
}

void unpack_rows_cuda(Tensor x, Tensor cu, Tensor out) {
  const RowsArgs p = check_rows_of("unpack_rows", out, "out", x, "x", cu);
  if (p.requests == 0 || p.rows == 0) return;
  const int32_t word = row_word(p);
  const dim3 block = copy_block(p.bytes, word);
  DeviceGuard guard(x);
  SPECDEC_LAUNCH(unpack_rows_kernel, dim3(p.requests, copy_blocks(p.rows, block.y)), block, 0, current_stream(x), p,
                 word);
  check_launch("unpack_rows");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("plan_buckets", TORCH_BOX(&specdec::plan_buckets_cuda));
  m.impl("pack_rows", TORCH_BOX(&specdec::pack_rows_cuda));
  m.impl("unpack_rows", TORCH_BOX(&specdec::unpack_rows_cuda));
  m.impl("padding_stats", TORCH_BOX(&specdec::padding_stats_cuda));
}
