"""The tree room on this machine: `python -m benchmarks.bench_tree [--quick] [--out FILE]`.

build_tree against fill_ on its own preallocated outputs (the least that writing them costs), the public function, and
plain tensor arithmetic; expand_tree and rerank_tree against torch.topk building the same tree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

import specdec_kernels as sk
from benchmarks.harness import Bench, add_options
from python_ref import dynamic_tree, tree


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_parents(count: int, generator: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(max(0, i - 12), i, (), generator=generator)) for i in range(1, count)]


def torch_build(parents: torch.Tensor, lens: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and depths of equal-sized trees with tensor operations: ancestors by repeated gather. parents [B, N]."""
    requests, nodes = parents.shape
    above = parents.clamp(min=0).long()
    mask = torch.eye(nodes, dtype=torch.bool).expand(requests, nodes, nodes).clone()
    node = torch.arange(nodes).expand(requests, nodes)
    for _ in range(max_depth):
        node = above.gather(1, node)
        mask.scatter_(2, node[..., None], True)
    return mask, lens[:, None] + mask.sum(-1) - 1


def bench_build(bench: Bench, requests: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [random_parents(nodes, generator) for _ in range(requests)]
    parents, cu = ints(trees).view(-1), ints([b * nodes for b in range(requests + 1)])
    lens = torch.randint(0, 4096, (requests,), generator=generator, dtype=torch.int32)
    built = sk.build_tree(parents, cu, lens, max_nodes=nodes)
    names = ("parents", "tree_mask", "depths", "positions", "first_child", "next_sibling", "flags")
    out = [torch.empty_like(getattr(built, name)) for name in names]
    max_depth = int(built.depths.max())

    def ours() -> None:
        torch.ops.specdec.build_tree.default(parents, cu, lens, nodes, nodes - 1, *out)

    def fill() -> None:
        for tensor in out:
            tensor.fill_(0)

    def right() -> bool:
        ours()
        want = tree.build_tree(parents.tolist(), cu.tolist(), lens.tolist(), nodes, nodes - 1)
        mask, positions = torch_build(parents.view(requests, nodes), lens, max_depth)
        rows = [tree.pack_words(row, out[1].shape[1]) for row in want.mask]
        return (
            out[1].tolist() == rows
            and all(out[i].tolist() == getattr(want, name) for i, name in enumerate(names) if i != 1)
            and torch.equal(sk.unpack_mask(out[1], nodes).view_as(mask), mask)
            and torch.equal(out[3].view_as(positions), positions.int())
        )

    providers: dict[str, Callable[[], Any]] = {"fill_": fill, "build_tree": ours}
    providers["sk.build_tree"] = lambda: sk.build_tree(parents, cu, lens, max_nodes=nodes)
    providers["torch"] = lambda: torch_build(parents.view(requests, nodes), lens, max_depth)
    bytes_moved = sum(t.numel() * 4 for t in out) + parents.numel() * 4
    bench.compare({"op": "build_tree", "B": requests, "N": nodes}, providers, right, bytes_moved, base="fill_")


def bench_dynamic(bench: Bench, requests: int, width: int, depth: int, nodes: int) -> None:
    """One EAGLE-2 tree: `depth` levels of `width` beams with `width` children, then the best `nodes`."""
    generator = torch.Generator().manual_seed(1)
    steps = [
        torch.randn(requests, 1 if d == 0 else width, 4 * width, generator=generator).log_softmax(-1).topk(width).values
        for d in range(depth)
    ]
    wanted = torch.full((requests,), nodes, dtype=torch.int32)

    def levels() -> list[Any]:
        scores, out = torch.zeros(requests, 1), []
        for step in steps:
            out.append(sk.expand_tree(scores, step, width))
            scores = out[-1].beam_scores
        return out

    lined = sk.collect_candidates(levels())

    def rerank() -> Any:
        return sk.rerank_tree(*lined[:3], wanted, total_nodes=requests * nodes)

    def torch_levels() -> list[torch.Tensor]:
        scores, out = torch.zeros(requests, 1), []
        for step in steps:
            out.append((scores[..., None] + step).flatten(1))
            scores = out[-1].topk(width).values
        return out

    def torch_rerank() -> torch.Tensor:
        """Top-k of all candidates, sorted by index; parents by searching the kept indices."""
        kept = lined.scores.view(requests, -1)[:, 1:].topk(nodes - 1).indices.sort(1).values + 1
        kept = torch.cat([torch.zeros(requests, 1, dtype=torch.int64), kept], 1)
        above = lined.parents.view(requests, -1).long().gather(1, kept)
        return torch.searchsorted(kept, above)

    def right() -> bool:
        got = rerank()
        for b in (0, requests - 1):
            part = slice(b * lined.per_request, (b + 1) * lined.per_request)
            want = dynamic_tree.rerank_tree(lined.scores[part].tolist(), lined.parents[part].tolist(), nodes)
            rows = slice(b * nodes, (b + 1) * nodes)
            if (got.selected[rows].tolist(), got.parents[rows].tolist()) != want:
                return False
        return torch.equal(got.parents.view(requests, nodes)[:, 1:].long(), torch_rerank()[:, 1:])

    shape = {"B": requests, "width": width, "depth": depth, "N": nodes, "candidates": lined.per_request}
    bench.compare(
        {"op": "rerank_tree", **shape}, {"sk.rerank_tree": rerank, "torch": torch_rerank}, right, base="torch"
    )

    def same() -> bool:
        return all(torch.equal(a.child_scores, b) for a, b in zip(levels(), torch_levels()))

    providers = {"sk.expand_tree": levels, "torch": torch_levels}
    bench.compare({"op": "expand_tree", **shape}, providers, same, base="torch")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_tree")
    add_options(parser)
    options = parser.parse_args(argv)
    bench = Bench("tree", options.out, rounds=8 if options.quick else 40, resume=options.resume)
    for requests, nodes in [(64, 64)] if options.quick else [(1, 26), (1, 64), (8, 64), (64, 26), (64, 64), (64, 256)]:
        bench_build(bench, requests, nodes)
    for requests in [8] if options.quick else [1, 8, 64]:
        bench_dynamic(bench, requests, 8, 6, 60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
