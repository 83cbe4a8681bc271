// One lane of plain C++: the fallback, and what the vector versions must equal bit for bit.
#pragma once
#include "../common/numerics.h"
#include "../common/rng.h"
#include "philox_keys.h"

namespace specdec {

#define SPECDEC_SIMD static inline __attribute__((always_inline))

struct Scalar {
  static constexpr int lanes = 1;
  using F = float;
  using M = bool;
  using Sum = uint64_t;

  SPECDEC_SIMD F load(const float* p) { return *p; }
  SPECDEC_SIMD void store(float* p, F v) { *p = v; }
  SPECDEC_SIMD F load_bfloat16(const uint16_t* p) { return to_float(BFloat16{*p}); }
  SPECDEC_SIMD void load_bfloat16_pairs(const uint16_t* p, F& even, F& odd) {
    even = load_bfloat16(p);
    odd = load_bfloat16(p + 1);
  }
  SPECDEC_SIMD bool peek_bfloat16(const uint16_t* p, int32_t n, uint16_t* best, float& lowest) {
    bool nan = false;
    for (int32_t i = 0; i < 32; i++) best[i] = 0xFF80;  // -inf
    lowest = __builtin_huge_valf();
    for (int32_t i = 0; i < n; i++) {
      float x = load_bfloat16(p + i);
      nan = nan || x != x;
      if (x > load_bfloat16(best + i % 32)) best[i % 32] = p[i];
      lowest = x < lowest ? x : lowest;
    }
    return nan;
  }
  SPECDEC_SIMD F load_float16(const uint16_t* p) { return to_float(Half{*p}); }
  SPECDEC_SIMD F set(float x) { return x; }
  SPECDEC_SIMD F sub(F a, F b) { return a - b; }
  SPECDEC_SIMD F add(F a, F b) { return a + b; }
  SPECDEC_SIMD F pair_sums(F a, F b) { return a + b; }
  SPECDEC_SIMD F mul(F a, F b) { return a * b; }
  SPECDEC_SIMD F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
  SPECDEC_SIMD F max(F a, F b) { return a > b ? a : b; }
  SPECDEC_SIMD F min(F a, F b) { return a < b ? a : b; }
  // a * 2^n, n the integer in the low bits of `shifted` (see kExpShift)
  SPECDEC_SIMD F scale2(F a, F shifted) { return bits_float(float_bits(a) + (float_bits(shifted) << 23)); }
  SPECDEC_SIMD M ge(F a, F b) { return a >= b; }
  SPECDEC_SIMD M eq(F a, F b) { return a == b; }
  SPECDEC_SIMD M is_number(F a) { return a == a; }
  SPECDEC_SIMD M both(M a, M b) { return a && b; }
  SPECDEC_SIMD F select(M m, F yes, F no) { return m ? yes : no; }
  SPECDEC_SIMD uint32_t bits(M m) { return m; }
  SPECDEC_SIMD int32_t compress(M m, F v, int32_t first, float* values, int32_t* ids) {
    *values = v;
    *ids = first;
    return m;
  }
  SPECDEC_SIMD float reduce_max(F a) { return a; }
  SPECDEC_SIMD float reduce_min(F a) { return a; }

  SPECDEC_SIMD Sum zero() { return 0; }
  SPECDEC_SIMD void add_rounded(Sum& sum, F a) { sum += static_cast<uint64_t>(__builtin_llrintf(a)); }
  SPECDEC_SIMD uint64_t total(Sum sum) { return sum; }
  SPECDEC_SIMD void store_rounded(uint64_t* p, F a) { *p = static_cast<uint64_t>(__builtin_llrintf(a)); }
  SPECDEC_SIMD void store_truncated(int32_t* p, F a) { *p = static_cast<int32_t>(a); }
  using I = uint32_t;
  static constexpr int kVectors = 64;
  SPECDEC_SIMD int32_t token_of(int vector, int) { return vector; }
  SPECDEC_SIMD void group_bfloat16(const uint16_t* p, F (&x)[kVectors]) {
    for (int v = 0; v < kVectors; v++) x[v] = load_bfloat16(p + v);
  }
  SPECDEC_SIMD void group_of(F (&)[kVectors]) {}
  SPECDEC_SIMD uint32_t words_within(I word, F limit) {
    return limit >= 0.0f && float_bits(static_cast<float>(word >> 8)) + (8u << 23) <= static_cast<uint32_t>(limit);
  }
  SPECDEC_SIMD I least(I a, I b) { return a < b ? a : b; }
  SPECDEC_SIMD uint32_t word_at(I word, int) { return word; }

  SPECDEC_SIMD Philox philox_block(uint32_t block, const PhiloxKeys& keys) {
    return philox4x32_10(block, keys.counter[0], keys.counter[1], keys.counter[2], keys.round[0], keys.round[1]);
  }
  // Words of tokens 4 * block .. 4 * block + 63.
  SPECDEC_SIMD void philox(uint32_t block, const PhiloxKeys& keys, I (&words)[kVectors]) {
    for (uint32_t j = 0; j < 16; j++) {
      Philox out = philox_block(block + j, keys);
      for (int w = 0; w < 4; w++) words[4 * j + w] = out.word[w];
    }
  }
  SPECDEC_SIMD I philox_of(const int32_t* ids, const PhiloxKeys& keys) {
    uint32_t id = static_cast<uint32_t>(*ids);
    return philox_block(id >> 2, keys).word[id & 3];
  }
};

}  // namespace specdec
