"""The engine: plan a step, draft, verify all trees in one packed forward pass, keep what was accepted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from specdec_kernels.engine.batch import HiddenStates, TargetModel
from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.drafters import DraftContext, Drafter, DrafterTable
from specdec_kernels.engine.drafting import STRIKES, Drafting
from specdec_kernels.engine.graphs import GraphedForward
from specdec_kernels.engine.life import prepare, take
from specdec_kernels.engine.memory import Memory
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.engine.observing import committed_rows, show, wanted_states
from specdec_kernels.engine.pack import Packed, pack_step
from specdec_kernels.engine.parallel import expect_alike
from specdec_kernels.engine.policy import DraftOutcome, DraftPolicy, FixedDrafts, StepTiming
from specdec_kernels.engine.request import Event, Request, RequestState, Result
from specdec_kernels.engine.scheduler import Scheduler, StepPlan
from specdec_kernels.engine.verification import verify_step
from specdec_kernels.kv import commit_kv
from specdec_kernels.sampling import Verified

logger = logging.getLogger("specdec_kernels")

# Bits of the verifier's flags (docs/numerics.md).
_NAN_ROW = 1
_NO_TOKEN = 2  # all logits NaN or forbidden: the request's next token means nothing
_BAD_DRAFT = 8 | 16 | 256 | 512  # an id or a law that no sound drafter gives
_EMPTY_RESIDUAL = 32

_Reports = list[tuple[Event, RequestState]]  # an event and the request it is of


class Engine:
    """Continuous-batching generation with speculation.

    `add` queues requests, `step` runs one packed forward pass for all of them and returns what it gave; `generate` does
    both for a list of prompts. Greedy output equals plain greedy decoding, sampled output has the target's law.
    `policy` sets each request's number of drafts (None: always `config.num_drafts`); see `GoodputPolicy`.
    One thread calls `step`; `add` and `abort` may be called from any, also while it runs.
    """

    def __init__(
        self,
        model: TargetModel,
        drafter: str | Drafter = "none",
        config: EngineConfig | None = None,
        *,
        policy: DraftPolicy | None = None,
    ):
        self.model, self.config = model, config or EngineConfig()
        self.config.validate()
        self.policy = FixedDrafts(self.config.num_drafts) if policy is None else policy
        self.metrics = EngineCounters()
        self._drafters = DrafterTable(model)
        self._default_drafter = self._drafters.get(drafter)
        if getattr(model, "parallel", None) is not None:
            expect_alike(self.policy, self._default_drafter, self.config)
        self.memory = Memory(model, self._default_drafter, self.config)
        self.arena, self.cache, self.prefixes = self.memory.arena, self.memory.cache, self.memory.prefixes
        self.scheduler = Scheduler(
            self.arena, self.config.max_batch, self.config.max_step_tokens, self.metrics,
            cache=self.prefixes, copy_page=self.memory.copy_page,
        )  # fmt: skip
        self._states: dict[int, RequestState] = {}
        context = DraftContext(model, self.cache, self.memory.draft_cache, self.arena)
        self._drafting = Drafting(
            self._drafters, self._default_drafter, context, self.scheduler, self._states, self.metrics, self.config
        )
        self._graphs = GraphedForward.of(model, self.cache, self.config, self.arena)
        self._weights = 0  # version of the target's weights: cached KV of another one is another text's
        self._lock = threading.RLock()  # for who begins or ends a step, and who adds or aborts
        self._stepping = False  # then only the step itself changes requests and pages
        self._aborted: set[int] = set()  # while a step runs
        self._ended: _Reports = []  # requests that ended without verification, in this step or in one that raised

    # ---- the caller's side

    def add(self, request: Request) -> int:
        """Queue a request and return its id; with `n` samples, the first of `n` consecutive ids. ValueError/TypeError
        if it can never run."""
        return self._enqueue(self._prepare(request))

    def abort(self, request_id: int) -> Result | None:
        """Stop a request; returns what it has so far, or None if it is not running. Called while a step runs (by a
        drafter, from another thread) it takes effect when the step ends, with an event of that step: nothing that the
        step may still write to is given to others."""
        with self._lock:
            state = self._states.get(request_id)
            if state is None:
                return None
            if self._stepping:
                self._aborted.add(request_id)
                return None
            return self._finish(state, "abort")[0].result

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._ended)

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        on_event: Callable[[int, Event], None] | None = None,
        **parameters: Any,
    ) -> list[Result]:
        """Run one request per prompt to its end; results in the order of the prompts (with `n` samples, n results for
        each). `parameters` are those of `Request`; `on_event(index of the result, event)` streams. A bad prompt raises
        before any of them starts."""
        if isinstance(prompts, str):
            raise TypeError("generate: prompts: expected a list of prompts, got one string")
        groups = [self._prepare(Request(prompt, **parameters)) for prompt in prompts]
        states = [state for group in groups for state in group]
        index = {state.id: i for i, state in enumerate(states)}
        for group in groups:
            self._enqueue(group)
        try:
            while any(state.finish_reason is None for state in states):
                for event in self.step():
                    if on_event is not None and event.request_id in index:
                        on_event(index[event.request_id], event)
        finally:
            for state in states:  # a callback raised: leave nothing behind
                self.abort(state.id)
        return [state.result() for state in states]

    def weights_changed(self) -> None:
        """The target's weights were changed in place: forget all cached KV, and what drafters noted of the target's
        states. Running requests go on with the new weights, their text computed again. (A model with packed copies of
        its weights, `pack=True`, has to be loaded again instead.)"""
        with self._lock:
            self._weights += 1
            if self.prefixes is not None:
                self.prefixes.flush()
            self.scheduler.preempt_all()
            for state in self._states.values():
                state.namespace = (*self._namespace, state.request.cache_salt)
                state.drafter_state = None
        for drafter in self._drafters.attached:
            if hasattr(drafter, "weights_changed"):
                drafter.weights_changed(self.model)

    # ---- one step

    def step(self) -> list[Event]:
        """Run one step for all requests; returns what each got, after calling their `on_event`."""
        start = time.perf_counter()
        reports = self._step()
        seconds = time.perf_counter() - start
        self.metrics.step_time_s += seconds
        for event, state in reports:
            self._tell(event, state)
        self._drafting.between_steps(seconds, self._lock)
        return [event for event, _ in reports]

    def _tell(self, event: Event, state: RequestState) -> None:
        """Call a request's `on_event`; one that raises is not called again: it must not cost others their events."""
        if state.request.on_event is None or state.deaf:
            return
        try:
            state.request.on_event(event)
        except Exception as error:
            state.deaf = True
            logger.warning("on_event of request %d failed and is not called again", state.id, exc_info=error)

    @torch.inference_mode()
    def _step(self) -> _Reports:
        reports: _Reports = []
        with self._lock:
            self._stepping = True
        try:
            plan = self.scheduler.plan(self.policy)
            self._ended += [
                self._finish(s, "memory") for s in list(self._states.values()) if s.finish_reason == "memory"
            ]
            if plan.decoding or plan.chunks:
                reports = self._run(plan)
        finally:  # also if the model raised: what trees borrowed goes back, and the requests are as before
            self._end_step()
        reports += self._ended
        self._ended = []
        if self.config.check:
            with self._lock:
                self.memory.check(self._states.values())
        return reports

    def _end_step(self) -> None:
        """Settle the step, then end the requests that were aborted while it ran."""
        with self._lock:
            try:
                self.scheduler.settle(self.scheduler.running)
                aborted = [self._states[i] for i in sorted(self._aborted) if i in self._states]
                self._ended += [self._finish(state, "abort") for state in aborted]
            finally:
                self._aborted.clear()
                self._stepping = False

    def _run(self, plan: StepPlan) -> _Reports:
        """Draft, forward, verify, accept."""
        requests = plan.decoding + [chunk.state for chunk in plan.chunks]
        context = sum(state.context_len for state in requests)
        start = time.perf_counter()
        reading = any(
            limit.depth and hasattr(state.drafter, "kv_shape") and not state.draft_pages
            for state, limit in zip(plan.decoding, plan.limits)
        )
        self.metrics.draft_version, emitted_before = getattr(self._default_drafter, "version", 0), self.metrics.emitted
        drafts = self._drafting.ask(plan.decoding, plan.limits)
        drafted = time.perf_counter()
        packed = pack_step(
            list(zip(plan.decoding, drafts)), plan.chunks, self.config.page_size, self.model.device,
            self.model.vocab_size,
        )  # fmt: skip
        hidden = wanted_states(requests)
        logits = self._forward(packed, hidden)
        for state, size, last in plan.chunks:
            state.context_len += size - last  # a text's last token is the root: verification commits it
            self.metrics.prefill_tokens += size
        reports: _Reports = []
        outcomes: list[DraftOutcome] = []
        verified = time.perf_counter()
        outcome = None
        if packed.states:
            outcome = verify_step(self.model, packed, logits)
            if packed.branched:  # the path accepted in a chain is dense already
                self._commit(packed, outcome)
            reports, outcomes = self._accept(packed, outcome)
        end = time.perf_counter()
        if hidden is not None:
            accepted = None if outcome is None else outcome.accepted_nodes
            seen = committed_rows(packed, plan.chunks, accepted)
            show(seen, hidden, self._drafting.context, self._drafting.give_up)
        observing = time.perf_counter() - end
        self.metrics.draft_time_s += drafted - start + observing
        self.metrics.verify_time_s += end - verified
        timing = StepTiming(
            nodes=len(packed.batch.token_ids), requests=len(requests), context=context,
            levels=max((draft.depth for draft in drafts), default=0), drafts=sum(map(len, drafts)),
            forward_seconds=end - drafted, draft_seconds=0.0 if reading else drafted - start + observing,
        )  # fmt: skip
        plain_seconds = getattr(self.policy, "plain_seconds", None)
        if plain_seconds is not None and packed.states and not plan.chunks:
            emitted = self.metrics.emitted - emitted_before
            plain = plain_seconds(len(packed.states), context) * emitted / len(packed.states)
            self.metrics.price(end - start + observing, plain)
        self.policy.record(outcomes, timing)
        return reports

    def _forward(self, packed: Packed, hidden: HiddenStates | None) -> torch.Tensor:
        start = time.perf_counter()
        logits = None
        if self._graphs is not None and hidden is None:
            logits = self._graphs(packed)
            self.metrics.verify_slots_padded += 0 if logits is None else self._graphs.padding
        if logits is None:
            wanted: dict[str, Any] = {} if hidden is None else {"hidden": hidden}  # not every model has it
            if getattr(self.model, "parallel", None) is not None:
                wanted["own_columns"] = True
            logits = self.model.forward(packed.batch, self.cache, **wanted)
        self.metrics.forward_time_s += time.perf_counter() - start
        self.metrics.forwards += 1
        self.metrics.verify_slots += len(packed.draft_token_ids)
        return logits

    def _commit(self, packed: Packed, verified: Verified) -> None:
        commit_kv(
            self.memory.handle,
            None,
            packed.batch.page_table[: len(packed.states)],
            packed.root_lens,
            packed.tree.cu_nodes,
            verified.accepted_nodes,
            verified.num_emitted,
            page_size=self.config.page_size,
        )

    def _accept(self, packed: Packed, verified: Verified) -> tuple[_Reports, list[DraftOutcome]]:
        """Append what was accepted to each request's text; end those that reached a stop or their limit."""
        count = len(packed.states)
        rows = zip(
            packed.states,
            packed.drafts,
            verified.output_token_ids.tolist(),
            verified.num_emitted.tolist(),
            verified.accepted_nodes.tolist(),
            verified.flags.tolist(),
            [None] * count if verified.logprobs is None else verified.logprobs.tolist(),
        )
        reports: _Reports = []
        outcomes: list[DraftOutcome] = []
        for state, draft, ids, emitted, nodes, flags, logprobs in rows:
            fatal = f"verify: flags {flags:#x}" if flags & _NO_TOKEN else None
            judged = emitted - (fatal is not None)
            if state.fault is not None:  # its rows were not what they should have been
                fatal, judged = state.fault, 0
            new, text, reason = take(state, ids[:judged], fatal)
            before = state.context_len
            state.tokens += new
            state.context_len = min(before + emitted, len(state.tokens))
            state.num_steps += 1
            exhausted = nodes[emitted - 1] not in draft.parents
            version = getattr(state.drafter, "version", 0)  # of the weights that drafted: it changes between steps
            kind = self.metrics.of_class(state.drafter.name, state.request.temperature, version)
            for counters in (state.stats, self.metrics, kind):
                counters.record(draft.depth_counts(), emitted - 1, len(new), exhausted)
                counters.flagged += flags != 0
                counters.nan_rows += flags & _NAN_ROW != 0
                counters.resample_fallback += flags & _EMPTY_RESIDUAL != 0
                counters.overshoot += emitted - len(new) if reason == "stop" else 0
            if len(draft) and not flags and fatal is None:
                refused = not exhausted and len(new) == emitted
                outcomes.append(DraftOutcome(state.id, min(emitted - 1, len(new)), refused))
            if flags & _BAD_DRAFT:
                state.draft_strikes += 1
                if state.draft_strikes == STRIKES:
                    self._drafting.give_up([state], f"verify: flags {flags:#x}")
            if reason == "error":  # rows of this step are not to be found by anyone, and with NaN none of it at all
                self.memory.disown(state, flags & _NAN_ROW != 0)
            else:
                self.memory.keep(state, draft, before, nodes[:emitted])
            accepted = min(emitted - 1, len(new))
            event = Event(state.id, new, text, accepted, logprobs=_logprobs(state, logprobs, len(new)))
            reports.append(self._finish(state, reason, event) if reason else (event, state))
        return reports, outcomes

    # ---- a request's life

    @property
    def _namespace(self) -> tuple[Any, ...]:
        return (self.model.name, self._weights, str(self.model.dtype))

    def _prepare(self, request: Request) -> list[RequestState]:
        drafter = self._default_drafter if request.drafter is None else self._drafters.get(request.drafter)
        self.memory.expect_known(drafter)
        return prepare(request, self.model, self.arena, drafter, self._namespace)

    def _enqueue(self, states: list[RequestState]) -> int:
        with self._lock:
            for state in states:
                self._states[state.id] = state
                self.scheduler.waiting.append(state)
                self.metrics.requests += 1
        return states[0].id

    def _finish(self, state: RequestState, reason: str, event: Event | None = None) -> tuple[Event, RequestState]:
        """End a request: its full pages stay in the prefix cache, everything else goes back."""
        state.finish_reason = reason
        if state in self.scheduler.running:
            self.scheduler.settle([state])
        self.scheduler.remove(state)
        self.policy.forget(state.id)
        del self._states[state.id]
        self._drafting.left(state.drafter)
        self.metrics.finish(reason, state.stats)
        if event is None:
            event = Event(state.id, [], state.stream.push([], last=True), 0)
        return replace(event, result=state.result()), state


def _logprobs(state: RequestState, values: list[Any] | None, count: int) -> list[Any] | None:
    """The request's own kind of log-probabilities for its `count` new tokens, also added to its record."""
    kind = state.request.logprobs
    if kind is None or values is None:
        return None
    mine = values[:count]
    if mine and isinstance(mine[0], list):  # requests of several kinds share the step: (raw, processed)
        mine = mine if kind == "both" else [pair[kind == "processed"] for pair in mine]
    mine = [tuple(pair) if isinstance(pair, list) else pair for pair in mine]
    state.logprobs += mine
    return mine
