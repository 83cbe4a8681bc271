// The one header of device code, and with hopper.cuh (sm_90a) the only file with inline PTX.
//
// Under nvcc it is CUDA. Under g++ with SPECDEC_EMULATED it is the language model of tests/cuda_on_cpu, so the same
// kernel text runs on a CPU. Every wrapper below therefore has two bodies: the PTX, and its model. The model is what a
// developer debugs in; that the PTX strings do the same is shown by running the compiled PTX as well
// (docs/cuda_on_cpu.md, path B).
//
// Rules for kernels: include this header, and hopper.cuh in *_sm90.cu, only (no cuda_bf16.h, no cooperative_groups);
// declare shared memory with SPECDEC_SHARED / SPECDEC_DYNAMIC_SHARED; launch with SPECDEC_LAUNCH (launch.cuh); live in
// namespace specdec, never in an anonymous namespace (PTX entries are found by mangled name).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
// Dynamic shared memory of the block, 128-byte aligned.
#define SPECDEC_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(128) unsigned char specdec_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(specdec_dynamic_shared)
#define SPECDEC_SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define SPECDEC_AT
#define SPECDEC_AT_ONLY
#elif defined(SPECDEC_EMULATED)
#include <cuda_on_cpu/runtime/device_model.h>
#define SPECDEC_AT , EMULATED_AT  // the caller's source position, for reports
#define SPECDEC_AT_ONLY EMULATED_AT
#else
#error "device code needs nvcc, or g++ with SPECDEC_EMULATED"
#endif

#include "hostdevice.h"
#include "numerics.h"
#include "planted.h"

#if SPECDEC_PLANTED_BUG == 12  // Bug::swapped_mma_operands lies in the text of the instruction
#define SPECDEC_MMA_A "{%5,%4,%6,%7}"
#else
#define SPECDEC_MMA_A "{%4,%5,%6,%7}"
#endif

namespace specdec::ptx {

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
#endif

// ------------------------------------------------------------------ asynchronous copies, global -> shared
// 16 bytes past L1; zeros where `valid` is false (the source is then not read).
__device__ __forceinline__ void cp_async_16(void* destination, const void* source, bool valid SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(destination)), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::cp_async(destination, source, 16, valid ? 16 : 0, at);
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::cp_async_commit();
#endif
}
// Waits until at most `kGroups` of this thread's groups are in flight.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::cp_async_wait(kGroups, false);
#endif
}

// ------------------------------------------------------------------ tensor cores
// Four 8x8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::ldmatrix(r, row, 4, false, at, nullptr);
#endif
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::ldmatrix(r, row, 4, true, at, nullptr);
#endif
}
// Two 8x8 matrices; lane l < 16 names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::ldmatrix(r, row, 2, false, at, nullptr);
#endif
}
__device__ __forceinline__ void ldmatrix_x2_transposed(uint32_t (&r)[2], const void* row SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::ldmatrix(r, row, 2, true, at, nullptr);
#endif
}
// d += a b for a 16x16 row-major and a 16x8 column-major fragment; fragment layouts: PTX manual, mma.m16n8k16.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             BFloat16 SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, " SPECDEC_MMA_A
               ", {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(SPECDEC_EMULATED)
  const uint32_t b[2] = {b0, b1};
  ::emulated::mma_m16n8(d, a, b, d, 16, ::emulated::Element::bf16, at);
#endif
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             Half SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, " SPECDEC_MMA_A
               ", {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(SPECDEC_EMULATED)
  const uint32_t b[2] = {b0, b1};
  ::emulated::mma_m16n8(d, a, b, d, 16, ::emulated::Element::f16, at);
#endif
}
// d += a b in tf32: a 16x8, b 8x8, one element a register (float bits; the low 13 bits are ignored). Kept for tests: no
// kernel uses it.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1 SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, " SPECDEC_MMA_A
               ", {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(SPECDEC_EMULATED)
  const uint32_t b[2] = {b0, b1};
  ::emulated::mma_m16n8(d, a, b, d, 8, ::emulated::Element::tf32, at);
#endif
}

// ------------------------------------------------------------------ arithmetic
// 2^x and log2(x), the fast forms (2 ulp, denormals flushed).
__device__ __forceinline__ float ex2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}
__device__ __forceinline__ float lg2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}
// Two floats rounded to nearest even and packed, `low` in the low half: an mma operand register.
__device__ __forceinline__ uint32_t pack_pair(float low, float high, BFloat16) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(to_bfloat16(high).bits) << 16 | to_bfloat16(low).bits;
#endif
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, Half) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(to_half(high).bits) << 16 | to_half(low).bits;
#endif
}

// Two float16 numbers as floats; exact.
__device__ __forceinline__ void floats_from_half_pair(uint32_t pair, float& low, float& high) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}\n"
      : "=f"(low), "=f"(high)
      : "r"(pair));
#else
  low = to_float(Half{static_cast<uint16_t>(pair)});
  high = to_float(Half{static_cast<uint16_t>(pair >> 16)});
#endif
}
__device__ __forceinline__ uint32_t multiply_half_pairs(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t product;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#else
  float a_low, a_high, b_low, b_high;
  floats_from_half_pair(a, a_low, a_high);
  floats_from_half_pair(b, b_low, b_high);
  return pack_pair(a_low * b_low, a_high * b_high, Half{});
#endif
}
// The two e4m3 bytes in the low half as float16, exact; NaN stays NaN. One instruction from sm_89 on. Before: the bits
// moved into place are the number times 2^-8 (subnormals too), and a byte of 0x7f carries into the sign of a sum.
__device__ __forceinline__ uint32_t half_pair_from_e4m3(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("{.reg .b16 l;\n cvt.u16.u32 l, %1;\n cvt.rn.f16x2.e4m3x2 %0, l;}\n" : "=r"(pair) : "r"(bytes));
  return pair;
#else
  const uint32_t x = __byte_perm(bytes, 0, 0x1404), sign = x & 0x80008000u;  // each byte above a zero byte
  const uint32_t nan = ((x & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
  return multiply_half_pairs((x >> 1 & 0x3f803f80u) | sign, 0x5c005c00u) | (nan - (nan >> 6));
#endif
}
// accumulator + 0 * pair: stays zero unless one of the pair is infinite or NaN.
__device__ __forceinline__ uint32_t add_zero_times(uint32_t pair, uint32_t accumulator, BFloat16) {
#if defined(__CUDA_ARCH__)
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(accumulator) : "r"(pair), "r"(0));
  return accumulator;
#else
  return ((pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u) ? 0x7fff7fffu : accumulator;
#endif
}
__device__ __forceinline__ uint32_t add_zero_times(uint32_t pair, uint32_t accumulator, Half) {
#if defined(__CUDA_ARCH__)
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(accumulator) : "r"(pair), "r"(0));
  return accumulator;
#else
  return ((pair & 0x7c00u) == 0x7c00u || (pair & 0x7c000000u) == 0x7c000000u) ? 0x7fff7fffu : accumulator;
#endif
}

// The same number, but what is computed from it is not moved out of a loop (and kept in registers that it lacks).
__device__ __forceinline__ int in_place(int x) {
#if defined(__CUDA_ARCH__)
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
#endif
  return x;
}

// ------------------------------------------------------------------ memory order between blocks
// atomicAdd that also releases what this thread knows and acquires what earlier tickets released: the last block of a
// ticket counter may read what the others wrote. Call it from one thread, after a barrier.
__device__ __forceinline__ int atomic_add_acq_rel(int* address, int value) {
#if defined(__CUDA_ARCH__)
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
#elif defined(SPECDEC_EMULATED)
  return ::emulated::atomic_update(address, ::emulated::Order::acq_rel, [value](int old) { return old + value; });
#else
  return 0;
#endif
}

// ------------------------------------------------------------------ cached loads
// 16 bytes that will not be read again (weights, logits, KV): not kept in L1.
__device__ __forceinline__ uint4 load_stream_16(const void* address) {
#if defined(__CUDA_ARCH__)
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
#else
  return *static_cast<const uint4*>(address);
#endif
}

// ------------------------------------------------------------------ named barriers (warp-specialised kernels)
// `count` threads (a multiple of 32) meet at barrier `id` (1..15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int count SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::barrier(id, count, true, at);
#endif
}

}  // namespace specdec::ptx
