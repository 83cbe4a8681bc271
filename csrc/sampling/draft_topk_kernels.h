// The two vector loops of draft_topk, once per instruction set (row_kernels_<isa>_cpu.cpp includes this behind its
// vector type). They read logits where they lie; NaN counts as nothing in both. Every version gives the same bits.
#pragma once
#include "draft_topk_cpu.h"
#include "law.h"

namespace specdec {

template <class V>
struct DraftTopkOf {
  using F = typename V::F;
  static constexpr int kVectors = 32 / V::lanes;  // 32 running sums, whatever the width
  static constexpr int kAhead = 4096;             // bytes: the hardware's own prefetching ends with a page

  struct Float32 {
    const float* p;
    SPECDEC_SIMD F at(const Float32& s, int32_t i) { return V::load(s.p + i); }
    SPECDEC_SIMD float one(const Float32& s, int32_t i) { return s.p[i]; }
  };
  struct BFloat16s {
    const uint16_t* p;
    SPECDEC_SIMD F at(const BFloat16s& s, int32_t i) { return V::load_bfloat16(s.p + i); }
    SPECDEC_SIMD float one(const BFloat16s& s, int32_t i) { return to_float(BFloat16{s.p[i]}); }
  };
  struct Halves {
    const uint16_t* p;
    SPECDEC_SIMD F at(const Halves& s, int32_t i) { return V::load_float16(s.p + i); }
    SPECDEC_SIMD float one(const Halves& s, int32_t i) { return to_float(Half{s.p[i]}); }
  };
  template <class Body>
  static auto with_source(DraftLogits logits, Body&& body) {
    const uint16_t* half = static_cast<const uint16_t*>(logits.data);
    if (logits.type == DraftLogits::bfloat16) return body(BFloat16s{half});
    if (logits.type == DraftLogits::float16) return body(Halves{half});
    return body(Float32{static_cast<const float*>(logits.data)});
  }

  // 2^((x - reference) * rate): 2^n times a polynomial of the fraction in [-1/2, 1/2], relative error 2^-22; what lies
  // below `lowest` counts as that.
  SPECDEC_SIMD F weight(F x, F reference, F rate, F lowest) {
    const F shift = V::set(kExpShift);
    const F d = V::max(V::sub(x, reference), lowest);
    const F shifted = V::fma(d, rate, shift), r = V::fma(d, rate, V::sub(shift, shifted));
    F value = V::fma(V::set(1.326472731e-3f), r, V::set(9.671512991e-3f));
    value = V::fma(value, r, V::set(5.550733581e-2f));
    value = V::fma(value, r, V::set(2.402224243e-1f));
    value = V::fma(value, r, V::set(6.931470037e-1f));
    value = V::fma(value, r, V::set(1.0f));
    return V::scale2(value, shifted);
  }

  template <class Source>
  static DraftStep weigh_from(Source source, int32_t n, float reference, float rate) {
    const F from = V::set(reference), slope = V::set(rate), lowest = V::set(-120.0f / rate);
    F sum[kVectors], best = V::set(-__builtin_huge_valf());
    for (int v = 0; v < kVectors; v++) sum[v] = V::set(0.0f);
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
      for (int line = 0; line < static_cast<int>(32 * sizeof(*source.p)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(source.p + i) + kAhead + line);
      for (int v = 0; v < kVectors; v++) {
        const F x = Source::at(source, i + v * V::lanes);
        best = V::max(x, best);  // a NaN first operand yields the second
        sum[v] = V::add(sum[v], weight(x, from, slope, lowest));
      }
    }
    alignas(64) float lanes[32];
    if (i < n) {
      for (int32_t j = 0; j < 32; j++) lanes[j] = i + j < n ? Source::one(source, i + j) : -__builtin_huge_valf();
      for (int v = 0; v < kVectors; v++) {
        const F x = V::load(lanes + v * V::lanes);
        best = V::max(x, best);
        sum[v] = V::add(sum[v], weight(x, from, slope, lowest));
      }
    }
    for (int v = 0; v < kVectors; v++) V::store(lanes + v * V::lanes, sum[v]);
    DraftStep step = {V::reduce_max(best), 0.0};
    for (float lane : lanes) step.sum += lane;
    return step;
  }
  static DraftStep weigh(DraftLogits logits, int32_t n, float reference, float rate) {
    return with_source(logits, [&](auto source) { return weigh_from(source, n, reference, rate); });
  }

  template <class Source>
  static int32_t above_from(Source source, int32_t n, float low, float* values, int32_t* places) {
    const F floor = V::set(low);
    int32_t count = 0, i = 0;
    for (; i + V::lanes <= n; i += V::lanes)
      for (uint32_t found = V::bits(V::ge(Source::at(source, i), floor)); found; found &= found - 1) {
        places[count] = i + __builtin_ctz(found);
        values[count] = Source::one(source, places[count]);
        count++;
      }
    for (; i < n; i++)
      if (Source::one(source, i) >= low) {
        values[count] = Source::one(source, i);
        places[count++] = i;
      }
    return count;
  }
  static int32_t above(DraftLogits logits, int32_t n, float low, float* values, int32_t* places) {
    return with_source(logits, [&](auto source) { return above_from(source, n, low, values, places); });
  }

  static const DraftTopkKernels& table() {
    static const DraftTopkKernels kernels = {weigh, above};
    return kernels;
  }
};

}  // namespace specdec
