"""Which keys does each query really see? Zero queries make every visible key weigh 1/n, one-hot values name the key.

Random data hides mask faults in the noise of a long context; this probe is exact, and runs for every variant of the
kernel (instruction set, dtype, page size, group, head size, layout) and every width of mask.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator

import pytest
import torch

from specdec_kernels import _ops
from tests.attention_suite import FP8, Problem, build, draw, rng_of, size_of
from tests.attention_trees import KINDS, bernoulli, chain, eagle26, from_parents, permuted, random_tree
from tests.fuzz import FAST

LONG = pytest.mark.long
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Skip a backend without the kernel before problems are built for it."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").require("tree_attention")


def visible_keys(problem: Problem) -> list[set[int]]:
    """Key indices (context first, then slots) every query row must see, window included."""
    window, lens = problem.options.get("window", -1), problem.tensors["context_lens"].tolist()
    rows, visible = [], iter(problem.visible())
    for b, (start, positions) in enumerate(zip(problem.starts(), problem.slot_positions())):
        for i in range(int(start), len(problem.trees[b])):
            near = lambda p, i=i, positions=positions: window < 0 or positions[i] - p < window  # noqa: E731
            rows.append({k for k in range(lens[b]) if near(k)})
            rows[-1] |= {lens[b] + j for j in next(visible) if near(positions[j])}
    return rows


def probe(problem: Problem, backend, **overrides) -> None:
    """Assert that every row sees exactly its keys: out = 2^(kv head) / n where the key is seen, 0 elsewhere."""
    expected = visible_keys(problem)
    used, dim = len(expected), problem.tensors["v_cache"].shape[3]
    kv_heads = problem.tensors["k_cache"].shape[2 if problem.options["kv_layout"] == "NHD" else 1]
    group = problem.tensors["q"].shape[1] // kv_heads
    problem.tensors["q"][:used] = 0
    head_value = 2.0 ** (torch.arange(kv_heads) % 8)
    scale = problem.tensors["v_scale"]
    head_factor = (head_value if scale is None else head_value * scale.cpu()).repeat_interleave(group).double()
    counts = torch.tensor([len(keys) for keys in expected]).double()
    dtype = problem.tensors["q"].dtype
    tolerance = {F32: 1e-6, BF16: 2**-7, F16: 2**-10}[dtype]
    total = max(problem.live_keys(b) for b in range(len(problem.trees)))
    for base in range(0, max(total, 1), dim):
        for b in range(len(problem.trees)):
            one_hot = torch.zeros(problem.live_keys(b), kv_heads, dim)
            for k in range(base, min(base + dim, problem.live_keys(b))):
                one_hot[k, :, k - base] = head_value
            problem.put("v_cache", b, one_hot)
        out, lse = problem.run(backend, **overrides)
        got = out[:used].cpu().double()
        seen = torch.zeros(used, dim, dtype=torch.bool)
        for n, keys in enumerate(expected):
            seen[n, [k - base for k in keys if base <= k < base + dim]] = True
        wrong = (got != 0) != seen[:, None]
        assert not wrong.any(), f"{problem.label}: (row, head, key - {base}) {wrong.nonzero()[:4].tolist()}"
        want = torch.where(seen[:, None], head_factor[None, :, None] / counts.clamp(min=1)[:, None, None], 0.0)
        assert (got - want).abs().le(tolerance * want).all(), f"{problem.label}: weights are not 1/n"
        off = (lse[:used].cpu().double() - counts.log()[:, None]).abs().nan_to_num(0.0)  # -inf - -inf
        assert off.max().item() < 1e-5 if used else True, f"{problem.label}: lse is not log n"
        assert (torch.isneginf(lse[:used].cpu()) == (counts == 0)[:, None]).all()


# ---- instruction sets of the CPU op: the highest is what the machine has, the rest by lowering the limit


def _limit_isa(level: int) -> int:
    library = ctypes.CDLL(str(_ops._PACKAGE / _ops.NATIVE["cpu"]))
    return library.specdec_limit_isa(level)


LEVELS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]


@contextlib.contextmanager
def under_isa(name: str) -> Iterator[bool]:
    """Limit the CPU ops to `name`; yields whether this machine has it."""
    before = _limit_isa(-1)
    try:
        yield _limit_isa(LEVELS.index(name)) == LEVELS.index(name)
    finally:
        _limit_isa(before)


def every_isa(backend) -> Iterator[str]:
    """Loop body once under every instruction set of this machine; once on other backends."""
    if backend.name != "cpu":
        yield "any"
        return
    for name in LEVELS:
        with under_isa(name) as available:
            if available:
                yield name


@pytest.fixture(params=LEVELS)
def isa(request, backend) -> Iterator[str]:
    """Runs a test under every instruction set that this machine has; other backends see the test once."""
    if backend.name != "cpu":
        if request.param != LEVELS[0]:
            pytest.skip("instruction sets are an axis of the CPU op alone")
        yield "any"
        return
    backend.require("tree_attention")
    with under_isa(request.param) as available:
        if not available:
            pytest.skip(f"this CPU has no {request.param}")
        yield request.param


VARIANTS = [
    {"dtype": F32},
    {"dtype": BF16},
    {"dtype": F16},
    {"dtype": BF16, "kv_dtype": FP8[0], "scales": "head"},
    {"dtype": BF16, "kv_dtype": FP8[1], "scales": "tensor"},
    {"dtype": F32, "kv_dtype": FP8[0], "scales": "tensor"},
    {"dtype": F16, "kv_dtype": FP8[1], "scales": "head"},
]
NODES = (1, 7, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100)


def variant_name(variant: dict) -> str:
    return "-".join(str(v).removeprefix("torch.") for v in variant.values())


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_probe_every_variant(backend, isa, variant):
    """Under each instruction set and dtype: every page size, group, head size and width, spread over a few calls.

    The emulated backends see every third width and every third call here; the next test has all widths.
    """
    size, fast = size_of(backend), backend.name.split()[0] in FAST
    widths = NODES if fast else NODES[::3]
    rng = rng_of("probe", isa, variant_name(variant))
    steps = max(len(size.pages), len(size.heads), len(size.head_dims), len(widths))
    for step in range(steps) if fast else range(VARIANTS.index(variant) % 3, steps, 3):
        nodes = [widths[(step + k) % len(widths)] for k in (0, 5)]
        trees = [bernoulli(nodes[0], rng), permuted(random_tree(nodes[1], rng), rng)]
        contexts = [int(rng.integers(0, 150)), (0, 64, 128, 63, 16)[step % 5]]
        turn = lambda values, step=step: values[step % len(values)]  # noqa: E731
        problem = build(
            trees, contexts, rng, heads=turn(size.heads), dims=turn(size.head_dims), page_size=turn(size.pages),
            layout=turn(("NHD", "HND")), style=turn(("dense", "padded", "interleaved")), label=str(step), **variant,
        )  # fmt: skip
        probe(problem, backend)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_probe_every_width(backend, dtype, nodes):
    rng = rng_of("width", nodes)
    for context in (0, 24, 64, 127) if backend.name.split()[0] in FAST else (0, 127):
        probe(build([bernoulli(nodes, rng, diagonal=False)], [context], rng, dtype=dtype, heads=(3, 1)), backend)


@LONG
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_probe_grid_long(backend, variant):
    """Every page size x head shape x head size x width, under every instruction set and dtype."""
    size = size_of(backend, long=True)
    axes = size.pages, size.heads, size.head_dims, (1, 17, 33, 64, 65, 128)
    for _ in every_isa(backend):
        for page_size, heads, dims, nodes in itertools.product(*axes):
            rng = rng_of("grid", page_size, heads, dims, nodes)
            problem = build([bernoulli(nodes, rng)], [int(rng.integers(0, 130))], rng, heads=heads, dims=dims,
                            page_size=page_size, layout=("NHD", "HND")[nodes % 2], **variant)  # fmt: skip
            probe(problem, backend)


@pytest.mark.parametrize("window", [1, 3, 63, 127])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_probe_window_counts_depth_not_slots(backend, dtype, window):
    """Siblings share a position; a window by slot index would drop the earlier of them and keep too much context."""
    rng = rng_of("window", window)
    trees = [eagle26(), KINDS["full5x3"](rng) if size_of(backend).max_slots > 150 else KINDS["star20"](rng), chain(9)]
    for splits in (0, 3):
        probe(build(trees, [130, 2, 64], rng, dtype=dtype, window=window), backend, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 2, 5, 33])
def test_probe_splits(backend, splits):
    rng = rng_of("probe splits", splits)
    trees = [bernoulli(33, rng, empty_rows=True), chain(5), KINDS["all_rows_empty"](rng)]
    probe(build(trees, [310, 64, 0], rng, dtype=BF16), backend, num_splits=splits)


# ---- nothing a query may not see changes a bit of its answer


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_strangers_change_no_bit(backend, isa, dtype):
    """Large values in the K and V of nodes that are no ancestor, and in dead slots, leave the row bitwise the same."""
    rng = rng_of("strangers")
    tree = random_tree(40, rng)
    problem = build([chain(3), tree, chain(4)], [17, 60, 5], rng, dtype=dtype)
    before, lse_before = problem.run(backend)
    for node in (0, 5, 17, 39):
        strangers = sorted(set(range(40)) - set(tree.visible[node]))
        saved = {k: problem.tensors[k].clone() for k in ("k_cache", "v_cache")}
        for j in strangers:
            for name in saved:
                problem.put(name, 1, torch.from_numpy(1000.0 * rng.standard_normal((1, 2, 64))), first=60 + j)
        out, lse = problem.run(backend)
        row = 3 + node
        assert torch.equal(out[row], before[row]), f"node {node} depends on a node that is not its ancestor"
        assert torch.equal(lse[row], lse_before[row])
        others = [*range(3), *range(43, 47)]
        assert torch.equal(out[others], before[others]), "another request changed"
        problem.tensors.update(saved)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_run_to_run_bitwise(backend, dtype, batch_invariant):
    problem = draw(rng_of("run to run"), size_of(backend), dtype=dtype, batch=3)
    first = problem.run(backend, batch_invariant=batch_invariant)
    for _ in range(5):
        again = problem.run(backend, batch_invariant=batch_invariant)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def solo(problem: Problem, b: int, rows: slice) -> Problem:
    """The same request alone in its batch, on the same cache."""
    alone = {k: t[b : b + 1] if k in ("page_table", "context_lens", "query_start", "causal") and t is not None else t
             for k, t in problem.tensors.items()}  # fmt: skip
    alone |= {k: t[rows] for k in ("q", "tree_mask", "positions") if (t := problem.tensors[k]) is not None}
    alone["cu_nodes"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    return Problem([problem.trees[b]], alone, problem.max_nodes, problem.options, problem.label)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_batch_invariant_rows_do_not_depend_on_the_batch(backend, dtype):
    count = 64 if size_of(backend).work >= 2**25 else 5
    rng = rng_of("invariant")
    long_context = 5000 if count == 64 else 150
    trees = [random_tree(int(n), rng) for n in rng.integers(1, 30, count)]
    contexts = [long_context, *rng.integers(0, 150, count - 1).tolist()]
    problem = build(trees, contexts, rng, dtype=dtype, tail_rows=0, max_nodes=64)
    out, lse = problem.run(backend, batch_invariant=True)
    cu = problem.tensors["cu_nodes"].tolist()
    for b in [0, 1, count // 2, count - 1]:
        rows = slice(cu[b], cu[b + 1])
        alone, alone_lse = solo(problem, b, rows).run(backend, batch_invariant=True)
        assert torch.equal(alone, out[rows]), f"request {b} of {count} differs from the same request alone"
        assert torch.equal(alone_lse, lse[rows])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("context", [0, 63, 100, 2040])
def test_batch_invariant_chain_equals_decoding_one_by_one(backend, dtype, context):
    if context > 150 and size_of(backend).work < 2**25:
        pytest.skip(f"outside the sizes of backend {backend}")
    rng = rng_of("decode", context)
    problem = build([chain(20)], [context], rng, dtype=dtype, tail_rows=0)
    out, lse = problem.run(backend, batch_invariant=True)
    for i in range(20):
        step = {**problem.tensors, "q": problem.tensors["q"][i : i + 1], "tree_mask": None}
        step |= {"context_lens": torch.tensor([context + i], dtype=torch.int32)}
        step |= {"cu_nodes": torch.tensor([0, 1], dtype=torch.int32)}
        one, one_lse = Problem([chain(1)], step, 1, problem.options).run(backend, batch_invariant=True)
        assert torch.equal(one[0], out[i]), f"node {i} differs from decoding token {i} alone"
        assert torch.equal(one_lse[0], lse[i])


# ---- the probe and the suite must be able to fail: the same call with the mask every known fault would use


def _corrupt(problem: Problem, fault: str) -> None:
    words = problem.tensors["tree_mask"]
    if fault == "ignored":
        words.fill_(-1)
    elif fault == "off by one word":
        problem.tensors["tree_mask"] = torch.roll(words, 1, dims=1)
    elif fault == "off by one bit":
        problem.tensors["tree_mask"] = words << 1
    elif fault == "bit order":
        bits = (words[..., None] >> torch.arange(31, -1, -1, dtype=torch.int32)) & 1
        weights = torch.tensor([1 << k for k in range(31)] + [-(1 << 31)], dtype=torch.int64)
        problem.tensors["tree_mask"] = (bits.long() * weights).sum(-1).to(torch.int32)
    elif fault == "neighbour's row":
        problem.tensors["tree_mask"] = torch.roll(words, 1, dims=0)
    else:
        assert fault == "window by slot"
        lens, cu = problem.tensors["context_lens"], problem.tensors["cu_nodes"].tolist()
        for b, tree in enumerate(problem.trees):
            problem.tensors["positions"][cu[b] : cu[b + 1]] = lens[b] + torch.arange(len(tree), dtype=torch.int32)


FAULTS = ["ignored", "off by one word", "off by one bit", "bit order", "neighbour's row", "window by slot"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches(backend, fault):
    """Negative control: probe, float64 comparison and invariance each refuse an answer made with a corrupted mask."""
    rng = rng_of("fault")
    window = {"window": 4} if fault == "window by slot" else {}
    problem = build([random_tree(50, rng), eagle26()], [30, 7], rng, dtype=BF16, **window)
    problem.check(*problem.run(backend))
    right = Problem(problem.trees, dict(problem.tensors), problem.max_nodes, problem.options)
    _corrupt(problem, fault)
    with pytest.raises(AssertionError, match="error"):
        right.check(*problem.run(backend))
    right.run = problem.run  # type: ignore[method-assign]  # answers with corrupted tensors, knows what is right
    with pytest.raises(AssertionError, match="row, head, key"):
        probe(right, backend)


def test_the_reference_walks_parents():
    """Bits and parents lead to the same lists, and both to values worked out by hand (case TM-03)."""
    from python_ref import attention as ref

    parents = [-1, 0, 0, 1, 2]
    tree = from_parents(parents)
    assert [ref.words_of_slots(s, 1) for s in tree.visible] == [[1], [3], [5], [11], [21]]
    assert ref.words_of_slots(range(33), 2) == [-1, 1]
    for words, slots in (([-1, 1], list(range(33))), ([1 << 31 - 1, 0], [30]), ([-(1 << 31), 2], [31, 33])):
        assert ref.slots_of_words(words, 64) == slots
    assert ref.slots_of_words([-1], 5) == [0, 1, 2, 3, 4]
