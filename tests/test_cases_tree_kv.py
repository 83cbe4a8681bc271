"""Cases from public bug reports: trees, KV commit, ragged batches (numbers as in the shared list of cases)."""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import pytest
import torch

from python_ref import tree as ref
from specdec_kernels import _ops
from specdec_kernels._handover import gather_accepted, prepare_next
from specdec_kernels.batching import plan_buckets
from specdec_kernels.kv import advance, commit_kv
from specdec_kernels.tree import build_tree, chain_tree, rerank_tree, static_tree


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Outcome(NamedTuple):
    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    accepted_nodes: torch.Tensor


# ---- TM-01: positions are depths, siblings share one


def test_TM_01_positions_are_depths(backend: Any):
    backend.require("build_tree")
    parents = ints([-1, 0, 0, 1, 1, 2, -1, 0, 0, 1, 3, 2], backend.device)
    tree = build_tree(
        parents, ints([0, 6, 12], backend.device), ints([7, 7], backend.device), max_nodes=6, **backend.kwargs
    )
    assert tree.positions.tolist() == [7, 8, 8, 9, 9, 9, 7, 8, 8, 9, 10, 9]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 0, 1, 1, 2, 3, 2]


def test_TM_01_a_child_is_one_behind_its_parent(backend: Any):
    backend.require("build_tree")
    rng = random.Random(1)
    for _ in range(20):
        parents = [-1] + [rng.randrange(i) for i in range(1, 60)]
        args = (ints(x, backend.device) for x in (parents, [0, 60], [rng.randrange(100)]))
        positions = build_tree(*args, max_nodes=60, **backend.kwargs).positions.tolist()
        assert all(positions[i] == positions[parents[i]] + 1 for i in range(1, 60))


# ---- TM-04: malformed trees end in an error, not in another request's row or an endless loop

MALFORMED = {
    "parent only in the other request": [-1, 0, 3, 1],
    "cycle": [1, 0],
    "self": [-1, 1],
    "parent index >= T": [-1, 0, 7],
    "parent after child": [2, 2, -1],
    "two roots": [-1, 0, -1],
    "no root": [0, 0, 1],
    "huge": [-1, 2**31 - 1],
    "negative": [-1, -(2**31)],
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("first", [True, False])
def test_TM_04_malformed_tree_is_reduced_and_flagged(backend: Any, name: str, first: bool):
    backend.require("build_tree")
    bad, good = MALFORMED[name], [-1, 0, 0, 1, 3, 2]
    requests = [bad, good] if first else [good, bad]
    cu = [0, len(requests[0]), len(bad) + len(good)]
    start = time.perf_counter()
    args = (ints(x, backend.device) for x in ([*requests[0], *requests[1]], cu, [5, 9]))
    tree = build_tree(*args, max_nodes=8, **backend.kwargs)
    assert time.perf_counter() - start < 1 or backend.name not in ("cpu", "cuda")
    at = 0 if first else 1
    want = [0, 0]
    want[at] = int(_ops.Flag.TREE)
    assert tree.flags.tolist() == want
    rows = slice(cu[at], cu[at + 1])
    assert tree.parents[rows].tolist() == [-1] * len(bad)
    assert tree.positions[rows].tolist() == [[5, 9][at]] + [0] * (len(bad) - 1)
    assert tree.tree_mask[rows].flatten().tolist() == [1] + [0] * (len(bad) - 1)
    assert tree.first_child[rows].tolist() == [-1] * len(bad)
    alone = build_tree(*(ints(x, backend.device) for x in (good, [0, 6], [[9, 5][at]])), max_nodes=8, **backend.kwargs)
    other = slice(cu[1 - at], cu[2 - at])
    for name in ("parents", "tree_mask", "depths", "positions", "first_child", "next_sibling"):
        assert torch.equal(getattr(tree, name)[other], getattr(alone, name)), name


def test_TM_04_a_tree_deeper_than_the_drafts_is_flagged(backend: Any):
    backend.require("build_tree")
    parents, cu = static_tree([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]).repeat(1)
    args = [t.to(backend.device) for t in (parents, cu, ints([4]))]
    assert build_tree(*args, max_nodes=5, max_depth=4, **backend.kwargs).flags.tolist() == [0]
    assert build_tree(*args, max_nodes=5, max_depth=3, **backend.kwargs).flags.tolist() == [_ops.Flag.TREE]


# ---- TM-05: EAGLE-2 re-ranking keeps the tree ancestor-closed, also with tied scores


def reranked(backend: Any, probabilities: list[float], parents: list[int], keep: int) -> tuple[list[int], list[int]]:
    backend.require("rerank_tree")
    scores = torch.tensor(probabilities, device=backend.device).log()
    cu, count = ints([0, len(parents)], backend.device), ints([keep + 1], backend.device)
    got = rerank_tree(scores, ints(parents, backend.device), cu, count, total_nodes=keep + 1, **backend.kwargs)
    size = got.cu_nodes.tolist()[1]
    return got.selected[:size].tolist(), got.parents[:size].tolist()


def test_TM_05_cumulative_scores_decide(backend: Any):
    """Root children A .6, B .3; A's .7, .2; B's .9, .05; keep 4: A, A1, B, B1 and not the locally likely ones."""
    probabilities, parents = [1, 0.6, 0.3, 0.42, 0.12, 0.27, 0.015], [-1, 0, 0, 1, 1, 2, 2]
    selected, links = reranked(backend, probabilities, parents, 4)
    assert selected == [0, 1, 2, 3, 5]
    assert links == [-1, 0, 0, 1, 2]
    assert reranked(backend, probabilities, parents, 10) == ([0, 1, 2, 3, 4, 5, 6], parents)  # only 6 exist


def test_TM_05_a_tie_goes_to_the_shallower(backend: Any):
    """A .5, B .5, C child of A with edge 1: keep 2 gives A and B, whatever the order of the candidates."""
    assert reranked(backend, [1, 0.5, 0.5, 0.5], [-1, 0, 0, 1], 2) == ([0, 1, 2], [-1, 0, 0])
    assert reranked(backend, [1, 0.5, 0.5, 0.5], [-1, 0, 1, 0], 2) == ([0, 1, 3], [-1, 0, 0])


# ---- KV-01: compacting a scattered accepted path, with overlapping moves across a page edge


def kv01_cache(pages: int, page: int, table: list[int], length: int, device: str) -> torch.Tensor:
    """[pages, page, 1, 1] with 100 + x at position x, and a canary elsewhere."""
    cache = torch.full((pages * page,), -7.0, device=device)
    for x in range(length):
        cache[table[x // page] * page + x % page] = 100 + x
    return cache.view(pages, page, 1, 1)


def test_KV_01_overlapping_moves_across_a_page_edge(backend: Any):
    backend.require("commit_kv")
    k = kv01_cache(10, 4, [5, 2, 9], 12, backend.device)
    v = k * 2
    before = k.clone().flatten()
    lens = ints([6], backend.device)
    args = [ints(x, backend.device) for x in ([[5, 2, 9]], [6], [0, 6], [[0, 2, 3, 4]], [4])]
    commit_kv(k, v, *args, page_size=4, **backend.kwargs)
    advance(lens, args[-1])
    assert lens.tolist() == [10]
    slots = [[5, 2, 9][x // 4] * 4 + x % 4 for x in range(10)]
    assert k.flatten()[slots].tolist() == [100, 101, 102, 103, 104, 105, 106, 108, 109, 110]
    assert torch.equal(v, k * 2)
    moved = {11, 36, 37}
    untouched = [s for s in range(40) if s not in moved]
    assert torch.equal(k.flatten()[untouched], before[untouched])


# ---- KV-02: accept-index width and bonus token for batch > 1 (index half)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_KV_02_each_request_reads_its_own_row(backend: Any, order: list[int]):
    """r0 accepts nodes 0, 1, 3 and emits [11, 13, 77], r1 emits [25]: permuting the batch permutes the result."""
    backend.require("gather_accepted")
    outcomes = {0: ([11, 13, 77], [0, 1, 3], 3), 1: ([25, -1, -1], [0, -1, -1], 1)}
    tokens, nodes, emitted = (ints([outcomes[r][i] for r in order], backend.device) for i in range(3))
    states = torch.cat([torch.arange(5) + 10 * (r + 1) for r in order]).float().view(10, 1).to(backend.device)
    verified = Outcome(tokens, emitted, nodes)
    lens = ints([[4, 20][r] for r in order], backend.device)
    table = ints([[[0, 1, 2], [5, 6, 7]][r] for r in order], backend.device)
    following = prepare_next(verified, lens, table, page_size=8, **backend.kwargs)
    rows = gather_accepted(states, ints([0, 5, 10], backend.device), nodes, emitted, **backend.kwargs)
    expect = {0: ([11, 13, 77], [10, 11, 13], [4, 5, 6], [4, 5, 6]), 1: ([25], [20], [20], [7 * 8 + 4])}
    for column, got in enumerate((following.token_ids, rows.rows.flatten(), following.positions, following.slots)):
        assert got[:4].tolist() == [x for r in order for x in expect[r][column]]
    assert following.root_token_ids.tolist() == [[77, 25][r] for r in order]
    assert following.token_ids[4:].tolist() == [-1, -1]
    k = torch.arange(64.0, device=backend.device).view(8, 8, 1, 1)
    commit_kv(
        k, k.clone(), table, lens, ints([0, 5, 10], backend.device), nodes, emitted, page_size=8, **backend.kwargs
    )
    assert [i for i, x in enumerate(k.flatten().tolist()) if i != x] == [6]  # r0: node 3 (slot 7) -> position 6


# ---- BT-05: different draft counts incl. zero, empty rows, and different lengths (plan half)


def test_BT_05_offsets_of_ragged_counts(backend: Any):
    backend.require("plan_buckets")
    backend.require("chain_tree")
    plan = plan_buckets(ints([4, 1, 2, 3], backend.device), [2, 4], **backend.kwargs)
    assert plan.cu_nodes.tolist() == [0, 4, 5, 7, 10]
    assert plan.order.tolist() == [1, 2, 0, 3]
    assert plan.bucket_offsets.tolist() == [0, 2, 4]
    empty = plan_buckets(ints([0, 2, 0, 3], backend.device), [4], **backend.kwargs)
    assert empty.cu_nodes.tolist() == [0, 0, 2, 2, 5]
    drafts, lens = ints([3, 0, 1, 2], backend.device), ints([9, 1, 4, 0], backend.device)
    tree = chain_tree(drafts, lens, total_nodes=12, max_nodes=4, **backend.kwargs)
    assert tree.cu_nodes.tolist() == [0, 4, 5, 7, 10]
    assert tree.positions.tolist() == [9, 10, 11, 12, 1, 4, 5, 0, 1, 2, 0, 0]


def test_BT_05_each_request_equals_its_solo_run(backend: Any):
    backend.require("chain_tree")
    rng = random.Random(5)
    for B in (0, 1, 2, 5, 17):
        drafts, lens = [rng.randrange(-1, 6) for _ in range(B)], [rng.randrange(41) for _ in range(B)]
        tree = chain_tree(
            *(ints(x, backend.device) for x in (drafts, lens)), total_nodes=B * 6, max_nodes=6, **backend.kwargs
        )
        cu = tree.cu_nodes.tolist()
        for b in range(B):
            solo, _ = ref.chain_tree([drafts[b]], [lens[b]], drafts[b] + 1, 6)
            for name in ("parents", "depths", "positions", "first_child", "next_sibling"):
                assert getattr(tree, name)[cu[b] : cu[b + 1]].tolist() == getattr(solo, name), (b, name)
        assert plan_buckets(ints([n + 1 for n in drafts], backend.device), [8]).cu_nodes.tolist() == cu
