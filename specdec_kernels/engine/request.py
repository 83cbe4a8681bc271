"""What a caller asks for (Request), what comes back (Event, Result), and the engine's own record (RequestState)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from specdec_kernels.engine.metrics import SpecCounters
from specdec_kernels.engine.tokens import TextStream

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_kernels.engine.edits import Grammar, RowEdits
    from specdec_kernels.engine.prefix_cache import Cursor

_ids = itertools.count()


@dataclass(frozen=True)
class Request:
    """One generation job.

    `prompt` is text (taken as it is), token ids, or chat messages `[{"role": ..., "content": ...}]` (the model's chat
    template is applied). `n` samples share the prompt's KV; sample i has a seed of its own, derived from `seed`.

    Law: temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `seed` None draws a fresh
    seed, so unseeded requests differ. Before temperature, logits are edited in this order: `logit_bias` {id: added};
    `repetition_penalty` r (positive logits of tokens in prompt or output are divided by r, others multiplied);
    `frequency_penalty` times a token's count in the output, and `presence_penalty` if it is there, subtracted. Counts
    are those at the token's own position: drafts accepted earlier in the same step count. `grammar` makes a matcher
    (see `Grammar`) that says which tokens may come next. `logits_processor(token ids of the text so far, float32 [V])`
    returns the row to go on with, before all of these; it is called for every node, so it must depend on nothing else.

    Ends: `stop_token_ids` end the text like the model's own end tokens (`ignore_eos` disregards the latter), `stop`
    strings end it before their first character. Neither ends it before `min_tokens` tokens: until then end tokens are
    forbidden, and stop strings are looked for only in what follows.

    `logprobs`: "raw" (of the model), "processed" (after edits, temperature and filters) or "both", of the emitted
    tokens. `drafter` overrides the engine's; `num_drafts` bounds drafts per step. Requests share cached prefixes only
    with those of the same `cache_salt`. `on_event` gets every Event as soon as its tokens are accepted; one that raises
    is logged and not called again. A `grammar` or `logits_processor` that raises ends its request with "error".
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
    n: int = 1
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    logprobs: str | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Callable[[], Grammar] | None = None
    logits_processor: Callable[[list[int], Tensor], Tensor] | None = None
    cache_salt: str = ""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def validate(self) -> None:
        """Raise ValueError naming the argument that is of a wrong type or out of range."""
        for name, holds, expected in _RULES:
            try:
                fine = holds(self)
            except (TypeError, ValueError, AttributeError, RuntimeError):  # a type that cannot be compared or iterated
                fine = False
            if not fine:
                wanted = expected.format(self)
                raise ValueError(f"Request: {name}: expected {wanted}, got {getattr(self, name)!r}")


def _ints(*values: Any) -> bool:
    return all(isinstance(value, Integral) for value in values)  # NumPy's integers too


_RULES: tuple[tuple[str, Callable[[Request], Any], str], ...] = (
    ("max_tokens", lambda r: _ints(r.max_tokens) and r.max_tokens >= 1, "an int >= 1"),
    ("temperature", lambda r: r.temperature >= 0, "a number >= 0"),
    ("top_k", lambda r: _ints(r.top_k) and r.top_k >= 0, "an int >= 0 (0: off)"),
    ("top_p", lambda r: 0 < r.top_p <= 1, "a number in (0, 1]"),
    ("min_p", lambda r: 0 <= r.min_p <= 1, "a number in [0, 1]"),
    ("seed", lambda r: r.seed is None or (_ints(r.seed) and 0 <= r.seed < 2**63), "None or an int in [0, 2**63)"),
    ("stop_token_ids", lambda r: _ints(*r.stop_token_ids), "a tuple of ints"),
    (
        "num_drafts", lambda r: r.num_drafts is None or (_ints(r.num_drafts) and r.num_drafts >= 0),
        "None or an int >= 0",
    ),
    ("n", lambda r: _ints(r.n) and r.n >= 1, "an int >= 1"),
    (
        "min_tokens", lambda r: _ints(r.min_tokens) and 0 <= r.min_tokens <= r.max_tokens,
        "an int in [0, max_tokens={0.max_tokens}]",
    ),
    ("stop", lambda r: all(isinstance(s, str) and s for s in r.stop_strings), "non-empty strings"),
    ("logprobs", lambda r: r.logprobs in (None, "raw", "processed", "both"), "None, 'raw', 'processed' or 'both'"),
    ("logit_bias", lambda r: all(-1e4 <= b <= 1e4 for b in r.logit_bias.values()), "values within +-1e4"),
    ("logit_bias", lambda r: _ints(*r.logit_bias), "token ids as keys"),
    ("repetition_penalty", lambda r: 0 < r.repetition_penalty < 1e4, "a number > 0"),
    ("presence_penalty", lambda r: abs(r.presence_penalty) < 1e4, "a finite number"),
    ("frequency_penalty", lambda r: abs(r.frequency_penalty) < 1e4, "a finite number"),
    ("logits_processor", lambda r: r.logits_processor is None or callable(r.logits_processor), "a function"),
    ("grammar", lambda r: r.grammar is None or callable(r.grammar), "a function that makes a matcher"),
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """What one step gave one request: its new tokens, of which the first `num_accepted` were drafts, their text (held
    back while it may be the start of a stop string), their log-probabilities if asked for. The last event of a request
    carries its `result`."""

    request_id: int
    token_ids: list[int]
    text: str
    num_accepted: int
    result: Result | None = None
    logprobs: list[Any] | None = None


@dataclass(frozen=True)
class Result:
    """A finished request. `finish_reason`: "stop", "length", "abort", "memory" (the page arena cannot hold it alone) or
    "error" (its logits were unusable, or its grammar or processor raised; `error` says how). `logprobs`: one natural
    logarithm a token, pairs (raw, processed) for "both". `sample`: 0 ... n-1. `num_cached`: prompt tokens whose KV came
    from the prefix cache."""

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: SpecCounters
    error: str | None = None
    logprobs: list[Any] | None = None
    sample: int = 0
    num_cached: int = 0


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
    draft_pages: list[int] = field(default_factory=list)  # pages of the arena's draft tenant
    edits: RowEdits | None = None
    cursor: Cursor | None = None  # where its pages are in the prefix cache
    namespace: Any = ()
    leader: RequestState | None = None  # the first sample of the same request: its prompt is shared
    sample: int = 0
    logprobs: list[Any] = field(default_factory=list)
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None until it was asked
    draft_strikes: int = 0  # steps in which its drafts were refused as faulty
    fault: str | None = None  # what its grammar or processor raised: it ends with this step
    deaf: bool = False  # its `on_event` raised

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
        logprobs = self.logprobs if self.request.logprobs else None
        return Result(
            self.id, self.output, self.stream.all, self.finish_reason, self.stats, self.error, logprobs, self.sample,
            self.num_cached or 0,
        )  # fmt: skip
