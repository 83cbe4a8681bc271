"""The engine: plan a step, draft, verify all trees in one packed forward pass, keep what was accepted."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec_kernels.engine.batch import TargetModel
from specdec_kernels.engine.drafters import Draft, DraftContext, Drafter, DrafterTable, Limit
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.engine.pack import Packed, make_sampling, pack_step
from specdec_kernels.engine.pages import Arena
from specdec_kernels.engine.policy import DraftOutcome, DraftPolicy, FixedDrafts, StepTiming
from specdec_kernels.engine.request import Event, Request, RequestState, Result
from specdec_kernels.engine.scheduler import Scheduler
from specdec_kernels.engine.tokens import TextStream, encode_prompt
from specdec_kernels.kv import commit_kv, kv_handle
from specdec_kernels.sampling import Verified, verify

logger = logging.getLogger("specdec_kernels")

# Flag bits after which a request's next token means nothing: its logits were all NaN or all forbidden.
_FATAL_FLAGS = 2


@dataclass(frozen=True)
class EngineConfig:
    """`num_pages` pages of `page_size` tokens hold the KV of at most `max_batch` running requests. A step computes at
    most `max_step_tokens` tokens, with at most `num_drafts` per request. `check` verifies page ownership each step."""

    page_size: int = 16
    num_pages: int = 2048
    max_batch: int = 8
    max_step_tokens: int = 512
    num_drafts: int = 15
    check: bool = False

    def validate(self) -> None:
        for name, least in (
            ("page_size", 1), ("num_pages", 1), ("max_batch", 1), ("max_step_tokens", 1), ("num_drafts", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"EngineConfig: {name}: expected an int >= {least}, got {value!r}")


class Engine:
    """Continuous-batching generation with speculation.

    `add` queues requests, `step` runs one packed forward pass for all of them and returns what it gave; `generate` does
    both for a list of prompts. Greedy output equals plain greedy decoding, sampled output has the target's law.
    `policy` sets each request's number of drafts (None: always `config.num_drafts`); see `GoodputPolicy`.
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
        self.cache = model.allocate_cache(self.config.num_pages, self.config.page_size)
        self.arena = Arena(self.config.num_pages, self.config.page_size)
        self.scheduler = Scheduler(self.arena, self.config.max_batch, self.config.max_step_tokens, self.metrics)
        self._kv = kv_handle(self.cache.k, self.cache.v)
        self._drafters = DrafterTable()
        self._default_drafter = self._drafters.get(drafter)
        self._states: dict[int, RequestState] = {}
        self._context = DraftContext(model, self.cache)

    # ---- the caller's side

    def add(self, request: Request) -> int:
        """Queue a request and return its id; ValueError/TypeError if it can never run."""
        return self._enqueue(self._prepare(request))

    def abort(self, request_id: int) -> Result | None:
        """Stop a request; returns what it has so far, or None if it is not running."""
        state = self._states.get(request_id)
        if state is None:
            return None
        event, _ = self._finish(state, "abort")
        self.policy.forget(request_id)
        return event.result

    @property
    def has_work(self) -> bool:
        return bool(self._states)

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        on_event: Callable[[int, Event], None] | None = None,
        **parameters: Any,
    ) -> list[Result]:
        """Run one request per prompt to its end; results in the order of the prompts. `parameters` are those of
        `Request`; `on_event(index, event)` streams. A bad prompt raises before any of them starts."""
        if isinstance(prompts, str):
            raise TypeError("generate: prompts: expected a list of prompts, got one string")
        states = [self._prepare(Request(prompt, **parameters)) for prompt in prompts]
        index = {self._enqueue(state): i for i, state in enumerate(states)}
        try:
            while any(state.finish_reason is None for state in states):
                for event in self.step():
                    if on_event is not None and event.request_id in index:
                        on_event(index[event.request_id], event)
        finally:
            for state in states:  # a callback raised: leave nothing behind
                self.abort(state.id)
        return [state.result() for state in states]

    # ---- one step

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one step for all requests; returns what each got, after calling their `on_event`."""
        start = time.perf_counter()
        plan = self.scheduler.plan(self.policy)
        events = [self._finish(s, "memory") for s in list(self._states.values()) if s.finish_reason == "memory"]
        if plan.decoding or plan.chunks:
            requests = plan.decoding + [chunk.state for chunk in plan.chunks]
            context = sum(state.context_len for state in requests)
            draft_start = time.perf_counter()
            drafts = self._draft(plan.decoding, plan.limits)
            draft_seconds = time.perf_counter() - draft_start
            packed = pack_step(list(zip(plan.decoding, drafts)), plan.chunks, self.config.page_size, self.model.device)
            logits = self._forward(packed)
            for state, size, last in plan.chunks:
                state.context_len += size - last  # a text's last token is the root: verification commits it
                self.metrics.prefill_tokens += size
            outcomes: list[DraftOutcome] = []
            if packed.states:
                verified = self._verify(packed, logits)
                if packed.branched:  # the path accepted in a chain is dense already
                    self._commit(packed, verified)
                events += self._accept(packed, verified, outcomes)
            self.scheduler.trim(self.scheduler.running)
            timing = StepTiming(
                nodes=len(packed.batch.token_ids),
                requests=len(requests),
                context=context,
                levels=max((draft.depth for draft in drafts), default=0),
                drafts=sum(map(len, drafts)),
                forward_seconds=time.perf_counter() - draft_start - draft_seconds,
                draft_seconds=draft_seconds,
            )
            self.policy.record(outcomes, timing)
        for event, _ in events:
            if event.result is not None:
                self.policy.forget(event.request_id)
        if self.config.check:
            self.arena.check([state.pages for state in self._states.values()])
        self.metrics.step_time_s += time.perf_counter() - start
        for event, callback in events:
            if callback is not None:
                callback(event)
        return [event for event, _ in events]

    def _draft(self, states: Sequence[RequestState], limits: Sequence[Limit]) -> list[Draft]:
        """Ask each request's drafter; one that raises or answers nonsense is given up for its requests, and counted."""
        start = time.perf_counter()
        drafts = [Draft()] * len(states)
        for drafter in {id(state.drafter): state.drafter for state in states}.values():
            rows = [i for i, s in enumerate(states) if s.drafter is drafter and limits[i].depth > 0]
            if not rows:
                continue
            try:
                proposed = drafter.propose([states[i] for i in rows], [limits[i] for i in rows], self._context)
                for i, draft in zip(rows, proposed, strict=True):
                    drafts[i] = draft.checked(limits[i])
            except Exception as error:
                logger.warning("drafter %s failed (%r); its requests go on without drafts", drafter.name, error)
                for i in rows:
                    drafts[i] = Draft()
                    states[i].drafter = self._drafters.get("none")
                    states[i].stats.drafter_failures += 1
                    self.metrics.drafter_failures += 1
        self.metrics.draft_time_s += time.perf_counter() - start
        return drafts

    def _forward(self, packed: Packed) -> torch.Tensor:
        start = time.perf_counter()
        logits = self.model.forward(packed.batch, self.cache)
        self.metrics.forward_time_s += time.perf_counter() - start
        self.metrics.forwards += 1
        return logits

    def _verify(self, packed: Packed, logits: torch.Tensor) -> Verified:
        """Greedy, or the rule that fits how the drafts came about: all fixed, or some drawn from a known law."""
        laws: dict[str, torch.Tensor] = {}
        if all(state.request.temperature <= 1e-5 for state in packed.states):
            method = "greedy"
        elif all(draft.logits is None for draft in packed.drafts):
            method = "target_only"
        else:
            method, laws = "rejection", draft_laws(packed.drafts, self.model.device)
        return verify(
            logits,
            packed.draft_token_ids,
            packed.tree,
            make_sampling(packed.states, self.model.device),
            method=method,
            vocab_size=self.model.vocab_size,
            **laws,
        )

    def _commit(self, packed: Packed, verified: Verified) -> None:
        commit_kv(
            self._kv,
            None,
            packed.batch.page_table[: len(packed.states)],
            packed.root_lens,
            packed.tree.cu_nodes,
            verified.accepted_nodes,
            verified.num_emitted,
            page_size=self.config.page_size,
        )

    def _accept(self, packed: Packed, verified: Verified, outcomes: list[DraftOutcome]) -> list[tuple[Event, Any]]:
        """Append what was accepted to each request's text; end those that reached a stop or their limit. `outcomes`
        gets what became of each request's drafts."""
        rows = zip(
            packed.states,
            packed.drafts,
            verified.output_token_ids.tolist(),
            verified.num_emitted.tolist(),
            verified.accepted_nodes.tolist(),
            verified.flags.tolist(),
        )
        events = []
        for state, draft, ids, emitted, nodes, flags in rows:
            new = ids[:emitted]
            reason = None
            if flags & _FATAL_FLAGS:  # the last token stands for "no answer"
                new, reason, state.error = new[:-1], "error", f"verify: flags {flags:#x}"
            stop = next((i for i, token in enumerate(new) if token in state.stop_ids), None)
            if stop is not None:
                new, reason = new[: stop + 1], "stop"
            elif reason is None and len(state.tokens) + len(new) >= state.max_len:
                reason = "length"
            state.tokens += new
            state.context_len += emitted
            state.num_steps += 1
            exhausted = nodes[emitted - 1] not in draft.parents
            for counters in (state.stats, self.metrics):
                counters.record(draft.depth_counts(), emitted - 1, len(new), exhausted)
                counters.flagged += flags != 0
            if len(draft) and not flags:
                refused = not exhausted and len(new) == emitted
                outcomes.append(DraftOutcome(state.id, min(emitted - 1, len(new)), refused))
            accepted = min(emitted - 1, len(new))
            events.append(self._finish(state, reason, new, accepted) if reason else self._event(state, new, accepted))
        return events

    # ---- a request's life

    def _prepare(self, request: Request) -> RequestState:
        """Everything that can be wrong with a request is found here, before it touches the engine."""
        request.validate()
        tokens = encode_prompt(self.model.tokenizer, request.prompt)
        bad = next((t for t in tokens if not 0 <= t < self.model.vocab_size), None)
        if bad is not None:
            raise ValueError(f"Request: prompt: expected token ids below {self.model.vocab_size}, got {bad}")
        if len(tokens) >= self.model.max_context:
            raise ValueError(
                f"Request: prompt: expected fewer tokens than the model's context of {self.model.max_context}, "
                f"got {len(tokens)}"
            )
        if self.arena.pages_for(len(tokens) + 1) > self.arena.num_pages:
            raise ValueError(
                f"Request: prompt: expected at most {self.arena.num_pages * self.arena.page_size - 1} tokens "
                f"({self.arena.num_pages} pages), got {len(tokens)}; raise EngineConfig.num_pages"
            )
        eos = frozenset() if request.ignore_eos else self.model.eos_token_ids
        drafter = self._default_drafter if request.drafter is None else self._drafters.get(request.drafter)
        return RequestState(
            request,
            tokens,
            len(tokens),
            random.SystemRandom().getrandbits(63) if request.seed is None else request.seed,
            eos | set(request.stop_token_ids),
            min(len(tokens) + request.max_tokens, self.model.max_context),
            drafter,
            TextStream(self.model.tokenizer),
        )

    def _enqueue(self, state: RequestState) -> int:
        self._states[state.id] = state
        self.scheduler.waiting.append(state)
        self.metrics.requests += 1
        return state.id

    def _event(self, state: RequestState, new: list[int], accepted: int) -> tuple[Event, Any]:
        return Event(state.id, new, state.stream.push(new), accepted), state.request.on_event

    def _finish(
        self, state: RequestState, reason: str, new: Sequence[int] = (), accepted: int = 0
    ) -> tuple[Event, Any]:
        state.finish_reason = reason
        self.scheduler.remove(state)
        del self._states[state.id]
        self.metrics.finished += 1
        text = state.stream.push(new, last=True)
        return Event(state.id, list(new), text, accepted, state.result()), state.request.on_event


def draft_laws(drafts: Sequence[Draft], device: torch.device) -> dict[str, torch.Tensor]:
    """`draft_logits` of all drawn drafts and, per tree node, its row there (-1: root or fixed choice)."""
    rows: list[int] = []
    laws = [draft.logits for draft in drafts if draft.logits is not None]
    drawn = 0
    for draft in drafts:
        rows.append(-1)
        for _ in range(len(draft)):
            rows.append(-1 if draft.logits is None else drawn)
            drawn += draft.logits is not None
    return {
        "draft_logits": torch.cat(laws),
        "draft_rows": torch.tensor(rows, dtype=torch.int32, device=device),
    }
