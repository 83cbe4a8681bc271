"""The engine's scheduler and draft policies on a modelled machine: traces of thousands of requests in seconds.

`Scheduler`, `Arena` and the policies are the engine's own; the model, its forward pass and the drafter are replaced by
a step time and by coins. A draft for output position p at depth i is accepted if the request's own coin u[p] falls
below its acceptance there, so arms that run the same trace meet the same luck.

    arrivals -> Scheduler.plan(policy) -> step time of the launches -> coins -> tokens, finished requests, policy.record
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specdec_kernels.batching import BatchCostModel
from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.engine.pages import Arena, Tenant
from specdec_kernels.engine.policy import DraftCosts, DraftOutcome, DraftPolicy, StepTiming, group_by_cost
from specdec_kernels.engine.request import Request, RequestState
from specdec_kernels.engine.scheduler import Scheduler

EXECUTIONS = ("ragged", "padded", "grouped", "look_ahead")
BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Machine(NamedTuple):
    """The truth a policy has to find out. forward, draft: seconds of a step; jitter: log-normal spread of each of them;
    drift(seconds since the start) -> factors of (base, per_node, drafting), None: constant."""

    forward: BatchCostModel
    draft: DraftCosts
    jitter: float = 0.0
    drift: Callable[[float], tuple[float, float, float]] | None = None

    def at(self, now: float) -> tuple[BatchCostModel, DraftCosts]:
        """Costs at a moment. The knee moves with the two sides that meet there."""
        if self.drift is None:
            return self.forward, self.draft
        base, node, draft = self.drift(now)
        forward, knee = self.forward, round(self.forward.free_nodes * base / node)
        moved = forward._replace(base=forward.base * base, per_node=forward.per_node * node, free_nodes=knee)
        return moved, DraftCosts(*(value * draft for value in self.draft))


def h200(
    *,
    params: float = 8.0e9,
    draft_params: float = 0.4e9,
    kv_bytes_per_token: int = 32 * 2 * 8 * 128 * 2,
    bandwidth: float = 4.3e12,
    flops: float = 790e12,
    overhead: float = 3e-4,
    jitter: float = 0.03,
) -> Machine:
    """A roofline of one H200 serving a dense bfloat16 model with an EAGLE-3-class draft head.

    bandwidth, flops: sustained bytes/s and FLOP/s (4.3 TB/s and 790 TFLOP/s: figures others measured); params,
    draft_params: weights read a target and a draft pass; overhead: sampling, commit and launches a step, a sixth of it
    a draft pass. Not measured on such a machine by us.
    """
    base, per_node = 2 * params / bandwidth, 2 * params / flops
    forward = BatchCostModel(
        base=base + overhead,
        per_request=2e-6,
        per_context=kv_bytes_per_token / bandwidth,
        per_node=per_node,
        free_nodes=int(base / per_node),
        relative_error=0.0,
    )
    return Machine(
        forward, DraftCosts(0.0, 2 * draft_params / bandwidth + overhead / 6, 2 * draft_params / flops), jitter
    )


class TraceRequest(NamedTuple):
    """arrival in seconds; tokens of prompt and output; acceptance: conditional, at depth 1, 2, ... (the last one holds
    for deeper drafts); swing: it moves by this share up and down along the output, once every `period` tokens."""

    arrival: float
    num_prompt: int
    num_output: int
    acceptance: Sequence[float]
    swing: float = 0.0
    period: float = 200.0


@dataclass
class Simulation:
    """Sums and per-request times of one run. slots: node rows computed, padding included; nodes: real tree nodes (roots
    and drafts) of decoding requests; tokens: emitted by them. finished[i], first[i]: seconds of request i (NaN: never).
    """

    seconds: float = 0.0
    steps: int = 0
    launches: int = 0
    tokens: int = 0
    nodes: int = 0
    slots: int = 0
    drafted: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    draft_seconds: float = 0.0
    target_page_seconds: float = 0.0
    draft_page_seconds: float = 0.0
    num_pages: int = 0
    refused: int = 0  # request steps that went without their drafts for want of draft pages
    restarted_tokens: int = 0  # context that the drafter computed (again) because it held none of it
    first: np.ndarray = field(default_factory=lambda: np.zeros(0))
    finished: np.ndarray = field(default_factory=lambda: np.zeros(0))
    arrivals: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def throughput(self) -> float:
        """Emitted tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def slot_utilisation(self) -> float:
        """Slots that hold a node: padding alone."""
        return self.nodes / self.slots if self.slots else 0.0

    @property
    def useful_token_ratio(self) -> float:
        """Emitted tokens a verified node: rejection alone."""
        return self.tokens / self.nodes if self.nodes else 0.0

    @property
    def memory_in_use(self) -> float:
        """Share of pages that requests owned, over time."""
        held = self.target_page_seconds + self.draft_page_seconds
        return held / (self.num_pages * self.seconds) if self.seconds else 0.0

    @property
    def latencies(self) -> np.ndarray:
        """Seconds from arrival to the last token, of finished requests."""
        return (self.finished - self.arrivals)[~np.isnan(self.finished)]


class _Coins:
    """A request's luck: its acceptance thresholds and coins by output position."""

    __slots__ = ("coins", "shape", "swing")

    def __init__(self, spec: TraceRequest, seed: int, index: int):
        rng = np.random.default_rng([seed, index])
        self.coins = rng.random(spec.num_output + 1).tolist()
        self.shape = list(spec.acceptance)
        phase = rng.random() * 2 * math.pi
        place = np.arange(spec.num_output + 1)
        self.swing = (
            (1 + spec.swing * np.sin(2 * math.pi * place / spec.period + phase)).tolist() if spec.swing else None
        )

    def accepted(self, position: int, depth: int) -> int:
        """Leading accepted drafts of a chain of `depth` whose first token is output number `position`."""
        last = len(self.shape) - 1
        for i in range(depth):
            level = self.shape[min(i, last)] * (self.swing[position + i] if self.swing else 1.0)
            if self.coins[position + i] >= level:
                return i
        return depth


def simulate(
    trace: Sequence[TraceRequest],
    policy: DraftPolicy,
    machine: Machine,
    *,
    max_batch: int,
    num_pages: int = 1 << 20,
    page_size: int = 16,
    max_step_tokens: int = 8192,
    execution: str = "ragged",
    bucket_sizes: Sequence[int] = BUCKETS,
    max_tokens: int | None = None,
    seed: int = 0,
    draft_page_size: int = 0,
    floors: tuple[int, int] = (0, 0),
) -> Simulation:
    """Run a trace (sorted by arrival) until it is done, or until `max_tokens` were emitted.

    draft_page_size: tokens of the drafter's own KV that a page holds (0: it has none); floors: pages that only the
    target, only the drafter may hold (see `Arena`; floors that add up to all pages are a fixed partition).

    execution: how a step's trees are launched. "ragged": packed, one launch; "padded": one launch, every request padded
    to the largest bucket; "grouped": a launch a bucket; "look_ahead": whichever of these two `should_split` predicts to
    be faster. Errors: ValueError for an unknown execution, an unsorted trace, or a request the arena can never hold.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"simulate: execution: expected one of {EXECUTIONS}, got {execution!r}")
    if any(a.arrival > b.arrival for a, b in itertools.pairwise(trace)):
        raise ValueError("simulate: trace: expected requests sorted by arrival")
    arena = Arena(num_pages, page_size, draft_page_size=draft_page_size, target_floor=floors[0], draft_floor=floors[1])
    return _Run(trace, policy, machine, arena, max_batch, max_step_tokens, execution, bucket_sizes, seed)(max_tokens)


class _Run:
    def __init__(
        self,
        trace: Sequence[TraceRequest],
        policy: DraftPolicy,
        machine: Machine,
        arena: Arena,
        max_batch: int,
        max_step_tokens: int,
        execution: str,
        bucket_sizes: Sequence[int],
        seed: int,
    ):
        self.trace, self.policy, self.machine, self.seed = trace, policy, machine, seed
        self.execution, self.bucket_sizes = execution, bucket_sizes
        self.metrics = EngineCounters()
        self.arena = arena
        self.scheduler = Scheduler(arena, max_batch, max_step_tokens, self.metrics)
        self.rng = np.random.default_rng([seed, 1 << 40])
        self.out = Simulation(
            first=np.full(len(trace), np.nan),
            finished=np.full(len(trace), np.nan),
            arrivals=np.array([spec.arrival for spec in trace]),
            num_pages=arena.num_pages,
        )
        self.coins: dict[int, _Coins] = {}
        self.index: dict[int, int] = {}
        self.arrived = 0

    def __call__(self, max_tokens: int | None) -> Simulation:
        scheduler, out = self.scheduler, self.out
        while max_tokens is None or out.tokens < max_tokens:
            busy = scheduler.running or scheduler.waiting
            if not busy:
                if self.arrived == len(self.trace):
                    break
                out.seconds = max(out.seconds, self.trace[self.arrived].arrival)
            while self.arrived < len(self.trace) and self.trace[self.arrived].arrival <= out.seconds:
                self._arrive()
            self._step()
        out.preemptions = self.metrics.preemptions
        return out

    def _arrive(self) -> None:
        spec, index = self.trace[self.arrived], self.arrived
        self.arrived += 1
        request = Request([0], max_tokens=spec.num_output)
        length, stream = spec.num_prompt + spec.num_output, None
        values: list[Any] = [request, [0] * spec.num_prompt, spec.num_prompt, 0, frozenset(), length, None, stream]
        state = RequestState(*values)
        self.index[state.id], self.coins[state.id] = index, _Coins(spec, self.seed, index)
        self.scheduler.waiting.append(state)

    def _step(self) -> None:
        scheduler, out = self.scheduler, self.out
        plan = scheduler.plan(self.policy)
        for state in [s for s in [*scheduler.waiting, *scheduler.running] if s.finish_reason == "memory"]:
            raise ValueError(f"simulate: num_pages: expected enough for {len(state.tokens)} tokens alone")
        forward, draft = self.machine.at(out.seconds)
        limits, restarted = self._draft_memory(plan.decoding, plan.limits)
        depths = [limit.depth for limit in limits]
        sizes = [1 + limit.nodes for limit in limits]
        contexts = [state.context_len for state in plan.decoding]
        rows = sum(chunk.num_tokens for chunk in plan.chunks)
        chunk_context = rows + sum(chunk.state.context_len for chunk in plan.chunks)
        seconds, slots, launches = self._launches(forward, sizes, contexts, rows, len(plan.chunks), chunk_context)
        levels, drafts = max(depths, default=0), sum(sizes) - len(sizes)
        drafting = draft.per_step + draft.per_level * levels + draft.per_node * drafts if levels else 0.0
        drafting += draft.per_node * restarted
        if self.machine.jitter:
            spread = np.exp(self.machine.jitter * self.rng.standard_normal(2))
            seconds, drafting = seconds * float(spread[0]), drafting * float(spread[1])
        out.target_page_seconds += self.arena.active[Tenant.TARGET] * (seconds + drafting)
        out.draft_page_seconds += self.arena.active[Tenant.DRAFT] * (seconds + drafting)
        out.restarted_tokens += restarted
        out.seconds += seconds + drafting
        out.draft_seconds += drafting
        out.steps += 1
        out.launches += launches
        out.slots += slots
        out.nodes += sum(sizes)
        out.drafted += drafts
        out.prefill_tokens += rows
        outcomes = []
        for state, depth in zip(plan.decoding, depths):
            accepted = self.coins[state.id].accepted(state.num_output, depth) if depth else 0
            if depth:
                outcomes.append(DraftOutcome(state.id, accepted, accepted < depth))
            self._emit(state, accepted + 1)
        for state, size, last in plan.chunks:
            state.context_len += size - last
            if last:
                self._emit(state, 1)
        scheduler.settle(scheduler.running)
        requests = len(plan.decoding) + len(plan.chunks)
        shown = 0.0 if restarted else drafting
        timing = StepTiming(slots + rows, requests, sum(contexts) + chunk_context, levels, drafts, seconds, shown)
        self.policy.record(outcomes, timing)

    def _draft_memory(self, states: list[RequestState], limits: list[Limit]) -> tuple[list[Limit], int]:
        """Pages for the drafter's own KV. Without them a request goes without drafts; with none so far, its context is
        computed by the drafter first (the second value: tokens of that)."""
        if not self.arena.draft_page_size:
            return limits, 0
        out, restarted = [], 0
        for state, limit in zip(states, limits):
            held = bool(state.draft_pages)
            if limit.depth:
                tokens = state.context_len + 1 + limit.depth
                if not self.arena.grow(state.draft_pages, tokens, Tenant.DRAFT):
                    limit = Limit(0, 0)
                    self.out.refused += 1
                elif not held:
                    restarted += state.context_len
            out.append(limit)
        return out, restarted

    def _launches(
        self, forward: BatchCostModel, sizes: list[int], contexts: list[int], rows: int, chunks: int, chunk_context: int
    ) -> tuple[float, int, int]:
        """(seconds, node slots, launches) of a step; prefill rows ride in the first launch, never padded."""
        if self.execution == "ragged" or not sizes:
            nodes = sum(sizes)
            return forward.predict(nodes + rows, len(sizes) + chunks, sum(contexts) + chunk_context), nodes, 1
        bucket = [next((s for s in self.bucket_sizes if size <= s), size) for size in sizes]
        everyone = list(range(len(sizes)))
        if self.execution == "padded":
            groups = [everyone]
        elif self.execution == "grouped":
            groups = [[b for b in everyone if bucket[b] == size] for size in sorted(set(bucket))]
        else:
            groups = group_by_cost(forward, sizes, contexts, self.bucket_sizes, padded=True)
        seconds, slots = 0.0, 0
        for i, members in enumerate(groups):
            padded = len(members) * max(bucket[b] for b in members)
            context = sum(contexts[b] for b in members)
            extra = (rows, chunks, chunk_context) if i == 0 else (0, 0, 0)
            seconds += forward.predict(padded + extra[0], len(members) + extra[1], context + extra[2])
            slots += padded
        return seconds, slots, len(groups)

    def _emit(self, state: RequestState, count: int) -> None:
        out, index = self.out, self.index[state.id]
        count = min(count, state.max_len - len(state.tokens))
        state.tokens += [0] * count
        state.context_len += count
        out.tokens += count
        if math.isnan(out.first[index]):
            out.first[index] = out.seconds
        if len(state.tokens) >= state.max_len:
            out.finished[index] = out.seconds
            self.scheduler.remove(state)
            self.policy.forget(state.id)
            del self.coins[state.id]
