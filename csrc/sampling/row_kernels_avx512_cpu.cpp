#include "draft_topk_cpu.h"
#include "rows_cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
// GCC 12 takes the undefined operand inside its own intrinsics for a fault
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,bmi")
#include "simd_avx512.h"
// behind the vector type
#include "draft_topk_kernels.h"
#include "row_kernels.h"

namespace specdec {
const RowKernels& row_kernels_avx512() {
  return RowKernelsOf<Avx512>::table();
}
const DraftTopkKernels& draft_topk_kernels_avx512() {
  return DraftTopkOf<Avx512>::table();
}
}  // namespace specdec
#pragma GCC pop_options
#else
namespace specdec {
const RowKernels& row_kernels_avx512() {
  return row_kernels_scalar();
}
const DraftTopkKernels& draft_topk_kernels_avx512() {
  return draft_topk_kernels_scalar();
}
}  // namespace specdec
#endif
