// Which candidates of a dynamic tree are kept (EAGLE-2's re-ranking): the math every backend shares.
//
// A request's candidates are listed parent before child, root first, siblings in draw order, each with a cumulative log
// score. A candidate's rank is the least score on its path (equal to its own score if scores fall along a path, as sums
// of log probabilities do), so a parent never ranks behind its child and the best n are closed under ancestors whatever
// the scores are. Ties go to the shallower, then to the earlier: every key is distinct, so all backends agree.
//
// Sampled candidates. If siblings were drawn at random, whether one is kept must not depend on what it turned out to be
// (or verification, which trusts that the j-th try was drawn from the draft law given the earlier ones, is biased). Its
// rank is therefore the estimated chance that verification gets to try it at all:
//
//   score(parent) + log(1 - sum of q over its earlier siblings)     q(sibling) = exp(score(sibling) - score(parent))
//
// which looks at its ancestors and earlier siblings only, and falls along siblings, so that a prefix is kept.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/hostdevice.h"
#include "common/numerics.h"
#include "tree/tree.h"

namespace specdec {

constexpr int32_t kMaxCandidates = 1 << 20;            // of one request: 20 bits of the key
constexpr uint64_t kAbsent = ~uint64_t{0};             // sorts behind every candidate
constexpr double kLeastMass = 5.9604644775390625e-08;  // 2^-24: siblings that used up the whole law by rounding

// NaN and -inf mean: no such candidate.
SPECDEC_HD bool score_present(float score) {
  return score > -INFINITY;
}

SPECDEC_HD float present_or_none(float score) {
  return score > -INFINITY ? score : -INFINITY;
}

// Ascending keys: higher rank, then smaller depth, then smaller index.
SPECDEC_HD uint64_t candidate_key(float rank, int32_t depth, int32_t index) {
  const uint32_t place = (static_cast<uint32_t>(depth < 4095 ? depth : 4095) << 20) | static_cast<uint32_t>(index);
  return static_cast<uint64_t>(~order_key(rank)) << 32 | place;
}
SPECDEC_HD int32_t key_index(uint64_t key) {
  return static_cast<int32_t>(key & (kMaxCandidates - 1));
}

// Rank of a drawn candidate; `used` is the draft mass of its earlier siblings.
SPECDEC_HD float sampled_rank(float parent_score, double used) {
  const double left = 1.0 - used;
  return static_cast<float>(parent_score + log(left > kLeastMass ? left : kLeastMass));
}
SPECDEC_HD double sibling_mass(float score, float parent_score) {
  return exp(static_cast<double>(score) - static_cast<double>(parent_score));
}

// One request, serially. Scratch arrays of `count`: rank, depth, and (sampled only) used, ended. Writes keys (kAbsent
// for the root and for what is not there), returns how many candidates there are besides the root; sets *flags.
SPECDEC_HD int32_t rank_candidates(const float* scores, const int32_t* parents, int32_t count, bool sampled,
                                   uint64_t* keys, float* rank, int32_t* depth, double* used, int32_t* flags) {
  int32_t present = 0;
  *flags = count > 0 && parents[0] != -1 ? kFlagTree : 0;
  for (int32_t i = 0; i < count; i++) {
    keys[i] = kAbsent;
    depth[i] = 0;
    rank[i] = i == 0 ? INFINITY : -INFINITY;
    if (sampled) used[i] = 0.0;
    if (i == 0 || !score_present(scores[i])) {
      // A draw that was not made ends its siblings: later ones are no prefix of the draw order.
      if (i > 0 && sampled && parent_valid(i, parents[i])) used[parents[i]] = INFINITY;
      continue;
    }
    const int32_t parent = parents[i];
    if (!parent_valid(i, parent)) {
      *flags |= kFlagTree;
      continue;
    }
    if (!score_present(rank[parent])) continue;  // hangs on something that is not there
    float own = scores[i];
    if (sampled) {
      if (used[parent] == INFINITY) continue;
      own = sampled_rank(parent == 0 ? 0.0f : scores[parent], used[parent]);
      used[parent] += sibling_mass(scores[i], parent == 0 ? 0.0f : scores[parent]);
    }
    rank[i] = own < rank[parent] ? own : rank[parent];
    depth[i] = depth[parent] + 1;
    keys[i] = candidate_key(rank[i], depth[i], i);
    present++;
  }
  return present;
}

// Nodes a request keeps, root included: at most num_nodes, what exists, and what fits the output.
SPECDEC_HD int32_t kept_nodes(int32_t num_nodes, int32_t present, int64_t rows_left) {
  int64_t kept = num_nodes < present + 1 ? num_nodes : present + 1;
  if (kept > kMaxTreeNodes) kept = kMaxTreeNodes;
  if (kept > rows_left) kept = rows_left;
  return static_cast<int32_t>(kept > 0 ? kept : 0);
}

}  // namespace specdec
