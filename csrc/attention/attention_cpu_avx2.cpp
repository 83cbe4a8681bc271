// AVX2 float32 kernels, for every dtype (the others are widened a row at a time).
#if defined(__x86_64__)
#include <immintrin.h>

#include "common/numerics.h"
#include "tile_cpu.h"
#pragma GCC target("avx2,fma,f16c")
#include "rows_cpu.h"

namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8, kVectors = 2, kRows = 6;  // 12 sums + 2 columns + 1 broadcast of 16 registers
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F keep(uint64_t bits, F x, F otherwise) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 255)), lane);
    return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
  }
  static bool any_above(F x, float limit) { return _mm256_movemask_ps(_mm256_cmp_ps(x, set1(limit), _CMP_NLE_UQ)); }
  static float reduce_max(F x) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, x);
    float top = lanes[0];
    for (int i = 1; i < 8; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
  }
  // 2^x = 2^n * 2^f, f in [-0.5, 0.5]: minimax polynomial of degree 5 through 1 at 0, relative error below 1.6e-7.
  // Below 2^-126 it gives 0 (also for -inf); NaN stays NaN.
  static F exp2(F x) {
    x = _mm256_max_ps(set1(-127.0f), _mm256_min_ps(set1(127.0f), x));  // NaN passes: it is the second operand
    F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = sub(x, n);
    F y = set1(1.32647203e-3f);
    y = _mm256_fmadd_ps(y, f, set1(9.67151392e-3f));
    y = _mm256_fmadd_ps(y, f, set1(5.55073358e-2f));
    y = _mm256_fmadd_ps(y, f, set1(0.240222424f));
    y = _mm256_fmadd_ps(y, f, set1(0.693147004f));
    y = _mm256_fmadd_ps(y, f, set1(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(y, _mm256_castsi256_ps(power));
  }
  static F widen(const void* p, Element element) {
    const __m128i* words = static_cast<const __m128i*>(p);
    const __m128i* bytes = static_cast<const __m128i*>(p);
    switch (element) {
      case Element::float32: return load(static_cast<const float*>(p));
      case Element::bfloat16:
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(words)), 16));
      case Element::float16: return _mm256_cvtph_ps(_mm_loadu_si128(words));
      case Element::float8_e5m2: return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(bytes)), 8));
      default: {  // e4m3: a float16 with 3 mantissa bits, 2^8 too small
        __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(bytes)), size = _mm_and_si128(x, _mm_set1_epi16(0x7f));
        __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_xor_si128(x, size), 8), _mm_slli_epi16(size, 7));
        __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
        return mul(_mm256_cvtph_ps(_mm_or_si128(half, nan)), set1(256.0f));
      }
    }
  }
};

struct Avx2Float32 {
  using Units = __m256;
  static constexpr int kPack = 1;
  static Units load_units(const uint32_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static Units broadcast(const char* unit) { return _mm256_set1_ps(*reinterpret_cast<const float*>(unit)); }
  static __m256 dot(__m256 sum, Units a, Units b) { return _mm256_fmadd_ps(a, b, sum); }
  static void store_weights(uint32_t* p, int index, __m256 w) {
    _mm256_storeu_ps(reinterpret_cast<float*>(p) + index, w);
  }
};

// 8 x 8 transpose: dst[u * 64 + key] = rows[key][u]
void transpose8(const float* const* rows, int first, float* dst) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i] + first);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(dst + i * kTileKeys, _mm256_permute2f128_ps(a[i], a[4 + i], 0x20));
    _mm256_storeu_ps(dst + (4 + i) * kTileKeys, _mm256_permute2f128_ps(a[i], a[4 + i], 0x31));
  }
}

void pack_k(const void* const* rows, int head_dim, uint32_t* dst, Prefetch& ahead) {
  const float* const* keys = reinterpret_cast<const float* const*>(rows);
  for (int u = 0; u < head_dim; u += 8)
    for (int key = 0; key < kTileKeys; key += 8) {
      prefetch_step(ahead);
      transpose8(keys + key, u, reinterpret_cast<float*>(dst) + u * kTileKeys + key);
    }
}

bool pack_v(const void* const* rows, int v_dim, uint32_t* dst, bool check, Prefetch& ahead) {
  const __m256i limit = _mm256_set1_epi32(0x7f800000);
  __m256i bad = _mm256_setzero_si256();
  for (int key = 0; key < kTileKeys; key++) {
    for (int i = 0; i < 2; i++) prefetch_step(ahead);
    for (int d = 0; d < v_dim; d += 8) {
      __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint32_t*>(rows[key]) + d));
      bad = _mm256_or_si256(bad, _mm256_cmpeq_epi32(_mm256_and_si256(x, limit), limit));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + key * v_dim + d), x);
    }
  }
  return check && _mm256_movemask_epi8(bad) != 0;
}

void convert(const void* src, Element element, void* dst, int n) {
  for (int i = 0; i < n; i += 8)
    Avx2::store(static_cast<float*>(dst) + i,
                Avx2::widen(static_cast<const char*>(src) + i * element_bytes(element), element));
}

void store(const float* x, float factor, void* out, Element element, int n) {
  for (int i = 0; i < n; i++) {
    if (element == Element::float32) static_cast<float*>(out)[i] = x[i] * factor;
    if (element == Element::bfloat16) static_cast<BFloat16*>(out)[i] = to_bfloat16(x[i] * factor);
    if (element == Element::float16) static_cast<Half*>(out)[i] = to_half(x[i] * factor);
  }
}

void attend(const AttendArgs& args) {
  attend_rows<Avx2, Avx2Float32>(args, product<Avx2, Avx2Float32>);
}

}  // namespace

namespace specdec {

const TileKernels& avx2_kernels() {
  static constexpr TileKernels kernels = {24, 1, convert, pack_k, pack_v, attend, store, add_scaled<Avx2>};
  return kernels;
}

}  // namespace specdec
#endif
