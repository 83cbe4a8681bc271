// Operands of the two products: fragments of Q, K and V out of shared memory, float8 widened in registers.
//
// A float8 row is read by ldmatrix as 16-bit units, so a thread gets four neighbouring bytes where a 16-bit cache gives
// two pairs. For scores the order of dims is free as long as Q has the same: Q is stored with the dims of each group of
// 16 permuted. For values the pairs (position 2t, position 2t + 1) of one column are bytes (0, 2) and (1, 3) of a unit:
// the even and the odd columns of 16 become two fragments.
//
//   position in Q's group   0 1 | 2 3 | 4 5 | 6 7 |  8  9 | 10 11 | 12 13 | 14 15
//   dim of the cache        0 1 | 4 5 | 8 9 |12 13|  2  3 |  6  7 | 10 11 | 14 15
//
// Addresses are a thread's part plus constants. Lane bits beside constant ones in one term, as 2 n + (lane >> 4),
// become a register for each n: no immediate offset can be taken from an `or`.
#pragma once
#include "attention/attention_tile.cuh"
#include "common/planted.h"

namespace specdec {

// Bytes i and j of a word as two 16-bit numbers of type T, i in the low half.
template <class T>
__device__ __forceinline__ uint32_t widen(uint32_t word, int i, int j, bool e5m2) {
  const uint32_t halves = e5m2 ? __byte_perm(word, 0, i << 4 | j << 12 | 0x0404)
                               : ptx::half_pair_from_e4m3(__byte_perm(word, 0, i | j << 4));
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, Half>) return halves;
  float low, high;
  ptx::floats_from_half_pair(halves, low, high);
  return ptx::pack_pair(low, high, T{});
}

// Q of the block's rows: 16-byte copies; rows behind `rows` are zero.
template <class Tile>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const AttentionRequest& r, unsigned char* q,
                                             int32_t head, int32_t row0, int32_t rows) {
  using T = typename Tile::T;
  constexpr int kChunks = Tile::D / 8;
#pragma unroll 1
  for (int c = ptx::in_place(threadIdx.x); c < Tile::kRows * kChunks; c += kMmaThreads) {
    const int row = c / kChunks, chunk = c % kChunks;
    const bool valid = row0 + row < rows;
    const int32_t at = valid ? row0 + row : 0, node = at / p.group, q_head = head * p.group + at % p.group;
    const T* source =
        reinterpret_cast<const T*>(p.q) + (r.first_row + node) * p.q_stride_n + q_head * p.q_stride_h + chunk * 8;
    if constexpr (!Tile::kFloat8) {
      ptx::cp_async_16(q + row * Tile::kQRow + chunk * 16, source, valid);
    } else {  // two pairs of the chunk go to each half of the group
      uint4 x = make_uint4(0, 0, 0, 0);
      if (valid) x = *reinterpret_cast<const uint4*>(source);
      unsigned char* group = q + row * Tile::kQRow + chunk / 2 * 32 + chunk % 2 * 8;
      *reinterpret_cast<uint2*>(group) = make_uint2(x.x, x.z);
      *reinterpret_cast<uint2*>(group + 16) = make_uint2(x.y, x.w);
    }
  }
}

// A operand: 16 rows from `row`, dims 16 step .. + 15.
template <class Tile>
__device__ __forceinline__ void query_fragment(uint32_t (&a)[4], const unsigned char* q, int row, int step, int lane) {
  ptx::ldmatrix_x4(a, q + (lane & 15) * Tile::kQRow + (lane >> 4) * 16 + row * Tile::kQRow + step * 32);
}

// B operands of the scores: positions key .. key + 15 as two fragments of 8, dims 16 step .. + 15.
template <class Tile>
__device__ __forceinline__ void key_fragments(uint32_t (&b)[4], const unsigned char* k, int key, int step, int lane,
                                              bool e5m2) {
  if constexpr (!Tile::kFloat8) {
    const int row = (lane & 7) + (planted(Bug::wrong_ldmatrix_address) ? lane >> 3 & 1 : lane >> 4) * 8;
    ptx::ldmatrix_x4(b, k + row * Tile::kKRow + (lane >> 3 & 1) * 16 + key * Tile::kKRow + step * 32);
  } else {
    uint32_t raw[2];
    ptx::ldmatrix_x2(raw, k + (lane & 15) * Tile::kKRow + key * Tile::kKRow + step * 16);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      b[2 * i] = widen<typename Tile::T>(raw[i], 0, 1, e5m2);
      b[2 * i + 1] = widen<typename Tile::T>(raw[i], 2, 3, e5m2);
    }
  }
}

// V at positions key .. key + 15, columns 16 n .. + 15, as ldmatrix gives it: 2 words a thread of a float8 cache,
// else 4.
template <class Tile>
__device__ __forceinline__ void raw_values(uint32_t (&raw)[Tile::kFloat8 ? 2 : 4], const unsigned char* v, int key,
                                           int n, int lane) {
  const unsigned char* row = v + (lane & 15) * Tile::kVRow;
  if constexpr (Tile::kFloat8)
    ptx::ldmatrix_x2_transposed(raw, row + key * Tile::kVRow + n * 16);
  else
    ptx::ldmatrix_x4_transposed(raw, row + (lane >> 4) * 16 + key * Tile::kVRow + n * 32);
}

// B operands of the values: the same against output fragments 2 n and 2 n + 1.
template <class Tile>
__device__ __forceinline__ void value_fragments(uint32_t (&b)[4], const unsigned char* v, int key, int n, int lane,
                                                bool e5m2) {
  if constexpr (!Tile::kFloat8) {
    raw_values<Tile>(b, v, key, n, lane);
  } else {
    uint32_t raw[2];
    raw_values<Tile>(raw, v, key, n, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      b[i] = widen<typename Tile::T>(raw[i], 0, 2, e5m2);
      b[2 + i] = widen<typename Tile::T>(raw[i], 1, 3, e5m2);
    }
  }
}

}  // namespace specdec
