// The law a row of logits stands for, in a few scalars: shared by the CPU ops, CUDA and the CUDA-on-CPU runtime.
//
//   weight(v) = exp((l(v) - max) * tau)     max subtracted before scaling: error d * 2^-24 at distance d, not l * 2^-24
//   mass(v)   = round(weight(v) * 2^44)     64-bit integer: sums do not depend on order, threads, splits or shards
//               (an unfiltered row adds the weights of ids i and i + 16 of every 32 before rounding)
//   p(v)      = weight(v) / sum over kept v, and v is kept iff its logit is above `threshold`, or equals it and its id
//               is at most `last_tie` (total order: logit descending, id ascending)
#pragma once
#include "../common/flags.h"
#include "../common/numerics.h"

namespace specdec {

constexpr int32_t kTileLogits = 4096;           // fixed: never tuned by batch or grid
constexpr float kMassScale = 17592186044416.f;  // 2^44: up to 2^19 tokens stay under 2^63
constexpr int64_t kMaxVocab = 1 << 19;
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kInfLogit = 3.402823466e38f;  // +inf is read as the largest float: ties among +inf ids are uniform
constexpr double kNegInf = -__builtin_huge_val();

// exp(x) for x <= 0 by a fixed sequence of fused operations: the same bits on every vector width and device. Relative
// error below 2^-21; exactly 2^-n at the float nearest -n ln 2 for n = 0, 1, 2. Below -87 and for NaN it is exp(-87),
// whose mass is 0.
constexpr float kExpShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer and leaves it in the low bits
SPECDEC_HD float exp_nonpositive(float x) {
  x = x > -87.0f ? x : -87.0f;
  float shifted = fmaf(x, 1.44269504088896341f, kExpShift);
  float r = fmaf(shifted - kExpShift, -0.693147180559945309f, x);
  float value = fmaf(1.3842711924e-3f, r, 8.3749648184e-3f);
  value = fmaf(value, r, 4.1668057442e-2f);
  value = fmaf(value, r, 1.6666421294e-1f);
  value = fmaf(value, r, 4.9999994040e-1f);
  value = fmaf(value, r, 1.0f);
  value = fmaf(value, r, 1.0f);
  return bits_float(float_bits(value) + (float_bits(shifted) << 23));
}

struct RowLaw {
  float max = 0.0f, tau = 1.0f;
  float threshold = -__builtin_huge_valf();
  int32_t last_tie = 2147483647;
  uint64_t mass = 0;      // sum of mass(v) over the kept ids
  double log_mass = 0.0;  // log(mass * 2^-44): log p(v) = (l(v) - max) * tau - log_mass
  int32_t argmax = 0;     // lowest id of the largest logit
  int32_t flags = 0;      // kFlagNanLogit, kFlagDeadRow, kFlagInfLogit, kFlagParameter
  bool is_point = false;  // greedy or dead row: all mass on `argmax`
  bool is_empty = false;  // dead row: a draft law without mass

  SPECDEC_HD bool is_clean() const { return !(flags & (kFlagNanLogit | kFlagInfLogit)); }
  SPECDEC_HD bool keeps(float logit, int32_t id) const {
    return logit > threshold || (logit == threshold && id <= last_tie);
  }
  // x = (l - max) * tau: the scaled distance below the maximum, at most 0.
  SPECDEC_HD float scaled(float logit) const { return (logit - max) * tau; }
  SPECDEC_HD double log_prob(float logit, int32_t id) const {
    if (is_point) return id == argmax ? 0.0 : kNegInf;
    return keeps(logit, id) ? static_cast<double>(scaled(logit)) - log_mass : kNegInf;
  }
};

SPECDEC_HD bool is_greedy(float temperature) {
  return !(temperature > kGreedyTemperature) || temperature > kInfLogit;
}
// NaN, negative and infinite temperatures are faults of the request; it decodes greedily.
SPECDEC_HD int32_t temperature_flags(float temperature) {
  return temperature >= 0.0f && temperature <= kInfLogit ? 0 : kFlagParameter;
}

}  // namespace specdec
