// Tensor-core attention: float16 queries, float8 caches.
#include "attention/attention_launch.cuh"

namespace specdec {

bool launch_mma_float16_float8(const AttentionParams& p, const MmaLaunch& launch) {
  return launch_dims<Half, Float8>(p, launch);
}

}  // namespace specdec
