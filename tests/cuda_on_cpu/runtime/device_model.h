// The CUDA language and its intrinsics for the host compiler: what csrc/common/device.cuh includes when
// SPECDEC_EMULATED is defined. Names and meanings are CUDA's; each is a thin call into emulated.h.
#pragma once
#if defined(__CUDACC__)
#error "device_model.h is for the host compiler"
#endif
#include <cmath>
#include <cstdio>

#include "emulated.h"

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ use_SPECDEC_SHARED_or_SPECDEC_DYNAMIC_SHARED
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__

#define threadIdx (::emulated::current->thread_index)
#define blockIdx (::emulated::current->block->block_index)
#define blockDim (::emulated::current->block->block_dim)
#define gridDim (::emulated::current->block->grid_dim)
static constexpr int warpSize = 32;

#define EMULATED_INLINE inline __attribute__((always_inline))

// ---- barriers and warp collectives
inline void __syncthreads(EMULATED_AT) {
  ::emulated::barrier(0, 0, true, at);
}
inline int __syncthreads_count(int p, EMULATED_AT) {
  return ::emulated::barrier_reduce(0, p != 0, at);
}
inline int __syncthreads_and(int p, EMULATED_AT) {
  return ::emulated::barrier_reduce(1, p != 0, at);
}
inline int __syncthreads_or(int p, EMULATED_AT) {
  return ::emulated::barrier_reduce(2, p != 0, at);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATED_AT) {
  ::emulated::sync_warp(mask, at);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATED_AT) {
  return ::emulated::shuffle(mask, value, lane, width, 0, at);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_AT) {
  return ::emulated::shuffle(mask, value, static_cast<int>(delta), width, 1, at);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_AT) {
  return ::emulated::shuffle(mask, value, static_cast<int>(delta), width, 2, at);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATED_AT) {
  return ::emulated::shuffle(mask, value, lanes, width, 3, at);
}
inline unsigned __ballot_sync(unsigned mask, int p, EMULATED_AT) {
  return ::emulated::ballot(mask, p != 0, at);
}
inline int __any_sync(unsigned mask, int p, EMULATED_AT) {
  return ::emulated::ballot(mask, p != 0, at) != 0;
}
inline int __all_sync(unsigned mask, int p, EMULATED_AT) {
  return ::emulated::ballot(mask, p != 0, at) == mask;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EMULATED_AT) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return ::emulated::match_any(mask, bits, at);
}
namespace emulated {
struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a + b);
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
}  // namespace emulated
#define EMULATED_REDUCE(name, Operation)                                      \
  template <class T>                                                          \
  inline T name(unsigned mask, T value, EMULATED_AT) {                        \
    return ::emulated::warp_reduce(mask, value, ::emulated::Operation{}, at); \
  }
EMULATED_REDUCE(__reduce_add_sync, Add)
EMULATED_REDUCE(__reduce_min_sync, Min)
EMULATED_REDUCE(__reduce_max_sync, Max)
EMULATED_REDUCE(__reduce_and_sync, And)
EMULATED_REDUCE(__reduce_or_sync, Or)
EMULATED_REDUCE(__reduce_xor_sync, Xor)
#undef EMULATED_REDUCE
inline unsigned __activemask() {
  return 1u << ::emulated::current->lane;
}  // legal, and the least it may be
inline void __threadfence() {
  ::emulated::fence();
}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {
  ::emulated::yield();
}
inline void __trap(EMULATED_AT) {
  ::emulated::trap("__trap", at);
}

// ---- atomics (relaxed, as in CUDA)
#define EMULATED_ATOMIC(name, expression)                                                                              \
  template <class T>                                                                                                   \
  EMULATED_INLINE T name(T* address, std::type_identity_t<T> value) {                                                  \
    return ::emulated::atomic_update(address, ::emulated::Order::relaxed, [value](T old) -> T { return expression; }); \
  }
EMULATED_ATOMIC(atomicAdd, static_cast<T>(old + value))
EMULATED_ATOMIC(atomicSub, static_cast<T>(old - value))
EMULATED_ATOMIC(atomicMax, old < value ? value : old)
EMULATED_ATOMIC(atomicMin, value < old ? value : old)
EMULATED_ATOMIC(atomicOr, old | value)
EMULATED_ATOMIC(atomicAnd, old& value)
EMULATED_ATOMIC(atomicXor, old ^ value)
EMULATED_ATOMIC(atomicExch, (static_cast<void>(old), value))
EMULATED_ATOMIC(atomicInc, old >= value ? T(0) : static_cast<T>(old + 1))
#undef EMULATED_ATOMIC
template <class T>
EMULATED_INLINE T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return ::emulated::atomic_update(address, ::emulated::Order::relaxed,
                                   [=](T old) -> T { return old == expected ? value : old; });
}

// ---- cached loads and stores
#define EMULATED_LOAD(name)                  \
  template <class T>                         \
  EMULATED_INLINE T name(const T* address) { \
    return *address;                         \
  }
EMULATED_LOAD(__ldg)
EMULATED_LOAD(__ldcg)
EMULATED_LOAD(__ldca)
EMULATED_LOAD(__ldcs)
#undef EMULATED_LOAD
#define EMULATED_STORE(name)                                             \
  template <class T>                                                     \
  EMULATED_INLINE void name(T* address, std::type_identity_t<T> value) { \
    *address = value;                                                    \
  }
EMULATED_STORE(__stcs)
EMULATED_STORE(__stcg)
EMULATED_STORE(__stwt)
#undef EMULATED_STORE

// ---- arithmetic
inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __log2f(float x) {
  return log2f(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}
inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
inline int __float_as_int(float x) {
  return __builtin_bit_cast(int, x);
}
inline unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
inline float __int_as_float(int x) {
  return __builtin_bit_cast(float, x);
}
inline float __uint_as_float(unsigned x) {
  return __builtin_bit_cast(float, x);
}
inline double __longlong_as_double(long long x) {
  return __builtin_bit_cast(double, x);
}
inline long long __double_as_longlong(double x) {
  return __builtin_bit_cast(long long, x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __clz(int x) {
  return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}
inline int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) {
  return static_cast<int>(static_cast<int64_t>(a) * b >> 32);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned s = selector >> (4 * i) & 15;
    uint8_t byte = static_cast<uint8_t>(bytes >> (8 * (s & 7)));
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;  // replicate the sign
    result |= static_cast<unsigned>(byte) << (8 * i);
  }
  return result;
}
template <class A, class B>
inline constexpr auto min(A a, B b)
    -> std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
inline constexpr auto max(A a, B b)
    -> std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- shared memory declarations and launch (see csrc/common/device.cuh for the nvcc side)
#define SPECDEC_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::emulated::dynamic_shared())
#define SPECDEC_SHARED(T, name, count)       \
  static const char emulated_key_##name = 0; \
  T(&name)                                   \
  [count] = *static_cast<T(*)[count]>(       \
      ::emulated::static_shared(&emulated_key_##name, sizeof(T) * (count), alignof(T) < 16 ? 16 : alignof(T)))
