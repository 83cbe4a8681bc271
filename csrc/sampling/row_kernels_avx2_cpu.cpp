#include "rows_cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi")
#include "simd_avx2.h"
// behind the vector type
#include "row_kernels.h"

namespace specdec {
const RowKernels& row_kernels_avx2() {
  return RowKernelsOf<Avx2>::table();
}
}  // namespace specdec
#pragma GCC pop_options
#else
namespace specdec {
const RowKernels& row_kernels_avx2() {
  return row_kernels_scalar();
}
}  // namespace specdec
#endif
