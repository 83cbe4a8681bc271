// draft_sample on the GPU: a block of 256 threads a row.
//
// The law of the row, then k passes over it (from L2): each finds the largest perturbed score behind the one before, so
// the ids come out in draw order. Shared memory: 8.3 KiB. Numerics: rows_cuda.cuh.
// Not handled here: splitting a row over blocks; k is a few siblings, many would want a list.
#include "common/launch.cuh"
#include "sampling/draft_args.h"
#include "sampling/rows_cuda.cuh"

namespace specdec {

// The best column behind (ceiling, ceiling_id) in the order (score descending, column ascending).
__device__ __forceinline__ Winner block_next_sibling(const BlockRow& row, const RowLaw& law, const DraftSampleArgs& p,
                                                     const NoiseKey& key, double ceiling, int32_t ceiling_id,
                                                     RowScratch& s) {
  double best = kNegInf;
  int32_t best_id = -1;
  const bool by_target = p.coupled && p.d2t;  // noise of the target's ids: no runs of four in draft order
  for_quads<1>(row, [&](int32_t first, float (&x)[4]) {
    uint32_t hope = kept_in_reach(law, first, best, x);
    if (!hope) return;
    Philox words = {};
    if (!by_target) words = draw(key.seed, key.position, key.purpose, static_cast<uint32_t>(first) >> 2, key.salt);
#pragma unroll 1
    for (; hope; hope &= hope - 1) {
      const int32_t e = __ffs(static_cast<int>(hope)) - 1, column = first + e;
      const float logit = one_of_four(x, e);
      uint32_t token = static_cast<uint32_t>(column);
      if (by_target) {
        token = static_cast<uint32_t>(p.target_id(column));
        words = draw(key.seed, key.position, key.purpose, token >> 2, key.salt);
      }
      const uint32_t word = word_of(words, token & 3);
      if (!can_beat(law, logit, word, best)) continue;
      const double score = static_cast<double>(law.scaled(logit)) + gumbel(key, token, word);
      if (score > ceiling || (score == ceiling && column <= ceiling_id)) continue;
      if (score > best || (score == best && column < best_id)) best = score, best_id = column;
    }
  });
  return block_winner(best_id >= 0 ? score_key(best) : 0, best_id, s);
}

__global__ void __launch_bounds__(kRowThreads, 2) draft_sample_kernel(const __grid_constant__ DraftSampleArgs p) {
  SPECDEC_SHARED(RowScratch, scratch, 1);
  RowScratch& s = scratch[0];
  const int64_t r = blockIdx.x, b = p.requests[r];
  int32_t* ids = p.token_ids + r * p.k;
  float* logs = p.log_probs + r * p.k;
  for (int32_t i = threadIdx.x; i < p.k; i += kRowThreads) {
    ids[i] = -1;
    logs[i] = -INFINITY;
  }
  if (threadIdx.x == 0) p.lse[r] = 0.0f;
  if (b < 0 || b >= p.sampling.count) return;
  __syncthreads();  // the filler lies before what follows
  BlockRow row = block_row(p.rows.row(r));
  row.d2t = p.d2t;
  row.num_ids = p.vocab_size;
  const RowLaw law = block_row_law(row, p.sampling.filters(b), true, nullptr, s);
  if (law.is_point) {
    if (threadIdx.x != 0 || law.is_empty) return;
    *ids = p.target_id(law.argmax);
    *logs = 0.0f;
    return;
  }
  if (threadIdx.x == 0) p.lse[r] = law_lse(law);
  const NoiseKey key = p.key(r, b);
  double score = INFINITY;
  int32_t column = -1;
  for (int32_t i = 0; i < p.k; i++) {
    const Winner next = block_next_sibling(row, law, p, key, score, column, s);
    column = next.id;
    if (column < 0) return;
    score = key_score(next.key);
    if (threadIdx.x != 0) continue;
    ids[i] = p.target_id(column);
    logs[i] = static_cast<float>(law.log_prob(clean_logit(edited_logit(row, column)), column));
  }
}

// ------------------------------------------------------------------ host
void draft_sample_cuda(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                       const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                       const Tensor& position, const std::optional<Tensor>& step, const Tensor& row_requests,
                       const Tensor& row_positions, const std::optional<Tensor>& row_paths,
                       const std::optional<Tensor>& d2t, int64_t k, bool coupled, int64_t vocab_size,
                       const Tensor& token_ids, const Tensor& log_probs, const Tensor& lse) {
  const DraftSampleArgs p =
      check_draft_sample(logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, row_positions,
                         row_paths, d2t, k, coupled, vocab_size, token_ids, log_probs, lse);
  if (p.rows.num_rows == 0) return;
  DeviceGuard guard(logits);
  SPECDEC_LAUNCH(draft_sample_kernel, dim3(static_cast<unsigned>(p.rows.num_rows)), dim3(kRowThreads), 0,
                 current_stream(logits), p);
  check_launch("draft_sample");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("draft_sample", TORCH_BOX(&specdec::draft_sample_cuda));
}
