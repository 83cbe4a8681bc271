// verify_probs: verification for engines that hold probabilities and bring their own coins (FlashInfer, SGLang).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "probs_args.h"

namespace specdec {
namespace {

// Inverse CDF: the first id whose cumulative weight exceeds u * total (strictly); the last id with weight on rounding;
// -1 where nothing has weight.
template <class Weight>
int32_t inverse_cdf(int32_t vocab, double u, Weight&& weight) {
  double total = 0.0, cumulative = 0.0;
  for (int32_t id = 0; id < vocab; id++) total += weight(id);
  int32_t last = -1;
  for (int32_t id = 0; id < vocab; id++) {
    double w = weight(id);
    if (!(w > 0.0)) continue;
    cumulative += w;
    last = id;
    if (cumulative > u * total) return id;
  }
  return last;
}

void verify_one(const ProbsParams& p, int64_t b) {
  const bool rejection = p.rejection;
  int64_t width = p.max_depth + 1, begin = p.cu_nodes[b], count = p.cu_nodes[b + 1] - begin;
  int32_t *tokens = p.tokens + b * width, *accepted = p.accepted + b * width, flags = 0, depth = 0;
  std::fill_n(tokens, width, -1);
  std::fill_n(accepted, width, -1);
  p.num_emitted[b] = 0;
  p.flags[b] = 0;
  if (begin < 0 || count < 0 || begin + count > p.num_nodes) {
    p.flags[b] = kFlagIndex;
    return;
  }
  if (count == 0) return;
  int64_t node = 0;
  accepted[0] = 0;
  std::vector<int32_t> tried;
  for (;;) {
    int64_t next = -1, row = begin + node, drafted = -1;
    int32_t kid = p.first_child[row];
    double cumulative = 0.0;
    tried.clear();
    for (int32_t previous = static_cast<int32_t>(node); kid != -1 && depth < p.max_depth && next < 0;) {
      if (kid <= previous || kid >= count) {
        flags |= kFlagTree;
        break;
      }
      int32_t id = p.ids[begin + kid];
      if (id != -1) {
        if (id < -1 || id >= p.vocab) flags |= kFlagTokenRange;
        bool twice = std::find(tried.begin(), tried.end(), id) != tried.end();
        if (twice || (rejection && drafted >= 0)) flags |= kFlagSiblings;
        if (rejection && drafted < 0) {
          double target = p.target_mass(row, id), draft = p.draft ? p.draft_mass(begin + kid, id) : 1.0;
          if (!(draft > 0.0) && id >= 0 && id < p.vocab) flags |= kFlagDraftMass;
          drafted = kid;
          tried.push_back(id);
          if (draft > 0.0 && target > 0.0 && p.uniforms[begin + kid] * draft < target) next = kid;
        } else if (!rejection && !twice) {
          cumulative += p.target_mass(row, id);
          tried.push_back(id);
          if (p.target_mass(row, id) > 0.0f && p.uniforms[begin + p.first_child[row]] < cumulative) next = kid;
        }
      }
      if (next >= 0) break;
      previous = kid;
      kid = p.next_sibling[begin + kid];
    }
    if (next < 0) {
      double u = p.final_uniforms[b];
      int32_t id = inverse_cdf(p.vocab, u, [&](int32_t v) -> double {
        float target = p.target_mass(row, v);
        if (rejection && drafted >= 0 && p.draft) return std::max(0.0f, target - p.draft_mass(begin + drafted, v));
        return std::find(tried.begin(), tried.end(), v) == tried.end() ? target : 0.0f;
      });
      if (id < 0) {
        flags |= kFlagZeroResidual;
        id = inverse_cdf(p.vocab, u, [&](int32_t v) -> double { return p.target_mass(row, v); });
      }
      if (id < 0) flags |= kFlagDeadRow;
      tokens[depth] = id < 0 ? 0 : id;
      break;
    }
    tokens[depth] = p.ids[begin + next];
    accepted[++depth] = static_cast<int32_t>(next);
    node = next;
  }
  p.num_emitted[b] = depth + 1;
  p.flags[b] = flags;
}

void verify_probs_cpu(const Tensor& target_probs, const std::optional<Tensor>& draft_probs,
                      const Tensor& draft_token_ids, const Tensor& cu_nodes, const Tensor& first_child,
                      const Tensor& next_sibling, const Tensor& uniforms, const Tensor& final_uniforms,
                      std::string method, int64_t max_depth, const Tensor& output_token_ids, const Tensor& num_emitted,
                      const Tensor& accepted_nodes, const Tensor& flags) {
  const ProbsParams params =
      check_verify_probs(target_probs, draft_probs, draft_token_ids, cu_nodes, first_child, next_sibling, uniforms,
                         final_uniforms, method, max_depth, output_token_ids, num_emitted, accepted_nodes, flags);
  torch::stable::parallel_for(0, params.num_requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) verify_one(params, b);
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("verify_probs", TORCH_BOX(&specdec::verify_probs_cpu));
}
