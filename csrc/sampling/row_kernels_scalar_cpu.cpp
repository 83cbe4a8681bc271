#include "../common/cpu.h"
#include "rows_cpu.h"
#include "simd_scalar.h"
// behind the vector type
#include "draft_topk_kernels.h"
#include "row_kernels.h"

namespace specdec {

const RowKernels& row_kernels_scalar() {
  return RowKernelsOf<Scalar>::table();
}
const DraftTopkKernels& draft_topk_kernels_scalar() {
  return DraftTopkOf<Scalar>::table();
}

const RowKernels& row_kernels() {
  Isa level = isa();
  if (level >= Isa::avx512) return row_kernels_avx512();
  return level >= Isa::avx2 ? row_kernels_avx2() : row_kernels_scalar();
}

}  // namespace specdec
