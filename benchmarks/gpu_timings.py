"""Attention and verification on one device against what a bare torch has: rows for benchmarks/on_gpu.py.

Attention: our paged `tree_attention` against torch's scaled_dot_product_attention on keys and values that were gathered
beforehand (the peer pays no gathering), and against one read of the keys and values at the device's copy bandwidth.
Verification: `verify` on raw logits against softmax, compare and multinomial in torch, beside what verify_model.py
predicts. Results are compared first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import specdec_kernels as sk
from benchmarks import sampling_peers
from benchmarks.harness import Timing, interleave
from benchmarks.verify_model import predict

ATTENTION = ((1, 8192, 26), (8, 2048, 26), (8, 8192, 26), (8, 8192, 64), (64, 2048, 26))  # requests, context, nodes
# requests, drafts each, vocabulary
VERIFY = ((1, 5, 128256), (8, 5, 128256), (64, 5, 32000), (8, 7, 151936), (64, 7, 128256))
Row = dict[str, Any]


def copy_bandwidth(device: str, megabytes: int = 1024) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = interleave({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return source.numel() * 4 * 2 / timing.median


def rows_of(shape: Row, timings: dict[str, Timing], **more: Any) -> Iterator[Row]:
    base = next(iter(timings.values())).median
    for name, timing in timings.items():
        spread = {f"p{int(q * 100)}_s": timing.quantile(q) for q in (0.1, 0.9)}
        yield {**shape, "provider": name, "median_s": timing.median, **spread, "ours_over_own": base / timing.median,
               "samples": len(timing.samples), **more}  # fmt: skip


def attention(device: str, shape: tuple[int, int, int], dtype: torch.dtype, bandwidth: float) -> Iterator[Row]:
    """32 query heads, 8 KV heads of 128, pages of 16, a random tree a request."""
    requests, context, nodes = shape
    heads, kv_heads, dim, page = 32, 8, 128, 16
    length = context + nodes
    pages = -(-length // page)
    generator = torch.Generator(device).manual_seed(0)
    caches = [
        torch.randn(requests * pages, page, kv_heads, dim, dtype=dtype, device=device, generator=generator)
        for _ in range(2)
    ]
    order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0))
    table = order.view(requests, pages).int().to(device)
    parents = [-1] + [(i - 1) // 2 for i in range(1, nodes)]
    cu = (torch.arange(requests + 1) * nodes).int().to(device)
    lens = torch.full((requests,), context, dtype=torch.int32, device=device)
    whole = torch.tensor(parents * requests, dtype=torch.int32, device="cpu")
    mask = sk.build_tree(whole, cu.cpu(), lens.cpu(), max_nodes=nodes).tree_mask.to(device)
    q = torch.randn(requests * nodes, heads, dim, dtype=dtype, device=device, generator=generator)

    def ours() -> torch.Tensor:
        out = sk.tree_attention(q, *caches, table, lens, cu, mask, max_nodes=nodes)
        assert isinstance(out, torch.Tensor)
        return out

    k, v = (
        cache[table.long()].view(requests, -1, kv_heads, dim)[:, :length].transpose(1, 2).contiguous()
        for cache in caches
    )
    bits = mask[:nodes].long()[:, :, None] >> torch.arange(32, device=device) & 1
    seen = torch.ones(nodes, length, dtype=torch.bool, device=device)
    seen[:, context:] = bits.view(nodes, -1)[:, :nodes].bool()
    dense = q.view(requests, nodes, heads, dim).transpose(1, 2).contiguous()

    def sdpa() -> torch.Tensor:
        out = F.scaled_dot_product_attention(dense, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).reshape(requests * nodes, heads, dim)

    difference = float((ours().float() - sdpa().float()).abs().max())
    assert difference < 3e-2, f"attention {shape}: differs from torch by {difference}"
    floor = k.numel() * 2 * k.element_size() / bandwidth
    named = {"family": "attention", "B": requests, "context": context, "nodes": nodes, "dtype": str(dtype)}
    timings = interleave({"ours": ours, "torch sdpa, gathered": sdpa}, rounds=20, budget=8)
    yield from rows_of(named, timings, floor_s=floor, largest_difference=difference)


def verification(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Row]:
    """Chains by the rejection rule at temperature 1; ours draws with a seed, torch from its own generator."""
    requests, drafts, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    target = torch.randn(requests, drafts + 1, vocab, dtype=dtype, device=device, generator=generator) * 2
    draft = target[:, :drafts] + torch.randn(target[:, :drafts].shape, device=device, generator=generator).to(dtype)
    ids = torch.multinomial(draft.float().softmax(-1).flatten(0, 1), 1, generator=generator).view(requests, drafts)
    uniforms = torch.rand(requests, drafts, device=device, generator=generator)
    counts = torch.full((requests,), drafts, dtype=torch.int32, device=device)
    nodes = drafts + 1
    tree = sk.chain_tree(counts, counts + 100, total_nodes=requests * nodes, max_nodes=nodes)
    tokens = F.pad(ids, (1, 0)).flatten().int()
    sampling = sk.Sampling.of(requests, temperature=1.0, seed=list(range(requests)), position=0, device=device)
    flat, drawn = target.flatten(0, 1), draft.flatten(0, 1)

    def ours() -> Any:
        return sk.verify(flat, tokens, tree, sampling, method="rejection", draft_logits=drawn, uniforms=coins)

    coins = F.pad(uniforms, (1, 0)).flatten()
    providers: dict[str, Callable[[], Any]] = {
        "ours": ours, "torch": lambda: sampling_peers.torch_straight(target, draft, ids, uniforms)
    }  # fmt: skip
    same = float((ours().num_emitted == providers["torch"]()[0]).float().mean())
    assert same > 0.9, f"verify {shape}: only {same:.2f} of the requests accept as many as in torch"
    named = {"family": "verify", "B": requests, "drafts": drafts, "vocab": vocab, "dtype": str(dtype)}
    model = predict(requests, nodes, vocab, drawn=True, element=target.element_size())
    timings = interleave(providers, rounds=20, budget=6)
    yield from rows_of(named, timings, same_counts=same, form=model.form, predicted_s=model.seconds,
                       predicted_bytes=model.bytes, floor_s=model.floor_seconds)  # fmt: skip
