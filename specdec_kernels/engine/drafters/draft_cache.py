"""A drafter's own paged KV: which rows of which request it holds, and the batches that read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch
from specdec_kernels.engine.drafters import DraftContext
from specdec_kernels.engine.drafters.grow import Level
from specdec_kernels.engine.pages import Tenant


@dataclass
class DraftRows:
    """What a drafter remembers of one request: the KV of text positions `base ... base + length - 1` is in
    `state.draft_pages`. `base` > 0: the rows before were never seen, or were taken away."""

    base: int = 0
    length: int = 0

    @property
    def end(self) -> int:
        """Text position of the next row."""
        return self.base + self.length


class DraftCache:
    """The drafter's `cache`, and the arena that gives out its pages."""

    def __init__(self, context: DraftContext):
        assert context.draft_cache is not None
        assert context.arena is not None
        self.cache, self.arena = context.draft_cache, context.arena

    def lost(self, state: Any, rows: DraftRows) -> bool:
        """Whether the engine has taken the request's pages back."""
        return self.arena.pages_for(rows.length, Tenant.DRAFT) > len(state.draft_pages)

    def reserve(self, state: Any, rows: DraftRows, num_rows: int) -> bool:
        """Pages for `num_rows` rows behind those held; False (and nothing changed) if they cannot be had."""
        return self.arena.grow(state.draft_pages, rows.length + num_rows, Tenant.DRAFT)

    def trim(self, state: Any, rows: DraftRows) -> None:
        """Give back the pages behind the rows held."""
        self.arena.shrink(state.draft_pages, rows.length, Tenant.DRAFT)

    def batch(
        self,
        requests: Sequence[tuple[Any, DraftRows]],
        token_ids: Tensor,
        sizes: Sequence[int],
        positions: Tensor,
        level: Level | None = None,
    ) -> Batch:
        """`sizes[b]` more rows of every (state, rows): its text's next ones (a causal chain), or a level of its tree.

        token_ids int64 [sum(sizes)], positions int32 [sum(sizes)]: rotary positions, not rows of the cache.
        """
        device = token_ids.device

        def tensor(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        pages = [state.draft_pages for state, _ in requests]
        width = max(map(len, pages))
        table = tensor([mine + [-1] * (width - len(mine)) for mine in pages])
        lengths = tensor([rows.length for _, rows in requests])
        cu = torch.zeros(len(requests) + 1, dtype=torch.int32, device=device)
        cu[1:] = tensor(sizes).cumsum(0)
        first = lengths if level is None else lengths + level.first_slot
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slot_mapping(table, first, cu, self.cache.page_size, total_nodes=len(token_ids)),
            page_table=table,
            context_lens=lengths,
            cu_nodes=cu,
            max_nodes=max(sizes),
            tree_mask=None if level is None else level.mask,
            query_start=None if level is None else torch.full_like(lengths, level.first_slot),
        )
