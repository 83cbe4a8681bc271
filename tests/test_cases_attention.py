"""Reported faults of other projects that concern attention and KV writes, each with its right answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention_suite import build, rng_of, size_of
from tests.attention_trees import Tree, bernoulli, chain, from_parents, random_tree, star
from tests.conftest import poisoned
from tests.test_attention_mask import probe, solo, visible_keys


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Skip a backend without the kernel before problems are built for it."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").require("tree_attention")


def int32(values: object, backend) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=backend.device)


def interleaved(num_nodes: int) -> Tree:
    """Two branches whose nodes alternate: 1 and 2 hang on the root, node i on i - 2."""
    return from_parents([-1, 0, 0, *range(1, num_nodes - 2)][:num_nodes])


# ---- TM-02: holes below the diagonal, in every tile


@pytest.mark.parametrize("nodes", [1, 7, 16, 17, 33, 40, 64, 65, 100])
def test_TM_02_holes_below_the_diagonal(backend, nodes):
    for context in (24, 64, 128, 40, 63):
        problem = build([interleaved(nodes)], [context], rng_of("TM-02"), heads=(2, 1))
        probe(problem, backend)


def test_TM_02_node_39_sees_45_keys(backend):
    problem = build([interleaved(40)], [24], rng_of("TM-02"), heads=(2, 1), tail_rows=0)
    keys = visible_keys(problem)
    assert len(keys[39]) == 45
    assert len(keys[38]) == 44
    problem.tensors["q"].zero_()
    one_hot = torch.eye(64)[:, None].expand(64, 1, 64)
    problem.put("v_cache", 0, one_hot)
    out = problem.run(backend)[0].cpu()[39]
    seen = [*range(24), 24, *range(25, 64, 2)]
    assert torch.allclose(out[:, seen], torch.full((2, 45), 1 / 45), rtol=1e-6, atol=0)
    assert not out[:, range(26, 64, 2)].any()


# ---- TM-03: packed bits


@pytest.mark.parametrize("nodes", [31, 32, 33, 63, 64, 65])
def test_TM_03_garbage_behind_the_last_bit_and_row_changes_nothing(backend, nodes):
    rng = rng_of("TM-03", nodes)
    problem = build([random_tree(nodes, rng), chain(nodes)], [19, 64], rng, max_nodes=128)
    clean = problem.tensors["tree_mask"].clone()
    flat = clean.numpy().view(np.uint32)
    for row, slots in enumerate(problem.visible()):
        flat[row] = 0
        for j in slots:
            flat[row, j // 32] |= np.uint32(1 << (j % 32))
    flat[2 * nodes :] = 0
    assert not torch.equal(clean, problem.tensors["tree_mask"])
    assert all(
        torch.equal(a, b)
        for a, b in zip(problem.run(backend), problem.run(backend, tree_mask=clean.to(backend.device)))
    )


def test_TM_03_worked_rows_in_a_wide_buffer(backend):
    """B=2 with 3 and 5 nodes, 2 words a row: request 1 starts at row 3, and rows are 2 words apart."""
    rng = rng_of("TM-03 worked")
    problem = build([chain(3), from_parents([-1, 0, 0, 1, 2])], [10, 20], rng, max_nodes=40, tail_rows=0)
    exact = int32([[1, 0], [3, 0], [7, 0], [1, 0], [3, 0], [5, 0], [11, 0], [21, 0]], backend)
    problem.check(*problem.run(backend, tree_mask=exact))
    chain33 = build([chain(33)], [5], rng, max_nodes=40, tail_rows=0)
    assert chain33.tensors["tree_mask"][32].tolist()[0] == -1
    assert chain33.tensors["tree_mask"][32].tolist()[1] & 1 == 1
    chain33.check(*chain33.run(backend))


# ---- TM-06: at the wall, and when the batch shrinks


def test_TM_06_no_access_beyond_the_last_page(backend):
    """Context 16 and 4 nodes in a table of exactly 20 positions; canaries stand around every output."""
    rng = rng_of("TM-06")
    problem = build([random_tree(4, rng)], [16], rng, page_size=4, tail_rows=0)
    problem.tensors["page_table"] = problem.tensors["page_table"][:, :5].contiguous()
    buffer = poisoned(6, 4, 64, device=backend.device)
    out, lse = problem.run(backend, out=buffer[1:5])
    assert out.data_ptr() == buffer[1:5].data_ptr()
    assert buffer[[0, 5]].isnan().all()
    problem.check(out, lse)


@pytest.mark.parametrize("num_splits", [0, 4])
def test_TM_06_one_workspace_for_changing_batches(backend, num_splits):
    """Alternating batch sizes over one workspace give what a fresh one gives, bitwise, and leave it zeroed."""
    from specdec_kernels._ops import workspace_size

    rng = rng_of("TM-06 batches")
    problems = [build([random_tree(int(n), rng) for n in rng.integers(1, 40, b)], rng.integers(0, 200, b).tolist(), rng,
                      dtype=torch.bfloat16, max_nodes=64) for b in (4, 2, 8, 1, 4)]  # fmt: skip
    bytes_needed = workspace_size(
        "tree_attention", batch=8, max_nodes=64, num_q_heads=4, num_kv_heads=2, head_dim=64,
        v_dim=64, num_splits=num_splits,
    )  # fmt: skip
    guarded = torch.zeros(bytes_needed + 128, dtype=torch.uint8, device=backend.device)
    guarded[:64] = guarded[-64:] = 0x5A
    for problem in problems:
        shared = problem.run(backend, workspace=guarded[64:-64], num_splits=num_splits)
        fresh = problem.run(backend, num_splits=num_splits)
        assert all(torch.equal(a, b) for a, b in zip(shared, fresh))
        assert (guarded[:64] == 0x5A).all()
        assert (guarded[-64:] == 0x5A).all()
        assert not guarded[64:-64].any(), "a call leaves its workspace zeroed"


# ---- TM-07: head mapping


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 2), (8, 8), (8, 1), (3, 1), (12, 3), (14, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_TM_07_heads_of_a_group_share_their_kv_head(backend, dtype, q_heads, kv_heads):
    rng = rng_of("TM-07", q_heads, kv_heads)
    tree = bernoulli(20, rng)
    problem = build([tree], [9], rng, heads=(q_heads, kv_heads), dtype=dtype, tail_rows=0)
    probe(problem, backend)
    problem.put("v_cache", 0, (10.0 * torch.arange(1, kv_heads + 1))[None, :, None].expand(29, kv_heads, 64))
    out = problem.run(backend)[0].cpu().float()
    expected = (10.0 * torch.arange(1, kv_heads + 1)).repeat_interleave(q_heads // kv_heads)
    # A weighted mean of equal values: exact in bfloat16, within rounding of the weights' sum in float32.
    tolerance = 0 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(out, expected[None, :, None].expand_as(out), rtol=tolerance, atol=0)


# ---- TM-08: keys beyond the causal tile, rows that see nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_TM_08_later_slots_count_and_empty_rows_are_zero(backend, dtype):
    rng = rng_of("TM-08")
    forward = chain(20)
    forward.visible[2] = [0, 1, 2, 19]
    far = chain(100)
    far.visible[0] = [99]  # a tile further on
    problem = build([forward, Tree([[]], [0]), far, Tree([[]], [0])], [33, 0, 0, 7], rng, dtype=dtype)
    out, lse = problem.run(backend)
    problem.check(out, lse)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert not out[20].any()
    assert torch.isneginf(lse[20]).all()
    assert out[-4].any(), "an empty row with context sees the context"
    probe(problem, backend)


# ---- BT-05: ragged and empty rows


def test_BT_05_each_request_equals_its_solo_run(backend):
    rng = rng_of("BT-05")
    small = size_of(backend).work < 2**25
    for trial in range(3 if small else 20):
        batch = int(rng.integers(1, 5 if small else 18))
        counts = [4, 1, 2, 3] if trial == 0 else [0] * batch if trial == 1 else rng.integers(0, 7, batch).tolist()
        trees = [random_tree(n, rng) if n else Tree([], []) for n in counts]
        contexts = rng.integers(0, 41, len(counts)).tolist()
        problem = build(trees, contexts, rng, dtype=torch.bfloat16)
        out, lse = problem.run(backend, batch_invariant=True)
        problem.check(out, lse)
        cu = problem.tensors["cu_nodes"].tolist()
        for b in range(len(counts)):
            rows = slice(cu[b], cu[b + 1])
            alone, alone_lse = solo(problem, b, rows).run(backend, batch_invariant=True)
            assert torch.equal(alone, out[rows])
            assert torch.equal(alone_lse, lse[rows])


def test_BT_05_empty_requests_between(backend):
    """Query offsets [0,0,2,2,5]: rows belong to requests 1 and 3, the tables of 0 and 2 are garbage."""
    rng = rng_of("BT-05 empty")
    empty = Tree([], [])
    problem = build([empty, star(2), empty, chain(3)], [0, 9, 0, 4], rng)
    assert problem.tensors["cu_nodes"].tolist() == [0, 0, 2, 2, 5]
    problem.tensors["context_lens"][[0, 2]] = 2**31 - 1  # stale: nobody asks
    problem.tensors["page_table"][[0, 2]] = 2147480000
    out, lse = problem.run(backend)
    problem.tensors["context_lens"][[0, 2]] = 0
    problem.check(out, lse)


def test_BT_05_kv_of_each_request_goes_to_its_own_offset(backend):
    """L = [1, 4], one token each."""
    from specdec_kernels.attention import slot_mapping

    backend.require("slot_mapping")
    table = int32([[3, 8], [5, 6]], backend)
    slots = slot_mapping(table, int32([1, 4], backend), int32([0, 1, 2], backend), 4, total_nodes=2, **backend.kwargs)
    assert slots.tolist() == [13, 24]
