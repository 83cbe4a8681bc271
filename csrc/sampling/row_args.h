// sample, row_stats and filter_rows: arguments, checked once for every native backend.
#pragma once
#include "sampling_args.h"

namespace specdec {

struct SampleArgs {
  RowSource rows;
  SamplingArgs sampling;
  RowOwners owners;
  int32_t *token_ids, *flags;  // [R]
  float* logprobs;             // [R] or [R, 2] (raw, processed), or null
  Logprobs wanted;

  SPECDEC_HD bool is_raw() const { return wanted == Logprobs::raw || wanted == Logprobs::both; }
  SPECDEC_HD bool is_processed() const { return wanted == Logprobs::processed || wanted == Logprobs::both; }
  SPECDEC_HD int width() const { return wanted == Logprobs::both ? 2 : 1; }
};

inline SampleArgs check_sample(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                               const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                               const Tensor& seed, const Tensor& position, const std::optional<Tensor>& step,
                               const std::optional<Tensor>& row_requests, const std::optional<Tensor>& row_positions,
                               const std::optional<Tensor>& allowed, const std::optional<Tensor>& bias_cu,
                               const std::optional<Tensor>& bias_ids, const std::optional<Tensor>& bias_values,
                               int64_t vocab_size, const std::string& return_logprobs, const Tensor& token_ids,
                               const Tensor& flags, const std::optional<Tensor>& logprobs) {
  constexpr char op[] = "sample";
  SampleArgs args = {};
  args.rows = make_rows(op, "logits", logits, vocab_size, allowed, bias_cu, bias_ids, bias_values);
  args.sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  const int64_t R = args.rows.num_rows;
  check_index(op, "row_requests", row_requests, {R});
  check_index(op, "row_positions", row_positions, {R}, ScalarType::Long);
  if (!row_requests && args.sampling.count != R)
    fail(op, "row_requests", "given, as there are ", R, " rows and ", args.sampling.count, " requests, got none");
  check_index(op, "token_ids", token_ids, {R});
  check_index(op, "flags", flags, {R});
  args.wanted = parse_logprobs(op, return_logprobs, logprobs);
  if (args.wanted == Logprobs::both)
    check_index(op, "logprobs", *logprobs, {R, 2}, ScalarType::Float);
  else if (args.wanted != Logprobs::none)
    check_index(op, "logprobs", *logprobs, {R}, ScalarType::Float);
  args.owners = {data_or_null<int32_t>(row_requests), data_or_null<int64_t>(row_positions)};
  args.token_ids = mutable_data<int32_t>(token_ids);
  args.flags = mutable_data<int32_t>(flags);
  if (args.wanted != Logprobs::none) args.logprobs = mutable_data<float>(*logprobs);
  return args;
}

// What row_stats and filter_rows say of a row. A dead row has max -inf and log_sum 0: its log-sum-exp is -inf.
struct StatsOut {
  float *max, *log_sum;
  int32_t* flags;

  SPECDEC_HD void write(int64_t r, const RowLaw& law, int32_t fault) const {
    max[r] = law.is_empty ? -__builtin_huge_valf() : law.max;
    log_sum[r] = static_cast<float>(law.log_mass);
    flags[r] = law.flags | fault;
  }
};

inline StatsOut check_stats(const char* op, int64_t rows, const Tensor& max, const Tensor& log_sum,
                            const Tensor& flags) {
  check_index(op, "max", max, {rows}, ScalarType::Float);
  check_index(op, "log_sum", log_sum, {rows}, ScalarType::Float);
  check_index(op, "flags", flags, {rows});
  return {mutable_data<float>(max), mutable_data<float>(log_sum), mutable_data<int32_t>(flags)};
}

struct RowStatsArgs {
  RowSource rows;
  const float* temperature;  // [R] or [requests], or null
  const int32_t* requests;   // [R], or null
  int64_t num_temperatures;
  int32_t vocab_start;
  StatsOut out;
  int32_t* argmax;

  // The parameters of row r; true where its request does not exist.
  SPECDEC_HD bool parameters(int64_t r, FilterParams* params) const {
    const int64_t b = requests ? requests[r] : r;
    const bool known = b >= 0 && b < num_temperatures;
    if (temperature && known) params->temperature = temperature[b];
    return temperature && !known;
  }
};

// A shard's ids start at vocab_start; columns whose id is vocab_size or above do not exist.
inline RowStatsArgs check_row_stats(const Tensor& logits, const std::optional<Tensor>& temperature,
                                    const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed,
                                    int64_t vocab_start, int64_t vocab_size, const Tensor& max, const Tensor& log_sum,
                                    const Tensor& argmax, const Tensor& flags) {
  constexpr char op[] = "row_stats";
  check_range(op, "vocab_start", vocab_start, 0, (int64_t{1} << 31) - 1);
  if (vocab_size <= vocab_start) fail(op, "vocab_size", "more than vocab_start ", vocab_start, ", got ", vocab_size);
  RowStatsArgs args = {};
  args.rows = make_rows(op, "logits", logits, vocab_size - vocab_start, allowed, {}, {}, {});
  const int64_t R = args.rows.num_rows;
  if (temperature) check_index(op, "temperature", *temperature, {row_requests ? kAny : R}, ScalarType::Float);
  check_index(op, "row_requests", row_requests, {R});
  check_index(op, "argmax", argmax, {R});
  args.out = check_stats(op, R, max, log_sum, flags);
  args.temperature = data_or_null<float>(temperature);
  args.requests = data_or_null<int32_t>(row_requests);
  args.num_temperatures = temperature ? temperature->size(0) : 0;
  args.vocab_start = static_cast<int32_t>(vocab_start);
  args.argmax = mutable_data<int32_t>(argmax);
  return args;
}

// The filters of a row as three scalars: an id is kept iff its logit is above `threshold`, or equals it and is one of
// the `tie_budget` lowest such ids; log_sum is that of the kept ids.
struct FilterRowsArgs {
  RowSource rows;
  SamplingArgs sampling;
  const int32_t* requests;  // [R], or null
  float* threshold;
  int32_t* tie_budget;
  StatsOut out;
};

inline FilterRowsArgs check_filter_rows(const Tensor& logits, const Tensor& temperature,
                                        const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                                        const std::optional<Tensor>& min_p, const Tensor& seed, const Tensor& position,
                                        const std::optional<Tensor>& step, const std::optional<Tensor>& row_requests,
                                        const std::optional<Tensor>& allowed, const std::optional<Tensor>& bias_cu,
                                        const std::optional<Tensor>& bias_ids, const std::optional<Tensor>& bias_values,
                                        int64_t vocab_size, const Tensor& threshold, const Tensor& tie_budget,
                                        const Tensor& max, const Tensor& log_sum, const Tensor& flags) {
  constexpr char op[] = "filter_rows";
  FilterRowsArgs args = {};
  args.rows = make_rows(op, "logits", logits, vocab_size, allowed, bias_cu, bias_ids, bias_values);
  args.sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  const int64_t R = args.rows.num_rows;
  check_index(op, "row_requests", row_requests, {R});
  if (!row_requests && args.sampling.count != R)
    fail(op, "row_requests", "given (", R, " rows, ", args.sampling.count, " requests), got none");
  check_index(op, "threshold", threshold, {R}, ScalarType::Float);
  check_index(op, "tie_budget", tie_budget, {R});
  args.out = check_stats(op, R, max, log_sum, flags);
  args.requests = data_or_null<int32_t>(row_requests);
  args.threshold = mutable_data<float>(threshold);
  args.tie_budget = mutable_data<int32_t>(tie_budget);
  return args;
}

struct ResidualWeightsArgs {
  const float *target, *draft, *log_scale;
  int64_t rows, columns, target_stride, draft_stride;
  float* out;  // [rows, columns]
};

inline ResidualWeightsArgs check_residual_log_weights(const Tensor& target_log_probs, const Tensor& draft_log_probs,
                                                      const Tensor& log_scale, const Tensor& out) {
  constexpr char op[] = "residual_log_weights";
  if (target_log_probs.dim() != 2) fail(op, "target_log_probs", "2 dimensions, got ", shape_text(target_log_probs));
  const int64_t R = target_log_probs.size(0), V = target_log_probs.size(1);
  check_tensor(op, "target_log_probs", target_log_probs, ScalarType::Float, {R, V});
  check_tensor(op, "draft_log_probs", draft_log_probs, ScalarType::Float, {R, V});
  check_dense_rows(op, "target_log_probs", target_log_probs);
  check_dense_rows(op, "draft_log_probs", draft_log_probs);
  check_index(op, "log_scale", log_scale, {R}, ScalarType::Float);
  check_index(op, "out", out, {R, V}, ScalarType::Float);
  return {data<float>(target_log_probs), data<float>(draft_log_probs), data<float>(log_scale),  R, V,
          target_log_probs.stride(0),    draft_log_probs.stride(0),    mutable_data<float>(out)};
}

}  // namespace specdec
