// The draft row behind a node's sampled children: the law they were drawn from, in target ids.
#pragma once
#include <algorithm>

#include "verify_cpu.h"

namespace specdec {

class DraftRow {
 public:
  DraftRow(const VerifyParams& params, int64_t b, const LawSlot* laws, Scratch& work)
      : p_(params), b_(b), laws_(laws), work_(work) {}

  // Opens the draft row of the current children. With the stored log-sum-exp and no filters it is not read here.
  // Returns its flags.
  int32_t open(int32_t row, bool whole, const void* next) {
    row_ = p_.draft.row(row);
    if (p_.has_stored_law(b_, row, whole)) {
      law_ = p_.stored_law(b_, row);
      return 0;
    }
    law_ = laws_[row].owner == b_ ? laws_[row].law : draft_law_of(p_, b_, row, work_, next);
    row_.is_clean = law_.is_clean();
    return law_.flags & (kFlagNanLogit | kFlagInfLogit | kFlagParameter);
  }
  double log_q(int32_t id) const {
    int32_t c = id >= 0 && id < p_.target.valid ? column(id) : -1;
    if (c < 0 || law_.is_empty) return kNegInf;
    return law_.log_prob(load_logit(row_, c), c);
  }

  // sum over the vocabulary of max(p - c q, 0)
  double residual_mass(Row row, const RowLaw& law, double c) {
    row.is_clean = law.is_clean();
    if (law_.is_empty) return 1.0;
    if (law_.is_point) {  // q is one-hot
      int32_t only = -1;
      for (int32_t id = 0; id < row.size && only < 0; id++)
        if (column(id) == law_.argmax) only = id;
      double p = only < 0 ? 0.0 : exp(law.log_prob(load_logit(row, only), only));
      return 1.0 - std::min(c, p);
    }
    float a = static_cast<float>(kMassScale / static_cast<double>(law.mass));
    float b = static_cast<float>(c * (kMassScale / static_cast<double>(law_.mass)));
    uint64_t sum = 0;
    for (int32_t base = 0; base < row.size; base += kTileLogits) {
      int32_t n = load_tile(row, base, work_.tile);
      drop_unkept(law, base, n, work_.tile);
      load_draft_tile(base, n);
      sum += row_kernels().residual(work_.tile, work_.other, n, weights_of(law), weights_of(law_), a, b);
    }
    return static_cast<double>(sum) / kResidualScale;
  }

 private:
  int32_t column(int32_t id) const {
    int32_t c = p_.column_of ? p_.column_of[id] : id;
    return c >= 0 && c < p_.draft.valid ? c : -1;
  }

  // Draft logits of target ids [base, base + n) into work_.other, filtered; ids without a draft column are -inf.
  void load_draft_tile(int32_t base, int32_t n) {
    float* y = work_.other;
    int32_t got = 0;
    if (p_.column_of) {
      for (; got < n; got++) {
        int32_t c = column(base + got);
        float logit = c < 0 ? -__builtin_huge_valf() : load_logit(row_, c);
        y[got] = c >= 0 && law_.keeps(logit, c) ? logit : -__builtin_huge_valf();
      }
    } else if (base < row_.size) {
      got = std::min(n, load_tile(row_, base, y));
      drop_unkept(law_, base, got, y);
    }
    for (; got < (n + kGroup - 1) / kGroup * kGroup; got++) y[got] = -__builtin_huge_valf();
  }

  const VerifyParams& p_;
  const int64_t b_;
  const LawSlot* laws_;
  Scratch& work_;
  Row row_;
  RowLaw law_;
};

}  // namespace specdec
