// Tensor-core attention: bfloat16 queries, float8 caches.
#include "attention/attention_launch.cuh"

namespace specdec {

bool launch_mma_bfloat16_float8(const AttentionParams& p, const MmaLaunch& launch) {
  return launch_dims<BFloat16, Float8>(p, launch);
}

}  // namespace specdec
