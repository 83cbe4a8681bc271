"""Claim: extreme ratios give NaN; clamp them to [eps, 1 - eps] or compare in the log domain. Three rules side by side.

A law drawn from q and verified against p must come out as p. For every rule the chain's acceptance a(x) and its
recovered law r are computed in the rule's own arithmetic, and the law that comes out, q a + (1 - sum q a) r, exactly
(float64) from them: total variation against p, mass on ids that p forbids, and rows with a NaN. Our op is also run:
emitted ids are counted. `spread` is the standard deviation of the logits; a third of p's ids are forbidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from benchmarks.claims.common import Claim

V = 512
EPS = 1e-4
SPREADS = (1, 3, 10, 30, 100, 300)
Rule = Callable[[Tensor, Tensor], tuple[np.ndarray, np.ndarray]]


def ratio_rule(dtype: torch.dtype, clamp: float = 0.0) -> Rule:
    """accept iff u < p / q on stored probabilities; residual max(p - q, 0) over its sum."""

    def rule(target: Tensor, draft: Tensor) -> tuple[np.ndarray, np.ndarray]:
        p, q = (x.float().softmax(-1).to(dtype) for x in (target, draft))
        accept = p / q
        accept = accept.clamp(clamp, 1 - clamp) if clamp else accept.clamp(max=1)
        residual = (p - q).clamp(min=0)
        return accept.double().numpy(), (residual / residual.sum()).double().numpy()

    return rule


def log_rule(target: Tensor, draft: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ours: log p - log q compared with log u; the residual by `residual_log_weights`, the target's law where empty."""
    logs = []
    for x in (target, draft):
        stats = sk.row_stats(x[None])
        logs.append((x - stats.max) - stats.log_sum)
    log_p, log_q = logs
    difference = torch.where(log_p == -torch.inf, -torch.inf, log_p - log_q).double().numpy()
    accept = np.exp(np.minimum(difference, 0.0))
    weights = np.exp(sk.residual_log_weights(log_p[None], log_q[None], torch.zeros(1))[0].double().numpy())
    total = weights.sum()
    return accept, weights / total if total > 0 else np.exp(log_p.double().numpy())


RULES: dict[str, Rule] = {
    "ratio float32": ratio_rule(torch.float32),
    "ratio float16": ratio_rule(torch.float16),
    f"clamp {EPS:g}": ratio_rule(torch.float32, EPS),
    "log domain": log_rule,
}


def rows(spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Target and draft logits: a drafter that agrees with the target up to noise; every fourth pair is identical."""
    random = torch.Generator().manual_seed(seed)
    target = torch.randn(V, generator=random) * spread
    draft = target if seed % 4 == 0 else target + torch.randn(V, generator=random) * spread * 0.3
    target = target.clone()
    if seed % 4:
        target[torch.rand(V, generator=random) < 1 / 3] = -torch.inf
    return target, draft


def outcome(rule: Rule, target: Tensor, draft: Tensor) -> tuple[float, float, bool]:
    """(total variation, mass on forbidden ids, NaN seen) of the law that comes out."""
    p = target.double().softmax(-1).numpy()
    q = draft.double().softmax(-1).numpy()
    with np.errstate(all="ignore"):
        accept, recovered = rule(target, draft)
    drawn = q > 1e-30  # ids that can be drafted at all
    rejected = q @ np.where(drawn, 1 - np.nan_to_num(accept, nan=0.0), 0)  # a NaN comparison rejects
    seen = bool(np.isnan(accept[drawn]).any() or (np.isnan(recovered).any() and rejected > 1e-30))
    if np.isnan(recovered).any():
        recovered = np.zeros_like(p)  # nothing can be drawn from it: that mass is lost
    law = q * np.nan_to_num(accept, nan=0.0) + rejected * recovered
    return float(np.abs(law - p).sum() / 2), float(law[p == 0].sum()), seen


def emitted_by_op(target: Tensor, draft: Tensor, trials: int) -> tuple[int, int]:
    """Trials of `verify` on the pair: (ids that the target forbids, ids out of range)."""
    sampling = sk.Sampling.of(trials, seed=list(range(trials)))
    index = torch.arange(trials, dtype=torch.int32)
    drafted = sk.draft_sample(
        draft.expand(trials, V), 1, sampling, row_requests=index, row_positions=torch.zeros(trials, dtype=torch.int64)
    )
    ids = torch.stack([torch.zeros(trials, dtype=torch.int32), drafted.token_ids[:, 0]], 1).view(-1).contiguous()
    ones = torch.ones(trials, dtype=torch.int32)
    tree = sk.chain_tree(ones, torch.zeros_like(ones), total_nodes=2 * trials, max_nodes=2)
    out = sk.verify(
        target.expand(2 * trials, V), ids, tree, sampling, method="rejection", draft_logits=draft.expand(trials, V)
    )
    first = out.output_token_ids[:, 0].long()
    outside = int(((first < 0) | (first >= V)).sum())
    return int((target[first.clamp(0, V - 1)] == -torch.inf).sum()), outside


def measure(pairs: int, trials: int) -> list[dict[str, float | str | int]]:
    table: list[dict[str, float | str | int]] = []
    for spread in SPREADS:
        for name, rule in RULES.items():
            found = [outcome(rule, *rows(spread, seed)) for seed in range(pairs)]
            variation = [f[0] for f in found]
            table.append(
                dict(
                    spread=spread,
                    rule=name,
                    nan_rows=sum(f[2] for f in found),
                    rows=pairs,
                    forbidden_mass=max(f[1] for f in found),
                    median_variation=float(np.median(variation)),
                    max_variation=max(variation),
                )
            )
        forbidden = outside = 0
        for seed in range(4):
            a, b = emitted_by_op(*rows(spread, seed), trials)
            forbidden, outside = forbidden + a, outside + b
        table[-1] |= dict(op_trials=4 * trials, op_forbidden=forbidden, op_out_of_range=outside)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("stability", __doc__, argv)
    found = measure(8 if claim.quick else 64, 1000 if claim.quick else 25_000)
    claim.table(
        "by spread of the logits: what comes out against the target's law",
        ["spread", "rule", "rows with a NaN", "of", "forbidden mass", "variation, median", "variation, worst"],
        [
            [
                row["spread"], row["rule"], row["nan_rows"], row["rows"],
                *(f"{row[name]:.2e}" for name in ("forbidden_mass", "median_variation", "max_variation")),
            ]
            for row in found
        ],
    )  # fmt: skip
    with claim.plot(
        "Bias by spread of the logits", "standard deviation of the logits", "total variation, worst row"
    ) as axes:
        for name in RULES:
            mine = [row for row in found if row["rule"] == name]
            axes.loglog(
                [row["spread"] for row in mine],
                [max(float(row["max_variation"]), 1e-12) for row in mine],
                "o-",
                label=name,
            )
    rules = {
        name: {
            "nan_rows": sum(int(row["nan_rows"]) for row in found if row["rule"] == name),
            "forbidden_mass": max(float(row["forbidden_mass"]) for row in found if row["rule"] == name),
            "max_variation": max(float(row["max_variation"]) for row in found if row["rule"] == name),
        }
        for name in RULES
    }
    clamp, ours = (next(rules[name] for name in RULES if word in name) for word in ("clamp", "log"))
    ran = [row for row in found if "op_trials" in row]
    op = {name: sum(int(row[f"op_{name}"]) for row in ran) for name in ("trials", "forbidden", "out_of_range")}
    return claim.conclude(
        says="extreme ratios give NaN: clamp to [eps, 1 - eps], or the log domain",
        so=f"clamped: {clamp['nan_rows']} rows with NaN, {clamp['forbidden_mass']:.1e} of mass on forbidden ids; "
        f"in the log domain {ours['nan_rows']} NaN rows, variation at most {ours['max_variation']:.1e}; "
        f"the op emitted {op['forbidden']} forbidden ids in {op['trials']} trials",
        figures={"rules": rules, "op": op},
    )


if __name__ == "__main__":
    sys.exit(main())
