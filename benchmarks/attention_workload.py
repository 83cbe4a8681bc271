"""Workloads of bench_attention.py, and what other packages would be called with on them.

A workload keeps several page tables over one large pool and hands out the next at every call, so that a cache is cold
when its turn comes again (together they exceed the last-level cache several times).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import specdec_kernels as sk

PAGE = 16
COLD_BYTES = 400 << 20


def eagle_parents(num_nodes: int) -> list[int]:
    """A bushy tree: node i hangs on node (i - 1) // 2."""
    return [-1] + [(i - 1) // 2 for i in range(1, num_nodes)]


def mask_words(parents: list[int]) -> torch.Tensor:
    words = torch.zeros(len(parents), -(-len(parents) // 32), dtype=torch.int64)
    for node in range(len(parents)):
        at = node
        while at >= 0:
            words[node, at // 32] |= 1 << (at % 32)
            at = parents[at]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class Workload:
    """Trees of `nodes[b]` queries over contexts `contexts[b]`, pages shuffled."""

    def __init__(self, contexts: list[int], nodes: list[int], dtype: torch.dtype, heads: tuple[int, int] = (32, 8),
                 head_dim: int = 128, page_size: int = PAGE):  # fmt: skip
        self.contexts, self.nodes, self.dtype, self.page_size = contexts, nodes, dtype, page_size
        self.num_q_heads, self.num_kv_heads = heads
        self.head_dim, self.batch = head_dim, len(contexts)
        self.lengths = [c + n for c, n in zip(contexts, nodes)]
        pages = [-(-length // page_size) for length in self.lengths]
        row_bytes = 2 * self.num_kv_heads * head_dim * dtype.itemsize
        self.kv_bytes = sum(self.lengths) * row_bytes
        self.flops = 4 * sum(n * length for n, length in zip(nodes, self.lengths)) * self.num_q_heads * head_dim
        copies = max(1, min(32, -(-COLD_BYTES // max(self.kv_bytes, 1))))
        total = sum(pages) * copies
        shape = (total, page_size, self.num_kv_heads, head_dim)
        self.k_cache, self.v_cache = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        for cache in (self.k_cache, self.v_cache):
            for start in range(0, total, 4096):
                cache[start : start + 4096].normal_()
        order = torch.randperm(total).to(torch.int32)
        self.tables = []
        for copy in range(copies):
            table = torch.full((self.batch, max(pages)), 2147480000, dtype=torch.int32)
            at = copy * sum(pages)
            for b, count in enumerate(pages):
                table[b, :count] = order[at : at + count]
                at += count
            self.tables.append(table)
        self._turn = itertools.cycle(range(copies))
        self.context_lens = torch.tensor(contexts, dtype=torch.int32)
        self.cu_nodes = torch.tensor([0, *itertools.accumulate(nodes)], dtype=torch.int32)
        self.max_nodes = max(nodes)
        masks = [mask_words(eagle_parents(n)) for n in nodes]
        width = max(m.shape[1] for m in masks)
        self.tree_mask = torch.cat([F.pad(m, (0, width - m.shape[1])) for m in masks])
        self.q = torch.randn(sum(nodes), self.num_q_heads, head_dim).to(dtype)

    def next_table(self) -> torch.Tensor:
        return self.tables[next(self._turn)]

    def ours(self, tree: bool = True, table: torch.Tensor | None = None, **options: Any) -> Any:
        return sk.tree_attention(
            self.q, self.k_cache, self.v_cache, self.next_table() if table is None else table, self.context_lens,
            self.cu_nodes, self.tree_mask if tree else None, max_nodes=self.max_nodes, **options,
        )  # fmt: skip

    def visible(self, b: int, causal: bool = False) -> torch.Tensor:
        """[nodes, length] bool of request b: its tree's, or those of a chain."""
        if causal:
            return torch.ones(self.nodes[b], self.lengths[b], dtype=torch.bool).tril(self.contexts[b])
        rows = self.tree_mask[self.cu_nodes[b] : self.cu_nodes[b + 1]].long() & 0xFFFFFFFF
        tree = (rows[:, :, None] >> torch.arange(32)) & 1
        tree = tree.reshape(len(rows), -1)[:, : self.nodes[b]].bool()
        return torch.cat([torch.ones(len(rows), self.contexts[b], dtype=torch.bool), tree], dim=1)

    def exact(self, b: int, table: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Request b by float64 attention over its gathered rows: the gate."""
        position = torch.arange(self.lengths[b])
        pages = table[b][position // self.page_size].long()
        keys, values = (c[pages, position % self.page_size].double() for c in (self.k_cache, self.v_cache))
        q = self.q[self.cu_nodes[b] : self.cu_nodes[b + 1]].double()
        group = self.num_q_heads // self.num_kv_heads
        hidden = ~self.visible(b, causal)[:, None, :]
        out = torch.empty_like(q)
        for h in range(self.num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            scores = (q[:, heads] @ keys[:, h].T * self.head_dim**-0.5).masked_fill(hidden, float("-inf"))
            out[:, heads] = scores.softmax(-1) @ values[:, h]
        return out

    def gate(self, causal: bool = False) -> bool:
        """Ours against float64 on the first and the last request."""
        table = self.next_table()
        out = self.ours(not causal, table)
        tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[self.dtype]
        rows = [(b, slice(int(self.cu_nodes[b]), int(self.cu_nodes[b + 1]))) for b in {0, self.batch - 1}]
        return all((out[r].double() - self.exact(b, table, causal)).abs().max() < tolerance for b, r in rows)


def agree(name: str, theirs: torch.Tensor, work: Workload, requests: range) -> None:
    """A baseline computes what we compute (on the first table), or its time says nothing."""
    rows = slice(int(work.cu_nodes[requests[0]]), int(work.cu_nodes[requests[-1] + 1]))
    error = float((theirs.float() - work.ours(table=work.tables[0])[rows].float()).abs().max())
    tolerance = 1e-4 if work.dtype == torch.float32 else 2e-2  # theirs rounds scores or weights to the type as well
    assert error < tolerance, f"{name} differs from ours by {error}"


def strong_torch(work: Workload, requests: range | None = None) -> Callable[[], torch.Tensor]:
    """Gather into preallocated buffers, GQA folded into query rows, one SDPA with an additive mask (equal lengths)."""
    chosen = requests or range(work.batch)
    b, length, nodes = chosen[0], work.lengths[chosen[0]], work.nodes[chosen[0]]
    assert all(work.lengths[i] == length and work.nodes[i] == nodes for i in chosen)
    count, pages, group = len(chosen), -(-length // work.page_size), work.num_q_heads // work.num_kv_heads
    shape = (count * pages, *work.k_cache.shape[1:])
    keys, values = torch.empty(shape, dtype=work.dtype), torch.empty(shape, dtype=work.dtype)
    bias = torch.zeros(nodes, length).masked_fill(~work.visible(b), float("-inf")).to(work.dtype)
    bias = bias.repeat_interleave(group, 0)[None, None].contiguous()
    q = work.q[int(work.cu_nodes[chosen[0]]) : int(work.cu_nodes[chosen[-1] + 1])]

    def call(table: torch.Tensor | None = None) -> torch.Tensor:
        table = work.next_table() if table is None else table
        index = table[chosen[0] : chosen[-1] + 1, :pages].reshape(-1).long()
        torch.index_select(work.k_cache, 0, index, out=keys)
        torch.index_select(work.v_cache, 0, index, out=values)
        k, v = (
            x.view(count, pages * work.page_size, work.num_kv_heads, -1)[:, :length].transpose(1, 2)
            for x in (keys, values)
        )
        rows = q.view(count, nodes, work.num_kv_heads, group, -1).permute(0, 2, 1, 3, 4)
        out = F.scaled_dot_product_attention(rows.reshape(count, work.num_kv_heads, nodes * group, -1), k, v, bias)
        out = out.view(count, work.num_kv_heads, nodes, group, -1).permute(0, 2, 1, 3, 4)
        return out.reshape(count * nodes, work.num_q_heads, -1)

    agree("torch's attention", call(work.tables[0]), work, chosen)
    return call


def flex_attention(work: Workload) -> Callable[[], torch.Tensor]:
    """torch's FlexAttention (compiled) on a gathered copy, with a block mask of the tree; equal lengths, one tree."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, nodes, pages = work.lengths[0], work.nodes[0], -(-work.lengths[0] // work.page_size)
    seen = work.visible(0)
    mask = create_block_mask(lambda b, h, i, j: seen[i, j], None, None, nodes, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(table: torch.Tensor | None = None) -> torch.Tensor:
        index = (work.next_table() if table is None else table)[:, :pages].reshape(-1).long()
        k, v = (
            c[index].view(work.batch, -1, work.num_kv_heads, work.head_dim)[:, :length].transpose(1, 2).contiguous()
            for c in (work.k_cache, work.v_cache)
        )
        q = work.q.view(work.batch, nodes, work.num_q_heads, -1).transpose(1, 2).contiguous()
        return compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    agree("FlexAttention", call(work.tables[0]), work, range(work.batch))
    return call
