// bfloat16 pairs on 512-bit vectors: packing for dot products of pairs (vdpbf16ps and the AMX tiles share the layout).
#pragma once
#include "simd_avx512.h"

namespace {

struct Avx512BFloat16 {
  using Units = __m512bh;
  static constexpr int kPack = 2;
  static Units load_units(const uint32_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static Units broadcast(const char* unit) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(*reinterpret_cast<const int*>(unit)));
  }
  static __m512 dot(__m512 sum, Units a, Units b) { return _mm512_dpbf16_ps(sum, a, b); }
  static void store_weights(uint32_t* p, int index, __m512 w) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + index / 2), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(w)));
  }
};

inline void transpose_key_pairs(const void* const* rows, int head_dim, uint32_t* dst, Prefetch& ahead) {
  transpose_keys(rows, head_dim / 2, dst, ahead);
}

// dst[pair][d] = (V[2 pair][d], V[2 pair + 1][d])
inline bool pack_value_pairs(const void* const* rows, int v_dim, uint32_t* dst, bool check, Prefetch& ahead) {
  const __m512i limit = _mm512_set1_epi16(0x7f80);
  __mmask32 bad = 0;
  for (int pair = 0; pair < kTileKeys / 2; pair++) {
    const uint16_t* even = static_cast<const uint16_t*>(rows[2 * pair]);
    const uint16_t* odd = static_cast<const uint16_t*>(rows[2 * pair + 1]);
    for (int i = 0; i < 4; i++) prefetch_step(ahead);
    for (int d = 0; d < v_dim; d += 16) {
      __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + d));
      __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + d));
      __m512i x = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
      if (check) bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, limit), limit);
      _mm512_storeu_si512(dst + pair * v_dim + d, x);
    }
  }
  return bad != 0;
}

inline void convert_bfloat16(const void* src, Element element, void* dst, int n) {
  if (element == Element::bfloat16) {
    __builtin_memcpy(dst, src, n * 2);
    return;
  }
  for (int i = 0; i < n; i += 16) {  // float8 values are bfloat16 values: exact
    __m512 x = Avx512::widen(static_cast<const char*>(src) + i * element_bytes(element), element);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(dst) + i), Avx512::round_bfloat16(x));
  }
}

}  // namespace
