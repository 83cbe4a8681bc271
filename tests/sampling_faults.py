"""Mutants of the sampling room's CPU ops: one line of the shipped sources changed, compiled into its own namespace."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

from specdec_kernels import _ops
from tests.conftest import Backend

CSRC = Path(__file__).parents[1] / "csrc"
HEADERS = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
"""
PRELUDE = """
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m) _STABLE_TORCH_LIBRARY_IMPL({namespace}, k, m, C10_UID)
"""
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w",
         "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    right: str
    wrong: str


MUTANTS = {
    "residual not clamped": Mutant(
        "acceptance.h", "return d >= 0.0 ? kNegInf :", "if (d > 0.0) return log_p + log(expm1(d));\n  return"
    ),
    "recovered from the target": Mutant(
        "acceptance.h", "return d >= 0.0 ? kNegInf : log_p + log_one_minus_exp(d);", "return log_p;"
    ),
    "wrong sibling weight": Mutant("acceptance.h", "if (log_q > kNegInf) W -= exp(log_q);", ""),
    "sibling scale forgotten": Mutant("acceptance.h", "c += Z / W;", "c = 1.0;"),
    "residual mass left as it was": Mutant("walk_cpu.cpp", "state.Z = Z;", ""),
    "accepts at coin 0 without mass": Mutant(
        "acceptance.h",
        "if (!(log_ratio > kNegInf)) return false;",
        "if (!(log_ratio > kNegInf)) return log_u == kNegInf;",
    ),
    "salt fixed": Mutant("noise.h", "return h ^ (h >> 16);", "return 0;"),
    "step not in the draft key": Mutant("noise.h", "static_cast<uint32_t>(step) * 0x85EBCA77u", "0u"),
    "one word of 24 bits a coin": Mutant(
        "noise.h",
        "double u = (high + (low + 0.5) * kWord) * kWord;",
        "double u = (high >> 8) * 5.9604644775390625e-8;",
    ),
    "no 64-bit tail": Mutant("noise.h", "if (word < kTailWords) {", "if (false) {"),
    "maximum not subtracted": Mutant("row_kernels.h", "max(V::set(w.max)), rate", "max(V::set(0.0f)), rate"),
    "tie budget ignored": Mutant(
        "law.h", "(logit == threshold && id <= last_tie)", "logit == threshold"
    ),
    "top-p of all, not of what top-k kept": Mutant(
        "select_cpu.cpp",
        "for (const auto& candidate : list) total += law.mass_of(candidate.first);",
        "total = row_mass(row, law, kLowest);",
    ),
    "temperature ignored on verified rows": Mutant(
        "verify_rows_cpu.cpp",
        "FilterParams filters = params.sampling.filters(b);",
        "FilterParams filters = params.sampling.filters(b);\n"
        "  if (params.first_child[node] >= 0) filters.temperature = 1.0f;",
    ),
    "duplicates count twice": Mutant("walk_cpu.cpp", "if (twice) continue;", ""),
    "block coin ignores the residual": Mutant(
        "acceptance.h", "return missing == 0.0 ? 1.0 : Z / (Z + missing);", "return 1.0 - missing;"
    ),
    "padded columns count in q": Mutant(
        "verify_args.h", "if (params.draft.valid > params.target.valid) params.draft.valid = params.target.valid;", ""
    ),
    "every ring is taken": Mutant(
        "pick_cpu.h", "ring.log_u < log_weight(ring.id, logit) - bound", "log_weight(ring.id, logit) > kNegInf"
    ),
    "race and second draw share their noise": Mutant(
        "pick_cpu.h", "clocks.purpose = kPurposeRace;", "clocks.purpose = kPurposeEmit;"
    ),
    "race ends at another time": Mutant("race.h", "kRaceEnd = 1024.0", "kRaceEnd = 128.0"),
    "noise of the wrong position": Mutant(
        "walk_cpu.cpp", "p_.sampling.position[b_] + depth, purpose", "p_.sampling.position[b_], purpose"
    ),
}  # fmt: skip


def _depends(source: Path, header: str) -> bool:
    """Whether a file of csrc includes `header`, directly or not."""
    names = re.findall(r'#include "([^"]+)"', source.read_text())
    return any(Path(n).name == header or _depends((source.parent / n).resolve(), header) for n in names)


def _includes(folder: Path) -> list[str]:
    return [f"-I{path}" for path in (folder, *cpp_extension.include_paths())]


class Factory:
    """Compiles mutants in `folder`; files that a mutation cannot reach are compiled once for all of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sources = [*sorted((CSRC / "sampling").glob("*_cpu.cpp")), *sorted((CSRC / "common").glob("*.cpp"))]
        self.plain: dict[Path, Path] = {}
        self.headers = folder / "headers.h"  # torch's, parsed once
        self.headers.write_text(HEADERS)
        subprocess.run(["g++", *FLAGS, *_includes(CSRC), "-x", "c++-header", str(self.headers)], check=True)

    def _compile(self, source: Path, target: Path, prelude: Path) -> Path:
        command = ["g++", *FLAGS, "-include", str(self.headers), "-include", str(prelude)]
        subprocess.run([*command, *_includes(source.parents[1]), "-c", str(source), "-o", str(target)], check=True)
        return target

    def backend(self, name: str) -> Backend:
        namespace = f"specdec_mutant{next(_builds)}"
        root = self.folder / namespace
        shutil.copytree(CSRC / "common", root / "common")
        shutil.copytree(CSRC / "sampling", root / "sampling")
        mutant = MUTANTS.get(name)
        if mutant is not None:
            path = root / "sampling" / mutant.file
            text = path.read_text()
            assert text.count(mutant.right) == 1, f"{name}: the line it changes is not there once"
            path.write_text(text.replace(mutant.right, mutant.wrong))
        prelude = root / "prelude.h"
        prelude.write_text(PRELUDE.format(namespace=namespace))

        def make(source: Path) -> Path:
            ours = root / source.relative_to(CSRC)
            registers = "STABLE_TORCH_LIBRARY_IMPL" in source.read_text()
            touched = mutant is not None and (source.name == mutant.file or _depends(source, mutant.file))
            if registers or touched:
                return self._compile(ours, root / f"{source.stem}.o", prelude)
            if source not in self.plain:
                self.plain[source] = self._compile(source, self.folder / f"{source.stem}.o", prelude)
            return self.plain[source]

        with ThreadPoolExecutor(2) as pool:
            objects = [str(path) for path in pool.map(make, self.sources)]
        library = root / "mutant.so"
        folders = [f"-L{path}" for path in cpp_extension.library_paths()]
        link = ["g++", "-shared", "-Wl,-Bsymbolic", *objects, *folders, "-ltorch_cpu", "-ltorch", "-lc10"]
        subprocess.run([*link, "-o", str(library)], check=True)
        _ops.define_namespace(namespace)
        torch.ops.load_library(str(library))
        _ops.register_backend(namespace, namespace)
        return Backend(f"cpu with {name}", "cpu", namespace)


_builds = itertools.count()
