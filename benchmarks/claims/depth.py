"""Claim: drafting 4 to 6 deep adds 0.8 tokens a step for 18 % cost and is best above 70 % acceptance.

Tokens gained by going from 4 to 6 drafts, the speed-up before and after at the text's own extra cost, and the best
depth at several draft costs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.claims.common import Claim
from specdec_kernels.advisor.speedup import StepCosts, expected_emitted, optimal_depth, speedup_chain

ALPHAS = [0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]


def gain(alpha: float) -> float:
    """Tokens a step that drafts 5 and 6 add."""
    return expected_emitted(alpha, 6) - expected_emitted(alpha, 4)


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("depth", __doc__, argv)
    same, dearer = StepCosts(0.1), StepCosts(0.1, overhead=0.18)  # the text's 18 %, taken as 18 % of a plain step
    rows = []
    for alpha in ALPHAS:
        four, six, paid = speedup_chain(alpha, 4, same), speedup_chain(alpha, 6, same), speedup_chain(alpha, 6, dearer)
        best = optimal_depth(alpha, same, max_drafts=24)
        rows.append([alpha, gain(alpha), four, six, paid, *best])
    columns = ["alpha", "tokens gained 4 to 6", "speed-up at 4", "at 6", "at 6, +18 %", "best depth", "its speed-up"]
    claim.table("depth of a chain, draft cost .1", columns, rows)
    costs = [0.02, 0.05, 0.1, 0.2]
    depths = {cost: [optimal_depth(alpha, StepCosts(cost), max_drafts=24)[0] for alpha in ALPHAS] for cost in costs}
    claim.table(
        "best depth by draft cost (verification free)",
        ["alpha", *(f"c = {cost}" for cost in costs)],
        [[alpha, *(depths[cost][i] for cost in costs)] for i, alpha in enumerate(ALPHAS)],
    )
    low, high = 0.5, 0.99
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 0.8 else (low, middle)
    with claim.plot("Speed-up against depth (draft cost .1)", "drafts", "speed-up") as axes:
        for alpha in (0.6, 0.7, 0.8, 0.85):
            axes.plot(range(13), [speedup_chain(alpha, k, same) for k in range(13)], "o-", ms=3, label=f"alpha {alpha}")
        axes.axvspan(4, 6, color="#eeeeee", zorder=0)
    at = ALPHAS.index(0.7)
    return claim.conclude(
        says="4 to 6 deep adds .8 tokens for 18 % cost and is best above 70 %",
        so=f"at .7 it adds {gain(0.7):.2f} and, at the text's cost, lowers speed from {rows[at][2]:.2f}x to "
        f"{rows[at][4]:.2f}x; .8 tokens need an acceptance of {high:.2f}; the best depth at .7 is {rows[at][5]} (.85: "
        f"{rows[ALPHAS.index(0.85)][5]}), and moves from {depths[0.2][at]} to {depths[0.02][at]} with draft cost .2 to "
        ".02",
        figures={
            "gain_at_0.7": gain(0.7),
            "gain_at_0.8": gain(0.8),
            "gain_at_0.85": gain(0.85),
            "speedup_4_at_0.7": rows[at][2],
            "speedup_6_dearer_at_0.7": rows[at][4],
            "acceptance_for_0.8_tokens": high,
            "best_depth": {str(alpha): row[5] for alpha, row in zip(ALPHAS, rows)},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
