// The tile kernels of rows_cpu.h over a vector type. Included once per instruction set, behind its target pragma: each
// row_kernels_<isa>_cpu.cpp instantiates them for its own vector type, so no symbol is shared between instruction sets.
#pragma once
#include "rows_cpu.h"

namespace specdec {

template <class V>
struct RowKernelsOf {
  using F = typename V::F;

  // exp_nonpositive of law.h, lane by lane the same bits.
  SPECDEC_SIMD F weight(F x) {
    x = V::max(x, V::set(-87.0f));
    F shifted = V::fma(x, V::set(1.44269504088896341f), V::set(kExpShift));
    F r = V::fma(V::sub(shifted, V::set(kExpShift)), V::set(-0.693147180559945309f), x);
    F value = V::fma(V::set(1.3842711924e-3f), r, V::set(8.3749648184e-3f));
    value = V::fma(value, r, V::set(4.1668057442e-2f));
    value = V::fma(value, r, V::set(1.6666421294e-1f));
    value = V::fma(value, r, V::set(4.9999994040e-1f));
    value = V::fma(value, r, V::set(1.0f));
    value = V::fma(value, r, V::set(1.0f));
    return V::scale2(value, shifted);
  }
  // 2^t by linear interpolation of the mantissa: at least exp(x), at most 6.2 % above it.
  SPECDEC_SIMD F weight_bound(F x) {
    return V::from_bits(V::max(V::fma(x, V::set(12102203.16f), V::set(1065353216.0f)), V::set(0.0f)));
  }
  SPECDEC_SIMD F scaled(const float* x, F max, F tau) { return V::mul(V::sub(V::load(x), max), tau); }

  // Where a kernel reads logits from: one type a type of data.
  struct Float32 {
    const float* p;
    SPECDEC_SIMD F at(const Float32& s, int64_t i) { return V::load(s.p + i); }
    SPECDEC_SIMD float one(const Float32& s, int64_t i) { return s.p[i]; }
  };
  struct BFloat16s {
    const uint16_t* p;
    SPECDEC_SIMD F at(const BFloat16s& s, int64_t i) { return V::load_bfloat16(s.p + i); }
    SPECDEC_SIMD float one(const BFloat16s& s, int64_t i) { return to_float(BFloat16{s.p[i]}); }
  };
  struct Halves {
    const uint16_t* p;
    SPECDEC_SIMD F at(const Halves& s, int64_t i) { return V::load_float16(s.p + i); }
    SPECDEC_SIMD float one(const Halves& s, int64_t i) { return to_float(Half{s.p[i]}); }
  };

  template <class Source>
  static int32_t peek_from(Source source, int32_t n, float* tile_max, float* groups) {
    const F lowest = V::set(-__builtin_huge_valf());
    const uint32_t all = (1u << V::lanes) - 1;
    uint32_t numbers = all;
    F best = lowest;
    int32_t i = 0;
    for (int32_t begin = 0; begin < n; begin += kPeekStep) {
      int32_t end = n - begin < kPeekStep ? n : begin + kPeekStep;
      F part = lowest;
      for (i = begin; i + V::lanes <= end; i += V::lanes) {
        F v = Source::at(source, i);
        numbers &= V::bits(V::is_number(v));
        part = V::max(v, part);  // a NaN first operand yields the second
      }
      if (groups) V::store(groups + begin / kPeekStep * V::lanes, part);
      best = V::max(best, part);
    }
    *tile_max = V::reduce_max(best);
    int32_t flags = numbers == all ? 0 : kFlagNanLogit;
    float* last_part = groups ? groups + (n - 1) / kPeekStep * V::lanes : nullptr;
    for (; i < n; i++) {
      float v = Source::one(source, i);
      if (v != v) flags |= kFlagNanLogit;
      if (v > *tile_max) *tile_max = v;
      if (last_part && v > *last_part) *last_part = v;
    }
    return flags | (*tile_max > kInfLogit ? kFlagInfLogit : 0);
  }
  static int32_t peek(const void* data, LogitType type, int64_t base, int32_t n, float* tile_max, float* groups) {
    const uint16_t* half = static_cast<const uint16_t*>(data) + base;
    if (type == LogitType::bfloat16) return peek_from(BFloat16s{half}, n, tile_max, groups);
    if (type == LogitType::float16) return peek_from(Halves{half}, n, tile_max, groups);
    return peek_from(Float32{static_cast<const float*>(data) + base}, n, tile_max, groups);
  }

  template <class Source>
  static void convert_from(Source source, int32_t n, float* x) {
    int32_t i = 0;
    for (; i + V::lanes <= n; i += V::lanes) V::store(x + i, Source::at(source, i));
    for (; i < n; i++) x[i] = Source::one(source, i);
    for (; i < (n + kGroup - 1) / kGroup * kGroup; i++) x[i] = -__builtin_huge_valf();
  }
  static void convert(const void* data, LogitType type, int64_t base, int32_t n, float* x) {
    const uint16_t* half = static_cast<const uint16_t*>(data) + base;
    if (type == LogitType::bfloat16) return convert_from(BFloat16s{half}, n, x);
    if (type == LogitType::float16) return convert_from(Halves{half}, n, x);
    convert_from(Float32{static_cast<const float*>(data) + base}, n, x);
  }

  static int32_t find(const float* x, int32_t n, float value) {
    const F wanted = V::set(value);
    for (int32_t i = 0; i < n; i += V::lanes)
      if (uint32_t found = V::bits(V::eq(V::load(x + i), wanted))) return i + __builtin_ctz(found);
    return -1;
  }

  static uint64_t mass(const float* x, int32_t n, float max, float tau, float lowest, float* kept_min) {
    const F m = V::set(max), t = V::set(tau), bottom = V::set(lowest), scale = V::set(kMassScale);
    typename V::Sum sum = V::zero();
    if (lowest == -__builtin_huge_valf()) {
      for (int32_t g = 0; g < n; g += 32)
        for (int32_t i = g; i < g + 16; i += V::lanes) {
          F pair = V::add(weight(scaled(x + i, m, t)), weight(scaled(x + i + 16, m, t)));
          V::add_rounded(sum, V::mul(pair, scale));
        }
      return V::total(sum);
    }
    F least = V::set(*kept_min);
    for (int32_t i = 0; i < n; i += V::lanes) {
      F logit = V::load(x + i), d = V::mul(V::sub(logit, m), t);
      typename V::M kept = V::ge(d, bottom);
      V::add_rounded(sum, V::select(kept, V::mul(weight(d), scale), V::set(0.0f)));
      least = V::min(V::select(kept, logit, least), least);
    }
    *kept_min = V::reduce_min(least);
    return V::total(sum);
  }

  static uint64_t entropy(const float* x, int32_t n, float max, float tau) {
    const F m = V::set(max), t = V::set(tau), scale = V::set(-kMassScale), floor = V::set(-87.0f);
    typename V::Sum sum = V::zero();
    for (int32_t i = 0; i < n; i += V::lanes) {
      F d = V::max(scaled(x + i, m, t), floor);
      V::add_rounded(sum, V::mul(V::mul(weight(d), d), scale));
    }
    return V::total(sum);
  }

  static uint64_t residual(const float* x, const float* y, int32_t n, float max_x, float tau_x, float max_y,
                           float tau_y, float a, float b) {
    const F mx = V::set(max_x), tx = V::set(tau_x), my = V::set(max_y), ty = V::set(tau_y);
    const F va = V::set(a), vb = V::set(b), zero = V::set(0.0f), scale = V::set(1125899906842624.f);
    typename V::Sum sum = V::zero();
    for (int32_t i = 0; i < n; i += V::lanes) {
      F p = V::mul(weight(scaled(x + i, mx, tx)), va), q = V::mul(weight(scaled(y + i, my, ty)), vb);
      V::add_rounded(sum, V::mul(V::max(V::sub(p, q), zero), scale));
    }
    return V::total(sum);
  }

  static int32_t collect(const float* x, int32_t n, float low, float high, int32_t* out) {
    const F bottom = V::set(low), top = V::set(high);
    int32_t count = 0;
    for (int32_t i = 0; i < n; i += V::lanes) {
      F v = V::load(x + i);
      uint32_t found = V::bits(V::both(V::ge(v, bottom), V::ge(top, v)));
      for (; found; found &= found - 1) out[count++] = i + __builtin_ctz(found);
    }
    while (count > 0 && out[count - 1] >= n) count--;  // padding
    return count;
  }

  static int32_t gather(const float* x, int32_t n, int32_t base, float low, float high, float* logits, int32_t* ids) {
    const F bottom = V::set(low), top = V::set(high);
    int32_t count = 0;
    for (int32_t i = 0; i < n; i += V::lanes) {
      F v = V::load(x + i);
      typename V::M found = V::both(V::ge(v, bottom), V::ge(top, v));
      if (V::bits(found)) count += V::compress(found, v, base + i, logits + count, ids + count);
    }
    while (count > 0 && ids[count - 1] >= base + n) count--;  // padding
    return count;
  }

  static void histogram(const float* x, int32_t n, float max, float tau, float scale, uint64_t* hist) {
    const F m = V::set(max), t = V::set(tau), s = V::set(scale), last = V::set(kBins - 1.0f);
    const F unit = V::set(kMassScale);
    for (int32_t i = 0; i < n; i += V::lanes) {
      int32_t bin[V::lanes];
      uint64_t value[V::lanes];
      F logit = V::load(x + i);
      V::store_truncated(bin, V::min(V::mul(V::sub(m, logit), s), last));
      if (tau > 0.0f) {
        V::store_rounded(value, V::mul(weight(V::mul(V::sub(logit, m), t)), unit));
        for (int32_t j = 0; j < V::lanes; j++) hist[bin[j]] += value[j];
      } else {
        for (int32_t j = 0; j < V::lanes; j++) hist[bin[j]] += i + j < n;
      }
    }
  }

  // Three rejections, cheapest first: a group of 64 whose logits are all below the floor draws nothing; a word too
  // large for its weight never reaches a logarithm. What is left (a handful a row) is decided in float64 by the caller.
  static int32_t scan(const float* x, int32_t n, int32_t base, const ScanArgs& args, Hit* hits) {
    const F m = V::set(args.max), t = V::set(args.tau), floor = V::set(args.floor), bar = V::set(args.bar);
    uint64_t position = static_cast<uint64_t>(args.key.position), seed = static_cast<uint64_t>(args.key.seed);
    uint32_t counter[3] = {static_cast<uint32_t>(position),
                           static_cast<uint32_t>(position >> 32) << 8 | args.key.purpose, args.key.salt};
    alignas(64) uint64_t keys[20];
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      keys[2 * round] = k0;
      keys[2 * round + 1] = k1;
    }
    int32_t count = 0;
    alignas(64) uint32_t words[kGroup];
    for (int32_t g = 0; g < n; g += kGroup) {
      F best = V::load(x + g);
      for (int32_t i = V::lanes; i < kGroup; i += V::lanes) best = V::max(best, V::load(x + g + i));
      if (!V::bits(V::ge(best, floor))) continue;
      V::philox(static_cast<uint32_t>(base + g) >> 2, counter, keys, words);
      for (int32_t i = 0; i < kGroup; i += V::lanes) {
        F bound = weight_bound(V::mul(V::sub(V::load(x + g + i), m), t));
        for (uint32_t found = V::bits(V::ge(bound, V::mul(V::unit(words + i), bar))); found; found &= found - 1) {
          int32_t j = g + i + __builtin_ctz(found);
          if (j < n && x[j] >= args.floor) hits[count++] = Hit{base + j, words[j - g]};
        }
      }
    }
    return count;
  }

  static const RowKernels& table() {
    static const RowKernels kernels = {V::lanes, peek,    convert, find,      mass, entropy,
                                       residual, collect, gather,  histogram, scan};
    return kernels;
  }
};

}  // namespace specdec
