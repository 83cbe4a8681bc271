// Log-probabilities of emitted ids on the CPU.
#pragma once
#include "rows_cpu.h"
#include "sampling_args.h"

namespace specdec {

// Log probability of an emitted id under the untouched row (raw) or the law it was drawn from (processed; a greedy row
// reports its edited logits at temperature 1, since its own law would say 0 for everything).
inline double raw_logprob(Row row, int32_t id, Scratch& work) {
  row.allowed = nullptr;
  row.num_bias = 0;
  RowLaw law = row_law(row, FilterParams{}, work);
  return law.log_prob(load_logit(row, id), id);
}
inline double processed_logprob(const Row& row, const RowLaw& law, int32_t id, Scratch& work) {
  if (!law.is_point) return law.log_prob(load_logit(row, id), id);
  RowLaw plain = row_law(row, FilterParams{}, work);
  return plain.log_prob(load_logit(row, id), id);
}
// Writes 1 value, or 2 (raw, processed) for `both`.
inline void write_logprobs(Logprobs wanted, const Row& row, const RowLaw& law, int32_t id, Scratch& work, float* out) {
  if (wanted == Logprobs::raw || wanted == Logprobs::both) *out++ = static_cast<float>(raw_logprob(row, id, work));
  if (wanted == Logprobs::processed || wanted == Logprobs::both)
    *out = static_cast<float>(processed_logprob(row, law, id, work));
}

}  // namespace specdec
