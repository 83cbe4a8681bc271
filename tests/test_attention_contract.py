"""What callers may rely on: untouched inputs, any strides, empty batches, request_order, fakes, torch.compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.attention_suite import FP8, POSITIONAL, Problem, build, draw, rng_of, size_of
from tests.attention_trees import KINDS, Tree, chain, eagle26, random_tree
from tests.conftest import poisoned
from tests.test_attention_mask import every_isa
from tests.test_kv_write import whole

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Skip a backend without the kernel before problems are built for it."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").require("tree_attention")


def everything(backend, batch: int = 3, **options: Any) -> Problem:
    """A problem that uses every optional input at once."""
    rng = rng_of("everything", batch)
    trees = [eagle26(), chain(40), random_tree(9, rng), Tree([], [])][:batch]
    options = {
        "dtype": BF16, "kv_dtype": FP8[0], "scales": "head", "sinks": True, "window": 20, "softcap": 30.0, "mask": True,
        "style": "padded", "layout": "HND", "causal": [False, True, False, False][:batch], "max_nodes": 32, **options,
    }  # fmt: skip
    return build(trees, [50, 7, 64, 0][:batch], rng, **options)


def call(arguments: dict[str, Any], **overrides: Any) -> Any:
    from specdec_kernels.attention import tree_attention

    arguments = {**arguments, **overrides}
    return tree_attention(*[arguments.pop(k) for k in POSITIONAL], **arguments)


def arguments_of(problem: Problem, backend) -> dict[str, Any]:
    backend.require("tree_attention")
    moved = problem.to(backend.device)
    return {**moved.tensors, **moved.options, **backend.kwargs, "max_nodes": moved.max_nodes, "return_lse": True}


NO_MEMORY = """
import resource, torch
from specdec_kernels.attention import tree_attention

def call(q, num_splits):
    caches = [torch.ones(1, 1, 1, 64).expand(1, 2**16, 1, 64)] * 2
    table = torch.zeros(1, 2**14, dtype=torch.int32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([2**30 if num_splits > 1 else 100], [0, len(q)])]
    return tree_attention(q, *caches, table, *ints, None, max_nodes=len(q), num_splits=num_splits)

torch.set_num_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
try:
    call(torch.ones(64, 1, 64), 2**20)  # a million partial results: 18 GB
    raise SystemExit("there was memory")
except MemoryError:
    pass
out = call(torch.ones(64, 1, 64), 1)
torch.testing.assert_close(out, torch.ones(64, 1, 64))
print("sound")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of memory are set as on Linux")
def test_a_call_without_memory_leaves_the_next_one_sound():
    """The CPU op keeps its working memory from call to call: a MemoryError leaves it without size or bytes."""
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "sound\n"), done.stderr[-2000:]


def test_all_options_together(backend):
    problem = everything(backend)
    problem.check(*problem.run(backend))


def test_inputs_stay_bitwise_unchanged(backend):
    """Every byte of every input's storage, dead slots and padding included."""
    for options in ({}, {"dtype": F32, "kv_dtype": F32, "scales": None, "style": "interleaved"}):
        arguments = arguments_of(everything(backend, **options), backend)
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        before = {k: whole(v).clone() for k, v in tensors.items()}
        call(arguments)
        for name, tensor in tensors.items():
            assert torch.equal(whole(tensor), before[name]), f"{name} changed"


def test_writes_stay_inside_out(backend):
    """`out` as a slice of a wider tensor: padding rows, heads and columns around it keep their NaN."""
    problem = build([eagle26(), chain(5)], [30, 1], rng_of("out"), dtype=F32)
    rows = len(problem.tensors["q"])
    buffer = poisoned(rows + 2, 6, 70, device=backend.device)
    view = buffer[1:-1, 1:-1, 3:67]
    out, lse = problem.run(backend, out=view)
    assert out.data_ptr() == view.data_ptr()
    problem.check(out, lse)
    view.zero_()
    assert buffer.isnan().sum() == buffer.numel() - view.numel()
    assert not buffer.nan_to_num(0.0).any()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_values_do_not_depend_on_strides(backend, dtype):
    """The same numbers dense, cut from padded heads, and interleaved: the same bits (on a GPU to rounding: rows that
    are not 16-byte aligned take the kernel without tensor cores)."""
    results = []
    for style in ("dense", "padded", "interleaved"):
        problem = build([eagle26(), chain(70)], [33, 100], rng_of("strides"), dtype=dtype, style=style)
        results.append(problem.run(backend))
    exact = backend.name == "cpu" or dtype == F32
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=0 if exact else 1.6e-2, atol=0 if exact else 2e-3)


def test_layouts_and_page_sizes_agree_bitwise(backend):
    results = []
    for page_size in (1, 16, 64):
        for layout in ("NHD", "HND"):
            rng = rng_of("layouts")
            problem = build([chain(40)], [77], rng, page_size=16, dtype=BF16)
            other = build([chain(40)], [77], rng_of("other"), page_size=page_size, layout=layout, dtype=BF16)
            for name in ("k_cache", "v_cache"):
                pages = problem.tensors["page_table"][0, :8].long()
                other.put(name, 0, problem.tensors[name][pages].flatten(0, 1)[:117])
            other.tensors["q"] = problem.tensors["q"]
            results.append(other.run(backend)[0])
    assert all(torch.equal(results[0], r) for r in results[1:])


# ---- empty things


@pytest.mark.parametrize("rows", [0, 5])
def test_no_requests(backend, rows):
    """B = 0: every row lies behind cu_nodes[B] and is written as 0."""
    problem = build([], [], rng_of("empty"), tail_rows=rows)
    for mask in (problem.tensors["tree_mask"], None):
        out, lse = problem.run(backend, tree_mask=None if mask is None else mask.to(backend.device))
        assert out.shape == (rows, 4, 64)
        assert lse.shape == (rows, 4)
        assert not out.any()


def test_only_empty_requests(backend):
    problem = build([Tree([], [])] * 4, [0, 7, 100, 0], rng_of("no rows"), tail_rows=2)
    out, _ = problem.run(backend)
    assert out.shape == (2, 4, 64)
    assert not out.any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_of_a_padded_bucket(backend, dtype):
    """More rows behind the batch than in it, aligned and not: 0 and -inf, and nothing beside them is touched."""
    problem = build([chain(4), chain(2)], [9, 20], rng_of("bucket"), dtype=dtype, heads=(6, 2), tail_rows=37)
    rows = len(problem.tensors["q"])
    for first in (0, 1):
        wide = poisoned(rows + 1, 7, 67, dtype=dtype, device=backend.device)
        part = wide[:rows, :6, first : first + 64]
        problem.check(*problem.run(backend, out=part))
        part.fill_(float("nan"))
        assert wide.isnan().all()


def test_no_pages_at_all(backend):
    """A cache without a page: rows see nothing, whatever the table says."""
    problem = build([Tree([[], []], [0, 1])], [0], rng_of("no pages"))
    problem.tensors |= {k: torch.empty(0, 16, 2, 64) for k in ("k_cache", "v_cache")}
    for width in (0, 3):
        table = torch.full((1, width), 2147480000, dtype=torch.int32, device=backend.device)
        out, lse = problem.run(backend, page_table=table)
        assert not out.any()
        assert torch.isneginf(lse[:2]).all()


# ---- request_order


def test_request_order_splits_a_batch_into_buckets(backend):
    """Two calls over complementary halves write their own rows of one `out`, in any order."""
    rng = rng_of("order")
    trees = [random_tree(int(n), rng) for n in (3, 30, 1, 17, 9)]
    problem = build(trees, [0, 90, 17, 64, 5], rng, dtype=BF16)
    expected, expected_lse = problem.run(backend, batch_invariant=True)
    out = poisoned(len(expected), 4, 64, dtype=BF16, device=backend.device)
    cu = problem.tensors["cu_nodes"].tolist()
    for order in ([3, 1], [4, 0, 2]):
        index = torch.tensor(order, dtype=torch.int32, device=backend.device)
        before = out.clone()
        _, lse = problem.run(backend, request_order=index, out=out, batch_invariant=True)
        for b in range(5):
            rows = slice(cu[b], cu[b + 1])
            if b in order:
                assert torch.equal(out[rows], expected[rows])
                assert torch.equal(lse[rows], expected_lse[rows])
            else:
                assert torch.equal(out[rows].view(torch.int16), before[rows].view(torch.int16)), "not asked for"
    assert torch.equal(out, expected)
    problem.check(out)


def test_request_order_empty_and_out_of_range(backend):
    """An empty order handles nobody; an index outside the batch is skipped, not followed."""
    problem = build([chain(3), chain(4)], [9, 30], rng_of("bad order"))
    expected, _ = problem.run(backend)
    for order, rows in (([], []), ([1, 2147483647, -1, 2], list(range(3, 7)))):
        index = torch.tensor(order, dtype=torch.int32, device=backend.device)
        out, _ = problem.run(backend, request_order=index)
        assert torch.equal(out[rows], expected[rows])
        rest = [n for n in range(len(out)) if n not in rows]
        assert not out[rest].any(), "a fresh out is 0 where nobody was asked for"


# ---- garbage on the device never crashes and never reaches another request


@pytest.mark.parametrize("fault", ["page_table", "context_lens", "cu_nodes", "query_start", "positions"])
@pytest.mark.parametrize("value", [-1, 2147480000, 2**31 - 1, -(2**31)])
def test_garbage_in_one_request_leaves_the_others_alone(backend, fault, value):
    """Request 1 of 3 carries a garbage value; requests 0 and 2 keep every bit."""
    rng = rng_of("garbage", fault)
    options: dict[str, Any] = {"query_start": [0, 0, 0]} if fault == "query_start" else {}
    options |= {"window": 9} if fault == "positions" else {}
    problem = build([random_tree(12, rng), chain(5), eagle26()], [20, 30, 40], rng, dtype=BF16, **options)
    expected, expected_lse = problem.run(backend, batch_invariant=True)
    tensor = problem.tensors[fault].clone()
    if fault == "page_table":
        tensor[1] = value
    elif fault == "positions":
        tensor[12:17] = value
    elif fault == "cu_nodes":
        tensor[3] = value  # the last offset: requests 0 and 1 keep their rows
    else:
        tensor[1] = value
    out, lse = problem.run(backend, **{fault: tensor.to(backend.device)}, batch_invariant=True)
    keep = list(range(17)) if fault == "cu_nodes" else [*range(12), *range(17, 43)]
    assert torch.equal(out[keep], expected[keep])
    assert torch.equal(lse[keep], expected_lse[keep])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_a_nan_reaches_only_those_who_see_it(backend, dtype, poison):
    """NaN in the K and V of node 5: its own subtree gets it, no other node and no other request does."""
    rng = rng_of("nan")
    tree = random_tree(40, rng)
    problem = build([chain(3), tree, chain(4)], [17, 60, 5], rng, dtype=dtype)
    copies = {k: t if t is None else t.clone() for k, t in problem.tensors.items()}
    poisoned_problem = Problem(problem.trees, copies, problem.max_nodes, problem.options)
    for name in ("k_cache", "v_cache"):
        poisoned_problem.put(name, 1, torch.full((1, 2, 64), poison), first=65)
    sees = [3 + i for i, slots in enumerate(tree.visible) if 5 in slots]
    blind = [n for n in range(47) if n not in sees]
    for isa in every_isa(backend):
        expected, _ = problem.run(backend)
        out, _ = poisoned_problem.run(backend)
        assert torch.equal(out[blind], expected[blind]), isa
        assert not torch.equal(out[sees], expected[sees]), isa


# ---- fakes and torch.compile through the public function


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"style": "dense", "layout": "NHD"}, {"dtype": F32, "kv_dtype": F32}], ids=str)
def test_fake_tensors_have_the_real_shapes(backend, batch, options):
    arguments = arguments_of(everything(backend, batch, **options), backend)
    real = call(arguments)
    with FakeTensorMode() as mode:
        fake = call({k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})
    for f, r in zip(fake, real):
        assert (f.shape, f.dtype, f.stride(), f.device) == (r.shape, r.dtype, r.stride(), r.device)


@pytest.mark.parametrize("style", ["dense", "padded"])
def test_fullgraph_compile_with_changing_batches(backend, style):
    """One compiled function over B = 3, 1, 0, 4, with strided views: same bits as eager, no graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for batch in (3, 1, 0, 4):
        arguments = arguments_of(everything(backend, batch, style=style), backend)
        expected, got = call(arguments), compiled(arguments)
        assert all(torch.equal(a, b) for a, b in zip(expected, got))


def test_compiled_write_then_attend(backend):
    """A step inside one graph: slots, write, attend. The mutation of the caches is seen in order."""
    from specdec_kernels.attention import slot_mapping, tree_attention, write_kv

    for op in ("tree_attention", "slot_mapping", "write_kv"):
        backend.require(op)
    problem = build([chain(4), eagle26()], [9, 20], rng_of("step"), tail_rows=0).to(backend.device)
    t = problem.tensors

    def step(k, v, k_cache, v_cache, table, lens, cu, q, mask):
        slots = slot_mapping(table, lens, cu, 16, total_nodes=30, **backend.kwargs)
        write_kv(k, v, k_cache, v_cache, slots, kv_layout="NHD", **backend.kwargs)
        return tree_attention(q, k_cache, v_cache, table, lens, cu, mask, max_nodes=problem.max_nodes, **backend.kwargs)

    torch._dynamo.reset()
    rest = t["page_table"], t["context_lens"], t["cu_nodes"], t["q"], t["tree_mask"]
    rows = torch.randn(2, 30, 2, 64, device=backend.device)
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = t["k_cache"].clone(), t["v_cache"].clone()
        results.append((run(*rows, *caches, *rest), *(c.nan_to_num(7.0) for c in caches)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not torch.equal(results[0][1], t["k_cache"].nan_to_num(7.0))


def test_a_drawn_sample_under_every_dtype_twice(backend):
    """Public call with and without lse and with `out`: one answer."""
    for dtype in (F32, BF16, F16):
        problem = draw(rng_of("twice", dtype), size_of(backend), dtype=dtype, batch=2, tree="eagle26")
        assert KINDS["eagle26"](rng_of(0)).visible == problem.trees[0].visible
        out, _ = problem.run(backend)
        arguments = arguments_of(problem, backend)
        plain = call(arguments, return_lse=False)
        given = torch.empty_like(plain)
        assert call(arguments, return_lse=False, out=given).data_ptr() == given.data_ptr()
        assert torch.equal(plain, out)
        assert torch.equal(given, out)
