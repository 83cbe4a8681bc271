// A draw from a residual without a random word per token: exponential clocks (the winner is the first to ring) that
// 32 tokens share.
//
//   tokens of a block of 1024       group g: one column, its bound b = the largest weight of the row in it
//     0   1   2  ...  31            its clock rings at rate 32 b: one word a group gives the first time, further
//    32  33  34  ...  63            words the next ones. At every ring one of its 32 places is chosen evenly; the
//    ..                             token there takes it with probability w / b, w its weight in the residual
//   992 993 994  ... 1023           (w <= b), else nobody
//
// So token v takes rings at rate 32 b * 1/32 * w / b = w (thinning of a Poisson process, Lewis and Shedler 1979), and
// the first taken ring anywhere is a draw in proportion to w. Any bound b >= w will do: it is rounded up to one of 256,
// so that vocabulary shards which cut a block exchange a byte a group. Groups whose first ring comes too late are never
// looked into. The maxima are a by-product of reading the row. Where the residual is thin, many rings are taken by
// nobody: the race ends at a fixed time, and what has not been decided by then is drawn token by token (pick_cpu.h) on
// noise of its own: clocks have no memory, so the law stays the same.
#pragma once
#include "noise.h"

namespace specdec {

constexpr int32_t kGroupBlock = 1024, kGroupLanes = 32, kGroupTokens = kGroupBlock / kGroupLanes;
constexpr uint32_t kPurposeRing = 0x40;  // or-ed to a purpose: place, coin and waiting time of one ring
constexpr uint32_t kMaxGroups = 1 << 14;
// In units of 32 / (the row's mass): a draw from the row itself is decided by then but for one in exp(32). At most so
// many rings are expected in all, exp(1/8) times as many as bounds are rounded.
constexpr double kRaceEnd = 1024.0;
constexpr float kBoundSteps = 8.0f;  // a unit of log weight
constexpr float kLastBound = 255.0f;

SPECDEC_HD int32_t num_groups(int32_t size) {
  return (size + kGroupBlock - 1) / kGroupBlock * kGroupLanes;
}
SPECDEC_HD int32_t group_of(int32_t id) {
  return id / kGroupBlock * kGroupLanes + id % kGroupLanes;
}
SPECDEC_HD int32_t member_of(int32_t group, int32_t place) {
  return group / kGroupLanes * kGroupBlock + place * kGroupLanes + group % kGroupLanes;
}

// Log of a group's bound from that of its largest weight (`scaled` <= 0, see RowLaw): the next multiple of 1/8 above
// it; -255/8 below that.
SPECDEC_HD float group_bound(float scaled) {
  const float steps = scaled * -kBoundSteps;
  return static_cast<float>(static_cast<int32_t>(steps < kLastBound ? steps : kLastBound)) * -(1.0f / kBoundSteps);
}

struct Ring {
  int32_t id;    // of the token at the chosen place; may lie behind the row's end
  double log_u;  // takes the ring iff log_u < log(weight / bound)
  double wait;   // until the next ring, in units of 1 / bound
};
SPECDEC_HD Ring ring_of(const NoiseKey& key, int32_t group, uint32_t count) {
  Philox words = draw(key.seed, key.position, key.purpose | kPurposeRing,
                      static_cast<uint32_t>(group) + count * kMaxGroups, key.salt);
  return {member_of(group, static_cast<int32_t>(words.word[0] >> 27)),
          coin_from_words(words.word[1], words.word[2]).log_u, -log1p(-(words.word[3] + 0.5) * kWord)};
}

// The group's rings until one is taken or comes too late to beat `score` (= -log of the best time so far). takes(ring)
// decides; true if the ring was taken: `score` and `id` are then its own.
template <class Takes>
SPECDEC_HD bool race_group(const NoiseKey& key, int32_t group, uint32_t word, double log_bound, double& score,
                           int32_t& id, Takes&& takes) {
  double rung = exponential(key, static_cast<uint32_t>(group), word), end = exp(log_bound - score);
  for (uint32_t count = 0; rung < end; count++) {
    Ring ring = ring_of(key, group, count);
    if (takes(ring)) {
      score = log_bound - log(rung);
      id = ring.id;
      return true;
    }
    rung += ring.wait;
  }
  return false;
}

}  // namespace specdec
