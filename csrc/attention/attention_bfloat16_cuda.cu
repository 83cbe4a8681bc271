// Tensor-core attention: bfloat16 queries and caches.
#include "attention/attention_launch.cuh"

namespace specdec {

bool launch_mma_bfloat16(const AttentionParams& p, const MmaLaunch& launch) {
  return launch_dims<BFloat16, BFloat16>(p, launch);
}

}  // namespace specdec
