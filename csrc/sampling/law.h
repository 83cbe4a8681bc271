// The law a row of logits stands for, in a few scalars: shared by the CPU ops, CUDA and the CUDA-on-CPU runtime.
//
//   weight(v) = exp((l(v) - max) * tau)     max subtracted before scaling: error d * 2^-24 at distance d, not l * 2^-24
//   mass(v)   = round(weight(v) * 2^44)     64-bit integer: sums do not depend on order, threads, splits or shards
//               (a whole row adds the weights of four neighbours, (w0 + w1) + (w2 + w3), before rounding)
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
constexpr float kHighestTemperature = 1e36f;  // higher ones count as this: 1 / temperature stays a normal number
constexpr float kInfLogit = 3.402823466e38f;  // +inf is read as the largest float: ties among +inf ids are uniform
constexpr int32_t kNoTie = 2147483647;        // every id at the threshold is kept
constexpr double kNegInf = -__builtin_huge_val();

// exp(d * tau) for d <= 0 as 2^(d * rate), rate = tau * log2(e): 2^n times a polynomial of the fraction in [-1/2, 1/2],
// by a fixed sequence of fused operations: the same bits on every vector width and device. Relative error below 2^-22
// plus d * tau * 2^-24; exactly 2^-n at the float nearest -n ln 2 for n up to 8. Below `lowest` (2^-125, mass 0) it is
// that of `lowest`.
constexpr float kExpShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer and leaves it in the low bits
constexpr float kExp2C1 = 6.93147004e-1f, kExp2C2 = 2.40222424e-1f, kExp2C3 = 5.55073358e-2f;
constexpr float kExp2C4 = 9.67151299e-3f, kExp2C5 = 1.32647273e-3f;
SPECDEC_HD float exp_scaled(float d, float rate, float lowest) {
  d = d > lowest ? d : lowest;
  float shifted = fmaf(d, rate, kExpShift);
  float r = fmaf(d, rate, kExpShift - shifted);
  float value = fmaf(kExp2C5, r, kExp2C4);
  value = fmaf(value, r, kExp2C3);
  value = fmaf(value, r, kExp2C2);
  value = fmaf(value, r, kExp2C1);
  value = fmaf(value, r, 1.0f);
  return bits_float(float_bits(value) + (float_bits(shifted) << 23));
}

struct RowLaw {
  float max = 0.0f, tau = 1.0f;
  float rate = kLog2E, lowest = -125.0f / kLog2E;  // of exp_scaled at this tau
  float threshold = -__builtin_huge_valf();
  int32_t last_tie = kNoTie;
  uint64_t mass = 0;      // sum of mass(v) over the kept ids
  double log_mass = 0.0;  // log(mass * 2^-44): log p(v) = (l(v) - max) * tau - log_mass
  int32_t argmax = 0;     // lowest id of the largest logit
  int32_t flags = 0;      // kFlagNanLogit, kFlagDeadRow, kFlagInfLogit, kFlagParameter
  bool is_point = false;  // greedy or dead row: all mass on `argmax`
  bool is_empty = false;  // dead row: a draft law without mass

  SPECDEC_HD void set_temperature(float temperature) {
    tau = 1.0f / (temperature < kHighestTemperature ? temperature : kHighestTemperature);
    rate = tau * kLog2E;
    lowest = -125.0f / rate;
  }
  SPECDEC_HD bool is_clean() const { return !(flags & (kFlagNanLogit | kFlagInfLogit)); }
  SPECDEC_HD bool keeps(float logit, int32_t id) const {
    return logit > threshold || (logit == threshold && id <= last_tie);
  }
  // x = (l - max) * tau: the scaled distance below the maximum, at most 0.
  SPECDEC_HD float scaled(float logit) const { return (logit - max) * tau; }
  SPECDEC_HD float weight(float logit) const { return exp_scaled(logit - max, rate, lowest); }
  SPECDEC_HD uint64_t mass_of(float logit) const { return static_cast<uint64_t>(llrintf(weight(logit) * kMassScale)); }
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
