"""What the simulated claims and their test share: the load, the errors given to the policy, one batch size's sweep.

The machine is a roofline of one H200 with an 8B model and an EAGLE-3-class head (`engine.simulate.h200`): a model, not
a measurement. Truth and belief differ: see `ERRORS` and `drifting`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specdec_kernels.engine.estimates import AcceptanceTable
from specdec_kernels.engine.policy import DraftCosts, FixedDrafts, GoodputPolicy
from specdec_kernels.engine.simulate import Machine, Simulation, TraceRequest, h200, simulate

MAX_DEPTH = 8
# Factors on what the policy is told: (base, per_node, drafting, acceptance). Each is a fifth off, in the combinations
# that mislead most: drafts look cheap and good, dear and bad, and the two that pull in opposite directions.
ERRORS = {
    "drafts look cheap and good": (1.2, 0.8, 0.8, 1.2),
    "drafts look dear and bad": (0.8, 1.2, 1.2, 0.8),
    "nodes look cheap, drafts bad": (1.2, 0.8, 1.2, 0.8),
    "nodes look dear, drafts good": (0.8, 1.2, 0.8, 1.2),
}


def load(count: int, seed: int = 0, *, rate: float | None = None, swing: float = 0.2) -> list[TraceRequest]:
    """Requests of mixed difficulty (mean acceptance 2/3) and long-tailed length, each drifting by `swing` along its
    output. rate: Poisson arrivals a second; None: all at once (a full batch)."""
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(count) if rate is None else rng.exponential(1 / rate, count).cumsum()
    levels = rng.beta(6, 3, count).clip(0.05, 0.97)
    prompts, outputs = rng.integers(64, 512, count), rng.lognormal(5.0, 0.6, count).clip(32, 600).astype(int)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), levels.tolist())
    return [TraceRequest(arrival, prompt, output, [level], swing) for arrival, prompt, output, level in rows]


def drifting(machine: Machine, period: float) -> Machine:
    """Base and per-node cost move by a fifth in opposite directions, drafting out of step with both."""

    def factors(now: float) -> tuple[float, float, float]:
        angle = 2 * math.pi * now / period
        return 1 + 0.2 * math.sin(angle), 1 - 0.2 * math.sin(angle), 1 + 0.2 * math.cos(angle)

    return machine._replace(drift=factors)


class BiasedTable(AcceptanceTable):
    """Estimates off by a factor that swings between `bias` and its mirror image once every `period` estimates."""

    def __init__(self, depth: int, bias: float, period: int = 200):
        super().__init__(depth)
        self.bias, self.period, self.calls = bias, period, 0

    def raw(self, ids: Sequence[int]) -> np.ndarray:
        self.calls += 1
        factor = 1 + (self.bias - 1) * math.cos(2 * math.pi * self.calls / self.period)
        return (super().raw(ids) * factor).clip(0, 0.999)


def misled(machine: Machine, error: tuple[float, float, float, float]) -> GoodputPolicy:
    """A goodput policy that was told costs and acceptance with these factors on them."""
    base, node, draft, bias = error
    truth = machine.forward
    knee = int(truth.free_nodes * base / node)
    told = truth._replace(base=truth.base * base, per_node=truth.per_node * node, free_nodes=knee)
    draft_costs = DraftCosts(*(value * draft for value in machine.draft))
    return GoodputPolicy(told, draft_costs, max_depth=MAX_DEPTH, table=BiasedTable(MAX_DEPTH, bias))


def sweep(
    batch: int, *, tokens: int, depths: Sequence[int], errors: Sequence[str], seed: int = 0
) -> tuple[dict[int, float], dict[str, float], dict[str, Simulation]]:
    """One batch size, always full: tokens a second by fixed depth (0: plain decoding) and by error of the policy's
    beliefs; both sides meet the same requests, coins and drift."""
    nominal = h200()
    trace = load(batch + tokens // 120, seed)
    step = nominal.forward.predict(batch, batch, 350 * batch)
    machine = drifting(nominal, tokens / batch * step / 3)  # about two periods in a run

    def run(policy: FixedDrafts | GoodputPolicy) -> Simulation:
        return simulate(trace, policy, machine, max_batch=batch, max_tokens=tokens, seed=seed)

    fixed = {depth: run(FixedDrafts(depth)).throughput for depth in depths}
    runs = {name: run(misled(nominal, ERRORS[name])) for name in errors}
    return fixed, {name: found.throughput for name, found in runs.items()}, runs
