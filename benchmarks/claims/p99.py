"""Claim: acceptance falling from 75 to 60 % doubles P99 latency.

A queueing simulation: Poisson arrivals, long-tailed output lengths, a batch of slots served first come first served,
5 drafts a step, the step time the same in both arms (memory-bound). Each slot's step emits a random number of tokens.
Arrivals and lengths are common to both arms. Load is the share of slots busy at 75 %; at 60 % the same arrivals need
1.38 times the slots.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.claims.common import Claim
from specdec_kernels.advisor.speedup import expected_emitted

NUM_DRAFTS, SLOTS, BEFORE, AFTER = 5, (1, 4, 16), 0.75, 0.60


def steps_needed(rng: np.random.Generator, alpha: float, tokens: np.ndarray) -> np.ndarray:
    """Verification steps until each request's tokens are out."""
    needed = np.empty(len(tokens), np.int64)
    for i, wanted in enumerate(tokens.tolist()):
        emitted = np.cumprod(rng.random((wanted, NUM_DRAFTS)) < alpha, axis=1).sum(axis=1) + 1
        needed[i] = int(np.searchsorted(np.cumsum(emitted), wanted)) + 1
    return needed


def latencies(arrivals: np.ndarray, service: np.ndarray, slots: int) -> np.ndarray:
    """Time from arrival to finish, first come first served on `slots` servers. The heap: when each slot is free."""
    free = [0.0] * slots
    out = np.empty(len(arrivals))
    for i, (arrival, seconds) in enumerate(zip(arrivals.tolist(), service.tolist())):
        finish = max(arrival, heapq.heappop(free)) + seconds
        heapq.heappush(free, finish)
        out[i] = finish - arrival
    return out


def crossing(loads: Sequence[float], ratios: Sequence[float], level: float) -> float | None:
    """The load at which the ratio passes `level`, between the two loads around it; None if it never does."""
    for i, value in enumerate(ratios):
        if value >= level:
            if i == 0:
                return loads[0]
            share = (level - ratios[i - 1]) / (value - ratios[i - 1])
            return loads[i - 1] + share * (loads[i] - loads[i - 1])
    return None


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("p99", __doc__, argv)
    count, seeds = (3000, 2) if claim.quick else (20_000, 5)
    loads = [0.01, 0.3, 0.5, 0.6, 0.7] if claim.quick else [0.01, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.68, 0.7, 0.71]
    ratio = expected_emitted(BEFORE, NUM_DRAFTS) / expected_emitted(AFTER, NUM_DRAFTS)
    p99 = np.empty((len(SLOTS), len(loads), seeds, 2))
    per_token = np.empty((seeds, 2))
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        tokens = np.clip(rng.lognormal(5.0, 0.8, count), 8, 2000).astype(int)
        services = [steps_needed(rng, alpha, tokens).astype(float) for alpha in (BEFORE, AFTER)]  # unit: one step
        per_token[seed] = [np.quantile(service / tokens, 0.99) for service in services]
        gaps = rng.exponential(1.0, count)
        for i, slots in enumerate(SLOTS):
            for j, load in enumerate(loads):
                arrivals = np.cumsum(gaps) * services[0].mean() / (load * slots)
                kept = slice(count // 10, None)  # the queue has filled up
                p99[i, j, seed] = [np.quantile(latencies(arrivals, s, slots)[kept], 0.99) for s in services]
    ratios = p99[..., 1] / p99[..., 0]
    doubled = {slots: crossing(loads, ratios[i].mean(-1).tolist(), 2.0) for i, slots in enumerate(SLOTS)}
    for i, slots in enumerate(SLOTS):
        rows = []
        for j, load in enumerate(loads):
            spread = f"{ratios[i, j].min():.2f}..{ratios[i, j].max():.2f}"
            rows.append([load, load * ratio, *p99[i, j].mean(axis=0), ratios[i, j].mean(), spread])
        columns = ["load at .75", "load at .60", "P99 at .75", "P99 at .60", "ratio", "over seeds"]
        claim.table(f"P99 latency in steps, {count} requests, {slots} slots, {seeds} seeds", columns, rows)
    tpot = float((per_token[:, 1] / per_token[:, 0]).mean())
    with claim.plot("P99 latency at .60 over that at .75", "load at acceptance .75", "ratio of P99") as axes:
        for i, slots in enumerate(SLOTS):
            axes.plot(loads, ratios[i].mean(-1), "o-", ms=4, label=f"{slots} slot{'s' * (slots > 1)}")
        axes.axhline(2, color="#888888", lw=1, ls=":")
        axes.axhline(ratio, color="#888888", lw=1, label=f"tokens a step alone: x{ratio:.2f}")
        axes.axvline(1 / ratio, color="#888888", lw=1, ls="--", label="at .60 the slots are full")
        axes.set_ylim(1, 6)
    where = ", ".join(
        f"{slots} slot{'s' * (slots > 1)} " + ("at no load simulated" if load is None else f"from load {load:.2f}")
        for slots, load in doubled.items()
    )
    light = float(ratios[-1, 0].mean())
    return claim.conclude(
        says="acceptance 75 to 60 % doubles P99",
        so=f"x{light:.2f} without queueing (tokens a step: x{ratio:.2f}; P99 of time per token: x{tpot:.2f}); it "
        f"doubles with {where}, and grows without bound from {1 / ratio:.2f}, where the slots are full at .60",
        figures={
            "tokens_ratio": ratio,
            "p99_ratio": {str(s): dict(zip(map(str, loads), ratios[i].mean(-1).tolist())) for i, s in enumerate(SLOTS)},
            "p99_ratio_without_queueing": light,
            "p99_ratio_time_per_token": tpot,
            "load_where_doubled": {str(slots): load for slots, load in doubled.items()},
            "load_where_full": 1 / ratio,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
