"""Which requests run in a step, and how many tokens of each: continuous batching with prefill beside decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.engine.pack import Chunk
from specdec_kernels.engine.pages import Arena
from specdec_kernels.engine.policy import DraftPolicy, PrefillLoad, RequestView
from specdec_kernels.engine.request import RequestState


class StepPlan(NamedTuple):
    """Requests that decode in this step, with the drafts each may be given, and the prefill chunks beside them."""

    decoding: list[RequestState]
    limits: list[Limit]
    chunks: list[Chunk]


class Scheduler:
    """First come, first served. Running requests always get the page of their next token; when none is left, the
    youngest is sent back to the head of the queue and its text is computed again later. Draft slots are taken only from
    pages that are free anyway."""

    def __init__(self, arena: Arena, max_batch: int, max_step_tokens: int, metrics: EngineCounters):
        self.arena, self.max_batch, self.max_step_tokens, self.metrics = arena, max_batch, max_step_tokens, metrics
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._preempted: set[int] = set()  # in this step, by id: `in self.running` would be quadratic in the batch

    def plan(self, policy: DraftPolicy) -> StepPlan:
        """Choose the step; `policy` says how many drafts each request is worth. Every planned request owns the pages of
        its tokens when this returns; a request that the whole pool cannot hold gets `finish_reason` "memory"."""
        budget = self.max_step_tokens
        decoding: list[RequestState] = []
        chunks: list[Chunk] = []
        self._preempted.clear()
        for state in list(self.running):
            if state.id in self._preempted:  # by an older one
                continue
            size = min(len(state.tokens) - state.context_len, 1 if state.decoding else max(budget, 0))
            if size == 0:
                continue
            if not self._hold(state, state.context_len + size):
                continue
            if state.decoding:
                decoding.append(state)
            else:
                chunks.append(Chunk(state, size, state.context_len + size == len(state.tokens)))
            budget -= size
        # A later request may have pre-empted one that was planned before it.
        decoding = [state for state in decoding if state.id not in self._preempted]
        chunks = [chunk for chunk in chunks if chunk.state.id not in self._preempted]
        while self.waiting and len(self.running) < self.max_batch and budget > 0:
            state = self.waiting[0]
            if self.arena.pages_for(len(state.tokens)) > self.arena.num_free:
                if not self.running:
                    state.finish_reason = "memory"
                break
            self.running.append(self.waiting.popleft())
            size = min(len(state.tokens), budget)
            self._hold(state, size)
            chunks.append(Chunk(state, size, size == len(state.tokens)))
            budget -= size
        share = max(0, budget) // max(1, len(decoding))
        rows = sum(chunk.num_tokens for chunk in chunks)
        prefill = PrefillLoad(rows, len(chunks), rows + sum(chunk.state.context_len for chunk in chunks))
        wanted = policy.choose_budgets([self._view(state, share) for state in decoding], prefill)
        limits = [self._afford(state, limit) for state, limit in zip(decoding, wanted, strict=True)]
        return StepPlan(decoding, limits, chunks)

    def remove(self, state: RequestState) -> None:
        """Forget a request and take its pages back."""
        self.arena.shrink(state.pages, 0)
        if state in self.running:
            self.running.remove(state)
        elif state in self.waiting:
            self.waiting.remove(state)

    def trim(self, states: Sequence[RequestState]) -> None:
        """Take back the pages that a step's trees borrowed."""
        for state in states:
            self.arena.shrink(state.pages, state.context_len)

    def _view(self, state: RequestState, budget: int) -> RequestView:
        """No draft beyond what may still be emitted, no slot behind the longest text."""
        own, room = state.request.num_drafts, state.max_len - len(state.tokens)
        nodes = max(0, min(budget, room) if own is None else min(own, budget, room))
        return RequestView(state.id, state.context_len, Limit(nodes, max(0, min(nodes, room - 1))))

    def _afford(self, state: RequestState, limit: Limit) -> Limit:
        """Take the pages of a request's drafts, as far as pages are free."""
        nodes = limit.nodes
        while nodes > 0 and not self.arena.grow(state.pages, state.context_len + 1 + nodes):
            nodes -= 1
        return Limit(nodes, min(nodes, limit.depth))

    def _hold(self, state: RequestState, num_tokens: int) -> bool:
        """Get pages for `num_tokens` tokens of a running request, at the cost of younger ones or of itself."""
        while not self.arena.grow(state.pages, num_tokens):
            youngest = self.running[-1]
            if youngest is state and len(self.running) == 1:
                state.finish_reason = "memory"
                return False
            self._preempt(youngest)
            if youngest is state:
                return False
        return True

    def _preempt(self, state: RequestState) -> None:
        self.arena.shrink(state.pages, 0)
        state.context_len = 0
        self.running.remove(state)
        self._preempted.add(state.id)
        self.waiting.appendleft(state)
        self.metrics.preemptions += 1
