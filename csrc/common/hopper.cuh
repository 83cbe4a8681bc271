// Hopper (sm_90a) device code: mbarriers, bulk copies, wgmma, register hand-over. As in device.cuh every wrapper has
// two bodies, the PTX and its model (tests/cuda_on_cpu/runtime/hopper.h says what the model checks).
//
// Only *_sm90.cu files include it. How the units play together in a warp-specialised kernel:
//
//   producer warp                                consumer warpgroups
//   wait(empty[s], parity)                       wait(full[s], parity)
//   arrive_expect(full[s], bytes)                wgmma_fence(); wgmma(...); wgmma_commit(); wgmma_wait<0>()
//   bulk_copy(stage s, source, bytes, full[s])   arrive(empty[s])
//   or tensor_copy(stage s, map, first, full[s])
//
// Tiles that are copied by cp.async or ordinary stores need fence_async_proxy() between the copy and the product: by
// the writer before it arrives, or by the reader behind its wait.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "device.cuh"

#if defined(SPECDEC_EMULATED)
#include <cuda_on_cpu/runtime/hopper.h>
#endif

namespace specdec::ptx {

// ------------------------------------------------------------------ mbarriers: 8 bytes of shared memory each
// A phase ends when `arrivals` arrivals have come and all announced bytes have been copied.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::mbarrier_init(barrier, arrivals, at);
#endif
}
// Makes inits visible to the copy engine; by the thread that made them, before the barrier that tells the others.
__device__ __forceinline__ void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::mbarrier_arrive(barrier, 1, 0, at);
#endif
}
// Arrives and announces `bytes` of bulk copies in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::mbarrier_arrive(barrier, 1, bytes, at);
#endif
}
// This thread's cp.async copies so far arrive, as one of the expected arrivals, when they have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* barrier SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::mbarrier_arrive_after_copies(barrier, at);
#endif
}
// Waits until the phase of this parity is complete (phases are numbered from 0; on a fresh barrier parity 1 passes).
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  uint32_t done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::mbarrier_test(barrier, parity, true, at);
#endif
}

// ------------------------------------------------------------------ copies
// `bytes` from global to shared memory by the copy engine; all three multiples of 16. One thread issues it.
// Kept for tests/cuda_on_cpu/kernels/hopper.cu: kernels copy by tensor maps.
__device__ __forceinline__ void bulk_copy(void* destination, const void* source, uint32_t bytes,
                                          uint64_t* barrier SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(destination)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::bulk_copy(destination, source, bytes, barrier, at);
#endif
}
// The box of a tensor map (tensor_map.cuh) whose first element has coordinates `first`, in the map's swizzle, to a
// multiple of 1024 bytes; it completes the box's bytes, outside elements included. The map is a __grid_constant__
// parameter. One thread issues it.
__device__ __forceinline__ void tensor_copy(void* destination, const CUtensorMap* map, const int32_t (&first)[5],
                                            uint64_t* barrier SPECDEC_AT) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];\n" ::"r"(shared_address(destination)),
      "l"(map), "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3]), "r"(first[4]), "r"(shared_address(barrier))
      : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::tensor_copy(destination, map, 5, first, barrier, at);
#endif
}
// A hint that copies by this map will come.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
#endif
}
// What this thread knows to be written in shared memory becomes visible to wgmma and the copy engine.
__device__ __forceinline__ void fence_async_proxy() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::fence_async_proxy();
#endif
}

// ------------------------------------------------------------------ wgmma
enum class Swizzle : uint32_t { none = 0, bytes128 = 1 };

// Descriptor of an operand in shared memory; what the offsets mean: tests/cuda_on_cpu/runtime/wgmma.cpp draws it.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes,
                                                      Swizzle swizzle) {
#if defined(__CUDA_ARCH__)
  const uint32_t address = shared_address(start);
#elif defined(SPECDEC_EMULATED)
  const auto address =
      static_cast<uint32_t>(static_cast<const char*>(start) - static_cast<const char*>(::emulated::dynamic_shared()));
#else
  const uint32_t address = 0;
#endif
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(leading_bytes >> 4 & 0x3fff) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4 & 0x3fff) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
// Before the first product, and before one whose registers other instructions have touched.
__device__ __forceinline__ void wgmma_fence() {
#if defined(__CUDA_ARCH__)
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::wgmma_fence();
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::wgmma_commit();
#endif
}
// Waits until at most `kGroups` of this warp's groups are in flight.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait(SPECDEC_AT_ONLY) {
#if defined(__CUDA_ARCH__)
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kGroups) : "memory");
#elif defined(SPECDEC_EMULATED)
  ::emulated::wgmma_wait(kGroups, at);
#endif
}

#define SPECDEC_REGISTERS_64                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPECDEC_REGISTERS_128                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
  "%59, %60, %61, %62, %63"
#define SPECDEC_OPERANDS_64                                                                                   \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define SPECDEC_OPERANDS_128                                                                                  \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// The operands behind the accumulators: a descriptors (or four registers), b descriptor, accumulate.
#define SPECDEC_WGMMA_SHARED(n, type, in_a, in_b, in_c, in_ta, in_tb)                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " in_c ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
               "." type " {" SPECDEC_REGISTERS_##n "}, " in_a ", " in_b ", p, 1, 1, " in_ta ", " in_tb ";\n}\n"      \
               : SPECDEC_OPERANDS_##n                                                                                \
               : "l"(a_matrix), "l"(b_matrix), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB))
#define SPECDEC_WGMMA_REGISTERS(n, type, in_a, in_b, in_c, in_tb)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " in_c ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
               "." type " {" SPECDEC_REGISTERS_##n "}, {" in_a "}, " in_b ", p, 1, 1, " in_tb ";\n}\n"               \
               : SPECDEC_OPERANDS_##n                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix), "r"(static_cast<int>(accumulate)),       \
                 "n"(kTransposeB))

// d (64 x N, this warpgroup's) = a b, plus d if `accumulate`: a 64 x 16, b 16 x N, both in shared memory. An operand is
// K-major (rows of k, as Q and K of attention), or MN-major where `kTranspose` says so (V). N: 64 or 128. Kept for
// tests: the kernel has a in registers.
template <int kColumns, bool kTransposeA, bool kTransposeB, class T>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], uint64_t a_matrix, uint64_t b_matrix, bool accumulate,
                                      T SPECDEC_AT) {
  static_assert(kColumns == 64 || kColumns == 128, "no instruction written for this width");
  constexpr bool kBf16 = std::is_same_v<T, BFloat16>;
  static_assert(kBf16 || std::is_same_v<T, Half>, "wgmma takes BFloat16 or Half here");
#if defined(__CUDA_ARCH__)
  if constexpr (kColumns == 64 && kBf16)
    SPECDEC_WGMMA_SHARED(64, "bf16", "%32", "%33", "%34", "%35", "%36");
  else if constexpr (kColumns == 64)
    SPECDEC_WGMMA_SHARED(64, "f16", "%32", "%33", "%34", "%35", "%36");
  else if constexpr (kBf16)
    SPECDEC_WGMMA_SHARED(128, "bf16", "%64", "%65", "%66", "%67", "%68");
  else
    SPECDEC_WGMMA_SHARED(128, "f16", "%64", "%65", "%66", "%67", "%68");
#elif defined(SPECDEC_EMULATED)
  const auto element = kBf16 ? ::emulated::Element::bf16 : ::emulated::Element::f16;
  ::emulated::wgmma(
      {d, nullptr, a_matrix, b_matrix, kColumns, 1, 1, element, accumulate, kTransposeA, kTransposeB, true}, at,
      nullptr);
#endif
}
// The same with a in registers, laid out as the a fragment of mma_m16n8k16 (this warp's 16 rows).
template <int kColumns, bool kTransposeB, class T>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b_matrix,
                                      bool accumulate, T SPECDEC_AT) {
  static_assert(kColumns == 64 || kColumns == 128, "no instruction written for this width");
  constexpr bool kBf16 = std::is_same_v<T, BFloat16>;
  static_assert(kBf16 || std::is_same_v<T, Half>, "wgmma takes BFloat16 or Half here");
#if defined(__CUDA_ARCH__)
  if constexpr (kColumns == 64 && kBf16)
    SPECDEC_WGMMA_REGISTERS(64, "bf16", "%32, %33, %34, %35", "%36", "%37", "%38");
  else if constexpr (kColumns == 64)
    SPECDEC_WGMMA_REGISTERS(64, "f16", "%32, %33, %34, %35", "%36", "%37", "%38");
  else if constexpr (kBf16)
    SPECDEC_WGMMA_REGISTERS(128, "bf16", "%64, %65, %66, %67", "%68", "%69", "%70");
  else
    SPECDEC_WGMMA_REGISTERS(128, "f16", "%64, %65, %66, %67", "%68", "%69", "%70");
#elif defined(SPECDEC_EMULATED)
  const auto element = kBf16 ? ::emulated::Element::bf16 : ::emulated::Element::f16;
  ::emulated::wgmma({d, a, 0, b_matrix, kColumns, 1, 1, element, accumulate, false, kTransposeB, true}, at, nullptr);
#endif
}

// ------------------------------------------------------------------ registers
// The warpgroup gives registers back to the block, or takes them; a multiple of 8, the same in all its warps.
template <int kRegisters>
__device__ __forceinline__ void give_registers(SPECDEC_AT_ONLY) {
#if defined(__CUDA_ARCH__)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
#elif defined(SPECDEC_EMULATED)
  ::emulated::set_max_registers(kRegisters, at);
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers(SPECDEC_AT_ONLY) {
#if defined(__CUDA_ARCH__)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
#elif defined(SPECDEC_EMULATED)
  ::emulated::set_max_registers(kRegisters, at);
#endif
}

}  // namespace specdec::ptx
