// Tree attention with mma.sync for bfloat16 and float16 (attention variants S and M).
//
// One block: 16 or 32 rows of one KV head of one request (row r = node r / group, query head r % group, so neighbouring
// rows share a mask row) against a range of 64-key tiles. Four warps split each tile's keys; every warp keeps a softmax
// of its own, so that the loop needs one barrier a tile, and the four are merged at the end.
//
//            keys 0..15   16..31   32..47   48..63      tile t of K, V: cp.async into stage t % 2
//   rows     warp 0       warp 1   warp 2   warp 3      tile t + 1 is fetched while t is computed
//
// Shared memory: Q, two stages of K and V (rows padded by 16 bytes: ldmatrix without bank conflicts), the tile's slots
// and visibility words in three stages. Grid: (row tiles x splits, KV heads, requests). With splits, partial results go
// to the workspace and the block that takes the last ticket merges them in split order: the result does not depend on
// which. Numerics: float32 accumulation, probabilities rounded to the type of V, exp2 of scores in log2 units. Not
// handled: float8 caches, rows not aligned to 16 bytes, other head dims (attention_simt.cuh does those).
#pragma once
#include "attention_params.cuh"
#include "common/planted.h"
#include "common/reduce.cuh"

namespace specdec {

constexpr int kMmaThreads = 128, kMmaWarps = 4, kMmaStages = 2;
constexpr int kInfoStages = 3;  // tile t + 1 is looked up while slower warps may still be at tile t - 1

template <int D, int DV, int kRowTiles>
struct MmaTile {
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kKRow = 2 * D + 16, kVRow = 2 * DV + 16;  // bytes of a padded row
  static constexpr int kStage = kTileKeys * (kKRow + kVRow);
  static constexpr int kMergeRow = DV + 8;  // floats
  static constexpr int kMerge = kMmaWarps * kRows * kMergeRow * 4;
  static constexpr int kBytes = kRows * kKRow + (kMmaStages * kStage > kMerge ? kMmaStages * kStage : kMerge);
};

// What a tile's loads and softmax need to know, one stage of it.
template <int kRows>
struct TileInfo {
  uint64_t visible[kRows];  // bit k: the row sees key k of the tile
  uint64_t needed;          // some row sees it and it has a page: other rows of V are read as 0, whatever they hold
  int32_t slot[kTileKeys];
  uint32_t paged[2];
};

template <class T, int D, int DV, int kRowTiles>
__global__ void __launch_bounds__(kMmaThreads, kRowTiles == 1 ? 4 : 3)
    tree_attention_mma_kernel(const AttentionParams p) {
  using Tile = MmaTile<D, DV, kRowTiles>;
  constexpr int kRows = Tile::kRows;
  SPECDEC_DYNAMIC_SHARED(unsigned char, shared);
  SPECDEC_SHARED(TileInfo<kRows>, info, kInfoStages);
  SPECDEC_SHARED(float, tops, kMmaWarps* kRows);
  SPECDEC_SHARED(float, sums, kMmaWarps* kRows);
  unsigned char *shared_q = shared, *stages = shared + kRows * Tile::kKRow;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int32_t row_tile = blockIdx.x % p.row_tiles, split = blockIdx.x / p.row_tiles, head = blockIdx.y;
  const int32_t b = ordered_request(p, blockIdx.z);
  if (b < 0) return;
  const AttentionRequest r = attention_request(p, b);
  const int32_t rows = static_cast<int32_t>(r.num_nodes) * p.group, row0 = row_tile * kRows;
  if (row0 >= rows) return;
  const int32_t last_row = (row0 + kRows < rows ? row0 + kRows : rows) - 1;
  TileRange tiles = key_tiles(p, r, row0 / p.group, last_row / p.group);
  if (p.num_splits > 1) {  // this split's share of the tiles
    const int32_t share = (tiles.end - tiles.begin + p.num_splits - 1) / p.num_splits;
    tiles.begin += split * share;
    tiles.end = tiles.begin + share < tiles.end ? tiles.begin + share : tiles.end;
  }

  for (int c = thread; c < kRows * (D / 8); c += kMmaThreads) {
    const int row = c / (D / 8), chunk = c % (D / 8);
    const bool valid = row0 + row < rows;
    const int32_t node = valid ? (row0 + row) / p.group : 0,
                  q_head = head * p.group + (valid ? (row0 + row) % p.group : 0);
    const T* source = reinterpret_cast<const T*>(p.q) + (r.first_row + node) * p.q_stride_n + q_head * p.q_stride_h;
    ptx::cp_async_16(shared_q + row * Tile::kKRow + chunk * 16, source + chunk * 8, valid);
  }

  auto look_up = [&](int32_t tile) {  // warps 0, 1: slots; warp 2: visibility
    TileInfo<kRows>& here = info[tile % kInfoStages];
    const int64_t first = int64_t{tile} * kTileKeys;
    if (warp < 2) {
      const int32_t slot = key_slot(p, r, first + thread);
      here.slot[thread] = slot;
      const uint32_t paged = __ballot_sync(kFullWarp, slot >= 0);
      if (lane == 0) here.paged[warp] = paged;
    } else if (warp == 2) {
      uint64_t visible = 0;
      if (lane < kRows && row0 + lane < rows)
        visible = visible_keys(r.tree, attention_query(p, r, (row0 + lane) / p.group), first);
      if (lane < kRows) here.visible[lane] = visible;
      const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(visible));
      const uint32_t high = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(visible >> 32));
      if (lane == 0) here.needed = static_cast<uint64_t>(high) << 32 | low;
    }
  };
  auto load = [&](int32_t tile) {
    const TileInfo<kRows>& here = info[tile % kInfoStages];
    unsigned char *k = stages + tile % 2 * Tile::kStage, *v = k + kTileKeys * Tile::kKRow;
    const T* k_head = reinterpret_cast<const T*>(p.k_cache) + head * p.k_stride_head;
    const T* v_head = reinterpret_cast<const T*>(p.v_cache) + head * p.v_stride_head;
    const int32_t page_size = static_cast<int32_t>(p.page_size);
    for (int c = thread; c < kTileKeys * (D / 8); c += kMmaThreads) {
      const int key = c / (D / 8), chunk = c % (D / 8), slot = here.slot[key];
      const bool valid = slot >= 0 && (here.needed >> key & 1);
      const int64_t offset = valid ? cache_offset(slot, page_size, p.k_stride_page, p.k_stride_row) : 0;
      ptx::cp_async_16(k + key * Tile::kKRow + chunk * 16, k_head + offset + chunk * 8, valid);
    }
    for (int c = thread; c < kTileKeys * (DV / 8); c += kMmaThreads) {
      const int key = c / (DV / 8), chunk = c % (DV / 8), slot = here.slot[key];
      const bool valid = slot >= 0 && (here.needed >> key & 1);
      const int64_t offset = valid ? cache_offset(slot, page_size, p.v_stride_page, p.v_stride_row) : 0;
      ptx::cp_async_16(v + key * Tile::kVRow + chunk * 16, v_head + offset + chunk * 8, valid);
    }
    ptx::cp_async_commit();
  };

  float o[kRowTiles][DV / 8][4] = {}, top[kRowTiles][2], sum[kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; m++) top[m][0] = top[m][1] = -INFINITY;
  const float scale = p.softmax_scale * (p.k_scale ? p.k_scale[head * p.k_scale_stride] : 1.0f);

  if (tiles.begin < tiles.end) {
    look_up(tiles.begin);
    __syncthreads();
    load(tiles.begin);
  }
  for (int32_t tile = tiles.begin; tile < tiles.end; tile++) {
    const bool more = tile + 1 < tiles.end;
    if (more) look_up(tile + 1);
    if (planted(Bug::refill_too_early) && more) {
      __syncwarp();
      load(tile + 1);
    }
    if (planted(Bug::wait_group_off_by_one))
      ptx::cp_async_wait<1>();
    else if (!planted(Bug::missing_wait) || more)
      ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has landed for all; all have left the stage that the next load overwrites
    if (more && !planted(Bug::refill_too_early)) load(tile + 1);

    const TileInfo<kRows>& here = info[tile % kInfoStages];
    const unsigned char *k = stages + tile % 2 * Tile::kStage, *v = k + kTileKeys * Tile::kKRow;
    float s[kRowTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      uint32_t keys[4];  // two 8-key fragments, both halves of the 16 dims
      const int key = warp * 16 + (lane & 7) + (planted(Bug::wrong_ldmatrix_address) ? lane >> 3 & 1 : lane >> 4) * 8;
      ptx::ldmatrix_x4(keys, k + key * Tile::kKRow + (2 * step + (lane >> 3 & 1)) * 16);
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        uint32_t queries[4];
        ptx::ldmatrix_x4(queries, shared_q + (m * 16 + (lane & 15)) * Tile::kKRow + (2 * step + (lane >> 4)) * 16);
        ptx::mma_m16n8k16(s[m][0], queries, keys[0], keys[1], T{});
        ptx::mma_m16n8k16(s[m][1], queries, keys[2], keys[3], T{});
      }
    }
    const uint64_t paged = static_cast<uint64_t>(here.paged[1]) << 32 | here.paged[0];
    uint32_t weights[kRowTiles][4];  // P as the A operand of the second product
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {  // rows g and g + 8
        const uint32_t bits = static_cast<uint32_t>((here.visible[m * 16 + g + 8 * half] & paged) >> (warp * 16));
        float best = top[m][half];
#pragma unroll
        for (int i = 0; i < 4; i++) {  // keys 8 (i / 2) + 2 t + i % 2
          float& x = s[m][i / 2][2 * half + i % 2];
          x = bits >> (8 * (i / 2) + 2 * t + i % 2) & 1u ? score_log2(p, x, scale) : -INFINITY;
          best = fmaxf(best, x);
        }
        best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 1));
        best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 2));
        const float base = best == -INFINITY ? 0.0f : best, shrink = ptx::ex2(top[m][half] - base);
        top[m][half] = best;
        sum[m][half] *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& x = s[m][i / 2][2 * half + i % 2];
          x = ptx::ex2(x - base);
          sum[m][half] += x;
        }
#pragma unroll
        for (int n = 0; n < DV / 8; n++) {
          o[m][n][2 * half] *= shrink;
          o[m][n][2 * half + 1] *= shrink;
        }
        weights[m][half] = ptx::pack_pair(s[m][0][2 * half], s[m][0][2 * half + 1], T{});
        weights[m][2 + half] = ptx::pack_pair(s[m][1][2 * half], s[m][1][2 * half + 1], T{});
      }
    }
#pragma unroll
    for (int n = 0; n < DV / 16; n++) {
      uint32_t values[4];
      ptx::ldmatrix_x4_transposed(values, v + (warp * 16 + (lane & 15)) * Tile::kVRow + (2 * n + (lane >> 4)) * 16);
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        ptx::mma_m16n8k16(o[m][2 * n], weights[m], values[0], values[1], T{});
        ptx::mma_m16n8k16(o[m][2 * n + 1], weights[m], values[2], values[3], T{});
      }
    }
  }
  ptx::cp_async_wait<0>();  // Q of a block without tiles

  // Merge the warps: every one leaves top and sum, then its output in units of the common top.
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[m][half] += __shfl_xor_sync(kFullWarp, sum[m][half], 1);
      sum[m][half] += __shfl_xor_sync(kFullWarp, sum[m][half], 2);
      if (t == 0) {
        tops[warp * kRows + m * 16 + g + 8 * half] = top[m][half];
        sums[warp * kRows + m * 16 + g + 8 * half] = sum[m][half];
      }
    }
  __syncthreads();  // also: nobody reads K or V any more
  float* merge = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int m = 0; m < kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = m * 16 + g + 8 * half;
      float common = -INFINITY;
      for (int w = 0; w < kMmaWarps; w++) common = fmaxf(common, tops[w * kRows + row]);
      const float factor = top[m][half] == -INFINITY ? 0.0f : ptx::ex2(top[m][half] - common);
#pragma unroll
      for (int n = 0; n < DV / 8; n++)
        *reinterpret_cast<float2*>(merge + (warp * kRows + row) * Tile::kMergeRow + 8 * n + 2 * t) =
            make_float2(o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor);
    }
  __syncthreads();

  const int64_t tile_index =
      (int64_t{static_cast<int32_t>(blockIdx.z)} * p.num_kv_heads + head) * p.row_tiles + row_tile;
  float* partial = p.partials + (tile_index * p.num_splits + split) * kRows * (DV + 2);
  auto finish = [&](int row, int column, float value, float common, float total) {
    const int32_t node = (row0 + row) / p.group, q_head = head * p.group + (row0 + row) % p.group;
    const RowEnd end = finish_row(p, common, total, q_head);
    T* out = reinterpret_cast<T*>(p.out) + (r.first_row + node) * p.out_stride_n + q_head * p.out_stride_h;
    store_value(out + column, value * end.weight);
    if (column == 0 && p.lse) p.lse[(r.first_row + node) * p.lse_stride_n + q_head] = end.lse;
  };
  for (int c = thread; c < kRows * DV; c += kMmaThreads) {
    const int row = c / DV, column = c % DV;
    if (row0 + row >= rows) break;
    float common = -INFINITY, total = 0.0f, value = 0.0f;
    for (int w = 0; w < kMmaWarps; w++) common = fmaxf(common, tops[w * kRows + row]);
    for (int w = 0; w < kMmaWarps; w++) {
      const float own = tops[w * kRows + row];
      if (own != -INFINITY) total += sums[w * kRows + row] * ptx::ex2(own - common);
      value += merge[(w * kRows + row) * Tile::kMergeRow + column];
    }
    if (p.num_splits == 1) {
      finish(row, column, value, common, total);
      continue;
    }
    partial[row * (DV + 2) + column] = value;
    if (column == 0) {
      partial[row * (DV + 2) + DV] = common;
      partial[row * (DV + 2) + DV + 1] = total;
    }
  }
  if (p.num_splits == 1) return;

  // The block with the last ticket merges; its atomic releases this block's partials and acquires the others'.
  SPECDEC_SHARED(int32_t, ticket, 1);
  __syncthreads();
  if (thread == 0) {
    int32_t* counter = p.tickets + tile_index;
    ticket[0] = planted(Bug::ticket_without_fence) ? atomicAdd(counter, 1) : ptx::atomic_add_acq_rel(counter, 1);
    if (ticket[0] == p.num_splits - 1 && !planted(Bug::counter_not_reset)) *counter = 0;  // for the next launch
  }
  __syncthreads();
  if (ticket[0] != p.num_splits - 1) return;
  const float* all = p.partials + tile_index * p.num_splits * kRows * (DV + 2);
  for (int c = thread; c < kRows * DV; c += kMmaThreads) {
    const int row = c / DV, column = c % DV;
    if (row0 + row >= rows) break;
    float common = -INFINITY, total = 0.0f, value = 0.0f;
    for (int i = 0; i < p.num_splits; i++) common = fmaxf(common, all[(i * kRows + row) * (DV + 2) + DV]);
    for (int i = 0; i < p.num_splits; i++) {
      const float* one = all + (i * kRows + row) * (DV + 2);
      if (one[DV] == -INFINITY) continue;
      const float factor = ptx::ex2(one[DV] - common);
      total += one[DV + 1] * factor;
      value += one[column] * factor;
    }
    finish(row, column, value, common, total);
  }
}

}  // namespace specdec
