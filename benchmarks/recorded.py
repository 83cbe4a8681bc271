"""Engines that write a recorded text, whatever they compute: every arm of a comparison then meets the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels.engine import Engine
from specdec_kernels.engine.pack import Packed

_CERTAIN = 1e4


def next_tokens(packed: Packed, texts: dict[int, list[int]]) -> list[int]:
    """The recorded token behind every row that is verified; -1 behind drafts off the text, and behind its end.

    texts: prompt and recorded output, by request id.
    """
    rows: list[int] = []
    for state, draft in zip(packed.states, packed.drafts):
        text, known = texts[state.id], len(state.tokens)
        depths = [0]  # of nodes on the recorded path; -1 off it
        for token, parent in zip(draft.token_ids, draft.parents):
            at = depths[parent]
            right = at >= 0 and known + at < len(text) and text[known + at] == token
            depths.append(at + 1 if right else -1)
        rows += [text[known + at] if at >= 0 and known + at < len(text) else -1 for at in depths]
    return rows


class Guided(Engine):
    """Runs its model in full, then makes certain that each request's text goes on as `texts[request id]` says.

    With `gaps` a list, appends for each such row how far the model's own choice lies above the recorded token.
    """

    texts: dict[int, list[int]]
    gaps: list[float] | None = None

    def _forward(self, packed: Packed, hidden: Any = None) -> torch.Tensor:
        logits = super()._forward(packed, hidden)
        tokens = next_tokens(packed, self.texts)
        rows = torch.tensor([i for i, token in enumerate(tokens) if token >= 0], dtype=torch.int64)
        ids = torch.tensor([token for token in tokens if token >= 0], dtype=torch.int64)
        if self.gaps is not None:
            own = logits[rows, : self.model.vocab_size].float()
            self.gaps += (own.amax(1) - own.gather(1, ids[:, None])[:, 0]).tolist()
        logits[rows, ids] += _CERTAIN
        return logits


class Replay(Engine):
    """Runs no model at all: all mass lies on the next token of the recorded text."""

    texts: dict[int, list[int]]

    def _forward(self, packed: Packed, hidden: Any = None) -> torch.Tensor:
        tokens = torch.tensor(next_tokens(packed, self.texts), dtype=torch.int64).clamp(min=0)
        logits = torch.zeros(len(tokens), self.model.vocab_size)
        logits[torch.arange(len(tokens)), tokens] = _CERTAIN
        self.metrics.forwards += 1
        self.metrics.verify_slots += len(packed.draft_token_ids)
        return logits
