"""The Hopper kernel of tree_attention (sm_90a: wgmma, producers and consumers) on the CPU runtime, source and PTX.

Requests of 65 packed rows and more take it where the device is an sm_90. The other kernels' suites are
tests/test_attention*.py; these are the checks of them that go through row tiles of 128.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from benchmarks import static_report
from tests import cuda_on_cpu
from tests import test_attention as against_float64
from tests import test_attention_contract as contract
from tests import test_attention_mask as mask
from tests import test_attention_plan as plans
from tests.attention_suite import build, rng_of
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
        (66, {"dims": (80, 80)}, False),
    ],
)  # fmt: skip
def test_which_calls_take_it(rows, options, taken):
    """From 65 packed rows on, any page size, 16-bit caches, head dims 64 and 128 (128 is not compiled here)."""
    assert (b"hopper_kernel" in last_kernel(rows, **options)) == taken


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
def test_bits_do_not_depend_on_the_schedule(hopper, library, schedule):
    """Producers far ahead, consumers far behind, copies that land whenever they like, blocks that interleave."""
    rng = rng_of("hopper schedule")
    problem = build([random_tree(60, rng), chain(2)], [610, 0], rng, dtype=BF16, max_nodes=60)
    planned = plans.under(hopper, problem, 5)
    expected = problem.run(hopper, **planned)
    for seed in range(2):
        with library.configured(schedule=schedule, seed=seed, resident_blocks=3, landing="random", preempt=200):
            again = problem.run(hopper, **planned)
        assert all(torch.equal(a, b) for a, b in zip(again, expected))
        assert not planned["workspace"].any()
