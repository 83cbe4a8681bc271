// verify: arguments, checked once for every native backend.
#pragma once
#include "sampling_args.h"

namespace specdec {

enum class Method : int32_t { greedy, rejection, target_only, block, coupled, typical };
enum class Form : int32_t { automatic, eager, lazy };

struct VerifyParams {
  Method method;
  RowSource target, draft;  // draft.data is null where every draft is deterministic
  SamplingArgs sampling, draft_sampling;
  const int32_t *draft_token_ids, *cu_nodes, *parents, *first_child, *next_sibling, *tree_flags;
  const int32_t* draft_rows;  // null: node n of request b has row n - b - 1
  const float *draft_log_probs, *draft_lse;
  const float* tile_stats;  // [N, num_tiles, 2], or null
  int64_t num_tiles;
  const int32_t* column_of;  // target id -> draft column or -1; null: the same id
  const float* uniforms;     // [N], or null
  const double* uniforms64;  // the same in float64
  Logprobs logprobs;
  double epsilon, delta;
  int32_t num_nodes, max_depth, max_nodes = INT32_MAX;
  int32_t *output_token_ids, *num_emitted, *accepted_nodes, *flags;
  float* logprobs_out;

  // Whether a request's offsets lie within the batch and the bound on its nodes.
  SPECDEC_HD bool is_sound(int64_t begin, int64_t end) const {
    return begin >= 0 && end <= num_nodes && begin <= end && end - begin <= max_nodes;
  }
  SPECDEC_HD bool is_raw() const { return logprobs == Logprobs::raw || logprobs == Logprobs::both; }
  SPECDEC_HD bool is_processed() const { return logprobs == Logprobs::processed || logprobs == Logprobs::both; }
  SPECDEC_HD bool has_draft_laws() const {
    return draft.data && (method == Method::rejection || method == Method::block);
  }
  // Row of draft logits behind a node (of the whole batch): -1 deterministic, -2 out of range.
  SPECDEC_HD int32_t draft_row_of(int64_t b, int64_t node) const {
    if (!draft.data) return -1;
    const int64_t row = draft_rows ? draft_rows[node] : node - b - 1;
    if (row == -1) return -1;
    return row >= 0 && row < draft.num_rows ? static_cast<int32_t>(row) : -2;
  }
  // Whether the stored log-sum-exp stands for a draft row's law: no filters, and it is a number. A row that is needed
  // whole, for its residual's mass, is read anyway.
  SPECDEC_HD bool has_stored_law(int64_t b, int32_t row, bool whole) const {
    if (!draft_lse || whole) return false;
    const FilterParams f = draft_sampling.filters(b);
    return !is_greedy(f.temperature) && !(f.top_k > 0) && !(f.top_p < 1.0f) && !(f.min_p > 0.0f) &&
           draft_lse[row] == draft_lse[row];
  }
  SPECDEC_HD RowLaw stored_law(int64_t b, int32_t row) const {
    RowLaw law;
    law.set_temperature(draft_sampling.temperature[b]);
    law.log_mass = draft_lse[row];
    return law;
  }
};

inline Method parse_method(const char* op, const std::string& text) {
  const std::pair<const char*, Method> names[] = {
      {"greedy", Method::greedy}, {"rejection", Method::rejection}, {"target_only", Method::target_only},
      {"block", Method::block},   {"coupled", Method::coupled},     {"typical", Method::typical}};
  for (const auto& [name, method] : names)
    if (text == name) return method;
  fail(op, "method", "greedy, rejection, target_only, block, coupled or typical, got '", text, "'");
}

inline Form parse_form(const char* op, const std::string& text) {
  if (text == "auto") return Form::automatic;
  if (text == "eager") return Form::eager;
  if (text == "lazy") return Form::lazy;
  fail(op, "form", "auto, eager or lazy, got '", text, "'");
}

// Everything but the draft vocabulary's map (`column_of`), which is every backend's own.
inline VerifyParams check_verify(
    const Tensor& target_logits, const Tensor& draft_token_ids, const Tensor& cu_nodes, const Tensor& parents,
    const Tensor& first_child, const Tensor& next_sibling, const std::optional<Tensor>& tree_flags,
    const Tensor& temperature, const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
    const std::optional<Tensor>& min_p, const Tensor& seed, const Tensor& position, const std::optional<Tensor>& step,
    const std::optional<Tensor>& draft_logits, const std::optional<Tensor>& draft_rows,
    const std::optional<Tensor>& draft_temperature, const std::optional<Tensor>& draft_top_k,
    const std::optional<Tensor>& draft_top_p, const std::optional<Tensor>& draft_min_p,
    const std::optional<Tensor>& draft_log_probs, const std::optional<Tensor>& draft_lse,
    const std::optional<Tensor>& d2t, const std::optional<Tensor>& t2d, const std::optional<Tensor>& allowed,
    const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
    const std::optional<Tensor>& bias_values, const std::optional<Tensor>& uniforms,
    const std::optional<Tensor>& request_order, const std::optional<Tensor>& tile_stats, const std::string& method,
    int64_t vocab_size, int64_t max_depth, const std::string& return_logprobs, double epsilon, double delta,
    const Tensor& output_token_ids, const Tensor& num_emitted, const Tensor& accepted_nodes, const Tensor& flags,
    const std::optional<Tensor>& logprobs) {
  constexpr char op[] = "verify";
  VerifyParams params{};
  params.method = parse_method(op, method);
  params.target = make_rows(op, "target_logits", target_logits, vocab_size, allowed, bias_cu, bias_ids, bias_values);
  params.sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  const int64_t B = params.sampling.count, N = target_logits.size(0), width = max_depth + 1;
  check_range(op, "max_depth", max_depth, 0, 1 << 20);
  check_index(op, "draft_token_ids", draft_token_ids, {N});
  check_index(op, "cu_nodes", cu_nodes, {B + 1});
  check_index(op, "parents", parents, {N});
  check_index(op, "first_child", first_child, {N});
  check_index(op, "next_sibling", next_sibling, {N});
  check_index(op, "tree_flags", tree_flags, {B});
  check_index(op, "draft_rows", draft_rows, {N});
  check_index(op, "draft_log_probs", draft_log_probs, {N}, ScalarType::Float);
  check_index(op, "request_order", request_order, {kAny});
  check_index(op, "output_token_ids", output_token_ids, {B, width});
  check_index(op, "num_emitted", num_emitted, {B});
  check_index(op, "accepted_nodes", accepted_nodes, {B, width});
  check_index(op, "flags", flags, {B});
  if (tile_stats) {
    if (allowed || bias_cu) fail(op, "tile_stats", "none beside allowed or bias (they change the logits)");
    params.num_tiles = (params.target.valid + kTileLogits - 1) / kTileLogits;
    check_index(op, "tile_stats", *tile_stats, {N, params.num_tiles, 2}, ScalarType::Float);
    params.tile_stats = data<float>(*tile_stats);
  }
  params.logprobs = parse_logprobs(op, return_logprobs, logprobs);
  if (params.logprobs == Logprobs::both)
    check_index(op, "logprobs", *logprobs, {B, width, 2}, ScalarType::Float);
  else if (params.logprobs != Logprobs::none)
    check_index(op, "logprobs", *logprobs, {B, width}, ScalarType::Float);
  if (uniforms && uniforms->scalar_type() == ScalarType::Double) {
    check_index(op, "uniforms", uniforms, {N}, ScalarType::Double);
    params.uniforms64 = data<double>(*uniforms);
  } else if (uniforms) {
    check_index(op, "uniforms", uniforms, {N}, ScalarType::Float);
    params.uniforms = data<float>(*uniforms);
  }
  params.draft_sampling = params.sampling;
  const bool drawn = params.method == Method::rejection || params.method == Method::block;
  if (draft_logits) {
    params.draft = make_rows(op, "draft_logits", *draft_logits, kMaxVocab, {}, {}, {}, {});
    check_index(op, "draft_lse", draft_lse, {params.draft.num_rows}, ScalarType::Float);
    if (draft_temperature) {
      params.draft_sampling = SamplingArgs{};
      check_filters(op, params.draft_sampling, *draft_temperature, draft_top_k, draft_top_p, draft_min_p);
      if (params.draft_sampling.count != B)
        fail(op, "draft_sampling", B, " requests, got ", params.draft_sampling.count);
    }
    if (drawn && d2t) {
      check_index(op, "d2t", *d2t, {kAny});
      if (params.draft.valid > d2t->size(0)) params.draft.valid = static_cast<int32_t>(d2t->size(0));
      if (t2d) check_index(op, "t2d", *t2d, {kAny});
      if (t2d && t2d->size(0) < params.target.valid)
        fail(op, "t2d", "at least ", params.target.valid, " entries (the valid vocabulary), got ", t2d->size(0));
    } else if (drawn) {
      if (t2d) fail(op, "t2d", "d2t beside it, got t2d alone");
      if (params.draft.valid > params.target.valid) params.draft.valid = params.target.valid;
    }
    params.draft_log_probs = data_or_null<float>(draft_log_probs);
    params.draft_lse = data_or_null<float>(draft_lse);
  } else if (draft_rows && drawn) {
    fail(op, "draft_logits", "the rows that draft_rows points into, got none");
  }
  params.draft_token_ids = data<int32_t>(draft_token_ids);
  params.cu_nodes = data<int32_t>(cu_nodes);
  params.parents = data<int32_t>(parents);
  params.first_child = data<int32_t>(first_child);
  params.next_sibling = data<int32_t>(next_sibling);
  params.tree_flags = data_or_null<int32_t>(tree_flags);
  params.draft_rows = data_or_null<int32_t>(draft_rows);
  params.epsilon = epsilon;
  params.delta = delta;
  params.num_nodes = static_cast<int32_t>(N);
  params.max_depth = static_cast<int32_t>(max_depth);
  params.output_token_ids = mutable_data<int32_t>(output_token_ids);
  params.num_emitted = mutable_data<int32_t>(num_emitted);
  params.accepted_nodes = mutable_data<int32_t>(accepted_nodes);
  params.flags = mutable_data<int32_t>(flags);
  if (params.logprobs != Logprobs::none) params.logprobs_out = mutable_data<float>(*logprobs);
  return params;
}

}  // namespace specdec
