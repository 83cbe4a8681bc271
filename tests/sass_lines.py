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


def tile_steps(code: list[Instruction]) -> list[tuple[int, int]]:
    """(instructions of the mask, all but products and ldmatrix) from the first to the last product of a tile step.

    The step exists twice in a kernel, masked and not. Both copies have the same products and the same ldmatrix (of
    which one may lie before the first product), so those are left out. Sorted: context first.
    """
    path = CSRC / "attention" / "attention_step.cuh"
    lines = {line for name in ("read_visible", "hide_keys") for line in lines_of_function(path, name)}
    products = [i for i, one in enumerate(code) if one.name.startswith("HMMA")]
    assert products
    assert len(products) % 2 == 0
    half = len(products) // 2
    counts = []
    for part in (products[:half], products[half:]):
        inside = [one for one in code[part[0] : part[-1] + 1] if not one.name.startswith(("HMMA", "LDSM"))]
        counts.append((sum(one.file == path.name and one.line in lines for one in inside), len(inside)))
    (context, plain), (masked, hiding) = sorted(counts)
    before = sum(one.file == path.name and one.line in lines for one in code) - context - masked  # addresses of words
    return [(context, plain), (masked + before, hiding + before)]
