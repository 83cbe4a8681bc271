// Building blocks: row_stats, filter_rows, residual_log_weights.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "acceptance.h"
#include "args_cpu.h"

namespace specdec {
namespace {

struct StatsOut {
  float *max, *log_sum;
  int32_t* flags;
};

StatsOut check_stats(const char* op, int64_t rows, const Tensor& max, const Tensor& log_sum, const Tensor& flags) {
  check_index(op, "max", max, {rows}, ScalarType::Float);
  check_index(op, "log_sum", log_sum, {rows}, ScalarType::Float);
  check_index(op, "flags", flags, {rows});
  return {mutable_data<float>(max), mutable_data<float>(log_sum), mutable_data<int32_t>(flags)};
}

// A dead row has max -inf and log_sum 0: its log-sum-exp is -inf.
void write_stats(const StatsOut& out, int64_t r, const RowLaw& law) {
  out.max[r] = law.is_empty ? -__builtin_huge_valf() : law.max;
  out.log_sum[r] = static_cast<float>(law.log_mass);
  out.flags[r] = law.flags;
}

// A shard's ids start at vocab_start; columns whose id is vocab_size or above do not exist.
void row_stats_cpu(const Tensor& logits, const std::optional<Tensor>& temperature,
                   const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed, int64_t vocab_start,
                   int64_t vocab_size, const Tensor& max, const Tensor& log_sum, const Tensor& argmax,
                   const Tensor& flags) {
  constexpr char op[] = "row_stats";
  check_range(op, "vocab_start", vocab_start, 0, (int64_t{1} << 31) - 1);
  if (vocab_size <= vocab_start) fail(op, "vocab_size", "more than vocab_start ", vocab_start, ", got ", vocab_size);
  RowSource rows = make_rows(op, "logits", logits, vocab_size - vocab_start, allowed, {}, {}, {});
  int64_t R = rows.num_rows;
  if (temperature) check_index(op, "temperature", *temperature, {row_requests ? kAny : R}, ScalarType::Float);
  check_index(op, "row_requests", row_requests, {R});
  check_index(op, "argmax", argmax, {R});
  StatsOut out = check_stats(op, R, max, log_sum, flags);
  int32_t* argmax_out = mutable_data<int32_t>(argmax);
  const float* temperatures = data_or_null<float>(temperature);
  const int32_t* requests = data_or_null<int32_t>(row_requests);
  int64_t count = temperature ? temperature->size(0) : 0;
  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      int64_t b = requests ? requests[r] : r;
      FilterParams plain;
      int32_t fault = 0;
      if (temperatures && b >= 0 && b < count)
        plain.temperature = temperatures[b];
      else if (temperatures)
        fault = kFlagIndex;
      RowLaw law = row_law(rows.row(r), plain, scratch());
      law.flags |= fault;
      write_stats(out, r, law);
      argmax_out[r] = static_cast<int32_t>(vocab_start) + law.argmax;
    }
  });
}

// The filters of a row as three scalars: an id is kept iff its logit is above `threshold`, or equals it and is one of
// the `tie_budget` lowest such ids; log_sum is that of the kept ids.
void filter_rows_cpu(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                     const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                     const Tensor& position, const std::optional<Tensor>& step,
                     const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed,
                     const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                     const std::optional<Tensor>& bias_values, int64_t vocab_size, const Tensor& threshold,
                     const Tensor& tie_budget, const Tensor& max, const Tensor& log_sum, const Tensor& flags) {
  constexpr char op[] = "filter_rows";
  RowSource rows = make_rows(op, "logits", logits, vocab_size, allowed, bias_cu, bias_ids, bias_values);
  SamplingArgs sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  int64_t R = rows.num_rows;
  check_index(op, "row_requests", row_requests, {R});
  if (!row_requests && sampling.count != R)
    fail(op, "row_requests", "given (", R, " rows, ", sampling.count, " requests), got none");
  check_index(op, "threshold", threshold, {R}, ScalarType::Float);
  check_index(op, "tie_budget", tie_budget, {R});
  StatsOut out = check_stats(op, R, max, log_sum, flags);
  float* threshold_out = mutable_data<float>(threshold);
  int32_t* budget_out = mutable_data<int32_t>(tie_budget);
  const int32_t* requests = data_or_null<int32_t>(row_requests);
  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    for (int64_t r = begin; r < end; r++) {
      int64_t b = requests ? requests[r] : r;
      Row row = rows.row(r);
      bool owned = b >= 0 && b < sampling.count;
      RowLaw law = row_law(row, owned ? sampling.filters(b) : FilterParams{}, work);
      if (!owned) law.flags |= kFlagIndex;
      if (law.is_point) {  // greedy: the lowest id of the maximum alone
        law.threshold = law.is_empty ? -__builtin_huge_valf() : law.max;
        law.last_tie = law.argmax;
      }
      int32_t ties = 0;
      for (int32_t base = 0; base < row.size && base <= law.last_tie; base += kTileLogits) {
        int32_t n = load_tile(row, base, work.tile);
        for (int32_t i = 0; i < n && base + i <= law.last_tie; i++) ties += work.tile[i] == law.threshold;
      }
      write_stats(out, r, law);
      threshold_out[r] = law.threshold;
      budget_out[r] = ties;
    }
  });
}

void residual_log_weights_cpu(const Tensor& target_log_probs, const Tensor& draft_log_probs, const Tensor& log_scale,
                              const Tensor& out) {
  constexpr char op[] = "residual_log_weights";
  if (target_log_probs.dim() != 2) fail(op, "target_log_probs", "2 dimensions, got ", shape_text(target_log_probs));
  int64_t R = target_log_probs.size(0), V = target_log_probs.size(1);
  check_tensor(op, "target_log_probs", target_log_probs, ScalarType::Float, {R, V});
  check_tensor(op, "draft_log_probs", draft_log_probs, ScalarType::Float, {R, V});
  check_dense_rows(op, "target_log_probs", target_log_probs);
  check_dense_rows(op, "draft_log_probs", draft_log_probs);
  check_index(op, "log_scale", log_scale, {R}, ScalarType::Float);
  check_index(op, "out", out, {R, V}, ScalarType::Float);
  const float *p = data<float>(target_log_probs), *q = data<float>(draft_log_probs), *c = data<float>(log_scale);
  int64_t stride_p = target_log_probs.stride(0), stride_q = draft_log_probs.stride(0);
  float* weights = mutable_data<float>(out);
  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for (int64_t v = 0; v < V; v++)
        weights[r * V + v] = static_cast<float>(log_residual(p[r * stride_p + v], q[r * stride_q + v], c[r]));
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&specdec::row_stats_cpu));
  m.impl("filter_rows", TORCH_BOX(&specdec::filter_rows_cpu));
  m.impl("residual_log_weights", TORCH_BOX(&specdec::residual_log_weights_cpu));
}
