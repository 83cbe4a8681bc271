// The tile kernels of rows_cpu.h over a vector type. Included once per instruction set, behind its target pragma: each
// row_kernels_<isa>_cpu.cpp instantiates them for its own vector type, so no symbol is shared between instruction sets.
#pragma once
#include "rows_cpu.h"

namespace specdec {

template <class V>
struct RowKernelsOf {
  using F = typename V::F;

  // exp_scaled of law.h, lane by lane the same bits.
  struct Weigher {
    F max, rate, lowest;
    explicit Weigher(const Weights& w) : max(V::set(w.max)), rate(V::set(w.rate)), lowest(V::set(w.lowest)) {}
  };
  // Several vectors in step: one alone would wait for its own chain of products.
  template <bool kClamp, int kCount>
  SPECDEC_SIMD void weigh(const Weigher& w, F (&x)[kCount]) {
    const F shift = V::set(kExpShift);
    F shifted[kCount], value[kCount];
    for (int i = 0; i < kCount; i++) x[i] = V::sub(x[i], w.max);
    if (kClamp)
      for (int i = 0; i < kCount; i++) x[i] = V::max(x[i], w.lowest);
    for (int i = 0; i < kCount; i++) shifted[i] = V::fma(x[i], w.rate, shift);
    for (int i = 0; i < kCount; i++) x[i] = V::fma(x[i], w.rate, V::sub(shift, shifted[i]));
    for (int i = 0; i < kCount; i++) value[i] = V::fma(V::set(kExp2C5), x[i], V::set(kExp2C4));
    for (int i = 0; i < kCount; i++) value[i] = V::fma(value[i], x[i], V::set(kExp2C3));
    for (int i = 0; i < kCount; i++) value[i] = V::fma(value[i], x[i], V::set(kExp2C2));
    for (int i = 0; i < kCount; i++) value[i] = V::fma(value[i], x[i], V::set(kExp2C1));
    for (int i = 0; i < kCount; i++) value[i] = V::fma(value[i], x[i], V::set(1.0f));
    for (int i = 0; i < kCount; i++) x[i] = V::scale2(value[i], shifted[i]);
  }
  SPECDEC_SIMD F weight(const Weigher& w, F logit) {
    F x[1] = {logit};
    weigh<true>(w, x);
    return x[0];
  }

  // Where a kernel reads logits from: one type a type of data. two: 2 * lanes logits in an order of their own; fold:
  // sums of neighbours among what `two` gave; group: 64 logits in Philox order.
  template <class Source>
  SPECDEC_SIMD void group_from(const Source& source, int64_t i, F (&x)[V::kVectors]) {
    for (int v = 0; v < V::kVectors; v++) x[v] = Source::at(source, i + v * V::lanes);
    V::group_of(x);
  }
  struct Float32 {
    const float* p;
    SPECDEC_SIMD void two(const Float32& s, int64_t i, F& a, F& b) { a = at(s, i), b = at(s, i + V::lanes); }
    SPECDEC_SIMD F fold(F a, F b) { return V::pair_sums(a, b); }
    SPECDEC_SIMD F at(const Float32& s, int64_t i) { return V::load(s.p + i); }
    SPECDEC_SIMD float one(const Float32& s, int64_t i) { return s.p[i]; }
    SPECDEC_SIMD void group(const Float32& s, int64_t i, F (&x)[V::kVectors]) { group_from(s, i, x); }
  };
  struct BFloat16s {
    const uint16_t* p;
    SPECDEC_SIMD void two(const BFloat16s& s, int64_t i, F& a, F& b) { V::load_bfloat16_pairs(s.p + i, a, b); }
    SPECDEC_SIMD F fold(F a, F b) { return V::add(a, b); }
    SPECDEC_SIMD F at(const BFloat16s& s, int64_t i) { return V::load_bfloat16(s.p + i); }
    SPECDEC_SIMD float one(const BFloat16s& s, int64_t i) { return to_float(BFloat16{s.p[i]}); }
    SPECDEC_SIMD void group(const BFloat16s& s, int64_t i, F (&x)[V::kVectors]) { V::group_bfloat16(s.p + i, x); }
  };
  struct Halves {
    const uint16_t* p;
    SPECDEC_SIMD void two(const Halves& s, int64_t i, F& a, F& b) { a = at(s, i), b = at(s, i + V::lanes); }
    SPECDEC_SIMD F fold(F a, F b) { return V::pair_sums(a, b); }
    SPECDEC_SIMD F at(const Halves& s, int64_t i) { return V::load_float16(s.p + i); }
    SPECDEC_SIMD float one(const Halves& s, int64_t i) { return to_float(Half{s.p[i]}); }
    SPECDEC_SIMD void group(const Halves& s, int64_t i, F (&x)[V::kVectors]) { group_from(s, i, x); }
  };

  // body(source of the span's type)
  template <class Body>
  static auto with_source(const Span& s, Body&& body) {
    const uint16_t* half = static_cast<const uint16_t*>(s.data);
    if (s.type == LogitType::bfloat16) return body(BFloat16s{half});
    if (s.type == LogitType::float16) return body(Halves{half});
    return body(Float32{static_cast<const float*>(s.data)});
  }
  // body(source, place in it, place in the span) for every group of 64; the last one is padded with -inf. The same
  // place in the row that is read next comes into the cache meanwhile.
  template <class Body>
  static void for_groups(const Span& s, Body&& body) {
    with_source(s, [&](auto source) {
      int32_t g = 0;
      for (; g + kGroup <= s.n; g += kGroup) {
        if (s.next)
          for (size_t line = 0; line < kGroup * sizeof(*source.p); line += 64)
            __builtin_prefetch(s.next + g * sizeof(*source.p) + line, 0, 2);
        body(source, g, g);
      }
      if (g == s.n) return;
      alignas(64) float padded[kGroup];
      for (int32_t i = 0; i < kGroup; i++)
        padded[i] = g + i < s.n ? decltype(source)::one(source, g + i) : -__builtin_huge_valf();
      body(Float32{padded}, 0, g);
    });
  }

  static constexpr int kParts = kGroupLanes / V::lanes;
  SPECDEC_SIMD bool peek_part(const BFloat16s& source, int32_t begin, int32_t n, F (&part)[kParts], float& lowest) {
    alignas(64) uint16_t best[kGroupLanes];
    bool nan = V::peek_bfloat16(source.p + begin, n, best, lowest);
    for (int v = 0; v < kParts; v++) part[v] = V::load_bfloat16(best + v * V::lanes);
    return nan;
  }
  template <class Source>
  SPECDEC_SIMD bool peek_part(const Source& source, int32_t begin, int32_t n, F (&part)[kParts], float& lowest) {
    const uint32_t all = (1u << V::lanes) - 1;
    uint32_t numbers = all;
    F low = V::set(__builtin_huge_valf());
    for (int v = 0; v < kParts; v++) part[v] = V::set(-__builtin_huge_valf());
    for (int32_t i = begin; i < begin + n; i += kGroupLanes) {
      for (int v = 0; v < kParts; v++) {
        F x = Source::at(source, i + v * V::lanes);
        numbers &= V::bits(V::is_number(x));
        part[v] = V::max(x, part[v]);  // a NaN first operand yields the second
        low = V::min(x, low);
      }
    }
    lowest = V::reduce_min(low);
    return numbers != all;
  }
  static int32_t peek(const Span& s, float* span_max, float* span_min, float* groups) {
    return with_source(s, [&](auto source) {
      bool nan = false;
      F best = V::set(-__builtin_huge_valf());
      *span_min = __builtin_huge_valf();
      for (int32_t begin = 0; begin < s.n; begin += kGroupBlock) {
        int32_t n = s.n - begin < kGroupBlock ? s.n - begin : kGroupBlock, whole = n / kGroupLanes * kGroupLanes;
        F part[kParts];
        float lowest;
        nan = peek_part(source, begin, whole, part, lowest) || nan;
        if (whole < n) {
          alignas(64) float tail[kGroupLanes];
          for (int32_t i = 0; i < kGroupLanes; i++) {
            float v = whole + i < n ? decltype(source)::one(source, begin + whole + i) : -__builtin_huge_valf();
            nan = nan || v != v;
            if (whole + i < n && v < lowest) lowest = v;
            tail[i] = v;
          }
          for (int v = 0; v < kParts; v++) part[v] = V::max(V::load(tail + v * V::lanes), part[v]);
        }
        for (int v = 0; v < kParts; v++) {
          if (groups) V::store(groups + begin / kGroupBlock * kGroupLanes + v * V::lanes, part[v]);
          best = V::max(best, part[v]);
        }
        if (lowest < *span_min) *span_min = lowest;
      }
      *span_max = V::reduce_max(best);
      return (nan ? kFlagNanLogit : 0) | (*span_max > kInfLogit ? kFlagInfLogit : 0);
    });
  }

  static void convert(const Span& s, float* x) {
    with_source(s, [&](auto source) {
      using Source = decltype(source);
      int32_t i = 0;
      for (; i + V::lanes <= s.n; i += V::lanes) V::store(x + i, Source::at(source, i));
      for (; i < s.n; i++) x[i] = Source::one(source, i);
      for (; i < (s.n + kGroup - 1) / kGroup * kGroup; i++) x[i] = -__builtin_huge_valf();
    });
  }

  static int32_t find(const Span& s, float value) {
    return with_source(s, [&](auto source) {
      using Source = decltype(source);
      const F wanted = V::set(value);
      int32_t i = 0;
      for (; i + V::lanes <= s.n; i += V::lanes)
        if (uint32_t found = V::bits(V::eq(Source::at(source, i), wanted))) return i + __builtin_ctz(found);
      for (; i < s.n; i++)
        if (Source::one(source, i) == value) return i;
      return -1;
    });
  }

  // Fours of neighbours share one rounding: (w0 + w1) + (w2 + w3). No clamp where no logit lies that far below.
  template <bool kSome, bool kClamp>
  static uint64_t mass_of(const Span& s, const Weights& weights, float low) {
    const Weigher w(weights);
    const F scale = V::set(kMassScale), bottom = V::set(low), none = V::set(0.0f);
    typename V::Sum sum = V::zero();
    for_groups(s, [&](auto source, int32_t at, int32_t) {
      using Source = decltype(source);
      for (int32_t i = at; i < at + kGroup; i += 4 * V::lanes) {
        F x[4], y[4];
        Source::two(source, i, x[0], x[1]);
        Source::two(source, i + 2 * V::lanes, x[2], x[3]);
        for (int v = 0; v < 4; v++) y[v] = x[v];
        weigh<kClamp>(w, x);
        if (kSome)
          for (int v = 0; v < 4; v++) x[v] = V::select(V::ge(y[v], bottom), x[v], none);
        V::add_rounded(sum, V::mul(V::pair_sums(Source::fold(x[0], x[1]), Source::fold(x[2], x[3])), scale));
      }
    });
    return V::total(sum);
  }
  static uint64_t mass(const Span& s, const Weights& weights, float low, bool far) {
    if (low > -__builtin_huge_valf()) return mass_of<true, true>(s, weights, low);
    return far || s.n % kGroup ? mass_of<false, true>(s, weights, low) : mass_of<false, false>(s, weights, low);
  }

  static uint64_t entropy(const float* x, int32_t n, const Weights& weights, float tau) {
    const Weigher w(weights);
    const F t = V::set(tau), scale = V::set(-kMassScale);
    typename V::Sum sum = V::zero();
    for (int32_t i = 0; i < n; i += V::lanes) {
      F logit = V::load(x + i), d = V::mul(V::max(V::sub(logit, w.max), w.lowest), t);
      V::add_rounded(sum, V::mul(V::mul(weight(w, logit), d), scale));
    }
    return V::total(sum);
  }

  static uint64_t residual(const float* x, const float* y, int32_t n, const Weights& of_x, const Weights& of_y, float a,
                           float b) {
    const Weigher wx(of_x), wy(of_y);
    const F va = V::set(a), vb = V::set(b), zero = V::set(0.0f), scale = V::set(1125899906842624.f);
    typename V::Sum sum = V::zero();
    for (int32_t i = 0; i < n; i += V::lanes) {
      F p = V::mul(weight(wx, V::load(x + i)), va), q = V::mul(weight(wy, V::load(y + i)), vb);
      V::add_rounded(sum, V::mul(V::max(V::sub(p, q), zero), scale));
    }
    return V::total(sum);
  }

  // Most groups have nothing in the range: one comparison of their maximum.
  static int32_t gather(const Span& s, float low, float high, float* logits, int32_t* ids) {
    const F bottom = V::set(low), top = V::set(high);
    int32_t count = 0;
    for_groups(s, [&](auto source, int32_t at, int32_t g) {
      using Source = decltype(source);
      F best = Source::at(source, at);
      for (int32_t i = V::lanes; i < kGroup; i += V::lanes) best = V::max(best, Source::at(source, at + i));
      if (!V::bits(V::ge(best, bottom))) return;
      for (int32_t i = 0; i < kGroup; i += V::lanes) {
        F v = Source::at(source, at + i);
        typename V::M found = V::both(V::ge(v, bottom), V::ge(top, v));
        count += V::compress(found, v, s.base + g + i, logits + count, ids + count);
      }
    });
    return count;
  }

  static void histogram(const float* x, int32_t n, const Weights& weights, bool by_mass, float scale, uint64_t* hist) {
    const Weigher w(weights);
    const F unit = V::set(kMassScale), step = V::set(scale), last = V::set(kBins - 1.0f);
    for (int32_t i = 0; i < n; i += V::lanes) {
      int32_t bin[V::lanes];
      uint64_t value[V::lanes];
      F logit = V::load(x + i);
      V::store_truncated(bin, V::min(V::mul(V::sub(w.max, logit), step), last));
      if (by_mass) {
        V::store_rounded(value, V::mul(weight(w, logit), unit));
        for (int32_t j = 0; j < V::lanes; j++) hist[bin[j]] += value[j];
      } else {
        for (int32_t j = 0; j < V::lanes; j++) hist[bin[j]] += i + j < n;
      }
    }
  }

  // The float bits of a word, linear between powers of two, against its scaled logit.
  struct Aim {
    F max, slope, limit;
    explicit Aim(const ScanArgs& a) : max(V::set(a.max)), slope(V::set(a.rate * 8388608.0f)), limit(V::set(a.limit)) {}
  };
  SPECDEC_SIMD uint32_t within(const Aim& aim, typename V::I words, F logits) {
    return V::words_within(words, V::fma(V::sub(logits, aim.max), aim.slope, aim.limit));
  }

  // Four rejections, cheapest first: a group of 64 whose logits are all below the floor draws nothing; of the words of
  // some tokens (one lane of every vector) the smallest is judged with their largest logit; then each word with its
  // own: one too large for its weight never reaches a logarithm. What is left (a handful a row) is decided in float64
  // by the caller.
  static int32_t scan(const Span& s, const ScanArgs& args, Hit* hits) {
    const Aim aim(args);
    const F floor = V::set(args.floor);
    int32_t count = 0;
    for_groups(s, [&](auto source, int32_t at, int32_t g) {
      using Source = decltype(source);
      F x[V::kVectors];
      Source::group(source, at, x);
      F best = x[0];
      for (int v = 1; v < V::kVectors; v++) best = V::max(best, x[v]);
      if (!V::bits(V::ge(best, floor))) return;
      typename V::I words[V::kVectors];
      V::philox(static_cast<uint32_t>(s.base + g) >> 2, args.keys, words);
      typename V::I least = words[0];
      for (int v = 1; v < V::kVectors; v++) least = V::least(least, words[v]);
      if (!within(aim, least, best)) return;
      for (int v = 0; v < V::kVectors; v++) {
        for (uint32_t found = within(aim, words[v], x[v]); found; found &= found - 1) {
          int lane = __builtin_ctz(found);
          int32_t j = V::token_of(v, lane);
          float logit = Source::one(source, at + j);
          if (logit >= args.floor) hits[count++] = Hit{s.base + g + j, V::word_at(words[v], lane), logit};
        }
      }
    });
    return count;
  }

  static int32_t scan_listed(const float* logits, const int32_t* ids, int32_t n, const ScanArgs& args, Hit* hits) {
    const Aim aim(args);
    int32_t count = 0;
    for (int32_t i = 0; i < n; i += V::lanes) {
      typename V::I words = V::philox_of(ids + i, args.keys);
      for (uint32_t found = within(aim, words, V::load(logits + i)); found; found &= found - 1) {
        int lane = __builtin_ctz(found);
        if (i + lane < n) hits[count++] = Hit{ids[i + lane], V::word_at(words, lane), logits[i + lane]};
      }
    }
    return count;
  }

  static const RowKernels& table() {
    static const RowKernels kernels = {V::lanes, peek,   convert,   find, mass,       entropy,
                                       residual, gather, histogram, scan, scan_listed};
    return kernels;
  }
};

}  // namespace specdec
