// Launch of the Hopper kernel. Compiled for sm_90a alone and into a library of its own (setup.py); attention_cuda.cu
// finds it there by name.
#include "attention/attention_hopper.cuh"
#include "attention/attention_launch.h"
#include "common/tensor_map.cuh"

namespace specdec {

#if defined(SPECDEC_EMULATED)
constexpr int kStages = 3;  // short tests go round the ring
#else
constexpr int kStages = kHopperStages;
#endif

// One cache (strides in elements) as tiles of 64 keys for the copy engine, in the order of keys that stages have:
// position 8 n + 2 t + i has key 16 t + 2 n + i. False where the rule of docs/attention.md leaves it to the gather.
static bool map_tiles(CUtensorMap& map, int32_t& shift, const AttentionParams& p, const char* cache, int64_t page,
                      int64_t row, int64_t head) {
  if (p.page_size % kTileKeys || p.num_pages < 1 || row < 1 || row >= int64_t{1} << 35) return false;
  const int64_t extent =  // bytes from the first tile to the last
      2 * ((p.num_pages - 1) * page + (p.page_size - kTileKeys) * row + (p.num_kv_heads - 1) * head);
  shift = __builtin_ctzll(static_cast<unsigned long long>(2 * (page | kTileKeys * row | head | int64_t{1} << 36)));
  if (extent >> shift > INT32_MAX) return false;
  const auto bytes = static_cast<cuuint64_t>(2 * row);
  map = tensor_map("tree_attention", cache,
                   {{static_cast<cuuint64_t>(p.head_dim), 2, 4, 8, static_cast<cuuint64_t>(extent >> shift) + 1},
                    {bytes, 16 * bytes, 2 * bytes, cuuint64_t{1} << shift},
                    {64, 2, 4, 8, 1}});
  return true;
}

template <class T, int D>
static bool launch_hopper(AttentionParams p, const MmaLaunch& launch) {
  using Tile = HopperTile<T, D>;
  p.stages = kStages;
  const int bytes = Tile::bytes(p.stages);
  if (bytes + 2048 > launch.machine.shared_block) return false;
  allow_shared_memory(reinterpret_cast<const void*>(&tree_attention_hopper_kernel<T, D>), bytes);
  KvMaps maps = {};
  maps.used = map_tiles(maps.k, maps.k_shift, p, p.k_cache, p.k_stride_page, p.k_stride_row, p.k_stride_head) &&
              map_tiles(maps.v, maps.v_shift, p, p.v_cache, p.v_stride_page, p.v_stride_row, p.v_stride_head);
  const int64_t blocks =
      launch.blocks < launch.machine.multiprocessors ? launch.blocks : launch.machine.multiprocessors;
  SPECDEC_LAUNCH((tree_attention_hopper_kernel<T, D>), dim3(static_cast<unsigned>(blocks > 0 ? blocks : 1)),
                 dim3(kHopperThreads), bytes, launch.stream, p, maps);
  check_launch("tree_attention");
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
