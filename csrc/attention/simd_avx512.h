// 512-bit vectors for rows_cpu.h. Include after the target pragma that enables them.
#pragma once
#include "rows_cpu.h"

namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16, kVectors = 4, kRows = 6;  // 24 sums + 4 columns + 1 broadcast of 32 registers
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F keep(uint64_t bits, F x, F otherwise) {
    return _mm512_mask_mov_ps(otherwise, static_cast<__mmask16>(bits), x);
  }
  static bool any_above(F x, float limit) { return _mm512_cmp_ps_mask(x, set1(limit), _CMP_NLE_UQ) != 0; }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  // 2^x = 2^floor(x) * 2^f, f in [0, 1): minimax polynomial of degree 5 through 1 at 0, relative error
  // below 1.5e-7 with its rounding. -inf gives 0, NaN stays NaN, results below 2^-149 become 0.
  static F exp2(F x) {
    F f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    F y = set1(1.86713261e-3f);
    y = fma(y, f, set1(9.01702512e-3f));
    y = fma(y, f, set1(5.57999164e-2f));
    y = fma(y, f, set1(0.240164444f));
    y = fma(y, f, set1(0.693151295f));
    y = fma(y, f, set1(1.0f));
    return _mm512_scalef_ps(y, x);
  }
  // 16 values of `element` at p as float32
  static F widen(const void* p, Element element) {
    const __m128i* bytes = static_cast<const __m128i*>(p);
    const __m256i* words = static_cast<const __m256i*>(p);
    switch (element) {
      case Element::float32: return load(static_cast<const float*>(p));
      case Element::bfloat16:
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(words)), 16));
      case Element::float16: return _mm512_cvtph_ps(_mm256_loadu_si256(words));
      case Element::float8_e5m2:
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(bytes)), 8));
      default: {  // e4m3: a float16 with 3 mantissa bits, 2^8 too small
        __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(bytes));
        __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
        __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_xor_si256(x, size), 8), _mm256_slli_epi16(size, 7));
        half = _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f)),
                                     _mm256_set1_epi16(0x7e00));  // NaN
        return mul(_mm512_cvtph_ps(half), set1(256.0f));
      }
    }
  }
  static __m256i round_bfloat16(F x) {  // nearest even; a NaN stays a NaN
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    sum = _mm512_mask_or_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
  }
  static void narrow(F x, void* out, Element element) {
    if (element == Element::float32) return store(static_cast<float*>(out), x);
    __m256i packed = element == Element::bfloat16 ? round_bfloat16(x)
                                                  : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(static_cast<__m256i*>(out), packed);
  }
};

struct Avx512Float32 {
  using Units = __m512;
  static constexpr int kPack = 1;
  static Units load_units(const uint32_t* p) { return _mm512_loadu_ps(p); }
  static Units broadcast(const char* unit) { return _mm512_set1_ps(*reinterpret_cast<const float*>(unit)); }
  static __m512 dot(__m512 sum, Units a, Units b) { return _mm512_fmadd_ps(a, b, sum); }
  static void store_weights(uint32_t* p, int index, __m512 w) { _mm512_storeu_ps(p + index, w); }
};

// 16 x 16 transpose of 32-bit units: dst[u * 64 + key] = rows[key][u]; columns is 16 or 8.
inline void transpose16(const uint32_t* const* rows, int first, int columns, uint32_t* dst) {
  __m512i a[16], b[16];
  const __mmask16 wanted = columns == 16 ? 0xffff : 0x00ff;
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi32(wanted, rows[i] + first);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 g + j]: 128-bit lane l holds unit 4 l + j of keys 4 g .. 4 g + 3
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    b[j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);           // lanes 0, 2 of keys 0..7
    b[4 + j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);       // lanes 1, 3
    b[8 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);  // keys 8..15
    b[12 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    _mm512_storeu_si512(dst + j * kTileKeys, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
    _mm512_storeu_si512(dst + (4 + j) * kTileKeys, _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0x88));
    if (columns == 8) continue;
    _mm512_storeu_si512(dst + (8 + j) * kTileKeys, _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
    _mm512_storeu_si512(dst + (12 + j) * kTileKeys, _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0xdd));
  }
}

// Rows that lie a multiple of 4 KiB apart share one set of the first-level cache and evict each other while 16 of them
// are gathered: those are copied side by side first, a row at a time.
inline void transpose_keys(const void* const* rows, int units, uint32_t* dst, Prefetch& ahead) {
  const uint32_t* const* keys = reinterpret_cast<const uint32_t* const*>(rows);
  const bool aliased = (reinterpret_cast<intptr_t>(rows[1]) - reinterpret_cast<intptr_t>(rows[0])) % 4096 == 0;
  alignas(64) uint32_t copy[16][kMaxHeadDim + 16];
  const uint32_t* copies[16];
  for (int i = 0; i < 16; i++) copies[i] = copy[i];
  for (int key = 0; key < kTileKeys; key += 16) {
    for (int i = 0; aliased && i < 16; i++)
      for (int u = 0; u < units; u += 8)
        _mm256_store_si256(reinterpret_cast<__m256i*>(copy[i] + u),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys[key + i] + u)));
    for (int u = 0; u < units; u += 16) {
      for (int i = 0; i < 8; i++) prefetch_step(ahead);
      transpose16(aliased ? copies : keys + key, u, units - u < 16 ? units - u : 16, dst + u * kTileKeys + key);
    }
  }
}

inline bool pack_values_float32(const void* const* rows, int v_dim, uint32_t* dst, bool check, Prefetch& ahead) {
  const __m512i limit = _mm512_set1_epi32(0x7f800000);
  __mmask16 bad = 0;
  for (int key = 0; key < kTileKeys; key++) {
    for (int i = 0; i < 2; i++) prefetch_step(ahead);
    for (int d = 0; d < v_dim; d += 16) {
      __m512i x = _mm512_loadu_si512(static_cast<const uint32_t*>(rows[key]) + d);
      if (check) bad |= _mm512_cmpeq_epi32_mask(_mm512_and_si512(x, limit), limit);
      _mm512_storeu_si512(dst + key * v_dim + d, x);
    }
  }
  return bad != 0;
}

inline void convert_float32(const void* src, Element element, void* dst, int n) {
  for (int i = 0; i < n; i += 16)
    Avx512::store(static_cast<float*>(dst) + i,
                  Avx512::widen(static_cast<const char*>(src) + i * element_bytes(element), element));
}

inline void store_scaled(const float* x, float factor, void* out, Element element, int n) {
  for (int i = 0; i < n; i += 16)
    Avx512::narrow(Avx512::mul(Avx512::load(x + i), Avx512::set1(factor)),
                   static_cast<char*>(out) + i * element_bytes(element), element);
}

}  // namespace
