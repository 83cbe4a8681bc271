"""The planner against its reference, and the kernels that follow plans: splits, merges, stale and foreign plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from python_ref import attention_plan as ref
from specdec_kernels._ops import workspace_size
from specdec_kernels.attention import plan_tree_attention
from tests import cuda_on_cpu
from tests.attention_suite import build, rng_of
from tests.attention_trees import bernoulli, chain, eagle26, random_tree
from tests.conftest import Backend
from tests.test_attention_mask import probe

BF16 = torch.bfloat16
TILE_ROWS = {64: (16, 32, 64, 128), 80: (32, 64), 128: (16, 32, 64, 128), 192: (16, 64)}


def long(*values) -> list:
    """Parameters of the long suite."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def ints(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def rows_of_tile(head_dim: int, rows: int, batch_invariant: bool = False) -> int:
    """The smallest compiled row tile that holds a request, else the largest."""
    widths = [w for w in TILE_ROWS[head_dim] if not (batch_invariant and w > 32)]
    return next((w for w in widths if w >= rows), widths[-1])


def compare(backend, contexts, nodes, *, heads, head_dim, workers, window=-1, order=None, invariant=False):
    backend.require("plan_tree_attention")
    cu = np.cumsum([0, *nodes]).tolist()
    max_nodes = max([1, *nodes])
    tile = rows_of_tile(head_dim, max_nodes * heads[0] // heads[1], invariant)
    expected = ref.plan(
        contexts, cu, range(len(nodes)) if order is None else order, group=heads[0] // heads[1],
        num_kv_heads=heads[1], tile_rows=tile, window=window, workers=workers, batch_invariant=invariant,
    )  # fmt: skip
    to = lambda x: None if x is None else ints(x).to(backend.device)  # noqa: E731
    got = plan_tree_attention(
        to(contexts), to(cu), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, max_nodes=max_nodes,
        window=window, request_order=to(order), num_workers=workers, batch_invariant=invariant, **backend.kwargs,
    )  # fmt: skip
    assert got.tolist() == expected.fields(tile, heads[1], workers)
    return expected


CONTEXTS = (0, 1, 63, 64, 65, 1000, 8192, 32768)


@pytest.mark.parametrize("workers", [8, *long(1, 264)])
@pytest.mark.parametrize("batch", [0, 3, 300, *long(1, 64)])
def test_plan_equals_the_reference(backend, batch, workers):
    rng = rng_of("plan", batch, workers)
    contexts = rng.choice(CONTEXTS, batch).tolist()
    nodes = rng.choice([0, 1, 8, 26, 64, 130], batch).tolist()
    compare(backend, contexts, nodes, heads=(32, 8), head_dim=128, workers=workers)
    order = rng.permutation(batch)[: batch // 2].tolist() + [-1, batch]
    compare(backend, contexts, nodes, heads=(5, 1), head_dim=80, workers=workers, window=100, order=order)
    compare(backend, contexts, nodes, heads=(4, 2), head_dim=64, workers=workers, invariant=True)


def test_garbage_lengths_and_overflow(backend):
    """Lengths near 2^31 and negative ones: the line is counted in coarser units and still fits 30 bits."""
    contexts, nodes = [2**31 - 200, -7, 2**30, 5, 2**31 - 200], [100, 3, 64, 1, 130]
    plan = compare(backend, contexts, nodes, heads=(64, 64), head_dim=128, workers=132)
    assert plan.grain > 1
    assert plan.first_unit[-1] < 2**30 + 2**20
    compare(backend, [5, 6, 7], [4, -4, 2], heads=(4, 2), head_dim=64, workers=8)


@pytest.mark.parametrize("workers", [1, 7, 132, 264])
def test_parts_cover_every_item_once_and_balance(workers):
    """Of the reference: parts tile their items, a worker starts and ends at most one split item, loads are even."""
    for seed in range(20):
        rng = rng_of("parts", workers, seed)
        batch = int(rng.integers(1, 40))
        contexts, nodes = rng.integers(0, 30000, batch).tolist(), rng.integers(0, 130, batch).tolist()
        plan = ref.plan(contexts, np.cumsum([0, *nodes]).tolist(), range(batch), group=4, num_kv_heads=2,
                        tile_rows=(16, 32, 64, 128)[seed % 4], workers=workers)  # fmt: skip
        done: dict[tuple[int, int], list[ref.Part]] = {}
        for part in plan.parts():
            done.setdefault((part.request, part.item), []).append(part)
        heads, tails = set(), set()
        loads = np.zeros(workers + 1)
        for parts in done.values():
            assert (parts[0].begin, parts[-1].end) == (0, plan.item_units[parts[0].request])
            assert all(a.end == b.begin and a.worker + 1 == b.worker for a, b in itertools.pairwise(parts))
            assert len(parts) <= 33
            for i, part in enumerate(parts):
                loads[part.worker] += part.end - part.begin
                if len(parts) > 1:
                    slot = tails if i == 0 else heads
                    assert part.worker not in slot, "a slot of the workspace is used twice"
                    slot.add(part.worker)
        assert loads[workers] == 0
        assert loads.max() <= plan.share + 2 * max(plan.snap, 2) + 2
        assert len(done) == sum(2 * -(-n * 4 // (16, 32, 64, 128)[seed % 4]) for n in nodes)


def test_a_small_batch_uses_the_machine():
    """Section 5.5's cases on 132 multiprocessors: one long request is spread over most of them, many are not split."""
    one = ref.plan([32768], [0, 8], [0], group=4, num_kv_heads=8, tile_rows=32, workers=264)
    assert 100 <= len({part.worker for part in one.parts()}) <= 264
    assert max(sum(1 for p in one.parts() if p.item == i) for i in range(8)) <= 18
    many = ref.plan(
        [8192] * 64, list(range(0, 65 * 26, 26)), range(64), group=4, num_kv_heads=8, tile_rows=128, workers=264
    )
    assert len({part.worker for part in many.parts()}) == 264
    split = [p for p in many.parts() if p.end - p.begin < many.item_units[p.request]]
    assert len(split) <= 2 * 264
    alone = ref.plan([32768], [0, 8], [0], group=32, num_kv_heads=1, tile_rows=128, workers=264)
    assert len(alone.parts()) >= 16


# ---- kernels that follow a plan


def plan_of(backend, problem, **options) -> torch.Tensor:
    backend.require("plan_tree_attention")
    t = problem.to(backend.device).tensors
    hnd = problem.options.get("kv_layout", "NHD") == "HND"
    return plan_tree_attention(
        t["context_lens"], t["cu_nodes"], num_q_heads=t["q"].shape[1], num_kv_heads=t["k_cache"].shape[1 if hnd else 2],
        head_dim=t["q"].shape[2], max_nodes=problem.max_nodes, window=problem.options.get("window", -1),
        **backend.kwargs, **options,
    )  # fmt: skip


def under(backend, problem, workers: int, **options) -> dict[str, torch.Tensor]:
    """A plan for so many workers and a workspace that has room for them."""
    t = problem.tensors
    kv_heads = t["k_cache"].shape[1 if problem.options.get("kv_layout", "NHD") == "HND" else 2]
    size = workspace_size(
        "tree_attention", batch=len(t["context_lens"]), max_nodes=problem.max_nodes, num_q_heads=t["q"].shape[1],
        num_kv_heads=kv_heads, head_dim=t["q"].shape[2], v_dim=t["v_cache"].shape[3], num_workers=workers,
    )  # fmt: skip
    workspace = torch.zeros(size, dtype=torch.uint8, device=backend.device)
    return {"plan": plan_of(backend, problem, num_workers=workers, **options), "workspace": workspace}


@pytest.mark.parametrize("nodes", [3, 12, 30, 60])
@pytest.mark.parametrize("workers", [5, *long(2, 40)])
def test_planned_calls_are_right(backend, nodes, workers):
    """Row tiles of 16 to 128 rows, cut by 2 to 40 workers; the same bits with a plan that the call makes itself."""
    rng = rng_of("planned", nodes, workers)
    trees, contexts = [random_tree(nodes, rng), chain(2), eagle26()], [610, 0, 130]
    trees, contexts = (trees, contexts) if nodes > 26 else (trees[:2], contexts[:2])
    problem = build(trees, contexts, rng, dtype=BF16, max_nodes=max(nodes, 26 if nodes > 26 else 2))
    planned = under(backend, problem, workers)
    problem.check(*problem.run(backend, **planned))
    assert not planned["workspace"].any()
    again = problem.run(backend, plan=plan_of(backend, problem))
    assert all(torch.equal(a, b) for a, b in zip(again, problem.run(backend)))


@pytest.mark.skipif(cuda_on_cpu.missing("emulated") is not None, reason="no g++ or CUDA headers")
@pytest.mark.parametrize("path", ["source", *long("ptx")])
@pytest.mark.parametrize("schedule", ["random", *long("reverse", "priority")])
@pytest.mark.parametrize("nodes", [3, *long(12, 30, 60)])
def test_bits_do_not_depend_on_which_block_is_last(nodes, schedule, path):
    """Split and merged by blocks that interleave, copies that land whenever they like: the bits of blocks in turn."""
    backend = Backend("emulated", "cpu", "emulated" if path == "source" else "ptx")
    rng = rng_of("interleaved", nodes)
    problem = build([random_tree(nodes, rng), chain(2)], [610, 0], rng, dtype=BF16, max_nodes=nodes)
    planned = under(backend, problem, 5)
    expected = problem.run(backend, **planned)
    for seed in range(2):
        chosen = dict(schedule=schedule, seed=seed, resident_blocks=4, landing="random", preempt=30)
        with cuda_on_cpu.suite_library().configured(**chosen):
            again = problem.run(backend, **planned)
        assert all(torch.equal(a, b) for a, b in zip(again, expected))
        assert not planned["workspace"].any()


def test_probe_under_a_plan(backend):
    rng = rng_of("probe plan")
    trees = [bernoulli(33, rng, empty_rows=True), chain(5), bernoulli(9, rng)]
    problem = build(trees, [400, 64, 0], rng, dtype=BF16)
    probe(problem, backend, **under(backend, problem, 9))


OPTIONS = [{"window": 70}, {"softcap": 30.0, "sinks": True}, {"kv_dtype": torch.float8_e4m3fn, "scales": "head"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_under_a_plan(backend, options):
    rng = rng_of("options plan", str(options))
    problem = build([random_tree(20, rng), eagle26()], [520, 130], rng, dtype=BF16, **options)
    problem.check(*problem.run(backend, **under(backend, problem, 11)))


def test_a_plan_of_other_lengths_still_gives_the_answer(backend):
    """Lengths grew since the plan was made: another balance, the same result. A plan of other heads is not followed."""
    rng = rng_of("stale")
    problem = build([random_tree(12, rng), chain(7)], [400, 200], rng, dtype=BF16)
    t = problem.to(backend.device).tensors
    for lens in ([0, 0], [399, 100], [100000, 3]):
        stale = dict(num_q_heads=4, num_kv_heads=2, head_dim=64, max_nodes=problem.max_nodes, num_workers=7)
        plan = plan_tree_attention(ints(lens).to(backend.device), t["cu_nodes"], **stale, **backend.kwargs)
        problem.check(*problem.run(backend, plan=plan))
    foreign = {**stale, "num_q_heads": 8, "num_kv_heads": 4}
    plan = plan_tree_attention(t["context_lens"], t["cu_nodes"], **foreign, **backend.kwargs)
    problem.check(*problem.run(backend, plan=plan))
    problem.check(*problem.run(backend, plan=torch.full_like(plan, 7)))


@pytest.mark.parametrize("value", [-1, 2**31 - 1, 10**6])
def test_garbage_offsets_reach_no_other_request(backend, value):
    """The last offset is garbage: the planner may count too many items; requests 0 and 1 keep their answer."""
    rng = rng_of("garbage offsets", value)
    problem = build([random_tree(12, rng), chain(5), eagle26()], [300, 30, 40], rng, dtype=BF16, heads=(6, 2))
    expected, _ = problem.run(backend)
    garbage = problem.tensors["cu_nodes"].clone()
    garbage[3] = value
    out, _ = problem.run(backend, cu_nodes=garbage.to(backend.device))
    assert torch.allclose(out[:17].float(), expected[:17].float(), atol=0.02)


def test_batch_invariant_under_a_plan(backend):
    """A split plan is not followed where bits may not depend on the batch; an invariant one is, with the same bits."""
    rng = rng_of("invariant plan")
    problem = build([random_tree(12, rng), chain(7)], [400, 200], rng, dtype=BF16)
    expected = problem.run(backend, batch_invariant=True)
    for invariant in (False, True):
        plan = plan_of(backend, problem, batch_invariant=invariant, num_workers=5)
        got = problem.run(backend, plan=plan, batch_invariant=True)
        assert all(torch.equal(a, b) for a, b in zip(expected, got))


def test_workspace_is_left_zero_and_bounded(backend):
    """One workspace, many batches: right each time, zero after each, and its size does not grow with the context."""
    rng = rng_of("workspace")
    bounds = dict(batch=3, max_nodes=64, num_q_heads=4, num_kv_heads=2, head_dim=64, v_dim=64)
    workspace = torch.zeros(workspace_size("tree_attention", **bounds), dtype=torch.uint8, device=backend.device)
    for nodes, context in ((5, 600), (50, 100), (5, 500)):
        problem = build(
            [random_tree(nodes, rng), chain(3), eagle26()], [context, 300, 9], rng, dtype=BF16, max_nodes=64
        )
        problem.check(*problem.run(backend, workspace=workspace))
        assert not workspace.any()
    if backend.name in ("cuda", "emulated", "ptx"):  # the kernels that split: bits differ from one block's
        problem = build([random_tree(5, rng)], [900], rng, dtype=BF16, max_nodes=64)
        split, whole = problem.run(backend, workspace=workspace), problem.run(backend, num_splits=1)
        assert not torch.equal(split[0], whole[0]), "nothing was split"
