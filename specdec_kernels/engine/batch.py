"""What a target model is given and must give back: the packed batch, the paged cache, the model protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Batch(NamedTuple):
    """T packed tokens of B requests; request b's rows are `cu_nodes[b]:cu_nodes[b + 1]`.

    token_ids, positions, slots: int64 / int32 / int32 [T]; page_table: int32 [B, max_pages], -1 behind the owned pages;
    context_lens: int32 [B], cached tokens before this batch; tree_mask: int32 [T, W] or None (all rows causal chains);
    causal: bool [B] or None, requests whose mask rows are ignored (prefill); logit_rows: int64 [R] or None (all rows);
    query_start: int32 [B] or None, the tree slot of each request's first row (a drafter's level; None: 0).
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
    query_start: torch.Tensor | None = None


class HiddenStates:
    """What a forward pass shall keep besides its logits: `states[i]` [T, hidden], for every i of `layers`.

    i < num_layers: the residual stream as layer i reads it (0: the embeddings); i == num_layers: the last state,
    normed, as the output matrix reads it. The indices of `eagle_aux_hidden_state_layer_ids` in EAGLE-3 checkpoints.
    """

    def __init__(self, layers: Iterable[int]):
        self.layers = tuple(sorted(set(layers)))
        self.states: dict[int, torch.Tensor] = {}

    def rows(self, layers: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """States of `layers` side by side, [len(rows), len(layers) * hidden]."""
        return torch.cat([self.states[layer][rows] for layer in layers], -1)


class KVShape(NamedTuple):
    """What a model keeps of a token: `num_layers` times a key and a value `[num_kv_heads, head_dim]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


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


def draft_page_size(target: KVShape, draft: KVShape, page_size: int) -> int:
    """Rows of the drafter that fit where `page_size` tokens of the target do; ValueError if none does."""
    size = _page_bytes(target, page_size) // draft.bytes_per_token
    if size < 1:
        least = -(-draft.bytes_per_token // target.bytes_per_token)
        raise ValueError(f"EngineConfig: page_size: expected at least {least} with this drafter, got {page_size}")
    return size


def _page_bytes(target: KVShape, page_size: int) -> int:
    return -(-page_size * target.bytes_per_token // 64) * 64


def share_pages(
    target: KVShape, draft: KVShape, num_pages: int, page_size: int, device: torch.device
) -> tuple[KVCache, KVCache]:
    """Caches of two models over the same memory: a page holds `page_size` tokens of the target, or as many of the
    drafter as fit into these bytes (all of a text's draft KV in few pages: its layers are few).

        page p of the target   | k of layer 0 | v | k of layer 1 | v | ...
        the same, as a draft's | k: many tokens                  | v: many tokens |
    """
    page_bytes, draft_size = _page_bytes(target, page_size), draft_page_size(target, draft, page_size)
    memory = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)

    def carve(shape: KVShape, size: int) -> KVCache:
        row = shape.num_kv_heads * shape.head_dim
        elements = memory.view(shape.dtype)
        parts = [
            elements.as_strided(
                (num_pages, size, shape.num_kv_heads, shape.head_dim),
                (elements.shape[1], row, shape.head_dim, 1),
                part * size * row,
            )
            for part in range(2 * shape.num_layers)
        ]
        return KVCache(parts[::2], parts[1::2], size)

    return carve(target, page_size), carve(draft, draft_size)


class TargetModel(Protocol):
    """What the engine needs of a model. `forward` writes the batch's KV into its slots, attends as the batch says,
    and returns logits `[R, vocab_size or more]`, valid until the next call; `layers`: those to run (None: all);
    `hidden`: filled with the states it asks for. Drafters with heads also need `hidden_size`, `embedding()` and
    `output_matrix()` [V, hidden_size], as `TransformersModel` has them; a model may do without all three."""

    name: str
    tokenizer: Any
    vocab_size: int
    max_context: int
    num_layers: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_shape(self) -> KVShape: ...

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache: ...

    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        layers: tuple[int, ...] | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor: ...
