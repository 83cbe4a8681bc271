// draft_topk on the CPU: a row is read once, 1024 logits a step, with an online log-sum-exp and a running top-k.
//
//   weigh   the step's maximum, and its sum of exp((logit - reference) * tau). The reference is near the
//           largest logit so far; a step whose maximum lies 40 above it moves it, and is weighed again
//   above   only in steps that reach the bound, which is the k-th best logit so far; in the first step, the
//           k-th largest of 64 part maxima. Columns rise, so a later logit that equals the k-th best loses to it
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "../common/cpu.h"
#include "draft_topk.h"
#include "draft_topk_cpu.h"

namespace specdec {
namespace {

constexpr int32_t kStep = 1024, kParts = 64, kPeek = 256;
constexpr float kFar = 40.0f;  // exp(40) times 1024 is no danger to a float

using Candidate = std::pair<float, int32_t>;
bool before(const Candidate& a, const Candidate& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

const DraftTopkKernels& kernels() {
  const Isa level = isa();
  if (level >= Isa::avx512) return draft_topk_kernels_avx512();
  return level >= Isa::avx2 ? draft_topk_kernels_avx2() : draft_topk_kernels_scalar();
}

struct Row {
  DraftLogits logits;
  const uint32_t* existing;  // bit c: column c has a target id; null: all have

  DraftLogits from(int32_t c) const {
    const int64_t bytes = logits.type == DraftLogits::float32 ? 4 : 2;
    return {static_cast<const char*>(logits.data) + c * bytes, logits.type};
  }
  float one(int32_t c) const {
    const uint16_t* half = static_cast<const uint16_t*>(logits.data);
    if (logits.type == DraftLogits::float32) return static_cast<const float*>(logits.data)[c];
    return logits.type == DraftLogits::bfloat16 ? to_float(BFloat16{half[c]}) : to_float(Half{half[c]});
  }
  // As float32: NaN and columns that do not exist are -inf, +inf is the largest float.
  void clean(int32_t base, int32_t n, float* x) const {
    for (int32_t i = 0; i < n; i++) {
      const int32_t c = base + i;
      const bool exists = !existing || (existing[c >> 5] >> (c & 31) & 1u);
      const float logit = one(c);
      x[i] = exists && logit > -__builtin_huge_valf() ? std::min(logit, kInfLogit) : -__builtin_huge_valf();
    }
  }
};

// At most the k-th largest logit of x [kPeek]: the k-th largest maximum of 64 interleaved parts.
float bound_of_parts(const float* x, int32_t k) {
  if (k > kParts) return -kInfLogit;
  float parts[kParts];
  std::copy(x, x + kParts, parts);
  for (int32_t i = kParts; i < kPeek; i += kParts)
    for (int32_t j = 0; j < kParts; j++) parts[j] = x[i + j] > parts[j] ? x[i + j] : parts[j];
  std::nth_element(parts, parts + (k - 1), parts + kParts, std::greater<float>());
  return std::max(parts[k - 1], -kInfLogit);
}

struct RowSum {
  float top = -__builtin_huge_valf();        // the largest logit
  float reference = -__builtin_huge_valf();  // of the sum
  double sum = 0.0;

  double log_mass(float tau) const { return log(sum) - (static_cast<double>(top) - reference) * tau; }
};

// Leaves the k best (logit, column) in `best`, sorted.
RowSum read_row(const DraftTopkArgs& p, const Row& row, std::vector<Candidate>& best) {
  const DraftTopkKernels& loops = kernels();
  float x[kStep], values[kStep], bound = -kInfLogit;
  int32_t places[kStep];
  RowSum found;
  best.clear();
  for (int32_t base = 0; base < p.valid; base += kStep) {
    const int32_t n = std::min(kStep, p.valid - base);
    DraftLogits logits = row.from(base);
    if (row.existing) {
      row.clean(base, n, x);
      logits = {x, DraftLogits::float32};
    }
    DraftStep step = loops.weigh(logits, n, found.reference, p.tau * kLog2E);
    if (step.max > kInfLogit) {  // an infinity
      row.clean(base, n, x);
      logits = {x, DraftLogits::float32};
      step = loops.weigh(logits, n, found.reference, p.tau * kLog2E);
    }
    if (!(step.max >= -kInfLogit)) continue;  // nothing here
    if (!((step.max - found.reference) * p.tau <= kFar)) {
      if (found.sum > 0.0) found.sum *= exp((static_cast<double>(found.reference) - step.max) * p.tau);
      found.reference = step.max;
      step = loops.weigh(logits, n, found.reference, p.tau * kLog2E);
    }
    found.sum += step.sum;
    found.top = std::max(found.top, step.max);
    if (step.max < bound) continue;
    if (best.empty() && n >= kPeek) {
      row.clean(base, kPeek, x);
      bound = bound_of_parts(x, p.k);
    }
    const int32_t count = loops.above(logits, n, bound, values, places);
    for (int32_t i = 0; i < count; i++) best.emplace_back(values[i], base + places[i]);
    if (static_cast<int64_t>(best.size()) < p.k) continue;
    std::nth_element(best.begin(), best.begin() + (p.k - 1), best.end(), before);
    best.resize(p.k);
    bound = std::nextafter(best.back().first, __builtin_huge_valf());
  }
  std::sort(best.begin(), best.end(), before);
  return found;
}

// One bit a column that has a target id; empty if all have.
std::vector<uint32_t> existing_columns(const DraftTopkArgs& p) {
  std::vector<uint32_t> bits((p.valid + 31) / 32, 0);
  bool all = true;
  for (int32_t c = 0; p.d2t && c < p.valid; c++) {
    bits[c >> 5] |= static_cast<uint32_t>(p.exists(c)) << (c & 31);
    all &= p.exists(c);
  }
  return all ? std::vector<uint32_t>() : bits;
}

void draft_topk_cpu(const Tensor& logits, const std::optional<Tensor>& d2t, int64_t k, double temperature,
                    int64_t vocab_size, const Tensor& token_ids, const Tensor& log_probs, const Tensor& lse) {
  const DraftTopkArgs p = check_draft_topk(logits, d2t, k, temperature, vocab_size, token_ids, log_probs, lse);
  const std::vector<uint32_t> existing = existing_columns(p);
  const ScalarType dtype = logits.scalar_type();
  const auto type = dtype == ScalarType::Float      ? DraftLogits::float32
                    : dtype == ScalarType::BFloat16 ? DraftLogits::bfloat16
                                                    : DraftLogits::float16;
  const int64_t row_bytes = p.row_stride * static_cast<int64_t>(logits.element_size());
  torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<Candidate> best;
    for (int64_t r = begin; r < end; r++) {
      const Row row = {{static_cast<const char*>(p.logits) + r * row_bytes, type},
                       existing.empty() ? nullptr : existing.data()};
      const RowSum found = read_row(p, row, best);
      const double log_mass = found.log_mass(p.tau);
      p.lse[r] =
          best.empty() ? -__builtin_huge_valf() : static_cast<float>(static_cast<double>(found.top) * p.tau + log_mass);
      for (int64_t i = 0; i < p.k; i++) {
        const bool exists = i < static_cast<int64_t>(best.size());
        p.token_ids[r * p.k + i] = exists ? static_cast<int32_t>(p.target_id(best[i].second)) : -1;
        p.log_probs[r * p.k + i] =
            exists ? static_cast<float>(static_cast<double>((best[i].first - found.top) * p.tau) - log_mass)
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
