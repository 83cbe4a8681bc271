// Launch of the Hopper kernel. Compiled for sm_90a alone and into a library of its own (setup.py); attention_cuda.cu
// finds it there by name.
#include "attention/attention_hopper.cuh"
#include "attention/attention_launch.h"

namespace specdec {

#if defined(SPECDEC_EMULATED)
constexpr int kStages = 3;  // short tests go round the ring
#else
constexpr int kStages = kHopperStages;
#endif

template <class T, int D>
static bool launch_hopper(AttentionParams p, const MmaLaunch& launch) {
  using Tile = HopperTile<T, D>;
  p.stages = kStages;
  const int bytes = Tile::bytes(p.stages);
  if (bytes + 2048 > launch.machine.shared_block) return false;
  allow_shared_memory(reinterpret_cast<const void*>(&tree_attention_hopper_kernel<T, D>), bytes);
  const int64_t blocks =
      launch.blocks < launch.machine.multiprocessors ? launch.blocks : launch.machine.multiprocessors;
  SPECDEC_LAUNCH((tree_attention_hopper_kernel<T, D>), dim3(static_cast<unsigned>(blocks > 0 ? blocks : 1)),
                 dim3(kHopperThreads), bytes, launch.stream, p);
  return true;
}

}  // namespace specdec

// False: no kernel for these head dims. `bfloat16`: the type of queries and caches, else float16.
extern "C" __attribute__((visibility("default"))) bool specdec_attention_sm90(const specdec::AttentionParams& p,
                                                                              const specdec::MmaLaunch& launch,
                                                                              bool bfloat16) {
  using namespace specdec;
#if defined(SPECDEC_FEW_INSTANCES)  // CI; the template is the same
  constexpr int kDim = SPECDEC_FEW_HEAD_DIM == 128 ? 128 : 64;
  return p.head_dim == kDim && bfloat16 && launch_hopper<BFloat16, kDim>(p, launch);
#else
  if (p.head_dim == 64) return bfloat16 ? launch_hopper<BFloat16, 64>(p, launch) : launch_hopper<Half, 64>(p, launch);
  if (p.head_dim == 128)
    return bfloat16 ? launch_hopper<BFloat16, 128>(p, launch) : launch_hopper<Half, 128>(p, launch);
  return false;
#endif
}
