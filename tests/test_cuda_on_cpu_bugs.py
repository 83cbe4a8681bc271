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
from tests.cuda_on_cpu import build
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


def attention_call(num_splits: int = 1) -> Call:
    """Two requests over 208 and 67 keys: four tiles, so that a stage is refilled; 8 nodes x 2 heads fill a row tile."""
    generator = torch.Generator().manual_seed(5)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    nodes, pages = 11, 20
    order = torch.randperm(pages, generator=generator).tolist()
    table = ints([*order[:14], *order[14:], *[-1] * 8]).view(2, 14)
    mask = ints([(1 << (i % 8)) | 1 | (6 if i % 3 else 0) for i in range(nodes)]).view(nodes, 1)
    workspace = torch.zeros(1 << 18, dtype=torch.uint8) if num_splits != 1 else None
    inputs = [values(nodes, 4, 64), values(pages, 16, 2, 64), values(pages, 16, 2, 64), table, ints([200, 64]),
              ints([0, 8, 11]), mask, *[None] * 8, 8, 0.125, 0.0, -1, "NHD", num_splits, False]  # fmt: skip
    return "tree_attention", [*inputs, workspace, poisoned(nodes, 4, 64, dtype=torch.bfloat16), poisoned(nodes, 4)]


def split_call() -> Call:
    return attention_call(2)


def planned_call() -> Call:
    """Splits after the plan that the call makes for itself."""
    return attention_call(0)


def hopper_call(page: int = 16) -> Call:
    """One request of 40 nodes x 2 heads over five and a half tiles: both consumer warpgroups, a ring gone round."""
    generator = torch.Generator().manual_seed(6)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    nodes, pages = 40, 384 // page
    table = torch.randperm(pages, generator=generator).int().view(1, pages)
    mask = torch.tensor([(2 << i) - 1 if i < 32 else -1 for i in range(nodes)]).int()
    words = torch.stack([mask, ints([(1 << max(i - 31, 0)) - 1 for i in range(nodes)])], 1)
    inputs = [values(nodes, 2, 64), values(pages, page, 1, 64), values(pages, page, 1, 64), table,
              ints([310]), ints([0, nodes]), words, *[None] * 8, nodes, 0.125, 0.0, -1, "NHD", 1, False]  # fmt: skip
    return "tree_attention", [*inputs, None, poisoned(nodes, 2, 64, dtype=torch.bfloat16), poisoned(nodes, 2)]


def mapped_call() -> Call:
    """The same in pages of two tiles: the copy engine brings four tiles of context."""
    return hopper_call(128)


def rerank_call() -> Call:
    """Three requests: the block that comes last reads what the others have listed."""
    workspace = torch.zeros(_ops.workspace_size("rerank_tree", requests=3, candidates=12), dtype=torch.uint8)
    inputs = [-torch.arange(12.0) % 4, ints([-1, 0, 0, 1] * 3), ints([0, 4, 8, 12]), ints([3, 2, 4]), False, workspace]
    return "rerank_tree", [*inputs, *(poisoned(n, dtype=torch.int32) for n in (9, 9, 4, 3))]


def expand_call() -> Call:
    """More children than threads."""
    inputs = [-torch.arange(10.0).view(2, 5), -(torch.arange(300.0) % 7).view(2, 5, 30), 4]
    outputs = [poisoned(2, 150), poisoned(2, 4, dtype=torch.int32), poisoned(2, 4)]
    return "expand_tree", [*inputs, *outputs]


def gather_call() -> Call:
    """Rows of three requests, one of which has emitted nothing, and rows behind them."""
    inputs = [torch.arange(72.0).view(9, 8), ints([0, 4, 6, 9]), ints([0, 2, 3, 0, -1, -1, 0, 1, -1]).view(3, 3)]
    return "gather_accepted", [*inputs, ints([3, 0, 2]), poisoned(7, 8), poisoned(4, dtype=torch.int32)]


def plan_call() -> Call:
    """More requests than a block has threads."""
    inputs = [ints([i * 7 % 40 for i in range(150)]), [8, 16, 64]]
    return "plan_buckets", [*inputs, *(poisoned(n, dtype=torch.int32) for n in (150, 4, 151))]


def draft_call() -> Call:
    """A tile and a rest, most logits tied: the list is cut within a value."""
    logits = (torch.arange(8200) * 37 % 11).float().view(1, 8200)
    return "draft_topk", [logits, None, 5, 1.0, 8200, poisoned(1, 5, dtype=torch.int32), poisoned(1, 5), poisoned(1)]


def verify_call() -> Call:
    """Two chains: row blocks, a walk by the last one, and two splits that share the row of the last token."""
    logits = torch.randn(6, 2100, generator=torch.Generator().manual_seed(4))
    tree = [ints([0, 3, 6]), ints([-1, 0, 1] * 2), ints([1, 2, -1] * 2), ints([-1] * 6), ints([0, 0])]
    numbers = [torch.ones(2), None, None, None, torch.tensor([3, 4]), torch.tensor([0, 9]), None]
    workspace = torch.zeros(_ops.workspace_size("verify", requests=2, nodes=6), dtype=torch.uint8)
    inputs = [
        logits,
        ints([0, 7, 9] * 2),
        *tree,
        *numbers,
        *[None] * 17,
        "target_only",
        2100,
        3,
        2,
        "",
        0.3,
        0.09,
        "eager",
    ]
    outputs = [poisoned(*shape, dtype=torch.int32) for shape in ((2, 3), (2,), (2, 3), (2,))]
    return "verify", [*inputs, workspace, *outputs, None]


def plan_attention_call() -> Call:
    """More requests than the planner's block has threads, some of them empty."""
    cu = [0]
    for i in range(300):
        cu.append(cu[-1] + (0, 1, 26, 64)[i * 5 % 4])
    inputs = [ints([i * 977 % 9000 for i in range(300)]), ints(cu), None, 32, 8, 128, 64, -1, 264, False]
    return "plan_tree_attention", [*inputs, poisoned(8 + 2 * 300 + 1, dtype=torch.int32)]


# Shown on every schedule beside the kernels with bugs.
SOUND = (expand_call, gather_call, plan_call, draft_call, plan_attention_call)


@dataclass(frozen=True)
class Planted:
    name: str
    number: int  # of the enumerator in csrc/common/planted.h
    call: Callable[[], Call]
    layer: str
    says: str = ""  # regular expression the report must match
    path: str = "source"  # "ptx": only path B sees it, by the result


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
    Planted(
        "wait_group_off_by_one", 10, attention_call, "report", r"cp\.async destination before its wait.*attention_"
    ),
    Planted("refill_too_early", 11, attention_call, "report", r"race on shared byte.*attention_|in flight.*attention_"),
    Planted("swapped_mma_operands", 12, attention_call, "result", path="ptx"),
    Planted("wrong_ldmatrix_address", 13, attention_call, "result"),
    Planted("ticket_without_fence", 14, split_call, "report", r"race on global byte \d+ of 'workspace'.*of block \d+"),
    Planted("counter_not_reset", 15, split_call, "result"),
    Planted(
        "ticket_without_fence", 14, planned_call, "report", r"race on global byte \d+ of 'workspace'.*of block \d+"
    ),
    Planted("counter_not_reset", 15, planned_call, "result"),
    Planted("ticket_without_fence", 14, rerank_call, "report", r"race on global byte \d+ of 'workspace'.*of block \d+"),
    Planted("counter_not_reset", 15, rerank_call, "result"),
    Planted("ticket_without_fence", 14, verify_call, "report", r"race on global byte \d+ of 'workspace'.*of block"),
    Planted("counter_not_reset", 15, verify_call, "result"),
    Planted("refill_too_early", 11, hopper_call, "report", r"wgmma operand in flight|race on shared.*attention_"),
    Planted(
        "missing_mbarrier_wait", 23, hopper_call, "report", r"wgmma operand (was never written|is the destination of a)"
    ),
    Planted("wrong_parity", 24, hopper_call, "report", r"wgmma operand (was never written|is the destination of a)"),
    Planted(
        "release_before_wait",
        25,
        hopper_call,
        "report",
        r"(wgmma operand in flight|write-after-read race).*attention_load.*attention_hopper",
    ),
    Planted("no_proxy_fence", 26, hopper_call, "report", r"without fence\.proxy\.async.*attention_hopper"),
    Planted("refill_too_early", 11, mapped_call, "report", r"wgmma operand in flight|race on shared.*attention_hopper"),
    Planted(
        "missing_mbarrier_wait", 23, mapped_call, "report", r"wgmma operand (was never written|is the destination of a)"
    ),
    Planted(
        "release_before_wait",
        25,
        mapped_call,
        "report",
        r"(wgmma operand in flight|write-after-read race).*attention_h",
    ),
    Planted("no_proxy_fence", 26, mapped_call, "report", r"without fence\.proxy\.async.*attention_hopper"),
    Planted("short_announcement", 27, mapped_call, "report", r"deadlock: no thread can run; .*attention_hopper"),
    Planted("long_announcement", 28, mapped_call, "report", r"deadlock: no thread can run; .*attention_hopper"),
    Planted("wrong_coordinate", 29, mapped_call, "result"),
    Planted("missing_wait", 17, attention_call, "report", r"before its wait|never waited for"),
    Planted("shift_past_word", 18, tree_call, "result", path="ptx"),
    Planted("uninitialised_shared", 16, tree_call, "report", r"read of uninitialised shared memory.*tree_cuda"),
]


ON_HOPPER = (hopper_call, mapped_call)
# What path B runs in this library: one bug a file, compiled in by nvcc, and the kernel that the bug's call launches.
ON_PATH_B = {
    "attention_bfloat16_cuda": (12, "mma_kernel.*Li16E"),
    "tree_cuda": (18, "build_tree"),
}


def planted_library() -> Library:
    """Every kernel that has a bug to plant, path B of some: one build for all tests that plant."""
    ptx = ()
    if cuda_on_cpu.missing("ptx") is None:
        sources = {path.stem: path for path in build.cuda_sources()}
        ptx = tuple(
            build.Ptx(sources[stem], "80", (f"SPECDEC_PLANTED_BUG={number}",), entries)
            for stem, (number, entries) in ON_PATH_B.items()
        )
    calls = {*SOUND, *(bug.call for bug in BUGS)}
    return cuda_on_cpu.library("planted", ptx=ptx, ops=frozenset(call()[0] for call in calls))


@pytest.fixture(scope="module")
def planted() -> Library:
    return planted_library()


def results_of(op: str, arguments: list[object]) -> list[torch.Tensor]:
    """What the call has written, its workspace aside."""
    schema = getattr(torch.ops.specdec, op).default._schema
    pairs = [(a, v) for a, v in zip(schema.arguments, arguments) if v is not None and a.name != "workspace"]
    return [value for a, value in pairs if a.alias_info is not None and a.alias_info.is_write]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Integers exactly; floats to bfloat16's resolution, NaN (poison) equal to nothing."""
    return torch.equal(a, b) if not a.dtype.is_floating_point else torch.allclose(a.float(), b.float(), atol=0.03)


def wrong(library: Library, call: Callable[[], Call]) -> bool:
    """Run twice on the library, with one workspace, and once on the CPU op; whether any output differs."""
    (op, emulated), (_, again), (_, expected) = call(), call(), call()
    _ops.call(op, None, torch.device("cpu"), *expected)
    for i, argument in enumerate(getattr(torch.ops.specdec, op).default._schema.arguments):
        if argument.name == "workspace":
            again[i] = emulated[i]
    for arguments in (emulated, again):
        cuda_on_cpu.run_op(library, op, *arguments)
        pairs = zip(results_of(op, arguments), results_of(op, expected))
        if not all(close(a, b) for a, b in pairs):
            return True
    return False


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(planted: Library, bug: Planted):
    if bug.path == "ptx":
        if cuda_on_cpu.missing("ptx"):
            pytest.skip("no nvcc")
        planted.emulated_plant(bug.number)
        try:
            assert not wrong(planted, bug.call), "on path A the result does not tell"
        finally:
            planted.emulated_plant(0)
        with planted.configured(path="ptx"):
            assert wrong(planted, bug.call), f"{bug.name} survived"
        return
    planted.emulated_plant(bug.number)
    try:
        with planted.configured(hopper=bug.call in ON_HOPPER):
            if bug.layer == "result":
                assert wrong(planted, bug.call), f"{bug.name} survived"
            else:
                with pytest.raises(EmulationError, match=bug.says):
                    wrong(planted, bug.call)
    finally:
        planted.emulated_plant(0)


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random", "priority"])
def test_sound_kernels_give_no_report(planted: Library, schedule: str, pytestconfig: pytest.Config):
    """The same build without a bug, on every schedule with blocks interleaved: no report, the right result."""
    slow = schedule == "priority" and not pytestconfig.getoption("--long")  # it switches fibers far more often
    for seed in range(1 if slow else 3):
        with planted.configured(schedule=schedule, seed=seed, resident_blocks=3, landing="random", preempt=30):
            for call in {*SOUND, *(bug.call for bug in BUGS)}:
                if call in ON_HOPPER and seed:  # tests/test_attention_hopper.py has more schedules
                    continue
                with planted.configured(hopper=call in ON_HOPPER):
                    assert not wrong(planted, call), (schedule, seed)
