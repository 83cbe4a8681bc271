"""Claim: acceptance must be token-weighted, because long requests differ from short ones.

On long-tailed traces every request has an acceptance of its own. The first half of each trace is what a gauge sees;
the second half is what then happens. Shown: the speed-up predicted from request-weighted and from token-weighted
figures, and the one realised.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.claims.common import Claim
from specdec_kernels.advisor.acceptance import AcceptanceLog, StepRecord
from specdec_kernels.advisor.speedup import StepCosts, emitted_over_requests, expected_emitted

NUM_DRAFTS, COSTS = 5, StepCosts(0.1)
STEP = COSTS.step(NUM_DRAFTS, NUM_DRAFTS + 1)


def traces(rng: np.random.Generator, count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (acceptance, tokens) of each request. Two classes: 90 % of 20 tokens at .85, 10 % of 2000 at .6; the
    others have log-normal lengths."""
    short = rng.random(count) < 0.9
    tokens = np.clip(rng.lognormal(4.0, 1.4, count), 4, 4000).astype(int)
    rank = tokens.argsort().argsort() / count
    return {
        "two classes": (np.where(short, 0.85, 0.6), np.where(short, 20, 2000)),
        "longer accepts less": (0.9 - 0.4 * rank + rng.normal(0, 0.02, count), tokens),
        "longer accepts more": (0.5 + 0.4 * rank + rng.normal(0, 0.02, count), tokens),
        "control: one alpha": (np.full(count, 0.7), tokens),
    }


def run(rng: np.random.Generator, alphas: np.ndarray, tokens: np.ndarray) -> AcceptanceLog:
    """Serve every request: chain steps until its tokens are out; the last block is cut."""
    log = AcceptanceLog()
    for request, (alpha, left) in enumerate(zip(alphas, tokens.tolist())):
        while left > 0:
            accepted = np.cumprod(rng.random((64, NUM_DRAFTS)) < alpha, axis=1).sum(axis=1).tolist()
            for count in accepted:
                log.add(StepRecord(request, NUM_DRAFTS, count, min(count + 1, left)))
                left -= count + 1
                if left <= 0:
                    break
    return log


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("weighting", __doc__, argv)
    rng = np.random.default_rng(0)
    count = 200 if claim.quick else 3000
    rows, figures = [], {}
    for name, (alphas, tokens) in traces(rng, 2 * count).items():
        seen, after = run(rng, alphas[:count], tokens[:count]), run(rng, alphas[count:], tokens[count:])
        requests = seen.by_request().values()
        by_request = float(np.nanmean([c.conditional_acceptance for c in requests]))
        estimate = seen.estimate()
        length = estimate.accepted_length
        realised = after.estimate(num_resamples=1).counts.accepted_length / STEP
        wrong = expected_emitted(by_request, NUM_DRAFTS) / STEP
        right = length.value / STEP
        model = emitted_over_requests(alphas[count:].tolist(), tokens[count:].tolist(), NUM_DRAFTS) / STEP
        interval = f"{length.low / STEP:.2f}..{length.high / STEP:.2f}"
        errors = [f"{wrong / realised - 1:+.0%}", f"{right / realised - 1:+.1%}"]
        alpha = estimate.conditional_acceptance.value
        rows.append([name, by_request, alpha, wrong, right, interval, realised, model, *errors])
        figures[name] = {
            "request_weighted_acceptance": by_request,
            "token_weighted_acceptance": estimate.conditional_acceptance.value,
            "predicted_from_requests": wrong,
            "predicted_from_tokens": right,
            "interval": [length.low / STEP, length.high / STEP],
            "realised": realised,
        }
    columns = ["trace", "mean alpha", "alpha", "from mean", "ours", "95 %", "real", "model", "mean off", "ours off"]
    claim.table(f"speed-up of 5 drafts at cost .1, predicted from {count} requests for the next {count}", columns, rows)
    with claim.plot("Predicted over realised speed-up", "trace", "predicted / realised") as axes:
        at = np.arange(len(rows))
        axes.bar(at - 0.2, [row[3] / row[6] for row in rows], 0.38, label="request-weighted")
        axes.bar(at + 0.2, [row[4] / row[6] for row in rows], 0.38, label="token-weighted")
        axes.axhline(1.0, color="#888888", lw=1)
        axes.set_xticks(at, [row[0] for row in rows], fontsize=9)
    first, same = rows[0], rows[-1]
    off = {kind: abs(first[at] / first[6] - 1) for kind, at in (("requests", 3), ("tokens", 4))}
    return claim.conclude(
        says="acceptance must be token-weighted",
        so=f"{'yes' if off['tokens'] < off['requests'] / 2 else 'no'}: on the long-tailed trace the request mean "
        f"{first[1]:.2f} predicts {first[3]:.2f}x where {first[6]:.2f}x comes out ({first[8]}); token-weighted "
        f"tokens a step predict {first[4]:.2f}x ({first[9]}); with one acceptance "
        f"for all they are {same[8]} and {same[9]} off",
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
