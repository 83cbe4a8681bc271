// Rows of the output that belong to no request.
#pragma once
#include "attention_params.cuh"
#include "common/reduce.cuh"

namespace specdec {

// Rows behind the last request hold no query: 0 and -inf, so that no garbage reaches what follows. One block of at most
// 384 threads.
template <class T>
__device__ __forceinline__ void clear_tail(const AttentionParams& p) {
  SPECDEC_SHARED(int64_t, scratch, 12);
  if (p.num_requests > 0) {  // mostly: no such rows
    const AttentionRequest last = attention_request(p, p.num_requests - 1);
    if (last.first_row + last.num_nodes == p.num_rows) return;
  }
  int64_t mine = 0;
#pragma unroll 1
  for (int32_t b = threadIdx.x; b < p.num_requests; b += blockDim.x) {
    const AttentionRequest r = attention_request(p, b);
    mine = r.first_row + r.num_nodes > mine ? r.first_row + r.num_nodes : mine;
  }
  const int64_t used = block_reduce(mine, Maximum{}, int64_t{0}, scratch);
  for (int64_t row = used; row < p.num_rows; row++)
#pragma unroll 1
    for (int32_t head = 0; head < p.num_q_heads; head++) {
      T* out = reinterpret_cast<T*>(p.out) + row * p.out_stride_n + head * p.out_stride_h;
#pragma unroll 1
      for (int32_t column = threadIdx.x; column < p.v_dim; column += blockDim.x) store_value(out + column, 0.0f);
      if (threadIdx.x == 0 && p.lse) p.lse[row * p.lse_stride_n + head] = -INFINITY;
    }
}

}  // namespace specdec
