// sample: one token a row, with the law and the noise of verify's bonus token.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "args_cpu.h"
#include "pick_cpu.h"
#include "row_args.h"

namespace specdec {
namespace {

void sample_cpu(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                const Tensor& position, const std::optional<Tensor>& step, const std::optional<Tensor>& row_requests,
                const std::optional<Tensor>& row_positions, const std::optional<Tensor>& allowed,
                const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                const std::optional<Tensor>& bias_values, int64_t vocab_size, std::string return_logprobs,
                const Tensor& token_ids, const Tensor& flags, const std::optional<Tensor>& logprobs) {
  const SampleArgs args =
      check_sample(logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, row_positions, allowed,
                   bias_cu, bias_ids, bias_values, vocab_size, return_logprobs, token_ids, flags, logprobs);
  const SamplingArgs& sampling = args.sampling;
  const RowOwners& owners = args.owners;
  const int64_t width = args.width();
  torch::stable::parallel_for(0, args.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    for (int64_t r = begin; r < end; r++) {
      int64_t b = owners.request(r);
      if (b < 0 || b >= sampling.count) {  // a row of no request: nothing is drawn
        args.token_ids[r] = -1;
        args.flags[r] = kFlagIndex;
        if (args.logprobs)
          for (int64_t i = 0; i < width; i++) args.logprobs[r * width + i] = 0.0f;
        continue;
      }
      Row row = args.rows.row(r);
      RowLaw law = row_law(row, sampling.filters(b), work, args.is_processed());
      NoiseKey key{sampling.seed[b], owners.positions ? owners.positions[r] : sampling.position[b], kPurposeEmit, 0};
      int32_t id = law.is_point ? law.argmax : pick_token(row, law, key);
      args.token_ids[r] = id;
      args.flags[r] = law.flags;
      if (args.logprobs) write_logprobs(args.wanted, row, law, id, work, args.logprobs + r * width);
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample_cpu));
}
