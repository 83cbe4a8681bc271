// The row-block algorithm, written once over a vector type S and a compute type C; each attention_cpu_*.cpp compiles it
// for its instruction set inside an anonymous namespace (no function of another set can be linked in its place).
//
//   S: F (vector of S::kWidth floats), load, store, set1, add, mul, sub, div, fma, max, exp2, keep(bits, x, otherwise),
//      any_above(x, limit) (true for NaN), reduce_max
//   C: kPack, dot(acc, unit, vector), load_units(ptr), broadcast(ptr to a unit), store_weights(ptr, F)
#pragma once
#include "tile_cpu.h"

namespace {

using namespace specdec;

// C[MR][NV vectors] at (row, col) of the product, kept in registers over all units.
template <class S, class C, int MR, int NV>
inline void micro_product(const ProductArgs& p, int row, int col) {
  // Rows 0..2 and 3..5 are reached from two pointers by multiples of one stride: few registers, no spills.
  const char *upper = reinterpret_cast<const char*>(p.a + row * p.lda), *lower = upper + 12 * p.lda;
  const int64_t stride = 4 * p.lda, ldb = p.ldb, ldc = p.ldc;
  const uint32_t* b = p.b + col;
  float* c = p.c + row * ldc + col;
  Prefetch ahead = *p.ahead;
  typename S::F acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = p.accumulate ? S::load(c + r * ldc + v * S::kWidth) : S::set1(0.0f);
  for (int u = 0; u < p.units; u++) {
    asm volatile("" : "+r"(upper), "+r"(lower));  // or the compiler keeps six pointers and spills
    prefetch_one(ahead);
    typename C::Units column[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) column[v] = C::load_units(b + v * S::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      typename C::Units unit = C::broadcast((r < 3 ? upper : lower) + r % 3 * stride);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = C::dot(acc[r][v], unit, column[v]);
    }
    upper += 4;
    lower += 4;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) S::store(c + r * ldc + v * S::kWidth, acc[r][v]);
  *p.ahead = ahead;
}

template <class S, class C, int MR>
inline void product_rows(const ProductArgs& p, int row) {
  constexpr int kStep = S::kVectors * S::kWidth;
  int col = 0;
  for (; col + kStep <= p.n; col += kStep) micro_product<S, C, MR, S::kVectors>(p, row, col);
  for (; col < p.n; col += S::kWidth) micro_product<S, C, MR, 1>(p, row, col);  // head dims are multiples of 16 only
}

// The order of summation of an element depends neither on rows nor on n.
template <class S, class C>
void product(const ProductArgs& p) {
  int r = 0;
  for (; r + S::kRows <= p.rows; r += S::kRows) product_rows<S, C, S::kRows>(p, r);
  static_assert(S::kRows == 6);
  switch (p.rows - r) {
    case 1: return product_rows<S, C, 1>(p, r);
    case 2: return product_rows<S, C, 2>(p, r);
    case 3: return product_rows<S, C, 3>(p, r);
    case 4: return product_rows<S, C, 4>(p, r);
    case 5: return product_rows<S, C, 5>(p, r);
    default: return;
  }
}

// cap * tanh(x). Lambert's continued fraction for tanh(x / 2) = n / d, then tanh(x) = 2 n d / (d^2 + n^2): its relative
// error stays near 2e-7 down to x = 0, where 1 - 2 / (1 + exp(2 x)) would lose the score under a large cap.
template <class S>
inline typename S::F capped(typename S::F x, float cap) {
  using F = typename S::F;
  constexpr float kUnit = 1.0f / 34459425.0f;
  const F zero = S::set1(0.0f), one = S::set1(1.0f), limit = S::set1(-9.0f);  // tanh is 1 beyond; NaN passes
  x = S::sub(zero, S::max(limit, S::sub(zero, S::max(limit, x))));
  const F h = S::mul(x, S::set1(0.5f)), z = S::mul(h, h);
  F n = S::fma(z, S::set1(kUnit), S::set1(990.0f * kUnit));
  n = S::fma(n, z, S::set1(135135.0f * kUnit));
  n = S::fma(n, z, S::set1(4729725.0f * kUnit));
  n = S::mul(S::fma(n, z, one), h);
  F d = S::fma(z, S::set1(45.0f * kUnit), S::set1(13860.0f * kUnit));
  d = S::fma(d, z, S::set1(945945.0f * kUnit));
  d = S::fma(d, z, S::set1(16216200.0f * kUnit));
  d = S::fma(d, z, one);
  return S::div(S::mul(S::mul(n, d), S::set1(2.0f * cap)), S::fma(d, d, S::mul(n, n)));
}

// Scores of one row to weights 2^(t - max), keeping the running maximum, the partial sums and `out` consistent.
template <class S, class C, bool kMasked>
inline void softmax_row(const float* scores, uint64_t visible, const AttendArgs& args, int r, uint32_t* weights) {
  using F = typename S::F;
  constexpr int kVecs = kTileKeys / S::kWidth;
  F t[kVecs];
  const F scale = S::set1(args.scale);
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; i++) t[i] = S::mul(S::load(scores + i * S::kWidth), scale);
  if (args.cap != 0.0f)
    for (int i = 0; i < kVecs; i++) t[i] = capped<S>(t[i], args.cap);
  if (kMasked) {
    const F hidden = S::set1(-__builtin_inff());
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; i++) t[i] = S::keep(visible >> (i * S::kWidth), t[i], hidden);
  }
  F top = t[0];
#pragma GCC unroll 16
  for (int i = 1; i < kVecs; i++) top = S::max(top, t[i]);
  float* sums = args.row_sum + r * kLanes;
  float row_max = args.row_max[r];
  if (__builtin_expect(S::any_above(top, row_max + kRescaleLog2), 0)) {
    float raised = S::reduce_max(top);
    raised = raised > row_max ? raised : row_max;
    const F shrink = S::exp2(S::set1(row_max == raised ? 0.0f : row_max - raised));
    float* out = args.out + r * args.v_dim;
    for (int i = 0; i < args.v_dim; i += S::kWidth) S::store(out + i, S::mul(S::load(out + i), shrink));
    for (int i = 0; i < kLanes; i += S::kWidth) S::store(sums + i, S::mul(S::load(sums + i), shrink));
    args.row_max[r] = row_max = raised;
  }
  const F base = S::set1(row_max == -__builtin_inff() ? 0.0f : row_max);
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; i++) {
    F w = S::exp2(S::sub(t[i], base));
    int lane = i * S::kWidth % kLanes;
    S::store(sums + lane, S::add(S::load(sums + lane), w));
    C::store_weights(weights, i * S::kWidth, w);
  }
}

// out += weights x V for tiles that hold a NaN or an infinity: the same sums in the same order, with the values of
// hidden keys set to zero, so that the bits of a row do not tell whether another row sees the NaN.
template <class S, class C>
void careful_product(const uint32_t* weights, const AttendArgs& args, float* out, int r) {
  alignas(64) uint32_t row[kMaxHeadDim];
  for (int u = 0; u < kTileKeys / C::kPack; u++) {
    uint32_t kept = 0;
    for (int i = 0; i < C::kPack; i++)
      if (!args.visible || args.visible[r] >> (u * C::kPack + i) & 1)
        kept |= C::kPack == 1 ? 0xffffffffu : 0xffffu << (16 * i);
    if (!kept) continue;
    const uint32_t* v = args.v + u * static_cast<int64_t>(args.v_dim);
    for (int d = 0; d < args.v_dim; d++) row[d] = v[d] & kept;
    const typename C::Units weight = C::broadcast(reinterpret_cast<const char*>(weights + u));
    for (int d = 0; d < args.v_dim; d += S::kWidth)
      S::store(out + d, C::dot(S::load(out + d), weight, C::load_units(row + d)));
  }
}

template <class S>
void add_scaled(const float* x, float factor, float* y, int n) {
  for (int i = 0; i < n; i += S::kWidth)
    S::store(y + i, S::add(S::load(y + i), S::mul(S::load(x + i), S::set1(factor))));
}

// `multiply(ProductArgs)` is the matrix product of the instruction set.
template <class S, class C, class Product>
void attend_rows(const AttendArgs& args, Product&& multiply) {
  alignas(64) float scores[kMaxBlockRows * kTileKeys];
  alignas(64) uint32_t weights[kMaxBlockRows * kTileKeys / C::kPack];
  constexpr int kUnits = kTileKeys / C::kPack;
  const int units = args.head_dim / C::kPack;
  multiply(
      ProductArgs{args.q, units, args.k, kTileKeys, scores, kTileKeys, args.rows, kTileKeys, units, false, args.ahead});
  if (args.visible)
    for (int r = 0; r < args.rows; r++)
      softmax_row<S, C, true>(scores + r * kTileKeys, args.visible[r], args, r, weights + r * kUnits);
  else
    for (int r = 0; r < args.rows; r++)
      softmax_row<S, C, false>(scores + r * kTileKeys, 0, args, r, weights + r * kUnits);
  if (args.careful) {
    for (int r = 0; r < args.rows; r++) careful_product<S, C>(weights + r * kUnits, args, args.out + r * args.v_dim, r);
    return;
  }
  for (int i = args.rows * kUnits; i < (args.rows + 15) / 16 * 16 * kUnits; i++) weights[i] = 0;  // AMX reads them
  multiply(ProductArgs{weights, kUnits, args.v, args.v_dim, args.out, args.v_dim, args.rows, args.v_dim, kUnits, true,
                       args.ahead});
}

}  // namespace
