// The `Sampling` part of an op's arguments, for every native backend.
#pragma once
#include "row_source.h"

namespace specdec {

struct SamplingArgs {
  const float *temperature = nullptr, *top_p = nullptr, *min_p = nullptr;
  const int32_t* top_k = nullptr;
  const int64_t *seed = nullptr, *position = nullptr, *step = nullptr;
  int64_t count = 0;

  SPECDEC_HD FilterParams filters(int64_t request) const {
    FilterParams params;
    params.temperature = temperature[request];
    if (top_k) params.top_k = top_k[request];
    if (top_p) params.top_p = top_p[request];
    if (min_p) params.min_p = min_p[request];
    return params;
  }
  SPECDEC_HD int64_t step_of(int64_t request) const { return step ? step[request] : 0; }
};

inline void check_filters(const char* op, SamplingArgs& args, const Tensor& temperature,
                          const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                          const std::optional<Tensor>& min_p) {
  check_index(op, "temperature", temperature, {kAny}, ScalarType::Float);
  args.count = temperature.size(0);
  check_index(op, "top_k", top_k, {args.count});
  check_index(op, "top_p", top_p, {args.count}, ScalarType::Float);
  check_index(op, "min_p", min_p, {args.count}, ScalarType::Float);
  args.temperature = data<float>(temperature);
  args.top_k = data_or_null<int32_t>(top_k);
  args.top_p = data_or_null<float>(top_p);
  args.min_p = data_or_null<float>(min_p);
}

inline SamplingArgs check_sampling(const char* op, const Tensor& temperature, const std::optional<Tensor>& top_k,
                                   const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                                   const Tensor& seed, const Tensor& position, const std::optional<Tensor>& step) {
  SamplingArgs args;
  check_filters(op, args, temperature, top_k, top_p, min_p);
  check_index(op, "seed", seed, {args.count}, ScalarType::Long);
  check_index(op, "position", position, {args.count}, ScalarType::Long);
  check_index(op, "step", step, {args.count}, ScalarType::Long);
  args.seed = data<int64_t>(seed);
  args.position = data<int64_t>(position);
  args.step = data_or_null<int64_t>(step);
  return args;
}

// Which request and which output position each row of `sample` and `draft_sample` belongs to.
struct RowOwners {
  const int32_t* requests = nullptr;
  const int64_t* positions = nullptr;

  SPECDEC_HD int64_t request(int64_t row) const { return requests ? requests[row] : row; }
};

enum class Logprobs { none, raw, processed, both };

inline Logprobs parse_logprobs(const char* op, const std::string& text, const std::optional<Tensor>& out) {
  Logprobs wanted = Logprobs::none;
  if (text == "raw")
    wanted = Logprobs::raw;
  else if (text == "processed")
    wanted = Logprobs::processed;
  else if (text == "both")
    wanted = Logprobs::both;
  else if (!text.empty() && text != "none")
    fail(op, "return_logprobs", "'', 'raw', 'processed' or 'both', got '", text, "'");
  if (wanted != Logprobs::none && !out) fail(op, "logprobs", "an output tensor, got none");
  return wanted;
}

}  // namespace specdec
