"""How many drafts each request gets in a step. The scheduler and the simulator share this interface.

Goodput (TurboSpec, 2406.14066): expected tokens over expected seconds of the step. A draft at depth i of a request adds
its survival, the product of the request's conditional acceptances up to i, and costs the step what one more node and,
for the deepest, one more draft pass cost. Drafts are taken in the order of survival per node while goodput rises; none
where plain decoding is predicted faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specdec_kernels.batching import BatchCostModel
from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.estimates import AcceptanceTable, CostCorrection, ForwardCorrection


class RequestView(NamedTuple):
    """What a policy may know of a decoding request. cap: the most that room, memory and the caller allow."""

    id: int
    context_len: int
    cap: Limit


class DraftOutcome(NamedTuple):
    """What verification said of one request's drafts: its leading `accepted` ones, and whether the next was refused
    (False: the path ended without a refusal, or a stop cut it)."""

    id: int
    accepted: int
    rejected: bool


class StepTiming(NamedTuple):
    """One measured step: rows of the forward pass (roots, drafts, prefill), requests in it, KV rows they read, depth of
    the deepest draft, draft nodes, seconds of the forward pass and of drafting (0: no measurement of drafting, because
    a drafter also had to read texts that it had no KV of)."""

    nodes: int
    requests: int
    context: int
    levels: int
    drafts: int
    forward_seconds: float
    draft_seconds: float


class PrefillLoad(NamedTuple):
    """Rows of prefill chunks that share the step with the decoding requests."""

    nodes: int = 0


NO_PREFILL = PrefillLoad()


class DraftPolicy(Protocol):
    """Sets draft limits before a step and learns from it afterwards."""

    def choose_budgets(self, requests: Sequence[RequestView], prefill: PrefillLoad = NO_PREFILL) -> list[Limit]:
        """A limit for each request, within its cap. Limit(0, 0): decode plainly."""
        ...

    def record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Outcomes of the requests that had drafts, and what the step took."""
        ...

    def forget(self, request_id: int) -> None:
        """The request is over."""
        ...


class FixedDrafts:
    """The same number of drafts for every request, whatever comes of it."""

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts

    def choose_budgets(self, requests: Sequence[RequestView], prefill: PrefillLoad = NO_PREFILL) -> list[Limit]:
        k = self.num_drafts
        return [Limit(min(k, view.cap.nodes), min(k, view.cap.depth, view.cap.nodes)) for view in requests]

    def record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass


class DraftCosts(NamedTuple):
    """Seconds of drafting a step: per_step once anything is drafted, per_level for each depth (one draft pass over all
    requests), per_node for each drafted node."""

    per_step: float = 0.0
    per_level: float = 0.0
    per_node: float = 0.0


FREE_DRAFTS = DraftCosts()
_PROBE_EVERY = 8  # steps between two looks for something worth trying


class _Plan(NamedTuple):
    depths: np.ndarray  # int [n]: draft levels of each request
    goodput: float  # predicted tokens a second
    seconds: float
    tokens: float


class GoodputPolicy:
    """Per-request draft depths by predicted goodput, from each request's recent acceptance and a fitted cost model.

    costs: forward pass (`BatchCostModel.fit` of measured steps); draft: drafting. Only ratios of the two matter, and
    both are corrected online by what steps really take. max_depth: deepest draft. widths[i]: nodes that depth i+1 costs
    a request (None: 1, chains). hysteresis: a plan is replaced only by one predicted better by this share, but a plan
    predicted slower than plain decoding is left at once. probe_share: at most this share of the time goes into steps
    that try what *would* be best if the estimates were off by `uncertainty`, so that a wrong belief cannot confirm
    itself: drafts that are never tried, or a plain step that is never timed.

    One policy serves requests of one drafter; `Limit(0, 0)` caps keep others out.
    """

    def __init__(
        self,
        costs: BatchCostModel,
        draft: DraftCosts = FREE_DRAFTS,
        *,
        max_depth: int = 8,
        widths: Sequence[int] | None = None,
        hysteresis: float = 0.01,
        probe_share: float = 0.005,
        uncertainty: float = 0.2,
        table: AcceptanceTable | None = None,
    ):
        if max_depth < 1 or (widths is not None and (len(widths) != max_depth or min(widths) < 1)):
            raise ValueError(
                f"GoodputPolicy: widths: expected {max_depth} node counts of at least 1 (max_depth >= 1), got {widths}"
            )
        for name, value in (("hysteresis", hysteresis), ("probe_share", probe_share), ("uncertainty", uncertainty)):
            if not 0 <= value < 1:
                raise ValueError(f"GoodputPolicy: {name}: expected a share in [0, 1), got {value}")
        self.costs, self.draft, self.max_depth = costs, draft, max_depth
        self.widths = np.ones(max_depth, np.int64) if widths is None else np.array(widths, np.int64)
        self._cum_width = np.concatenate([[0], self.widths.cumsum()])
        self.hysteresis, self.probe_share, self.uncertainty = hysteresis, probe_share, uncertainty
        self.acceptance = AcceptanceTable(max_depth) if table is None else table
        self.forward_correction, self.draft_correction = ForwardCorrection(costs), CostCorrection()
        self._current: dict[int, int] = {}  # the plan in force: depth by request
        self._credit = 0.0  # seconds that probes may lose
        self._steps = 0
        self.last_goodput = 0.0

    # ---- the interface

    def choose_budgets(self, requests: Sequence[RequestView], prefill: PrefillLoad = NO_PREFILL) -> list[Limit]:
        if not requests:
            return []
        ids = [view.id for view in requests]
        acceptance = self.acceptance.estimate(ids)
        room = np.array([view.cap.depth for view in requests])
        nodes = np.array([view.cap.nodes for view in requests])
        room = np.minimum(room, np.searchsorted(self._cum_width, nodes, side="right") - 1).clip(0, self.max_depth)
        step = _Step(self, len(ids), sum(view.context_len for view in requests), room, prefill)
        best = step.best(acceptance)
        plain = _Plan(np.zeros(len(ids), np.int64), len(ids) / step.plain_seconds, step.plain_seconds, len(ids))
        held = np.array([self._current.get(key, d) for key, d in zip(ids, best.depths.tolist())])
        held = np.minimum(held, room)
        kept = best if (held == best.depths).all() else step.evaluate(held, acceptance)
        if kept.goodput < plain.goodput:
            kept = plain
        plan = best if best.goodput > kept.goodput * (1 + self.hysteresis) else kept
        self._current.update(zip(ids, plan.depths.tolist()))
        self.last_goodput = plan.goodput
        self._credit = min(self._credit + self.probe_share * plan.seconds, 2 * plan.seconds)
        probe = self._probe(step, plan, acceptance)
        depths = (plan if probe is None else probe).depths
        return [Limit(int(self._cum_width[d]), int(d)) for d in depths]

    def record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        accepted = np.array([o.accepted for o in outcomes], np.int64)
        rejected = np.array([o.rejected for o in outcomes], np.int64)
        self.acceptance.record([o.id for o in outcomes], accepted, rejected)
        fixed = self.costs.predict(0, timing.requests, timing.context)
        self.forward_correction.observe(timing.nodes, fixed, timing.forward_seconds)
        if timing.levels:
            predicted = self._draft_seconds(timing.levels, timing.drafts)
            self.draft_correction.observe(1, predicted, timing.draft_seconds)

    def plain_seconds(self, count: int, context: int) -> float:
        """Predicted seconds of a plain decode step of `count` requests over `context` KV rows, as corrected so far."""
        fixed = self.costs.predict(0, count, context)
        return self.forward_correction.seconds_of(count, fixed)

    def forget(self, request_id: int) -> None:
        self.acceptance.forget(request_id)
        self._current.pop(request_id, None)

    # ---- inside

    def _draft_seconds(self, levels: Any, drafts: Any) -> Any:
        """Of drafting `levels` levels, at least one."""
        per = self.draft
        return per.per_step + per.per_level * levels + per.per_node * drafts

    def _probe(self, step: _Step, plan: _Plan, acceptance: np.ndarray) -> _Plan | None:
        """A step worth trying for what it tells, if what it is predicted to lose is within the credit."""
        self._steps += 1
        turn, rest = divmod(self._steps, _PROBE_EVERY)
        if rest or self._credit <= 0:
            return None
        hope, stretch = turn % 2 == 0, 1 + self.uncertainty
        shifted = (acceptance * stretch).clip(max=1) if hope else acceptance / stretch
        probe = step.best(shifted, 1 / stretch if hope else stretch)
        if (probe.depths == plan.depths).all():
            if plan.depths.any() or not step.room.any():
                return None
            # Far from paying: still look at a few requests now and then, acceptance can rise.
            few = max(1, len(step.room) // 16)
            chosen = np.roll(np.arange(len(step.room)), -turn * few)[:few]
            depths = np.zeros(len(step.room), np.int64)
            depths[chosen] = np.minimum(2, step.room[chosen])
            probe = _Plan(depths, 0.0, 0.0, 0.0)
        probe = step.evaluate(probe.depths, acceptance)
        loss = probe.seconds - probe.tokens / plan.goodput
        if loss > self._credit:
            return None
        self._credit -= max(loss, 0.0)
        return probe


class _Step:
    """One step's predictions: B requests over `context` KV rows, at most room[b] draft levels each."""

    def __init__(self, policy: GoodputPolicy, count: int, context: int, room: np.ndarray, prefill: PrefillLoad):
        self.policy, self.count, self.room = policy, count, room
        self.base_nodes = count + prefill.nodes
        costs = policy.costs
        self._fixed = costs.base + costs.per_request * count + costs.per_context * context
        # Prefill has to be done sooner or later, whatever is drafted: only what it makes drafts cost counts.
        self._correction, self._drafting = policy.forward_correction, policy.draft_correction.factor_of(1)
        self.plain_seconds = self._correction.seconds_of(count, self._fixed)
        self._beside = (
            self._correction.seconds_of(self.base_nodes, self._fixed) if prefill.nodes else self.plain_seconds
        )

    def seconds(self, levels: int, drafts: int) -> float:
        """Predicted seconds with `drafts` draft nodes of `levels` levels."""
        if not levels:
            return self.plain_seconds
        added = self._correction.seconds_of(self.base_nodes + drafts, self._fixed) - self._beside
        return self.plain_seconds + added + self.policy._draft_seconds(levels, drafts) * self._drafting

    def table(self, most: int, extra_cost: float) -> np.ndarray:
        """What 0 ... most draft nodes add to a step's forward pass, in seconds, times extra_cost."""
        nodes = self.base_nodes + np.arange(most + 1)
        return (self._correction.seconds(nodes, self._fixed) - self._beside) * extra_cost

    def evaluate(self, depths: np.ndarray, acceptance: np.ndarray) -> _Plan:
        """Predictions for given depths."""
        place = np.arange(acceptance.shape[1])
        survival = np.where(place < depths[:, None], acceptance.cumprod(1), 0.0)
        tokens = self.count + float(survival.sum())
        seconds = self.seconds(int(depths.max(initial=0)), int(self.policy._cum_width[depths].sum()))
        return _Plan(depths, tokens / seconds, seconds, tokens)

    def best(self, acceptance: np.ndarray, extra_cost: float = 1.0) -> _Plan:
        """The depths of greatest predicted goodput. For each number of levels, the nodes in order of survival per node:
        a request's depths come in order, because survival never rises with depth."""
        policy = self.policy
        place = np.arange(acceptance.shape[1])
        survival = np.where(place < self.room[:, None], acceptance.cumprod(1), 0.0)
        worth = np.minimum.accumulate(survival / policy.widths, axis=1)
        order = np.argsort(-worth, axis=None, kind="stable")
        order = order[worth.ravel()[order] > 0]
        owner, level = np.divmod(order, len(place))
        gain, width = survival.ravel()[order], policy.widths[level]
        # rate[i, j]: the first j + 1 nodes of this order that lie within i + 1 levels.
        levels = np.arange(1, int(self.room.max(initial=0)) + 1)[:, None]
        within = level < levels
        tokens, drafts = self.count + (gain * within).cumsum(1), (width * within).cumsum(1)
        added = self.table(int(width.sum()), extra_cost)[drafts]
        # Drafting is priced also where no node lies within the levels: such a row loses to plain decoding, asked below.
        added += policy._draft_seconds(levels, drafts) * (self._drafting * extra_cost)
        rate = tokens / (self.plain_seconds + added)
        plain = self.count / self.plain_seconds
        chosen = order[:0]
        if rate.size and rate.max() > plain:
            row, last = divmod(int(rate.argmax()), rate.shape[1])
            chosen = np.flatnonzero(within[row, : last + 1])
        depths = np.bincount(owner[chosen], minlength=self.count)
        return self.evaluate(depths, acceptance)


def group_by_cost(
    costs: BatchCostModel,
    num_nodes: Sequence[int],
    context_lens: Sequence[int],
    bucket_sizes: Sequence[int],
    *,
    padded: bool,
) -> list[list[int]]:
    """Launches of a step: indices of the requests that run together, smallest bucket first.

    One launch unless `costs.should_split` says that several are faster, each of which reads the weights again. padded:
    whether a launch pads its requests to its largest bucket; packed execution has nothing to save and never splits.
    """
    everyone = list(range(len(num_nodes)))
    if not costs.should_split(num_nodes, context_lens, bucket_sizes, padded=padded).split:
        return [everyone] if everyone else []
    groups: dict[int, list[int]] = {}
    for b, nodes in enumerate(num_nodes):
        groups.setdefault(next((s for s in bucket_sizes if nodes <= s), max([nodes, *bucket_sizes])), []).append(b)
    return [groups[size] for size in sorted(groups)]
