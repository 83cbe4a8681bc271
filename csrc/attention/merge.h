// Weights that join two partial attentions; shared by every backend.
#pragma once
#include <cmath>

#include "common/hostdevice.h"

namespace specdec {

struct MergeWeights {
  float a, b, lse;
};

// out = a * out_a + b * out_b. A sink takes part in the normaliser and not in lse. Both parts empty: 0, 0, -inf.
SPECDEC_HD MergeWeights merge_weights(float lse_a, float lse_b, const float* sink) {
  float top = lse_a > lse_b ? lse_a : lse_b;
  if (lse_a == -INFINITY && lse_b == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  float weight_a = expf(lse_a - top), weight_b = expf(lse_b - top);
  float sum = weight_a + weight_b;
  float inverse = 1.0f / (sink ? sum + expf(*sink - top) : sum);
  return {weight_a * inverse, weight_b * inverse, top + logf(sum)};
}

}  // namespace specdec
