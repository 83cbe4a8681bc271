"""SASS instructions with the source lines they come from, read from a cubin by the nvdisasm of Triton's wheel."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks import static_report

CSRC = Path(__file__).parents[1] / "csrc"


@dataclass(frozen=True)
class Instruction:
    name: str  # "HMMA.16816.F32"
    file: str  # innermost source position
    line: int


def instructions_of(cubin: Path) -> dict[str, list[Instruction]]:
    """By mangled kernel name, in the order of the code. The cubin must be compiled with -lineinfo."""
    folder = static_report.tools()
    assert folder is not None
    text = subprocess.run([folder / "nvdisasm", "-g", "-c", cubin], capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    file, line = "", 0
    for row in text.splitlines():
        if found := re.match(r"\s*\.section\s+\.text\.(\w+)", row):
            current = kernels.setdefault(found[1], [])
        elif found := re.search(r'//## File "([^"]+)", line (\d+)', row):
            file, line = Path(found[1]).name, int(found[2])
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", row):
            current.append(Instruction(found[1], file, line))
    return kernels


def lines_of_function(path: Path, name: str) -> range:
    """Line numbers of a function's body: from its name's definition to the closing brace in column 0."""
    lines = path.read_text().splitlines()
    first = next(i for i, text in enumerate(lines) if re.search(rf"\b{name}\(", text) and not text.startswith("  "))
    last = next(i for i in range(first, len(lines)) if lines[i] == "}")
    return range(first + 1, last + 2)


@dataclass(frozen=True)
class StepCopy:
    """A copy of the tile step, from its first product to its last."""

    products: int
    mask: int  # instructions of the mask
    others: int  # all but products and ldmatrix, of which one may lie before the first product


def tile_steps(code: list[Instruction], masked_steps: int = 1) -> tuple[StepCopy, StepCopy]:
    """The step's two copies in a kernel, of context tiles and of masked tiles, which may hold several steps. What
    addresses the masked copy's words before its first product counts as its own."""
    path = CSRC / "attention" / "attention_step.cuh"
    lines = {line for name in ("read_visible", "hide_keys") for line in lines_of_function(path, name)}
    of_mask = lambda one: one.file == path.name and one.line in lines  # noqa: E731
    copies = []
    products = [i for i, one in enumerate(code) if one.name.startswith("HMMA")]
    for part in static_report.step_copies(products, masked_steps):
        inside = [one for one in code[part[0] : part[-1] + 1] if not one.name.startswith(("HMMA", "LDSM"))]
        copies.append(StepCopy(len(part), sum(map(of_mask, inside)), len(inside)))
    context, masked = sorted(copies, key=lambda copy: copy.mask)
    before = sum(map(of_mask, code)) - context.mask - masked.mask
    return context, StepCopy(masked.products, masked.mask + before, masked.others + before)
