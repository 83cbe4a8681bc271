"""The batching room on this machine: `python -m benchmarks.bench_batching [--quick] [--out FILE]`.

plan_buckets against sort and cumsum; pack_rows and unpack_rows against boolean indexing and index_put, with bytes.
"""

from __future__ import annotations

import argparse
import sys

import torch

import specdec_kernels as sk
from benchmarks.harness import Bench, add_options


def bench_plan(bench: Bench, requests: int) -> None:
    sizes = [8, 16, 32, 64]
    nodes = torch.randint(1, 65, (requests,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    bounds = torch.tensor(sizes, dtype=torch.int32)

    def by_torch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bucket = torch.bucketize(nodes, bounds)
        order = bucket.argsort(stable=True)
        offsets = torch.searchsorted(bucket[order], torch.arange(len(sizes) + 1))
        return order, offsets, nodes.cumsum(0)

    def right() -> bool:
        plan, (order, offsets, ends) = sk.plan_buckets(nodes, sizes), by_torch()
        same = torch.equal(plan.order.long(), order) and torch.equal(plan.bucket_offsets.long(), offsets)
        return same and torch.equal(plan.cu_nodes[1:].long(), ends)

    providers = {"torch": by_torch, "sk.plan_buckets": lambda: sk.plan_buckets(nodes, sizes)}
    bench.compare({"op": "plan_buckets", "B": requests, "K": len(sizes)}, providers, right)


def bench_rows(bench: Bench, requests: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(8, 65, (requests,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    total = int(cu[-1])
    x = torch.randn(requests, 64, hidden).bfloat16()
    kept = torch.arange(64) < counts[:, None]
    packed = x[kept]

    def unpack_torch() -> torch.Tensor:
        out = torch.zeros_like(x)
        out[kept] = packed
        return out

    moved = 2 * packed.numel() * 2
    shape = {"B": requests, "rows": total, "H": hidden}

    def pack() -> torch.Tensor:
        return sk.pack_rows(x, cu, total=total)

    def unpack() -> torch.Tensor:
        return sk.unpack_rows(packed, cu, max_rows=64)

    providers = {"torch": lambda: x[kept], "sk.pack_rows": pack}
    bench.compare({"op": "pack_rows", **shape}, providers, lambda: torch.equal(pack(), packed), moved)
    providers = {"torch": unpack_torch, "sk.unpack_rows": unpack}
    bench.compare({"op": "unpack_rows", **shape}, providers, lambda: torch.equal(unpack(), unpack_torch()), moved)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_batching")
    add_options(parser)
    options = parser.parse_args(argv)
    bench = Bench("batching", options.out, rounds=8 if options.quick else 40, resume=options.resume)
    for requests in [64] if options.quick else [1, 64, 512]:
        bench_plan(bench, requests)
    for requests, hidden in [(8, 1024)] if options.quick else [(1, 4096), (8, 4096), (64, 4096)]:
        bench_rows(bench, requests, hidden)
    return 0


if __name__ == "__main__":
    sys.exit(main())
