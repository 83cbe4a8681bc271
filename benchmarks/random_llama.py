"""A Llama with random weights in plain torch as an engine target, for machines without weights and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.engine import Batch, KVCache


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; the defaults are SmolLM2-135M's."""

    hidden: int = 576
    intermediate: int = 1536
    layers: int = 30
    q_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    context: int = 8192
    rope_theta: float = 1e5
    epsilon: float = 1e-5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, H, D] by [T, 1, D / 2] angles, halves layout."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class RandomLlama:
    """`TargetModel` of specdec_kernels.engine. Input and output embeddings are tied, as in SmolLM2."""

    tokenizer: Any = None

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.name = shape, "random Llama"
        self.vocab_size, self.max_context, self.num_layers = shape.vocab, shape.context, shape.layers
        self.eos_token_ids: frozenset[int] = frozenset()
        self.dtype, self.device = dtype, torch.device(device)

        def matrix(rows: int, columns: int, scale: float) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * scale).to(self.device, dtype)

        h, i, queries, keys = shape.hidden, shape.intermediate, shape.q_heads, shape.kv_heads
        self.embedding = matrix(shape.vocab, h, 1.0)
        inside = [((queries + 2 * keys) * shape.head_dim, h), (h, queries * shape.head_dim), (2 * i, h), (h, i)]
        self.layers = [[matrix(r, c, c**-0.5) for r, c in inside] for _ in range(shape.layers)]
        self.one = torch.ones(h, device=self.device, dtype=dtype)
        half = torch.arange(0, shape.head_dim, 2, device=self.device) / shape.head_dim
        self.frequencies = shape.rope_theta**-half

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        s = self.shape
        return KVCache.allocate(s.layers, num_pages, page_size, s.kv_heads, s.head_dim, self.dtype, self.device)

    def forward(self, batch: Batch, cache: KVCache, layers: tuple[int, ...] | None = None) -> Tensor:
        s = self.shape
        norm = lambda x: F.rms_norm(x, (s.hidden,), self.one, s.epsilon)  # noqa: E731
        angles = batch.positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding[batch.token_ids]
        for index in range(s.layers) if layers is None else layers:
            qkv, out, gate_up, down = self.layers[index]
            heads = F.linear(norm(x), qkv).view(len(x), -1, s.head_dim)
            q, k, v = heads.split([s.q_heads, s.kv_heads, s.kv_heads], 1)
            sk.write_kv(rotate(k, cos, sin), v, cache.k[index], cache.v[index], batch.slots)
            attended = sk.tree_attention(
                rotate(q, cos, sin), cache.k[index], cache.v[index], batch.page_table, batch.context_lens,
                batch.cu_nodes, batch.tree_mask, max_nodes=batch.max_nodes, causal=batch.causal,
            )  # fmt: skip
            assert isinstance(attended, Tensor)  # no lse was asked for
            x = x + F.linear(attended.flatten(1), out)
            gate, up = F.linear(norm(x), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        rows = x if batch.logit_rows is None else x[batch.logit_rows]
        return F.linear(norm(rows), self.embedding) * s.hidden**-0.5
