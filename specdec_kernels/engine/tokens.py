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
    together with those since the last clean border, and an unfinished character is held back. With `stops`, the text
    ends before the first of these strings (`stopped`), and what may become one is held back too.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids: list[int] = []
        self.all = ""  # given out
        self.stopped = False
        self._text = ""  # decoded
        self._looked = 0  # no stop string starts before this place in it
        self._border = 0  # ids before it are part of the text and are no longer looked at
        self._shown = 0  # ids before it are part of the text

    def push(self, ids: Sequence[int], last: bool = False, armed: bool = True) -> str:
        """Append ids and return the new text; `last` also gives out what was held back. Text that is appended while
        not `armed` cannot hold (a part of) a stop string."""
        self.ids.extend(ids)
        if self.tokenizer is None:
            return ""
        before = self._decode(self.ids[self._border : self._shown])
        now = self._decode(self.ids[self._border :])
        if not now.endswith("\N{REPLACEMENT CHARACTER}") or last:
            self._text += now[len(before) :]
            self._border, self._shown = self._shown, len(self.ids)
        elif not last:
            return ""
        end = len(self._text)
        if self.stops:
            end = self._find_stop(armed, last)
        piece = self._text[len(self.all) : end]
        self.all += piece
        return piece

    def _find_stop(self, armed: bool, last: bool) -> int:
        """Cut the text at the first stop string; returns up to where it can be given out."""
        text = self._text
        if not armed:
            self._looked = len(text)
            return len(text)
        found = [at for at in (text.find(stop, self._looked) for stop in self.stops) if at >= 0]
        if found:
            self._text, self.stopped = text[: min(found)], True
            return min(found)
        self._looked = max(self._looked, len(text) - max(map(len, self.stops)) + 1)
        if last:
            return len(text)
        starts = range(max(self._looked, len(self.all)), len(text))
        return next((at for at in starts if any(s.startswith(text[at:]) for s in self.stops)), len(text))

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
