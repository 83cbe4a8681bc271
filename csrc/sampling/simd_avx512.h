// 16-lane vectors on AVX-512 (F, BW, VL, DQ). The same operations as simd_avx2.h and simd_scalar.h, bit for bit.
#pragma once
#include <immintrin.h>

#include "../common/rng.h"
#include "philox_keys.h"

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
  // 32 logits: those at even places, those at odd places
  SPECDEC_SIMD void load_bfloat16_pairs(const uint16_t* p, F& even, F& odd) {
    __m512i bits = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  // Maxima of 16 disjoint parts of n logits (a multiple of 32) and the lowest one, found on signed 16-bit order keys;
  // true if one is NaN.
  SPECDEC_SIMD bool peek_bfloat16(const uint16_t* p, int32_t n, F& parts, float& lowest) {
    const __m512i flip = _mm512_set1_epi16(0x7FFF);
    __m512i high = _mm512_set1_epi16(static_cast<int16_t>(0x807F)), low = _mm512_set1_epi16(0x7F80);  // -inf, +inf
    for (int32_t i = 0; i < n; i += 32) {
      __m512i x = _mm512_loadu_si512(p + i);
      __m512i key = _mm512_ternarylogic_epi32(x, _mm512_srai_epi16(x, 15), flip, 0x78);  // x ^ (sign & flip)
      high = _mm512_max_epi16(high, key);
      low = _mm512_min_epi16(low, key);
    }
    bool nan = _mm512_cmpgt_epi16_mask(high, _mm512_set1_epi16(0x7F80)) != 0 ||
               _mm512_cmplt_epi16_mask(low, _mm512_set1_epi16(static_cast<int16_t>(0x807F))) != 0;
    alignas(64) uint16_t best[32];
    _mm512_store_si512(best, _mm512_ternarylogic_epi32(high, _mm512_srai_epi16(high, 15), flip, 0x78));
    F even, odd;
    load_bfloat16_pairs(best, even, odd);
    parts = _mm512_max_ps(even, odd);
    _mm512_store_si512(best, _mm512_ternarylogic_epi32(low, _mm512_srai_epi16(low, 15), flip, 0x78));
    load_bfloat16_pairs(best, even, odd);
    lowest = _mm512_reduce_min_ps(_mm512_min_ps(even, odd));
    return nan;
  }
  SPECDEC_SIMD F load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  SPECDEC_SIMD F set(float x) { return _mm512_set1_ps(x); }
  SPECDEC_SIMD F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  SPECDEC_SIMD F add(F a, F b) { return _mm512_add_ps(a, b); }
  // Sums of neighbours, in an order of their own; applied twice it sums fours.
  SPECDEC_SIMD F pair_sums(F a, F b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
  }
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

  // ---- a group of 64 tokens in the order in which Philox yields their words: vector 2 h has tokens 32 h + 4 j and the
  // one behind it in lanes 2 j and 2 j + 1, vector 2 h + 1 the two tokens that follow.
  using I = __m512i;
  static constexpr int kVectors = 4;
  SPECDEC_SIMD int32_t token_of(int vector, int lane) {
    return 32 * (vector >> 1) + 4 * (lane >> 1) + 2 * (vector & 1) + (lane & 1);
  }
  SPECDEC_SIMD void group_bfloat16(const uint16_t* p, F (&x)[kVectors]) {
    const __m512i first = _mm512_set4_epi32(0x0B0A8080, 0x09088080, 0x03028080, 0x01008080);
    const __m512i second = _mm512_set4_epi32(0x0F0E8080, 0x0D0C8080, 0x07068080, 0x05048080);
    for (int h = 0; h < 2; h++) {
      __m512i bits = _mm512_loadu_si512(p + 32 * h);
      x[2 * h] = _mm512_castsi512_ps(_mm512_shuffle_epi8(bits, first));
      x[2 * h + 1] = _mm512_castsi512_ps(_mm512_shuffle_epi8(bits, second));
    }
  }
  SPECDEC_SIMD void group_of(F (&x)[kVectors]) {  // from token order
    const __m512i first = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i second = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    for (int h = 0; h < 2; h++) {
      __m512d a = _mm512_castps_pd(x[2 * h]), b = _mm512_castps_pd(x[2 * h + 1]);
      x[2 * h] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b));
      x[2 * h + 1] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b));
    }
  }
  // Lanes whose word, as float bits (a lower bound of its logarithm), is at most `limit`.
  SPECDEC_SIMD uint32_t words_within(I words, F limit) {
    __m512 w = _mm512_cvt_roundepu32_ps(words, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm512_cmple_epi32_mask(_mm512_castps_si512(w), _mm512_cvttps_epi32(limit));
  }
  SPECDEC_SIMD uint32_t word_at(I words, int lane) {
    alignas(64) uint32_t all[16];
    _mm512_store_si512(all, words);
    return all[lane];
  }

  // Words of tokens 4 * block .. 4 * block + 63. A 64-bit lane holds a 32-bit state word in its low half; the high
  // half is never read (a product takes the low halves), so a round is 2 products, 2 shifts and 2 three-way xors. Of
  // the counter only the block differs between lanes: half of the first two rounds is the same for all of them.
  SPECDEC_SIMD void philox(uint32_t block, const PhiloxKeys& keys, I (&words)[kVectors]) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    __m512i c0[2], c1[2], c2[2], c3[2];
    for (int h = 0; h < 2; h++) {
      __m512i token = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(block) + 8 * h),
                                       _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
      __m512i p0 = _mm512_mul_epu32(token, m0);  // round 1
      c2[h] = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), _mm512_set1_epi64(static_cast<int64_t>(keys.first2)));
      __m512i p1 = _mm512_mul_epu32(c2[h], m1);  // round 2
      c0[h] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), _mm512_set1_epi64(static_cast<int64_t>(keys.second0)));
      c2[h] = _mm512_xor_si512(p0, _mm512_set1_epi64(static_cast<int64_t>(keys.second2)));
      c1[h] = p1;
      c3[h] = _mm512_set1_epi64(static_cast<int64_t>(keys.second3));
    }
    for (int round = 2; round < 10; round++) {
      const __m512i k0 = _mm512_set1_epi64(static_cast<int64_t>(keys.round[2 * round])),
                    k1 = _mm512_set1_epi64(static_cast<int64_t>(keys.round[2 * round + 1]));
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
      words[2 * h] = _mm512_mask_shuffle_epi32(c0[h], high, c1[h], _MM_PERM_CCAA);
      words[2 * h + 1] = _mm512_mask_shuffle_epi32(c2[h], high, c3[h], _MM_PERM_CCAA);
    }
  }
};

}  // namespace specdec
