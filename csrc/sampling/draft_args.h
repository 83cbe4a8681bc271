// draft_sample: arguments, checked once for every native backend.
#pragma once
#include "noise.h"
#include "sampling_args.h"

namespace specdec {

struct DraftSampleArgs {
  RowSource rows;
  SamplingArgs sampling;
  const int32_t *requests, *paths, *d2t;  // paths, d2t: or null
  const int64_t* positions;
  int64_t vocab_size;
  int32_t k;
  bool coupled;
  int32_t* token_ids;      // [R, k]
  float *log_probs, *lse;  // [R, k], [R]

  SPECDEC_HD int32_t target_id(int32_t column) const {  // of a column that exists; garbage offsets may wrap
    return d2t ? static_cast<int32_t>(static_cast<uint32_t>(column) + static_cast<uint32_t>(d2t[column])) : column;
  }
  SPECDEC_HD NoiseKey key(int64_t row, int64_t request) const {
    const uint32_t path = paths ? static_cast<uint32_t>(paths[row]) : 0;
    const uint32_t salt = coupled ? 0 : draft_salt(path, sampling.step_of(request));
    return NoiseKey{sampling.seed[request], positions[row], coupled ? kPurposeEmit : kPurposeDraft, salt};
  }
};

SPECDEC_HD float law_lse(const RowLaw& law) {
  if (law.is_empty) return -__builtin_huge_valf();
  return static_cast<float>(static_cast<double>(law.max) * law.tau + law.log_mass);
}

// Columns whose target id lies outside [0, vocab_size) are still to be excluded where there is d2t.
inline DraftSampleArgs check_draft_sample(const Tensor& logits, const Tensor& temperature,
                                          const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                                          const std::optional<Tensor>& min_p, const Tensor& seed,
                                          const Tensor& position, const std::optional<Tensor>& step,
                                          const Tensor& row_requests, const Tensor& row_positions,
                                          const std::optional<Tensor>& row_paths, const std::optional<Tensor>& d2t,
                                          int64_t k, bool coupled, int64_t vocab_size, const Tensor& token_ids,
                                          const Tensor& log_probs, const Tensor& lse) {
  constexpr char op[] = "draft_sample";
  DraftSampleArgs args = {};
  args.rows = make_rows(op, "logits", logits, d2t ? kMaxVocab : vocab_size, {}, {}, {}, {});
  check_index(op, "d2t", d2t, {kAny});
  if (d2t && args.rows.valid > d2t->size(0)) args.rows.valid = static_cast<int32_t>(d2t->size(0));
  args.sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  const int64_t R = args.rows.num_rows;
  check_range(op, "k", k, 1, 1024);
  check_index(op, "token_ids", token_ids, {R, k});
  check_index(op, "log_probs", log_probs, {R, k}, ScalarType::Float);
  check_index(op, "lse", lse, {R}, ScalarType::Float);
  check_index(op, "row_requests", row_requests, {R});
  check_index(op, "row_positions", row_positions, {R}, ScalarType::Long);
  check_index(op, "row_paths", row_paths, {R});
  args.requests = data<int32_t>(row_requests);
  args.paths = data_or_null<int32_t>(row_paths);
  args.d2t = data_or_null<int32_t>(d2t);
  args.positions = data<int64_t>(row_positions);
  args.vocab_size = vocab_size;
  args.k = static_cast<int32_t>(k);
  args.coupled = coupled;
  args.token_ids = mutable_data<int32_t>(token_ids);
  args.log_probs = mutable_data<float>(log_probs);
  args.lse = mutable_data<float>(lse);
  return args;
}

}  // namespace specdec
