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
#include "attention/plan.h"

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

// The tiles of an item that hold a key some row may see, and which of them need a mask. Whole block.
template <int kRows>
__device__ __forceinline__ void find_tiles(const AttentionParams& p, Item& item, int64_t* scratch) {
  const int32_t last_row = (item.row0 + kRows < item.rows ? item.row0 + kRows : item.rows) - 1;
  const AttentionRequest& r = item.request;
  const int64_t capacity = p.max_pages * p.page_size, length = r.tree.context_len, last = last_row / p.group;
  int64_t end = length + r.start + (r.causal ? last + 1 : r.num_nodes), begin = 0, cut = 0;
  if (end > capacity) end = capacity;
  if (p.window >= 0) {
    const int32_t row = item.row0 + static_cast<int32_t>(threadIdx.x);
    const bool mine = threadIdx.x < kRows && row <= last_row;
    const int64_t position = mine ? attention_query(p, r, row / p.group).position : 0;
    begin = block_reduce(mine ? position : INT64_MAX, Minimum{}, INT64_MAX, scratch) - p.window + 1;
    cut = block_reduce(mine ? position : INT64_MIN, Maximum{}, INT64_MIN, scratch) - p.window + 1;
    begin = begin < 0 ? 0 : begin > length ? length : begin;
    cut = cut < 0 ? 0 : cut > end ? end : cut;
  }
  item.begin = static_cast<int32_t>(begin / kTileKeys);
  item.end = static_cast<int32_t>((end + kTileKeys - 1) / kTileKeys);
  item.masked_from = static_cast<int32_t>(length / kTileKeys);
  item.masked_until = static_cast<int32_t>((cut + kTileKeys - 1) / kTileKeys);
}

// Part [from, to) of `units` of the item's tiles.
__device__ __forceinline__ void take_part(Item& item, int32_t from, int32_t to, int32_t units) {
  const int64_t tiles = item.end > item.begin ? item.end - item.begin : 0;
  item.end = item.begin + static_cast<int32_t>(to * tiles / units);
  item.begin += static_cast<int32_t>(from * tiles / units);
}

template <class Tile>
__device__ __forceinline__ void attend(const AttentionParams& p, const Item& item, WarpState<Tile>& state,
                                       unsigned char* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stages = p.stages;
  unsigned char *q = shared, *ring = shared + Tile::kRows * Tile::kQRow;
  auto* infos = reinterpret_cast<TileInfo<Tile>*>(ring + Tile::ring(stages));
  TileLoader<Tile> loader(p, item, ring, infos);
  const float k_scale = p.k_scale ? p.k_scale[item.head * p.k_scale_stride] : 1.0f;
  constexpr float kLog2E = 1.4426950408889634f;
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
    const uint64_t shown = static_cast<uint64_t>(info.paged[1]) << 32 | info.paged[0];
    const bool masked = loader.masked(tile), holes = shown != ~uint64_t{0};
    if (!masked && !holes) {
      if (busy)
        attend_tile<Tile, false>(state, p, scale, q, loader.keys(stage), loader.values(stage), info, warp, lane);
    } else {
      if (holes) hide_missing<Tile>(info, shown, !masked);
      guard_values<Tile>(state, const_cast<unsigned char*>(loader.values(stage)), info, busy, warp, lane, p.e5m2);
      if (busy) attend_tile<Tile, true>(state, p, scale, q, loader.keys(stage), loader.values(stage), info, warp, lane);
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
    slot = slot == stages ? 0 : slot + 1;
  }
  if (!planted(Bug::missing_wait)) ptx::cp_async_wait<0>();  // Q of a part without tiles
}

// The units of a plan, or of the plain order in which every item has p.num_splits units and a worker one unit.
struct Walk {
  const int32_t *first_unit, *item_units;  // null: the plain order
  int32_t total, share, snap;
};

// Static shared memory of a block. What is needed between items lies here, because registers are for outputs.
template <class Tile>
struct BlockState {
  Walk walk;
  int32_t worker, unit, n;  // next unit to do, and the request (in order) that it lies in
  Item item;
  ItemParts cut;  // the item's parts, and which of them is being done
  int32_t part;
  int64_t scratch[kMmaWarps];
  int32_t ticket[1];
  float tops[Tile::kSplitKeys ? kMmaWarps * Tile::kRows : 1], sums[Tile::kSplitKeys ? kMmaWarps * Tile::kRows : 1];
};

__device__ __forceinline__ bool plan_fits(const AttentionParams& p, int tile_rows) {
  if (!p.plan || p.plan[kPlanTag] != kPlanTagValue || p.plan[kPlanTileRows] != tile_rows) return false;
  if (p.plan[kPlanKvHeads] != p.num_kv_heads || p.plan[kPlanOrder] != p.num_order || p.plan[kPlanShare] < 1)
    return false;
  return p.plan[kPlanSnap] < 0 || (!p.batch_invariant && p.plan[kPlanWorkers] <= p.slot_pairs);
}

__device__ __forceinline__ Walk walk_of(const AttentionParams& p, int tile_rows) {
  Walk walk;
  if (plan_fits(p, tile_rows)) {
    walk.first_unit = p.plan + kPlanHeader;
    walk.item_units = walk.first_unit + p.num_order + 1;
    walk.total = walk.first_unit[p.num_order];
    walk.share = p.plan[kPlanShare];
    walk.snap = p.plan[kPlanSnap] < 0 ? kNeverCut : p.plan[kPlanSnap];
  } else {  // items one by one; a plan of another shape is as good as none
    walk.first_unit = walk.item_units = nullptr;
    walk.total = p.num_order * p.num_kv_heads * p.row_tiles * p.num_splits;
    walk.share = walk.snap = 1;
  }
  return walk;
}

// The request that a unit lies in; `from`: one at or before it, or -1. Steps over empty requests.
__device__ __forceinline__ int32_t request_at(const AttentionParams& p, const Walk& walk, int32_t unit, int32_t from) {
  int32_t n = from;
  if (from < 0) {
    int32_t high = p.num_order;
    for (n = 0; high - n > 1;) {
      const int32_t middle = (n + high) / 2;
      if (walk.first_unit[middle] <= unit)
        n = middle;
      else
        high = middle;
    }
  }
  while (n + 1 < p.num_order && walk.first_unit[n + 1] <= unit) n++;
  return n;
}

// Row tiles, over all heads, that the n-th request really has; 0 with offsets that attention_request refuses.
__device__ __forceinline__ int64_t true_items(const AttentionParams& p, int32_t n, int tile_rows) {
  const int32_t b = ordered_request(p, n);
  if (b < 0) return 0;
  const int64_t begin = p.cu_nodes[b], end = p.cu_nodes[b + 1];
  if (begin < 0 || begin > end || end > p.num_rows) return 0;
  return p.num_kv_heads * ceil_div((end - begin) * p.group, tile_rows);
}

// Stores the item's rows, or leaves this part in the workspace and merges if it came last.
template <class Tile>
__device__ __forceinline__ void finish_item(const AttentionParams& p, const WarpState<Tile>& state,
                                            unsigned char* shared, BlockState<Tile>& block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Item& item = block.item;
  const ItemParts cut = block.cut;
  auto slot_of = [&](int32_t i) { return p.slots + (2 * (int64_t{cut.first_worker} + i) + (i == 0)) * Tile::kSlot; };
  Destination to = {cut.parts > 1 ? slot_of(block.part) : nullptr, item.request.first_row, item.head, item.row0,
                    item.rows};
  if constexpr (Tile::kSplitKeys)
    finish_split_keys<Tile>(p, state, reinterpret_cast<float*>(shared + Tile::kRows * Tile::kQRow), block.tops,
                            block.sums, to, warp, lane);
  else
    finish_rows<Tile>(p, state, to, warp, lane);
  if (cut.parts == 1 || !last_part(p.tickets + cut.first_worker, cut.parts, block.ticket)) return;
  to.slot = nullptr;
  merge_parts<Tile>(p, to, cut.parts, slot_of);
}

// Item `local` of the n-th request, on units [first, first + units): this worker's part of it, if it has one.
template <class Tile>
__device__ __forceinline__ void run_item(const AttentionParams& p, int32_t worker, int32_t n, int32_t local,
                                         int32_t first, int32_t units, unsigned char* shared, BlockState<Tile>& block) {
  const Walk& walk = block.walk;
  const ItemParts cut = item_parts(first, units, walk.share, walk.snap);
  const int32_t part = worker - cut.first_worker;
  if (part < 0 || part >= cut.parts) return;
  const int32_t b = ordered_request(p, n);
  if (b < 0) return;
  Item item;
  item.request = attention_request(p, b);
  item.rows = static_cast<int32_t>(item.request.num_nodes) * p.group;
  const int32_t row_tiles = walk.first_unit ? (item.rows + Tile::kRows - 1) / Tile::kRows : p.row_tiles;
  if (row_tiles == 0) return;
  item.head = local / row_tiles;
  item.row0 = local % row_tiles * Tile::kRows;
  if (item.head >= p.num_kv_heads || item.row0 >= item.rows) return;
  find_tiles<Tile::kRows>(p, item, block.scratch);
  take_part(item, part_begin(cut, part, first, units, walk.share), part_begin(cut, part + 1, first, units, walk.share),
            units);
  if (threadIdx.x == 0) {
    block.item = item;
    block.cut = cut;
    block.part = part;
  }
  __syncthreads();
  WarpState<Tile> state;
  attend<Tile>(p, block.item, state, shared);
  finish_item<Tile>(p, state, shared, block);
}

template <class T, class KV, int D, int DV, int kRows>
__global__ void __launch_bounds__(kMmaThreads, MmaTile<T, KV, D, DV, kRows>::kMinBlocks)
    tree_attention_mma_kernel(const AttentionParams p) {
  using Tile = MmaTile<T, KV, D, DV, kRows>;
  SPECDEC_DYNAMIC_SHARED(unsigned char, shared);
  SPECDEC_SHARED(BlockState<Tile>, block, 1);
  if (blockIdx.x + 1 == gridDim.x) clear_tail<T>(p);
  BlockState<Tile>& state = block[0];
  if (threadIdx.x == 0) {
    state.walk = walk_of(p, kRows);
    state.worker = blockIdx.x;
    state.unit = -1;
    state.n = 0;
  }
  __syncthreads();
  const Walk& walk = state.walk;
  while (int64_t{state.worker} * walk.share < walk.total) {
    const int32_t worker = state.worker, begin = worker * walk.share;
    const int32_t unit = state.unit < 0 ? begin : state.unit;
    const int32_t end = walk.total - begin > walk.share ? begin + walk.share : walk.total;
    int32_t n = state.unit < 0 ? -1 : state.n, local, first, units = p.num_splits;
    if (walk.first_unit) {
      n = request_at(p, walk, unit, n);
      units = walk.item_units[n];
      local = (unit - walk.first_unit[n]) / units;
      first = walk.first_unit[n] + local * units;
      if (local >= true_items(p, n, kRows)) {  // a plan from garbage may count a billion: over them in one step
        local = -1;
        units = walk.first_unit[n + 1] - first;
      }
    } else {
      const int32_t item = unit / units, per_request = p.num_kv_heads * p.row_tiles;
      n = item / per_request;
      local = item % per_request;
      first = item * units;
    }
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) {
      const bool over = first + units >= end;
      state.worker = over ? worker + gridDim.x : worker;
      state.unit = over ? -1 : first + units;
      state.n = n;
    }
    if (local >= 0) run_item<Tile>(p, worker, n, local, first, units, shared, state);
    __syncthreads();  // shared memory is free for the next item
  }
  clear_own_plan(p, state.ticket);
}

}  // namespace specdec
