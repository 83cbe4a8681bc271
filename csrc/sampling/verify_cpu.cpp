// verify: lossless (and one lossy) verification of draft chains and trees from raw logits.
//
//   eager   the laws of all rows, in parallel over rows, then the walks: for few requests
//   lazy    every walk computes the laws of the rows it visits (accepted + 1), in parallel over requests
//
// Both take the same decisions from the same bits. Numerics: docs/numerics.md.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../common/parallel.h"
#include "verify_cpu.h"

namespace specdec {
namespace {

// Draft columns by target id, and which columns map into the vocabulary at all.
struct DraftMap {
  std::vector<int32_t> column_of;
  std::vector<uint32_t> valid_columns;
};

void map_drafts(VerifyParams& params, DraftMap& map, const Tensor& d2t, const std::optional<Tensor>& t2d) {
  const int32_t* offsets = data<int32_t>(d2t);
  map.valid_columns.assign((params.draft.columns + 31) / 32, 0);
  map.column_of.assign(params.target.valid, -1);
  for (int32_t c = 0; c < params.draft.valid; c++) {
    int64_t id = static_cast<int64_t>(c) + offsets[c];
    if (id < 0 || id >= params.target.valid || map.column_of[id] != -1) continue;  // a second column of an id is unused
    map.valid_columns[c >> 5] |= 1u << (c & 31);
    map.column_of[id] = c;
  }
  params.column_of = t2d ? data<int32_t>(*t2d) : map.column_of.data();
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
    if (!params.is_sound(begin, end)) continue;
    for (int64_t node = begin; node < end; node++) {
      tasks.push_back({b, static_cast<int32_t>(node), false});
      int32_t row = node > begin && params.has_draft_laws() ? params.draft_row_of(b, node) : -1;
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
  share_items(static_cast<int64_t>(tasks.size()), [&](int64_t i, int64_t following) {
    const RowTask& task = tasks[i];
    const void* next = following >= 0 ? row_to_come(params, tasks[following].row, tasks[following].is_draft) : nullptr;
    if (task.is_draft) {
      draft_laws[task.row].law = draft_law_of(params, task.request, task.row, scratch(), next);
    } else {
      target_laws[task.row].law = target_law_of(params, task.request, task.row, scratch(), next);
      target_laws[task.row].owner = task.request;
    }
  });
}

// With fewer requests than threads the rows are the parallelism; otherwise reading fewer rows wins.
bool choose_eager(Form form, const VerifyParams& params, size_t requests) {
  if (form != Form::automatic) return form == Form::eager;
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
  VerifyParams params =
      check_verify(target_logits, draft_token_ids, cu_nodes, parents, first_child, next_sibling, tree_flags,
                   temperature, top_k, top_p, min_p, seed, position, step, draft_logits, draft_rows, draft_temperature,
                   draft_top_k, draft_top_p, draft_min_p, draft_log_probs, draft_lse, d2t, t2d, allowed, bias_cu,
                   bias_ids, bias_values, uniforms, request_order, tile_stats, method, vocab_size, max_depth,
                   return_logprobs, epsilon, delta, output_token_ids, num_emitted, accepted_nodes, flags, logprobs);
  const int64_t B = params.sampling.count, N = params.num_nodes;
  check_range("verify", "max_nodes", max_nodes, 0, 65535);  // as on a GPU, where it is a grid's dimension
  params.max_nodes = static_cast<int32_t>(max_nodes);
  const Form wanted = parse_form("verify", form);
  DraftMap map;
  if (d2t && params.has_draft_laws()) map_drafts(params, map, *d2t, t2d);

  std::vector<int32_t> requests;
  int64_t num_requests = request_order ? request_order->size(0) : B;
  for (int64_t i = 0; i < num_requests; i++) {
    int32_t b = request_order ? data<int32_t>(*request_order)[i] : static_cast<int32_t>(i);
    if (b >= 0 && b < B) requests.push_back(b);
  }
  const bool eager = choose_eager(wanted, params, requests.size());

  std::vector<LawSlot> target_laws(N), draft_laws(params.draft.num_rows);
  if (eager) run_eager(params, requests, target_laws, draft_laws);
  share_items(static_cast<int64_t>(requests.size()), [&](int64_t i, int64_t following) {
    int64_t next = following >= 0 ? params.cu_nodes[requests[following]] : -1;
    verify_request(params, requests[i], next < N ? next : -1, target_laws.data(), draft_laws.data());
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("verify", TORCH_BOX(&specdec::verify_cpu));
}
