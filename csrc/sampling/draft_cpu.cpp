// draft_sample: what a drafter draws after one node, from one row of its logits.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "args_cpu.h"
#include "draft_args.h"
#include "pick_cpu.h"
#include "select_cpu.h"

namespace specdec {
namespace {

// Columns whose target id lies in [0, vocab_size), as bits of an `allowed` row.
std::vector<uint32_t> columns_with_ids(const DraftSampleArgs& args) {
  std::vector<uint32_t> bits((args.rows.columns + 31) / 32, 0);
  for (int32_t c = 0; c < args.rows.valid; c++) {
    const int64_t id = static_cast<int64_t>(c) + args.d2t[c];
    if (id >= 0 && id < args.vocab_size) bits[c >> 5] |= 1u << (c & 31);
  }
  return bits;
}

// Gumbel top-k: the k largest perturbed scores in descending order are k draws without replacement.
void draw_siblings(const DraftSampleArgs& draft, Row row, const RowLaw& law, const NoiseKey& key, Scratch& work,
                   std::vector<std::pair<double, int32_t>>& best) {
  const int32_t k = draft.k;
  best.clear();
  row.is_clean = law.is_clean();
  auto offer = [&](int32_t c, float logit, uint32_t word, int32_t token) {
    if (!(logit >= -kInfLogit) || !law.keeps(logit, c)) return;
    std::pair<double, int32_t> entry{law.scaled(logit) + gumbel(key, static_cast<uint32_t>(token), word), c};
    auto after = [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    if (static_cast<int32_t>(best.size()) == k && !after(entry, best.back())) return;
    best.insert(std::upper_bound(best.begin(), best.end(), entry, after), entry);
    if (static_cast<int32_t>(best.size()) > k) best.pop_back();
  };
  if (draft.coupled && draft.d2t) {  // noise of the target's ids: no runs of four in draft order
    for (int32_t base = 0; base < row.size; base += kTileLogits) {
      int32_t n = load_tile(row, base, work.tile);
      for (int32_t i = 0; i < n; i++) {
        if (!(work.tile[i] >= -kInfLogit)) continue;
        int32_t token = draft.target_id(base + i);
        Philox words = draw(key.seed, key.position, key.purpose, static_cast<uint32_t>(token) >> 2, key.salt);
        offer(base + i, work.tile[i], words.word[token & 3], token);
      }
    }
    return;
  }
  ScanArgs args{law.max, law.rate, 0.0f, 0.0f, PhiloxKeys(key)};
  Scanner scan(law);
  for_scan_steps(row, 0, row.size, work, [&](const Span& span) {
    aim(args, law, static_cast<int32_t>(best.size()) == k ? best.back().first : kNegInf);
    int32_t count = scan(span, args, work);
    for (int32_t h = 0; h < count; h++) offer(work.hits[h].id, work.hits[h].logit, work.hits[h].word, work.hits[h].id);
  });
}

void draft_sample_cpu(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                      const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                      const Tensor& position, const std::optional<Tensor>& step, const Tensor& row_requests,
                      const Tensor& row_positions, const std::optional<Tensor>& row_paths,
                      const std::optional<Tensor>& d2t, int64_t k, bool coupled, int64_t vocab_size,
                      const Tensor& token_ids, const Tensor& log_probs, const Tensor& lse) {
  DraftSampleArgs args =
      check_draft_sample(logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, row_positions,
                         row_paths, d2t, k, coupled, vocab_size, token_ids, log_probs, lse);
  std::vector<uint32_t> existing;
  if (d2t) existing = columns_with_ids(args), args.rows.allowed = existing.data();  // the same bits for every row
  torch::stable::parallel_for(0, args.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    Scratch& work = scratch();
    std::vector<std::pair<double, int32_t>> best;
    for (int64_t r = begin; r < end; r++) {
      int32_t* ids = args.token_ids + r * k;
      float* logs = args.log_probs + r * k;
      std::fill_n(ids, k, -1);
      std::fill_n(logs, k, -__builtin_huge_valf());
      args.lse[r] = 0.0f;
      int64_t b = args.requests[r];
      if (b < 0 || b >= args.sampling.count) continue;
      Row row = args.rows.row(r);
      RowLaw law = row_law(row, args.sampling.filters(b), work);
      if (law.is_point) {
        if (law.is_empty) continue;
        *ids = args.target_id(law.argmax);
        *logs = 0.0f;
        continue;
      }
      args.lse[r] = law_lse(law);
      draw_siblings(args, row, law, args.key(r, b), work, best);
      for (size_t i = 0; i < best.size(); i++) {
        ids[i] = args.target_id(best[i].second);
        logs[i] = static_cast<float>(law.log_prob(load_logit(row, best[i].second), best[i].second));
      }
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("draft_sample", TORCH_BOX(&specdec::draft_sample_cpu));
}
