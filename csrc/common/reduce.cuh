// Reductions over a warp and over a block.
#pragma once
#include "device.cuh"
#include "planted.h"

namespace specdec {

constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
// Symmetric also for a NaN, which loses: otherwise the lanes of a butterfly would end with different maxima.
struct Maximum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Minimum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fminf(a, b); }
};

// Every lane gets the reduction of all 32. The tree of shuffles is the same in every lane, so a float sum is the same
// too.
template <class T, class Operation>
__device__ __forceinline__ T warp_reduce(T value, Operation operation) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = operation(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  return warp_reduce(value, Sum{});
}
template <class T>
__device__ __forceinline__ T warp_max(T value) {
  return warp_reduce(value, Maximum{});
}

// Every thread of the block gets the reduction; `scratch` holds one T a warp and may be reused at once.
template <class T, class Operation>
__device__ __forceinline__ T block_reduce(T value, Operation operation, T identity, T* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = (blockDim.x + 31) / 32;
  value = warp_reduce(value, operation);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < num_warps ? scratch[lane] : identity, operation);
  if (!planted(Bug::no_barrier_before_reuse)) __syncthreads();  // scratch is free again
  return value;
}

// Sum of the values of the threads before this one; `total` gets that of all. `scratch` as for block_reduce; the
// block's threads are a multiple of 32.
template <class T>
__device__ __forceinline__ T block_exclusive_sum(T value, T* total, T* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kFullWarp, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  const T warps = lane < num_warps ? scratch[lane] : T(0);
  *total = warp_sum(warps);
  const T before = warp_sum(lane < warp ? warps : T(0));
  __syncthreads();  // scratch is free again
  return before + sum - value;
}

}  // namespace specdec
