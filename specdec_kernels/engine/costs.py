"""What steps cost on this machine, from an engine's own steps: the two cost models that `GoodputPolicy` plans with.

recorder = StepRecorder()
engine = Engine(model, "ngram", policy=recorder)
for recorder.policy in (FixedDrafts(0), FixedDrafts(3), FixedDrafts(15)): engine.generate(prompts)
policy = GoodputPolicy(*fit_costs(recorder.timings), max_depth=15)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from specdec_kernels.batching import BatchCostModel, StepSample
from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.policy import (
    NO_PREFILL,
    DraftCosts,
    DraftOutcome,
    DraftPolicy,
    FixedDrafts,
    PrefillLoad,
    RequestView,
    StepTiming,
)

_CONTEXT = 256  # KV rows within which steps count as repeats of one another


class StepRecorder:
    """A policy that does what `policy` does (default: no drafts) and keeps every step's `StepTiming` in `timings`."""

    def __init__(self, policy: DraftPolicy | None = None):
        self.policy: DraftPolicy = FixedDrafts(0) if policy is None else policy
        self.timings: list[StepTiming] = []

    def choose_budgets(self, requests: Sequence[RequestView], prefill: PrefillLoad = NO_PREFILL) -> list[Limit]:
        return self.policy.choose_budgets(requests, prefill)

    def record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        self.timings.append(timing)
        self.policy.record(outcomes, timing)

    def forget(self, request_id: int) -> None:
        self.policy.forget(request_id)


def fit_costs(timings: Sequence[StepTiming]) -> tuple[BatchCostModel, DraftCosts]:
    """(forward pass, drafting) fitted to measured steps; those with prefill rows are left out.

    Repeats (the same nodes, requests, drafts and levels, and KV rows within 256) count once, by their median: a pause
    of the machine is no cost. ValueError if what is left does not determine the forward costs (`BatchCostModel.fit`
    says why). Fewer than five kinds of drafting steps, or all with one number of drafts: the median, as `per_step`.
    """
    kinds: dict[tuple[int, ...], list[StepTiming]] = {}
    for t in timings:
        if t.nodes == t.requests + t.drafts:
            kinds.setdefault((t.nodes, t.requests, t.drafts, t.levels, t.context // _CONTEXT), []).append(t)
    middle = [
        t[0]._replace(
            context=int(statistics.median(x.context for x in t)),
            forward_seconds=statistics.median(x.forward_seconds for x in t),
            draft_seconds=statistics.median(x.draft_seconds for x in t),
        )
        for t in kinds.values()
    ]
    forward = BatchCostModel.fit([StepSample(t.nodes, t.requests, t.context, t.forward_seconds) for t in middle])
    drafting = [StepSample(t.drafts, t.levels, 0, t.draft_seconds) for t in middle if t.drafts]
    if len(drafting) < 5 or len({sample.nodes for sample in drafting}) < 2:
        return forward, DraftCosts(statistics.median(s.seconds for s in drafting) if drafting else 0.0)
    # The same kind of model with levels in the place of requests; no draft is free.
    fitted = BatchCostModel.fit(drafting, knees=(0,))
    return forward, DraftCosts(fitted.base, fitted.per_request, fitted.per_node)
