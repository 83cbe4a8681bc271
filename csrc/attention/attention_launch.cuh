// Which instances of the tensor-core kernel exist, and how one is launched. Included by one file a pair of types, so
// that they compile side by side.
#pragma once
#include "attention/attention_launch.h"
#include "attention/attention_mma.cuh"

namespace specdec {

// Ring stages: as many as let two blocks share a multiprocessor; where not even two stages do, as many as one block may
// have. 0: the machine has too little shared memory.
template <class Tile>
int ring_stages(const MachineLimits& machine) {
  constexpr int64_t kReserved = reserved_shared(Tile::kRows);
  static_assert(1024 + sizeof(WalkState) + sizeof(MergeState<Tile>) <= kReserved);
  for (int64_t limit : {machine.shared_multiprocessor / 2, machine.shared_tile})
    for (int stages = kMaxStages; stages >= 2; stages--)
      if (Tile::bytes(stages) + kReserved <= limit) return stages;
  return 0;
}

// Every instance, but for the CPU runtime and the static budgets of CI: one head dim, there every row tile and pair of
// types, though not each with each (tests/test_attention_head_dims.py runs the other dims); where faults are planted,
// one pair.
template <class T, class KV, int D, int kRows>
constexpr bool compiled() {
#if defined(SPECDEC_PLANTED_AT_RUN_TIME)
  return std::is_same_v<T, BFloat16> && std::is_same_v<KV, BFloat16> && D == 64;
#elif defined(SPECDEC_FEW_INSTANCES)
  if (D != SPECDEC_FEW_HEAD_DIM) return false;
  if (std::is_same_v<T, BFloat16>) return std::is_same_v<KV, T> || kRows == 16 || kRows == 64;
  return kRows == (std::is_same_v<KV, T> ? 32 : 128);
#else
  return true;
#endif
}

template <class T, class KV, int D, int DV, int kRows>
bool launch_tile(AttentionParams p, const MmaLaunch& launch) {
  if constexpr (compiled<T, KV, D, kRows>()) {
    using Tile = MmaTile<T, KV, D, DV, kRows>;
    p.stages = ring_stages<Tile>(launch.machine);
    if (p.stages == 0) return false;
    if (launch.ask) return true;
    const int bytes = Tile::bytes(p.stages);
    allow_shared_memory(reinterpret_cast<const void*>(&tree_attention_mma_kernel<T, KV, D, DV, kRows>), bytes);
    const dim3 grid(static_cast<unsigned>(launch.blocks ? launch.blocks : 1));
    SPECDEC_LAUNCH((tree_attention_mma_kernel<T, KV, D, DV, kRows>), grid, dim3(kMmaThreads), bytes, launch.stream, p);
    return true;
  }
  return false;
}

template <class T, class KV>
bool launch_dims(const AttentionParams& p, const MmaLaunch& launch) {
  const int rows = launch.tile_rows;
  switch (p.head_dim) {  // the same table as variant_rows (plan_checks.h)
    case 64:
      if (rows == 16) return launch_tile<T, KV, 64, 64, 16>(p, launch);
      if (rows == 32) return launch_tile<T, KV, 64, 64, 32>(p, launch);
      if (rows == 64) return launch_tile<T, KV, 64, 64, 64>(p, launch);
      return launch_tile<T, KV, 64, 64, 128>(p, launch);
    case 80: return rows == 32 ? launch_tile<T, KV, 80, 80, 32>(p, launch) : launch_tile<T, KV, 80, 80, 64>(p, launch);
    case 96: return rows == 32 ? launch_tile<T, KV, 96, 96, 32>(p, launch) : launch_tile<T, KV, 96, 96, 64>(p, launch);
    case 128:
      if (rows == 16) return launch_tile<T, KV, 128, 128, 16>(p, launch);
      if (rows == 32) return launch_tile<T, KV, 128, 128, 32>(p, launch);
      if (rows == 64) return launch_tile<T, KV, 128, 128, 64>(p, launch);
      return launch_tile<T, KV, 128, 128, 128>(p, launch);
    case 192:
      return rows == 16 ? launch_tile<T, KV, 192, 128, 16>(p, launch) : launch_tile<T, KV, 192, 128, 64>(p, launch);
    case 256:
      return rows == 16 ? launch_tile<T, KV, 256, 256, 16>(p, launch) : launch_tile<T, KV, 256, 256, 64>(p, launch);
    default: return false;
  }
}

}  // namespace specdec
