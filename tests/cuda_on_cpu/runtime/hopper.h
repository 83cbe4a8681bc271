// Hopper's asynchronous units, as device code calls them: mbarriers, bulk copies, wgmma. Included by
// csrc/common/hopper.cuh (path A) and by translated PTX (path B).
//
// What is modelled beyond the values:
//   bulk copies  land late (at the first wait on their mbarrier), at issue or by coin; until then the destination is
//   NaN
//                and touching it is reported. They run on the copy engine's own clock: only a wait on the mbarrier, not
//                any other barrier, makes their bytes known.
//   wgmma        reads its operands until it is retired by wait_group; writing them earlier is reported, and (path A,
//                landing late) the accumulators are NaN and the products are taken only then. Operands written by
//                ordinary stores or cp.async need fence.proxy.async between the store and the product.
#pragma once
#include <cuda.h>

#include "emulated.h"

namespace emulated {

void mbarrier_init(void* barrier, uint32_t arrivals, At at);
void mbarrier_arrive(void* barrier, uint32_t count, uint32_t transaction_bytes, At at);
void mbarrier_expect(void* barrier, uint32_t transaction_bytes, At at);
void mbarrier_arrive_after_copies(void* barrier, At at);  // cp.async.mbarrier.arrive.noinc
// Whether the phase of this parity is complete; `block` waits until it is. PTX: test_wait and try_wait.
bool mbarrier_test(void* barrier, uint32_t parity, bool block, At at);
void bulk_copy(void* destination, const void* source, uint32_t bytes, void* barrier, At at);
// In the place of the driver's cuTensorMapEncodeTiled.
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                           const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);
void tensor_copy(void* destination, const void* map, int rank, const int32_t* first, void* barrier, At at);
void fence_async_proxy();

struct Wgmma {
  float* d;           // n / 2 accumulators of this thread
  const uint32_t* a;  // 4 registers, or null: a is in shared memory
  uint64_t a_matrix, b_matrix;
  int n, a_sign, b_sign;
  Element element;
  bool accumulate, transpose_a, transpose_b;
  bool late;  // accumulators may be written after the call has returned (path A: they are an array)
};
void wgmma(const Wgmma& call, At at, const void* where);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups_in_flight, At at);
void set_max_registers(int count, At at);

}  // namespace emulated
