// Masked tiles whose V holds an infinity or a NaN. A tensor core multiplies a hidden key's value by its weight 0, and
// 0 x NaN is NaN: without care a poisoned node would reach rows that may not see it. So before a masked tile is used
// its V is checked (one fused multiply-add a register), and in the rare bad case
//
//   1. every row that sees a non-finite element adds it to its output as it is (inf or NaN, as the product would be),
//   2. the element becomes 0 in shared memory, and the products go on as always.
//
// S and M: a warp reads only its own 16 keys, so it does both alone. L and XL: warps check 16 keys each and act
// together. A hidden K needs no care: its scores are replaced before anything is made of them.
#pragma once
#include "attention/attention_step.cuh"

namespace specdec {

template <class Tile>
__device__ __forceinline__ float value_at(const unsigned char* v, int position, int column, bool e5m2) {
  const unsigned char* row = v + position * Tile::kVRow;
  if constexpr (!Tile::kFloat8)
    return to_float(reinterpret_cast<const typename Tile::T*>(row)[column]);
  else
    return e5m2 ? to_float(Float8E5M2{row[column]}) : to_float(Float8E4M3{row[column]});
}
__device__ __forceinline__ bool finite(float x) {
  return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

// Whether V at positions position .. position + 15 holds an infinity or a NaN. Whole warp.
template <class Tile>
__device__ __forceinline__ bool values_broken(const unsigned char* v, int position, int lane, bool e5m2) {
  uint32_t found = 0;
#pragma unroll
  for (int n = 0; n < Tile::DV / 16; n++) {
    uint32_t values[4];
    value_fragments<Tile>(values, v, position, n, lane, e5m2);
#pragma unroll
    for (int i = 0; i < 4; i++) found = ptx::add_zero_times(values[i], found, typename Tile::T{});
  }
  return (found & 0x7fff7fffu) != 0;
}

// Step 1 for this warp's rows and positions [first, first + count).
template <class Tile>
__device__ __forceinline__ void add_broken_values(WarpState<Tile>& state, const unsigned char* v,
                                                  const TileInfo<Tile::kRows>& info, uint64_t shown, bool rows_differ,
                                                  int first, int count, int warp, int lane, bool e5m2) {
#pragma unroll 1
  for (int position = first; position < first + count; position++) {
#pragma unroll
    for (int n = 0; n < Tile::DV / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x = value_at<Tile>(v, position, column_of<Tile>(n, i, lane), e5m2);
        if (finite(x)) continue;
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const uint64_t seen = rows_differ ? info.visible[row_of<Tile>(warp, m, half, lane)] & shown : shown;
            if (seen >> key_at(position) & 1) state.o[m][n][2 * half + i] += x;
          }
      }
  }
}

// Step 2: threads `thread` of `count` put zeros for the broken elements at positions [first, first + keys).
template <class Tile>
__device__ __forceinline__ void clear_broken_values(unsigned char* v, int first, int keys, int thread, int count,
                                                    bool e5m2) {
#pragma unroll 1
  for (int c = thread; c < keys * Tile::DV; c += count) {
    const int position = first + c / Tile::DV, column = c % Tile::DV;
    if (!finite(value_at<Tile>(v, position, column, e5m2)))
      reinterpret_cast<typename Tile::KV*>(v + position * Tile::kVRow)[column] = {};
  }
}

// The whole block comes here with every masked tile. `busy`: this warp has rows.
template <class Tile>
__device__ __forceinline__ void guard_values(WarpState<Tile>& state, unsigned char* v,
                                             const TileInfo<Tile::kRows>& info, uint64_t shown, bool rows_differ,
                                             bool busy, int warp, int lane, bool e5m2) {
  const bool broken = values_broken<Tile>(v, warp * 16, lane, e5m2);
  if constexpr (Tile::kSplitKeys) {
    if (!__any_sync(kFullWarp, broken)) return;
    add_broken_values<Tile>(state, v, info, shown, rows_differ, warp * 16, 16, warp, lane, e5m2);
    __syncwarp();
    clear_broken_values<Tile>(v, warp * 16, 16, lane, 32, e5m2);
    __syncwarp();
  } else {
    if (!__syncthreads_or(broken)) return;
    if (busy) add_broken_values<Tile>(state, v, info, shown, rows_differ, 0, kTileKeys, warp, lane, e5m2);
    __syncthreads();
    clear_broken_values<Tile>(v, 0, kTileKeys, threadIdx.x, kMmaThreads, e5m2);
    __syncthreads();
  }
}

}  // namespace specdec
