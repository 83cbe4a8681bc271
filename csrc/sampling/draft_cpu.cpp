// draft_sample: what a drafter draws after one node, from one row of its logits.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "args_cpu.h"
#include "pick_cpu.h"
#include "select_cpu.h"

namespace specdec {
namespace {

// Draft columns that exist: those whose target id lies in [0, vocab_size).
struct DraftRows {
  RowSource rows;
  const int32_t* offsets = nullptr;
  std::vector<uint32_t> valid_columns;

  int32_t target_id(int32_t column) const { return offsets ? column + offsets[column] : column; }
};

DraftRows make_draft_rows(const char* op, const Tensor& logits, const std::optional<Tensor>& d2t, int64_t vocab_size) {
  DraftRows draft;
  draft.rows = make_rows(op, "logits", logits, d2t ? kMaxVocab : vocab_size, {}, {}, {}, {});
  if (!d2t) return draft;
  check_index(op, "d2t", *d2t, {kAny});
  draft.offsets = data<int32_t>(*d2t);
  if (draft.rows.valid > d2t->size(0)) draft.rows.valid = static_cast<int32_t>(d2t->size(0));
  draft.valid_columns.assign((draft.rows.columns + 31) / 32, 0);
  for (int32_t c = 0; c < draft.rows.valid; c++) {
    int64_t id = static_cast<int64_t>(c) + draft.offsets[c];
    if (id >= 0 && id < vocab_size) draft.valid_columns[c >> 5] |= 1u << (c & 31);
  }
  draft.rows.allowed = draft.valid_columns.data();
  return draft;
}

void check_outputs(const char* op, int64_t rows, int64_t k, const Tensor& token_ids, const Tensor& log_probs,
                   const Tensor& lse) {
  check_range(op, "k", k, 1, 1024);
  check_index(op, "token_ids", token_ids, {rows, k});
  check_index(op, "log_probs", log_probs, {rows, k}, ScalarType::Float);
  check_index(op, "lse", lse, {rows}, ScalarType::Float);
}

float law_lse(const RowLaw& law) {
  if (law.is_empty) return -__builtin_huge_valf();
  return static_cast<float>(static_cast<double>(law.max) * law.tau + law.log_mass);
}

// Gumbel top-k: the k largest perturbed scores in descending order are k draws without replacement.
void draw_siblings(const DraftRows& draft, Row row, const RowLaw& law, const NoiseKey& key, bool coupled, int32_t k,
                   Scratch& work, std::vector<std::pair<double, int32_t>>& best) {
  best.clear();
  row.is_clean = law.is_clean();
  auto offer = [&](int32_t c, float logit, uint32_t word, int32_t token) {
    if (!(logit >= -kInfLogit) || !law.keeps(logit, c)) return;
    std::pair<double, int32_t> entry{law.scaled(logit) + gumbel(key, static_cast<uint32_t>(token), word), c};
    auto after = [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    if (static_cast<int32_t>(best.size()) == k && !after(entry, best.back())) return;
    best.insert(std::upper_bound(best.begin(), best.end(), entry, after), entry);
    if (static_cast<int32_t>(best.size()) > k) best.pop_back();
  };
  if (coupled && draft.offsets) {  // noise of the target's ids: no runs of four in draft order
    for (int32_t base = 0; base < row.size; base += kTileLogits) {
      int32_t n = load_tile(row, base, work.tile);
      for (int32_t i = 0; i < n; i++) {
        if (!(work.tile[i] >= -kInfLogit)) continue;
        int32_t token = draft.target_id(base + i);
        Philox words = draw(key.seed, key.position, key.purpose, static_cast<uint32_t>(token) >> 2, key.salt);
        offer(base + i, work.tile[i], words.word[token & 3], token);
      }
    }
    return;
  }
  ScanArgs args{law.max, law.rate, 0.0f, 0.0f, PhiloxKeys(key)};
  Scanner scan(law);
  for_scan_steps(row, 0, row.size, work, [&](const Span& span) {
    aim(args, law, static_cast<int32_t>(best.size()) == k ? best.back().first : kNegInf);
    int32_t count = scan(span, args, work);
    for (int32_t h = 0; h < count; h++) offer(work.hits[h].id, work.hits[h].logit, work.hits[h].word, work.hits[h].id);
  });
}

void draft_sample_cpu(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                      const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                      const Tensor& position, const std::optional<Tensor>& step, const Tensor& row_requests,
                      const Tensor& row_positions, const std::optional<Tensor>& row_paths,
                      const std::optional<Tensor>& d2t, int64_t k, bool coupled, int64_t vocab_size,
                      const Tensor& token_ids, const Tensor& log_probs, const Tensor& lse) {
  constexpr char op[] = "draft_sample";
  DraftRows draft = make_draft_rows(op, logits, d2t, vocab_size);
  SamplingArgs sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  int64_t R = draft.rows.num_rows;
  check_outputs(op, R, k, token_ids, log_probs, lse);
  check_index(op, "row_requests", row_requests, {R});
  check_index(op, "row_positions", row_positions, {R}, ScalarType::Long);
  check_index(op, "row_paths", row_paths, {R});
  const int32_t *requests = data<int32_t>(row_requests), *paths = data_or_null<int32_t>(row_paths);
  const int64_t* positions = data<int64_t>(row_positions);
  int32_t* ids_out = mutable_data<int32_t>(token_ids);
  float *logs_out = mutable_data<float>(log_probs), *lse_out = mutable_data<float>(lse);
  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    std::vector<std::pair<double, int32_t>> best;
    for (int64_t r = begin; r < end; r++) {
      std::fill_n(ids_out + r * k, k, -1);
      std::fill_n(logs_out + r * k, k, -__builtin_huge_valf());
      lse_out[r] = 0.0f;
      int64_t b = requests[r];
      if (b < 0 || b >= sampling.count) continue;
      Row row = draft.rows.row(r);
      RowLaw law = row_law(row, sampling.filters(b), work);
      if (law.is_point) {
        if (law.is_empty) continue;
        ids_out[r * k] = draft.target_id(law.argmax);
        logs_out[r * k] = 0.0f;
        continue;
      }
      lse_out[r] = law_lse(law);
      uint32_t salt = coupled ? 0 : draft_salt(paths ? static_cast<uint32_t>(paths[r]) : 0, sampling.step_of(b));
      NoiseKey key{sampling.seed[b], positions[r], coupled ? kPurposeEmit : kPurposeDraft, salt};
      draw_siblings(draft, row, law, key, coupled, static_cast<int32_t>(k), work, best);
      for (size_t i = 0; i < best.size(); i++) {
        ids_out[r * k + i] = draft.target_id(best[i].second);
        logs_out[r * k + i] = static_cast<float>(law.log_prob(load_logit(row, best[i].second), best[i].second));
      }
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("draft_sample", TORCH_BOX(&specdec::draft_sample_cpu));
}
