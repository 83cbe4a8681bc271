"""Decoding steps as CUDA graphs: one capture a token bucket, replayed with the lengths on the device."""

from __future__ import annotations

import torch

from specdec_kernels.batching import GraphBuckets
from specdec_kernels.engine.batch import Batch, KVCache, TargetModel
from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.pack import Packed
from specdec_kernels.engine.pages import Arena


class GraphedForward:
    """`model.forward` on steps without prefill, at the fixed token counts `sizes`. A step that fits none, or that holds
    a prefill chunk, is left to the caller. On a CPU, which has no graphs, the same static buffers are run eagerly.

    Behind the real rows a bucket is filled up with rows that belong to no request and write to no slot.
    """

    def __init__(
        self, model: TargetModel, cache: KVCache, sizes: tuple[int, ...], max_batch: int, max_pages: int, max_nodes: int
    ):
        self._model, self._cache, self._max_nodes = model, cache, max_nodes
        self._max_batch, self._max_pages = max_batch, max_pages
        self.padding = 0  # slots the last call added
        self._buckets = GraphBuckets(
            self._step,
            sizes,
            self._buffers,
            fillers={"slots": -1, "page_table": -1},
            repeat_last=("cu_nodes",),
        )

    @staticmethod
    def of(model: TargetModel, cache: KVCache, config: EngineConfig, arena: Arena) -> GraphedForward | None:
        """None if the configuration asks for no graphs."""
        if not config.graph_sizes:
            return None
        max_pages = min(arena.num_pages, arena.pages_for(model.max_context + config.num_drafts + 1))
        sizes = tuple(config.graph_sizes)
        return GraphedForward(model, cache, sizes, config.max_batch, max_pages, config.num_drafts + 1)

    def __call__(self, packed: Packed) -> torch.Tensor | None:
        """Logits of the step's rows, or None. They are overwritten by the next call of the same bucket."""
        batch, total = packed.batch, len(packed.batch.token_ids)
        requests, pages = batch.page_table.shape
        fits = total <= self._buckets.sizes[-1] and requests <= self._max_batch and batch.max_nodes <= self._max_nodes
        if batch.logit_rows is not None or not fits or pages > self._max_pages:
            return None
        width = -(-self._max_nodes // 32)
        table = torch.nn.functional.pad(batch.page_table, (0, self._max_pages - pages), value=-1)
        mask = torch.nn.functional.pad(packed.tree.tree_mask, (0, width - packed.tree.tree_mask.shape[1]))
        self.padding = self._buckets.size_for(total) - total
        logits = self._buckets(
            total,
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            page_table=table,
            context_lens=batch.context_lens,
            cu_nodes=batch.cu_nodes,
            tree_mask=mask,
        )
        return logits[:total]

    def _step(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self._model.forward(Batch(max_nodes=self._max_nodes, **inputs), self._cache)

    def _buffers(self, size: int) -> dict[str, torch.Tensor]:
        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._model.device)

        batch = self._max_batch
        return {
            "token_ids": new(size, dtype=torch.int64),
            "positions": new(size),
            "slots": new(size),
            "page_table": new(batch, self._max_pages),
            "context_lens": new(batch),
            "cu_nodes": new(batch + 1),
            "tree_mask": new(size, -(-self._max_nodes // 32)),
        }
