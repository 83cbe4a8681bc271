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
    typename V::M normal = V::ge(x, V::set(-87.0f));
    x = V::max(x, V::set(-87.0f));
    F n = V::round(V::mul(x, V::set(1.44269504088896341f)));
    F r = V::fma(n, V::set(2.12194440e-4f), V::fma(n, V::set(-0.693359375f), x));
    F poly = V::fma(V::set(1.9875691500e-4f), r, V::set(1.3981999507e-3f));
    poly = V::fma(poly, r, V::set(8.3334519073e-3f));
    poly = V::fma(poly, r, V::set(4.1665795894e-2f));
    poly = V::fma(poly, r, V::set(1.6666665459e-1f));
    poly = V::fma(poly, r, V::set(5.0000001201e-1f));
    F value = V::add(V::fma(poly, V::mul(r, r), r), V::set(1.0f));
    return V::select(normal, V::scale2(value, n), V::set(0.0f));
  }
  SPECDEC_SIMD F scaled(const float* x, F max, F tau) { return V::mul(V::sub(V::load(x), max), tau); }

  template <class Load>
  static inline __attribute__((always_inline)) int32_t load_as(Load load, int32_t n, float* x, float* tile_max) {
    const F infinity = V::set(__builtin_huge_valf()), lowest = V::set(-__builtin_huge_valf());
    F best = lowest;
    uint32_t nan = 0;
    int32_t i = 0;
    for (; i + V::lanes <= n; i += V::lanes) {
      F v = load(i);
      typename V::M number = V::is_number(v);
      nan |= ~V::bits(number);
      v = V::select(number, v, lowest);
      best = V::max(best, v);
      V::store(x + i, v);
    }
    const uint32_t lane_mask = V::lanes == 32 ? ~0u : (1u << V::lanes) - 1;
    int32_t flags = nan & lane_mask ? kFlagNanLogit : 0;
    *tile_max = V::reduce_max(best);
    return flags | (V::bits(V::eq(best, infinity)) ? kFlagInfLogit : 0);
  }

  static int32_t load(const void* data, LogitType type, int64_t base, int32_t n, float* x, float* tile_max) {
    int32_t whole = n / V::lanes * V::lanes, flags;
    const uint16_t* half = static_cast<const uint16_t*>(data) + base;
    const float* full = static_cast<const float*>(data) + base;
    if (type == LogitType::bfloat16)
      flags = load_as([half](int32_t i) __attribute__((always_inline)) { return V::load_bfloat16(half + i); }, whole, x,
                      tile_max);
    else if (type == LogitType::float16)
      flags = load_as([half](int32_t i) __attribute__((always_inline)) { return V::load_float16(half + i); }, whole, x,
                      tile_max);
    else
      flags =
          load_as([full](int32_t i) __attribute__((always_inline)) { return V::load(full + i); }, whole, x, tile_max);
    for (int32_t i = whole; i < n; i++) {
      float v = type == LogitType::float32    ? full[i]
                : type == LogitType::bfloat16 ? to_float(BFloat16{half[i]})
                                              : to_float(Half{half[i]});
      if (v != v) v = -__builtin_huge_valf(), flags |= kFlagNanLogit;
      if (v == __builtin_huge_valf()) flags |= kFlagInfLogit;
      x[i] = v;
      if (v > *tile_max) *tile_max = v;
    }
    for (int32_t i = n; i < (n + kGroup - 1) / kGroup * kGroup; i++) x[i] = -__builtin_huge_valf();
    if (flags & kFlagInfLogit) {
      for (int32_t i = 0; i < n; i++) x[i] = x[i] > kInfLogit ? kInfLogit : x[i];
      *tile_max = kInfLogit;
    }
    return flags;
  }

  static float max(const float* x, int32_t n) {
    F best = V::set(-__builtin_huge_valf());
    for (int32_t i = 0; i < n; i += V::lanes) best = V::max(best, V::load(x + i));
    return V::reduce_max(best);
  }

  static void group_max(const float* x, int32_t n, float* out) {
    for (int32_t g = 0; g * kGroup < n; g++) {
      F best = V::load(x + g * kGroup);
      for (int32_t i = V::lanes; i < kGroup; i += V::lanes) best = V::max(best, V::load(x + g * kGroup + i));
      out[g] = V::reduce_max(best);
    }
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
      for (int32_t i = 0; i < n; i += V::lanes) V::add_rounded(sum, V::mul(weight(scaled(x + i, m, t)), scale));
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
    uint32_t keys[20], k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
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
        F logit = V::load(x + g + i), w = weight(V::mul(V::sub(logit, m), t));
        uint32_t found = V::bits(V::both(V::ge(logit, floor), V::ge(w, V::mul(V::unit(words + i), bar))));
        for (; found; found &= found - 1) {
          int32_t j = g + i + __builtin_ctz(found);
          if (j < n) hits[count++] = Hit{base + j, words[j - g]};
        }
      }
    }
    return count;
  }

  static const RowKernels& table() {
    static const RowKernels kernels = {load, max, group_max, find, mass, entropy, residual, collect, histogram, scan};
    return kernels;
  }
};

}  // namespace specdec
