// The law a row of logits stands for, in a few scalars: shared by the CPU ops, CUDA and the CUDA-on-CPU runtime.
//
//   weight(v) = exp((l(v) - max) * tau)     max subtracted before scaling: error d * 2^-24 at distance d, not l * 2^-24
//   mass(v)   = round(weight(v) * 2^44)     64-bit integer: sums do not depend on order, threads, splits or shards
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

// exp(x) for x <= 0 by a fixed sequence of fused operations: the same bits on every vector width and device, exactly
// 2^-n at the floats nearest -n ln 2, relative error below 2^-23; 0 below -87 (the smallest normal float).
SPECDEC_HD float exp_nonpositive(float x) {
  if (!(x >= -87.0f)) return 0.0f;
  float n = rintf(x * 1.44269504088896341f);
  float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
  float poly = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
  poly = fmaf(poly, r, 8.3334519073e-3f);
  poly = fmaf(poly, r, 4.1665795894e-2f);
  poly = fmaf(poly, r, 1.6666665459e-1f);
  poly = fmaf(poly, r, 5.0000001201e-1f);
  float value = fmaf(poly, r * r, r) + 1.0f;
  return bits_float(float_bits(value) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
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
