"""EAGLE-2, EAGLE-3 and MTP: an autoregressive head over the target's states drafts a tree or a chain.

A step, from the drafter's side (see `engine.heads` for what is paired with what):

    observe   the target's states of accepted tokens replace the head's own guesses: their rows go through the head
              once more ("draft-extend"), over the slots that the last tree left behind
    propose   the extension's last row gives the law behind the root; each level is one pass of top_k rows a request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention import tree_attention, write_kv
from specdec_kernels.engine.batch import Batch, HiddenStates, KVShape, TargetModel
from specdec_kernels.engine.drafters import Draft, DraftContext, Limit, Seen
from specdec_kernels.engine.drafters.draft_cache import DraftCache, DraftRows
from specdec_kernels.engine.drafters.grow import Level, Shape, grow_trees
from specdec_kernels.engine.head_files import bind_head, find_head
from specdec_kernels.engine.heads import AutoregressiveHead, DraftHead
from specdec_kernels.tree import check_d2t

_MOST_PENDING = 256  # states kept back for the next proposal; beyond that they go through the head at once


@dataclass
class _Notes(DraftRows):
    """`pending`: target states of the next text positions, not yet through the head; `output`, `logits`: of the last
    row."""

    pending: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    logits: Tensor | None = None

    @property
    def known(self) -> int:
        """Text position of the next state to come."""
        return self.end + sum(map(len, self.pending))

    def restart(self, position: int) -> None:
        """Forget everything before a text position."""
        self.base, self.length, self.pending, self.output, self.logits = position, 0, [], None, None


class EagleDrafter:
    """Drafts with an autoregressive head; one object serves one engine.

    `head`: a head, a checkpoint folder, or None: the head of `kind` that ships for this target (None: eagle3). A given
    head must be of that `kind` (None: any). `top_k`, `depth`,
    `num_nodes`: bounds of the tree (`top_k` 1: a chain); it grows only where more can be kept. `sampled`: for requests
    with a temperature, siblings drawn without replacement from the head's law; False: the likeliest ones, verified as
    fixed choices. Both are lossless.
    `by_rank`: None, and the tree follows the head's own probabilities, step by step (dynamic, EAGLE-2); or the chances
    that the child of rank 0, 1, ... top_k - 1 is the accepted one, and every tree has the shape that suits these
    (static, EAGLE-1).
    """

    def __init__(
        self,
        head: DraftHead | str | Path | None = None,
        *,
        kind: str | None = None,
        top_k: int = 8,
        depth: int = 8,
        num_nodes: int = 24,
        sampled: bool = True,
        by_rank: Sequence[float] | None = None,
    ):
        self.name = kind or (head.config.kind if isinstance(head, DraftHead) else "eagle3")
        self.shape, self.sampled = Shape(top_k, depth, num_nodes), sampled
        self.shape.validate(f"{self.name} drafter")
        if by_rank is not None and (len(by_rank) != top_k or not all(0 < chance <= 1 for chance in by_rank)):
            raise ValueError(
                f"{self.name} drafter: by_rank: expected {top_k} probabilities above 0 (top_k), got {list(by_rank)}"
            )
        self.by_rank = by_rank
        self._given, self._kind = head, kind
        self.hidden_layers: tuple[int, ...] = ()

    def attach(self, model: TargetModel) -> None:
        """Bind the head to the target; ValueError if it was made for another one."""
        head = find_head(self._given, self.name, model)
        if not isinstance(head, AutoregressiveHead):
            raise ValueError(f"{self.name} drafter: head: expected an autoregressive one, got {head.config.kind!r}")
        if self._kind not in (None, head.config.kind):
            raise ValueError(f"{self._kind} drafter: head: expected one of this kind, got {head.config.kind!r}")
        self.head, self.name, c = bind_head(head, model, pack=head is not self._given), head.config.kind, head.config
        self.hidden_layers, self.vocab_size = c.feature_layers, model.vocab_size
        self.kv_shape = KVShape(1, c.num_kv_heads, c.head_dim, model.dtype)
        self.d2t, _ = check_d2t(
            head.d2t, draft_vocab_size=c.draft_vocab_size, target_vocab_size=c.vocab_size, kind="offset"
        )

    def weights_changed(self, model: Any) -> None:
        """The target has new weights: read its matrices again."""
        self.head.rebind(model.embedding(), model.output_matrix())

    def observe(self, seen: Sequence[Seen], hidden: HiddenStates, context: DraftContext) -> None:
        """Note the states of new text; states already known (a text computed again) are passed over."""
        memory = DraftCache(context)
        device = hidden.states[self.hidden_layers[0]].device
        rows = torch.tensor([row for item in seen for row in item.rows], device=device)
        parts = hidden.rows(self.hidden_layers, rows).split([len(item.rows) for item in seen])
        full = []
        for (state, first, _), states in zip(seen, parts):
            notes = self._notes(state, memory)
            if first > notes.known or not notes.known - notes.base:  # a gap, or nothing yet: start here
                notes.restart(first)
                memory.trim(state, notes)
            if first + len(states) > notes.known:
                notes.pending.append(states[notes.known - first :])
            if notes.known - notes.end >= _MOST_PENDING:
                full.append(state)
        self._extend(full, memory)

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext) -> list[Draft]:
        memory = DraftCache(context)
        self._extend(states, memory)
        ready = []
        for b, state in enumerate(states):
            notes = self._notes(state, memory)
            current = notes.logits is not None and notes.end == state.context_len
            if current and memory.reserve(state, notes, self.shape.num_slots):
                ready.append(b)
        drafts = [Draft()] * len(states)
        if ready:
            grown = self._grow([states[b] for b in ready], [limits[b] for b in ready], memory)
            for b, draft in zip(ready, grown):
                drafts[b] = draft
                memory.trim(states[b], states[b].drafter_state)
        return drafts

    def _notes(self, state: Any, memory: DraftCache) -> _Notes:
        notes = state.drafter_state
        if not isinstance(notes, _Notes):
            notes = state.drafter_state = _Notes()
        if memory.lost(state, notes):
            pending = notes.pending
            notes.restart(notes.end)
            notes.pending = pending
        return notes

    def _extend(self, states: Sequence[Any], memory: DraftCache) -> None:
        """Run the pending pairs of these requests through the head; keep each last row's output and logits."""
        able: list[tuple[Any, _Notes]] = []
        for state in states:
            notes = self._notes(state, memory)
            if not notes.pending:
                continue
            if memory.reserve(state, notes, notes.known - notes.end):
                able.append((state, notes))
            else:  # no memory: go on without what was seen so far
                notes.restart(notes.known)
                memory.trim(state, notes)
        if not able:
            return
        sizes = [notes.known - notes.end for _, notes in able]
        ids = [t for (s, n), size in zip(able, sizes) for t in s.tokens[n.end + 1 : n.end + 1 + size]]
        positions = [p for (_, n), size in zip(able, sizes) for p in range(n.end, n.end + size)]
        features = torch.cat([part for _, notes in able for part in notes.pending])
        device = features.device
        batch = memory.batch(
            able,
            torch.tensor(ids, device=device),
            sizes,
            torch.tensor(positions, dtype=torch.int32, device=device),
        )
        output = self._forward(batch, self.head.fuse(features), memory)
        last_rows = batch.cu_nodes[1:].long() - 1
        logits = self.head.logits(output[last_rows])
        for i, (_, notes) in enumerate(able):
            notes.length += sizes[i]
            notes.pending = []
            notes.output, notes.logits = output[last_rows[i]], logits[i]

    def _grow(self, states: Sequence[Any], limits: Sequence[Limit], memory: DraftCache) -> list[Draft]:
        requests = [(state, state.drafter_state) for state in states]
        output = torch.stack([notes.output for _, notes in requests])[:, None]
        roots = torch.stack([notes.logits for _, notes in requests])
        ends = torch.tensor([notes.end for _, notes in requests], dtype=torch.int32, device=roots.device)

        def forward(level: Level) -> Tensor:
            nonlocal output
            count, width = level.token_ids.shape
            index = level.parents[:, :, None].expand(-1, -1, output.shape[-1])
            # The pair of a node at depth d is that of text position end - 1 + d.
            positions = (ends + level.depth - 1).repeat_interleave(width)
            batch = memory.batch(requests, level.token_ids.reshape(-1), [width] * count, positions, level)
            flat = self._forward(batch, output.gather(1, index).flatten(0, 1), memory)
            output = flat.view(count, width, -1)
            return self.head.logits(flat)

        return grow_trees(
            roots, forward, states, limits, self.shape,
            sampled=self.sampled, vocab_size=self.vocab_size, d2t=self.d2t, by_rank=self.by_rank,
        )  # fmt: skip

    def _forward(self, batch: Batch, states: Tensor, memory: DraftCache) -> Tensor:
        """Packed rows through the head, their KV into the drafter's pages."""
        k_cache, v_cache = memory.cache.k[0], memory.cache.v[0]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write_kv(k, v, k_cache, v_cache, batch.slots)
            out = tree_attention(
                q, k_cache, v_cache, batch.page_table, batch.context_lens, batch.cu_nodes, batch.tree_mask,
                max_nodes=batch.max_nodes, query_start=batch.query_start,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out

        return self.head(batch.token_ids, states, batch.positions, attend)
