// expand_tree, rerank_tree on the CPU: growing a dynamic tree level by level, then keeping its best nodes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "tree/args.h"

namespace specdec {
namespace {

int64_t grain(int64_t items) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, items));
}

constexpr int32_t kInsertion = 32;  // beams up to this wide are kept sorted by insertion

// The best `k` of a row of scores by insertion, best first: most scores fall to the first comparison. A later score
// passes only if it is greater, so ties stay with the earlier.
void best_by_insertion(const float* row, int32_t count, int32_t k, float* best, int32_t* chosen) {
  for (int32_t i = 0; i < k; i++) best[i] = -INFINITY, chosen[i] = -1;
  for (int32_t i = 0; i < count; i++) {
    const float score = row[i];
    if (!(score > best[k - 1])) continue;
    int32_t at = k - 1;
    for (; at > 0 && score > best[at - 1]; at--) best[at] = best[at - 1], chosen[at] = chosen[at - 1];
    best[at] = score;
    chosen[at] = i;
  }
}

void best_by_sorting(const float* row, int32_t count, int32_t k, float* best, int32_t* chosen) {
  static thread_local std::vector<uint64_t> keys;
  keys.clear();
  for (int32_t i = 0; i < count; i++)
    if (score_present(row[i])) keys.push_back(candidate_key(row[i], 0, i));
  const size_t kept = std::min<size_t>(k, keys.size());
  std::partial_sort(keys.begin(), keys.begin() + kept, keys.end());
  for (int32_t i = 0; i < k; i++) {
    chosen[i] = i < static_cast<int32_t>(kept) ? key_index(keys[i]) : -1;
    best[i] = chosen[i] >= 0 ? row[chosen[i]] : -INFINITY;
  }
}

void expand_tree_cpu(Tensor scores, Tensor child_log_probs, int64_t k, Tensor child_scores, Tensor beam,
                     Tensor beam_scores) {
  const ExpandTreeArgs p = check_expand_tree(scores, child_log_probs, k, child_scores, beam, beam_scores);
  const int32_t children = p.children();
  const auto select = p.k <= kInsertion ? best_by_insertion : best_by_sorting;
  torch::stable::parallel_for(0, p.num_requests, grain(children), [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      float* row = p.child_scores + b * children;
      for (int32_t parent = 0; parent < p.num_parents; parent++) {
        const float above = p.scores[b * p.stride_b + parent];
        const float* step = p.log_probs + b * p.step_stride_b + parent * p.step_stride_p;
        float* sums = row + int64_t{parent} * p.num_ranks;
        for (int32_t rank = 0; rank < p.num_ranks; rank++) sums[rank] = present_or_none(above + step[rank]);
      }
      if (p.k > 0) select(row, children, p.k, p.beam_scores + b * p.k, p.beam + b * p.k);
    }
  });
}

struct Scratch {  // grown once, one slice a request
  std::vector<NodeRange> ranges;
  std::vector<uint64_t> keys;
  std::vector<float> rank;
  std::vector<int32_t> depth, present;
  std::vector<double> used;
};

// Rows of every request. One that begins before an earlier offset would share rows, and so scratch, with another:
// unsound.
void disjoint_ranges(const int32_t* cu, int64_t requests, int64_t total, std::vector<NodeRange>& ranges) {
  ranges.resize(requests);
  int32_t highest = 0;
  for (int64_t b = 0; b < requests; b++) {
    ranges[b] = node_range(cu, b, total);
    if (cu[b] < highest) ranges[b] = {0, 0, kFlagIndex};
    if (cu[b] <= total) highest = std::max(highest, cu[b]);
  }
}

// Keys of the kept candidates -> their indices in order, and their parents' new numbers (`number` is scratch).
void write_kept(uint64_t* keys, int32_t count, int32_t kept, const int32_t* parents, int32_t* number, int32_t* selected,
                int32_t* parents_out) {
  if (kept <= 0) return;
  if (kept - 1 < count) std::nth_element(keys, keys + kept - 1, keys + count);
  selected[0] = 0;
  for (int32_t i = 1; i < kept; i++) selected[i] = key_index(keys[i - 1]);
  std::sort(selected + 1, selected + kept);
  for (int32_t i = 0; i < kept; i++) {
    number[selected[i]] = i;
    parents_out[i] = i == 0 ? -1 : number[parents[selected[i]]];
  }
}

void rerank_tree_cpu(Tensor scores, Tensor parents, Tensor cu_candidates, Tensor num_nodes, bool sampled,
                     std::optional<Tensor>, Tensor selected, Tensor parents_out, Tensor cu_nodes, Tensor flags) {
  const RerankTreeArgs p =
      check_rerank_tree(scores, parents, cu_candidates, num_nodes, sampled, selected, parents_out, cu_nodes, flags);
  const int64_t requests = p.num_requests, candidates = p.total_candidates, nodes = p.total_nodes;
  const float* score = p.scores;
  const int32_t *parent = p.parents, *cu_in = p.cu_candidates, *wanted = p.num_nodes;
  int32_t *chosen = p.selected, *above = p.parents_out, *cu = p.cu_nodes, *flag = p.flags;
  static thread_local Scratch own;
  Scratch& scratch = own;  // the workers must see this thread's arrays
  disjoint_ranges(cu_in, requests, candidates, scratch.ranges);
  const std::vector<NodeRange>& ranges = scratch.ranges;
  scratch.keys.resize(candidates);
  scratch.rank.resize(candidates);
  scratch.depth.resize(candidates);
  scratch.used.resize(sampled ? candidates : 0);
  scratch.present.resize(requests);

  const int64_t step = grain(requests ? candidates / requests : 0);
  torch::stable::parallel_for(0, requests, step, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const NodeRange range = ranges[b];
      const int32_t at = range.begin, count = std::min(range.count, kMaxCandidates);
      scratch.present[b] =
          rank_candidates(score + at, parent + at, count, sampled, scratch.keys.data() + at, scratch.rank.data() + at,
                          scratch.depth.data() + at, sampled ? scratch.used.data() + at : nullptr, flag + b);
      flag[b] |= range.flags | (range.count > kMaxCandidates ? kFlagIndex : 0);
    }
  });
  int64_t row = 0;
  for (int64_t b = 0; b < requests; b++) {
    cu[b] = static_cast<int32_t>(row);
    const bool root = ranges[b].count > 0 || (flag[b] & kFlagIndex);
    const int32_t fitting = root ? kept_nodes(wanted[b], scratch.present[b], INT32_MAX) : 0;
    const int32_t kept = root ? kept_nodes(wanted[b], scratch.present[b], nodes - row) : 0;
    if (kept < fitting) flag[b] |= kFlagIndex;
    row += kept;
  }
  cu[requests] = static_cast<int32_t>(row);
  torch::stable::parallel_for(0, requests, step, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const NodeRange range = ranges[b];
      const int32_t at = range.begin, kept = cu[b + 1] - cu[b];
      if (range.count == 0) {  // unsound offsets: the root alone
        if (kept > 0) chosen[cu[b]] = 0, above[cu[b]] = -1;
        continue;
      }
      write_kept(scratch.keys.data() + at, std::min(range.count, kMaxCandidates), kept, parent + at,
                 scratch.depth.data() + at, chosen + cu[b], above + cu[b]);
    }
  });
  std::fill(chosen + row, chosen + nodes, -1);
  std::fill(above + row, above + nodes, -1);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("expand_tree", TORCH_BOX(&specdec::expand_tree_cpu));
  m.impl("rerank_tree", TORCH_BOX(&specdec::rerank_tree_cpu));
}
