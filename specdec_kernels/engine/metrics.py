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
    nan_rows: int = 0  # steps in which it met a NaN logit
    resample_fallback: int = 0  # steps in which a residual had no mass
    overshoot: int = 0  # verified tokens behind a stop: computed, not part of the text
    drafted_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)
    emitted_per_step: list[int] = field(default_factory=list)  # [i]: steps that emitted i + 1 tokens

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
        self.emitted_per_step += [0] * (num_emitted - len(self.emitted_per_step))
        self.emitted_per_step[num_emitted - 1] += 1

    def merge(self, other: SpecCounters) -> None:
        """Add the counts of `other` that both have. It may go on counting meanwhile (an engine that is scraped while it
        steps): its lists and dicts are copied before they are read, each at once."""
        for item in fields(self):
            if not hasattr(other, item.name):
                continue
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                theirs = list(theirs)
                mine += [0] * (len(theirs) - len(mine))
                for i, value in enumerate(theirs):
                    mine[i] += value
            elif isinstance(mine, dict):
                for key, value in dict(theirs).items():
                    if isinstance(value, SpecCounters):
                        mine.setdefault(key, SpecCounters()).merge(value)
                    else:
                        mine[key] = mine.get(key, 0) + value
            elif item.name == "draft_version":
                self.draft_version = max(mine, theirs)
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


ACCEPTANCE_BUCKETS = 10
KEPT_VERSIONS = 8  # of draft weights, whose counts are kept apart: one that learns makes thousands


@dataclass
class EngineCounters(SpecCounters):
    """SpecCounters over all requests, and what only the engine sees. Times are seconds of wall clock."""

    forwards: int = 0  # target forward passes
    prefill_tokens: int = 0
    verify_slots: int = 0  # tree nodes verified, roots included
    verify_slots_padded: int = 0  # node slots added to fill a graph's bucket (packed execution has none)
    requests: int = 0
    finished: int = 0
    finished_by: dict[str, int] = field(default_factory=dict)  # by finish reason
    request_acceptance: list[int] = field(default_factory=lambda: [0] * ACCEPTANCE_BUCKETS)
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of those, found
    prefix_soft_hits: int = 0  # found in rejected drafts
    prefix_dropped: int = 0  # matched, but given up for a drafter (EAGLE's last page)
    copied_pages: int = 0  # copy-on-write between samples of one request
    draft_version: int = 0
    draft_time_s: float = 0.0
    forward_time_s: float = 0.0
    verify_time_s: float = 0.0
    step_time_s: float = 0.0
    by_class: dict[tuple[str, str, int], SpecCounters] = field(default_factory=dict)  # see `of_class`
    priced_time_s: dict[int, float] = field(default_factory=dict)  # by draft version, see `price`
    plain_time_s: dict[int, float] = field(default_factory=dict)
    all_priced_time_s: float = 0.0  # of all versions
    all_plain_time_s: float = 0.0

    def of_class(self, method: str, temperature: float, version: int) -> SpecCounters:
        """Counters of one drafter, greedy or sampled requests, and the version of the weights that drafted. Rates move
        with the mix of such classes even when nothing changed in any of them: alerts compare a class with itself. Of a
        drafter and temperature the `KEPT_VERSIONS` that came last are kept; the engine's own counts hold all."""
        key = (method, "greedy" if temperature <= 1e-5 else "sampled", version)
        found = self.by_class.get(key)
        if found is None:
            older = [other for other in self.by_class if other[:2] == key[:2]]  # in the order in which they came
            for other in older[: max(0, len(older) + 1 - KEPT_VERSIONS)]:
                del self.by_class[other]
            found = self.by_class[key] = SpecCounters()
        return found

    def price(self, seconds: float, plain_seconds: float) -> None:
        """A step without prefill took `seconds`; plain decoding would have taken `plain_seconds` for the same tokens,
        by the cost model of a policy that has one. By version, the `KEPT_VERSIONS` that came last, and in all."""
        self.all_priced_time_s += seconds
        self.all_plain_time_s += plain_seconds
        for times, spent in ((self.priced_time_s, seconds), (self.plain_time_s, plain_seconds)):
            times[self.draft_version] = times.get(self.draft_version, 0.0) + spent
            if len(times) > KEPT_VERSIONS:
                del times[next(iter(times))]

    @property
    def realised_speedup(self) -> float:
        """Over plain decoding, of all priced steps; 0.0 if no step was priced."""
        return self.all_plain_time_s / self.all_priced_time_s if self.all_priced_time_s else 0.0

    def finish(self, reason: str, stats: SpecCounters) -> None:
        """A request ended. `request_acceptance[i]`: requests whose conditional acceptance lies in tenth i."""
        self.finished += 1
        self.finished_by[reason] = self.finished_by.get(reason, 0) + 1
        if stats.accepted + stats.rejected:
            tenth = int(stats.conditional_acceptance * ACCEPTANCE_BUCKETS)
            self.request_acceptance[min(tenth, ACCEPTANCE_BUCKETS - 1)] += 1

    @property
    def slot_utilisation(self) -> float:
        """Real nodes over node slots computed. Not to be mixed with the next one: padding and rejection are two."""
        slots = self.verify_slots + self.verify_slots_padded
        return self.verify_slots / slots if slots else 0.0

    @property
    def useful_token_ratio(self) -> float:
        """Emitted tokens over nodes verified."""
        return self.emitted / self.verify_slots if self.verify_slots else 0.0
