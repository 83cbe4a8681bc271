// Portable kernels on 4-float vectors of the compiler (SSE2, NEON): any CPU runs every shape and dtype.
#include "common/numerics.h"
#include "rows_cpu.h"

namespace {

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kWidth = 4, kVectors = 2, kRows = 6;
  static F load(const float* p) {
    F x;
    __builtin_memcpy(&x, p, 16);
    return x;
  }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, 16); }
  static F set1(float x) { return F{x, x, x, x}; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F keep(uint64_t bits, F x, F otherwise) {
    const I lane = {1, 2, 4, 8};
    int32_t low = static_cast<int32_t>(bits & 15);
    return (I{low, low, low, low} & lane) == lane ? x : otherwise;
  }
  static bool any_above(F x, float limit) {
    bool any = false;
    for (int i = 0; i < kWidth; i++) any |= !(x[i] <= limit);
    return any;
  }
  static float reduce_max(F x) {
    float top = x[0];
    for (int i = 1; i < kWidth; i++) top = x[i] > top ? x[i] : top;
    return top;
  }
  // As the AVX2 version; rounding to nearest by adding and taking away 1.5 * 2^23.
  static F exp2(F x) {
    x = x < set1(-127.0f) ? set1(-127.0f) : x;  // NaN passes
    x = x > set1(127.0f) ? set1(127.0f) : x;
    const F magic = set1(12582912.0f);
    volatile F shifted = x + magic;  // keeps the compiler from cancelling the two
    F n = shifted - magic, f = x - n;
    F y = set1(1.32647203e-3f);
    y = y * f + set1(9.67151392e-3f);
    y = y * f + set1(5.55073358e-2f);
    y = y * f + set1(0.240222424f);
    y = y * f + set1(0.693147004f);
    y = y * f + set1(1.0f);
    F result = y;
    for (int i = 0; i < kWidth; i++) {
      int32_t power = n[i] == n[i] ? static_cast<int32_t>(n[i]) + 127 : 127;
      result[i] = y[i] * bits_float(static_cast<uint32_t>(power) << 23);
    }
    return result;
  }
};

struct PortableFloat32 {
  using Units = Portable::F;
  static constexpr int kPack = 1;
  static Units load_units(const uint32_t* p) { return Portable::load(reinterpret_cast<const float*>(p)); }
  static Units broadcast(const char* unit) { return Portable::set1(*reinterpret_cast<const float*>(unit)); }
  static Units dot(Units sum, Units a, Units b) { return sum + a * b; }
  static void store_weights(uint32_t* p, int index, Units w) {
    Portable::store(reinterpret_cast<float*>(p) + index, w);
  }
};

void pack_k(const void* const* rows, int head_dim, uint32_t* dst, Prefetch& ahead) {
  for (int key = 0; key < kTileKeys; key++) {
    for (int i = 0; i < 2; i++) prefetch_step(ahead);
    for (int u = 0; u < head_dim; u++) dst[u * kTileKeys + key] = static_cast<const uint32_t*>(rows[key])[u];
  }
}

bool pack_v(const void* const* rows, int v_dim, uint32_t* dst, bool check, Prefetch& ahead) {
  bool bad = false;
  for (int key = 0; key < kTileKeys; key++) {
    for (int i = 0; i < 2; i++) prefetch_step(ahead);
    for (int d = 0; d < v_dim; d++) {
      uint32_t x = static_cast<const uint32_t*>(rows[key])[d];
      bad |= (x & 0x7f800000u) == 0x7f800000u;
      dst[key * v_dim + d] = x;
    }
  }
  return check && bad;
}

template <class T>
void widen(const void* src, float* dst, int n) {
  for (int i = 0; i < n; i++) dst[i] = to_float(static_cast<const T*>(src)[i]);
}

void convert(const void* src, Element element, void* dst, int n) {
  float* out = static_cast<float*>(dst);
  switch (element) {
    case Element::float32: return widen<float>(src, out, n);
    case Element::bfloat16: return widen<BFloat16>(src, out, n);
    case Element::float16: return widen<Half>(src, out, n);
    case Element::float8_e4m3: return widen<Float8E4M3>(src, out, n);
    case Element::float8_e5m2: return widen<Float8E5M2>(src, out, n);
  }
}

void store(const float* x, float factor, void* out, Element element, int n) {
  for (int i = 0; i < n; i++) {
    if (element == Element::float32) static_cast<float*>(out)[i] = x[i] * factor;
    if (element == Element::bfloat16) static_cast<BFloat16*>(out)[i] = to_bfloat16(x[i] * factor);
    if (element == Element::float16) static_cast<Half*>(out)[i] = to_half(x[i] * factor);
  }
}

void attend(const AttendArgs& args) {
  attend_rows<Portable, PortableFloat32>(args, product<Portable, PortableFloat32>);
}

}  // namespace

namespace specdec {

const TileKernels& scalar_kernels() {
  static constexpr TileKernels kernels = {24, 1, convert, pack_k, pack_v, attend, store, add_scaled<Portable>};
  return kernels;
}

}  // namespace specdec
