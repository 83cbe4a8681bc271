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
  // best[i]: the largest of n logits (a multiple of 32) at places i modulo 32; and the lowest of all; found on signed
  // 16-bit order keys. True if one is NaN.
  SPECDEC_SIMD bool peek_bfloat16(const uint16_t* p, int32_t n, uint16_t* best, float& lowest) {
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
    _mm512_storeu_si512(best, _mm512_ternarylogic_epi32(high, _mm512_srai_epi16(high, 15), flip, 0x78));
    alignas(64) uint16_t least[32];
    _mm512_store_si512(least, _mm512_ternarylogic_epi32(low, _mm512_srai_epi16(low, 15), flip, 0x78));
    F even, odd;
    load_bfloat16_pairs(least, even, odd);
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

  // ---- a group of 64 tokens in the order in which Philox yields their words: vectors 2 h and 2 h + 1 have the tokens
  // at even and at odd places of the 32 behind 32 h (words 0 and 2, words 1 and 3 of a block).
  using I = __m512i;
  static constexpr int kVectors = 4;
  SPECDEC_SIMD int32_t token_of(int vector, int lane) { return 32 * (vector >> 1) + 2 * lane + (vector & 1); }
  SPECDEC_SIMD void group_bfloat16(const uint16_t* p, F (&x)[kVectors]) {
    for (int h = 0; h < 2; h++) load_bfloat16_pairs(p + 32 * h, x[2 * h], x[2 * h + 1]);
  }
  SPECDEC_SIMD void group_of(F (&x)[kVectors]) {  // from token order
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int h = 0; h < 2; h++) {
      F a = x[2 * h], b = x[2 * h + 1];
      x[2 * h] = _mm512_permutex2var_ps(a, even, b);
      x[2 * h + 1] = _mm512_permutex2var_ps(a, odd, b);
    }
  }
  // Lanes whose word, as float bits (a lower bound of its logarithm), is at most `limit`.
  SPECDEC_SIMD uint32_t words_within(I words, F limit) {
    __m512 w = _mm512_cvt_roundepu32_ps(words, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm512_cmple_epi32_mask(_mm512_castps_si512(w), _mm512_cvttps_epi32(limit));
  }
  SPECDEC_SIMD I least(I a, I b) { return _mm512_min_epu32(a, b); }
  SPECDEC_SIMD uint32_t word_at(I words, int lane) {
    alignas(64) uint32_t all[16];
    _mm512_store_si512(all, words);
    return all[lane];
  }

  // State words of 2 x 8 blocks. A 64-bit lane holds a 32-bit word in its low half; the high half is never read (a
  // product takes the low halves), so a round is 2 products, 2 shifts and 2 three-way xors. Of the counter only the
  // block differs between lanes: half of the first two rounds is the same for all of them.
  struct Words {
    __m512i w[4][2];
  };
  SPECDEC_SIMD Words philox_blocks(const __m512i (&block)[2], const PhiloxKeys& keys) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    auto all = [](uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); };
    __m512i c0[2], c1[2], c2[2], c3[2];
    for (int h = 0; h < 2; h++) {
      __m512i p0 = _mm512_mul_epu32(block[h], m0);  // round 1
      c2[h] = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), all(keys.first2));
      __m512i p1 = _mm512_mul_epu32(c2[h], m1);  // round 2
      c0[h] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), all(keys.second0));
      c2[h] = _mm512_xor_si512(p0, all(keys.second2));
      c1[h] = p1;
      c3[h] = all(keys.second3);
    }
    for (int round = 2; round < 10; round++) {
      const __m512i k0 = all(keys.round[2 * round]), k1 = all(keys.round[2 * round + 1]);
      for (int h = 0; h < 2; h++) {
        __m512i p0 = _mm512_mul_epu32(c0[h], m0), p1 = _mm512_mul_epu32(c2[h], m1);
        c0[h] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(p1, 32), c1[h], k0, 0x96);
        c2[h] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(p0, 32), c3[h], k1, 0x96);
        c1[h] = p1;
        c3[h] = p0;
      }
    }
    return {{{c0[0], c0[1]}, {c1[0], c1[1]}, {c2[0], c2[1]}, {c3[0], c3[1]}}};
  }
  // Words of tokens 4 * block .. 4 * block + 63.
  SPECDEC_SIMD void philox(uint32_t block, const PhiloxKeys& keys, I (&words)[kVectors]) {
    const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i first = _mm512_add_epi64(_mm512_set1_epi64(block), lane);
    const Words c = philox_blocks({first, _mm512_add_epi64(first, _mm512_set1_epi64(8))}, keys);
    const __mmask16 high = 0xAAAA;
    for (int h = 0; h < 2; h++) {
      words[2 * h] = _mm512_mask_shuffle_epi32(c.w[0][h], high, c.w[2][h], _MM_PERM_CCAA);
      words[2 * h + 1] = _mm512_mask_shuffle_epi32(c.w[1][h], high, c.w[3][h], _MM_PERM_CCAA);
    }
  }
  // Words of 16 tokens anywhere.
  SPECDEC_SIMD I philox_of(const int32_t* ids, const PhiloxKeys& keys) {
    __m512i id[2], block[2];
    for (int h = 0; h < 2; h++) {
      id[h] = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + 8 * h)));
      block[h] = _mm512_srli_epi64(id[h], 2);
    }
    const Words c = philox_blocks(block, keys);
    __m256i word[2];
    for (int h = 0; h < 2; h++) {
      __mmask8 odd = _mm512_test_epi64_mask(id[h], _mm512_set1_epi64(1));
      __mmask8 upper = _mm512_test_epi64_mask(id[h], _mm512_set1_epi64(2));
      __m512i low = _mm512_mask_mov_epi64(c.w[0][h], odd, c.w[1][h]);
      word[h] =
          _mm512_cvtepi64_epi32(_mm512_mask_mov_epi64(low, upper, _mm512_mask_mov_epi64(c.w[2][h], odd, c.w[3][h])));
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(word[0]), word[1], 1);
  }
};

}  // namespace specdec
