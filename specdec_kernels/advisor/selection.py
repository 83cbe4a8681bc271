"""How many drafts to propose at a batch size, from a measured cost table: zero where drafting does not pay.

A pure function; the caller keeps the current choice. `select_draft_model` compares drafters (draft_selection.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec_kernels.advisor.speedup import expected_emitted


@dataclass(frozen=True)
class CostTable:
    """verify_time[batch][num_drafts]: target forward of a step with that many drafts a request; 0 is plain decoding
    and must be there. draft_time: one draft forward, one number or one a batch. Overhead belongs into the entries.
    One unit of time throughout (results are in it)."""

    verify_time: Mapping[int, Mapping[int, float]]
    draft_time: float | Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.verify_time:
            raise ValueError("choose_num_drafts: verify_time: expected at least one batch size, got none")
        for batch, row in self.verify_time.items():
            if 0 not in row or min(row) < 0:
                raise ValueError(
                    f"choose_num_drafts: verify_time: expected 0 (plain) and more at batch {batch}, got {sorted(row)}"
                )
            if not all(math.isfinite(time) and time > 0 for time in row.values()):
                raise ValueError(f"choose_num_drafts: verify_time: expected positive times, got {dict(row)}")
            draft = self.draft_time.get(batch, math.nan) if isinstance(self.draft_time, Mapping) else self.draft_time
            if not (math.isfinite(draft) and draft >= 0):
                raise ValueError(f"choose_num_drafts: draft_time: expected a time >= 0 at batch {batch}, got {draft}")

    def step_times(self, batch: int) -> dict[int, float] | None:
        """Time of a whole step by num_drafts, interpolated between measured batches; None outside their range."""
        known = sorted(self.verify_time)
        if not known[0] <= batch <= known[-1]:
            return None
        low = max(size for size in known if size <= batch)
        high = min(size for size in known if size >= batch)
        share = 0.0 if low == high else (batch - low) / (high - low)

        def at(size: int, num_drafts: int) -> float:
            draft = self.draft_time[size] if isinstance(self.draft_time, Mapping) else self.draft_time
            return self.verify_time[size][num_drafts] + num_drafts * draft

        common = sorted(set(self.verify_time[low]) & set(self.verify_time[high]))
        return {k: (1 - share) * at(low, k) + share * at(high, k) for k in common}


@dataclass(frozen=True)
class DraftChoice:
    """num_drafts; time_per_token: predicted time by num_drafts (empty outside the table); reason: one line."""

    num_drafts: int
    time_per_token: dict[int, float]
    reason: str


def choose_num_drafts(
    cost_table: CostTable,
    acceptance: float | Sequence[float],
    batch: int,
    current: int | None = None,
    *,
    wobble: float = 0.02,
) -> DraftChoice:
    """The number of drafts a request with the least predicted time per token; never one predicted slower than plain.

    acceptance: conditional, one number or one a position (num_drafts beyond its positions are not considered).
    current: the choice in force, None for none. wobble: how far every estimate (each time, each acceptance) may stray
    from the truth, as a share. With a current choice another is taken only if it would still win had each estimate
    strayed by `wobble` one way now and strays by `wobble` the other way next time; so, while the truth stands still,
    no choice is ever taken back. One exception needs no margin: a current choice predicted slower than plain is left
    at once, for plain decoding.
    """
    if batch < 1:
        raise ValueError(f"choose_num_drafts: batch: expected at least 1, got {batch}")
    if not 0 <= wobble < 1:
        raise ValueError(f"choose_num_drafts: wobble: expected a share in [0, 1), got {wobble}")
    steps = cost_table.step_times(batch)
    if steps is None:
        known = sorted(cost_table.verify_time)
        return DraftChoice(0, {}, f"batch {batch} lies outside the measured {known[0]}..{known[-1]}: plain decoding")
    if not isinstance(acceptance, (int, float)):
        steps = {k: time for k, time in steps.items() if k <= len(acceptance)}
    per_token = {k: time / expected_emitted(acceptance, k) for k, time in steps.items()}
    best = min(per_token, key=lambda k: (per_token[k], k))
    if current is None or current not in per_token:
        gain = per_token[0] / per_token[best]
        return DraftChoice(best, per_token, f"least predicted time per token: {gain:.3f}x plain decoding")

    stray = (1 + wobble) / (1 - wobble)

    def robustly_beats(candidate: int, other: int) -> bool:
        worst = 0.0
        for factor in (1 / stray, stray):  # tokens a step of both are monotone in acceptance, and so is their ratio
            shifted = _scaled(acceptance, factor)
            ratio = expected_emitted(shifted, other) / expected_emitted(shifted, candidate)
            worst = max(worst, ratio * steps[candidate] * stray / (steps[other] / stray))
        return worst < 1.0

    base, why = current, "kept"
    if per_token[current] > per_token[0]:
        base, why = 0, f"{current} drafts are predicted slower than plain decoding"
    ahead = [k for k in per_token if k != base and robustly_beats(k, base) and per_token[k] <= per_token[0]]
    if ahead:
        chosen = min(ahead, key=lambda k: (per_token[k], k))
        return DraftChoice(chosen, per_token, f"better than {base} drafts also with every estimate off by {wobble:.0%}")
    if base == current and best != current:
        why = f"kept: {best} drafts are ahead, but not beyond a wobble of {wobble:.0%}"
    return DraftChoice(base, per_token, why)


def _scaled(acceptance: float | Sequence[float], factor: float) -> float | list[float]:
    if isinstance(acceptance, (int, float)):
        return min(1.0, acceptance * factor)
    return [min(1.0, value * factor) for value in acceptance]
