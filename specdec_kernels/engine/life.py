"""A request's beginning and end: what is refused before it starts, and which of its new tokens belong to its text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec_kernels.engine.batch import TargetModel
from specdec_kernels.engine.drafters import Drafter
from specdec_kernels.engine.edits import RowEdits
from specdec_kernels.engine.pages import Arena
from specdec_kernels.engine.request import Request, RequestState
from specdec_kernels.engine.tokens import TextStream, encode_prompt

_SEEDS = 2**63
_STRIDE = 0x9E3779B97F4A7C15  # odd: the seeds of one request's samples are all different


def prepare(request: Request, model: TargetModel, arena: Arena, drafter: Drafter, namespace: Any) -> list[RequestState]:
    """The states of a request's `n` samples. Everything that can be wrong with a request is found here, before it
    touches the engine: ValueError or TypeError naming the argument."""
    request.validate()
    tokens = encode_prompt(model.tokenizer, request.prompt)
    given = [("prompt", t) for t in tokens] + [("logit_bias", t) for t in request.logit_bias]
    for argument, token in given + [("stop_token_ids", t) for t in request.stop_token_ids]:
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"Request: {argument}: expected token ids in [0, {model.vocab_size}), got {token}")
    if len(tokens) >= model.max_context:
        raise ValueError(
            f"Request: prompt: expected fewer tokens than the model's context of {model.max_context}, got {len(tokens)}"
        )
    most = (arena.num_pages - arena.floors[1]) * arena.page_size - 1
    if len(tokens) > most:
        raise ValueError(
            f"Request: prompt: expected at most {most} tokens ({arena.num_pages} pages), got {len(tokens)}; "
            "raise EngineConfig.num_pages"
        )
    if request.stop_strings and model.tokenizer is None:
        raise ValueError("Request: stop: expected token ids (the model has no tokenizer), got strings")
    eos = frozenset() if request.ignore_eos else model.eos_token_ids
    stop_ids = eos | set(request.stop_token_ids)
    seed = random.SystemRandom().getrandbits(63) if request.seed is None else request.seed
    states: list[RequestState] = []
    for sample in range(request.n):
        state = RequestState(
            request,
            list(tokens),
            len(tokens),
            (seed + sample * _STRIDE) % _SEEDS,
            stop_ids,
            min(len(tokens) + request.max_tokens, model.max_context),
            drafter,
            TextStream(model.tokenizer, request.stop_strings),
            edits=RowEdits.of(request, tokens, stop_ids),
            namespace=(*namespace, request.cache_salt),
            leader=states[0] if states else None,
            sample=sample,
        )
        states.append(state)
    return states


class Taken(NamedTuple):
    """tokens: those that belong to the text; text: what can be given out; reason: why the request ends, or None."""

    tokens: list[int]
    text: str
    reason: str | None


def take(state: RequestState, new: Sequence[int], error: str | None = None) -> Taken:
    """Which of a step's tokens the text takes in: it ends behind a stop token, behind the token that completes a stop
    string or the grammar, at its greatest length, or because of `error` behind all of them."""
    new, reason = list(new), "error" if error else None
    stop = next((i for i, token in enumerate(new) if token in state.stop_ids), None)
    if stop is not None:
        new, reason, error = new[: stop + 1], "stop", None
    if state.edits is not None:
        kept, refused = state.edits.accept(new)
        if refused:
            reason, error = "error", refused
        elif state.edits.ended:
            reason, error = "stop", None
        new = new[:kept]
    if state.stream.stops:
        text = ""
        for i, token in enumerate(new):
            text += state.stream.push([token], armed=state.num_output + i >= state.request.min_tokens)
            if state.stream.stopped:
                new, reason, error = new[: i + 1], "stop", None
                break
    else:
        text = state.stream.push(new)
    if reason is None and len(state.tokens) + len(new) >= state.max_len:
        reason = "length"
    if reason is not None and not state.stream.stopped:
        text += state.stream.push([], last=True)
    state.error = error
    return Taken(new, text, reason)
