// The acceptance rules, once, for every backend. p: the target's law, q: the law the draft was drawn from.
// Proofs: docs/numerics.md. Sources: Leviathan et al. 2211.17192 (chain), Miao et al. 2305.09781 and Chen et al.
// 2402.12374 (siblings), Sun et al. 2403.10444 (block), Cai et al. 2401.10774 (typical).
#pragma once
#include "law.h"

namespace specdec {

// log(1 - exp(d)), d <= 0, without cancellation (Maechler 2012): -inf at d = 0.
SPECDEC_HD double log_one_minus_exp(double d) {
  return d > -0.6931471805599453 ? log(-expm1(d)) : log1p(-exp(d));
}

// log max(p - c q, 0): never NaN; -inf where the residual has no mass.
SPECDEC_HD double log_residual(double log_p, double log_q, double log_c) {
  if (log_p == kNegInf) return kNegInf;
  double d = log_c + log_q - log_p;
  if (!(d > kNegInf)) return log_p;  // c q = 0, or q unreadable
  return d >= 0.0 ? kNegInf : log_p + log_one_minus_exp(d);
}

// u < ratio, where ratio >= 1 always accepts and ratio 0 never does, also at u = 0.
SPECDEC_HD bool accepts(double log_ratio, double log_u) {
  if (!(log_ratio > kNegInf)) return false;
  return log_ratio >= 0.0 || log_u < log_ratio;
}

// Siblings drawn from q without replacement, tried in draw order. The whole residual after any number of rejections is
// max(p - c q, 0) / Z: one scalar c instead of a V-sized row. W is the mass of q not yet drawn.
struct SiblingState {
  double c = 0.0, Z = 1.0, W = 1.0;

  SPECDEC_HD double log_c() const { return c > 0.0 ? log(c) : kNegInf; }
  SPECDEC_HD double log_ratio(double log_p, double log_q) const {
    if (!(log_q > kNegInf)) return kNegInf;
    if (c == 0.0) return log_p - log_q;  // the chain rule, its difference formed first: p == q gives exactly 0
    return log_residual(log_p, log_q, log(c)) - log(Z) + log(W) - log_q;
  }
  SPECDEC_HD void reject_scale() { c += Z / W; }  // then Z must become sum max(p - c q, 0) before the next trial
  SPECDEC_HD void reject_draw(double log_q) {
    if (log_q > kNegInf) W -= exp(log_q);
  }
  SPECDEC_HD bool exhausted() const { return W <= 1e-12; }  // all of q was tried
};

// Block verification: log rho_i = min(0, log rho_{i-1} + log p - log q).
SPECDEC_HD double block_log_rho(double log_rho, double log_p, double log_q) {
  double next = log_rho + log_p - log_q;
  if (!(log_q > kNegInf) || !(next > kNegInf)) return kNegInf;
  return next < 0.0 ? next : 0.0;
}
// Chance that position i (before the last) is where the chain is cut: Z / (Z + 1 - rho).
SPECDEC_HD double block_chance(double log_rho, double Z) {
  if (!(log_rho > kNegInf)) return 0.0;
  double missing = -expm1(log_rho);
  return missing == 0.0 ? 1.0 : Z / (Z + missing);
}

// Medusa's bar: a draft passes iff p > min(epsilon, delta exp(-entropy)). Lossy.
SPECDEC_HD bool typical_accepts(double log_p, double entropy, double epsilon, double delta) {
  double bar = delta * exp(-entropy);
  return exp(log_p) > (bar < epsilon ? bar : epsilon);
}

}  // namespace specdec
