// expand_tree, rerank_tree on the CPU: growing a dynamic tree level by level, then keeping its best nodes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "tree/rerank.h"

namespace specdec {
namespace {

int64_t grain(int64_t items) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, items));
}

void expand_tree_cpu(Tensor scores, Tensor child_log_probs, int64_t k, Tensor child_scores, Tensor beam,
                     Tensor beam_scores) {
  const char* op = "expand_tree";
  check_tensor(op, "scores", scores, ScalarType::Float, {kAny, kAny});
  const int64_t requests = scores.size(0), parents = scores.size(1);
  check_tensor(op, "child_log_probs", child_log_probs, ScalarType::Float, {requests, parents, kAny});
  const int64_t ranks = child_log_probs.size(2), children = parents * ranks;
  check_dense_rows(op, "scores", scores);
  check_dense_rows(op, "child_log_probs", child_log_probs);
  check_range(op, "k", k, 0, kMaxTreeNodes);
  check_range(op, "children of a request", children, 0, kMaxCandidates - 1);
  check_index(op, "child_scores", child_scores, {requests, children}, ScalarType::Float);
  check_index(op, "beam", beam, {requests, k});
  check_index(op, "beam_scores", beam_scores, {requests, k}, ScalarType::Float);

  const float *above = data<float>(scores), *step = data<float>(child_log_probs);
  float *sums = mutable_data<float>(child_scores), *best = mutable_data<float>(beam_scores);
  int32_t* chosen = mutable_data<int32_t>(beam);
  const int64_t above_stride = scores.stride(0), step_b = child_log_probs.stride(0), step_p = child_log_probs.stride(1);
  torch::stable::parallel_for(0, requests, grain(children), [&](int64_t from, int64_t to) {
    static thread_local std::vector<uint64_t> keys;
    keys.resize(children);
    for (int64_t b = from; b < to; b++) {
      float* row = sums + b * children;
      int64_t present = 0;
      for (int64_t p = 0; p < parents; p++)
        for (int64_t r = 0; r < ranks; r++) {
          const int32_t index = static_cast<int32_t>(p * ranks + r);
          const float sum = above[b * above_stride + p] + step[b * step_b + p * step_p + r];
          row[index] = score_present(sum) ? sum : -INFINITY;
          if (score_present(sum)) keys[present++] = candidate_key(sum, 0, index);
        }
      const int64_t kept = std::min(k, present);
      std::partial_sort(keys.begin(), keys.begin() + kept, keys.begin() + present);
      for (int64_t i = 0; i < k; i++) {
        const int32_t index = i < kept ? key_index(keys[i]) : -1;
        chosen[b * k + i] = index;
        best[b * k + i] = index >= 0 ? row[index] : -INFINITY;
      }
    }
  });
}

struct Scratch {  // grown once, one slice a request
  std::vector<uint64_t> keys;
  std::vector<float> rank;
  std::vector<int32_t> depth, present;
  std::vector<double> used;
};

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
                     Tensor selected, Tensor parents_out, Tensor cu_nodes, Tensor flags) {
  const char* op = "rerank_tree";
  const int64_t requests = num_nodes.numel(), candidates = scores.numel(), nodes = selected.numel();
  check_index(op, "scores", scores, {kAny}, ScalarType::Float);
  check_index(op, "parents", parents, {candidates});
  check_index(op, "num_nodes", num_nodes, {kAny});
  check_index(op, "cu_candidates", cu_candidates, {requests + 1});
  check_index(op, "selected", selected, {kAny});
  check_index(op, "parents_out", parents_out, {nodes});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "flags", flags, {requests});

  const float* score = data<float>(scores);
  const int32_t *parent = data<int32_t>(parents), *cu_in = data<int32_t>(cu_candidates),
                *wanted = data<int32_t>(num_nodes);
  int32_t *chosen = mutable_data<int32_t>(selected), *above = mutable_data<int32_t>(parents_out),
          *cu = mutable_data<int32_t>(cu_nodes), *flag = mutable_data<int32_t>(flags);
  static thread_local Scratch own;
  Scratch& scratch = own;  // the workers must see this thread's arrays
  scratch.keys.resize(candidates);
  scratch.rank.resize(candidates);
  scratch.depth.resize(candidates);
  scratch.used.resize(sampled ? candidates : 0);
  scratch.present.resize(requests);

  const int64_t step = grain(requests ? candidates / requests : 0);
  torch::stable::parallel_for(0, requests, step, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const NodeRange range = node_range(cu_in, b, candidates);
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
    const bool root = node_range(cu_in, b, candidates).count > 0 || (flag[b] & kFlagIndex);
    const int32_t fitting = root ? kept_nodes(wanted[b], scratch.present[b], INT32_MAX) : 0;
    const int32_t kept = root ? kept_nodes(wanted[b], scratch.present[b], nodes - row) : 0;
    if (kept < fitting) flag[b] |= kFlagIndex;
    row += kept;
  }
  cu[requests] = static_cast<int32_t>(row);
  torch::stable::parallel_for(0, requests, step, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const NodeRange range = node_range(cu_in, b, candidates);
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
