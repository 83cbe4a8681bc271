// Tensor-core attention: float16 queries and caches.
#include "attention/attention_launch.cuh"

namespace specdec {

bool launch_mma_float16(const AttentionParams& p, const MmaLaunch& launch) {
  return launch_dims<Half, Half>(p, launch);
}

}  // namespace specdec
