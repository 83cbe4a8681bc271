"""What steps cost on this machine, from an engine's own steps: cost models to plan with, and the speed-up they predict.

recorder = StepRecorder()
engine = Engine(model, "ngram", policy=recorder)
for recorder.policy in (FixedDrafts(0), FixedDrafts(3), FixedDrafts(15)): engine.generate(prompts)
policy = GoodputPolicy(*fit_costs(recorder.timings), max_depth=15)

costs = measure_costs(model, EagleDrafter(folder), prompts)  # or all of that in one call
costs.speedup(2.5, drafts=16, levels=4, context=200)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec_kernels.batching import BatchCostModel, StepSample
from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.decoder import Engine
from specdec_kernels.engine.drafters import Drafter, Limit
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
from specdec_kernels.engine.request import Request

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


class DecodingCosts(NamedTuple):
    """`forward`: verifying and committing by rows, requests and context; `draft`: drafting by levels and nodes."""

    forward: BatchCostModel
    draft: DraftCosts

    def seconds(self, drafts: float, levels: float, *, requests: int = 1, context: float = 0.0) -> float:
        """Predicted seconds of a step with `drafts` draft nodes in `levels` levels a request, each behind `context`
        tokens; 0 drafts: of a plain step."""
        forward = self.forward.predict(requests * (1 + drafts), requests, requests * context)
        if not drafts:
            return forward
        per = self.draft
        return forward + per.per_step + per.per_level * levels + per.per_node * requests * drafts

    def speedup(self, tokens: float, drafts: float, levels: float, *, requests: int = 1, context: float = 0.0) -> float:
        """Predicted speed-up over plain decoding of steps that emit `tokens` tokens a request on average."""
        plain = self.seconds(0, 0, requests=requests, context=context)
        return tokens * plain / self.seconds(drafts, levels, requests=requests, context=context)


def fit_costs(timings: Sequence[StepTiming]) -> DecodingCosts:
    """Costs fitted to measured steps; those with prefill rows are left out.

    Repeats (of a forward pass: the same nodes and requests, and KV rows within 256; of drafting: the same drafts and
    levels) stand together as their median, as often as there are of them: a pause of the machine is no cost, and what
    was seen once weighs little. ValueError if there are fewer than five kinds of forward passes, or if they do not
    determine the costs (`BatchCostModel.fit` says why). Fewer than five kinds of drafting, or all with one number of
    drafts: the median, as `per_step`.
    """
    forwards: dict[tuple[int, ...], list[StepSample]] = {}
    drafting: dict[tuple[int, ...], list[StepSample]] = {}
    for t in timings:
        if t.nodes == t.requests + t.drafts:
            key = (t.nodes, t.requests, t.context // _CONTEXT)
            forwards.setdefault(key, []).append(StepSample(t.nodes, t.requests, t.context, t.forward_seconds))
            if t.drafts and t.draft_seconds > 0:
                sample = StepSample(t.drafts, t.levels, 0, t.draft_seconds)
                drafting.setdefault((t.drafts, t.levels), []).append(sample)
    forward = BatchCostModel.fit(_medians(forwards))
    samples = _medians(drafting)
    if len(drafting) < 5 or len({sample.nodes for sample in samples}) < 2:
        median = statistics.median(s.seconds for s in samples) if samples else 0.0
        return DecodingCosts(forward, DraftCosts(median))
    # The same kind of model with levels in the place of requests; no draft is free.
    fitted = BatchCostModel.fit(samples, knees=(0,))
    return DecodingCosts(forward, DraftCosts(fitted.base, fitted.per_request, fitted.per_node))


def _medians(kinds: dict[tuple[int, ...], list[StepSample]]) -> list[StepSample]:
    """The median of each kind, as often as it was seen if there are enough kinds to fit."""
    found = []
    for samples in kinds.values():
        context, seconds = (statistics.median(s[i] for s in samples) for i in (2, 3))
        middle = samples[0]._replace(context=int(context), seconds=seconds)
        found += [middle] * (len(samples) if len(kinds) >= 5 else 1)
    return found


class InTurn:
    """A policy that gives every request 0 drafts in one step, then sizes[1], ..., and begins again: whatever else the
    machine does hits all sizes alike."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes, self._turn = list(sizes), -1

    def choose_budgets(self, requests: Sequence[RequestView], prefill: PrefillLoad = NO_PREFILL) -> list[Limit]:
        self._turn += 1
        return FixedDrafts(self.sizes[self._turn % len(self.sizes)]).choose_budgets(requests)

    def record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass


def record_steps(
    model: Any,
    drafter: str | Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    sizes: Sequence[int] = (0, 1, 2, 4, 8, 12, 16, 24),
    rounds: int = 8,
) -> list[StepTiming]:
    """Timings of greedy steps for `prompts` (token ids), all in one batch, with every number of drafts of `sizes` in
    turn, `rounds` times. The drafter's own shape may keep a draft smaller than its size."""
    recorder = StepRecorder(InTurn(sizes))
    steps = rounds * len(sizes)
    longest = max(map(len, prompts))
    most = min(steps * (1 + max(sizes)), model.max_context - longest - max(sizes) - 1)
    pages = 2 * len(prompts) * (-(-(longest + most + max(sizes) + 1) // 16) + 1)
    config = EngineConfig(num_pages=pages, max_batch=len(prompts), num_drafts=max(sizes))
    engine = Engine(model, drafter, config, policy=recorder)
    running = [engine.add(Request(list(prompt), max_tokens=most, ignore_eos=True)) for prompt in prompts]
    while engine.has_work and sum(t.nodes == t.requests + t.drafts for t in recorder.timings) < steps:
        engine.step()
    for request_id in running:
        engine.abort(request_id)
    return recorder.timings


def measure_costs(
    model: Any, drafter: str | Drafter, prompts: Sequence[Sequence[int]], **options: Any
) -> DecodingCosts:
    """Costs fitted to the steps of `record_steps`, whose options it takes."""
    return fit_costs(record_steps(model, drafter, prompts, **options))
