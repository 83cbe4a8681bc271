// 8-lane vectors on AVX2, FMA and F16C. The same operations as simd_avx512.h and simd_scalar.h, bit for bit.
#pragma once
#include <immintrin.h>

#include "../common/rng.h"
#include "philox_keys.h"

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
  SPECDEC_SIMD void load_bfloat16_pairs(const uint16_t* p, F& even, F& odd) {  // 16 logits: even places, odd places
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  SPECDEC_SIMD __m256i order_keys(__m256i x) {
    return _mm256_xor_si256(x, _mm256_and_si256(_mm256_srai_epi16(x, 15), _mm256_set1_epi16(0x7FFF)));
  }
  // best[i]: the largest of n logits (a multiple of 32) at places i modulo 32; and the lowest of all; found on signed
  // 16-bit order keys. True if one is NaN.
  SPECDEC_SIMD bool peek_bfloat16(const uint16_t* p, int32_t n, uint16_t* best, float& lowest) {
    const __m256i none = _mm256_set1_epi16(static_cast<int16_t>(0x807F)),
                  all = _mm256_set1_epi16(0x7F80);  // -inf, +inf
    __m256i high[2] = {none, none}, low = all;
    for (int32_t i = 0; i < n; i += 32) {
      for (int h = 0; h < 2; h++) {
        __m256i key = order_keys(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 16 * h)));
        high[h] = _mm256_max_epi16(high[h], key);
        low = _mm256_min_epi16(low, key);
      }
    }
    __m256i nan =
        _mm256_or_si256(_mm256_cmpgt_epi16(_mm256_max_epi16(high[0], high[1]), all), _mm256_cmpgt_epi16(none, low));
    for (int h = 0; h < 2; h++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(best + 16 * h), order_keys(high[h]));
    alignas(32) uint16_t least[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(least), order_keys(low));
    F even, odd;
    load_bfloat16_pairs(least, even, odd);
    lowest = reduce_min(_mm256_min_ps(even, odd));
    return _mm256_movemask_epi8(nan) != 0;
  }
  SPECDEC_SIMD F load_float16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  SPECDEC_SIMD F set(float x) { return _mm256_set1_ps(x); }
  SPECDEC_SIMD F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  SPECDEC_SIMD F add(F a, F b) { return _mm256_add_ps(a, b); }
  // Sums of neighbours, in an order of their own; applied twice it sums fours.
  SPECDEC_SIMD F pair_sums(F a, F b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
  }
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

  // ---- a group of 64 tokens in Philox order: see simd_avx512.h. Vectors 2 h and 2 h + 1 hold tokens 16 h .. 16 h
  // + 15.
  using I = __m256i;
  static constexpr int kVectors = 8;
  SPECDEC_SIMD int32_t token_of(int vector, int lane) {
    constexpr int kToken[8] = {0, 1, 8, 9, 4, 5, 12, 13};
    return 16 * (vector >> 1) + kToken[lane] + 2 * (vector & 1);
  }
  SPECDEC_SIMD void group_bfloat16(const uint16_t* p, F (&x)[kVectors]) {
    for (int v = 0; v < kVectors; v++) x[v] = load_bfloat16(p + 8 * v);
    group_of(x);
  }
  SPECDEC_SIMD void group_of(F (&x)[kVectors]) {  // from token order
    for (int v = 0; v < kVectors; v += 2) {
      __m256d a = _mm256_castps_pd(x[v]), b = _mm256_castps_pd(x[v + 1]);
      x[v] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      x[v + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
  }
  // See simd_avx512.h. Half the word converts as a signed number; its float bits are one exponent lower.
  SPECDEC_SIMD uint32_t words_within(I words, F limit) {
    __m256i half = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srli_epi32(words, 1)));
    __m256i above = _mm256_cmpgt_epi32(_mm256_add_epi32(half, _mm256_set1_epi32(1 << 23)), _mm256_cvttps_epi32(limit));
    return ~bits(_mm256_castsi256_ps(above)) & 0xFF;
  }
  SPECDEC_SIMD I least(I a, I b) { return _mm256_min_epu32(a, b); }
  SPECDEC_SIMD uint32_t word_at(I words, int lane) {
    alignas(32) uint32_t all[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(all), words);
    return all[lane];
  }

  // State words of 4 blocks: see simd_avx512.h.
  SPECDEC_SIMD void philox_blocks(__m256i block, const PhiloxKeys& keys, __m256i (&c)[4]) {
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    auto all = [](uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); };
    __m256i p0 = _mm256_mul_epu32(block, m0);
    c[2] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), all(keys.first2));
    __m256i p1 = _mm256_mul_epu32(c[2], m1);
    c[0] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), all(keys.second0));
    c[2] = _mm256_xor_si256(p0, all(keys.second2));
    c[1] = p1;
    c[3] = all(keys.second3);
    for (int round = 2; round < 10; round++) {
      p0 = _mm256_mul_epu32(c[0], m0), p1 = _mm256_mul_epu32(c[2], m1);
      c[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c[1]), all(keys.round[2 * round]));
      c[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c[3]), all(keys.round[2 * round + 1]));
      c[1] = p1;
      c[3] = p0;
    }
  }
  // Words of tokens 4 * block .. 4 * block + 63.
  SPECDEC_SIMD void philox(uint32_t block, const PhiloxKeys& keys, I (&words)[kVectors]) {
    for (int h = 0; h < 4; h++) {
      __m256i c[4];
      philox_blocks(
          _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(block) + 4 * h), _mm256_setr_epi64x(0, 2, 1, 3)),
          keys, c);
      words[2 * h] = _mm256_blend_epi32(c[0], _mm256_slli_epi64(c[1], 32), 0xAA);
      words[2 * h + 1] = _mm256_blend_epi32(c[2], _mm256_slli_epi64(c[3], 32), 0xAA);
    }
  }
  // Words of 8 tokens anywhere.
  SPECDEC_SIMD I philox_of(const int32_t* ids, const PhiloxKeys& keys) {
    alignas(32) uint64_t state[4][4];
    alignas(32) uint32_t words[8];
    for (int h = 0; h < 8; h += 4) {
      __m256i c[4], id = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ids + h)));
      philox_blocks(_mm256_srli_epi64(id, 2), keys, c);
      for (int w = 0; w < 4; w++) _mm256_store_si256(reinterpret_cast<__m256i*>(state[w]), c[w]);
      for (int i = 0; i < 4; i++) words[h + i] = static_cast<uint32_t>(state[ids[h + i] & 3][i]);
    }
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
  }
};

}  // namespace specdec
