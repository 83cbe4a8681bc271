"""Between text and token ids: encoding prompts, and decoding a growing list of ids piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode_prompt(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt given as text, ids or chat messages; ValueError/TypeError if it cannot be encoded."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("Request: prompt: expected token ids (the model has no tokenizer), got text")
        ids = list(tokenizer(prompt)["input_ids"])
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, dict) for m in prompt):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "Request: prompt: expected a tokenizer with a chat template for chat messages, got one without; "
                "pass text or token ids"
            )
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    elif isinstance(prompt, Sequence) and all(isinstance(t, int) for t in prompt):
        ids = list(prompt)
    else:
        raise TypeError(f"Request: prompt: expected text, token ids or chat messages, got {type(prompt).__name__}")
    if not ids:
        raise ValueError("Request: prompt: expected at least one token, got an empty prompt")
    return ids


class TextStream:
    """Decodes a growing list of ids. Each piece is text that later ids cannot change.

    A token's text depends on its neighbours (word starts, characters split over several ids), so ids are decoded
    together with those since the last clean border, and an unfinished character is held back.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.all = ""
        self._border = 0  # ids before it are part of `all` and are no longer looked at
        self._shown = 0  # ids before it are part of `all`

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """Append ids and return the new text; `last` also gives out what was held back."""
        self.ids.extend(ids)
        if self.tokenizer is None:
            return ""
        before = self._decode(self.ids[self._border : self._shown])
        now = self._decode(self.ids[self._border :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        piece = now[len(before) :]
        self._border, self._shown = self._shown, len(self.ids)
        self.all += piece
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
