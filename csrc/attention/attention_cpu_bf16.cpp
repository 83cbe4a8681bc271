// AVX-512 BF16 kernels: products of bfloat16 pairs with float32 sums.
#if defined(__x86_64__)
#include <immintrin.h>

#include "common/numerics.h"
#include "tile_cpu.h"
// g++ 12 calls the deliberately undefined operands of its own intrinsics uninitialised (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#include "simd_bf16.h"

namespace {

void attend(const AttendArgs& args) {
  attend_rows<Avx512, Avx512BFloat16>(args, product<Avx512, Avx512BFloat16>);
}

}  // namespace

namespace specdec {

const TileKernels& avx512_bf16_kernels() {
  static constexpr TileKernels kernels = {
      24, 2, convert_bfloat16, transpose_key_pairs, pack_value_pairs, attend, store_scaled, add_scaled<Avx512>};
  return kernels;
}

}  // namespace specdec
#endif
