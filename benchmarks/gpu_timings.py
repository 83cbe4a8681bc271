"""Attention and verification on one device against what a bare torch has: rows for benchmarks/on_gpu.py.

Attention: our paged `tree_attention` against torch's scaled_dot_product_attention on keys and values that were gathered
beforehand (the peer pays no gathering), against itself with a chain in the place of the tree, and against one read of
the keys and values at the device's copy bandwidth. On a GPU calls are replayed from a graph, and go through so many
copies of keys and values that no last level of caches holds them.
On Hopper: its kernel on pages of 64 keys (tiles by tensor maps), on the same memory as pages of 16 (gathered), and the
mma.sync kernel in row tiles of 64, which it takes the place of from 65 packed rows on.
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
# Where the Hopper kernel serves (65 packed rows and more), what is predicted of it in docs/attention.md.
HOPPER = ((8, 8192, 26), (8, 32768, 64), (8, 8192, 64), (1, 1024, 26), (1, 32768, 26), (64, 1024, 64))
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


HEADS, KV_HEADS, DIM = 32, 8, 128


class Paged:
    """One call: 32 query heads, 8 KV heads of 128, shuffled pages, a binary tree a request; keys in `turns` copies."""

    def __init__(self, device: str, shape: tuple[int, int, int], dtype: torch.dtype, page: int):
        requests, context, self.nodes = shape
        self.page, self.length = page, context + self.nodes
        pages = -(-self.length // page)
        self.size = 2 * requests * self.length * KV_HEADS * DIM * dtype.itemsize
        self.turns = max(1, min(40, -(-COLD_BYTES // self.size))) if device == "cuda" else 1
        generator = torch.Generator(device).manual_seed(0)
        count = self.turns * requests * pages
        made = dict(dtype=dtype, device=device, generator=generator)
        self.caches = [torch.randn(count, page, KV_HEADS, DIM, **made) for _ in range(2)]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(self.turns, requests, pages).int().to(device)
        parts = torch.arange(page // 16, dtype=torch.int32, device=device)
        self.small_tables = (self.tables[..., None] * len(parts) + parts).flatten(2)
        parents = [-1] + [(i - 1) // 2 for i in range(1, self.nodes)]
        self.cu = (torch.arange(requests + 1) * self.nodes).int().to(device)
        self.lens = torch.full((requests,), context, dtype=torch.int32, device=device)
        whole = torch.tensor(parents * requests, dtype=torch.int32, device="cpu")
        tree = sk.build_tree(whole, self.cu.cpu(), self.lens.cpu(), max_nodes=self.nodes)
        self.mask = tree.tree_mask.to(device)
        self.q = torch.randn(requests * self.nodes, HEADS, DIM, **made)
        bounds = dict(batch=requests, max_nodes=self.nodes, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
        self.workspace = torch.zeros(
            sk.workspace_size("tree_attention", **bounds, v_dim=DIM), dtype=torch.uint8, device=device
        )

    def run(self, turn: int, mask: torch.Tensor | None, small: bool = False, **options: Any) -> torch.Tensor:
        """The call. `small`: its pages, and those of the same memory, are of 16 keys."""
        caches, table = self.caches, self.tables[turn]
        if small:
            caches, table = [cache.view(-1, 16, KV_HEADS, DIM) for cache in caches], self.small_tables[turn]
        arguments = {"max_nodes": self.nodes, "workspace": self.workspace, **options}
        out = sk.tree_attention(self.q, *caches, table, self.lens, self.cu, mask, **arguments)
        assert isinstance(out, torch.Tensor)
        return out


def each_turn(call: Callable[[int], Any], device: str, turns: int) -> Callable[[], Any]:
    """One run: the call on each copy of the keys in turn, from a graph on a GPU."""

    def run() -> None:
        for turn in range(turns):
            call(turn)

    return graphed(run) if device == "cuda" else run


def attention(device: str, shape: tuple[int, int, int], dtype: torch.dtype, bandwidth: float) -> Iterator[Row]:
    """32 query heads, 8 KV heads of 128, pages of 16, the same binary tree for each request."""
    requests, context, nodes = shape
    paged = Paged(device, shape, dtype, page=16)
    q, caches, tables, mask, turns, length = paged.q, paged.caches, paged.tables, paged.mask, paged.turns, paged.length
    kv_heads, heads, dim = KV_HEADS, HEADS, DIM

    def ours(turn: int, tree: torch.Tensor | None = mask) -> torch.Tensor:
        return paged.run(turn, tree)

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

    difference = float((ours(0).float() - sdpa(0).float()).abs().max())
    assert difference < 3e-2, f"attention {shape}: differs from torch by {difference}"
    named = {"family": "attention", "B": requests, "context": context, "nodes": nodes, "dtype": str(dtype)}
    providers = {"ours": ours, "ours, a chain": lambda turn: ours(turn, None), "torch sdpa, gathered": sdpa}
    timings = interleave(
        {name: each_turn(call, device, turns) for name, call in providers.items()}, rounds=20, budget=8
    )
    more = {"floor_s": paged.size / bandwidth, "parity_s": ATTENTION.get(shape), "largest_difference": difference}
    yield from rows_of(named, timings, turns, **more)


def hopper(device: str, shape: tuple[int, int, int], dtype: torch.dtype, bandwidth: float) -> Iterator[Row]:
    """From 65 packed rows on: tiles by tensor maps, tiles gathered, and mma.sync."""
    requests, context, nodes = shape
    assert nodes * (HEADS // KV_HEADS) > 64, "smaller calls take the mma.sync kernel anyway"
    paged = Paged(device, shape, dtype, page=64)
    # Rows of 16 nodes in a tile, and longer requests in several of them: what `causal` allows, here false for all.
    no = torch.zeros(requests, dtype=torch.bool, device=device)
    providers: dict[str, Callable[[int], torch.Tensor]] = {
        "pages of 64 (TMA)": lambda turn: paged.run(turn, paged.mask),
        "pages of 16 (gather)": lambda turn: paged.run(turn, paged.mask, small=True),
        "mma.sync, row tiles of 64": lambda turn: paged.run(turn, paged.mask, True, causal=no, max_nodes=16),
    }
    results = {name: call(0) for name, call in providers.items()}
    mapped, gathered, plain = results.values()
    assert torch.equal(mapped, gathered), f"hopper {shape}: TMA and gather differ"
    difference = float((mapped.float() - plain.float()).abs().max())
    assert difference < 3e-2, f"hopper {shape}: differs from mma.sync by {difference}"
    named = {"family": "hopper", "B": requests, "context": context, "nodes": nodes, "dtype": str(dtype)}
    timings = interleave(
        {name: each_turn(call, device, paged.turns) for name, call in providers.items()}, rounds=20, budget=4
    )
    more = {"floor_s": paged.size / bandwidth, "largest_difference": difference}
    yield from rows_of(named, timings, paged.turns, **more)


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
