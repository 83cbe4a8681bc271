// Building blocks: row_stats, filter_rows, residual_log_weights.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "acceptance.h"
#include "args_cpu.h"
#include "row_args.h"

namespace specdec {
namespace {

void row_stats_cpu(const Tensor& logits, const std::optional<Tensor>& temperature,
                   const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed, int64_t vocab_start,
                   int64_t vocab_size, const Tensor& max, const Tensor& log_sum, const Tensor& argmax,
                   const Tensor& flags) {
  const RowStatsArgs args =
      check_row_stats(logits, temperature, row_requests, allowed, vocab_start, vocab_size, max, log_sum, argmax, flags);
  torch::stable::parallel_for(0, args.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      FilterParams plain;
      const int32_t fault = args.parameters(r, &plain) ? kFlagIndex : 0;
      const RowLaw law = row_law(args.rows.row(r), plain, scratch());
      args.out.write(r, law, fault);
      args.argmax[r] = args.vocab_start + law.argmax;
    }
  });
}

void filter_rows_cpu(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                     const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                     const Tensor& position, const std::optional<Tensor>& step,
                     const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed,
                     const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                     const std::optional<Tensor>& bias_values, int64_t vocab_size, const Tensor& threshold,
                     const Tensor& tie_budget, const Tensor& max, const Tensor& log_sum, const Tensor& flags) {
  const FilterRowsArgs args =
      check_filter_rows(logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, allowed, bias_cu,
                        bias_ids, bias_values, vocab_size, threshold, tie_budget, max, log_sum, flags);
  torch::stable::parallel_for(0, args.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    for (int64_t r = begin; r < end; r++) {
      const int64_t b = args.requests ? args.requests[r] : r;
      const Row row = args.rows.row(r);
      const bool owned = b >= 0 && b < args.sampling.count;
      RowLaw law = row_law(row, owned ? args.sampling.filters(b) : FilterParams{}, work);
      if (law.is_point) {  // greedy: the lowest id of the maximum alone
        law.threshold = law.is_empty ? -__builtin_huge_valf() : law.max;
        law.last_tie = law.argmax;
      }
      int32_t ties = 0;
      for (int32_t base = 0; base < row.size && base <= law.last_tie; base += kTileLogits) {
        int32_t n = load_tile(row, base, work.tile);
        for (int32_t i = 0; i < n && base + i <= law.last_tie; i++) ties += work.tile[i] == law.threshold;
      }
      args.out.write(r, law, owned ? 0 : kFlagIndex);
      args.threshold[r] = law.threshold;
      args.tie_budget[r] = ties;
    }
  });
}

void residual_log_weights_cpu(const Tensor& target_log_probs, const Tensor& draft_log_probs, const Tensor& log_scale,
                              const Tensor& out) {
  const ResidualWeightsArgs args = check_residual_log_weights(target_log_probs, draft_log_probs, log_scale, out);
  torch::stable::parallel_for(0, args.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const float *target = args.target + r * args.target_stride, *draft = args.draft + r * args.draft_stride;
      for (int64_t v = 0; v < args.columns; v++)
        args.out[r * args.columns + v] = static_cast<float>(log_residual(target[v], draft[v], args.log_scale[r]));
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&specdec::row_stats_cpu));
  m.impl("filter_rows", TORCH_BOX(&specdec::filter_rows_cpu));
  m.impl("residual_log_weights", TORCH_BOX(&specdec::residual_log_weights_cpu));
}
