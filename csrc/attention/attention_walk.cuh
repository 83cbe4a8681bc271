// How the teams of a block go through the work: plan or plain order, items, parts of items.
#pragma once
#include "attention/attention_load.cuh"
#include "attention/plan.h"

namespace specdec {

constexpr int kMostWarps = 8;  // of a team

template <class Team, class T, class Operation>
__device__ __forceinline__ T team_reduce(T value, Operation operation, T identity, T* scratch) {
  const int lane = Team::thread() % 32, warp = Team::thread() / 32;
  value = warp_reduce(value, operation);
  if (lane == 0) scratch[warp] = value;
  Team::sync();
  value = warp_reduce(lane < Team::kThreads / 32 ? scratch[lane] : identity, operation);
  Team::sync();  // scratch is free again
  return value;
}

// The tiles of an item that hold a key some row may see, and which of them need a mask. Whole team.
template <class Team, int kRows>
__device__ __forceinline__ void find_tiles(const AttentionParams& p, Item& item, int64_t* scratch) {
  const int32_t last_row = (item.row0 + kRows < item.rows ? item.row0 + kRows : item.rows) - 1;
  const AttentionRequest& r = item.request;
  const int64_t capacity = p.max_pages * p.page_size, length = r.tree.context_len, last = last_row / p.group;
  int64_t end = length + r.start + (r.causal ? last + 1 : r.num_nodes), begin = 0, cut = 0;
  if (end > capacity) end = capacity;
  if (p.window >= 0) {
    const int32_t row = item.row0 + Team::thread();
    const bool mine = Team::thread() < kRows && row <= last_row;
    const int64_t position = mine ? attention_query(p, r, row / p.group).position : 0;
    begin = team_reduce<Team>(mine ? position : INT64_MAX, Minimum{}, INT64_MAX, scratch) - p.window + 1;
    cut = team_reduce<Team>(mine ? position : INT64_MIN, Maximum{}, INT64_MIN, scratch) - p.window + 1;
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

// The units of a plan, or of the plain order in which every item has p.num_splits units and a worker one unit.
struct Walk {
  const int32_t *first_unit, *item_units;  // null: the plain order
  int32_t total, share, snap;
};

// Where a team stands, in static shared memory: registers are for outputs.
struct WalkState {
  Walk walk;
  int32_t worker, unit, n;  // next unit to do, and the request (in order) that it lies in
  Item item;
  ItemParts cut;  // the item's parts, and which of them is being done
  int32_t part;
  int64_t scratch[kMostWarps];
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

// Item `local` of the n-th request, on units [first, first + units): puts this worker's part of it, if it has one, into
// `state`.
template <class Team, int kRows>
__device__ __forceinline__ bool take_item(const AttentionParams& p, int32_t worker, int32_t n, int32_t local,
                                          int32_t first, int32_t units, WalkState& state) {
  const Walk& walk = state.walk;
  const ItemParts cut = item_parts(first, units, walk.share, walk.snap);
  const int32_t part = worker - cut.first_worker;
  if (part < 0 || part >= cut.parts) return false;
  const int32_t b = ordered_request(p, n);
  if (b < 0) return false;
  Item item;
  item.request = attention_request(p, b);
  item.rows = static_cast<int32_t>(item.request.num_nodes) * p.group;
  const int32_t row_tiles = walk.first_unit ? (item.rows + kRows - 1) / kRows : p.row_tiles;
  if (row_tiles == 0) return false;
  item.head = local / row_tiles;
  item.row0 = local % row_tiles * kRows;
  if (item.head >= p.num_kv_heads || item.row0 >= item.rows) return false;
  find_tiles<Team, kRows>(p, item, state.scratch);
  take_part(item, part_begin(cut, part, first, units, walk.share), part_begin(cut, part + 1, first, units, walk.share),
            units);
  if (Team::thread() == 0) {
    state.item = item;
    state.cut = cut;
    state.part = part;
  }
  Team::sync();
  return true;
}

// Calls body() for each of this worker's parts of items, which it finds in state.item, state.cut, state.part.
template <class Team, int kRows, class Body>
__device__ __forceinline__ void for_each_item(const AttentionParams& p, WalkState& state, Body body) {
  if (Team::thread() == 0) {
    state.walk = walk_of(p, kRows);
    state.worker = blockIdx.x;
    state.unit = -1;
    state.n = 0;
  }
  Team::sync();
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
    Team::sync();  // all have read the state
    if (Team::thread() == 0) {
      const bool over = first + units >= end;
      state.worker = over ? worker + gridDim.x : worker;
      state.unit = over ? -1 : first + units;
      state.n = n;
    }
    if (local >= 0 && take_item<Team, kRows>(p, worker, n, local, first, units, state)) body();
    Team::sync();  // shared memory is free for the next item
  }
}

}  // namespace specdec
