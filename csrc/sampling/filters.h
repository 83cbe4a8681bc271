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

// Keys of the logits in a distance bin: bins fall as logits rise, so both ends are found by bisection.
SPECDEC_HD uint32_t first_key_below(const RowLaw& law, int32_t limit, float scale) {  // smallest whose bin is under it
  uint32_t a = order_key(-kInfLogit), b = order_key(law.max);
#pragma unroll 1
  while (a < b) {
    uint32_t middle = a + (b - a) / 2;
    if (distance_bin(law.max, order_value(middle), scale) < limit)
      b = middle;
    else
      a = middle + 1;
  }
  return a;
}
SPECDEC_HD void bin_keys(const RowLaw& law, int32_t bin, float scale, uint32_t* low, uint32_t* high) {
  *low = bin == kBins - 1 ? order_key(-kInfLogit) : first_key_below(law, bin + 1, scale);
  *high = bin == 0 ? order_key(law.max) : first_key_below(law, bin, scale) - 1;
}

// A kept set is the shortest prefix of the total order whose mass reaches this (at least one token).
// A token stays iff the mass before it is below top_p * total.
SPECDEC_HD uint64_t top_p_budget(float top_p, uint64_t total) {
  double wanted = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
}

// The smallest logit that min-p keeps: p >= min_p * max p iff (l - max) * tau >= log(min_p). Found on the order keys,
// so that every backend and shard has the same one without a pass over the row.
SPECDEC_HD float min_p_threshold(const RowLaw& law, float min_p) {
  if (!(min_p > 0.0f)) return -__builtin_huge_valf();
  float distance = min_p >= 1.0f ? 0.0f : static_cast<float>(log(static_cast<double>(min_p)));
  uint32_t low = order_key(-kInfLogit), high = order_key(law.max);
#pragma unroll 1
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (law.scaled(order_value(middle)) >= distance)
      high = middle;
    else
      low = middle + 1;
  }
  return order_value(low);
}

}  // namespace specdec
