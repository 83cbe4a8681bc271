// merge_attention on the GPU: a memory-bound pass, two rows in, one out.
//
// A block of 128 threads; x threads share the row of one head (eight elements each at a time, 16 bytes of bfloat16), y
// rows of heads run beside each other; every thread works out the two weights, whose lse the row's threads read
// together.
//
//     threadIdx.x   0        1        ...  x - 1
//     elements      0..7     8..15         8x - 8..8x - 1, then 8x further
//
// Rows whose strides or addresses do not allow words go element by element.
#include "attention/merge.h"
#include "common/copy.cuh"
#include "common/launch.cuh"

namespace specdec {

// Grid: (1, groups of y rows of heads, on which blocks step).
template <class T>
__global__ void __launch_bounds__(kCopyThreads) merge_attention_kernel(const MergeArgs p, const bool whole_words) {
  const int64_t rows = p.num_rows * p.num_heads, step = int64_t{gridDim.y} * blockDim.y;
  const int32_t dim = static_cast<int32_t>(p.dim), heads = static_cast<int32_t>(p.num_heads);
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows; row += step) {
    const int64_t n = row / heads;
    const int32_t h = static_cast<int32_t>(row - n * heads);
    const MergeWeights w = p.weights(n, h);
    const T* x = static_cast<const T*>(p.a.out) + n * p.a.stride_row + h * p.a.stride_head;
    const T* y = static_cast<const T*>(p.b.out) + n * p.b.stride_row + h * p.b.stride_head;
    T* z = static_cast<T*>(p.to.out) + n * p.to.stride_row + h * p.to.stride_head;
    for (int32_t d = static_cast<int32_t>(threadIdx.x) * kEight; d < dim; d += blockDim.x * kEight) {
      if (whole_words) {
        const Eight<T> a = load_eight(x + d), b = load_eight(y + d);
        Eight<T> sum;
#pragma unroll
        for (int e = 0; e < kEight; e++)
          sum.value[e] = stored<T>(merged(w, to_float(a.value[e]), to_float(b.value[e])));
        store_eight(z + d, sum);
      } else {
        for (int e = 0; e < kEight && d + e < dim; e++)
          z[d + e] = stored<T>(merged(w, to_float(x[d + e]), to_float(y[d + e])));
      }
    }
    if (p.to.lse && threadIdx.x == 0) p.to.lse[n * p.to.lse_stride + h] = w.lse;
  }
}

// ------------------------------------------------------------------ host
void merge_attention_cuda(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, std::optional<Tensor> sinks,
                          Tensor out, std::optional<Tensor> lse) {
  const MergeArgs p = check_merge(out_a, lse_a, out_b, lse_b, sinks, out, lse);
  dispatch_float("merge_attention", "out_a", out_a.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.num_rows * p.num_heads == 0) return;
    const int64_t size = sizeof(T);
    const bool whole_words = word_of({address_of(p.a.out), address_of(p.b.out), address_of(p.to.out),
                                      p.a.stride_row * size, p.a.stride_head * size, p.b.stride_row * size,
                                      p.b.stride_head * size, p.to.stride_row * size, p.to.stride_head * size}) == 16 &&
                             p.dim % kEight == 0;
    const dim3 block = copy_block(p.dim, kEight);
    const dim3 grid(1, copy_blocks(p.num_rows * p.num_heads, block.y));
    DeviceGuard guard(out_a);
    SPECDEC_LAUNCH((merge_attention_kernel<T>), grid, block, 0, current_stream(out_a), p, whole_words);
    check_launch("merge_attention");
  });
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("merge_attention", TORCH_BOX(&specdec::merge_attention_cuda));
}
