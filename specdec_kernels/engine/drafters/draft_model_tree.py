"""A smaller language model that drafts trees, grown level by level as EAGLE-2's (chains: `draft_model`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.engine.batch import TargetModel
from specdec_kernels.engine.drafters import Draft, DraftContext, Limit
from specdec_kernels.engine.drafters.draft_cache import DraftCache, DraftRows
from specdec_kernels.engine.drafters.grow import Level, Shape, grow_trees

_CHUNK = 256  # rows a pass while the drafter reads a prompt


class DraftModelTreeDrafter:
    """Drafts with `model`, any model that the engine could serve and that shares the target's tokenizer.

    `top_k`, `depth`, `num_nodes`, `sampled`: as in `EagleDrafter`. Accepted tokens are read by the model once more,
    which replaces what it had drafted.
    """

    name = "draft_model"

    def __init__(
        self, model: TargetModel, *, top_k: int = 3, depth: int = 4, num_nodes: int = 12, sampled: bool = True
    ):
        self.model, self.sampled, self.shape = model, sampled, Shape(top_k, depth, num_nodes)
        self.shape.validate("draft_model drafter")
        self.kv_shape, self.max_context = model.kv_shape, model.max_context

    def attach(self, model: TargetModel) -> None:
        """ValueError if the two do not share a vocabulary."""
        ours, theirs = self.model.tokenizer, model.tokenizer
        if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
            raise ValueError("draft_model drafter: model: expected the target's tokenizer, got a different vocabulary")
        if (ours is None or theirs is None) and self.model.vocab_size != model.vocab_size:
            raise ValueError(
                f"draft_model drafter: model: expected a vocabulary of {model.vocab_size} ids as the target's, "
                f"got {self.model.vocab_size}"
            )
        self.vocab_size = min(self.model.vocab_size, model.vocab_size)

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext) -> list[Draft]:
        memory = DraftCache(context)
        ready = []
        for b, state in enumerate(states):
            rows = self._rows(state, memory)
            needed = len(state.tokens) - rows.length + self.shape.num_slots
            if len(state.tokens) + self.shape.depth <= self.max_context and memory.reserve(state, rows, needed):
                ready.append(b)
        drafts = [Draft()] * len(states)
        if ready:
            chosen = [(states[b], states[b].drafter_state) for b in ready]
            grown = self._grow(chosen, self._read(chosen, memory), [limits[b] for b in ready], memory)
            for b, draft in zip(ready, grown):
                drafts[b] = draft
                memory.trim(states[b], states[b].drafter_state)
        return drafts

    def _rows(self, state: Any, memory: DraftCache) -> DraftRows:
        if not isinstance(state.drafter_state, DraftRows) or memory.lost(state, state.drafter_state):
            state.drafter_state = DraftRows()
        return state.drafter_state

    def _read(self, requests: Sequence[tuple[Any, DraftRows]], memory: DraftCache) -> Tensor:
        """Bring the cache up to each text's last token; logits [B, V] behind it."""
        device = self.model.device
        found: dict[int, Tensor] = {}
        while len(found) < len(requests):
            todo = [b for b in range(len(requests)) if b not in found]
            share = max(1, _CHUNK // len(todo))
            part = [requests[b] for b in todo]
            sizes = [min(share, len(state.tokens) - rows.length) for state, rows in part]
            ids = [t for (s, r), n in zip(part, sizes) for t in s.tokens[r.length : r.length + n]]
            positions = [p for (_, r), n in zip(part, sizes) for p in range(r.length, r.length + n)]
            batch = memory.batch(
                part,
                torch.tensor(ids, device=device).clamp(0, self.model.vocab_size - 1),  # the target's may have more
                sizes,
                torch.tensor(positions, dtype=torch.int32, device=device),
            )
            batch = batch._replace(logit_rows=batch.cu_nodes[1:].long() - 1)
            logits = self.model.forward(batch, memory.cache).clone()  # valid until the next call only
            for i, (b, (state, rows), n) in enumerate(zip(todo, part, sizes)):
                rows.length += n
                if rows.length == len(state.tokens):
                    found[b] = logits[i]
        return torch.stack([found[b] for b in range(len(requests))])

    def _grow(
        self, requests: Sequence[tuple[Any, DraftRows]], roots: Tensor, limits: Sequence[Limit], memory: DraftCache
    ) -> list[Draft]:
        ends = torch.tensor([rows.length for _, rows in requests], dtype=torch.int32, device=roots.device)

        def forward(level: Level) -> Tensor:
            count, width = level.token_ids.shape
            positions = (ends + level.depth - 1).repeat_interleave(width)
            batch = memory.batch(requests, level.token_ids.reshape(-1), [width] * count, positions, level)
            return self.model.forward(batch, memory.cache).clone()

        states = [state for state, _ in requests]
        return grow_trees(roots, forward, states, limits, self.shape, sampled=self.sampled, vocab_size=self.vocab_size)
