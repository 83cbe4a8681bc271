// verify: lossless (and one lossy) verification of draft chains and trees from raw logits.
//
//   eager   the laws of all rows, in parallel over rows, then the walks: for few requests
//   lazy    every walk computes the laws of the rows it visits (accepted + 1), in parallel over requests
//
// Both take the same decisions from the same bits. Numerics: docs/numerics.md.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "verify_cpu.h"

namespace specdec {
namespace {

constexpr char kOp[] = "verify";

Method parse_method(const std::string& text) {
  const std::pair<const char*, Method> names[] = {
      {"greedy", Method::greedy}, {"rejection", Method::rejection}, {"target_only", Method::target_only},
      {"block", Method::block},   {"coupled", Method::coupled},     {"typical", Method::typical}};
  for (const auto& [name, method] : names)
    if (text == name) return method;
  fail(kOp, "method", "greedy, rejection, target_only, block, coupled or typical, got '", text, "'");
}

bool reads_drafts(const VerifyParams& params) {
  return params.draft.data && (params.method == Method::rejection || params.method == Method::block);
}

// Draft columns by target id, and which columns map into the vocabulary at all.
struct DraftMap {
  std::vector<int32_t> column_of;
  std::vector<uint32_t> valid_columns;
};

void map_drafts(VerifyParams& params, DraftMap& map, const std::optional<Tensor>& d2t,
                const std::optional<Tensor>& t2d) {
  if (!d2t) {
    if (t2d) fail(kOp, "t2d", "d2t beside it, got t2d alone");
    if (params.draft.valid > params.target.valid) params.draft.valid = params.target.valid;
    return;
  }
  check_index(kOp, "d2t", *d2t, {kAny});
  const int32_t* offsets = data<int32_t>(*d2t);
  if (params.draft.valid > d2t->size(0)) params.draft.valid = static_cast<int32_t>(d2t->size(0));
  map.valid_columns.assign((params.draft.columns + 31) / 32, 0);
  map.column_of.assign(params.target.valid, -1);
  for (int32_t c = 0; c < params.draft.valid; c++) {
    int64_t id = static_cast<int64_t>(c) + offsets[c];
    if (id < 0 || id >= params.target.valid || map.column_of[id] != -1) continue;  // a second column of an id is unused
    map.valid_columns[c >> 5] |= 1u << (c & 31);
    map.column_of[id] = c;
  }
  params.column_of = map.column_of.data();
  if (t2d) {
    check_index(kOp, "t2d", *t2d, {kAny});
    if (t2d->size(0) < params.target.valid)
      fail(kOp, "t2d", "at least ", params.target.valid, " entries (the valid vocabulary), got ", t2d->size(0));
    params.column_of = data<int32_t>(*t2d);
  }
  params.draft.allowed = map.valid_columns.data();  // the same bits for every row
  params.draft.allowed_stride = 0;
}

struct RowTask {
  int32_t request, row;
  bool is_draft;
};

// All rows an eager run computes: target rows of every request, draft rows once.
std::vector<RowTask> list_rows(const VerifyParams& params, const std::vector<int32_t>& requests,
                               std::vector<LawSlot>& draft_laws) {
  std::vector<RowTask> tasks;
  for (int32_t b : requests) {
    int64_t begin = params.cu_nodes[b], end = params.cu_nodes[b + 1];
    if (begin < 0 || end > params.num_nodes || begin > end) continue;
    for (int64_t node = begin; node < end; node++) {
      tasks.push_back({b, static_cast<int32_t>(node), false});
      int32_t row = node > begin && reads_drafts(params) ? draft_row_of(params, b, node) : -1;
      if (row < 0 || draft_laws[row].owner != -1) continue;
      draft_laws[row].owner = b;
      tasks.push_back({b, row, true});
    }
  }
  return tasks;
}

void run_eager(const VerifyParams& params, const std::vector<int32_t>& requests, std::vector<LawSlot>& target_laws,
               std::vector<LawSlot>& draft_laws) {
  std::vector<RowTask> tasks = list_rows(params, requests, draft_laws);
  torch::stable::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const RowTask& task = tasks[i];
      const void* next = i + 1 < end ? row_to_come(params, tasks[i + 1].row, tasks[i + 1].is_draft) : nullptr;
      if (task.is_draft) {
        draft_laws[task.row].law = draft_law_of(params, task.request, task.row, scratch(), next);
      } else {
        target_laws[task.row].law = target_law_of(params, task.request, task.row, scratch(), next);
        target_laws[task.row].owner = task.request;
      }
    }
  });
}

// With fewer requests than threads the rows are the parallelism; otherwise reading fewer rows wins.
bool choose_eager(const std::string& form, const VerifyParams& params, size_t requests) {
  if (form == "eager") return true;
  if (form == "lazy") return false;
  if (form != "auto") fail(kOp, "form", "auto, eager or lazy, got '", form, "'");
  constexpr int64_t kFewBytes = 8 << 20;
  int64_t bytes = params.num_nodes * static_cast<int64_t>(params.target.valid) * 2;
  return requests < torch::stable::get_num_threads() && bytes <= kFewBytes;
}

void verify_cpu(const Tensor& target_logits, const Tensor& draft_token_ids, const Tensor& cu_nodes,
                const Tensor& parents, const Tensor& first_child, const Tensor& next_sibling,
                const std::optional<Tensor>& tree_flags, const Tensor& temperature, const std::optional<Tensor>& top_k,
                const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                const Tensor& position, const std::optional<Tensor>& step, const std::optional<Tensor>& draft_logits,
                const std::optional<Tensor>& draft_rows, const std::optional<Tensor>& draft_temperature,
                const std::optional<Tensor>& draft_top_k, const std::optional<Tensor>& draft_top_p,
                const std::optional<Tensor>& draft_min_p, const std::optional<Tensor>& draft_log_probs,
                const std::optional<Tensor>& draft_lse, const std::optional<Tensor>& d2t,
                const std::optional<Tensor>& t2d, const std::optional<Tensor>& allowed,
                const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                const std::optional<Tensor>& bias_values, const std::optional<Tensor>& uniforms,
                const std::optional<Tensor>& request_order, const std::optional<Tensor>& tile_stats, std::string method,
                int64_t vocab_size, int64_t max_nodes, int64_t max_depth, std::string return_logprobs, double epsilon,
                double delta, std::string form, const std::optional<Tensor>& workspace, const Tensor& output_token_ids,
                const Tensor& num_emitted, const Tensor& accepted_nodes, const Tensor& flags,
                const std::optional<Tensor>& logprobs) {
  VerifyParams params{};
  params.method = parse_method(method);
  params.target = make_rows(kOp, "target_logits", target_logits, vocab_size, allowed, bias_cu, bias_ids, bias_values);
  params.sampling = check_sampling(kOp, temperature, top_k, top_p, min_p, seed, position, step);
  int64_t B = params.sampling.count, N = target_logits.size(0), width = max_depth + 1;
  check_range(kOp, "max_depth", max_depth, 0, 1 << 20);
  check_index(kOp, "draft_token_ids", draft_token_ids, {N});
  check_index(kOp, "cu_nodes", cu_nodes, {B + 1});
  check_index(kOp, "parents", parents, {N});
  check_index(kOp, "first_child", first_child, {N});
  check_index(kOp, "next_sibling", next_sibling, {N});
  check_index(kOp, "tree_flags", tree_flags, {B});
  check_index(kOp, "draft_rows", draft_rows, {N});
  check_index(kOp, "draft_log_probs", draft_log_probs, {N}, ScalarType::Float);
  check_index(kOp, "request_order", request_order, {kAny});
  check_index(kOp, "output_token_ids", output_token_ids, {B, width});
  check_index(kOp, "num_emitted", num_emitted, {B});
  check_index(kOp, "accepted_nodes", accepted_nodes, {B, width});
  check_index(kOp, "flags", flags, {B});
  if (tile_stats) {
    if (allowed || bias_cu) fail(kOp, "tile_stats", "none beside allowed or bias (they change the logits)");
    params.num_tiles = (params.target.valid + kTileLogits - 1) / kTileLogits;
    check_index(kOp, "tile_stats", *tile_stats, {N, params.num_tiles, 2}, ScalarType::Float);
    params.tile_stats = data<float>(*tile_stats);
  }
  params.logprobs = parse_logprobs(kOp, return_logprobs, logprobs);
  if (params.logprobs == Logprobs::both)
    check_index(kOp, "logprobs", *logprobs, {B, width, 2}, ScalarType::Float);
  else if (params.logprobs != Logprobs::none)
    check_index(kOp, "logprobs", *logprobs, {B, width}, ScalarType::Float);
  if (uniforms && uniforms->scalar_type() == ScalarType::Double) {
    check_index(kOp, "uniforms", uniforms, {N}, ScalarType::Double);
    params.uniforms64 = data<double>(*uniforms);
  } else if (uniforms) {
    check_index(kOp, "uniforms", uniforms, {N}, ScalarType::Float);
    params.uniforms = data<float>(*uniforms);
  }
  DraftMap map;
  params.draft_sampling = params.sampling;
  if (draft_logits) {
    params.draft = make_rows(kOp, "draft_logits", *draft_logits, kMaxVocab, {}, {}, {}, {});
    check_index(kOp, "draft_lse", draft_lse, {params.draft.num_rows}, ScalarType::Float);
    if (draft_temperature) {
      params.draft_sampling = SamplingArgs{};
      check_filters(kOp, params.draft_sampling, *draft_temperature, draft_top_k, draft_top_p, draft_min_p);
      if (params.draft_sampling.count != B)
        fail(kOp, "draft_sampling", B, " requests, got ", params.draft_sampling.count);
    }
    if (params.method == Method::rejection || params.method == Method::block) map_drafts(params, map, d2t, t2d);
    params.draft_log_probs = data_or_null<float>(draft_log_probs);
    params.draft_lse = data_or_null<float>(draft_lse);
  } else if (draft_rows && (params.method == Method::rejection || params.method == Method::block)) {
    fail(kOp, "draft_logits", "the rows that draft_rows points into, got none");
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

  std::vector<int32_t> requests;
  int64_t num_requests = request_order ? request_order->size(0) : B;
  for (int64_t i = 0; i < num_requests; i++) {
    int32_t b = request_order ? data<int32_t>(*request_order)[i] : static_cast<int32_t>(i);
    if (b >= 0 && b < B) requests.push_back(b);
  }
  bool eager = choose_eager(form, params, requests.size());
  params.output_token_ids = mutable_data<int32_t>(output_token_ids);
  params.num_emitted = mutable_data<int32_t>(num_emitted);
  params.accepted_nodes = mutable_data<int32_t>(accepted_nodes);
  params.flags = mutable_data<int32_t>(flags);
  if (params.logprobs != Logprobs::none) params.logprobs_out = mutable_data<float>(*logprobs);

  std::vector<LawSlot> target_laws(N), draft_laws(params.draft.num_rows);
  if (eager) run_eager(params, requests, target_laws, draft_laws);
  torch::stable::parallel_for(0, static_cast<int64_t>(requests.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t next = i + 1 < end ? params.cu_nodes[requests[i + 1]] : -1;
      verify_request(params, requests[i], next < N ? next : -1, target_laws.data(), draft_laws.data());
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("verify", TORCH_BOX(&specdec::verify_cpu));
}
