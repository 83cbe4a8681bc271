// The end of an item: warps merge (S, M), rows are scaled and stored, or the part goes to the workspace and the block
// that takes the item's last ticket merges all parts in their order, so that the sum does not depend on who came last.
#pragma once
#include "attention/attention_walk.cuh"
#include "common/planted.h"

namespace specdec {

// Static shared memory of the end of an item.
template <class Tile>
struct MergeState {
  int32_t ticket[1];
  float tops[Tile::kSplitKeys ? kMmaWarps * Tile::kRows : 1], sums[Tile::kSplitKeys ? kMmaWarps * Tile::kRows : 1];
};

// Where a finished value goes: to the output, or to this part's slot of the workspace.
struct Destination {
  float* slot;  // [kRows][DV] outputs relative to top, [kRows] tops (log2), [kRows] sums; null: the output
  int64_t first_row;
  int32_t head, row0, rows;
};

template <class Tile>
__device__ __forceinline__ typename Tile::T* output_row(const AttentionParams& p, const Destination& to, int row,
                                                        int32_t& q_head, int64_t& node) {
  const int32_t at = to.row0 + row;
  node = to.first_row + at / p.group;
  q_head = to.head * p.group + at % p.group;
  return reinterpret_cast<typename Tile::T*>(p.out) + node * p.out_stride_n + q_head * p.out_stride_h;
}

// S and M: every warp leaves top and sum, then its output in units of the common top; threads then add up the four.
template <class Tile>
__device__ __forceinline__ void finish_split_keys(const AttentionParams& p, const WarpState<Tile>& state, float* merge,
                                                  float* tops, float* sums, const Destination& to, int warp, int lane) {
  constexpr int kRows = Tile::kRows, DV = Tile::DV;
  const int t = lane % 4;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (t == 0) {
        tops[warp * kRows + row_of<Tile>(warp, m, half, lane)] = state.top[m][half];
        sums[warp * kRows + row_of<Tile>(warp, m, half, lane)] = sum;
      }
    }
  __syncthreads();  // also: nobody reads K or V any more
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_of<Tile>(warp, m, half, lane);
      float common = -INFINITY;
      for (int w = 0; w < kMmaWarps; w++) common = fmaxf(common, tops[w * kRows + row]);
      const float factor = state.top[m][half] == -INFINITY ? 0.0f : ptx::ex2(state.top[m][half] - common);
      float* mine = merge + (warp * kRows + row) * Tile::kMergeRow;
#pragma unroll
      for (int n = 0; n < DV / 8; n++)
        if constexpr (Tile::kFloat8) {
          mine[column_of<Tile>(n, 0, lane)] = state.o[m][n][2 * half] * factor;
          mine[column_of<Tile>(n, 1, lane)] = state.o[m][n][2 * half + 1] * factor;
        } else {
          *reinterpret_cast<float2*>(mine + column_of<Tile>(n, 0, lane)) =
              make_float2(state.o[m][n][2 * half] * factor, state.o[m][n][2 * half + 1] * factor);
        }
    }
  __syncthreads();
  for (int c = threadIdx.x; c < kRows * DV; c += kMmaThreads) {
    const int row = c / DV, column = c % DV;
    if (to.row0 + row >= to.rows) break;
    float common = -INFINITY, total = 0.0f, value = 0.0f;
    for (int w = 0; w < kMmaWarps; w++) common = fmaxf(common, tops[w * kRows + row]);
    for (int w = 0; w < kMmaWarps; w++) {
      const float own = tops[w * kRows + row];
      if (own != -INFINITY) total += sums[w * kRows + row] * ptx::ex2(own - common);
      value += merge[(w * kRows + row) * Tile::kMergeRow + column];
    }
    if (to.slot) {
      to.slot[c] = value;
      if (column == 0) {
        to.slot[kRows * DV + row] = common;
        to.slot[kRows * DV + kRows + row] = total;
      }
      continue;
    }
    int32_t q_head;
    int64_t node;
    typename Tile::T* out = output_row<Tile>(p, to, row, q_head, node);
    const RowEnd end = finish_row(p, common, total, q_head);
    store_value(out + column, value * end.weight);
    if (column == 0 && p.lse) p.lse[node * p.lse_stride_n + q_head] = end.lse;
  }
}

// L and XL: a row lives in one warp.
template <class Tile>
__device__ __forceinline__ void finish_rows(const AttentionParams& p, const WarpState<Tile>& state,
                                            const Destination& to, int warp, int lane) {
  constexpr int kRows = Tile::kRows, DV = Tile::DV;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_of<Tile>(warp, m, half, lane);
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (to.row0 + row >= to.rows) continue;
      if (to.slot) {
#pragma unroll
        for (int n = 0; n < DV / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) to.slot[row * DV + column_of<Tile>(n, i, lane)] = state.o[m][n][2 * half + i];
        if (lane % 4 == 0) {
          to.slot[kRows * DV + row] = state.top[m][half];
          to.slot[kRows * DV + kRows + row] = sum;
        }
        continue;
      }
      int32_t q_head;
      int64_t node;
      typename Tile::T* out = output_row<Tile>(p, to, row, q_head, node);
      const RowEnd end = finish_row(p, state.top[m][half], sum, q_head);
#pragma unroll
      for (int n = 0; n < DV / 8; n += Tile::kFloat8 ? 2 : 1) {  // neighbouring columns are stored two at a time
        if constexpr (Tile::kFloat8) {
#pragma unroll
          for (int i = 0; i < 2; i++)
            *reinterpret_cast<uint32_t*>(out + column_of<Tile>(n, i, lane)) =
                ptx::pack_pair(state.o[m][n][2 * half + i] * end.weight, state.o[m][n + 1][2 * half + i] * end.weight,
                               typename Tile::T{});
        } else {
          *reinterpret_cast<uint32_t*>(out + column_of<Tile>(n, 0, lane)) = ptx::pack_pair(
              state.o[m][n][2 * half] * end.weight, state.o[m][n][2 * half + 1] * end.weight, typename Tile::T{});
        }
      }
      if (lane % 4 == 0 && p.lse) p.lse[node * p.lse_stride_n + q_head] = end.lse;
    }
}

// Takes this part's ticket; true for the block that has the item's last one. The atomic releases what the block wrote
// and acquires what the others did; the counter is left as it was found.
template <class Team>
__device__ __forceinline__ bool last_part(int32_t* counter, int64_t parts, int32_t* ticket) {
  Team::sync();
  if (Team::thread() == 0) {
    ticket[0] = planted(Bug::ticket_without_fence) ? atomicAdd(counter, 1) : ptx::atomic_add_acq_rel(counter, 1);
    if (ticket[0] == parts - 1 && !planted(Bug::counter_not_reset)) *counter = 0;  // for the next launch
  }
  Team::sync();
  return ticket[0] == parts - 1;
}

// Merges the parts of an item, in their order, into the output. slot_of(part): its slot. Four float4 a thread are in
// flight for each of two parts: one block has to pull all parts through one SM.
template <class Tile, class SlotOf>
__device__ __forceinline__ void merge_parts(const AttentionParams& p, const Destination& to, int32_t parts,
                                            SlotOf slot_of) {
  using Team = typename Tile::Team;
  constexpr int kRows = Tile::kRows, DV = Tile::DV, kQuads = DV / 4, kTogether = 4;
  for (int base = Team::thread(); base < kRows * kQuads; base += kTogether * Team::kThreads) {
    float common[kTogether], total[kTogether] = {};
    float4 value[kTogether] = {};
    int row[kTogether];
    bool live[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int c = base + j * Team::kThreads;
      row[j] = c / kQuads;
      live[j] = c < kRows * kQuads && to.row0 + row[j] < to.rows;
      common[j] = -INFINITY;
    }
#pragma unroll 1
    for (int32_t i = 0; i < parts; i++) {
      const float* tops = slot_of(i) + kRows * DV;
#pragma unroll
      for (int j = 0; j < kTogether; j++)
        if (live[j]) common[j] = fmaxf(common[j], tops[row[j]]);
    }
#pragma unroll 2
    for (int32_t i = 0; i < parts; i++) {
      const float* slot = slot_of(i);
#pragma unroll
      for (int j = 0; j < kTogether; j++) {
        if (!live[j]) continue;
        const float top = slot[kRows * DV + row[j]];
        const float factor = top == -INFINITY ? 0.0f : ptx::ex2(top - common[j]);
        const float4 one = *reinterpret_cast<const float4*>(slot + 4 * (base + j * Team::kThreads));
        total[j] += slot[kRows * DV + kRows + row[j]] * factor;
        value[j].x += one.x * factor;
        value[j].y += one.y * factor;
        value[j].z += one.z * factor;
        value[j].w += one.w * factor;
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (!live[j]) continue;
      int32_t q_head;
      int64_t node;
      const int column = 4 * ((base + j * Team::kThreads) % kQuads);
      typename Tile::T* out = output_row<Tile>(p, to, row[j], q_head, node);
      const RowEnd end = finish_row(p, common[j], total[j], q_head);
      uint2 packed;
      packed.x = ptx::pack_pair(value[j].x * end.weight, value[j].y * end.weight, typename Tile::T{});
      packed.y = ptx::pack_pair(value[j].z * end.weight, value[j].w * end.weight, typename Tile::T{});
      *reinterpret_cast<uint2*>(out + column) = packed;
      if (column == 0 && p.lse) p.lse[node * p.lse_stride_n + q_head] = end.lse;
    }
  }
  Team::sync();
  for (int32_t i = 0; i < parts; i++)  // the workspace is left as it was found
    for (int c = Team::thread(); c < Tile::kSlot / 4; c += Team::kThreads)
      reinterpret_cast<float4*>(slot_of(i))[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Stores the item's rows, or leaves this part in the workspace and merges if it came last.
template <class Tile>
__device__ __forceinline__ void finish_item(const AttentionParams& p, const WarpState<Tile>& state, float* merge,
                                            const WalkState& walk, MergeState<Tile>& scratch) {
  using Team = typename Tile::Team;
  const int lane = Team::thread() % 32, warp = Team::thread() / 32;
  const Item& item = walk.item;
  const ItemParts cut = walk.cut;
  auto slot_of = [&](int32_t i) { return p.slots + (2 * (int64_t{cut.first_worker} + i) + (i == 0)) * Tile::kSlot; };
  Destination to = {cut.parts > 1 ? slot_of(walk.part) : nullptr, item.request.first_row, item.head, item.row0,
                    item.rows};
  if constexpr (Tile::kSplitKeys)
    finish_split_keys<Tile>(p, state, merge, scratch.tops, scratch.sums, to, warp, lane);
  else
    finish_rows<Tile>(p, state, to, warp, lane);
  if (cut.parts == 1 || !last_part<Team>(p.tickets + cut.first_worker, cut.parts, scratch.ticket)) return;
  to.slot = nullptr;
  merge_parts<Tile>(p, to, cut.parts, slot_of);
}

// After a block's last item: the block that is last of all clears the plan that the call made for itself.
template <class Team>
__device__ __forceinline__ void clear_own_plan(const AttentionParams& p, int32_t* ticket) {
  if (!p.own_plan) return;
  if (!last_part<Team>(p.tickets + p.slot_pairs, gridDim.x, ticket)) return;
  const int32_t fields = kPlanHeader + 2 * p.num_order + 1;
  for (int32_t c = Team::thread(); c < fields; c += Team::kThreads) p.own_plan[c] = 0;
}

}  // namespace specdec
