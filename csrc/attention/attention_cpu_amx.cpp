// AMX kernels for bfloat16: the packed layouts of simd_bf16.h are the B tiles as they stand, 32 rows a step.
//
//   C tiles 0..3 (2 x 2 of 16 x 16 float32)  +=  A tiles 4, 5 (rows, 16 pairs)  x  B tiles 6, 7 (16 pairs, 16 columns)
//
// Tiles always move 16 rows: the driver keeps 32 spare rows behind the queries and the outputs.
// SPECDEC_AMX_MODEL names a header that models the tile instructions in C++ (tests on machines without AMX).
#if defined(__x86_64__)
#include <immintrin.h>

#include "common/numerics.h"
#include "tile_cpu.h"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // as in attention_cpu_avx512.cpp
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
#if defined(SPECDEC_AMX_MODEL)
#include SPECDEC_AMX_MODEL
#endif
#include "simd_bf16.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The intrinsics of g++ 12 do not tell the compiler which memory they read, so it drops or delays stores without this.
inline void fence() {
  asm volatile("" ::: "memory");
}

// C[16 kRows][16 kCols] at (row 0, col).
template <int kRows, int kCols>
inline void block_product(const ProductArgs& p, int col) {
  constexpr bool kBoth = kRows == 2 && kCols == 2;
  float *c = p.c + col, *below = c + 16 * p.ldc;
  const int64_t a_bytes = p.lda * 4, b_bytes = p.ldb * 4, c_bytes = p.ldc * 4;
  if (p.accumulate) {
    _tile_loadd(0, c, c_bytes);
    if (kCols == 2) _tile_loadd(1, c + 16, c_bytes);
    if (kRows == 2) _tile_loadd(2, below, c_bytes);
    if (kBoth) _tile_loadd(3, below + 16, c_bytes);
  } else {
    _tile_zero(0);
    if (kCols == 2) _tile_zero(1);
    if (kRows == 2) _tile_zero(2);
    if (kBoth) _tile_zero(3);
  }
  for (int u = 0; u < p.units; u += 16) {
    for (int i = 0; i < 16; i++) prefetch_one(*p.ahead);
    const uint32_t *a = p.a + u, *b = p.b + u * p.ldb + col;
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kRows == 2) {
      _tile_loadd(5, a + 16 * p.lda, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kCols == 2) {
      _tile_loadd(7, b + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if (kRows == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if (kCols == 2) _tile_stored(1, c + 16, c_bytes);
  if (kRows == 2) _tile_stored(2, below, c_bytes);
  if (kBoth) _tile_stored(3, below + 16, c_bytes);
}

template <int kRows>
void rows_product(const ProductArgs& p) {
  int col = 0;
  for (; col + 32 <= p.n; col += 32) block_product<kRows, 2>(p, col);
  if (col < p.n) block_product<kRows, 1>(p, col);
}

void tile_product(const ProductArgs& p) {
  if (p.units % 16) return product<Avx512, Avx512BFloat16>(p);  // a head dim that is no multiple of 32
  fence();
  if (p.rows > 16)
    rows_product<2>(p);
  else
    rows_product<1>(p);
  fence();
}

void attend(const AttendArgs& args) {
  TileConfig config;
  fence();
  _tile_loadconfig(&config);
  attend_rows<Avx512, Avx512BFloat16>(args, tile_product);
  _tile_release();
}

}  // namespace

namespace specdec {

const TileKernels& amx_kernels() {
  static constexpr TileKernels kernels = {
      32, 2, convert_bfloat16, transpose_key_pairs, pack_value_pairs, attend, store_scaled, add_scaled<Avx512>};
  return kernels;
}

}  // namespace specdec
#endif
