// Filters without sorting or rewriting a row: monotone bins of the distance below the maximum, then of the order key.
#pragma once
#include "law.h"

namespace specdec {

constexpr int32_t kBins = 1024;
constexpr int32_t kBinsPerUnit = 32;  // first level: bins of 1/32 in (max - l) * tau, the last one open

SPECDEC_HD int32_t distance_bin(float max, float logit, float scale) {
  float y = (max - logit) * scale;
  return static_cast<int32_t>(y < kBins - 1 ? y : static_cast<float>(kBins - 1));
}

// A kept set is the shortest prefix of the total order whose mass reaches this (at least one token).
// A token stays iff the mass before it is below top_p * total.
SPECDEC_HD uint64_t top_p_budget(float top_p, uint64_t total) {
  double wanted = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
}

// Lowest scaled distance kept by min-p: p >= min_p * max p iff x >= log(min_p).
SPECDEC_HD float min_p_distance(float min_p) {
  if (!(min_p > 0.0f)) return -__builtin_huge_valf();
  return min_p >= 1.0f ? 0.0f : static_cast<float>(log(static_cast<double>(min_p)));
}

}  // namespace specdec
