"""Online distillation: a served head goes on learning from the target's own steps, and follows it when it changes.

A wrapper around an EAGLE or Medusa drafter. One chunk of a request's text makes this way:

    observe         the target's states of committed text are copied aside, position by position, until a chunk is whole
    between steps   test before train: the served head and the learning one (candidate) are scored on the chunk;
                    publish or roll back; then the chunk joins the ring buffer and the candidate takes a step or two

        served     --- scored --- scored --- ... --- scored ---> copied over by the candidate where that is better
        candidate  --- scored, trained --- scored, trained ---   (float32 masters behind it)
        previous                                          --- scored: the served one is on trial, and may be undone

No chunk is scored by a head that was trained on it, so the scores are honest (prequential evaluation). Weights change
in place and between steps only: the law of a draft is that of the weights that drew it, whatever is published later.
Rows that a changed head already has in its KV stay: they cost acceptance, never correctness.
Sources: Liu et al., Online Speculative Decoding (2023); Dawid, prequential analysis (1984).
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.engine.batch import HiddenStates
from specdec_kernels.engine.drafters import DraftContext, Seen
from specdec_kernels.engine.heads import DraftHead
from specdec_kernels.engine.linear import PackedLinear
from specdec_kernels.engine.request import Request
from specdec_kernels.training.capture import Capture, Chunk
from specdec_kernels.training.features import shard_features
from specdec_kernels.training.losses import LOSSES, acceptance
from specdec_kernels.training.objective import HeadBatch, batch_loss, depths, make_batch, names_needed
from specdec_kernels.training.optimizer import Optimizer
from specdec_kernels.training.rollout import shifted

logger = logging.getLogger("specdec_kernels")

_STRIKES = 3  # failures of training in a row after which it is given up


@dataclass(frozen=True)
class OnlineOptions:
    """`share`: training takes at most this part of all time, steps and training together. `length`: tokens a chunk;
    `chunks`: of the ring buffer; `waiting`: chunks that may wait for their turn (beyond, the oldest goes untested into
    the buffer). A turn is a test and `updates` optimizer steps of `batch` chunks, the newest and others of the buffer,
    `depths` rollout steps deep.

    `window`: chunks a comparison takes. Published when the candidate's acceptance is better by `margin` over a window;
    undone when the head before is better by `margin` on the text served since. `greedy`: acceptance is agreement of the
    best tokens (requests at temperature 0) instead of the overlap of the laws. `allow(request)`: may its text be
    learnt from?
    """

    share: float = 0.1
    length: int = 64
    chunks: int = 64
    waiting: int = 8
    batch: int = 4
    updates: int = 1
    depths: int = 3
    lr: float = 0.01
    loss: str = "kl"
    decay: float = 0.8
    window: int = 8
    margin: float = 0.005
    greedy: bool = False
    allow: Callable[[Request], bool] | None = None
    seed: int = 0

    def validate(self) -> None:
        """Raise ValueError naming the field that cannot be."""
        for name, holds, expected in (
            ("share", 0 < self.share < 1, "a part in (0, 1)"),
            ("length", self.length > self.depths + 1, f"more than depths + 1 = {self.depths + 1} tokens"),
            *((name, getattr(self, name) >= 1, "at least 1") for name in
              ("chunks", "waiting", "batch", "updates", "depths")),
            ("lr", self.lr > 0, "a positive rate"),
            ("loss", self.loss in LOSSES, f"one of {LOSSES}"),
            ("window", self.window >= 2, "at least 2"),
            ("margin", self.margin >= 0, "a number >= 0"),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"OnlineOptions: {name}: expected {expected}, got {getattr(self, name)!r}")


@dataclass
class OnlineCounters:
    """What was done, and what it took. `step_time_s` of the engine's steps contains `capture_time_s`; `train_time_s`
    comes on top of it."""

    chunks: int = 0  # scored and learnt from
    updates: int = 0  # optimizer steps
    published: int = 0
    rolled_back: int = 0
    restarted: int = 0  # the candidate had become worse than the served head and began again from it
    flushed: int = 0  # the target's weights changed
    failures: int = 0  # errors of capture or training; the drafts went on
    train_time_s: float = 0.0
    capture_time_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def cost_share(self) -> float:
        """Time for capture and training over all time."""
        total = self.step_time_s + self.train_time_s
        return (self.train_time_s + self.capture_time_s) / total if total else 0.0


class Scored(NamedTuple):
    """Acceptance on one chunk, mean over depths and rows, before anything was trained on it; `version` was served."""

    version: int
    served: float
    candidate: float
    previous: float | None


class OnlineDrafter:
    """`drafter` (EAGLE, EAGLE-3, MTP or Medusa, made with a `DraftHead` object), whose head learns while it is served.

    `version` counts the weights that were ever served. `counters`; `history`: the latest scores. Raises ValueError if
    the head's weights cannot be changed in place or a Medusa set has fewer heads than `depths`, NotImplementedError for
    a target that is split over ranks or whose logits are not its output matrix times its last state.
    """

    def __init__(self, drafter: Any, options: OnlineOptions | None = None):
        self.drafter, self.options = drafter, options or OnlineOptions()
        self.options.validate()
        self.version, self.counters, self.stopped = 0, OnlineCounters(), False
        self.history: deque[Scored] = deque(maxlen=4096)
        self._random = random.Random(self.options.seed)
        self._scores: deque[Scored] = deque(maxlen=self.options.window)  # since the served weights last changed
        self._previous: DraftHead | None = None  # what was served before, while its successor is on trial
        self._scales: dict[str, Tensor] | None = None
        self._optimizer: Optimizer | None = None
        self._turn_s, self._strikes, self._step = 0.0, 0, 0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the drafter's: its name, its KV, its proposals."""
        if name == "drafter":
            raise AttributeError(name)
        return getattr(self.drafter, name)

    # ---- the engine's side

    def attach(self, model: Any) -> None:
        if getattr(model, "parallel", None) is not None:
            raise NotImplementedError(
                "OnlineDrafter: model: expected one that is not split over ranks, got a split one"
            )
        self.drafter.attach(model)
        self.served: DraftHead = self.drafter.head
        if any(isinstance(module, PackedLinear) for module in self.served.modules()):
            raise ValueError(
                "OnlineDrafter: drafter: expected one made with a DraftHead object (`load_head`), got packed weights"
            )
        config, wanted = self.served.config, self.options.depths
        if config.kind == "medusa" and wanted > config.num_medusa:
            raise ValueError(
                f"OnlineOptions: depths: expected at most {config.num_medusa} (the set's heads), got {wanted}"
            )
        probe = torch.tensor([[1, 2]], dtype=torch.int32)
        shard_features(model, probe, [model.num_layers])  # raises if logits are scaled or capped
        self._model, self._last = model, f"state.{model.num_layers}"
        self.hidden_layers = tuple(sorted({*self.drafter.hidden_layers, model.num_layers}))
        self._names = names_needed(self.served, model.num_layers)
        o = self.options
        self.capture = Capture(self.hidden_layers, length=o.length, waiting=o.waiting, chunks=o.chunks)
        self._restart()

    def observe(self, seen: Sequence[Seen], hidden: HiddenStates, context: DraftContext) -> None:
        """Show the drafter what it wants to see, and keep a copy of the target's states of its own text."""
        self.drafter.observe(seen, hidden, context)
        if self.stopped:
            return
        start = time.perf_counter()
        try:
            for item in seen:
                if self.options.allow is None or self.options.allow(item.state.request):
                    self.capture.add(item, hidden)
        except Exception as error:
            self._fail(error)
        self.counters.capture_time_s += time.perf_counter() - start

    def between_steps(self, seconds: float) -> None:
        """Take one turn, if a chunk waits and the budget allows it. `seconds`: what the engine's step took."""
        counters, share = self.counters, self.options.share
        counters.step_time_s += seconds
        self.capture.forget_finished()
        # (train + capture) / (steps + train) <= share, the turn to come included
        allowed = (share * counters.step_time_s - counters.capture_time_s) / (1 - share)
        if self.stopped or not self.capture.fresh or counters.train_time_s + self._turn_s > allowed:
            return
        start = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._learn(self.capture.fresh.popleft())
            self._strikes = 0
        except Exception as error:
            self._fail(error)
            self._restart()
        self._turn_s = time.perf_counter() - start
        counters.train_time_s += self._turn_s

    def weights_changed(self, model: Any) -> None:
        """The target has new weights: what was captured of the old ones is void. Scores are not: they compare heads
        on one and the same target."""
        self.drafter.weights_changed(model)
        for head in (self.candidate, self._previous):
            if head is not None:
                head.rebind(model.embedding(), model.output_matrix())
        self.capture.clear()
        self.counters.flushed += 1

    # ---- what is served

    @torch.no_grad()
    def publish(self) -> None:
        """Serve the candidate from the next step on; it is on trial against what was served before. Not to be called
        while a step runs."""
        self._previous = _twin(self.served)
        _copy(self.candidate, self.served)
        self._serve_anew()
        self.counters.published += 1

    @torch.no_grad()
    def roll_back(self) -> None:
        """Serve again what was served before the last `publish`; the candidate begins anew from there."""
        if self._previous is None:
            raise ValueError("OnlineDrafter: roll_back: expected a head on trial, got none")
        _copy(self._previous, self.served)
        self._previous = None
        self._serve_anew()
        self.counters.rolled_back += 1
        self._restart()

    def _serve_anew(self) -> None:
        self.version += 1
        self._scores.clear()

    # ---- learning

    def _learn(self, chunk: Chunk) -> None:
        """Test, decide, train."""
        batch = self._batch([chunk])
        served, candidate = self._score(self.served, batch), self._score(self.candidate, batch)
        previous = None if self._previous is None else self._score(self._previous, batch)
        scored = Scored(self.version, served, candidate, previous)
        self.history.append(scored)
        self._scores.append(scored)
        self.counters.chunks += 1
        self._decide()
        self.capture.ring.append(chunk)
        for _ in range(self.options.updates):
            self._update(chunk)

    def _decide(self) -> None:
        o, count = self.options, len(self._scores)
        served = sum(s.served for s in self._scores) / count
        if self._previous is not None and count >= max(2, o.window // 2):
            before = sum(s.previous or 0.0 for s in self._scores) / count
            if before >= served + o.margin:
                self.roll_back()
                return
        if count < o.window:
            return
        self._previous = None  # the trial is over
        candidate = sum(s.candidate for s in self._scores) / count
        if candidate >= served + o.margin:
            self.publish()
        elif candidate < served - max(o.margin, 1e-3):
            self.counters.restarted += 1
            self._restart()

    @torch.no_grad()
    def _score(self, head: DraftHead, batch: HeadBatch) -> float:
        shares = []
        for out in depths(head, batch, self.options.depths):
            if self.options.greedy:
                ids = head.draft_ids.to(out.logits.device)[out.logits.argmax(-1)]
                share = (ids == shifted(batch.teacher.best, out.depth))[out.valid].float()
            else:
                share = acceptance(shifted(batch.teacher.log_probs, out.depth)[out.valid], out.logits[out.valid])
            shares.append(share.mean().item())
        return sum(shares) / len(shares)

    def _update(self, newest: Chunk) -> None:
        """One optimizer step of the candidate."""
        o = self.options
        others = [chunk for chunk in self.capture.ring if chunk is not newest]
        chosen = [newest, *self._random.sample(others, min(o.batch - 1, len(others)))]
        loss = batch_loss(self.candidate, self._batch(chosen), o.depths, o.loss, o.decay)
        self.candidate.zero_grad(set_to_none=True)
        loss.backward()
        grads = {name: p.grad.float() for name, p in self.candidate.named_parameters() if p.grad is not None}
        if self._optimizer is None:
            self._optimizer = Optimizer(self.masters, self._input_scales(newest))
        self._optimizer.update(grads, o.lr, self._step)
        self._step += 1
        with torch.no_grad():
            for name, parameter in self.candidate.named_parameters():
                parameter.copy_(self.masters[name])
        self.counters.updates += 1

    def _restart(self) -> None:
        """The candidate begins again as what is served. A copy apart, with gradients; matrices of the target shared."""
        with torch.inference_mode(False):
            self.candidate = _twin(self.served).requires_grad_(True)
            self.masters = {name: p.detach().float().clone() for name, p in self.candidate.named_parameters()}
        self._optimizer, self._step = None, 0
        self._scores.clear()

    def _prepare(self, chunk: Chunk) -> None:
        """Ordinary tensors (captured ones are of inference mode), with the target's log-sum-exp and best token."""
        chunk.update({name: value.clone() for name, value in chunk.items()})
        with torch.no_grad():
            logits = (chunk[self._last] @ self._model.output_matrix().T)[:, : self._model.vocab_size].float()
        chunk.update(lse=logits.logsumexp(-1), best=logits.argmax(-1))

    def _batch(self, chunks: Sequence[Chunk]) -> HeadBatch:
        for chunk in chunks:
            if "lse" not in chunk:
                self._prepare(chunk)
        stored = {name: torch.stack([chunk[name] for chunk in chunks]) for name in self._names}
        rows = self._model.output_matrix()
        rows = rows[self.served.draft_ids.to(rows.device)].to(next(self.served.parameters()).dtype)
        return make_batch(self.candidate, stored, self._model.num_layers, rows)

    def _input_scales(self, chunk: Chunk) -> Chunk:
        """Root mean squares of what an EAGLE-3 head's first matrix reads (see `begin.input_scales`), of the first chunk
        ever."""
        if self.served.config.kind == "eagle3" and self._scales is None:
            features = torch.cat([chunk[f"state.{layer}"] for layer in self.served.config.feature_layers], -1)
            self._scales = {"fc.weight": features.float().pow(2).mean(0).sqrt().clamp(min=1e-6)}
        return self._scales or {}

    def _fail(self, error: Exception) -> None:
        """Count an error; after three in a row the head stays as it is. The drafts go on either way."""
        self.counters.failures += 1
        self._strikes += 1
        self.stopped = self._strikes >= _STRIKES
        after = "the head stays as it is" if self.stopped else "the candidate begins again"
        logger.warning("online distillation of %s failed (%r); %s", self.name, error, after)
        if self.stopped:
            self.capture.clear()


def _twin(head: DraftHead) -> DraftHead:
    """A copy of a head with weights of its own; the target's matrices are shared, not copied."""
    shared = [value for value in (head.embedding, head.output) if value is not None]
    return copy.deepcopy(head, {id(value): value for value in shared})


def _copy(source: DraftHead, into: DraftHead) -> None:
    """In place: whoever holds the tensors (a captured graph, a packed batch) sees the new weights."""
    theirs = dict(source.named_parameters())
    for name, parameter in into.named_parameters():
        parameter.copy_(theirs[name])
