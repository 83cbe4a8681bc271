"""Acceptance, measured: three different rates under three names, from per-step records, with confidence intervals.

- conditional acceptance = accepted / (accepted + rejections): the chance that a draft that was *reached* is accepted;
  the alpha of the speed-up formulas. Drafts behind a rejection were never judged and do not count (a censored
  geometric estimate).
- expected conditional acceptance = mean of 1 - TV(target law, draft law) over reached positions: the same quantity
  without the noise of the coins, where both laws are at hand.
- accepted over drafted: depends on the number of drafts, so it compares nothing across settings.

All are ratios of sums, so they weigh tokens, not requests. Counts are integers and merge exactly in any order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_OVERLAP_UNIT = 2.0**-40  # overlaps are kept as integers in this unit, so that merging stays exact


@dataclass(frozen=True)
class StepRecord:
    """One verification step of one request.

    num_drafted: drafts verified, the root excluded. num_accepted: leading accepted drafts. num_emitted: tokens that
    reached the text; None means num_accepted + 1; less where a limit or a stop cut the step. depth: deepest draft;
    None means a chain (num_drafted). rejected: whether a reached draft was refused; None means a chain (num_accepted
    < num_drafted); a tree must say, because its accepted path may simply end. num_masked: drafts a grammar or
    vocabulary ruled out beforehand (they count as drafted, and also apart). failed: nothing came back (error, abort).
    overlaps: 1 - TV at each reached position, if known.
    """

    request: Hashable
    num_drafted: int
    num_accepted: int = 0
    num_emitted: int | None = None
    depth: int | None = None
    rejected: bool | None = None
    num_masked: int = 0
    failed: bool = False
    domain: str = ""
    temperature: float = 0.0
    overlaps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        depth = self.num_drafted if self.depth is None else self.depth
        emitted = self.num_accepted + 1 if self.num_emitted is None else self.num_emitted
        checks = {
            "num_drafted": (self.num_drafted >= 0, ">= 0", self.num_drafted),
            "depth": (0 <= depth <= self.num_drafted, f"0..{self.num_drafted}", depth),
            "num_accepted": (0 <= self.num_accepted <= depth, f"0..{depth}", self.num_accepted),
            "num_masked": (0 <= self.num_masked <= self.num_drafted, f"0..{self.num_drafted}", self.num_masked),
            "num_emitted": (0 <= emitted <= self.num_accepted + 1, f"0..{self.num_accepted + 1}", emitted),
            "rejected": (
                self.depth is None or self.rejected is not None or self.num_accepted == depth,
                "True or False for a tree",
                self.rejected,
            ),
            "rejected with all accepted": (
                not (self.rejected and self.num_accepted == depth),
                "False where every depth was accepted",
                self.rejected,
            ),
            "overlaps": (all(0 <= x <= 1 + 1e-9 for x in self.overlaps), "values in [0, 1]", self.overlaps),
        }
        for name, (holds, expected, got) in checks.items():
            if not holds:
                raise ValueError(f"StepRecord: {name}: expected {expected}, got {got}")

    @classmethod
    def from_emitted(cls, request: Hashable, num_drafted: int, num_emitted: int, **more: Any) -> StepRecord:
        """From a verifier's `num_emitted`; 0 (error row, abort) is a failed step, not minus one accepted draft."""
        if num_emitted == 0:
            return cls(request, num_drafted, failed=True, **more)
        return cls(request, num_drafted, num_emitted - 1, **more)


def _padded_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.zeros(max(len(a), len(b)), np.int64)
    out[: len(a)] += a
    out[: len(b)] += b
    return out


def _ratio(above: Any, below: Any) -> Any:
    """above / below, NaN where nothing was counted."""
    below = np.asarray(below, np.float64)
    return np.divide(above, below, out=np.full(below.shape, np.nan), where=below > 0)


def _no_positions() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass
class AcceptanceCounts:
    """Totals only; every rate is derived. Arrays are indexed by draft position (depth - 1). Add two to merge them.

    steps: steps that returned something, those without drafts too; failed_steps apart. rejections: steps that ended
    at a refused draft. emitted: tokens that reached the text; accepted never exceeds it.
    """

    steps: int = 0
    failed_steps: int = 0
    drafted: int = 0
    masked: int = 0
    accepted: int = 0
    rejections: int = 0
    emitted: int = 0
    drafted_per_pos: np.ndarray = field(default_factory=_no_positions)
    reached_per_pos: np.ndarray = field(default_factory=_no_positions)
    accepted_per_pos: np.ndarray = field(default_factory=_no_positions)
    overlap_units: int = 0
    overlap_positions: int = 0

    def add(self, record: StepRecord) -> None:
        """Count one step. Failed steps only count as failed: their drafts were never judged.

        Where the step was cut to fewer tokens than were accepted, what lies behind the cut counts neither as
        accepted nor as rejected.
        """
        if record.failed:
            self.failed_steps += 1
            return
        depth = record.num_drafted if record.depth is None else record.depth
        rejected = record.num_accepted < depth if record.rejected is None else record.rejected
        emitted = record.num_accepted + 1 if record.num_emitted is None else record.num_emitted
        accepted = min(record.num_accepted, emitted)
        rejected = rejected and emitted > record.num_accepted
        self.steps += 1
        self.drafted += record.num_drafted
        self.masked += record.num_masked
        self.accepted += accepted
        self.rejections += rejected
        self.emitted += emitted
        if depth > len(self.drafted_per_pos):
            for name in ("drafted_per_pos", "reached_per_pos", "accepted_per_pos"):
                setattr(self, name, np.pad(getattr(self, name), (0, depth - len(getattr(self, name)))))
        self.drafted_per_pos[:depth] += 1
        self.reached_per_pos[: accepted + rejected] += 1
        self.accepted_per_pos[:accepted] += 1
        self.add_overlaps(record.overlaps)

    def add_overlaps(self, overlaps: Iterable[float]) -> None:
        """1 - TV at positions that were reached (teacher-forced: every position of the text)."""
        for value in overlaps:
            self.overlap_units += round(float(value) / _OVERLAP_UNIT)
            self.overlap_positions += 1

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        merged: dict[str, Any] = {
            name: (_padded_sum(a, b) if isinstance(a, np.ndarray) else a + b)
            for (name, a), b in zip(vars(self).items(), vars(other).values())
        }
        return AcceptanceCounts(**merged)

    @property
    def conditional_acceptance(self) -> float:
        """accepted / (accepted + rejections)."""
        return float(_ratio(self.accepted, self.accepted + self.rejections))

    @property
    def expected_conditional_acceptance(self) -> float:
        """Mean 1 - TV over reached positions."""
        return float(_ratio(self.overlap_units * _OVERLAP_UNIT, self.overlap_positions))

    @property
    def accepted_over_drafted(self) -> float:
        """Accepted over all drafts, reached or not."""
        return float(_ratio(self.accepted, self.drafted))

    @property
    def accepted_length(self) -> float:
        """Mean emitted tokens a step, the recovered or bonus token included."""
        return float(_ratio(self.emitted, self.steps))

    @property
    def acceptance_per_position(self) -> np.ndarray:
        """P(accepted at i | drafted at i), float64[positions]; short drafts do not look like rejections."""
        return _ratio(self.accepted_per_pos, self.drafted_per_pos)

    @property
    def conditional_acceptance_per_position(self) -> np.ndarray:
        """P(accepted at i | reached at i), float64[positions]: what `expected_emitted` takes."""
        return _ratio(self.accepted_per_pos, self.reached_per_pos)


@dataclass(frozen=True)
class Interval:
    """A value and its bootstrap confidence interval; low and high are NaN with fewer than two requests."""

    value: float
    low: float
    high: float


RATES = ("conditional_acceptance", "expected_conditional_acceptance", "accepted_over_drafted", "accepted_length")


@dataclass(frozen=True)
class AcceptanceEstimate:
    """Rates of one domain and temperature (None: all of them). per_position: `conditional_acceptance_per_position`."""

    domain: str | None
    temperature: float | None
    num_requests: int
    counts: AcceptanceCounts
    conditional_acceptance: Interval
    expected_conditional_acceptance: Interval
    accepted_over_drafted: Interval
    accepted_length: Interval
    per_position: list[Interval]


class AcceptanceLog:
    """Counts a request, domain and temperature. Logs of several workers merge with `merge`, in any order."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.cells: dict[tuple[str, float, Hashable], AcceptanceCounts] = {}
        for record in records:
            self.add(record)

    def _cell(self, domain: str, temperature: float, request: Hashable) -> AcceptanceCounts:
        return self.cells.setdefault((domain, float(temperature), request), AcceptanceCounts())

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self._cell(record.domain, record.temperature, record.request).add(record)

    def add_overlaps(
        self, request: Hashable, overlaps: Iterable[float], *, domain: str = "", temperature: float = 1.0
    ) -> None:
        """Teacher-forced 1 - TV values of one request (`rollout.overlap`)."""
        self._cell(domain, temperature, request).add_overlaps(overlaps)

    def merge(self, other: AcceptanceLog) -> AcceptanceLog:
        """A new log with the counts of both; a request in both is one request."""
        merged = AcceptanceLog()
        for log in (self, other):
            for key, counts in log.cells.items():
                merged.cells[key] = merged.cells.get(key, AcceptanceCounts()) + counts
        return merged

    def by_request(
        self, domain: str | None = None, temperature: float | None = None
    ) -> dict[Hashable, AcceptanceCounts]:
        """Counts of every request within a domain and temperature (None: any)."""
        found: dict[Hashable, AcceptanceCounts] = {}
        for (in_domain, at_temperature, request), counts in self.cells.items():
            if domain in (None, in_domain) and temperature in (None, at_temperature):
                found[request] = found.get(request, AcceptanceCounts()) + counts
        return found

    def estimate(
        self,
        domain: str | None = None,
        temperature: float | None = None,
        *,
        confidence: float = 0.95,
        num_resamples: int = 2000,
        seed: int = 0,
    ) -> AcceptanceEstimate:
        """Rates with intervals by a bootstrap over requests (percentile method).

        Requests are drawn, not tokens: tokens of one request share its difficulty, and an interval from tokens would
        be far too narrow. Under about 20 requests the percentile interval is somewhat too narrow too.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"estimate: confidence: expected a share in (0, 1), got {confidence}")
        requests = list(self.by_request(domain, temperature).values())
        counts = sum(requests, AcceptanceCounts())
        num_positions = len(counts.drafted_per_pos)

        def column(values: Iterable[float]) -> np.ndarray:
            return np.fromiter(values, np.float64, len(requests))

        def at(name: str, position: int) -> np.ndarray:
            return column(getattr(c, name)[position] if position < len(getattr(c, name)) else 0 for c in requests)

        pairs = [
            (column(c.accepted for c in requests), column(c.accepted + c.rejections for c in requests)),
            (column(c.overlap_units * _OVERLAP_UNIT for c in requests), column(c.overlap_positions for c in requests)),
            (column(c.accepted for c in requests), column(c.drafted for c in requests)),
            (column(c.emitted for c in requests), column(c.steps for c in requests)),
            *((at("accepted_per_pos", i), at("reached_per_pos", i)) for i in range(num_positions)),
        ]
        rng = np.random.default_rng(seed)
        count = len(requests)
        weights = rng.multinomial(count, np.full(count, 1 / count), size=num_resamples) if count > 1 else None
        tail = (1 - confidence) / 2

        def interval(above: np.ndarray, below: np.ndarray) -> Interval:
            value = float(_ratio(above.sum(), below.sum()))
            if weights is None or not below.any():
                return Interval(value, float("nan"), float("nan"))
            drawn = _ratio(weights @ above, weights @ below)
            drawn = drawn[~np.isnan(drawn)]  # draws without a single request that counts
            low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
            return Interval(value, float(low), float(high))

        rates = [interval(above, below) for above, below in pairs]
        named = dict(zip(RATES, rates))
        return AcceptanceEstimate(domain, temperature, count, counts, per_position=rates[len(RATES) :], **named)

    def estimates(self, **options: Any) -> list[AcceptanceEstimate]:
        """All together first, then every domain and temperature that was seen, in order."""
        groups = sorted({(domain, temperature) for domain, temperature, _ in self.cells})
        return [self.estimate(**options), *(self.estimate(d, t, **options) for d, t in groups)]
