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


def mask_instructions(code: list[Instruction]) -> tuple[int, int]:
    """Instructions of `hide_keys` in the copy of the tile step for context tiles, and in the masked one."""
    (context, _), (masked, _) = tile_steps(code)
    return context, masked


def tile_steps(code: list[Instruction]) -> list[tuple[int, int]]:
    """(instructions of `hide_keys`, all instructions) from the first to the last product of a tile step.

    The step exists twice in a kernel, masked and not, with the same products. Sorted: context first.
    """
    path = CSRC / "attention" / "attention_step.cuh"
    lines = lines_of_function(path, "hide_keys")
    products = [i for i, one in enumerate(code) if one.name.startswith("HMMA")]
    assert products
    assert len(products) % 2 == 0
    half = len(products) // 2
    counts = []
    for part in (products[:half], products[half:]):
        inside = code[part[0] : part[-1] + 1]
        counts.append((sum(one.file == path.name and one.line in lines for one in inside), len(inside)))
    total = sum(one.file == path.name and one.line in lines for one in code)
    assert sum(hiding for hiding, _ in counts) == total, "mask instructions outside the tile step"
    return sorted(counts)
