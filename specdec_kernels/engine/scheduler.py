"""Which requests run in a step, and how many tokens of each: continuous batching with prefill beside decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.engine.pack import Chunk
from specdec_kernels.engine.pages import Arena, Tenant
from specdec_kernels.engine.policy import DraftPolicy, PrefillLoad, RequestView
from specdec_kernels.engine.prefix_cache import PrefixCache
from specdec_kernels.engine.request import RequestState


class StepPlan(NamedTuple):
    """Requests that decode in this step, with the drafts each may be given, and the prefill chunks beside them."""

    decoding: list[RequestState]
    limits: list[Limit]
    chunks: list[Chunk]


class Scheduler:
    """First come, first served. Running requests always get the page of their next token; when none can be had, the
    youngest is sent back to the head of the queue and its text is computed again later, but for what the prefix cache
    still has. Draft slots are taken only from pages that no request owns.

    copy_page(src, dst): copies a page's KV at once (copy-on-write); None where there is nothing to copy (a simulator).
    """

    def __init__(
        self,
        arena: Arena,
        max_batch: int,
        max_step_tokens: int,
        metrics: EngineCounters,
        *,
        cache: PrefixCache | None = None,
        copy_page: Callable[[int, int], None] | None = None,
    ):
        self.arena, self.max_batch, self.max_step_tokens, self.metrics = arena, max_batch, max_step_tokens, metrics
        self.cache, self.copy_page = cache, copy_page
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._preempted: set[int] = set()  # in this step, by id: `in self.running` would be quadratic in the batch
        arena.reclaim = self._reclaim

    # ---- a step

    def plan(self, policy: DraftPolicy) -> StepPlan:
        """Choose the step; `policy` says how many drafts each request is worth. Every planned request owns the pages of
        its tokens when this returns; a request that the whole arena cannot hold gets `finish_reason` "memory"."""
        budget = self.max_step_tokens
        decoding: list[RequestState] = []
        chunks: list[Chunk] = []
        self._preempted.clear()
        for state in list(self.running):
            if state.id in self._preempted:  # by an older one
                continue
            size = min(len(state.tokens) - state.context_len, 1 if state.decoding else max(budget, 0))
            if size == 0 or not self._hold(state, state.context_len + size):
                continue
            if state.decoding:
                decoding.append(state)
            else:
                chunks.append(Chunk(state, size, state.context_len + size == len(state.tokens)))
            budget -= size
        # A later request may have pre-empted one that was planned before it.
        decoding = [state for state in decoding if state.id not in self._preempted]
        chunks = [chunk for chunk in chunks if chunk.state.id not in self._preempted]
        for state in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_batch:
                break
            if self._waits_for_its_leader(state):
                continue
            if not self._admit(state):
                break
            size = min(len(state.tokens) - state.context_len, budget)
            if not self.arena.grow(state.pages, state.context_len + size):
                raise RuntimeError("Scheduler: pages that were there are gone")
            chunks.append(Chunk(state, size, state.context_len + size == len(state.tokens)))
            budget -= size
        share = max(0, budget) // max(1, len(decoding))
        prefill = PrefillLoad(sum(chunk.num_tokens for chunk in chunks))
        wanted = policy.choose_budgets([self._view(state, share) for state in decoding], prefill)
        limits = [self._afford(state, limit) for state, limit in zip(decoding, wanted, strict=True)]
        return StepPlan(decoding, limits, chunks)

    def settle(self, states: Sequence[RequestState]) -> None:
        """After a step: let the prefix cache know of full pages, take back what the step's trees borrowed."""
        for state in states:
            if self.cache is not None and state.cursor is not None:
                self.cache.extend(state.cursor, state.tokens, state.context_len, state.pages)
            self.arena.shrink(state.pages, state.context_len)

    def remove(self, state: RequestState) -> None:
        """Forget a request and take its pages back."""
        self._release(state)
        if state in self.running:
            self.running.remove(state)
        elif state in self.waiting:
            self.waiting.remove(state)

    def preempt_all(self) -> None:
        """Send every running request back to the queue, in order: its KV is no longer right."""
        for state in list(reversed(self.running)):
            self._preempt(state)

    # ---- admission

    def _waits_for_its_leader(self, state: RequestState) -> bool:
        """The other samples of a request start when the first one's prompt is computed."""
        leader = state.leader
        return leader is not None and leader.finish_reason is None and not leader.decoding and leader.num_output == 0

    def _admit(self, state: RequestState) -> bool:
        """Move a waiting request to the running ones, with the KV that is there already."""
        if self.cache is not None:
            hit = self.cache.match(state.tokens, state.namespace)
            state.pages, state.context_len, state.cursor = hit.pages, hit.num_tokens, hit.cursor
        missing = self.arena.pages_for(len(state.tokens)) - len(state.pages)
        if missing > self.arena.available():
            self._release(state)
            if not self.running:
                state.finish_reason = "memory"
            return False
        if self.cache is not None and state.num_cached is None:
            self.metrics.prefix_queries += len(state.tokens)
            self.metrics.prefix_hits += hit.num_tokens
            self.metrics.prefix_soft_hits += hit.num_soft
            self.metrics.prefix_dropped += hit.num_dropped
        self._share_with_leader(state)
        state.num_cached = state.context_len if state.num_cached is None else state.num_cached
        self.waiting.remove(state)
        self.running.append(state)
        return True

    def _share_with_leader(self, state: RequestState) -> None:
        """Samples of one request share the prompt's pages. The last one is written by each of them: it is copied."""
        leader = state.leader
        if leader is None or leader not in self.running or not leader.decoding or state.num_output:
            return
        known = state.num_prompt - 1  # the last prompt token is computed again: its logits are needed
        whole, rest = divmod(known, self.arena.page_size)
        for page in leader.pages[len(state.pages) : whole]:
            self.arena.share(page)
            state.pages.append(page)
        state.context_len = max(state.context_len, whole * self.arena.page_size)
        if rest and self.copy_page is not None and len(state.pages) == whole and self.arena.grow(state.pages, known):
            self.copy_page(leader.pages[whole], state.pages[whole])
            state.context_len = known
            self.metrics.copied_pages += 1

    # ---- drafts

    def _view(self, state: RequestState, budget: int) -> RequestView:
        """No draft beyond what may still be emitted, no slot behind the longest text, nor behind what the drafter can
        read."""
        own, room = state.request.num_drafts, state.max_len - len(state.tokens)
        nodes = max(0, min(budget, room) if own is None else min(own, budget, room))
        longest = getattr(state.drafter, "max_context", None)
        depth = room - 1 if longest is None else min(room - 1, longest - len(state.tokens))
        depth = max(0, min(nodes, depth))
        return RequestView(state.id, state.context_len, Limit(nodes if depth else 0, depth))

    def _afford(self, state: RequestState, limit: Limit) -> Limit:
        """Take the pages of a request's drafts, as far as they can be had without taking any from a request."""
        nodes, unowned = limit.nodes, self.arena.num_unowned
        while nodes > 0:
            missing = self.arena.pages_for(state.context_len + 1 + nodes) - len(state.pages)
            if missing <= unowned and self.arena.grow(state.pages, state.context_len + 1 + nodes):
                break
            nodes -= 1
        return Limit(nodes, min(nodes, limit.depth))

    # ---- pages

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
        self._release(state)
        self.running.remove(state)
        self._preempted.add(state.id)
        self.waiting.appendleft(state)
        self.metrics.preemptions += 1

    def _release(self, state: RequestState) -> None:
        self.arena.shrink(state.pages, 0)
        self.release_drafts(state)
        state.context_len, state.cursor = 0, None

    def release_drafts(self, state: RequestState) -> int:
        """Take back a request's pages of the draft tenant; its drafter starts over. Returns how many."""
        count = len(state.draft_pages)
        if count:
            self.arena.shrink(state.draft_pages, 0, Tenant.DRAFT)
        return count

    def _reclaim(self, count: int) -> int:
        """The target needs pages that were lent to the drafter: the youngest requests give theirs."""
        given = 0
        for state in reversed(self.running):
            if given >= count:
                break
            given += self.release_drafts(state)
        return given
