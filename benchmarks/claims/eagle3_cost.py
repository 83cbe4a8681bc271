"""Claim: EAGLE-3's draft cost of .05 reaches 3.2x.

What a draft cost of .05 gives on its own, at which acceptance 3.2x is reached, and how much of it a verification that
is not free takes away.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.claims.common import Claim
from specdec_kernels.advisor.speedup import StepCosts, acceptance_for, optimal_depth, speedup_chain


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("eagle3_cost", __doc__, argv)
    alphas = [0.6, 0.7, 0.75, 0.8, 0.834, 0.85, 0.9]
    costs = [0.02, 0.05, 0.1]
    claim.table(
        "speed-up of 5 drafts by acceptance and draft cost (verification free)",
        ["alpha", *(f"c = {cost}" for cost in costs)],
        [[alpha, *(speedup_chain(alpha, 5, StepCosts(cost)) for cost in costs)] for alpha in alphas],
    )
    verify = [1.0, 1.1, 1.2, 1.3]
    needed = {v: acceptance_for(3.2, 5, StepCosts(0.05, lambda n, v=v: v)) for v in verify}
    claim.table(
        "acceptance that 3.2x needs at c = .05, 5 drafts",
        ["cost of verifying 6 tokens", "acceptance", "speed-up at .7"],
        [
            [
                v,
                needed[v] if needed[v] is not None else "out of reach",
                speedup_chain(0.7, 5, StepCosts(0.05, lambda n, v=v: v)),
            ]
            for v in verify
        ],
    )
    best = optimal_depth(0.7, StepCosts(0.05), max_drafts=24)
    free = StepCosts(0.0)
    with claim.plot("Speed-up of 5 drafts against acceptance", "conditional acceptance", "speed-up") as axes:
        grid = [0.5 + 0.005 * i for i in range(100)]
        for cost in costs:
            axes.plot(grid, [speedup_chain(a, 5, StepCosts(cost)) for a in grid], label=f"draft cost {cost}")
        axes.axhline(3.2, color="#888888", lw=1, ls=":")
    at_seven = speedup_chain(0.7, 5, StepCosts(0.05))
    alpha = needed[1.0]
    assert alpha is not None
    return claim.conclude(
        says="a draft cost of .05 reaches 3.2x",
        so=f"the cost alone gives {at_seven:.2f}x at acceptance of .7 ({best[1]:.2f}x at its best depth {best[0]}; a "
        f"free draft {speedup_chain(0.7, 5, free):.2f}x); 3.2x needs an acceptance of {alpha:.3f}, and more where "
        "verification costs",
        figures={
            "speedup_at_0.7": at_seven,
            "acceptance_for_3.2": alpha,
            "free_draft_at_0.7": speedup_chain(0.7, 5, free),
            "acceptance_for_3.2_by_verify_cost": {str(v): a for v, a in needed.items()},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
