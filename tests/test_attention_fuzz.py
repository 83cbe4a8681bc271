"""Attention as a hostile caller uses it: odd strides and sizes, garbage in every index tensor, bounds that are too low.

Well-formed draws are judged against float64. Garbage draws must return, write only their own rows, and leave every
request whose own entries are intact bitwise as it was. `--long` draws many more.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from python_ref import kv_write as ref_kv
from tests.attention_suite import DEAD_PAGE_IDS, FP8, MEDIUM, SMALL, Problem, as64, build, fill_nan, rng_of, size_of
from tests.attention_trees import bernoulli, chain, permuted, random_tree
from tests.conftest import poisoned
from tests.fuzz import FAST
from tests.test_kv_write import whole

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
SHORT = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)
EMULATED = settings(SHORT, max_examples=12)  # the emulated backends see the first examples
LONG = settings(max_examples=3000, deadline=None, derandomize=False, print_blob=True, suppress_health_check=QUIET)
BOUNDS = [0, 1, -1, 2, 31, 32, 33, 63, 64, 65, 2**31 - 1, -(2**31), 2147480000, 2**30]
GARBAGE = st.one_of(st.sampled_from(BOUNDS), st.integers(-(2**31), 2**31 - 1))


GROWN = [
    lambda n, rng: chain(n),
    lambda n, rng: random_tree(n, rng) if n else chain(0),
    lambda n, rng: permuted(random_tree(n, rng) if n else chain(0), rng),
    lambda n, rng: bernoulli(n, rng),
    lambda n, rng: bernoulli(n, rng, diagonal=False),
    lambda n, rng: bernoulli(n, rng, diagonal=False, empty_rows=True),
]


@st.composite
def problems(draw: Any, small: bool) -> Problem:
    rng = rng_of("fuzz", draw(st.integers(0, 2**20)))
    batch = draw(st.integers(0, 3 if small else 6))
    trees, contexts = [], []
    for _ in range(batch):
        grow = draw(st.sampled_from(GROWN))
        trees.append(grow(draw(st.integers(0, 70)), rng))
        contexts.append(draw(st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 150))))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options |= {"kv_dtype": draw(st.sampled_from(FP8)), "scales": draw(st.sampled_from([None, "tensor", "head"]))}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.1, 1.0, 50.0, 1e4]))
    mask = draw(st.sampled_from([True, True, False]))
    if mask and draw(st.booleans()):
        options["causal"] = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 2, 5, 64, 2**31 - 1]))
    elif draw(st.booleans()):
        options["query_start"] = [draw(st.integers(0, len(t))) for t in trees]
    return build(
        trees, contexts, rng, heads=(kv_heads * group, kv_heads), dtype=dtype, mask=mask,
        dims=draw(st.sampled_from(SMALL.head_dims if small else MEDIUM.head_dims)),
        page_size=draw(st.sampled_from([1, 2, 3, 5, 16, 17, 64, 100])), layout=draw(st.sampled_from(["NHD", "HND"])),
        style=draw(st.sampled_from(["dense", "padded", "interleaved"])), sinks=draw(st.booleans()),
        tail_rows=draw(st.integers(0, 3)), share_prefix=draw(st.booleans()), **options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Skip a backend without the kernel before problems are built for it."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").require("tree_attention")


def oddly_strided(problem: Problem, data: Any) -> None:
    """Re-house q and the caches at odd offsets and strides; the numbers stay."""
    for name in ("q", "k_cache", "v_cache"):
        old = problem.tensors[name]
        order = data.draw(st.permutations(range(old.dim() - 1)))
        strides, step = [0] * old.dim(), old.shape[-1] + data.draw(st.integers(0, 9))
        strides[-1] = 1
        for axis in order:
            strides[axis] = step
            step = step * max(1, old.shape[axis]) + data.draw(st.integers(0, 9))
        offset = data.draw(st.integers(0, 7))
        new = torch.as_strided(fill_nan(torch.empty(offset + step, dtype=old.dtype)), old.shape, strides, offset)
        target, source = (t.view(torch.uint8) if old.dtype in FP8 else t for t in (new, old))
        target.copy_(source)
        problem.tensors[name] = new


def well_formed(backend: Any, data: Any) -> None:
    problem = data.draw(problems(size_of(backend).work < 2**25))
    if data.draw(st.booleans()):
        oddly_strided(problem, data)
    splits = data.draw(st.sampled_from([0, 0, 1, 2, 9, 1000]))
    out, lse = problem.run(backend, num_splits=splits, batch_invariant=data.draw(st.booleans()))
    problem.check(out, lse)


def garbage(backend: Any, data: Any) -> None:
    """Corrupt some requests' own indices; the rest of the batch does not notice, nor does the memory around `out`."""
    problem = data.draw(problems(size_of(backend).work < 2**25))
    t, batch = problem.tensors, len(problem.trees)
    if batch == 0:
        return
    expected, _ = problem.run(backend, batch_invariant=True)
    victims = data.draw(st.sets(st.integers(0, batch - 1), min_size=1, max_size=batch))
    cu = t["cu_nodes"].tolist()
    changed = {k: t[k].clone() for k in ("page_table", "context_lens", "query_start", "positions") if t[k] is not None}
    for b in victims:
        for name, tensor in changed.items():
            if not data.draw(st.booleans()):
                continue
            row = tensor[cu[b] : cu[b + 1]] if name == "positions" else tensor[b : b + 1]
            values = data.draw(st.lists(GARBAGE, min_size=1, max_size=4))
            row.copy_(torch.tensor([values[i % len(values)] for i in range(row.numel())]).view(row.shape))
    rows, heads, dim = expected.shape
    buffer = poisoned(rows + 2, heads, dim, dtype=expected.dtype, device=backend.device)
    bound = data.draw(st.sampled_from([problem.max_nodes, 0, 1]))  # a bound below the real count is a caller's mistake
    low = Problem(problem.trees, t, bound, problem.options)
    moved = {k: v.to(backend.device) for k, v in changed.items()}
    out, _ = low.run(backend, out=buffer[1:-1], batch_invariant=True, **moved)
    assert buffer[[0, -1]].isnan().all()
    if bound == problem.max_nodes:
        intact = [n for b in range(batch) if b not in victims for n in range(cu[b], cu[b + 1])]
        assert torch.equal(out[intact], expected[intact])
    assert not out[cu[-1] :].any()


def garbage_offsets(backend: Any, data: Any) -> None:
    """cu_nodes, request_order and mask words of any value: the call returns and stays inside `out`."""
    problem = data.draw(problems(size_of(backend).work < 2**25))
    t, batch = problem.tensors, len(problem.trees)
    offsets = torch.tensor(data.draw(st.lists(GARBAGE, min_size=batch + 1, max_size=batch + 1)), dtype=torch.int32)
    if data.draw(st.booleans()):
        offsets = offsets.sort().values.clamp(0, len(t["q"]))
    order = torch.tensor(data.draw(st.lists(GARBAGE, max_size=5)), dtype=torch.int32)
    rows, heads = t["q"].shape[:2]
    buffer = poisoned(rows + 2, heads, t["v_cache"].shape[3], dtype=t["q"].dtype, device=backend.device)
    given_order = order.to(backend.device) if data.draw(st.booleans()) else None
    problem.run(backend, out=buffer[1:-1], cu_nodes=offsets.to(backend.device), request_order=given_order)
    assert buffer[[0, -1]].isnan().all()


def writes(backend: Any, data: Any) -> None:
    """write_kv with slots of any value: the reference's cache, and no other byte."""
    from specdec_kernels.attention import write_kv

    backend.require("write_kv")
    rng = rng_of("write fuzz", data.draw(st.integers(0, 2**20)))
    pages, page_size, heads = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([F32, BF16, F16]))
    kv_dtype = data.draw(st.sampled_from([dtype, *FP8]))
    layout = data.draw(st.sampled_from(["NHD", "HND"]))
    rows = data.draw(st.integers(0, 8))
    slots = data.draw(st.lists(st.one_of(st.integers(-2, 40), GARBAGE), min_size=rows, max_size=rows, unique=True))
    x = torch.from_numpy(rng.standard_normal((rows, heads, 64)) * 10.0 ** rng.integers(-8, 8, (rows, 1, 1))).to(dtype)
    shape = (pages, page_size, heads, 64) if layout == "NHD" else (pages, heads, page_size, 64)
    caches = [torch.zeros(shape).to(kv_dtype).to(backend.device) for _ in range(2)]
    scale = torch.tensor([2.0 ** int(rng.integers(-3, 3)) for _ in range(data.draw(st.sampled_from([1, heads])))])
    given = {"k_scale": scale.to(backend.device)} if data.draw(st.booleans()) else {}
    name = str(kv_dtype).removeprefix("torch.")
    args = as64(x), np.zeros(shape), np.asarray(slots, dtype=np.int64), name
    want = [ref_kv.write_kv(*args, scale=s, kv_layout=layout) for s in (as64(scale) if given else None, None)]
    mapping = torch.tensor(slots, dtype=torch.int32, device=backend.device)
    write_kv(x.to(backend.device), x.to(backend.device), *caches, mapping, kv_layout=layout, **given, **backend.kwargs)
    assert all(np.array_equal(as64(c), w, equal_nan=True) for c, w in zip(caches, want))


def slots_anywhere(backend: Any, data: Any) -> None:
    """slot_mapping with garbage tables, lengths and offsets: within int32, and -1 where the reference says so."""
    from specdec_kernels.attention import slot_mapping

    backend.require("slot_mapping")
    batch, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    page_size = data.draw(st.sampled_from([1, 3, 16, 2**20, 2**31 - 1]))
    cells = st.one_of(GARBAGE, st.integers(0, 50), st.sampled_from(DEAD_PAGE_IDS))
    table = np.array(data.draw(st.lists(cells, min_size=batch * columns, max_size=batch * columns)), dtype=np.int64)
    table = table.reshape(batch, columns)
    lens = np.array(
        data.draw(st.lists(st.one_of(st.integers(0, 60), GARBAGE), min_size=batch, max_size=batch)), np.int64
    )
    counts = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    cu, total = np.cumsum([0, *counts]), data.draw(st.integers(0, 40))
    int32 = lambda x: torch.tensor(x, dtype=torch.int32, device=backend.device)  # noqa: E731
    run = lambda offsets: slot_mapping(  # noqa: E731
        int32(table), int32(lens), int32(offsets), page_size, total_nodes=total, **backend.kwargs
    )
    assert run(cu).tolist() == ref_kv.slot_mapping(table, lens, cu, page_size, total)
    stray = run(data.draw(st.lists(GARBAGE, min_size=batch + 1, max_size=batch + 1)))
    assert stray.shape == (total,)
    assert (stray >= -1).all()


def short_for(backend: Any) -> settings:
    return SHORT if backend.name in FAST else EMULATED


FUZZ = [well_formed, garbage, garbage_offsets, writes, slots_anywhere]


@pytest.mark.parametrize("body", FUZZ, ids=lambda f: f.__name__)
def test_fuzz(backend, body):
    short_for(backend)(given(st.data())(lambda data: body(backend, data)))()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("body", FUZZ, ids=lambda f: f.__name__)
def test_fuzz_long(backend, body):
    LONG(given(st.data())(lambda data: body(backend, data)))()


def test_inputs_survive_fuzzed_strides(backend):
    @short_for(backend)
    @given(st.data())
    def run(data: Any) -> None:
        problem = data.draw(problems(True))
        oddly_strided(problem, data)
        before = {k: whole(t).clone() for k, t in problem.tensors.items() if t is not None}
        problem.run(backend)
        assert all(torch.equal(whole(problem.tensors[k]), v) for k, v in before.items())

    run()
