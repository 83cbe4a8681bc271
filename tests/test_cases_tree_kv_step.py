"""Cases from public bug reports: packed masks, rows without a slot, a step without the host, cost and growth."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels._handover import gather_accepted, prepare_next, truncate
from specdec_kernels.kv import advance, commit_kv, kv_handle
from specdec_kernels.tree import build_tree, chain_tree, collect_candidates, expand_tree, rerank_tree, unpack_mask


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---- TM-03: packed bits: word edges, sign bit, per-request start, stride of the buffer (packing)


def test_TM_03_rows_of_a_small_tree_and_of_a_chain(backend: Any):
    backend.require("build_tree")
    args = (ints(x, backend.device) for x in ([-1, 0, 0, 1, 2], [0, 5], [0]))
    assert build_tree(*args, max_nodes=5, **backend.kwargs).tree_mask.flatten().tolist() == [1, 3, 5, 11, 21]
    for nodes in (31, 32, 33, 63, 64, 65):
        chain = chain_tree(ints([nodes - 1], backend.device), ints([3], backend.device), total_nodes=nodes,
                           max_nodes=nodes, **backend.kwargs)  # fmt: skip
        tree = build_tree(chain.parents, chain.cu_nodes, ints([3], backend.device), max_nodes=nodes, **backend.kwargs)
        seen = unpack_mask(tree.tree_mask, nodes)
        assert torch.equal(seen.cpu(), torch.ones(nodes, nodes).tril().bool())
        assert torch.equal(chain.tree_mask, tree.tree_mask)
    assert chain.tree_mask[32].tolist() == [-1, 1, 0]  # 0xFFFFFFFF, 0x1: the sign bit is a bit


def test_TM_03_rows_keep_the_stride_of_the_buffer(backend: Any):
    """T = [3, 5] in a buffer for 40 nodes: two words a row, the second request starts at its own row."""
    backend.require("build_tree")
    args = (ints(x, backend.device) for x in ([-1, 0, 0, -1, 0, 0, 1, 2], [0, 3, 8], [0, 0]))
    mask = build_tree(*args, max_nodes=40, **backend.kwargs).tree_mask
    assert mask.tolist() == [[1, 0], [3, 0], [5, 0], [1, 0], [3, 0], [5, 0], [11, 0], [21, 0]]


# ---- KV-04, KV-05 (commit side): rows without a slot, dummy rows


def caches(pages: int, page: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.arange(float(pages * page * 2), device=device).view(pages, page, 1, 2)
    return k, -k


def changed(after: torch.Tensor, before: torch.Tensor) -> list[int]:
    """Slots whose rows differ."""
    return torch.nonzero((after != before).flatten(2).any(-1).flatten()).flatten().tolist()


@pytest.mark.parametrize("tail", [7, -1, 2**31 - 1, 8])
def test_KV_04_a_padded_window_writes_nothing_beyond_its_page(backend: Any, tail: int):
    """L = 13, two real drafts, window padded to 5 nodes; the second table entry is stale, absent, huge or outside."""
    backend.require("commit_kv")
    k, v = caches(8, 16, backend.device)
    before = k.clone()
    path = ints([[0, 2, 3, 4]], backend.device)
    for nodes in [3] if tail == 7 else [3, 5]:  # a stale id is a page like any other: the node count is what tells
        k.copy_(before)
        args = [ints(x, backend.device) for x in ([[3, tail]], [13], [0, nodes])]
        commit_kv(k, v, *args, path, ints([4], backend.device), page_size=16, **backend.kwargs)
        assert changed(k, before) == [3 * 16 + 14]  # node 2 (position 15) -> position 14; 16 and 17 have no slot
        assert k[3, 14].tolist() == before[3, 15].tolist()


def test_KV_05_a_position_behind_the_table_row_has_no_slot(backend: Any):
    """Rows [3, 8] and [5, 6], page 4: position 9 of request 0 is not request 1's block 5."""
    backend.require("commit_kv")
    k, v = caches(9, 4, backend.device)
    before = k.clone()
    args = [ints(x, backend.device) for x in ([[3, 8], [5, 6]], [6, 0], [0, 4, 5], [[0, 3], [0, -1]], [2, 1])]
    commit_kv(k, v, *args, page_size=4, **backend.kwargs)
    assert changed(k, before) == []
    args[1] = ints([8, 0], backend.device)  # and nothing is written to a target without a slot
    commit_kv(k, v, *args, page_size=4, **backend.kwargs)
    assert changed(k, before) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_KV_05_dummy_rows_touch_nothing(backend: Any, ordered: bool):
    """B padded to 4: rows 1 to 3 hold old page ids, and (under request_order) even plausible paths."""
    backend.require("commit_kv")
    k, v = caches(9, 4, backend.device)
    before = k.clone()
    table = ints([[3, 8], [5, 6], [5, 6], [7, 1]], backend.device)
    cu = ints([0, 4, 4, 4, 4] if not ordered else [0, 4, 8, 12, 16], backend.device)
    args = [table, ints([2, 0, 1, 3], backend.device), cu, ints([[0, 3]] * 4, backend.device)]
    order = ints([0, -1, -1, -1], backend.device) if ordered else None
    commit_kv(k, v, *args, ints([2] * 4, backend.device), page_size=4, request_order=order, **backend.kwargs)
    assert changed(k, before) == [3 * 4 + 3]  # request 0: position 5 (page 8) -> position 3 (page 3)


# ---- PF-01: no host sync in the step


class Outcome(NamedTuple):
    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    accepted_nodes: torch.Tensor


def step_tensors(B: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.rand(B, m, 3, generator=generator).log() for m in (1, 3)]
    tokens = torch.randint(0, 99, (B, 4), generator=generator).int()
    path = ints([[0, 1, 4, -1]] * B).view(B, 4)
    lens = torch.arange(B).int() + 2
    table = torch.arange(B * 3).int().view(B, 3)
    caches = [torch.randn(B * 3 + 1, 4, 1, 8, generator=generator) for _ in range(2)]
    return [*steps, tokens, path, ints([3] * B), ints([2] * B), lens, table, *caches]


def step(
    first: Any, second: Any, tokens: Any, path: Any, emitted: Any, limit: Any, lens: Any, table: Any, k: Any, v: Any
) -> list[torch.Tensor]:
    """Draft scores -> tree -> (verified outcome) -> committed KV -> inputs of the next step."""
    B = first.shape[0]
    one = expand_tree(torch.zeros(B, 1), first, 3)
    lined = collect_candidates([one, expand_tree(one.beam_scores, second, 3)])
    kept = rerank_tree(*lined[:3], torch.full((B,), 6, dtype=torch.int32), total_nodes=6 * B)
    tree = build_tree(kept.parents, kept.cu_nodes, lens, max_nodes=6)
    verified = truncate(Outcome(tokens, emitted, path), limit)
    commit_kv(k, v, table, lens, tree.cu_nodes, verified.accepted_nodes, verified.num_emitted, page_size=4)
    hidden = gather_accepted(torch.ones(6 * B, 4), tree.cu_nodes, path, emitted, total=4 * B)
    following = prepare_next(verified, lens, table, page_size=4, total=4 * B)
    advance(lens, verified.num_emitted)
    return [*(t for t in tree if isinstance(t, torch.Tensor)), *hidden, *following, lens, k, v]


def test_PF_01_a_step_runs_under_fake_tensors():
    """A value read on the host would raise a data-dependent error."""
    for B in (0, 1, 8):
        tensors = step_tensors(B)
        with FakeTensorMode() as mode:
            fake = step(*(mode.from_tensor(t) for t in tensors))
        real = step(*tensors)
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]


def test_PF_01_a_value_read_on_the_host_would_show():
    """Negative control of the test above."""
    with FakeTensorMode() as mode, pytest.raises(Exception, match=r"_local_scalar_dense|[Dd]ata.?[Dd]ependent"):
        int(mode.from_tensor(ints([3])).sum())


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_PF_01_out_variants_allocate_nothing_and_follow_tables_changed_in_place():
    *_, lens, table, k, v = step_tensors(3)
    parents, cu = ints([-1, 0, 0, 1] * 3), ints([0, 4, 8, 12])
    path, emitted = ints([[0, 2, 3]] * 3), ints([3] * 3)
    tree = build_tree(parents, cu, lens, max_nodes=4)
    out = [tree.parents, tree.tree_mask, tree.depths, tree.positions, tree.first_child, tree.next_sibling, tree.flags]

    def run() -> None:
        torch.ops.specdec.build_tree.default(parents, cu, lens, 4, 3, *out)
        torch.ops.specdec.commit_kv.default(table, lens, cu, path, emitted, None, "NHD", [k], [v])

    run()
    parents.copy_(ints([-1, 0, 1, 1] * 3))
    table.copy_(table.flip(0))
    lens.add_(1)
    expected_k, expected_v = k.clone(), v.clone()
    commit_kv(expected_k, expected_v, table.clone(), lens.clone(), cu, path, emitted)
    with Calls() as calls:
        run()
    assert set(calls.names) == {"specdec.build_tree.default", "specdec.commit_kv.default"}  # no aten::empty, no copy
    fresh = build_tree(parents.clone(), cu, lens.clone(), max_nodes=4)
    assert torch.equal(tree.positions, fresh.positions)
    assert torch.equal(tree.tree_mask, fresh.tree_mask)
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)


# ---- PF-05: commit cost and growth over time


def best_of(runs: int, function: Any) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_PF_05_a_dense_path_is_close_to_free(backend: Any):
    """The cost of a commit follows the rows moved: none, one a request, four a request."""
    backend.require("commit_kv")
    if backend.name not in ("cpu", "cuda"):
        pytest.skip("times are not meaningful on an emulated backend")
    B = 32
    k = torch.zeros(16, B, 16, 8, 64, device=backend.device)  # 16 layers
    handle = kv_handle(k, k.clone())
    table = torch.arange(B, dtype=torch.int32, device=backend.device).view(B, 1)
    shared = [table, ints([0] * B, backend.device), ints(list(range(0, 9 * B + 1, 9)), backend.device)]

    def commit(path: list[int]) -> float:
        nodes, count = ints([path] * B, backend.device), ints([len(path)] * B, backend.device)
        return best_of(7, lambda: commit_kv(handle, None, *shared, nodes, count, **backend.kwargs))

    dense, one, four = commit([0, 1, 2, 3, 4]), commit([0, 1, 2, 3, 6]), commit([0, 5, 6, 7, 8])
    assert dense < four / 4, (dense, four)
    assert one < four * 0.75, (one, four)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_PF_05_memory_stays_while_the_batch_jumps():
    """500 steps with B jumping between 1 and 32: no more memory than after 50."""
    rng = random.Random(0)
    sizes = [rng.randrange(1, 33) for _ in range(500)]
    inputs = {B: step_tensors(B) for B in set(sizes)}
    for B in sizes[:50]:
        step(*(t.clone() for t in inputs[B]))
    start = resident_bytes()
    for B in sizes[50:]:
        step(*(t.clone() for t in inputs[B]))
    assert resident_bytes() - start < 8 << 20
