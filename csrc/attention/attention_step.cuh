// One tile in registers: scores, softmax, values. Context tiles (kMasked false) hold no mask instruction.
#pragma once
#include "attention/attention_load.cuh"

namespace specdec {

struct ScoreScale {
  float scale;    // softmax_scale * k_scale, times log2(e), or divided by the softcap
  float softcap;  // times log2(e); 0: none
};

// tanh to 2e-7, absolutely: times a softcap that is far below what rounding a score to 16 bits has cost already.
__device__ __forceinline__ float fast_tanh(float y) {
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(2.0f * kLog2E * y));
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

// Where a thread's words for the step from position `first` on lie; those of the next step follow.
template <class Tile>
__device__ __forceinline__ const typename Tile::MaskWord* own_words(const TileInfo<Tile>& info, int first, int warp,
                                                                    int lane) {
  return info.visible + mask_index<Tile>(warp, lane / 4, lane % 4, first / Tile::kMaskUnit, 0);
}

// Words of the thread's row tiles for the step: one load.
template <class Tile>
__device__ __forceinline__ void read_visible(uint32_t (&words)[Tile::kStepUnits][Tile::kRowTiles],
                                             const typename Tile::MaskWord* own) {
  constexpr int kWords = Tile::kStepUnits * Tile::kRowTiles;
  using Word = typename Tile::MaskWord;
  struct alignas(kWords * sizeof(Word)) Together {
    Word word[kWords];
  };
  const Together together = *reinterpret_cast<const Together*>(own);
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i / Tile::kRowTiles][i % Tile::kRowTiles] = together.word[i];
}

// Scores of keys that a row does not see become -inf. Nothing but this function and read_visible knows of masks (held
// by tests/test_static_budgets.py).
template <class Tile>
__device__ __forceinline__ void hide_keys(float (&s)[Tile::kFragments][4], uint32_t word, int unit) {
  constexpr int kFragments = Tile::kMaskUnit / 8;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int n = 0; n < kFragments; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& x = s[unit * kFragments + n][2 * half + i];
        x = word & 1u << mask_bit((half * kFragments + n) * 2 + i) ? x : -INFINITY;
      }
}

// Scores become weights 2^(x - top); top, sum and the outputs move to the new maxima. own: the thread's words for the
// step (own_words).
template <class Tile, bool kMasked>
__device__ __forceinline__ void softmax(float (&s)[Tile::kRowTiles][Tile::kFragments][4], WarpState<Tile>& state,
                                        const ScoreScale& scale, const typename Tile::MaskWord* own) {
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
  if constexpr (kMasked) {
    uint32_t words[Tile::kStepUnits][Tile::kRowTiles];
    read_visible<Tile>(words, own);
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
      for (int unit = 0; unit < Tile::kStepUnits; unit++) hide_keys<Tile>(s[m], words[unit][m], unit);
  }
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
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

// A tile from ring stage k, v. Masked, the steps of a warp with one row tile (head dim 256) stand one behind the other:
// then one load brings the words of both. XL's loop carries addresses on: an index costs a masked step one instruction
// more. (At head dim 256 carried addresses spill on sm_100.)
template <class Tile, bool kMasked>
__device__ __forceinline__ void attend_tile(WarpState<Tile>& state, const AttentionParams& p, const ScoreScale& scale,
                                            const unsigned char* q, const unsigned char* k, const unsigned char* v,
                                            const TileInfo<Tile>& info, int warp, int lane) {
  constexpr int kAtOnce = kMasked && Tile::kRowTiles == 1 ? Tile::kSteps : 1;
  constexpr bool kCarried = !Tile::kSplitKeys && Tile::kRowTiles > 1;  // XL
  const typename Tile::MaskWord* own = own_words<Tile>(info, 0, warp, lane);
#pragma unroll(kAtOnce)
  for (int step = 0; step < Tile::kSteps; step++) {
    const int first = Tile::kSplitKeys ? warp * 16 : kCarried ? 0 : step * Tile::kStepKeys;
    if (!kCarried) own = own_words<Tile>(info, first, warp, lane);
    float s[Tile::kRowTiles][Tile::kFragments][4] = {};
    multiply_keys<Tile>(s, state, q, k, first, warp, lane, p.e5m2);
    softmax<Tile, kMasked>(s, state, scale, own);
    multiply_values<Tile>(s, state, v, first, lane, p.e5m2);
    if (kCarried) {
      k += Tile::kStepKeys * Tile::kKRow;
      v += Tile::kStepKeys * Tile::kVRow;
      own += Tile::kStepUnits * Tile::kRowTiles;
    }
  }
}

}  // namespace specdec
