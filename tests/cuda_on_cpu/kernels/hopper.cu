// Every wrapper of csrc/common/hopper.cuh, for the comparison of path A with path B and for planted misuse.
//
// One block: warpgroup 0 multiplies, warp 4 brings tiles by bulk copies, cp.async or ordinary stores. A is 64 x 64, B
// 64 x N elements of 16 bits, cut into panels of 64 rows of 128 bytes in the 128-byte swizzle:
//
//   plain        A rows m, columns k: 1 panel     B rows n, columns k: N / 64 panels below each other
//   transposed   A rows k, columns m: 1 panel     B rows k, columns n: N / 64 panels beside each other
#include "common/hopper.cuh"
#include "common/launch.cuh"

namespace specdec {

enum class Copy : int { bulk, async, stores };
enum class Fault : int {
  none,
  no_proxy_fence,
  early_release,
  no_wait,
  no_wgmma_fence,
  short_expectation,
  unwaited,
  unreleased
};

struct HopperParams {
  const uint16_t* a;  // [tiles, 64, 64]; swizzled already for bulk copies
  const uint16_t* b;  // [tiles, N / 64, 64, 64], as well
  float* out;         // [64, N]
  int tiles;
  Copy copy;
  Fault fault;
};

constexpr int kStages = 2, kPanelBytes = 64 * 128;

// Byte of a panel in the 128-byte swizzle: 16-byte chunk c of row r lies at c ^ (r % 8).
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

template <int kColumns>
__device__ __forceinline__ unsigned char* stage_of(unsigned char* stages, int tile) {
  return stages + tile % kStages * (1 + kColumns / 64) * kPanelBytes;
}

template <class T, int kColumns, bool kTransposed, bool kInRegisters>
__device__ __forceinline__ void multiply(const HopperParams& p, unsigned char* stages, uint64_t* full, uint64_t* empty,
                                         float (&d)[kColumns / 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr uint32_t kStep = kTransposed ? 16 * 128 : 32;  // bytes between steps of 16 k
  for (int tile = 0; tile < p.tiles; tile++) {
    const int stage = tile % kStages;
    unsigned char* a_tile = stage_of<kColumns>(stages, tile);
    unsigned char* b_tile = a_tile + kPanelBytes;
    if (p.fault != Fault::no_wait) ptx::mbarrier_wait(&full[stage], tile / kStages & 1);
    if (p.copy == Copy::async && p.fault != Fault::no_proxy_fence) ptx::fence_async_proxy();
    if (p.fault != Fault::no_wgmma_fence) ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint64_t b = ptx::matrix_descriptor(b_tile + k * kStep, kPanelBytes, 1024, ptx::Swizzle::bytes128);
      if constexpr (kInRegisters) {
        uint32_t a[4];
        for (int r = 0; r < 4; r++) {
          const int row = warp * 16 + lane / 4 + 8 * (r % 2), column = k * 16 + 2 * (lane % 4) + 8 * (r / 2);
          a[r] = *reinterpret_cast<const uint32_t*>(a_tile + swizzled(row, column / 8) + column % 8 * 2);
        }
        ptx::wgmma<kColumns, kTransposed>(d, a, b, tile + k > 0, T{});
      } else {
        const uint64_t a = ptx::matrix_descriptor(a_tile + k * kStep, kPanelBytes, 1024, ptx::Swizzle::bytes128);
        ptx::wgmma<kColumns, kTransposed, kTransposed>(d, a, b, tile + k > 0, T{});
      }
    }
    ptx::wgmma_commit();
    if (p.fault == Fault::early_release) ptx::mbarrier_arrive(&empty[stage]);
    if (p.fault != Fault::unwaited) ptx::wgmma_wait<0>();
    if (p.fault != Fault::early_release && p.fault != Fault::unreleased) ptx::mbarrier_arrive(&empty[stage]);
  }
}

template <int kColumns>
__device__ __forceinline__ void produce(const HopperParams& p, unsigned char* stages, uint64_t* full, uint64_t* empty) {
  constexpr int kPanels = 1 + kColumns / 64;
  const int lane = threadIdx.x % 32;
  for (int tile = 0; tile < p.tiles; tile++) {
    const int stage = tile % kStages;
    ptx::mbarrier_wait(&empty[stage], (tile / kStages & 1) ^ 1);
    __syncwarp();  // a lane that looked only after the next phase had ended would wait for this parity forever
    if (p.copy == Copy::bulk && lane == 0)
      ptx::mbarrier_arrive_expect(&full[stage],
                                  (kPanels - (p.fault == Fault::short_expectation ? 1 : 0)) * kPanelBytes);
    for (int panel = 0; panel < kPanels; panel++) {
      const uint16_t* source = panel == 0 ? p.a + tile * 4096 : p.b + (tile * (kPanels - 1) + panel - 1) * 4096;
      unsigned char* target = stage_of<kColumns>(stages, tile) + panel * kPanelBytes;
      if (p.copy == Copy::bulk) {
        if (lane == 0) ptx::bulk_copy(target, source, kPanelBytes, &full[stage]);
        continue;
      }
      for (int i = lane; i < 64 * 8; i += 32) {
        unsigned char* to = target + swizzled(i / 8, i % 8);
        if (p.copy == Copy::async)
          ptx::cp_async_16(to, source + i * 8, true);
        else
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(source + i * 8);
      }
    }
    if (p.copy == Copy::async) ptx::mbarrier_arrive_after_copies(&full[stage]);
    if (p.copy == Copy::stores) {
      if (p.fault != Fault::no_proxy_fence) ptx::fence_async_proxy();
      ptx::mbarrier_arrive(&full[stage]);
    }
  }
}

template <class T, int kColumns, bool kTransposed, bool kInRegisters>
__global__ void __launch_bounds__(256) hopper_kernel(const HopperParams p) {
  SPECDEC_DYNAMIC_SHARED(unsigned char, panels);  // aligned to 1024 bytes below, as the swizzle counts addresses
  SPECDEC_SHARED(uint64_t, barriers, 2 * kStages);
#if defined(__CUDA_ARCH__)
  unsigned char* stages = panels + (1024 - ptx::shared_address(panels) % 1024) % 1024;
#else
  unsigned char* stages = panels;
#endif
  uint64_t *full = barriers, *empty = barriers + kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) {
      ptx::mbarrier_init(&full[s], p.copy == Copy::bulk ? 1 : 32);
      ptx::mbarrier_init(&empty[s], 128);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    ptx::give_registers<40>();
    if (threadIdx.x < 160) produce<kColumns>(p, stages, full, empty);
    return;
  }
  ptx::take_registers<232>();
  float d[kColumns / 2];
  multiply<T, kColumns, kTransposed, kInRegisters>(p, stages, full, empty, d);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  for (int i = 0; i < kColumns / 2; i++)
    p.out[(row + 8 * (i % 4 / 2)) * kColumns + 8 * (i / 4) + column + i % 2] = d[i];
}

template <class T, int kColumns>
void launch_hopper(const HopperParams& p, bool transposed, bool registers) {
  auto go = [&](auto* kernel) {
    SPECDEC_LAUNCH(kernel, dim3(1), dim3(256), 1024 + kStages * (1 + kColumns / 64) * kPanelBytes, 0, p);
  };
  if (transposed)
    registers ? go(hopper_kernel<T, kColumns, true, true>) : go(hopper_kernel<T, kColumns, true, false>);
  else
    registers ? go(hopper_kernel<T, kColumns, false, true>) : go(hopper_kernel<T, kColumns, false, false>);
}

// cp.async copies promised to mbarriers: warpgroup 0 copies two tiles of 16 bytes a thread, the others read them.
//
//   kept           warpgroups 1, 2 wait for full[0], full[1] and read            fine
//   own_wait       ... and each thread of warpgroup 0 waits and reads its own    fine
//   met            ... then meets the others and reads a neighbour's             fine
//   early_read     reads its own before its wait
//   neighbour      reads a neighbour's after its own wait alone
//   other_barrier  warpgroup 1 takes full[0] for the second tile as well
//   other_phase    warpgroup 1 names a phase of full[1] that counts as complete
//   greedy         warpgroups take more registers than the block has
enum class Promise : int { kept, own_wait, met, early_read, neighbour, other_barrier, other_phase, greedy };

__global__ void __launch_bounds__(384) promise_kernel(const int4* source, int4* out, Promise way) {
  SPECDEC_SHARED(int4, tiles, 2 * 128);
  SPECDEC_SHARED(uint64_t, full, 2);
  const int group = threadIdx.x / 128, i = threadIdx.x % 128;
  if (threadIdx.x == 0)
    for (int t = 0; t < 2; t++) ptx::mbarrier_init(&full[t], 128);
  __syncthreads();
  if (group == 0) {
    if (way == Promise::greedy)
      ptx::give_registers<80>();
    else
      ptx::give_registers<72>();
    for (int t = 0; t < 2; t++) {
      ptx::cp_async_16(&tiles[t * 128 + i], source + t * 128 + i, true);
      ptx::mbarrier_arrive_after_copies(&full[t]);
    }
    if (way == Promise::kept || way >= Promise::other_barrier) return;
    ptx::cp_async_commit();
    if (way != Promise::early_read) ptx::cp_async_wait<0>();
    if (way == Promise::met) ptx::named_barrier_sync(1, 128);
    const int whose = way == Promise::met || way == Promise::neighbour ? (i + 32) % 128 : i;
    for (int t = 0; t < 2; t++) out[t * 128 + whose] = tiles[t * 128 + whose];
    if (way == Promise::early_read) ptx::cp_async_wait<0>();
    return;
  }
  ptx::take_registers<216>();
  for (int t = 0; t < 2; t++) {
    if (group == 1 && way == Promise::other_barrier)
      ptx::mbarrier_wait(&full[0], 0);
    else
      ptx::mbarrier_wait(&full[t], group == 1 && way == Promise::other_phase && t == 1);
    out[(2 * group + t) * 128 + i] = tiles[t * 128 + i];
  }
}

}  // namespace specdec

extern "C" __attribute__((visibility("default"))) void run_promises(const int4* source, int4* out, int way) {
  SPECDEC_LAUNCH(specdec::promise_kernel, dim3(1), dim3(384), 0, 0, source, out, static_cast<specdec::Promise>(way));
}

extern "C" __attribute__((visibility("default"))) void run_hopper(const uint16_t* a, const uint16_t* b, float* out,
                                                                  int tiles, int columns, int bf16, int transposed,
                                                                  int registers, int copy, int fault) {
  using namespace specdec;
  const HopperParams p{a, b, out, tiles, static_cast<Copy>(copy), static_cast<Fault>(fault)};
  if (columns == 128 && bf16)
    launch_hopper<BFloat16, 128>(p, transposed, registers);
  else if (columns == 128)
    launch_hopper<Half, 128>(p, transposed, registers);
  else if (bf16)
    launch_hopper<BFloat16, 64>(p, transposed, registers);
  else
    launch_hopper<Half, 64>(p, transposed, registers);
}
