"""What a caller asks for (Request), what comes back (Event, Result), and the engine's own record (RequestState)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels.engine.metrics import SpecCounters
from specdec_kernels.engine.tokens import TextStream

_ids = itertools.count()


@dataclass(frozen=True)
class Request:
    """One generation job.

    `prompt` is text (taken as it is), token ids, or chat messages `[{"role": ..., "content": ...}]` (the model's chat
    template is applied). Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `seed` None
    draws a fresh seed, so unseeded requests differ. `stop_token_ids` end the text like the model's own end tokens
    (`ignore_eos` disregards the latter). `drafter` overrides the engine's; `num_drafts` bounds drafts per step.
    `on_event` is called with every Event of this request as soon as its tokens are accepted.
    """

    prompt: str | Sequence[int] | Sequence[dict[str, str]]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    drafter: Any = None
    num_drafts: int | None = None
    on_event: Callable[[Event], None] | None = None

    def validate(self) -> None:
        """Raise ValueError naming the argument that is out of range."""
        for name, condition, expected in (
            ("max_tokens", isinstance(self.max_tokens, int) and self.max_tokens >= 1, "an int >= 1"),
            ("temperature", self.temperature >= 0, "a number >= 0"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "an int >= 0 (0: off)"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "None or an int in [0, 2**63)"),
            ("num_drafts", self.num_drafts is None or self.num_drafts >= 0, "None or an int >= 0"),
        ):
            if not condition:
                raise ValueError(f"Request: {name}: expected {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Event:
    """What one step gave one request: its new tokens, of which the first `num_accepted` were drafts, and their text.
    The last event of a request carries its `result`."""

    request_id: int
    token_ids: list[int]
    text: str
    num_accepted: int
    result: Result | None = None


@dataclass(frozen=True)
class Result:
    """A finished request. `finish_reason`: "stop", "length", "abort", "memory" (the page pool cannot hold it alone) or
    "error" (its logits were unusable; `error` says how)."""

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: SpecCounters
    error: str | None = None


@dataclass(eq=False)
class RequestState:
    """A request inside the engine. `tokens` are prompt and output; the KV of `tokens[:context_len]` is in `pages`.

    While decoding, exactly the last token (the root of the next tree) has no KV yet: context_len == len(tokens) - 1.
    """

    request: Request
    tokens: list[int]
    num_prompt: int
    seed: int
    stop_ids: frozenset[int]
    max_len: int  # tokens in all, from max_tokens and the context limit
    drafter: Any
    stream: TextStream
    id: int = field(default_factory=lambda: next(_ids))
    context_len: int = 0
    pages: list[int] = field(default_factory=list)
    stats: SpecCounters = field(default_factory=SpecCounters)
    num_steps: int = 0
    finish_reason: str | None = None
    error: str | None = None
    drafter_state: Any = None  # the drafter's own notes about this request

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def decoding(self) -> bool:
        """Whether the whole text but the root is cached, so that the next step may verify drafts."""
        return self.num_output > 0 and self.context_len == len(self.tokens) - 1

    def result(self) -> Result:
        assert self.finish_reason is not None
        return Result(self.id, self.output, self.stream.all, self.finish_reason, self.stats, self.error)
