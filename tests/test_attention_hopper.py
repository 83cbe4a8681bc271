"""The Hopper kernel of tree_attention (sm_90a: wgmma, producers and consumers) on the CPU runtime, source and PTX.

Requests of 65 packed rows and more take it where the device is an sm_90. The other kernels' suites are
tests/test_attention*.py; these are the checks of them that go through row tiles of 128.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import static_report
from specdec_kernels.attention import plan_tree_attention
from tests import cuda_on_cpu
from tests import test_attention as against_float64
from tests import test_attention_contract as contract
from tests import test_attention_mask as mask
from tests import test_attention_plan as plans
from tests.attention_suite import Problem, build, rng_of
from tests.attention_trees import bernoulli, chain, eagle26, random_tree
from tests.conftest import Backend
from tests.cuda_on_cpu.library import Library

BF16 = torch.bfloat16
LONG = pytest.mark.long
pytestmark = pytest.mark.skipif(cuda_on_cpu.missing("ptx") is not None, reason="no g++ or no CUDA toolkit")


@pytest.fixture
def library() -> Iterator[Library]:
    """The suite's library as on a Hopper; the test's last launch must be of the kernel in question."""
    loaded = cuda_on_cpu.suite_library()
    with loaded.configured(hopper=True):
        yield loaded
    assert b"hopper_kernel" in loaded.emulated_last_kernel(), "the Hopper kernel did not run"


@pytest.fixture(params=["emulated", "ptx"])
def hopper(request, library: Library) -> Backend:
    return Backend(request.param, "cpu", request.param)


@pytest.mark.parametrize("nodes", [33, 64, pytest.param(65, marks=LONG), pytest.param(100, marks=LONG)])
def test_probe(hopper, nodes):
    """Two and four heads a KV head; row tiles that are full, half empty and almost empty."""
    rng = rng_of("hopper probe", nodes)
    trees = [bernoulli(nodes, rng, diagonal=False, empty_rows=True), chain(5), bernoulli(9, rng)]
    mask.probe(build(trees, [130, 64, 0], rng, dtype=BF16, heads=(4, 1), page_size=16), hopper)


def last_kernel(rows: int, **options: object) -> bytes:
    """What a call of so many packed rows (two heads a KV head) launches on a Hopper."""
    loaded = cuda_on_cpu.suite_library()
    problem = build([chain(rows // 2)], [70], rng_of("hopper choice"),
                    **{"dtype": BF16, "heads": (2, 1), "max_nodes": rows // 2, **options})  # fmt: skip
    with loaded.configured(hopper=True):
        problem.run(Backend("emulated", "cpu", "emulated"))
    return loaded.emulated_last_kernel()


@pytest.mark.parametrize(
    ("rows", "options", "taken"),
    [
        (64, {}, False), (66, {}, True), (66, {"page_size": 5}, True), (256, {"page_size": 64}, True), (300, {}, True),
        (66, {"dtype": torch.float32}, False), (66, {"kv_dtype": torch.float8_e4m3fn}, False),
        (66, {"dims": (80, 80)}, False), (66, {"max_nodes": 32, "causal": [False]}, False),  # benchmarks/gpu_timings.py
    ],
)  # fmt: skip
def test_which_calls_take_it(rows, options, taken):
    """From 65 packed rows on, any page size, 16-bit caches, head dims 64 and 128 (128 is not compiled here)."""
    assert (b"hopper_kernel" in last_kernel(rows, **options)) == taken


@pytest.mark.parametrize(("path", "rows"), [("source", 64), ("ptx", 16)])
def test_row_tiles_are_those_of_the_loaded_code(path, rows):
    """Head dim 256 on an sm_90 that runs sm_80's PTX: a tile of 64 rows has no code, whatever the device can hold."""
    backend = Backend(path, "cpu", "emulated" if path == "source" else "ptx")
    with cuda_on_cpu.suite_library().configured(hopper=True):
        lens, cu = torch.tensor([70], dtype=torch.int32), torch.tensor([0, 26], dtype=torch.int32)
        options = dict(num_q_heads=2, num_kv_heads=1, head_dim=256, max_nodes=26)
        plan = plan_tree_attention(lens, cu, **options, **backend.kwargs)
    assert plan[1] == rows  # kPlanTileRows


def test_built_library_has_it():
    """The sm_90a library beside the one that looks for it by name: four kernels and the function that launches them."""
    found = sorted((cuda_on_cpu.build.ROOT / "specdec_kernels").glob("_cuda_sm90.*so"))
    if not found or static_report.tools() is None:
        pytest.skip("no CUDA library built, or no cuobjdump")
    assert ctypes.CDLL(str(found[0])).specdec_attention_sm90
    names = {kernel.name for kernel in static_report.read_cubin(found[0], "90a")}
    kinds = ("BFloat16, 64", "BFloat16, 128", "Half, 64", "Half, 128")
    few = {"tree_attention_hopper_kernel<BFloat16, 64>"}  # CI
    assert names in (few, {f"tree_attention_hopper_kernel<{kind}>" for kind in kinds})


@pytest.mark.parametrize("workers", [3, pytest.param(40, marks=LONG)])
@pytest.mark.parametrize("nodes", [60, pytest.param(100, marks=LONG)])
def test_planned_calls_are_right(hopper, nodes, workers):
    plans.test_planned_calls_are_right(hopper, nodes, workers)


OPTIONS = [
    {"window": 70}, {"softcap": 30.0, "sinks": True}, {"layout": "HND", "page_size": 5},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(hopper, options):
    rng = rng_of("hopper options", str(options))
    problem = build([random_tree(40, rng), eagle26()], [200, 300], rng, **{"dtype": BF16, **options})
    problem.check(*problem.run(hopper))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_nan_reaches_only_those_who_see_it(hopper, poison):
    contract.test_a_nan_reaches_only_those_who_see_it(hopper, BF16, poison)


@LONG
def test_strangers_change_no_bit(hopper):
    mask.test_strangers_change_no_bit(hopper, "any", BF16)


@LONG
def test_causal_prefill(hopper):
    rng = rng_of("hopper prefill")
    problem = build([chain(140), chain(70)], [9, 64], rng, dtype=BF16, mask=False, query_start=[9, 0])
    problem.check(*problem.run(hopper))
    against_float64.test_causal_rows_beside_trees(hopper, 5)


@pytest.mark.parametrize(
    "schedule", ["random", pytest.param("reverse", marks=LONG), pytest.param("priority", marks=LONG)]
)
@pytest.mark.parametrize("page_size", [16, 128])
def test_bits_do_not_depend_on_the_schedule(hopper, library, schedule, page_size):
    """Producers far ahead, consumers far behind, copies that land whenever they like, blocks that interleave."""
    rng = rng_of("hopper schedule")
    problem = build([random_tree(60, rng), chain(2)], [610, 0], rng, dtype=BF16, max_nodes=60, page_size=page_size)
    planned = plans.under(hopper, problem, 5)
    expected = problem.run(hopper, **planned)
    for seed in range(2):
        with library.configured(schedule=schedule, seed=seed, resident_blocks=3, landing="random", preempt=200):
            again = problem.run(hopper, **planned)
        assert all(torch.equal(a, b) for a, b in zip(again, expected))
        assert not planned["workspace"].any()


# Tiles by tensor maps: pages of 64, 128, 256 keys (docs/attention.md has the rule).


def in_small_pages(problem: Problem) -> Problem:
    """The same keys in pages of 16, dense: nothing of it can be mapped."""
    rows_first = problem.options["kv_layout"] == "NHD"
    tensors = dict(problem.tensors)
    for name in ("k_cache", "v_cache"):
        cache = tensors[name] if rows_first else tensors[name].transpose(1, 2)
        pages, page_size, heads, dim = cache.shape
        tensors[name] = cache.reshape(pages * page_size // 16, 16, heads, dim)
    table = tensors["page_table"].long()[..., None]
    small = torch.where((table >= 0) & (table < pages), table * (page_size // 16) + torch.arange(page_size // 16), -1)
    tensors["page_table"] = small.flatten(1).int()
    return replace(problem, tensors=tensors, options={**problem.options, "kv_layout": "NHD"})


def whole_tiles(problem: Problem) -> int:
    """Tiles of context, over row tiles and heads."""
    kv_heads = problem.tensors["k_cache"].shape[2 if problem.options["kv_layout"] == "NHD" else 1]
    group = problem.tensors["q"].shape[1] // kv_heads
    lens = problem.tensors["context_lens"].tolist()
    return sum(kv_heads * -(-len(tree) * group // 128) * (n // 64) for tree, n in zip(problem.trees, lens))


def run_counted(problem: Problem, hopper: Backend, tiles: int, **options: Any) -> tuple[torch.Tensor, ...]:
    """Runs, and asserts that the copy engine has brought so many tiles: one box each of K and V at head dim 64."""
    library = cuda_on_cpu.suite_library()
    before = library.emulated_tensor_copies()
    result = problem.run(hopper, **options)
    assert library.emulated_tensor_copies() - before == 2 * tiles
    return result


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    integers = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(x.view(integers[x.itemsize]), y.view(integers[y.itemsize])) for x, y in zip(a, b))


MAPPED = [
    {"page_size": 64}, {"page_size": 128, "layout": "HND"}, {"page_size": 128, "apart": True},
    pytest.param({"page_size": 256}, marks=LONG), pytest.param({"page_size": 64, "layout": "HND"}, marks=LONG),
]  # fmt: skip


def apart(problem: Problem) -> None:
    """K and V as halves of one tensor, with a third head that the call does not see."""
    caches = [torch.cat([problem.tensors[name]] * 2, 2)[:, :, :3] for name in ("k_cache", "v_cache")]
    pair = torch.stack(caches, 1)
    pair[:, :, :, 2] = float("nan")
    problem.tensors |= {"k_cache": pair[:, 0, :, :2], "v_cache": pair[:, 1, :, :2]}


@pytest.mark.parametrize("options", MAPPED, ids=str)
def test_mapped_tiles_equal_gathered_ones(hopper, options):
    """Dead slots poisoned, each whole tile mapped and no other: right, and bit for bit as gathered from small pages."""
    rng = rng_of("hopper mapped", str(options))
    options = dict(options)
    strided = options.pop("apart", False)
    trees = [bernoulli(40, rng, diagonal=False, empty_rows=True), chain(70), eagle26()]
    problem = build(trees, [330, 64, 63], rng, dtype=BF16, heads=(4, 2), **options)
    if strided:
        apart(problem)
    result = run_counted(problem, hopper, whole_tiles(problem))
    problem.check(*result)
    assert same_bits(result, run_counted(in_small_pages(problem), hopper, 0))


@pytest.mark.parametrize("page_size", [64, 128])
def test_every_row_sees_its_keys_through_mapped_tiles(hopper, page_size):
    rng = rng_of("hopper mapped probe")
    problem = build([bernoulli(40, rng, diagonal=False), chain(3)], [193, 64], rng, dtype=BF16, page_size=page_size)
    mask.probe(problem, hopper)


def test_tiles_with_a_window_or_a_hole_are_gathered(hopper):
    """And so is what lies behind: only tiles that all rows see in full are mapped."""
    rng = rng_of("hopper mapped hole")
    problem = build([chain(40)], [330], rng, dtype=BF16, heads=(2, 1), page_size=64, window=200)
    result = run_counted(problem, hopper, 2)  # of tiles 2 to 5, the first is cut by the window, the last is the tree's
    problem.check(*result)
    problem = build([chain(40)], [330], rng, dtype=BF16, heads=(2, 1), page_size=64)
    problem.tensors["page_table"][0, 1] = -1
    result = run_counted(problem, hopper, 4)  # of five
    assert same_bits(result, run_counted(in_small_pages(problem), hopper, 0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_values_of_mapped_tiles_are_those_of_gathered_ones(hopper, poison):
    """A context's broken value reaches all rows, a node's those that see it."""
    rng = rng_of("hopper mapped poison")
    problem = build([bernoulli(40, rng)], [140], rng, dtype=BF16, heads=(2, 1), page_size=64)
    problem.put("v_cache", 0, torch.full((1, 1, 64), poison), first=150)
    result = run_counted(problem, hopper, 2)
    sees = torch.tensor([10 in keys for keys in problem.visible()])
    assert torch.equal((~result[0][: len(sees)].isfinite()).flatten(1).any(1), sees)
    problem.put("v_cache", 0, torch.full((1, 1, 64), poison), first=70)
    result = run_counted(problem, hopper, 2)
    assert not result[0][: len(sees)].isfinite().any()
    assert same_bits(result, run_counted(in_small_pages(problem), hopper, 0))


@pytest.mark.parametrize(("units", "tiles"), [(2**31 - 1, 5), (2**31, 0)])
def test_pools_beyond_32_bits(hopper, units, tiles):
    """Two pages 32 GiB of address space apart: the last distance that a tile's coordinate holds, and the next one."""
    rng = rng_of("hopper mapped far")
    problem = build([chain(40)], [330], rng, dtype=BF16, heads=(2, 1), page_size=256)
    near = problem.tensors["k_cache"]
    row = 72  # 16 bytes divide rows and heads, and no larger power of two does
    page = 8 * units - 192 * row  # from the first tile of page 0 to the last of page 1
    no_reserve = 0x4000  # MAP_NORESERVE of Linux on x86-64, which the runtime needs anyway
    memory = mmap.mmap(-1, 2 * (page + 256 * row), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    far = torch.frombuffer(memory, dtype=BF16).as_strided((2, 256, 1, 64), (page, row, 8, 1))
    far.copy_(near[problem.tensors["page_table"][0, :2].long()])
    order = problem.tensors["page_table"][0, :2].long()
    problem.tensors |= {"k_cache": far, "v_cache": problem.tensors["v_cache"][order]}
    problem.tensors["page_table"][0, :2] = torch.tensor([0, 1])
    result = run_counted(problem, hopper, tiles)
    problem.check(*result)
    assert same_bits(result, run_counted(in_small_pages(problem), hopper, 0))
