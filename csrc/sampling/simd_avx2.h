// 8-lane vectors on AVX2, FMA and F16C. The same operations as simd_avx512.h and simd_scalar.h, bit for bit.
#pragma once
#include <immintrin.h>

#include "../common/rng.h"

namespace specdec {

#define SPECDEC_SIMD static inline __attribute__((always_inline))

struct Avx2 {
  static constexpr int lanes = 8;
  using F = __m256;
  using M = __m256;
  struct Sum {
    __m256i low, high;
  };

  SPECDEC_SIMD F load(const float* p) { return _mm256_loadu_ps(p); }
  SPECDEC_SIMD void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  SPECDEC_SIMD F load_bfloat16(const uint16_t* p) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  SPECDEC_SIMD F load_float16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  SPECDEC_SIMD F set(float x) { return _mm256_set1_ps(x); }
  SPECDEC_SIMD F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  SPECDEC_SIMD F add(F a, F b) { return _mm256_add_ps(a, b); }
  // The barrier keeps the compiler from fusing the product into a following sum: all versions round it.
  SPECDEC_SIMD F mul(F a, F b) {
    F product = _mm256_mul_ps(a, b);
    asm("" : "+x"(product));
    return product;
  }
  SPECDEC_SIMD F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  SPECDEC_SIMD F max(F a, F b) { return _mm256_max_ps(a, b); }
  SPECDEC_SIMD F min(F a, F b) { return _mm256_min_ps(a, b); }
  // a * 2^n, n the integer in the low bits of `shifted` (see kExpShift)
  SPECDEC_SIMD F scale2(F a, F shifted) {
    __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), power));
  }
  SPECDEC_SIMD F from_bits(F a) { return _mm256_castsi256_ps(_mm256_cvttps_epi32(a)); }
  SPECDEC_SIMD M ge(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  SPECDEC_SIMD M eq(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  SPECDEC_SIMD M is_number(F a) { return _mm256_cmp_ps(a, a, _CMP_ORD_Q); }
  SPECDEC_SIMD M both(M a, M b) { return _mm256_and_ps(a, b); }
  SPECDEC_SIMD F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
  SPECDEC_SIMD uint32_t bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
  // Writes the chosen lanes and their ids (first, first + 1, ...) densely.
  SPECDEC_SIMD int32_t compress(M m, F v, int32_t first, float* values, int32_t* ids) {
    alignas(32) float lane[8];
    _mm256_store_ps(lane, v);
    int32_t count = 0;
    for (uint32_t found = bits(m); found; found &= found - 1, count++) {
      values[count] = lane[__builtin_ctz(found)];
      ids[count] = first + __builtin_ctz(found);
    }
    return count;
  }
  SPECDEC_SIMD float reduce_max(F a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  SPECDEC_SIMD float reduce_min(F a) {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
  }

  SPECDEC_SIMD Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  // Adding 2^52 leaves the rounded integer in the mantissa of a float64.
  SPECDEC_SIMD __m256i rounded(__m128 a) {
    const __m256d magic = _mm256_set1_pd(4503599627370496.0);
    return _mm256_xor_si256(_mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(a), magic)), _mm256_castpd_si256(magic));
  }
  // Adds round-to-nearest-even(a), 0 <= a < 2^51.
  SPECDEC_SIMD void add_rounded(Sum& sum, F a) {
    sum.low = _mm256_add_epi64(sum.low, rounded(_mm256_castps256_ps128(a)));
    sum.high = _mm256_add_epi64(sum.high, rounded(_mm256_extractf128_ps(a, 1)));
  }
  SPECDEC_SIMD uint64_t total(Sum sum) {
    alignas(32) uint64_t part[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(part), _mm256_add_epi64(sum.low, sum.high));
    return part[0] + part[1] + part[2] + part[3];
  }
  SPECDEC_SIMD void store_rounded(uint64_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded(_mm256_castps256_ps128(a)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 4), rounded(_mm256_extractf128_ps(a, 1)));
  }
  SPECDEC_SIMD void store_truncated(int32_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(a));
  }

  // At most word * 2^-32, within 2^-23 of it (relative) where it matters: the low 9 bits are dropped.
  SPECDEC_SIMD F unit(const uint32_t* words) {
    __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(w, 9)), _mm256_set1_ps(1.1920929e-7f));
  }

  // Words of tokens 4 * block .. 4 * block + 63: see simd_avx512.h.
  SPECDEC_SIMD void philox(uint32_t block, const uint32_t counter[3], const uint64_t keys[20], uint32_t* words) {
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    for (int h = 0; h < 4; h++) {
      __m256i c0 =
          _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(block) + 4 * h), _mm256_setr_epi64x(0, 2, 1, 3));
      __m256i c1 = _mm256_set1_epi64x(counter[0]), c2 = _mm256_set1_epi64x(counter[1]);
      __m256i c3 = _mm256_set1_epi64x(counter[2]);
      for (int round = 0; round < 10; round++) {
        __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
        c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1),
                              _mm256_set1_epi64x(static_cast<int64_t>(keys[2 * round])));
        c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3),
                              _mm256_set1_epi64x(static_cast<int64_t>(keys[2 * round + 1])));
        c1 = p1;
        c3 = p0;
      }
      __m256i a = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
      __m256i b = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16 * h), _mm256_unpacklo_epi64(a, b));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16 * h + 8), _mm256_unpackhi_epi64(a, b));
    }
  }
};

}  // namespace specdec
