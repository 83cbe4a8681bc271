"""Claim: 3.5 drafts are accepted a step at 70 % acceptance and 5 drafts.

That is g * alpha: it counts drafts behind a rejection as if they had been accepted. Shown for other depths and rates
too, with a simulation that never looks behind a rejection.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.claims.common import Claim
from specdec_kernels.advisor.speedup import StepCosts, expected_emitted, printed_accepted_length, speedup_chain


def simulate(rng: np.random.Generator, alpha: float, num_drafts: int, steps: int) -> np.ndarray:
    """Accepted drafts of each step."""
    return np.cumprod(rng.random((steps, num_drafts)) < alpha, axis=1).sum(axis=1).astype(float)


def acceptance_for_drafts(accepted: float, num_drafts: int) -> float:
    """The conditional acceptance at which `accepted` of num_drafts are accepted on average (bisection)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_emitted(middle, num_drafts) - 1 < accepted else (low, middle)
    return high


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("accepted_length", __doc__, argv)
    rng, steps = np.random.default_rng(0), 20_000 if claim.quick else 400_000
    rows, simulated = [], {}
    for alpha in (0.5, 0.6, 0.7, 0.8, 0.9):
        for num_drafts in (3, 5, 8):
            drawn = simulate(rng, alpha, num_drafts, steps)
            simulated[alpha, num_drafts] = float(drawn.mean()), float(drawn.std() / np.sqrt(steps))
            right = expected_emitted(alpha, num_drafts)
            printed = printed_accepted_length(alpha, num_drafts)
            rows.append(
                [
                    alpha,
                    num_drafts,
                    printed,
                    right - 1,
                    *simulated[alpha, num_drafts],
                    right,
                    f"{printed / (right - 1) - 1:+.0%}",
                ]
            )
    columns = ["alpha", "drafts", "g * alpha", "accepted drafts", "simulated", "std. error", "tokens a step", "error"]
    claim.table(f"accepted drafts a step, {steps} simulated steps", columns, rows)
    right, (mean, error) = expected_emitted(0.7, 5) - 1, simulated[0.7, 5]
    needed = acceptance_for_drafts(3.5, 5)
    with claim.plot("Accepted drafts a step against number of drafts", "drafts", "accepted drafts a step") as axes:
        depths = range(1, 13)
        for index, alpha in enumerate((0.6, 0.7, 0.8)):
            line = axes.plot(depths, [expected_emitted(alpha, k) - 1 for k in depths], label=f"alpha {alpha}")
            axes.plot(depths, [alpha * k for k in depths], ":", color=line[0].get_color() if line else None,
                      label="g * alpha" if index == 0 else None)  # fmt: skip
        axes.set_ylim(0, 6)
    return claim.conclude(
        says="3.5 drafts are accepted at 70 % and 5 drafts",
        so=f"{right:.2f} drafts, {right + 1:.2f} tokens a step (simulated {mean:.3f} +- {error:.3f} drafts); 3.5 needs "
        f"an acceptance of {needed:.3f}, which would be {speedup_chain(needed, 5, StepCosts(0.1)):.1f}x at cost .1",
        figures={"printed": 3.5, "right": right, "simulated": mean, "std_error": error, "acceptance_for_3.5": needed},
    )


if __name__ == "__main__":
    sys.exit(main())
