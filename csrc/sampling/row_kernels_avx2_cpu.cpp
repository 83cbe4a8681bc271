#include "draft_topk_cpu.h"
#include "rows_cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi")
#include "simd_avx2.h"
// behind the vector type
#include "draft_topk_kernels.h"
#include "row_kernels.h"

namespace specdec {
const RowKernels& row_kernels_avx2() {
  return RowKernelsOf<Avx2>::table();
}
const DraftTopkKernels& draft_topk_kernels_avx2() {
  return DraftTopkOf<Avx2>::table();
}
}  // namespace specdec
#pragma GCC pop_options
#else
namespace specdec {
const RowKernels& row_kernels_avx2() {
  return row_kernels_scalar();
}
const DraftTopkKernels& draft_topk_kernels_avx2() {
  return draft_topk_kernels_scalar();
}
}  // namespace specdec
#endif
