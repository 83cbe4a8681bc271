"""Attention and verification on one device against what a bare torch has: rows for benchmarks/on_gpu.py.

Attention: our paged `tree_attention` against torch's scaled_dot_product_attention on keys and values that were gathered
beforehand (the peer pays no gathering), against itself with a chain in the place of the tree, and against one read of
the keys and values at the device's copy bandwidth. On a GPU calls are replayed from a graph, and go through so many
copies of keys and values that no last level of caches holds them.
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

# (requests, context, nodes): seconds on an H200 that would equal the best published figures for plain decoding or tree
# kernels there (docs/attention.md); None: no such figure.
ATTENTION: dict[tuple[int, int, int], float | None] = {
    (1, 1024, 8): 11e-6, (1, 1024, 26): 11e-6, (1, 32768, 26): 46e-6, (8, 8192, 8): 85e-6, (8, 8192, 26): 85e-6,
    (8, 32768, 26): 310e-6, (64, 8192, 26): 640e-6, (64, 8192, 64): 1400e-6, (1, 8192, 26): None, (8, 2048, 26): None,
    (8, 8192, 64): None, (64, 2048, 26): None,
}  # fmt: skip
COLD_BYTES = 128 << 20  # more than any device's last level of caches
# requests, drafts each, vocabulary
VERIFY = ((1, 5, 128256), (8, 5, 128256), (64, 5, 32000), (8, 7, 151936), (64, 7, 128256))
Row = dict[str, Any]


def copy_bandwidth(device: str, megabytes: int = 1024) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = interleave({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return source.numel() * 4 * 2 / timing.median


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def rows_of(shape: Row, timings: dict[str, Timing], calls: int = 1, **more: Any) -> Iterator[Row]:
    """`calls`: of a provider in one timed run."""
    base = next(iter(timings.values())).median
    for name, timing in timings.items():
        spread = {f"p{int(q * 100)}_s": timing.quantile(q) / calls for q in (0.1, 0.9)}
        yield {**shape, "provider": name, "median_s": timing.median / calls, **spread,
               "ours_over_own": base / timing.median, "samples": len(timing.samples), **more}  # fmt: skip


def attention(device: str, shape: tuple[int, int, int], dtype: torch.dtype, bandwidth: float) -> Iterator[Row]:
    """32 query heads, 8 KV heads of 128, pages of 16, a random tree a request."""
    requests, context, nodes = shape
    heads, kv_heads, dim, page = 32, 8, 128, 16
    length = context + nodes
    pages = -(-length // page)
    size = 2 * requests * length * kv_heads * dim * dtype.itemsize
    turns = max(1, min(40, -(-COLD_BYTES // size))) if device == "cuda" else 1
    generator = torch.Generator(device).manual_seed(0)
    caches = [
        torch.randn(turns * requests * pages, page, kv_heads, dim, dtype=dtype, device=device, generator=generator)
        for _ in range(2)
    ]
    order = torch.randperm(turns * requests * pages, generator=torch.Generator().manual_seed(0))
    tables = order.view(turns, requests, pages).int().to(device)
    parents = [-1] + [(i - 1) // 2 for i in range(1, nodes)]
    cu = (torch.arange(requests + 1) * nodes).int().to(device)
    lens = torch.full((requests,), context, dtype=torch.int32, device=device)
    whole = torch.tensor(parents * requests, dtype=torch.int32, device="cpu")
    mask = sk.build_tree(whole, cu.cpu(), lens.cpu(), max_nodes=nodes).tree_mask.to(device)
    q = torch.randn(requests * nodes, heads, dim, dtype=dtype, device=device, generator=generator)

    bounds = dict(batch=requests, max_nodes=nodes, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_dim=dim)
    workspace = torch.zeros(sk.workspace_size("tree_attention", **bounds), dtype=torch.uint8, device=device)

    def ours(turn: int, tree: torch.Tensor | None = mask) -> torch.Tensor:
        out = sk.tree_attention(q, *caches, tables[turn], lens, cu, tree, max_nodes=nodes, workspace=workspace)
        assert isinstance(out, torch.Tensor)
        return out

    gathered = [
        [
            cache[table.long()].view(requests, -1, kv_heads, dim)[:, :length].transpose(1, 2).contiguous()
            for cache in caches
        ]
        for table in tables
    ]
    bits = mask[:nodes].long()[:, :, None] >> torch.arange(32, device=device) & 1
    seen = torch.ones(nodes, length, dtype=torch.bool, device=device)
    seen[:, context:] = bits.view(nodes, -1)[:, :nodes].bool()
    dense = q.view(requests, nodes, heads, dim).transpose(1, 2).contiguous()

    def sdpa(turn: int) -> torch.Tensor:
        out = F.scaled_dot_product_attention(dense, *gathered[turn], attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).reshape(requests * nodes, heads, dim)

    def each_turn(call: Callable[[int], Any]) -> Callable[[], Any]:
        def run() -> None:
            for turn in range(turns):
                call(turn)

        return graphed(run) if device == "cuda" else run

    difference = float((ours(0).float() - sdpa(0).float()).abs().max())
    assert difference < 3e-2, f"attention {shape}: differs from torch by {difference}"
    named = {"family": "attention", "B": requests, "context": context, "nodes": nodes, "dtype": str(dtype)}
    providers = {"ours": ours, "ours, a chain": lambda turn: ours(turn, None), "torch sdpa, gathered": sdpa}
    timings = interleave({name: each_turn(call) for name, call in providers.items()}, rounds=20, budget=8)
    more = {"floor_s": size / bandwidth, "parity_s": ATTENTION.get(shape), "largest_difference": difference}
    yield from rows_of(named, timings, turns, **more)


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
