// sample, row_stats, filter_rows and residual_log_weights on the GPU: a block of 256 threads a row.
//
// Grid: rows. Shared memory: 8.3 KiB (1024 bins, reductions). Numerics: rows_cuda.cuh.
// Not handled here: splitting a row over blocks (few rows leave most of the device idle).
#include "common/launch.cuh"
#include "sampling/acceptance.h"
#include "sampling/row_args.h"
#include "sampling/rows_cuda.cuh"

namespace specdec {

__global__ void __launch_bounds__(kRowThreads, 2) sample_kernel(const __grid_constant__ SampleArgs p) {
  SPECDEC_SHARED(RowScratch, scratch, 1);
  RowScratch& s = scratch[0];
  const int64_t r = blockIdx.x, b = p.owners.request(r);
  const int width = p.width();
  if (b < 0 || b >= p.sampling.count) {  // a row of no request: nothing is drawn
    if (threadIdx.x == 0) {
      p.token_ids[r] = -1;
      p.flags[r] = kFlagIndex;
      for (int i = 0; p.logprobs && i < width; i++) p.logprobs[r * width + i] = 0.0f;
    }
    return;
  }
  const int64_t position = p.owners.positions ? p.owners.positions[r] : p.sampling.position[b];
  const NoiseKey key{p.sampling.seed[b], position, kPurposeEmit, 0};
  int32_t id = 0;
  bool is_point = false;
  for (int view = 0; view < 3; view++) {  // the law drawn from; the raw row; a greedy row's edited logits
    if (view == 1 ? !p.is_raw() : view == 2 && !(p.is_processed() && is_point)) continue;
    BlockRow row = block_row(p.rows.row(r));
    if (view == 1) row.allowed = nullptr, row.num_bias = 0;
    const FilterParams params = view == 0 ? p.sampling.filters(b) : FilterParams{};
    const RowLaw law = block_row_law(row, params, view > 0 || p.is_processed(), nullptr, s);
    if (view == 0) {
      const RowReader reader(row);
      is_point = law.is_point;
      id = law.argmax;
      if (!is_point)
        id = block_pick(reader, 0, reader.units(), law, key, s, [&](int32_t, float logit) {
               return static_cast<double>(law.scaled(logit));
             }).id;
    }
    if (threadIdx.x != 0) continue;
    if (view == 0) {
      p.token_ids[r] = id;
      p.flags[r] = law.flags;
      if (!p.is_processed() || is_point) continue;
    }
    const double value = law.log_prob(clean_logit(edited_logit(row, id)), id);
    p.logprobs[r * width + (view == 1 ? 0 : width - 1)] = static_cast<float>(value);
  }
}

__global__ void __launch_bounds__(kRowThreads, 4) row_stats_kernel(const __grid_constant__ RowStatsArgs p) {
  SPECDEC_SHARED(RowScratch, scratch, 1);
  const int64_t r = blockIdx.x;
  FilterParams plain;
  const int32_t fault = p.parameters(r, &plain) ? kFlagIndex : 0;
  const RowLaw law = block_row_law(block_row(p.rows.row(r)), plain, true, nullptr, scratch[0]);
  if (threadIdx.x != 0) return;
  p.out.write(r, law, fault);
  p.argmax[r] = p.vocab_start + law.argmax;
}

__global__ void __launch_bounds__(kRowThreads, 3) filter_rows_kernel(const __grid_constant__ FilterRowsArgs p) {
  SPECDEC_SHARED(RowScratch, scratch, 1);
  RowScratch& s = scratch[0];
  const int64_t r = blockIdx.x, b = p.requests ? p.requests[r] : r;
  const BlockRow row = block_row(p.rows.row(r));
  const bool owned = b >= 0 && b < p.sampling.count;
  RowLaw law = block_row_law(row, owned ? p.sampling.filters(b) : FilterParams{}, true, nullptr, s);
  if (law.is_point) {  // greedy: the lowest id of the maximum alone
    law.threshold = law.is_empty ? -INFINITY : law.max;
    law.last_tie = law.argmax;
  }
  int32_t ties = 0;
  for_quads(row, [&](int32_t first, float (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      ties += first + e < row.size && first + e <= law.last_tie && clean_logit(x[e]) == law.threshold;
  });
  ties = block_reduce(ties, Sum{}, 0, s.counts);
  if (threadIdx.x != 0) return;
  p.out.write(r, law, owned ? 0 : kFlagIndex);
  p.threshold[r] = law.threshold;
  p.tie_budget[r] = ties;
}

// Grid: rows; threads stride over the columns.
__global__ void __launch_bounds__(kRowThreads, 6)
    residual_log_weights_kernel(const __grid_constant__ ResidualWeightsArgs a) {
  const int64_t r = blockIdx.x;
  const float *target = a.target + r * a.target_stride, *draft = a.draft + r * a.draft_stride;
  for (int64_t v = threadIdx.x; v < a.columns; v += kRowThreads)
    a.out[r * a.columns + v] = static_cast<float>(log_residual(target[v], draft[v], a.log_scale[r]));
}

// ------------------------------------------------------------------ host
void sample_cuda(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                 const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                 const Tensor& position, const std::optional<Tensor>& step, const std::optional<Tensor>& row_requests,
                 const std::optional<Tensor>& row_positions, const std::optional<Tensor>& allowed,
                 const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                 const std::optional<Tensor>& bias_values, int64_t vocab_size, std::string return_logprobs,
                 const Tensor& token_ids, const Tensor& flags, const std::optional<Tensor>& logprobs) {
  const SampleArgs p =
      check_sample(logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, row_positions, allowed,
                   bias_cu, bias_ids, bias_values, vocab_size, return_logprobs, token_ids, flags, logprobs);
  if (p.rows.num_rows == 0) return;
  DeviceGuard guard(logits);
  SPECDEC_LAUNCH(sample_kernel, dim3(static_cast<unsigned>(p.rows.num_rows)), dim3(kRowThreads), 0,
                 current_stream(logits), p);
  check_launch("sample");
}

void row_stats_cuda(const Tensor& logits, const std::optional<Tensor>& temperature,
                    const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed,
                    int64_t vocab_start, int64_t vocab_size, const Tensor& max, const Tensor& log_sum,
                    const Tensor& argmax, const Tensor& flags) {
  const RowStatsArgs p =
      check_row_stats(logits, temperature, row_requests, allowed, vocab_start, vocab_size, max, log_sum, argmax, flags);
  if (p.rows.num_rows == 0) return;
  DeviceGuard guard(logits);
  SPECDEC_LAUNCH(row_stats_kernel, dim3(static_cast<unsigned>(p.rows.num_rows)), dim3(kRowThreads), 0,
                 current_stream(logits), p);
  check_launch("row_stats");
}

void filter_rows_cuda(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                      const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                      const Tensor& position, const std::optional<Tensor>& step,
                      const std::optional<Tensor>& row_requests, const std::optional<Tensor>& allowed,
                      const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                      const std::optional<Tensor>& bias_values, int64_t vocab_size, const Tensor& threshold,
                      const Tensor& tie_budget, const Tensor& max, const Tensor& log_sum, const Tensor& flags) {
  const FilterRowsArgs p =
      check_filter_rows(logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, allowed, bias_cu,
                        bias_ids, bias_values, vocab_size, threshold, tie_budget, max, log_sum, flags);
  if (p.rows.num_rows == 0) return;
  DeviceGuard guard(logits);
  SPECDEC_LAUNCH(filter_rows_kernel, dim3(static_cast<unsigned>(p.rows.num_rows)), dim3(kRowThreads), 0,
                 current_stream(logits), p);
  check_launch("filter_rows");
}

void residual_log_weights_cuda(const Tensor& target_log_probs, const Tensor& draft_log_probs, const Tensor& log_scale,
                               const Tensor& out) {
  const ResidualWeightsArgs p = check_residual_log_weights(target_log_probs, draft_log_probs, log_scale, out);
  if (p.rows == 0) return;
  DeviceGuard guard(out);
  SPECDEC_LAUNCH(residual_log_weights_kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kRowThreads), 0,
                 current_stream(out), p);
  check_launch("residual_log_weights");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("sample", TORCH_BOX(&specdec::sample_cuda));
  m.impl("row_stats", TORCH_BOX(&specdec::row_stats_cuda));
  m.impl("filter_rows", TORCH_BOX(&specdec::filter_rows_cuda));
  m.impl("residual_log_weights", TORCH_BOX(&specdec::residual_log_weights_cuda));
}
