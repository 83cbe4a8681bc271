// verify_probs: arguments, checked once for every native backend.
#pragma once
#include "../common/check.h"
#include "../common/flags.h"
#include "../common/hostdevice.h"

namespace specdec {

struct ProbsParams {
  const float *target, *draft;  // [N, V]; draft row n is the law node n was drawn from, null: all deterministic
  int64_t stride_target, stride_draft;
  int64_t num_requests;
  int32_t vocab, num_nodes, max_depth;
  bool rejection;  // chain rule, one child a node; else one coin against the cumulative mass of the siblings
  const int32_t *ids, *cu_nodes, *first_child, *next_sibling;
  const float *uniforms, *final_uniforms;
  int32_t *tokens, *num_emitted, *accepted, *flags;

  SPECDEC_HD float target_mass(int64_t node, int32_t id) const { return mass(target + node * stride_target, id); }
  SPECDEC_HD float draft_mass(int64_t node, int32_t id) const { return mass(draft + node * stride_draft, id); }
  SPECDEC_HD float mass(const float* row, int32_t id) const {
    const float x = id >= 0 && id < vocab ? row[id] : 0.0f;
    return x > 0.0f ? x : 0.0f;  // NaN and negative values have no mass
  }
};

inline ProbsParams check_verify_probs(const Tensor& target_probs, const std::optional<Tensor>& draft_probs,
                                      const Tensor& draft_token_ids, const Tensor& cu_nodes, const Tensor& first_child,
                                      const Tensor& next_sibling, const Tensor& uniforms, const Tensor& final_uniforms,
                                      const std::string& method, int64_t max_depth, const Tensor& output_token_ids,
                                      const Tensor& num_emitted, const Tensor& accepted_nodes, const Tensor& flags) {
  constexpr char op[] = "verify_probs";
  if (method != "rejection" && method != "target_only")
    fail(op, "method", "rejection or target_only, got '", method, "'");
  if (target_probs.dim() != 2) fail(op, "target_probs", "2 dimensions, got shape ", shape_text(target_probs));
  check_index(op, "cu_nodes", cu_nodes, {kAny});
  if (cu_nodes.size(0) < 1) fail(op, "cu_nodes", "shape [B + 1], got [0]");
  const int64_t N = target_probs.size(0), V = target_probs.size(1), B = cu_nodes.size(0) - 1, width = max_depth + 1;
  check_range(op, "max_depth", max_depth, 0, 1 << 20);
  check_tensor(op, "target_probs", target_probs, ScalarType::Float, {N, V});
  check_dense_rows(op, "target_probs", target_probs);
  if (draft_probs) {
    check_tensor(op, "draft_probs", *draft_probs, ScalarType::Float, {N, V});
    check_dense_rows(op, "draft_probs", *draft_probs);
  }
  check_index(op, "draft_token_ids", draft_token_ids, {N});
  check_index(op, "first_child", first_child, {N});
  check_index(op, "next_sibling", next_sibling, {N});
  check_index(op, "uniforms", uniforms, {N}, ScalarType::Float);
  check_index(op, "final_uniforms", final_uniforms, {B}, ScalarType::Float);
  check_index(op, "output_token_ids", output_token_ids, {B, width});
  check_index(op, "num_emitted", num_emitted, {B});
  check_index(op, "accepted_nodes", accepted_nodes, {B, width});
  check_index(op, "flags", flags, {B});
  ProbsParams params{};
  params.target = data<float>(target_probs);
  params.stride_target = target_probs.stride(0);
  if (draft_probs) {
    params.draft = data<float>(*draft_probs);
    params.stride_draft = draft_probs->stride(0);
  }
  params.num_requests = B;
  params.vocab = static_cast<int32_t>(V);
  params.num_nodes = static_cast<int32_t>(N);
  params.max_depth = static_cast<int32_t>(max_depth);
  params.rejection = method == "rejection";
  params.ids = data<int32_t>(draft_token_ids);
  params.cu_nodes = data<int32_t>(cu_nodes);
  params.first_child = data<int32_t>(first_child);
  params.next_sibling = data<int32_t>(next_sibling);
  params.uniforms = data<float>(uniforms);
  params.final_uniforms = data<float>(final_uniforms);
  params.tokens = mutable_data<int32_t>(output_token_ids);
  params.num_emitted = mutable_data<int32_t>(num_emitted);
  params.accepted = mutable_data<int32_t>(accepted_nodes);
  params.flags = mutable_data<int32_t>(flags);
  return params;
}

}  // namespace specdec
