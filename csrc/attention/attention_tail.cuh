// Rows of the output that belong to no request.
#pragma once
#include "attention_params.cuh"
#include "common/reduce.cuh"

namespace specdec {

// Rows behind the last request hold no query: 0 and -inf, so that no garbage reaches what follows. A padded graph
// bucket has many of them, so `count` warps share their heads, this one is number `index`:
//
//   row     used         | used + 1     | ...
//   head    0 1 .. Hq-1  | 0 1 .. Hq-1  |
//   warp    0 1 2 .. count - 1, 0, 1, ..
template <class T>
__device__ __forceinline__ void clear_tail(const AttentionParams& p, uint32_t index, uint32_t count) {
  const int lane = threadIdx.x % 32;
  if (p.num_requests > 0) {  // mostly: no such rows
    const AttentionRequest last = attention_request(p, p.num_requests - 1);
    if (last.first_row + last.num_nodes == p.num_rows) return;
  }
  int64_t row = 0;
#pragma unroll 4
  for (int32_t b = lane; b < p.num_requests; b += 32) {
    const AttentionRequest r = attention_request(p, b);
    row = r.first_row + r.num_nodes > row ? r.first_row + r.num_nodes : row;
  }
  row = warp_max(row);
  const auto heads = static_cast<uint32_t>(p.num_q_heads);
  for (uint32_t head = index;; head += count) {
    row += head / heads;
    head %= heads;
    if (row >= p.num_rows) return;
    T* out = reinterpret_cast<T*>(p.out) + row * p.out_stride_n + head * p.out_stride_h;
    if (reinterpret_cast<uintptr_t>(out) % 8 == 0) {  // head dims are multiples of 16
      const int32_t words = p.v_dim * static_cast<int32_t>(sizeof(T)) / 8;
#pragma unroll 1
      for (int32_t i = lane; i < words; i += 32) reinterpret_cast<uint2*>(out)[i] = {};
    } else {
#pragma unroll 1
      for (int32_t i = lane; i < p.v_dim; i += 32) store_value(out + i, 0.0f);
    }
    if (lane == 0 && p.lse) p.lse[row * p.lse_stride_n + head] = -INFINITY;
  }
}

}  // namespace specdec
