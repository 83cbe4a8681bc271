// A block's view of one row of logits: its law under the filters, and a draw from it. The same laws, masses and keys as
// the CPU ops, bit for bit; only a tie of two scores within an ulp of the float64 logarithm could fall otherwise.
//
//   first pass     maximum, its lowest id, flags                 (later passes find the row in L2)
//   mass           sum of the kept masses
//   top-k, top-p   1024 bins of counts or masses in shared memory: first of the distance below the maximum, then of the
//                  crossing bin's order keys, until one logit value is left; its ties go by id
//   draw           words against a bar; what passes is scored in float64
//
// Every function is called by the whole block and returns the same to all threads.
#pragma once
#include "sampling/noise.h"
#include "sampling/row_read_cuda.cuh"

namespace specdec {

__device__ __forceinline__ RowLaw block_first_read(const BlockRow& row, RowScratch& s) {
  RowLaw law;
  uint64_t best = 0;  // order key, then the complement of the id
  int32_t flags = 0;
  for_quads(row, [&](int32_t first, float (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (x[e] != x[e]) flags |= kFlagNanLogit;
      if (x[e] > kInfLogit) flags |= kFlagInfLogit;
      const uint64_t key = uint64_t{order_key(clean_logit(x[e]))} << 32 | ~static_cast<uint32_t>(first + e);
      best = key > best ? key : best;
    }
  });
  best = block_reduce(best, Maximum{}, uint64_t{0}, s.sums);
  law.flags = __syncthreads_or(flags & kFlagNanLogit) ? kFlagNanLogit : 0;
  if (__syncthreads_or(flags & kFlagInfLogit)) law.flags |= kFlagInfLogit;
  law.max = order_value(static_cast<uint32_t>(best >> 32));
  law.argmax = static_cast<int32_t>(~static_cast<uint32_t>(best));
  if (!(law.max > -INFINITY)) {
    law.flags |= kFlagDeadRow;
    law.max = 0.0f;
    law.argmax = 0;
    law.is_point = law.is_empty = true;
  }
  return law;
}

// Sum of the kept masses: `fours` of neighbours share one rounding, as in a row without top-k and top-p.
__device__ __forceinline__ uint64_t block_mass(const BlockRow& row, const RowLaw& law, bool fours, RowScratch& s) {
  uint64_t sum = 0;
  for_quads(row, [&](int32_t first, float (&x)[4]) {
    float w[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float logit = clean_logit(x[e]);
      w[e] = logit > -INFINITY && law.keeps(logit, first + e) ? law.weight(logit) : 0.0f;
    }
    if (fours) {
      sum += static_cast<uint64_t>(llrintf(((w[0] + w[1]) + (w[2] + w[3])) * kMassScale));
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) sum += static_cast<uint64_t>(llrintf(w[e] * kMassScale));
    }
  });
  return block_reduce(sum, Sum{}, uint64_t{0}, s.sums);
}

// Keys of numbers that the row's type can hold: their low bits are all 0, or all 1 below zero.
__device__ __forceinline__ void narrow_keys(int unused_bits, uint32_t& low, uint32_t& high) {
  const uint32_t mask = (1u << unused_bits) - 1;
  low = low >> 31 ? (low + mask) & ~mask : low | mask;
  if (high >> 31)
    high &= ~mask;
  else if ((high & mask) != mask)
    high = (high & ~mask) - 1;
}
// Bits of a float32 order key that no number of this type uses.
__device__ __forceinline__ int unused_key_bits(const BlockRow& row) {
  if (row.is_edited() || row.type == LogitType::float32) return 0;
  return row.type == LogitType::bfloat16 ? 16 : 13;
}

// The id of the needed-th kept logit equal to `value`, in order of ids.
__device__ __forceinline__ int32_t block_find_tie(const BlockRow& row, const RowLaw& law, float value, uint64_t needed,
                                                  RowScratch& s) {
  uint64_t seen = 0;
  for (int32_t base = 0; base < row.size && seen < needed; base += 4 * kRowThreads) {
    const int32_t first = base + 4 * static_cast<int32_t>(threadIdx.x);
    uint32_t ties = 0;
#pragma unroll 1
    for (int e = 0; e < 4; e++) {
      const int32_t id = first + e;
      const bool tie = id < row.size && clean_logit(edited_logit(row, id)) == value && law.keeps(value, id);
      ties |= static_cast<uint32_t>(tie) << e;
    }
    int32_t here = 0;
    const int32_t count = __popc(ties), before = block_exclusive_sum(count, &here, s.counts);
    int32_t left = static_cast<int32_t>(needed - seen < 2147483647u ? needed - seen : 2147483647u) - before;
    if (left > 0 && left <= count) {
      for (; left > 1; left--) ties &= ties - 1;
      s.id = first + __ffs(static_cast<int>(ties)) - 1;
    }
    seen += static_cast<uint64_t>(here);
  }
  __syncthreads();
  const int32_t id = s.id;
  __syncthreads();  // s is free again
  return id;
}

// Keeps the shortest prefix of the total order, among what is kept so far, whose weight reaches `wanted`: counts, or
// masses. law.mass becomes the weight of the prefix.
__device__ __forceinline__ void block_select(const BlockRow& row, bool by_mass, uint64_t wanted, RowLaw& law,
                                             RowScratch& s) {
  constexpr int kBinsPerThread = kBins / kRowThreads;
  const int unused = law.flags & kFlagInfLogit ? 0 : unused_key_bits(row);  // +inf counts as a float32
  const float scale = law.tau * kBinsPerUnit;
  uint32_t low = order_key(-kInfLogit), high = order_key(law.max);
  uint64_t above = 0, at = 0;
  for (bool by_distance = true; by_distance || low < high; by_distance = false) {
    int shift = 0;
    while (((high - low) >> shift) >= kBins) shift++;
    for (int i = threadIdx.x; i < kBins; i += kRowThreads) s.bins[i] = 0;
    __syncthreads();
    for_quads(row, [&](int32_t first, float (&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float logit = clean_logit(x[e]);
        if (!(logit > -INFINITY) || !law.keeps(logit, first + e)) continue;
        const uint32_t key = order_key(logit);
        if (key < low || key > high) continue;
        const uint64_t weight = by_mass ? law.mass_of(logit) : 1;
        const int32_t bin =
            by_distance ? distance_bin(law.max, logit, scale) : static_cast<int32_t>((high - key) >> shift);
        if (weight)
          atomicAdd(reinterpret_cast<unsigned long long*>(&s.bins[bin]), static_cast<unsigned long long>(weight));
      }
    });
    __syncthreads();
    uint64_t mine[kBinsPerThread], sum = 0, total = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; i++) sum += mine[i] = s.bins[threadIdx.x * kBinsPerThread + i];
    uint64_t before = above + block_exclusive_sum(sum, &total, s.sums);
    if (wanted > above + total) wanted = above + total;  // not reached: all of it
    if (before < wanted && before + sum >= wanted) {
      int i = 0;
#pragma unroll
      for (; i + 1 < kBinsPerThread && before + mine[i] < wanted; i++) before += mine[i];
      s.bin = static_cast<int32_t>(threadIdx.x) * kBinsPerThread + i;
      s.above = before;
      s.at = s.bins[s.bin];
    }
    __syncthreads();
    above = s.above;
    at = s.at;
    if (by_distance) {
      bin_keys(law, s.bin, scale, &low, &high);
    } else {
      high -= static_cast<uint32_t>(s.bin) << shift;
      const uint32_t bottom = high - ((1u << shift) - 1);
      low = bottom > low && bottom <= high ? bottom : low;
    }
    if (unused) narrow_keys(unused, low, high);
    __syncthreads();  // s is free again
  }
  const float value = order_value(low);
  const uint64_t one = by_mass ? law.mass_of(value) : 1, ties = at / one;
  uint64_t needed = (wanted - above + one - 1) / one;
  if (needed > ties) needed = ties;
  if (needed < ties)
    law.last_tie = block_find_tie(row, law, value, needed, s);
  else if (value > law.threshold)
    law.last_tie = kNoTie;
  law.threshold = value;
  law.mass = above + needed * one;
}

// First read from an output layer's statistics of the row's tiles, (maximum, sum) each: only the tile of the maximum is
// read. False where they are no statistics of this row, or show NaN or +inf.
__device__ __forceinline__ bool block_tiled_read(const BlockRow& row, const float* tiles, RowLaw& law, RowScratch& s) {
  const int32_t count = (row.size + kTileLogits - 1) / kTileLogits;
  uint64_t best = 0;
  int unreadable = 0;
  for (int32_t t = threadIdx.x; t < count; t += kRowThreads) {
    const float value = tiles[2 * t];
    if (!(value <= kInfLogit)) unreadable = 1;
    const uint64_t key = uint64_t{order_key(value)} << 32 | ~static_cast<uint32_t>(t);
    best = key > best ? key : best;
  }
  if (__syncthreads_or(unreadable)) return false;
  best = block_reduce(best, Maximum{}, uint64_t{0}, s.sums);
  law.max = order_value(static_cast<uint32_t>(best >> 32));
  if (!(law.max > -INFINITY)) return false;
  const RowReader reader(row);
  const int32_t first_unit = static_cast<int32_t>(~static_cast<uint32_t>(best)) * (kTileLogits / reader.per_unit());
  const int32_t behind = first_unit + kTileLogits / reader.per_unit();
  int32_t lowest = 2147483647;
  for_quads(reader, first_unit, behind < reader.units() ? behind : reader.units(), [&](int32_t first, float (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (x[e] == law.max && first + e < lowest) lowest = first + e;
  });
  law.argmax = block_reduce(lowest, Minimum{}, 2147483647, s.counts);
  return law.argmax < row.size;
}
__device__ __forceinline__ uint64_t block_tiled_mass(const BlockRow& row, const float* tiles, const RowLaw& law,
                                                     RowScratch& s) {
  uint64_t sum = 0;
  for (int32_t t = threadIdx.x; t < (row.size + kTileLogits - 1) / kTileLogits; t += kRowThreads) {
    const double mass = static_cast<double>(tiles[2 * t + 1]) * law.weight(tiles[2 * t]) * kMassScale;
    if (mass > 0.0 && mass < 9.2e18) sum += static_cast<uint64_t>(mass);
  }
  return block_reduce(sum, Sum{}, uint64_t{0}, s.sums);
}

// The row's law under the filters. See row_law and, with `tiles`, tiled_law in rows_cpu.h.
__device__ __forceinline__ RowLaw block_row_law(const BlockRow& row, const FilterParams& params, bool need_mass,
                                                const float* tiles, RowScratch& s) {
  const bool greedy = is_greedy(params.temperature);
  const bool top_k = !greedy && params.top_k > 0 && params.top_k < row.size, top_p = !greedy && params.top_p < 1.0f;
  RowLaw law;
  if (top_k || top_p || !tiles || !block_tiled_read(row, tiles, law, s)) {
    tiles = nullptr;
    law = block_first_read(row, s);
  }
  law.flags |= temperature_flags(params.temperature);
  if (params.top_p != params.top_p || params.min_p != params.min_p) law.flags |= kFlagParameter;
  law.is_point = law.is_point || greedy;
  if (law.is_point) return law;
  law.set_temperature(params.temperature);
  law.threshold = min_p_threshold(law, params.min_p);
  if (tiles && !(law.threshold > -INFINITY)) {
    law.mass = block_tiled_mass(row, tiles, law, s);
    need_mass = false;
  }
  for (int filter = 0; filter < 2; filter++) {  // top-k leaves a mass behind, top-p needs one
    const bool by_mass = filter == 1;
    if (by_mass ? top_p : top_k)
      block_select(row, by_mass, by_mass ? top_p_budget(params.top_p, law.mass) : static_cast<uint64_t>(params.top_k),
                   law, s);
    if (!by_mass && (top_k || top_p || need_mass)) law.mass = block_mass(row, law, !top_k, s);
  }
  if (law.mass) law.log_mass = log(static_cast<double>(law.mass) / kMassScale);
  return law;
}

// The block's largest score and the lowest id that has it; -1 where no thread has one. Keys order float64 as integers.
struct Winner {
  uint64_t key;  // 0: none
  int32_t id;
};
__device__ __forceinline__ uint64_t score_key(double score) {
  uint64_t bits;
  memcpy(&bits, &score, 8);
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}
__device__ __forceinline__ Winner block_winner(uint64_t key, int32_t id, RowScratch& s) {
  const uint64_t best = block_reduce(key, Maximum{}, uint64_t{0}, s.sums);
  id = block_reduce(best && key == best ? id : 2147483647, Minimum{}, 2147483647, s.counts);
  return {best, best ? id : -1};
}

__device__ __forceinline__ double key_score(uint64_t key) {
  const uint64_t bits = key >> 63 ? key & ~(uint64_t{1} << 63) : ~key;
  double score;
  memcpy(&score, &bits, 8);
  return score;
}

// Which of four neighbours, at most in hope of a score above `to_beat`, are worth a logarithm: log2 of a word is at
// least its float bits / 2^23 - 127 (see aim in pick_cpu.h), and where next to nothing is to be beaten all of them are.
// `words` are drawn for those that the filters kept only.
__device__ __forceinline__ uint32_t kept_in_reach(const RowLaw& law, int32_t first, double to_beat, float (&x)[4]) {
  const float floor = static_cast<float>(to_beat - 46.5);
  uint32_t hope = 0;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    x[e] = clean_logit(x[e]);
    hope |= static_cast<uint32_t>(x[e] > -INFINITY && law.scaled(x[e]) >= floor && law.keeps(x[e], first + e)) << e;
  }
  return hope;
}
__device__ __forceinline__ bool can_beat(const RowLaw& law, float logit, uint32_t word, double to_beat) {
  const float limit = static_cast<float>(159.002 - to_beat * 1.4426950408889634);
  const float bits = static_cast<float>(float_bits(static_cast<float>(word >> 8))) * 1.1920929e-7f + 8.0f;
  return limit > 254.0f || bits <= fmaf(logit - law.max, law.rate, limit);
}

// Argmax of log weight + Gumbel noise over the kept ids in units [begin, end) and beside the row's own argmax. The
// weight may not exceed the row's own (logit - max) * tau. See pick_token in pick_cpu.h.
template <class LogWeight>
__device__ __forceinline__ Winner block_pick(const RowReader& reader, int32_t begin, int32_t end, const RowLaw& law,
                                             const NoiseKey& key, RowScratch& s, LogWeight&& log_weight) {
  if (law.is_point) return {1, log_weight(law.argmax, law.max) > kNegInf ? law.argmax : -1};
  Winner winner = {0, -1};
  const int32_t peak = law.argmax / reader.per_unit();
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {  // the argmax's neighbours first: they give every thread a good bar
    double best = winner.id >= 0 ? key_score(winner.key) : kNegInf;
    int32_t best_id = winner.id;
    for_quads<1>(reader, turn == 0 ? peak : begin, turn == 0 ? peak + 1 : end, [&](int32_t first, float (&x)[4]) {
      uint32_t hope = kept_in_reach(law, first, best, x);
      if (!hope) return;
      const Philox words = draw(key.seed, key.position, key.purpose, static_cast<uint32_t>(first) >> 2, key.salt);
      const double to_beat = best;
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (!can_beat(law, x[e], words.word[e], to_beat)) hope &= ~(1u << e);
#pragma unroll 1
      for (; hope; hope &= hope - 1) {  // rare
        const int32_t e = __ffs(static_cast<int>(hope)) - 1, id = first + e;
        const double weight = log_weight(id, one_of_four(x, e));
        if (!(weight > kNegInf)) continue;
        const double score = weight + gumbel(key, static_cast<uint32_t>(id), word_of(words, e));
        if (score > best || (score == best && id < best_id)) best = score, best_id = id;
      }
    });
    winner = block_winner(best_id >= 0 ? score_key(best) : 0, best_id, s);
  }
  return winner;
}

}  // namespace specdec
