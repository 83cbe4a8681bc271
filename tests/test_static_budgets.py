"""Every CUDA kernel stays within its static budget (tests/budgets.json): registers, spills, shared memory, occupancy.

Figures come from cubins, so they hold on any machine with nvcc; what they mean for speed, only a GPU run can say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import static_report
from benchmarks.static_report import Kernel, budget_of, budgets
from tests import sass_lines
from tests.cuda_on_cpu import build

pytestmark = pytest.mark.skipif(
    build.missing() is not None or build.nvcc() is None or static_report.tools() is None, reason="no nvcc or cuobjdump"
)


def faults(kernel: Kernel, budget: dict) -> list[str]:
    """What of the budget the kernel breaks, in words. Where a variant does not fit, it has no body."""
    found = []
    if kernel.occupancy(budget["threads"], budget["dynamic_shared"])[1] == "absent":
        products = kernel.mix.get("MMA", 0)
        return [f"{products} MMA instructions in a variant that cannot run there"] if products else []
    if kernel.spills:
        found.append(f"{kernel.spills} spill instructions")
    if kernel.registers > budget["registers"]:
        found.append(f"{kernel.registers} registers, budget {budget['registers']}")
    if kernel.static_shared > budget["static_shared"]:
        found.append(f"{kernel.static_shared} bytes of static shared memory, budget {budget['static_shared']}")
    blocks, limit = kernel.occupancy(budget["threads"], budget["dynamic_shared"])
    if blocks < budget["blocks_per_sm"]:
        found.append(f"{blocks} blocks an SM (limited by {limit}), budget {budget['blocks_per_sm']}")
    loop = kernel.main_loop.mix if kernel.main_loop else {}
    places = [(kernel.mix, budget, ""), (loop, budget.get("main_loop", {}), " in the main loop"),
              (kernel.step, budget.get("step", {}), " in a step on a context tile")]  # fmt: skip
    for mix, bounds, where in places:
        for name, least in bounds.get("at_least", {}).items():
            if mix.get(name, 0) < least:
                found.append(f"{mix.get(name, 0)} {name} instructions{where}, budget at least {least}")
        for name, most in bounds.get("at_most", {}).items():
            if mix.get(name, 0) > most:
                found.append(f"{mix.get(name, 0)} {name} instructions{where}, budget at most {most}")
    return found


def on_long(*values: object) -> Any:
    """Parameters of the long suite."""
    return pytest.param(*values, marks=pytest.mark.long)


EVERY_INSTANCE = [on_long(arch, False) for arch in static_report.ARCHS]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "few"), [("80", True), ("90a", True), *EVERY_INSTANCE])
def test_every_kernel_is_within_its_budget(arch: str, few: bool):
    """`few`: the instances that CI compiles, out of the library where that was just built."""
    table, broken = budgets(), []
    library = static_report.built_library() if few else None
    kernels = static_report.read_cubin(library, arch) if library else static_report.report((arch,), few)
    assert len(kernels) >= 2, "the report found no kernels"
    if not few:
        attention = [kernel.name for kernel in kernels if kernel.name.startswith("tree_attention")]
        assert 64 < len(attention) <= 90, f"{len(attention)} instances of tree_attention"
    for kernel in kernels:
        budget = budget_of(kernel.name, table)
        if budget is None:
            broken.append(f"{kernel.name}: no entry in tests/budgets.json ({kernel.registers} registers)")
        else:
            broken += [f"{kernel.name} on sm_{arch}: {fault}" for fault in faults(kernel, budget)]
    assert not broken, "\n".join(broken)


ATTENTION = build.ROOT / "csrc" / "attention" / "attention_bfloat16_cuda.cu"
FLOAT8 = ATTENTION.with_name("attention_bfloat16_float8_cuda.cu")


def attention_code(source: Path, arch: str, few: bool) -> Iterator[tuple[str, int, int, list[sass_lines.Instruction]]]:
    """(name, head dim, rows, instructions) of a file's tensor-core kernels that can run on the architecture."""
    kernels = sass_lines.instructions_of(static_report.build_cubin(source, arch, few))
    code = {name: kernel for name, kernel in kernels.items() if "mma_kernel" in name}
    assert len(code) == (4 if few else 16)
    for name, instructions in code.items():
        head_dim, rows = (int(n) for n in re.findall(r"Li(\d+)E", name)[::2])
        if any(one.name.startswith("HMMA") for one in instructions):
            yield name, head_dim, rows, instructions
        else:
            assert (arch, source, head_dim, rows) == ("80", ATTENTION, 256, 64), name  # 165 KiB do not fit there


@pytest.mark.parametrize("arch", ["80", *map(on_long, ("90a", "100"))])
@pytest.mark.parametrize(
    ("source", "few"),
    [(ATTENTION, True), on_long(ATTENTION, False), on_long(FLOAT8, False)],
    ids=lambda v: getattr(v, "stem", v),
)
def test_context_tiles_hold_no_mask_instruction(arch: str, source: Path, few: bool):
    """Of the two copies of the tile step, one holds no instruction of the mask; the other at most 40 a row tile more.

    A row tile has 16 rows, and a masked tile 64 keys. XL goes twice through a step of 32 keys, and head dim 256 does so
    on context tiles. Where caches are float8 both copies hold two formats, laid out differently: there only the mask's
    own instructions are counted.
    """
    for name, head_dim, rows, instructions in attention_code(source, arch, few):
        row_tiles = rows // 16 if rows <= 32 else rows // 64  # of a warp
        together = 2 if (head_dim, rows) == (256, 64) else 1
        context, masked = sass_lines.tile_steps(instructions, together)
        steps = 2 if (head_dim, rows) == (128, 128) else 1
        assert masked.products == together * context.products, name
        assert context.mask == 0, f"{name}: {context.mask} mask instructions on context tiles"
        assert masked.mask * steps >= 8 * row_tiles, name  # S and M: a warp has 8 scores of a row tile a thread
        more = masked.mask if source == FLOAT8 else max(masked.mask, masked.others - together * context.others)
        more *= steps / row_tiles
        most = 41 if arch == "100" else 40  # there XL of head dim 64 finds shared memory's address once more
        assert more <= most, f"{name}: {more} instructions more a row tile and masked tile"


@pytest.mark.long
def test_context_tiles_of_the_hopper_kernel_hold_no_mask_instruction():
    """Its two copies of the softmax stand one behind the other; one holds the 40 mask instructions of a row tile."""
    kernels = sass_lines.instructions_of(static_report.build_cubin(ATTENTION.with_name("attention_sm90.cu"), "90a"))
    assert len(kernels) == 4
    step = ATTENTION.with_name("attention_step.cuh")
    lines = {line for name in ("read_visible", "hide_keys") for line in sass_lines.lines_of_function(step, name)}
    for name, code in kernels.items():
        mask = [i for i, one in enumerate(code) if one.file == step.name and one.line in lines]
        scores = [i for i, one in enumerate(code) if one.name.startswith("FMNMX") and one.file == step.name]
        assert 32 <= len(mask) <= 40, (name, len(mask))  # a thread has 32 scores of a row tile
        copies = sum(i > mask[0] for i in scores), sum(i <= mask[0] for i in scores)
        assert min(copies) >= 32, (name, copies)


def test_mask_instructions_are_found_where_they_are():
    """Negative control: code with one more of them at either end of the products has them in both copies."""
    kernels = sass_lines.instructions_of(static_report.build_cubin(ATTENTION, "80", few=True))
    code = next(kernel for name, kernel in kernels.items() if "mma_kernel" in name)
    lines = sass_lines.lines_of_function(ATTENTION.with_name("attention_step.cuh"), "hide_keys")
    mask = next(one for one in code if one.file == "attention_step.cuh" and one.line in lines)
    products = [i for i, one in enumerate(code) if one.name.startswith("HMMA")]
    first, last = products[0], products[-1]
    faulty = [*code[: first + 1], mask, *code[first + 1 : last], mask, *code[last:]]
    assert sass_lines.tile_steps(faulty)[0].mask == 1


def test_every_number_has_its_reason():
    for name, budget in budgets().items():
        assert len(budget["reason"]) > 30, name


def test_a_budget_that_is_too_small_is_reported():
    """Negative control: halve a kernel's registers and ask for more blocks than fit."""
    source = next(path for path in build.cuda_sources() if path.stem == "tree_cuda")
    kernels = static_report.read_cubin(static_report.build_cubin(source, "80", few=True), "80")
    kernel = next(k for k in kernels if k.name == "build_tree_kernel")
    budget = dict(budget_of(kernel.name, budgets()) or {}, registers=kernel.registers // 2, blocks_per_sm=99)
    assert len(faults(kernel, budget)) == 2
    assert kernel.main_loop is not None
    budget = dict(budget_of(kernel.name, budgets()) or {}, main_loop={"at_most": {"INT": 0}, "at_least": {"MMA": 1}})
    assert [fault.split(",")[0].split(" ", 1)[1] for fault in faults(kernel, budget)] == [
        "MMA instructions in the main loop", "INT instructions in the main loop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "registers", "static", "threads", "dynamic", "blocks"),
    [
        ("80", 32, 0, 256, 0, 8),  # warps
        ("80", 128, 0, 256, 0, 2),  # registers
        ("86", 40, 0, 128, 0, 12),  # warps of a smaller SM
        ("90a", 64, 0, 128, 72 << 10, 3),  # shared memory
        ("80", 64, 0, 128, 164 << 10, 0),  # more than a block may have
        ("120", 255, 0, 128, 0, 2),
    ],
)
def test_occupancy_known_answers(arch: str, registers: int, static: int, threads: int, dynamic: int, blocks: int):
    """Computed by hand from the limits of one SM."""
    assert Kernel("k", arch, registers, 0, static).occupancy(threads, dynamic)[0] == blocks
