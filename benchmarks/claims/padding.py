"""Claim: slots are used to 95 % by chains, 71 % by trees, 85 % with look-ahead grouping; padding is 25 % at width 64.

The claim mixes two things: padding (slots that hold no node) and rejection (nodes whose token is thrown away). Here
they are apart, for three ways of executing the same batches: padded (every request to the batch's largest tree),
bucketed (to its size class: what grouping by predicted size gives) and ragged (packed, padding inside a tile only).

Trace: EAGLE-2 trees grown by this package (8 beams, 8 children, depth 6) from draft laws of random sharpness. Each
request keeps the nodes whose path probability exceeds 2 %, at most 64: sizes vary as a size predictor would make them.
A second trace keeps 60 nodes of every request, as EAGLE-2 itself does. Verification accepts a child with its draft
probability times .9 (a calibrated drafter, slightly wrong). Nothing is timed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

import specdec_kernels as sk
from benchmarks.claims.common import Claim

WIDTH, DEPTH, MAX_NODES, THRESHOLD, CALIBRATION = 8, 6, 64, 0.02, 0.9
BUCKETS = (8, 16, 32, 48, 64)
GROUP, TILE = 4, 16


class Trace(NamedTuple):
    """Per request: nodes of its tree (root included) and tokens its step emitted (bonus included)."""

    nodes: torch.Tensor
    emitted: list[int]


def grow(requests: int, generator: torch.Generator) -> sk.Candidates:
    """All candidates of `requests` trees; each request's draft laws have a sharpness of their own."""
    sharpness = torch.empty(requests, 1, 1).uniform_(0.6, 4.0, generator=generator)
    scores, levels = torch.zeros(requests, 1), []
    for _ in range(DEPTH):
        logits = sharpness * torch.randn(requests, scores.shape[1], 256, generator=generator)
        levels.append(sk.expand_tree(scores, logits.log_softmax(-1).topk(WIDTH).values, WIDTH))
        scores = levels[-1].beam_scores
    return sk.collect_candidates(levels)


def accepted(first: list[int], following: list[int], edge: list[float], rng: random.Random) -> int:
    """Tokens of one step: the walk down one tree, plus the bonus or recovered token."""
    node, emitted = 0, 1
    while True:
        coin, child = rng.random(), first[node]
        while child >= 0 and coin >= CALIBRATION * edge[child]:
            coin -= CALIBRATION * edge[child]
            child = following[child]
        if child < 0:
            return emitted
        node, emitted = child, emitted + 1


def trace(requests: int, fixed: int | None, seed: int) -> Trace:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    lined = grow(requests, generator)
    rows = lined.scores.view(requests, -1)
    wanted = (rows[:, 1:].exp() > THRESHOLD).sum(1).clamp(max=MAX_NODES - 1).int() + 1
    if fixed is not None:
        wanted = torch.full_like(wanted, fixed)
    kept = sk.rerank_tree(*lined[:3], wanted, total_nodes=requests * MAX_NODES)
    tree = sk.build_tree(kept.parents, kept.cu_nodes, torch.zeros(requests, dtype=torch.int32), max_nodes=MAX_NODES)
    score, cu = kept.take(rows, 0.0).tolist(), kept.cu_nodes.tolist()
    parents, first, following = (t.tolist() for t in (tree.parents, tree.first_child, tree.next_sibling))
    emitted = []
    for begin, end in zip(cu, cu[1:]):  # noqa: RUF007
        own = score[begin:end]
        edge = [1.0] + [
            float(torch.tensor(own[i] - (own[p] if p else 0.0)).exp())
            for i, p in enumerate(parents[begin + 1 : end], 1)
        ]
        emitted.append(accepted(first[begin:end], following[begin:end], edge, rng))
    return Trace(kept.cu_nodes[1:] - kept.cu_nodes[:-1], emitted)


def execute(found: Trace, batch: int, batches: int, seed: int) -> dict[str, float]:
    """Sums over `batches` random batches: nodes, tokens, slots of each way of executing, tile rows."""
    rng = random.Random(seed)
    sums = dict.fromkeys(("nodes", "tokens", "padded", "bucketed", "ragged", "useful_rows", "rows_16", "rows_64"), 0.0)
    for _ in range(batches):
        members = [rng.randrange(len(found.emitted)) for _ in range(batch)]
        nodes = found.nodes[members]
        plan = sk.plan_buckets(nodes, BUCKETS)
        stats = sk.padding_stats(plan, tile_rows=TILE, group_size=GROUP)
        total = int(stats.nodes.sum())
        sums["nodes"] += total
        sums["tokens"] += sum(found.emitted[b] for b in members)
        sums["padded"] += batch * int(nodes.max())
        sums["bucketed"] += int(stats.bucketed.sum())
        sums["ragged"] += total
        sums["useful_rows"] += int(stats.useful_rows.sum())
        sums["rows_16"] += int(stats.tile_rows.sum())
        sums["rows_64"] += int(sk.padding_stats(plan, tile_rows=64, group_size=GROUP).tile_rows.sum())
    return sums


def tile_padding(low: int, high: int, tile: int) -> tuple[float, int]:
    """(mean padded share of rows, most padded rows) over node counts low..high at group size 4."""
    nodes = torch.arange(low, high + 1, dtype=torch.int32)
    shares, worst = [], 0
    for count in nodes:
        stats = sk.padding_stats(sk.plan_buckets(count[None], [1024]), tile_rows=tile, group_size=GROUP)
        waste = int(stats.tile_rows) - int(stats.useful_rows)
        shares.append(waste / int(stats.tile_rows))
        worst = max(worst, waste)
    return sum(shares) / len(shares), worst


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("padding", __doc__, argv)
    requests, batches = (256, 20) if claim.quick else (4096, 200)
    traces = {
        "EAGLE-2, size by probability": trace(requests, None, 0),
        "EAGLE-2, 60 nodes each": trace(requests, 60, 1),
    }
    sizes = [1, 4, 16, 64] if claim.quick else [1, 2, 4, 8, 16, 32, 64]
    figures: dict[str, object] = {}
    curves: dict[str, list[float]] = {}
    for name, found in traces.items():
        rows = []
        for batch in sizes:
            sums = execute(found, batch, batches, batch)
            used = {way: sums["nodes"] / sums[way] for way in ("padded", "bucketed", "ragged")}
            useful = {way: sums["tokens"] / sums[way] for way in ("padded", "bucketed", "ragged")}
            tiles = [sums["useful_rows"] / sums[key] for key in ("rows_16", "rows_64")]
            rows.append([batch, sums["nodes"] / batches / batch, *used.values(), *useful.values(), *tiles])
            for way, value in used.items():
                curves.setdefault(f"{way}: {name}", []).append(value)
        columns = [
            "batch",
            "nodes",
            "padded",
            "bucketed",
            "ragged",
            "useful p.",
            "useful b.",
            "useful r.",
            "tile 16",
            "tile 64",
        ]
        claim.table(
            f"{name}: slot utilisation, useful-token ratio, filled share of tile rows (group size 4)", columns, rows
        )
        figures[name] = {row[0]: dict(zip(columns[1:], row[1:])) for row in rows}
    padding = {tile: tile_padding(26, 64, tile) for tile in (16, 64, 128)}
    rows = [[tile, mean, worst] for tile, (mean, worst) in padding.items()]
    claim.table(
        "rows padded inside tiles, 26 to 64 nodes, group size 4", ["tile rows", "mean share", "most rows"], rows
    )
    with claim.plot("Node slots that hold a node", "batch size", "slot utilisation") as axes:
        for name, values in curves.items():
            axes.plot(sizes, values, marker="o", ms=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05)
    last, equal = (figures[name][sizes[-1]] for name in traces)  # type: ignore[index]
    return claim.conclude(
        says=".95 for chains, .71 for trees, .85 with look-ahead grouping; 25 % padding at width 64",
        so=f"at batch {sizes[-1]} with sizes that vary: {last['padded']:.2f} padded, {last['bucketed']:.2f} bucketed, "
        f"ragged 1 by construction (tiles of 16 rows: {last['tile 16']:.3f}); equal trees {equal['padded']:.2f}; what "
        f"remains is rejection: {last['useful r.']:.3f} tokens a node slot",
        figures=figures | {"tile_padding": {tile: {"mean": m, "most_rows": w} for tile, (m, w) in padding.items()}},
    )


if __name__ == "__main__":
    sys.exit(main())
