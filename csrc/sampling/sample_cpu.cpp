// sample: one token a row, with the law and the noise of verify's bonus token.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "args_cpu.h"
#include "pick_cpu.h"

namespace specdec {
namespace {

void sample_cpu(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                const Tensor& position, const std::optional<Tensor>& step, const std::optional<Tensor>& row_requests,
                const std::optional<Tensor>& row_positions, const std::optional<Tensor>& allowed,
                const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                const std::optional<Tensor>& bias_values, int64_t vocab_size, std::string return_logprobs,
                const Tensor& token_ids, const Tensor& flags, const std::optional<Tensor>& logprobs) {
  constexpr char op[] = "sample";
  RowSource rows = make_rows(op, "logits", logits, vocab_size, allowed, bias_cu, bias_ids, bias_values);
  SamplingArgs sampling = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step);
  int64_t R = rows.num_rows;
  check_index(op, "row_requests", row_requests, {R});
  check_index(op, "row_positions", row_positions, {R}, ScalarType::Long);
  if (!row_requests && sampling.count != R)
    fail(op, "row_requests", "given, as there are ", R, " rows and ", sampling.count, " requests, got none");
  check_index(op, "token_ids", token_ids, {R});
  check_index(op, "flags", flags, {R});
  Logprobs wanted = parse_logprobs(op, return_logprobs, logprobs);
  int64_t width = wanted == Logprobs::both ? 2 : 1;
  if (wanted == Logprobs::both)
    check_index(op, "logprobs", *logprobs, {R, 2}, ScalarType::Float);
  else if (wanted != Logprobs::none)
    check_index(op, "logprobs", *logprobs, {R}, ScalarType::Float);
  RowOwners owners{data_or_null<int32_t>(row_requests), data_or_null<int64_t>(row_positions), sampling.count};
  int32_t *ids_out = mutable_data<int32_t>(token_ids), *flags_out = mutable_data<int32_t>(flags);
  float* logprobs_out = wanted == Logprobs::none ? nullptr : mutable_data<float>(*logprobs);
  bool reported = wanted == Logprobs::processed || wanted == Logprobs::both;

  torch::stable::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    for (int64_t r = begin; r < end; r++) {
      int64_t b = owners.request(r);
      if (b < 0 || b >= sampling.count) {  // a row of no request: nothing is drawn
        ids_out[r] = -1;
        flags_out[r] = kFlagIndex;
        if (logprobs_out)
          for (int64_t i = 0; i < width; i++) logprobs_out[r * width + i] = 0.0f;
        continue;
      }
      Row row = rows.row(r);
      RowLaw law = row_law(row, sampling.filters(b), work, reported);
      NoiseKey key{sampling.seed[b], owners.positions ? owners.positions[r] : sampling.position[b], kPurposeEmit, 0};
      int32_t id = law.is_point ? law.argmax : pick_token(row, law, key);
      ids_out[r] = id;
      flags_out[r] = law.flags;
      if (logprobs_out) write_logprobs(wanted, row, law, id, work, logprobs_out + r * width);
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample_cpu));
}
