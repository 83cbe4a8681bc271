"""Tree attention on the CPU against what else can be called: `python -m benchmarks.bench_attention [--quick]`.

Sections: grid (B x context x nodes; nodes 1 is our own decode yardstick), mask (tree mask against causal chain),
ragged_nodes (counts U[1, 26]), ragged_contexts (256..8192, against a loop over sequences), prefix (8 samples of
one prompt: two calls and a merge against one). Floors (a KV read, the matrix products, the exponentials) beside them.

vLLM's CPU attention joins where it can be imported: run with the interpreter of `make venv-vllm`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sk
from benchmarks import attention_workload as workloads
from benchmarks import machine
from benchmarks.attention_workload import Workload
from benchmarks.harness import Bench, add_options

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


def peak_flops(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of torch's square matrix product: the best of 5."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def exp_rate(count: int = 1 << 20) -> float:
    x = torch.randn(count)
    best = float("inf")
    for _ in range(9):
        start = time.perf_counter()
        x.exp()
        best = min(best, time.perf_counter() - start)
    return count / best


def floors(work: Workload, flops: float, exponentials: float) -> dict[str, float]:
    """Seconds: one read of the KV at this machine's bandwidth, the matrix products at torch's best rate, the exps."""
    read = work.kv_bytes / (machine.read_bandwidth() * 1e9)
    scores = work.flops / (4 * work.head_dim)
    return {"read_s": read, "gemm_s": work.flops / flops, "exp_s": scores / exponentials}


def fits(contexts: list[int], dtype: torch.dtype) -> bool:
    """A pool must leave half of the free memory alone."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    return sum(contexts) * 2 * 8 * 128 * dtype.itemsize + workloads.COLD_BYTES < free / 2


def providers_of(work: Workload, wanted: set[str]) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {"ours": lambda: work.ours()}
    if "torch" in wanted:
        found["torch"] = workloads.strong_torch(work)
    if "flex" in wanted:
        found["flex"] = workloads.flex_attention(work)
    if "vllm" in wanted:
        from benchmarks.attention_vllm import vllm_attention

        found["vllm_causal"] = vllm_attention(work)
    return found


def grid(bench: Bench, options: argparse.Namespace, dtype: str) -> None:
    flops, exponentials = peak_flops(DTYPES[dtype]), exp_rate()
    for batch, context in itertools.product(options.batch, options.context):
        if not fits([context] * batch, DTYPES[dtype]):
            print(f"{dtype} B={batch} context={context}: skipped, the cache does not fit into memory")
            continue
        for nodes in options.nodes:
            work = Workload([context] * batch, [nodes] * batch, DTYPES[dtype])
            shape = {"section": "grid", "dtype": dtype, "B": batch, "context": context, "nodes": nodes}
            floor = floors(work, flops, exponentials)
            shape |= {name: round(seconds, 6) for name, seconds in floor.items()}
            providers = providers_of(work, set(options.providers))
            base = "torch" if "torch" in providers else None
            rows = bench.compare(shape, providers, work.gate, work.kv_bytes, base)
            bound = max(floor["read_s"], floor["gemm_s"] + floor["exp_s"])
            print(f"    floor {bound * 1e3:.3f} ms, ours {rows[0]['median_s'] / bound:.2f} times it")


def mask(bench: Bench, options: argparse.Namespace, dtype: str) -> None:
    for context, nodes in ((1024, 26), (8192, 8), (8192, 26)):
        context //= options.shrink
        work = Workload([context], [nodes], DTYPES[dtype])
        shape = {"section": "mask", "dtype": dtype, "B": 1, "context": context, "nodes": nodes}
        pair = {"causal": partial(work.ours, tree=False), "tree": work.ours}
        bench.compare(shape, pair, lambda work=work: work.gate() and work.gate(causal=True), work.kv_bytes)


def ragged_nodes(bench: Bench, options: argparse.Namespace, dtype: str) -> None:
    rng, context = random.Random(0), 4096 // options.shrink
    nodes = [rng.randint(1, 26) for _ in range(8)]
    work, uniform = (Workload([context] * 8, n, DTYPES[dtype]) for n in (nodes, [26] * 8))
    shape = {"section": "ragged_nodes", "dtype": dtype, "B": 8, "context": context, "nodes": "U[1,26]"}
    shape |= {"query_share": sum(nodes) / (26 * 8), "kv_share": work.kv_bytes / uniform.kv_bytes}
    bench.compare(
        shape, {"uniform26": uniform.ours, "ragged": work.ours}, lambda: all(w.gate() for w in (work, uniform))
    )


def ragged_contexts(bench: Bench, options: argparse.Namespace, dtype: str) -> None:
    contexts = [c // options.shrink for c in (256, 512, 1024, 1536, 2048, 4096, 6144, 8192)]
    work = Workload(contexts, [26] * 8, DTYPES[dtype])
    loops = [workloads.strong_torch(work, range(b, b + 1)) for b in range(8)]
    shape = {
        "section": "ragged_contexts",
        "dtype": dtype,
        "B": 8,
        "context": f"{contexts[0]}..{contexts[-1]}",
        "nodes": 26,
    }
    pair = {"torch_loop": lambda: [call() for call in loops], "ours": work.ours}
    bench.compare(shape, pair, work.gate, work.kv_bytes)


def prefix(bench: Bench, options: argparse.Namespace, dtype: str) -> None:
    """8 samples of one prompt: all queries as one request over the shared pages, each over its own, one merge.

    One node a sample is bound by reading, which is done once instead of 8 times; 8 nodes by arithmetic (on a CPU).
    """
    samples, shared, own = 8, 8192 // options.shrink, 64
    for nodes in (1, 8):
        work = Workload([shared + own] * samples, [nodes] * samples, DTYPES[dtype])
        pages, rows = shared // work.page_size, samples * nodes
        table = work.tables[0].clone()
        table[:, :pages] = table[0, :pages]
        common, rest = table[:1, :pages].contiguous(), table[:, pages:].contiguous()
        common_len, all_rows = torch.tensor([shared], dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32)
        no_slots = torch.zeros(rows, -(-rows // 32), dtype=torch.int32)
        own_lens = torch.full((samples,), own, dtype=torch.int32)
        call = partial(sk.tree_attention, work.q, work.k_cache, work.v_cache, return_lse=True)
        over_prefix = partial(call, common, common_len, all_rows, no_slots, max_nodes=rows)
        over_own = partial(call, rest, own_lens, work.cu_nodes, work.tree_mask, max_nodes=nodes)

        def shared_prefix(a: Any = over_prefix, b: Any = over_own) -> torch.Tensor:
            return sk.merge_attention(*a(), *b()).out

        def gate(nodes: int = nodes, work: Workload = work, table: Any = table, ours: Any = shared_prefix) -> bool:
            exact = work.exact(0, table)
            return all((out[:nodes].double() - exact).abs().max() < 1e-2 for out in (ours(), work.ours(table=table)))

        shape = {"section": "prefix", "dtype": dtype, "samples": samples, "shared": shared, "own": own, "nodes": nodes}
        one_call = partial(work.ours, table=table)
        providers = {"one_call": one_call, "shared_prefix": shared_prefix, "prefix_alone": over_prefix}
        bench.compare(shape, providers, gate)


SECTIONS = {
    "grid": grid, "mask": mask, "ragged_nodes": ragged_nodes, "ragged_contexts": ragged_contexts, "prefix": prefix,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--providers", nargs="*", choices=["torch", "flex", "vllm"], default=["torch"])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=["bf16", "f32"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--context", nargs="*", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 8, 26, 64])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(argv)
    options.shrink = 1  # of the fixed contexts
    if options.quick:
        options.dtypes, options.batch, options.context, options.nodes = ["bf16"], [1], [1024], [1, 26]
        options.rounds, options.shrink, workloads.COLD_BYTES = 5, 8, 16 << 20  # in a warm cache, then
    torch.manual_seed(0)
    bench = Bench("attention", options.out, rounds=options.rounds, resume=options.resume)
    for name, dtype in itertools.product(options.sections, options.dtypes):
        SECTIONS[name](bench, options, dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
