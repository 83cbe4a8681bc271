// 16-lane vectors on AVX-512 (F, BW, VL, DQ). The same operations as simd_avx2.h and simd_scalar.h, bit for bit.
#pragma once
#include <immintrin.h>

#include "../common/rng.h"

namespace specdec {

#define SPECDEC_SIMD static inline __attribute__((always_inline))

struct Avx512 {
  static constexpr int lanes = 16;
  using F = __m512;
  using M = __mmask16;
  struct Sum {
    __m512i low, high;
  };

  SPECDEC_SIMD F load(const float* p) { return _mm512_loadu_ps(p); }
  SPECDEC_SIMD void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  SPECDEC_SIMD F load_bfloat16(const uint16_t* p) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  SPECDEC_SIMD F load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  SPECDEC_SIMD F set(float x) { return _mm512_set1_ps(x); }
  SPECDEC_SIMD F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  SPECDEC_SIMD F add(F a, F b) { return _mm512_add_ps(a, b); }
  // The barrier keeps the compiler from fusing the product into a following sum: all versions round it.
  SPECDEC_SIMD F mul(F a, F b) {
    F product = _mm512_mul_ps(a, b);
    asm("" : "+v"(product));
    return product;
  }
  SPECDEC_SIMD F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  SPECDEC_SIMD F max(F a, F b) { return _mm512_max_ps(a, b); }
  SPECDEC_SIMD F min(F a, F b) { return _mm512_min_ps(a, b); }
  // a * 2^n, n the integer in the low bits of `shifted` (see kExpShift)
  SPECDEC_SIMD F scale2(F a, F shifted) {
    __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), power));
  }
  SPECDEC_SIMD F from_bits(F a) { return _mm512_castsi512_ps(_mm512_cvttps_epi32(a)); }
  SPECDEC_SIMD M ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  SPECDEC_SIMD M eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  SPECDEC_SIMD M is_number(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q); }
  SPECDEC_SIMD M both(M a, M b) { return a & b; }
  SPECDEC_SIMD F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
  SPECDEC_SIMD uint32_t bits(M m) { return m; }
  // Writes the chosen lanes and their ids (first, first + 1, ...) densely; up to 16 elements behind them are
  // overwritten.
  SPECDEC_SIMD int32_t compress(M m, F v, int32_t first, float* values, int32_t* ids) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(m, v));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
    return __builtin_popcount(m);
  }
  SPECDEC_SIMD float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  SPECDEC_SIMD float reduce_min(F a) { return _mm512_reduce_min_ps(a); }

  SPECDEC_SIMD Sum zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  // Adds round-to-nearest-even(a), 0 <= a < 2^51.
  SPECDEC_SIMD void add_rounded(Sum& sum, F a) {
    sum.low = _mm512_add_epi64(sum.low, _mm512_cvtps_epi64(_mm512_castps512_ps256(a)));
    sum.high = _mm512_add_epi64(sum.high, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(a, 1)));
  }
  SPECDEC_SIMD uint64_t total(Sum sum) {
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(sum.low, sum.high)));
  }
  SPECDEC_SIMD void store_rounded(uint64_t* p, F a) {
    _mm512_storeu_si512(p, _mm512_cvtps_epi64(_mm512_castps512_ps256(a)));
    _mm512_storeu_si512(p + 8, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(a, 1)));
  }
  SPECDEC_SIMD void store_truncated(int32_t* p, F a) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(a)); }

  // At most word * 2^-32, within 2^-23 of it (relative).
  SPECDEC_SIMD F unit(const uint32_t* words) {
    return _mm512_mul_ps(_mm512_cvt_roundepu32_ps(_mm512_loadu_si512(words), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC),
                         _mm512_set1_ps(2.3283064e-10f));
  }

  // Words of tokens 4 * block .. 4 * block + 63. A 64-bit lane holds a 32-bit state word in its low half; the high
  // half is never read (a product takes the low halves), so a round is 2 products, 2 shifts and 2 three-way xors.
  SPECDEC_SIMD void philox(uint32_t block, const uint32_t counter[3], const uint64_t keys[20], uint32_t* words) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    __m512i c0[2], c1[2], c2[2], c3[2];
    for (int h = 0; h < 2; h++) {
      // lanes hold counters 0 4 1 5 2 6 3 7, so that the unpacks below give tokens in their order
      c0[h] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(block) + 8 * h),
                               _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
      c1[h] = _mm512_set1_epi64(counter[0]);
      c2[h] = _mm512_set1_epi64(counter[1]);
      c3[h] = _mm512_set1_epi64(counter[2]);
    }
    for (int round = 0; round < 10; round++) {
      const __m512i k0 = _mm512_set1_epi64(keys[2 * round]), k1 = _mm512_set1_epi64(keys[2 * round + 1]);
      for (int h = 0; h < 2; h++) {
        __m512i p0 = _mm512_mul_epu32(c0[h], m0), p1 = _mm512_mul_epu32(c2[h], m1);
        c0[h] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[h], k0, 0x96);
        c2[h] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[h], k1, 0x96);
        c1[h] = p1;
        c3[h] = p0;
      }
    }
    const __mmask16 high = 0xAAAA;
    for (int h = 0; h < 2; h++) {
      __m512i a = _mm512_mask_blend_epi32(high, c0[h], _mm512_slli_epi64(c1[h], 32));
      __m512i b = _mm512_mask_blend_epi32(high, c2[h], _mm512_slli_epi64(c3[h], 32));
      _mm512_storeu_si512(words + 32 * h, _mm512_unpacklo_epi64(a, b));
      _mm512_storeu_si512(words + 32 * h + 16, _mm512_unpackhi_epi64(a, b));
    }
  }
};

}  // namespace specdec
