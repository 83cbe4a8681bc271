// Tree attention with mma.sync for bfloat16 and float16 queries (variants S, M, L, XL of attention_tile.cuh).
//
// Blocks stay: each follows one worker of the plan (attention/plan.h) through its items, an item being a row tile
// (packed rows: row r = node r / group, query head r % group, so neighbours share a mask row) of one KV head of one
// request, or a part of its key tiles. Without a plan a block has one item, or one of num_splits parts of it.
//
//   tile      t        t + 1     ..  t + stages - 1      ring of K, V stages, cp.async, one group a tile
//             computed in flight     asked for, looked up; loaded after the barrier that frees the stage
//
// One barrier a tile. Context tiles run unmasked; masked tiles (tree slots, a window's edge, a missing page) take a
// second copy of the step with the rows' visibility words. Grid: workers. Numerics: float32 sums, weights rounded to
// the type of q before the second product, exp2 of scores in log2 units. Not handled: other head dims, rows not aligned
// to 16 bytes, float32 (attention_simt.cuh does those).
#pragma once
#include "attention/attention_guard.cuh"
#include "attention/attention_merge.cuh"
#include "attention/attention_tail.cuh"

namespace specdec {

// Waits until the oldest of `stages - 1` groups in flight has landed.
__device__ __forceinline__ void wait_for_oldest(int stages, bool last) {
  if (planted(Bug::missing_wait) && last) return;
  if (planted(Bug::wait_group_off_by_one)) return ptx::cp_async_wait<kMaxStages - 1>();
  if (stages == 2)
    ptx::cp_async_wait<0>();
  else if (stages == 3)
    ptx::cp_async_wait<1>();
  else
    ptx::cp_async_wait<2>();
}

template <class Tile>
__device__ __forceinline__ void attend(const AttentionParams& p, const Item& item, WarpState<Tile>& state,
                                       unsigned char* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stages = p.stages;
  unsigned char *q = shared, *ring = shared + Tile::kRows * Tile::kQRow;
  auto* infos = reinterpret_cast<TileInfo<Tile>*>(ring + Tile::ring(stages));
  TileLoader<Tile> loader(p, item, ring, infos);
  const float k_scale = p.k_scale ? p.k_scale[item.head * p.k_scale_stride] : 1.0f;
  const ScoreScale scale = {p.softmax_scale * k_scale * (p.softcap > 0.0f ? 1.0f / p.softcap : kLog2E),
                            p.softcap * kLog2E};
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      state.top[m][half] = -INFINITY;
      state.sum[m][half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < Tile::DV / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state.o[m][n][i] = 0.0f;
  }
  // A warp of L or XL without rows only loads; the rows of S and M are everyone's.
  const bool busy = Tile::kSplitKeys || item.row0 + row_of<Tile>(warp, 0, 0, 0) < item.rows;

  load_queries<Tile>(p, item.request, q, item.head, item.row0, item.rows);
  int stage = 0, slot = 0, next_stage = 0, next_slot = 0;
  loader.ask(item.begin);
  for (int32_t ahead = item.begin; ahead - (stages - 1) < item.end; ahead++) {
    const int32_t tile = ahead - (stages - 1);  // before `begin` while the ring fills
    if (ahead < item.end) loader.look_up(ahead, next_slot);
    loader.ask(ahead + 1);
    if (planted(Bug::refill_too_early)) {
      __syncwarp();
      loader.load(ahead, next_slot, next_stage);
    }
    wait_for_oldest(stages, tile + 1 == item.end);
    __syncthreads();  // this tile has landed for all; all have left the stage that the next load overwrites
    if (!planted(Bug::refill_too_early)) loader.load(ahead, next_slot, next_stage);
    next_stage = next_stage + 1 == stages ? 0 : next_stage + 1;
    next_slot = next_slot == stages ? 0 : next_slot + 1;
    if (tile < item.begin) continue;
    if constexpr (Tile::kQInRegisters) {
      if (tile == item.begin) {
#pragma unroll
        for (int step = 0; step < Tile::D / 16; step++)
          query_fragment<Tile>(state.q[step], q, Tile::kSplitKeys ? 0 : warp * 16, step, lane);
      }
    }
    TileInfo<Tile>& info = loader.info(slot);
    const uint64_t shown = shown_keys(info);
    const bool masked = loader.masked(tile), holes = shown != ~uint64_t{0};
    if (!masked && !holes) {
      if (busy)
        attend_tile<Tile, false>(state, p, scale, q, loader.keys(stage), loader.values(stage), info, warp, lane);
    } else {
      if (holes) hide_missing<Tile, WholeBlock>(info, shown, !masked);
      guard_values<Tile>(state, const_cast<unsigned char*>(loader.values(stage)), info, busy, warp, lane, p.e5m2);
      if (busy) attend_tile<Tile, true>(state, p, scale, q, loader.keys(stage), loader.values(stage), info, warp, lane);
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
    slot = slot == stages ? 0 : slot + 1;
  }
  if (!planted(Bug::missing_wait)) ptx::cp_async_wait<0>();  // Q of a part without tiles
}

template <class T, class KV, int D, int DV, int kRows>
__global__ void __launch_bounds__(kMmaThreads, MmaTile<T, KV, D, DV, kRows>::kMinBlocks)
    tree_attention_mma_kernel(const AttentionParams p) {
  using Tile = MmaTile<T, KV, D, DV, kRows>;
  if constexpr (Tile::bytes(2) <= kSharedHere) {  // else ring_stages finds no room, and it is never launched
    SPECDEC_DYNAMIC_SHARED(unsigned char, shared);
    SPECDEC_SHARED(WalkState, walk, 1);
    SPECDEC_SHARED(MergeState<Tile>, scratch, 1);
    for_each_item<WholeBlock, kRows>(p, walk[0], [&] {
      WarpState<Tile> state;
      attend<Tile>(p, walk[0].item, state, shared);
      finish_item<Tile>(p, state, reinterpret_cast<float*>(shared + kRows * Tile::kQRow), walk[0], scratch[0]);
    });
    clear_own_plan<WholeBlock>(p, scratch[0].ticket);
    if (threadIdx.x / 32 == kMmaWarps - 1) clear_tail<T>(p, blockIdx.x, gridDim.x);
  }
}

}  // namespace specdec
