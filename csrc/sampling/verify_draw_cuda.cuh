// The last token of a request: what it is drawn from, the draw, and what is written.
#pragma once
#include "common/launch.cuh"
#include "sampling/race_cuda.cuh"
#include "sampling/verify_rows_cuda.cuh"

namespace specdec {

constexpr int kMaxSplits = 16;

// Takes a ticket for the block; true for the last of `blocks`, which zeroes the counter. All threads get the answer.
__device__ __forceinline__ bool is_last_block(int32_t* counter, int32_t blocks, int32_t* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared[0] = planted(Bug::ticket_without_fence) ? atomicAdd(counter, 1) : ptx::atomic_add_acq_rel(counter, 1);
    if (shared[0] == blocks - 1 && !planted(Bug::counter_not_reset)) *counter = 0;
  }
  __syncthreads();
  const bool last = shared[0] == blocks - 1;
  __syncthreads();
  return last;
}

// The draft law of a residual, from the laws of its node.
__device__ __forceinline__ DraftView residual_view(const BlockVerify& p, int64_t b, const Draw& what,
                                                   const NodeLaws& laws) {
  DraftView draft{p, BlockRow{}, RowLaw{}};
  if (what.kind != DrawKind::residual) return draft;
  draft.row = p.draft_row(what.draft_row);
  draft.law = what.is_stored ? p.call.stored_law(b, what.draft_row) : laws.draft;
  return draft;
}

// Writes emitted tokens and their log-probabilities.
struct TokenWriter {
  const BlockVerify& p;
  const int64_t first;  // of the request's outputs

  __device__ __forceinline__ void write(int32_t at, int64_t n, const NodeLaws& laws, int32_t id) const {
    if (threadIdx.x != 0) return;
    const VerifyParams& call = p.call;
    call.output_token_ids[first + at] = id;
    if (call.logprobs == Logprobs::none) return;
    const int width = call.logprobs == Logprobs::both ? 2 : 1;
    float* out = call.logprobs_out + (first + at) * width;
    BlockRow row = p.target_row(n);
    if (call.is_processed()) {
      const RowLaw& law = laws.target.is_point ? laws.edited : laws.target;
      out[width - 1] = static_cast<float>(law.log_prob(clean_logit(edited_logit(row, id)), id));
    }
    if (call.is_raw()) {
      row.allowed = nullptr;
      row.num_bias = 0;
      *out = static_cast<float>(laws.raw.log_prob(clean_logit(edited_logit(row, id)), id));
    }
  }
};

// Draws the last token of a request from units [begin, end) of its row, by `kind` and `log_c`; by a race of its groups
// (raced) or token by token.
__device__ __forceinline__ Winner block_draw(const BlockVerify& p, int64_t b, const Kids& kids, const RowLaw& law,
                                             const DraftView& draft, const Draw& what, DrawKind kind, double log_c,
                                             const RowReader& reader, int32_t begin, int32_t end, bool raced,
                                             RowScratch& s) {
  const NoiseKey key{p.call.sampling.seed[b], p.call.sampling.position[b] + what.emitted, kPurposeEmit, 0};
  const auto log_weight = [&](int32_t id, float logit) -> double {
    if (kind == DrawKind::plain || kind == DrawKind::one_hot)
      return kind == DrawKind::one_hot && kids.has(id) ? kNegInf : static_cast<double>(law.scaled(logit));
    const double log_q = kind == DrawKind::residual ? draft.log_q(id) : id == what.drafted ? 0.0 : kNegInf;
    return log_residual(law.log_prob(logit, id), log_q, log_c) + law.log_mass;
  };
  return raced ? block_race(reader, begin, end, law, key, s, log_weight)
               : block_pick(reader, begin, end, law, key, s, log_weight);
}
// What is drawn from where nothing has weight: the residual before the latest rejection, then the target itself.
__device__ __forceinline__ bool fall_back(const Draw& what, DrawKind& kind, double& log_c, int attempt) {
  if (kind == DrawKind::plain) return false;
  if (attempt == 0 && what.has_last)
    log_c = what.last_log_c;
  else
    kind = DrawKind::plain;
  return true;
}

// The last token of a request by `what`, or kNotLast in a block that has only done its share. `splits` blocks share the
// row, the last of them by ticket has the answer; the winner does not depend on their number.
constexpr int32_t kNotLast = -2;
__device__ __forceinline__ int32_t block_last_token(const BlockVerify& p, int64_t b, const NodeSpan& span,
                                                    const NodeLaws& laws, const Draw& what, int32_t splits,
                                                    int32_t* ticket, int32_t& flags, RowScratch& s) {
  const RowLaw law = laws.target;
  const DraftView draft = residual_view(p, b, what, laws);
  const BlockRow row = p.target_row(span.begin + what.node);
  const RowReader reader(row);
  const Kids kids(p, b, span, what.node);
  const int32_t split = splits > 1 ? static_cast<int32_t>(blockIdx.y) : 0;
  const int32_t whole = kGroupBlock / reader.per_unit();  // a race takes whole blocks of groups
  const int32_t share = ((reader.units() + splits - 1) / splits + whole - 1) / whole * whole;
  int32_t begin = split * share, end = begin + share < reader.units() ? begin + share : reader.units();
  DrawKind kind = what.kind;
  double log_c = what.log_c;
#pragma unroll 1
  for (int attempt = 0;; attempt++) {
    const bool raced = kind != DrawKind::plain && !law.is_point;
    Winner winner = block_draw(p, b, kids, law, draft, what, kind, log_c, reader, begin, end, raced, s);
    if (attempt == 0 && splits > 1) {
      Winner* winners = p.winners + b * kMaxSplits;
      if (threadIdx.x == 0) winners[split] = winner;
      if (!is_last_block(p.tickets + 2 * b + 1, splits, ticket)) return kNotLast;
      if (static_cast<int32_t>(threadIdx.x) < splits) winner = winners[threadIdx.x];
      winner = block_winner(winner.id >= 0 ? winner.key : 0, winner.id, s);
      begin = 0, end = reader.units();
    }
    if (raced && winner.id < 0)  // undecided: on other noise, token by token
      winner = block_draw(p, b, kids, law, draft, what, kind, log_c, reader, begin, end, false, s);
    if (winner.id >= 0) return winner.id;
    if (!fall_back(what, kind, log_c, attempt)) return law.argmax;
    flags |= kFlagZeroResidual;
  }
}

}  // namespace specdec
