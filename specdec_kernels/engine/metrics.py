"""Counters of speculative decoding, kept per request and per engine. Counts only: every rate is derived, so counters
of steps, requests, engines and replicas add up in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass
class SpecCounters:
    """Counts over verification steps (a step emits `accepted + 1` tokens unless a stop cuts it).

    "Acceptance rate" has three meanings; each has its own name here:
    `conditional_acceptance` = accepted / (accepted + rejected), the chance that the next draft token is accepted given
    that all before it were; `acceptance_per_draft` = accepted / drafted, which also charges drafts behind a rejection
    and side branches; `acceptance_at[i]` = P(accepted at depth i+1 | drafted at depth i+1).
    """

    steps: int = 0  # verification steps, with or without drafts
    drafts: int = 0  # steps that had at least one draft
    drafted: int = 0  # draft nodes (the root is none)
    accepted: int = 0  # accepted draft tokens that were emitted
    emitted: int = 0
    rejected: int = 0  # steps in which a draft was tried and refused (the censored estimator's denominator)
    rejected_at_first: int = 0
    bonus: int = 0  # tokens emitted behind a whole accepted path
    drafter_failures: int = 0
    flagged: int = 0  # steps in which the verifier flagged this request's data (NaN logits, bad ids, ...)
    drafted_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)

    def record(self, depth_counts: Sequence[int], num_accepted: int, num_emitted: int, exhausted: bool) -> None:
        """Add one verification step.

        depth_counts[i]: draft nodes at depth i+1; num_accepted: drafts on the accepted path; num_emitted: tokens that
        reached the text (a stop may cut); exhausted: the path ended on a node without drafted children.
        """
        if num_emitted <= 0:  # an aborted or failed step proves nothing
            return
        kept = min(num_accepted, num_emitted)
        cut = num_emitted <= num_accepted
        self.steps += 1
        self.drafts += bool(depth_counts)
        self.drafted += sum(depth_counts)
        self.accepted += kept
        self.emitted += num_emitted
        if not cut:
            refused = not exhausted
            self.rejected += refused
            self.rejected_at_first += refused and num_accepted == 0
            self.bonus += exhausted and bool(depth_counts)
        while len(self.drafted_per_pos) < len(depth_counts):
            self.drafted_per_pos.append(0)
            self.accepted_per_pos.append(0)
        for depth in range(len(depth_counts)):
            self.drafted_per_pos[depth] += 1
        for depth in range(kept):
            self.accepted_per_pos[depth] += 1

    def merge(self, other: SpecCounters) -> None:
        """Add the counts of `other` that both have."""
        for item in fields(self):
            if not hasattr(other, item.name):
                continue
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                longer = max(len(mine), len(theirs))
                pad = [m + t for m, t in zip(_padded(mine, longer), _padded(theirs, longer), strict=True)]
                setattr(self, item.name, pad)
            else:
                setattr(self, item.name, mine + theirs)

    @property
    def conditional_acceptance(self) -> float:
        tried = self.accepted + self.rejected
        return self.accepted / tried if tried else 0.0

    @property
    def acceptance_per_draft(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verification step, the recovered or bonus token included (plain decoding: 1)."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted_per_pos, self.drafted_per_pos, strict=True)]


def _padded(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))


@dataclass
class EngineCounters(SpecCounters):
    """SpecCounters over all requests, and what only the engine sees. Times are seconds of wall clock."""

    forwards: int = 0  # target forward passes
    prefill_tokens: int = 0
    verify_slots: int = 0  # tree nodes verified, roots included; padded slots are 0 here: batches are packed
    requests: int = 0
    finished: int = 0
    preemptions: int = 0
    draft_time_s: float = 0.0
    forward_time_s: float = 0.0
    step_time_s: float = 0.0
