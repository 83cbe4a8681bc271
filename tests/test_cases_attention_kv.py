"""Reported faults of other projects that concern KV writes, addresses, replay and cost, each with its right answer."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch

from tests.attention_suite import Problem, build, rng_of, size_of
from tests.attention_trees import Tree, chain, random_tree
from tests.conftest import poisoned
from tests.test_kv_write import whole


def int32(values: object, backend) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=backend.device)


# ---- KV-04, KV-05: windows and rows without a page


def _pool(backend, pages: int, page_size: int) -> list[torch.Tensor]:
    return [torch.randn(pages, page_size, 2, 64, device=backend.device) for _ in range(2)]


@pytest.mark.parametrize("stale", [7, -1, 2147480000])
def test_KV_04_padding_nodes_write_nothing(backend, stale):
    """Page 16, L=13, a root and 2 drafts in a window padded to 5 rows; the second column of the table is stale."""
    from specdec_kernels.attention import slot_mapping, write_kv

    backend.require("write_kv")
    table = int32([[2, stale]], backend)
    slots = slot_mapping(table, int32([13], backend), int32([0, 3], backend), 16, total_nodes=5, **backend.kwargs)
    assert slots.tolist() == [45, 46, 47, -1, -1]
    caches = _pool(backend, 9, 16)
    before = [c.clone() for c in caches]
    x = torch.randn(5, 2, 64, device=backend.device)
    write_kv(x, x, *caches, slots, kv_layout="NHD", **backend.kwargs)
    for cache, old in zip(caches, before):
        assert torch.equal(cache[2, 13:], x[:3])
        cache[2, 13:] = old[2, 13:]
        assert torch.equal(cache, old), "a page of another request changed"


@pytest.mark.parametrize("stale", [-1, 2147480000])
def test_KV_04_a_real_node_without_a_page_has_no_slot(backend, stale):
    from specdec_kernels.attention import slot_mapping, write_kv

    backend.require("write_kv")
    table = int32([[2, stale]], backend)
    slots = slot_mapping(table, int32([13], backend), int32([0, 5], backend), 16, total_nodes=5, **backend.kwargs)
    assert slots.tolist() == [45, 46, 47, -1, -1]
    caches = _pool(backend, 9, 16)
    before = [c.clone() for c in caches]
    write_kv(*(torch.ones(5, 2, 64, device=backend.device),) * 2, *caches, slots, kv_layout="NHD", **backend.kwargs)
    assert all(torch.equal(c[[0, 1, 3, 4, 5, 6, 7, 8]], b[[0, 1, 3, 4, 5, 6, 7, 8]]) for c, b in zip(caches, before))


def test_KV_05_positions_outside_the_table_row(backend):
    """Rows [3,8] and [5,6], page 4: position 9 of request 0 is column 2, which is request 1's first entry in memory."""
    from specdec_kernels.attention import slot_mapping

    backend.require("slot_mapping")
    table = int32([[3, 8], [5, 6]], backend)
    slots = slot_mapping(table, int32([9, 0], backend), int32([0, 1, 1], backend), 4, total_nodes=1, **backend.kwargs)
    assert slots.tolist() == [-1]
    slots = slot_mapping(
        table, int32([6, 2**31 - 1], backend), int32([0, 4, 6], backend), 4, total_nodes=6, **backend.kwargs
    )
    assert slots.tolist() == [34, 35, -1, -1, -1, -1]


def test_KV_05_dummy_rows_with_stale_tables(backend):
    """B padded to 4: rows 1..3 hold ids of cached pages and stale lengths; cu_nodes says they have no nodes."""
    from specdec_kernels.attention import slot_mapping, write_kv

    for op in ("tree_attention", "slot_mapping", "write_kv"):
        backend.require(op)
    rng = rng_of("KV-05")
    problem = build([chain(3), *(Tree([], []),) * 3], [6, 0, 0, 0], rng, page_size=4)
    t = problem.to(backend.device).tensors
    t["page_table"][1:] = t["page_table"][0, 0]
    t["context_lens"][1:] = 3
    slots = slot_mapping(t["page_table"], t["context_lens"], t["cu_nodes"], 4, total_nodes=6, **backend.kwargs)
    assert slots[3:].tolist() == [-1] * 3
    before = [whole(t[k]).clone() for k in ("k_cache", "v_cache")]
    x = torch.full((6, 2, 64), 5.0, device=backend.device)
    keep = slots.clone()
    keep[:3] = -1
    write_kv(x, x, t["k_cache"], t["v_cache"], keep, kv_layout="NHD", **backend.kwargs)
    assert all(torch.equal(whole(t[k]), b) for k, b in zip(("k_cache", "v_cache"), before))
    reference = problem.run(backend)
    again = Problem(problem.trees, t, problem.max_nodes, problem.options).run(backend)
    assert all(torch.equal(a, b) for a, b in zip(reference, again))


# ---- RS-10: offsets beyond 2^31 elements


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_RS_10_last_page_of_a_pool_beyond_2_31_elements(backend, layout):
    """36k pages x 64 x 8 x 128 bfloat16 (4.8 GB, never touched but for one page): same bits as a small pool."""
    from specdec_kernels.attention import slot_mapping, tree_attention, write_kv

    backend.require("tree_attention")
    if size_of(backend).work < 2**25:
        pytest.skip(f"outside the sizes of backend {backend}")
    rng = rng_of("RS-10")
    results = []
    x = torch.from_numpy(rng.standard_normal((2, 60, 8, 128))).to(torch.bfloat16).to(backend.device)
    q = torch.from_numpy(rng.standard_normal((8, 16, 128))).to(torch.bfloat16).to(backend.device)
    for pages in (36_000, 3):
        middle = (64, 8) if layout == "NHD" else (8, 64)
        caches = [torch.empty(pages, *middle, 128, dtype=torch.bfloat16, device=backend.device) for _ in range(2)]
        if pages == 36_000:
            assert caches[0].numel() > 2**31
        table, cu = int32([[pages - 1]], backend), int32([0, 60], backend)
        slots = slot_mapping(table, int32([0], backend), cu, 64, total_nodes=60, **backend.kwargs)
        assert slots.tolist() == list(range(64 * (pages - 1), 64 * (pages - 1) + 60))
        write_kv(x[0], x[1], *caches, slots, kv_layout=layout, **backend.kwargs)
        last = caches[0][-1] if layout == "NHD" else caches[0][-1].transpose(0, 1)
        assert torch.equal(last[:60], x[0])
        where = table, int32([52], backend), int32([0, 8], backend), None
        results.append(tree_attention(q, *caches, *where, max_nodes=8, kv_layout=layout, **backend.kwargs))
    assert torch.equal(*results)


# ---- PF-02: the same call again after tables, lengths and masks changed in place


def test_PF_02_in_place_changes_are_seen(backend):
    """All four device inputs change between two calls of one prepared call: equal to a fresh call; graphs on CUDA."""
    from specdec_kernels.attention import tree_attention

    backend.require("tree_attention")
    rng = rng_of("PF-02")
    first = build([random_tree(9, rng), chain(3)], [40, 4], rng, page_size=4, max_nodes=16, tail_rows=4).to(
        backend.device
    )
    t = first.tensors
    out = poisoned(len(t["q"]), 4, 64, device=backend.device)

    def call() -> torch.Tensor:
        return tree_attention(t["q"], t["k_cache"], t["v_cache"], t["page_table"], t["context_lens"], t["cu_nodes"],
                              t["tree_mask"], max_nodes=16, out=out, **backend.kwargs)[0]  # fmt: skip

    call()
    replay = call
    if backend.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    second = Problem([chain(3), random_tree(7, rng)], dict(t), 16, first.options)
    t["page_table"].copy_(t["page_table"][[1, 0]].clone())
    t["context_lens"].copy_(torch.tensor([2, 37]))
    t["cu_nodes"].copy_(torch.tensor([0, 3, 10]))
    words = [sum(1 << j for j in slots) for tree in second.trees for slots in tree.visible]
    t["tree_mask"].copy_(torch.tensor([*words, *[0] * 6], dtype=torch.int32)[:, None])
    # Positions 37..43 of request 1 and 2..4 of request 0 hold whatever the first call left there: real numbers.
    t["q"][:] = torch.randn_like(t["q"])
    out.fill_(float("nan"))
    replay()
    second.check(out.clone())


def test_PF_02_second_call_allocates_nothing(backend):
    """With `out` given a call takes no memory from torch's allocator, and the process does not grow over 500 steps."""
    from specdec_kernels._ops import workspace_size
    from specdec_kernels.attention import tree_attention

    backend.require("tree_attention")
    rng = rng_of("PF-02 memory")
    problem = build([random_tree(9, rng), chain(3)], [300, 4], rng, max_nodes=16).to(backend.device)
    t = problem.tensors
    needed = workspace_size("tree_attention", batch=2, max_nodes=16, num_q_heads=4,
                            num_kv_heads=2, head_dim=64, v_dim=64)  # fmt: skip
    workspace = torch.zeros(needed, dtype=torch.uint8, device=backend.device)
    out = torch.empty(len(t["q"]), 4, 64, device=backend.device)

    def call() -> None:
        tree_attention(t["q"], t["k_cache"], t["v_cache"], t["page_table"], t["context_lens"], t["cu_nodes"],
                       t["tree_mask"], max_nodes=16, out=out, workspace=workspace, **backend.kwargs)  # fmt: skip

    call()
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    taken = [e.name for e in profile.events() if e.cpu_memory_usage > 0 or e.device_memory_usage > 0]
    assert not taken, f"a second call allocates: {taken}"
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(1000)
    assert any(e.cpu_memory_usage > 0 for e in profile.events()), "the profiler must be able to see an allocation"


# ---- PF-05: cost of the mask, growth over time


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: [4] bytes in mmapped blocks, [7] bytes in use elsewhere."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


def _live_bytes() -> int:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return info.field7 + info.field4


def test_PF_05_memory_after_500_steps_equals_memory_after_50(backend):
    rng = rng_of("PF-05 memory")
    if backend.name != "cpu":
        pytest.skip("counts bytes of the C heap")
    problems = [build([random_tree(5, rng) for _ in range(b)], rng.integers(0, 60, b).tolist(), rng, max_nodes=8)
                for b in rng.integers(1, 33, 16)]  # fmt: skip
    marks = []
    for step in range(500):
        problems[step % 16].run(backend)
        if step in (50, 499):
            marks.append(_live_bytes())
    assert marks[1] - marks[0] <= 65536, f"the heap grew by {marks[1] - marks[0]} bytes"


def test_PF_05_a_mask_costs_no_more_than_causal(backend):
    """L=8192, 8 nodes: a mask read for the whole context would show. Interleaved pairs, minimum of each."""
    if backend.name not in ("cpu", "cuda"):
        pytest.skip("times are not meaningful on an emulated backend")
    rng = rng_of("PF-05")
    problem = build([chain(8)], [8192], rng, heads=(8, 2), dtype=torch.bfloat16, tail_rows=0, max_nodes=8).to(
        backend.device
    )
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(25):
        for masked in (True, False):
            start = time.perf_counter()
            problem.run(backend, **({} if masked else {"tree_mask": None}))
            if backend.device == "cuda":
                torch.cuda.synchronize()
            times[masked].append(time.perf_counter() - start)
    ratio = min(times[True]) / min(times[False])
    assert ratio < 1.35, f"tree mask / causal = {ratio:.2f}"
