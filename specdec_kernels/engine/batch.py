"""What a target model is given and must give back: the packed batch, the paged cache, the model protocol."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch


class Batch(NamedTuple):
    """T packed tokens of B requests; request b's rows are `cu_nodes[b]:cu_nodes[b + 1]`.

    token_ids, positions, slots: int64 / int32 / int32 [T]; page_table: int32 [B, max_pages], -1 behind the owned pages;
    context_lens: int32 [B], cached tokens before this batch; tree_mask: int32 [T, W] or None (all rows causal chains);
    causal: bool [B] or None, requests whose mask rows are ignored (prefill); logit_rows: int64 [R] or None (all rows).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    cu_nodes: torch.Tensor
    max_nodes: int
    tree_mask: torch.Tensor | None = None
    causal: torch.Tensor | None = None
    logit_rows: torch.Tensor | None = None


class KVCache(NamedTuple):
    """Paged KV, one tensor a layer: `[num_pages, page_size, num_kv_heads, head_dim]`."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int

    @staticmethod
    def allocate(
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """One arena for K and one for V, cut into layers. Not initialised: no op reads a row that was not written, and
        the memory of pages never used is never touched."""
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return KVCache(list(k), list(v), page_size)


class TargetModel(Protocol):
    """What the engine needs of a model. `forward` writes the batch's KV into its slots, attends as the batch says,
    and returns logits `[R, vocab_size or more]`, valid until the next call; `layers`: those to run (None: all)."""

    name: str
    tokenizer: Any
    vocab_size: int
    max_context: int
    num_layers: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache: ...

    def forward(self, batch: Batch, cache: KVCache, layers: tuple[int, ...] | None = None) -> torch.Tensor: ...
