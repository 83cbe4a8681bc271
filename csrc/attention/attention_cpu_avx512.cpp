// AVX-512 float32 kernels: also float16 and float8 caches (widened a row at a time), and bfloat16 without its dot
// product.
#if defined(__x86_64__)
#include <immintrin.h>

#include "common/numerics.h"
#include "tile_cpu.h"
// g++ 12 calls the deliberately undefined operands of its own intrinsics uninitialised (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "simd_avx512.h"

namespace {

void attend(const AttendArgs& args) {
  attend_rows<Avx512, Avx512Float32>(args, product<Avx512, Avx512Float32>);
}

}  // namespace

namespace specdec {

const TileKernels& avx512_kernels() {
  static constexpr TileKernels kernels = {
      24, 1, convert_float32, transpose_keys, pack_values_float32, attend, store_scaled, add_scaled<Avx512>};
  return kernels;
}

}  // namespace specdec
#endif
