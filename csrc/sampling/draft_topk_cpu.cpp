// draft_topk on the CPU: a row is read once, tile by tile, with an online log-sum-exp and a running top-k.
//
//   peek     the tile's maximum and those of its parts (64 logits each); out of memory, the rest finds it in L1
//   mass     exp of the distances to the largest logit so far; a larger one rescales the sum
//   gather   logits that may be among the k best: the bound is the k-th best so far; in the first tile, the k-th part
//            maximum. Columns rise, so a later logit that equals the k-th best loses to it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "draft_topk.h"
#include "rows_cpu.h"

namespace specdec {
namespace {

bool before(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

// The k-th largest of the parts' maxima is at most the k-th largest logit of the tile.
float bound_of_parts(std::vector<float>& parts, int32_t n, int32_t k) {
  const int32_t count = (n + kPeekStep - 1) / kPeekStep * row_kernels().lanes;
  if (k > count) return -kInfLogit;
  std::nth_element(parts.begin(), parts.begin() + (k - 1), parts.begin() + count, std::greater<float>());
  return std::max(parts[k - 1], -kInfLogit);
}

struct RowSummary {
  float top = -__builtin_huge_valf();  // the largest logit
  double mass = 0.0;                   // sum of exp((logit - top) * tau)
};

// Leaves the k best (logit, column) in work.candidates, sorted.
RowSummary read_row(const DraftTopkArgs& p, Row row, Scratch& work) {
  const RowKernels& kernels = row_kernels();
  auto& best = work.candidates;
  best.clear();
  work.group_max.assign(kTileLogits / kPeekStep * kernels.lanes, -__builtin_huge_valf());
  work.list_logits.resize(kTileLogits + kGroup);
  work.list_ids.resize(kTileLogits + kGroup);
  RowSummary sum;
  float bound = -kInfLogit;
  for (int32_t base = 0; base < row.size; base += kTileLogits) {
    const int32_t n = std::min(kTileLogits, row.size - base);
    float *x = work.tile, *parts = work.group_max.data(), tile_max, unused;
    row.is_clean = kernels.peek(row.data, row.type, base, n, &tile_max, parts) == 0;
    load_tile(row, base, x);
    if (!row.is_clean || row.is_edited()) kernels.peek(x, LogitType::float32, 0, n, &tile_max, parts);
    if (!(tile_max >= -kInfLogit)) continue;
    if (tile_max > sum.top) {
      sum.mass *= sum.mass > 0.0 ? exp((static_cast<double>(sum.top) - tile_max) * p.tau) : 0.0;
      sum.top = tile_max;
    }
    const uint64_t mass = kernels.mass(x, n, sum.top, p.tau, -__builtin_huge_valf(), &unused);
    sum.mass += static_cast<double>(mass) / kMassScale;
    if (tile_max < bound) continue;
    const float low = best.empty() ? std::max(bound, bound_of_parts(work.group_max, n, p.k)) : bound;
    const int32_t found = kernels.gather(x, n, base, low, kInfLogit, work.list_logits.data(), work.list_ids.data());
    for (int32_t i = 0; i < found; i++) best.emplace_back(work.list_logits[i], work.list_ids[i]);
    if (static_cast<int64_t>(best.size()) < p.k) continue;
    std::nth_element(best.begin(), best.begin() + (p.k - 1), best.end(), before);
    best.resize(p.k);
    bound = std::nextafter(best.back().first, __builtin_huge_valf());
  }
  std::sort(best.begin(), best.end(), before);
  return sum;
}

void draft_topk_cpu(const Tensor& logits, const std::optional<Tensor>& d2t, int64_t k, double temperature,
                    int64_t vocab_size, const Tensor& token_ids, const Tensor& log_probs, const Tensor& lse) {
  const DraftTopkArgs p = check_draft_topk(logits, d2t, k, temperature, vocab_size, token_ids, log_probs, lse);
  RowSource rows = make_rows("draft_topk", "logits", logits, kMaxVocab, {}, {}, {}, {});
  rows.valid = p.valid;
  std::vector<uint32_t> existing;  // columns with a target id, a bit each
  if (p.d2t) {
    existing.assign((rows.columns + 31) / 32, 0);
    for (int32_t c = 0; c < p.valid; c++) existing[c >> 5] |= static_cast<uint32_t>(p.exists(c)) << (c & 31);
    rows.allowed = existing.data();
  }
  torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    for (int64_t r = begin; r < end; r++) {
      const RowSummary sum = read_row(p, rows.row(r), work);
      const double log_mass = log(sum.mass);
      const int64_t found = static_cast<int64_t>(work.candidates.size());
      p.lse[r] = static_cast<float>(static_cast<double>(sum.top) * p.tau + log_mass);
      for (int64_t i = 0; i < p.k; i++) {
        const bool exists = i < found;
        p.token_ids[r * p.k + i] = exists ? static_cast<int32_t>(p.target_id(work.candidates[i].second)) : -1;
        p.log_probs[r * p.k + i] =
            exists ? static_cast<float>(static_cast<double>((work.candidates[i].first - sum.top) * p.tau) - log_mass)
                   : -__builtin_huge_valf();
      }
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("draft_topk", TORCH_BOX(&specdec::draft_topk_cpu));
}
