"""Grammars through llguidance, an optional dependency (`pip install llguidance`): JSON schemas, regular expressions and
Lark grammars as the `grammar` of a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from specdec_kernels.engine.edits import Grammar


class LLGuidanceGrammar:
    """One request's llguidance matcher behind the `Grammar` protocol."""

    def __init__(self, matcher: Any):
        from llguidance.torch import fill_next_token_bitmask

        if matcher.is_error():
            raise ValueError(f"Request: grammar: expected a grammar that llguidance reads, got: {matcher.get_error()}")
        self._matcher, self._fill = matcher, fill_next_token_bitmask

    def fill_allowed(self, row: torch.Tensor) -> None:
        self._fill(self._matcher, row[None], 0)

    def accept(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise RuntimeError(f"LLGuidanceGrammar: rollback failed: {self._matcher.get_error()}")

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()


def llguidance_grammars(tokenizer: Any, vocab_size: int) -> Callable[..., Callable[[], Grammar]]:
    """A function that turns `schema=` (a JSON schema, dict or text), `regex=` or `lark=` into a `Request.grammar`.

    tokenizer: a fast `transformers` tokenizer; reading it takes about a second, so keep the function.
    """
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    shared = from_tokenizer(tokenizer, n_vocab=vocab_size)

    def grammar(*, schema: Any = None, regex: str | None = None, lark: str | None = None) -> Callable[[], Grammar]:
        if (schema is not None) + (regex is not None) + (lark is not None) != 1:
            raise ValueError("grammar: expected exactly one of schema, regex and lark")
        if schema is not None:
            text = LLMatcher.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema))
        elif regex is not None:
            text = LLMatcher.grammar_from_regex(regex)
        else:
            assert lark is not None
            text = LLMatcher.grammar_from_lark(lark)
        return lambda: LLGuidanceGrammar(LLMatcher(shared, text))

    return grammar
