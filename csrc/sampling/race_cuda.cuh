// The race of race.h by a block: a warp takes 1024 ids at a time, each of its lanes one group.
//
//   unit of 8 logits   lane L reads ids 8 L .. 8 L + 7 of every 256: groups 8 (L % 4) ..; maxima over lanes L % 4 alike
//   unit of 4 logits   lane L reads ids 4 L .. 4 L + 3 of every 128: groups 4 (L % 8) ..; maxima over lanes L % 8 alike
//
// One word a group instead of one an id: the pass over the row (in L2 by now) is a pass of maxima.
#pragma once
#include "sampling/race.h"
#include "sampling/rows_cuda.cuh"

namespace specdec {

// The maximum of this lane's group among ids [1024 block, 1024 block + 1024).
__device__ __forceinline__ float group_max(const RowReader& reader, int32_t block) {
  const int lane = threadIdx.x % 32;
  const int32_t units = kGroupBlock / reader.per_unit(), first = block * units;
  float most[8];
#pragma unroll
  for (int e = 0; e < 8; e++) most[e] = -INFINITY;
#pragma unroll 1
  for (int32_t i = lane; i < units; i += 32) {
    if (first + i >= reader.units()) break;
    const uint4 unit = reader.load(first + i);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half && !reader.narrow) break;
      float x[4];
      reader.unpack(unit, half, x);
#pragma unroll
      for (int e = 0; e < 4; e++) most[4 * half + e] = fmaxf(most[4 * half + e], clean_logit(x[e]));
    }
  }
  const int lanes = reader.narrow ? 4 : 8, each = reader.narrow ? 8 : 4, from = lane / each;
  float mine = -INFINITY;
#pragma unroll
  for (int e = 0; e < 8; e++) {
    if (reader.narrow) most[e] = fmaxf(most[e], __shfl_xor_sync(kFullWarp, most[e], 4));
    most[e] = fmaxf(most[e], __shfl_xor_sync(kFullWarp, most[e], 8));
    most[e] = fmaxf(most[e], __shfl_xor_sync(kFullWarp, most[e], 16));
    const float value = __shfl_sync(kFullWarp, most[e], from % lanes);
    if (lane % each == e) mine = value;
  }
  return mine;
}

// First taken ring of the groups of units [begin, end) (whole blocks of 1024 ids) and of the argmax's block; id -1
// where none is taken in time. The law needs its mass; weights are at most the row's own. See race_token in pick_cpu.h.
template <class LogWeight>
__device__ __forceinline__ Winner block_race(const RowReader& reader, int32_t begin, int32_t end, const RowLaw& law,
                                             const NoiseKey& key, RowScratch& s, LogWeight&& log_weight) {
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t units = kGroupBlock / reader.per_unit(), peak = law.argmax / kGroupBlock;
  NoiseKey clocks = key;
  clocks.purpose = kPurposeRace;
  Winner winner = {0, -1};
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {  // the argmax's block first: it gives every lane a good bar
    double score = winner.id >= 0 ? key_score(winner.key) : law.log_mass - log(kRaceEnd);
    int32_t id = winner.id;
    const int32_t first = (turn == 0 ? peak : begin / units) + warp;
    const int32_t behind = turn == 0 ? peak + 1 : (end + units - 1) / units;
#pragma unroll 1
    for (int32_t block = first; block < behind; block += kRowThreads / 32) {
      const float max = group_max(reader, block);
      const int32_t group = block * kGroupLanes + lane;
      const Philox words =
          draw(clocks.seed, clocks.position, clocks.purpose, static_cast<uint32_t>(group) >> 2, clocks.salt);
      const uint32_t word = word_of(words, static_cast<uint32_t>(group) & 3);
      const float log_bound = group_bound(law.scaled(max));
      if (!(max > -INFINITY) || max < law.threshold || !can_beat(RowLaw(), log_bound, word, score)) continue;
      const double bound = log_bound;
      race_group(clocks, group, word, bound, score, id, [&](const Ring& ring) {
        if (ring.id >= reader.row.size) return false;
        const float logit = clean_logit(edited_logit(reader.row, ring.id));
        if (!(logit > -INFINITY) || !law.keeps(logit, ring.id)) return false;
        return ring.log_u < law.scaled(logit) - bound && ring.log_u < log_weight(ring.id, logit) - bound;
      });
    }
    __syncwarp();
    winner = block_winner(id >= 0 ? score_key(score) : 0, id, s);
  }
  return winner;
}

}  // namespace specdec
