"""Planted bugs: each is compiled into a shipped kernel, and each must be caught by the layer this table names.

Layers: "report" is what the checks say while the kernel runs; "result" is the comparison with the CPU op (outputs
are poisoned before). The unplanted kernels run the very same cases and must give no report and the right result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from specdec_kernels import _ops
from tests import cuda_on_cpu
from tests.conftest import poisoned
from tests.cuda_on_cpu.library import EmulationError, Library

pytestmark = pytest.mark.skipif(cuda_on_cpu.missing("emulated") is not None, reason="no g++ or CUDA headers")

Call = tuple[str, list[object]]  # op, arguments with poisoned outputs last


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tree_call(tail: int = 0) -> Call:
    """Two requests of 40 and 3 nodes: two warp steps, siblings on both sides of a step, optionally rows behind them."""
    parents = [-1] + [max(0, i - 1 - i % 3) for i in range(1, 40)] + [-1, 0, 0] + [0] * tail
    inputs = [ints(parents), ints([0, 40, 43]), ints([5, 9]), 40, 39]
    nodes = len(parents)
    outputs = [poisoned(*shape, dtype=torch.int32) for shape in [(nodes,), (nodes, 2), *[(nodes,)] * 4, (2,)]]
    return "build_tree", [*inputs, *outputs]


def chain_call() -> Call:
    """Four chains of which the third does not fit: the rows left matter behind it."""
    nodes = 20
    outputs = [poisoned(*shape, dtype=torch.int32) for shape in [(nodes,), (5,), (nodes, 1), *[(nodes,)] * 4, (4,)]]
    return "chain_tree", [ints([7, 5, 9, 3]), ints([1, 2, 3, 4]), 16, *outputs]


@dataclass(frozen=True)
class Planted:
    name: str
    number: int  # of the enumerator in csrc/common/planted.h
    call: Callable[[], Call]
    layer: str
    says: str = ""  # regular expression the report must match


BUGS = [
    Planted(
        "no_barrier_before_read", 1, tree_call, "report", r"race on shared byte.* at tree_cuda\.cu:\d+.*vs.*tree_cuda"
    ),
    Planted(
        "no_barrier_before_reuse",
        2,
        chain_call,
        "report",
        r"(read-after-write|write-after-read) race on shared.*reduce\.cuh",
    ),
    Planted("divergent_barrier", 3, tree_call, "report", r"divergent barrier: tree_cuda\.cu:\d+ meets tree_cuda"),
    Planted("divergent_shuffle", 4, tree_call, "report", r"divergent warp collective: lane \d+ at tree_cuda"),
    Planted("no_syncwarp", 5, tree_call, "report", r"read-after-write race on (shared|global) byte.*tree_cuda"),
    Planted("shared_out_of_bounds", 6, tree_call, "report", r"outside every shared object.*tree_cuda\.cu:\d+"),
    Planted("global_out_of_bounds", 7, tree_call, "report", r"0 bytes past the end of 'parents'\) at tree_cuda"),
    Planted(
        "block_race", 8, lambda: tree_call(4), "report", r"write-write race on global byte \d+ of '\w+'.*of block 1"
    ),
    Planted("uninitialised_output", 9, tree_call, "result"),
    Planted("uninitialised_shared", 16, tree_call, "report", r"read of uninitialised shared memory.*tree_cuda"),
]


@pytest.fixture(scope="module")
def planted() -> Library:
    return cuda_on_cpu.library("planted")


def outputs_of(op: str, arguments: list[object]) -> list[torch.Tensor]:
    schema = getattr(torch.ops.specdec, op).default._schema
    pairs = zip(schema.arguments, arguments)
    return [value for a, value in pairs if a.alias_info is not None and a.alias_info.is_write]


def wrong(library: Library, call: Callable[[], Call], tolerance: float = 0.0) -> bool:
    """Run on the library and on the CPU op; whether any output differs. Reports propagate."""
    (op, emulated), (_, expected) = call(), call()
    cuda_on_cpu.run_op(library, op, *emulated)
    _ops.call(op, None, torch.device("cpu"), *expected)
    return not all(torch.equal(a, b) for a, b in zip(outputs_of(op, emulated), outputs_of(op, expected)))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(planted: Library, bug: Planted):
    planted.emulated_plant(bug.number)
    try:
        if bug.layer == "result":
            assert wrong(planted, bug.call), f"{bug.name} survived"
        else:
            with pytest.raises(EmulationError, match=bug.says):
                wrong(planted, bug.call)
    finally:
        planted.emulated_plant(0)


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random", "priority"])
def test_sound_kernels_give_no_report(planted: Library, schedule: str):
    """The same build without a bug, on every schedule with blocks interleaved: no report, the right result."""
    for seed in range(3):
        with planted.configured(schedule=schedule, seed=seed, resident_blocks=3, landing="random", preempt=30):
            for call in {bug.call for bug in BUGS}:
                assert not wrong(planted, call), (schedule, seed)
