"""`tree_attention` against the float64 reference: every tree, page size, layout, dtype, head shape and option.

One test a value of each axis; the other axes are drawn at random from a seed. `--long` adds seeds and long contexts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_suite import FP8, LARGE, MEDIUM, Size, as64, build, draw, rng_of, size_of
from tests.attention_trees import KINDS, chain, eagle26, random_tree
from tests.test_attention_mask import every_isa

LONG = pytest.mark.long
AXES = {
    "tree": [k for k in KINDS if k != "all_rows_empty"],
    "page_size": LARGE.pages,
    "heads": LARGE.heads,
    "dims": LARGE.head_dims,
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "kv_dtype": FP8,
    "batch": (1, 2, 7, 8, 17),
    "style": ("dense", "padded", "interleaved"),
    "layout": ("NHD", "HND"),
    "context": (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 1024),
    "softcap": (30.0, 50.0, 0.5, 1e4),
    "window": LARGE.windows,
    "sinks": (True,),
    "mask": (False,),
    "share_prefix": (True,),
    "softmax_scale": (0.05, 1.0),
}
CASES = [pytest.param(axis, v, id=f"{axis}={str(v).removeprefix('torch.')}") for axis, vs in AXES.items() for v in vs]


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Skip a backend without the kernel before problems are built for it."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").require("tree_attention")


def fits(size: Size, axis: str, value: object) -> bool:
    known = {"page_size": size.pages, "heads": size.heads, "dims": size.head_dims, "window": size.windows,
             "context": size.contexts}  # fmt: skip
    return axis not in known or value in known[axis]


def solve(backend, size: Size, axis: str, value: object, seed: int) -> None:
    fixed = {"contexts": [value]} if axis == "context" else {axis: value}
    if axis == "kv_dtype":
        fixed["scales"] = ("tensor", "head")[seed % 2]
    problem = draw(rng_of(axis, str(value), seed), size, **fixed)
    out, lse = problem.run(backend)
    problem.check(out, lse)
    assert out.dtype == problem.tensors["q"].dtype
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(("axis", "value"), CASES)
def test_against_float64(backend, axis, value):
    size = size_of(backend)
    if not fits(size, axis, value):
        pytest.skip(f"outside the sizes of backend {backend}")
    solve(backend, size, axis, value, 0)


@LONG
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("axis", AXES)
def test_against_float64_long(backend, axis):
    """Contexts up to 32768, batches up to 128, four seeds a value."""
    size = size_of(backend, long=True)
    for value in AXES[axis]:
        for seed in range(1, 5) if fits(size, axis, value) else ():
            solve(backend, size, axis, value, seed)


LARGE_SHAPES = [(64, None), (1, 8192)]
LONG_SHAPES = [pytest.param(b, c, marks=LONG) for b, c in ((128, None), (8, 8192), (1, 32768), (3, 32768))]


@pytest.mark.parametrize(("batch", "context"), LARGE_SHAPES + LONG_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large(backend, batch, context, dtype):
    if size_of(backend).work < 2**25:
        pytest.skip(f"outside the sizes of backend {backend}")
    fixed = {"contexts": [context] * batch, "tree": "eagle26"} if context else {}
    fixed |= {"heads": (4, 2), "dims": (64, 64)}
    contexts = LARGE.contexts if batch > 64 else MEDIUM.contexts
    size = replace(LARGE, contexts=contexts, max_slots=66, work=2**30 if batch * (context or 99) > 8192 else 2**26)
    problem = draw(rng_of("large", batch, context), size, batch=batch, dtype=dtype, **fixed)
    problem.check(*problem.run(backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_over_earlier_slots(backend, dtype):
    """query_start: a drafter's level asks few questions of all slots before it."""
    rng = rng_of("query_start")
    trees = [eagle26(), chain(7), random_tree(40, rng), chain(1), KINDS["nothing"](rng)]
    problem = build(trees, [70, 0, 5, 16, 3], rng, dtype=dtype, query_start=[13, 6, 39, 0, 0])
    problem.check(*problem.run(backend))


@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e4, 1e6])
def test_softcap_keeps_float32_accuracy(backend, softcap):
    """A large cap makes every score a small part of it: 1 - 2 / (1 + exp(2 x)) would lose the score in rounding."""
    problem = build([eagle26()], [200], rng_of("softcap"), softcap=softcap)
    for isa in every_isa(backend):
        out, lse = problem.run(backend)
        problem.check(out, lse)
        assert abs(as64(out) - problem.reference()[0]).max() < 2e-6, isa


@pytest.mark.parametrize("window", [-1, 1, 9, 63])
def test_few_causal_queries_over_earlier_slots(backend, window):
    options = {"window": window} if window >= 0 else {}
    trees, starts = [chain(26), chain(7), chain(1), chain(140)], [13, 6, 0, 9]
    problem = build(trees, [70, 0, 5, 16], rng_of("query_start", window), mask=False, query_start=starts, **options)
    problem.check(*problem.run(backend))


@pytest.mark.parametrize("window", [-1, 5, 64])
def test_causal_rows_beside_trees(backend, window):
    """causal[b]: mask rows of that request are garbage and it may be longer than the mask is wide."""
    rng = rng_of("causal", window)
    trees = [eagle26(), chain(75), chain(3), random_tree(20, rng)]
    options = {"window": window} if window >= 0 else {}
    causal = [False, True, True, False]
    problem = build(trees, [40, 33, 0, 17], rng, causal=causal, max_nodes=26, **options)
    assert problem.tensors["tree_mask"].shape[1] == 1
    problem.check(*problem.run(backend))


def test_causal_prefill_chunk_after_earlier_slots(backend):
    rng = rng_of("causal query_start")
    problem = build([chain(70), eagle26()], [9, 64], rng, causal=[True, False], query_start=[50, 0], max_nodes=26)
    problem.check(*problem.run(backend))


@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_agree(backend, num_splits, dtype):
    rng = rng_of("splits", num_splits)
    contexts = [300, 0, 129] if size_of(backend).work < 2**25 else [3000, 0, 129]
    problem = build([eagle26(), chain(4), chain(1)], contexts, rng, dtype=dtype)
    problem.check(*problem.run(backend, num_splits=num_splits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits(backend, dtype):
    """Scores of +-524288: a finite mask sentinel or a wrong running maximum shows. One key wins or all tie."""
    rng = rng_of("extreme")
    problem = build([random_tree(34, rng)], [1], rng, heads=(4, 2), dtype=dtype, tail_rows=0, softmax_scale=1.0)
    problem.tensors["q"].fill_(64.0)
    sign = torch.where(torch.arange(35) % 3 == 0, 1.0, -1.0)
    problem.put("k_cache", 0, (sign * 128.0)[:, None, None].expand(-1, 2, 64))
    out, lse = problem.run(backend)
    problem.check(out)
    expected = torch.from_numpy(problem.reference()[1])
    assert (lse.cpu().double() - expected).abs().max() <= 0.0625  # half an ulp of float32 at 524288
    problem.put("k_cache", 0, torch.full((35, 2, 64), -128.0))
    problem.check(problem.run(backend)[0])  # every score is -524288: the plain mean


@pytest.mark.parametrize("dims", [(16, 16), (32, 48), (112, 112), (160, 96), (240, 16)], ids=str)
def test_other_multiples_of_16_on_the_cpu(backend, dims):
    if backend.name.split()[0] != "cpu":
        pytest.skip("small models' head dims are a matter of the CPU op alone")
    for dtype in (torch.float32, torch.bfloat16):
        solve(backend, size_of(backend), "dims", dims, dtype == torch.float32)


def test_every_key_hidden_in_a_chunk(backend):
    """A window behind which whole chunks of the context are hidden, and trees whose rows see nothing at all."""
    rng = rng_of("hidden chunks")
    trees = [KINDS["all_rows_empty"](rng), chain(5), KINDS["all_rows_empty"](rng)]
    problem = build(trees, [200, 400, 0], rng, window=3, page_size=16)
    for splits in (0, 1, 4):
        out, lse = problem.run(backend, num_splits=splits)
        problem.check(out, lse)
    assert torch.isneginf(lse[-9:-3]).all()
