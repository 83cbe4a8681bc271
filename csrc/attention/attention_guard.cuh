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

// An element of V if it is infinite or NaN, else 0. Only the numbers that the rare path needs are decoded.
template <class Tile>
__device__ __forceinline__ float broken_value(const unsigned char* v, int position, int column, bool e5m2) {
  const unsigned char* row = v + position * Tile::kVRow;
  uint32_t bits;  // of a 16-bit format
  if constexpr (!Tile::kFloat8) {
    bits = reinterpret_cast<const uint16_t*>(row)[column];
    if constexpr (std::is_same_v<typename Tile::T, BFloat16>)
      return (bits & 0x7f80u) == 0x7f80u ? bits_float(bits << 16) : 0.0f;
  } else {  // e4m3 has no infinity
    bits = e5m2 ? row[column] << 8 : (row[column] & 0x7fu) == 0x7fu ? 0x7e00u : 0u;
  }
  return (bits & 0x7c00u) == 0x7c00u ? bits_float((bits & 0x8000u) << 16 | 0x7f800000u | (bits & 0x3ffu) << 13) : 0.0f;
}

// Whether V at positions position .. position + 15 holds an infinity or a NaN. Whole warp.
template <class Tile>
__device__ __forceinline__ bool values_broken(const unsigned char* v, int position, int lane, bool e5m2) {
  // float8: adding 1 to the last place of an exponent (e4m3: of the whole number) of all ones carries into the sign.
  const uint32_t bits = e5m2 ? 0x7c7c7c7cu : 0x7f7f7f7fu, one = e5m2 ? 0x04040404u : 0x01010101u;
  uint32_t found = 0;
#pragma unroll
  for (int n = 0; n < Tile::DV / 16; n++) {
    uint32_t raw[Tile::kFloat8 ? 2 : 4];
    raw_values<Tile>(raw, v, position, n, lane);
    for (uint32_t word : raw) {
      if constexpr (Tile::kFloat8)
        found |= (word & bits) + one;
      else
        found = ptx::add_zero_times(word, found, typename Tile::T{});
    }
  }
  return (found & (Tile::kFloat8 ? 0x80808080u : 0x7fff7fffu)) != 0;
}

// Whether the row of row tile m, half h sees the key at a position.
template <class Tile>
__device__ __forceinline__ bool sees_position(const TileInfo<Tile>& info, int position, int m, int half, int warp,
                                              int lane) {
  const int unit = position / Tile::kMaskUnit, n = position % Tile::kMaskUnit / 8, t = position / 2 % 4;
  const uint32_t word = info.visible[mask_index<Tile>(warp, lane / 4, t, unit, m)];
  return word >> mask_bit((half * (Tile::kMaskUnit / 8) + n) * 2 + position % 2) & 1;
}

// Keys without a page are hidden from all rows. `fresh`: the tile is not masked otherwise, so its words say nothing
// yet. Whole team, and rare: a page table with holes.
template <class Tile, class Team>
__device__ __forceinline__ void hide_missing(TileInfo<Tile>& info, uint64_t shown, bool fresh) {
  constexpr int kBits = Tile::kMaskUnit / 4;
#pragma unroll 1
  for (int c = Team::thread(); c < Tile::kMaskWords; c += Team::kThreads) {
    const int unit = c / Tile::kRowTiles % Tile::kMaskUnits, t = c / (Tile::kRowTiles * Tile::kMaskUnits) % 4;
    const uint32_t bits = static_cast<uint32_t>(shown >> (16 * t + unit * kBits)) & ((1u << kBits) - 1);
    const auto word = static_cast<typename Tile::MaskWord>(mask_word_of(bits | bits << kBits));
    info.visible[c] = fresh ? word : info.visible[c] & word;
  }
  Team::sync();
}

// Step 1 for this warp's rows and positions [first, first + count).
template <class Tile>
__device__ __forceinline__ void add_broken_values(WarpState<Tile>& state, const unsigned char* v,
                                                  const TileInfo<Tile>& info, int first, int count, int warp, int lane,
                                                  bool e5m2) {
#pragma unroll 1
  for (int position = first; position < first + count; position++) {
    bool sees[Tile::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) sees[m][half] = sees_position<Tile>(info, position, m, half, warp, lane);
#pragma unroll
    for (int n = 0; n < Tile::DV / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x = broken_value<Tile>(v, position, column_of<Tile>(n, i, lane), e5m2);
        if (x == 0.0f) continue;  // mostly; as a branch, or loads of all columns wait in registers that are not there
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            if (sees[m][half]) state.o[m][n][2 * half + i] += x;
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
    if (broken_value<Tile>(v, position, column, e5m2) != 0.0f)
      reinterpret_cast<typename Tile::KV*>(v + position * Tile::kVRow)[column] = {};
  }
}

// The whole block comes here with every masked tile. `busy`: this warp has rows.
template <class Tile>
__device__ __forceinline__ void guard_values(WarpState<Tile>& state, unsigned char* v, const TileInfo<Tile>& info,
                                             bool busy, int warp, int lane, bool e5m2) {
  const bool broken = values_broken<Tile>(v, warp * 16, lane, e5m2);
  if constexpr (Tile::kSplitKeys) {
    if (!__any_sync(kFullWarp, broken)) return;
    add_broken_values<Tile>(state, v, info, warp * 16, 16, warp, lane, e5m2);
    __syncwarp();
    clear_broken_values<Tile>(v, warp * 16, 16, lane, 32, e5m2);
    __syncwarp();
  } else {
    if (!__syncthreads_or(broken)) return;
    if (busy) add_broken_values<Tile>(state, v, info, 0, kTileKeys, warp, lane, e5m2);
    __syncthreads();
    clear_broken_values<Tile>(v, 0, kTileKeys, threadIdx.x, kMmaThreads, e5m2);
    __syncthreads();
  }
}

}  // namespace specdec
