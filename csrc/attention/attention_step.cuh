// One tile in registers: scores, softmax, values. Context tiles (kMasked false) hold no mask instruction.
#pragma once
#include "attention/attention_load.cuh"

namespace specdec {

struct ScoreScale {
  float scale;    // softmax_scale * k_scale, times log2(e), or divided by the softcap
  float softcap;  // times log2(e); 0: none
};

// tanh. Near 0 a polynomial keeps the relative accuracy (error below 4e-7); elsewhere 1 - 2 / (1 + e^2y).
__device__ __forceinline__ float fast_tanh(float y) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float magnitude = fabsf(y), square = y * y;
  const float series = y * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
  const float tail = copysignf(1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(2.0f * kLog2E * magnitude)), y);
  return magnitude < 0.25f ? series : tail;
}

// Scores of `kFragments` x 8 keys from `key` on: s = Q K^T.
template <class Tile>
__device__ __forceinline__ void multiply_keys(float (&s)[Tile::kRowTiles][Tile::kFragments][4],
                                              const WarpState<Tile>& state, const unsigned char* q,
                                              const unsigned char* k, int key, int warp, int lane, bool e5m2) {
#pragma unroll
  for (int step = 0; step < Tile::D / 16; step++) {
    uint32_t queries[Tile::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; m++) {
      if constexpr (Tile::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; i++) queries[m][i] = state.q[step][i];
      } else {
        query_fragment<Tile>(queries[m], q, (Tile::kSplitKeys ? 0 : warp * 16 * Tile::kRowTiles) + m * 16, step, lane);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::kFragments; n += 2) {
      uint32_t keys[4];
      key_fragments<Tile>(keys, k, key + 8 * n, step, lane, e5m2);
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; m++) {
        ptx::mma_m16n8k16(s[m][n], queries[m], keys[0], keys[1], typename Tile::T{});
        ptx::mma_m16n8k16(s[m][n + 1], queries[m], keys[2], keys[3], typename Tile::T{});
      }
    }
  }
}

// Scores of keys that a row does not see become -inf: bit 2 n + i of `seen` is this thread's column i of fragment n.
// Nothing but this function and the lines above its call knows of masks (held by tests/test_static_budgets.py).
template <class Tile>
__device__ __forceinline__ void hide_keys(float (&s)[Tile::kFragments][4], int half, uint32_t seen) {
#pragma unroll
  for (int n = 0; n < Tile::kFragments; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float& x = s[n][2 * half + i];
      x = seen >> (2 * n + i) & 1u ? x : -INFINITY;
    }
}

// Of the step from position `first` on: scores become weights 2^(x - top); top, sum and the outputs move to the new
// maxima.
template <class Tile, bool kMasked>
__device__ __forceinline__ void softmax(float (&s)[Tile::kRowTiles][Tile::kFragments][4], WarpState<Tile>& state,
                                        const ScoreScale& scale, const TileInfo<Tile::kRows>& info, uint64_t shown,
                                        bool rows_differ, int first, int warp, int lane) {
  const int shift = 16 * (lane % 4) + first / 4;  // of the thread's first key of the step
  float shrink[Tile::kRowTiles][2];
  bool moved = false;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int n = 0; n < Tile::kFragments; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[m][n][i] *= scale.scale;
  if (scale.softcap > 0.0f) {
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < Tile::kFragments; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[m][n][i] = scale.softcap * fast_tanh(s[m][n][i]);
  }
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if constexpr (kMasked) {
        uint32_t seen = static_cast<uint32_t>(shown >> shift);
        if (rows_differ) seen &= static_cast<uint32_t>(info.visible[row_of<Tile>(warp, m, half, lane)] >> shift);
        hide_keys<Tile>(s[m], half, seen);
      }
      float best = state.top[m][half];
#pragma unroll
      for (int n = 0; n < Tile::kFragments; n++) best = fmaxf(best, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 1));
      best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 2));
      const float base = best == -INFINITY ? 0.0f : best;
      shrink[m][half] = ptx::ex2(state.top[m][half] - base);
      moved |= shrink[m][half] != 1.0f;
      state.top[m][half] = best;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < Tile::kFragments; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& x = s[m][n][2 * half + i];
          x = ptx::ex2(x - base);
          sum += x;
        }
      state.sum[m][half] = state.sum[m][half] * shrink[m][half] + sum;
    }
  if (!__any_sync(kFullWarp, moved)) return;  // mostly, after the first tiles: every factor is exactly 1
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int n = 0; n < Tile::DV / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state.o[m][n][i] *= shrink[m][i / 2];
}

// o += weights V.
template <class Tile>
__device__ __forceinline__ void multiply_values(const float (&s)[Tile::kRowTiles][Tile::kFragments][4],
                                                WarpState<Tile>& state, const unsigned char* v, int key, int lane,
                                                bool e5m2) {
  using T = typename Tile::T;
#pragma unroll
  for (int k = 0; k < Tile::kFragments / 2; k++) {
    uint32_t weights[Tile::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        weights[m][i] = ptx::pack_pair(s[m][2 * k + i / 2][i % 2 * 2], s[m][2 * k + i / 2][i % 2 * 2 + 1], T{});
#pragma unroll
    for (int n = 0; n < Tile::DV / 16; n++) {
      uint32_t values[4];
      value_fragments<Tile>(values, v, key + 16 * k, n, lane, e5m2);
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; m++) {
        ptx::mma_m16n8k16(state.o[m][2 * n], weights[m], values[0], values[1], T{});
        ptx::mma_m16n8k16(state.o[m][2 * n + 1], weights[m], values[2], values[3], T{});
      }
    }
  }
}

// A tile from ring stage k, v. shown: keys that have a page; rows_differ: info holds the rows' words.
template <class Tile, bool kMasked>
__device__ __forceinline__ void attend_tile(WarpState<Tile>& state, const AttentionParams& p, const ScoreScale& scale,
                                            const unsigned char* q, const unsigned char* k, const unsigned char* v,
                                            const TileInfo<Tile::kRows>& info, uint64_t shown, bool rows_differ,
                                            int warp, int lane) {
#pragma unroll 1
  for (int step = 0; step < Tile::kSteps; step++) {
    const int first = Tile::kSplitKeys ? warp * 16 : step * Tile::kStepKeys;
    float s[Tile::kRowTiles][Tile::kFragments][4] = {};
    multiply_keys<Tile>(s, state, q, k, first, warp, lane, p.e5m2);
    softmax<Tile, kMasked>(s, state, scale, info, shown, rows_differ, first, warp, lane);
    multiply_values<Tile>(s, state, v, first, lane, p.e5m2);
  }
}

}  // namespace specdec
