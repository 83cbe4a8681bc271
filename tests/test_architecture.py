"""The rules of the house: who imports whom, how long a file may be, where inline PTX may stand."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"tree", "attention", "sampling", "kv", "batching"}
SHARDED = {"sample_sharded", "verify_sharded"}  # of the sampling room, in files of their own
LIMIT = 400
GENERATED: set[str] = set()  # generated data is exempt from the length limit; nothing is yet


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def imports(path: Path) -> set[str]:
    """Absolute names of everything `path` imports, at any depth, except under TYPE_CHECKING."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({node.module} | {f"{node.module}.{alias.name}" for alias in node.names})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def package_imports(path: Path) -> set[str]:
    """First component under specdec_kernels of each own import: {"_ops", "tree", "engine", ...}."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("specdec_kernels.")}


def test_reference_stands_alone():
    for path in tracked("python_ref/*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"specdec_kernels", "torch", "triton", "transformers"}, path
    for path in tracked("specdec_kernels/**.py"):
        assert "python_ref" not in {name.split(".")[0] for name in imports(path)}, path


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_only_ops_and_the_tree(room: str):
    path = ROOT / "specdec_kernels" / f"{room}.py"
    assert path.exists()
    private = {p.stem for p in tracked("specdec_kernels/_*.py")}
    assert package_imports(path) - {"tree"} - private == set(), path


def test_upper_floors_use_public_rooms_only():
    for path in tracked("specdec_kernels/engine/**.py", "specdec_kernels/engine/*.py"):
        assert package_imports(path) <= ROOMS | SHARDED | {"engine"}, path
        assert "torch.ops.specdec" not in path.read_text(), path  # torch's own ops (oneDNN linears) are free
    for floor in ("advisor", "training", "integrations"):
        for path in tracked(f"specdec_kernels/{floor}/*.py"):
            assert package_imports(path) <= ROOMS | {"engine", "_console", floor}, path
    assert package_imports(ROOT / "specdec_kernels/_console.py") == set()  # tables for a terminal, under every floor


def test_triton_rooms_share_one_file():
    for path in tracked("specdec_kernels/_triton/*.py"):
        own = {n.split(".")[2] for n in imports(path) if n.startswith("specdec_kernels._triton.") and n.count(".") > 1}
        room = path.stem.split("_")[0]
        assert own - {n for n in own if n.startswith(f"{room}_")} <= {"rng"}, path  # a long room has several files
        assert package_imports(path) <= {"_triton"}, path


def test_csrc_families_do_not_reach_into_each_other():
    for path in tracked("csrc/**.h", "csrc/**.cpp", "csrc/**.cu", "csrc/**.cuh"):
        family = path.parent.name
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            target = (path.parent / include).resolve()
            if not target.exists():
                target = (ROOT / "csrc" / include).resolve()
            owner = target.parent.name
            assert owner in {family, "common", "csrc"} or include.endswith("tree/tree.h"), (path, include)


def test_inline_ptx_in_one_file():
    for path in tracked("csrc/**.h", "csrc/**.cpp", "csrc/**.cu", "csrc/**.cuh"):
        asm = [line for line in path.read_text().splitlines() if re.search(r"\basm\b", line) and "//" not in line[:3]]
        if path.name not in ("device.cuh", "hopper.cuh"):
            ptx = [line for line in asm if '""' not in line]  # compiler barriers are no PTX
            assert not ptx, (path, ptx)


def test_files_stay_short():
    long = {}
    for path in tracked("*.py", "*.cpp", "*.h", "*.cu", "*.cuh"):
        lines = path.read_text().count("\n")
        if lines > LIMIT and str(path.relative_to(ROOT)) not in GENERATED:
            long[str(path.relative_to(ROOT))] = lines
    assert not long, f"files over {LIMIT} lines tell of a missing room: {long}"


def test_nothing_names_a_machine():
    """No machine path or registry host in tracked text."""
    words = [r"/tm" + r"p/", r"/wor" + r"k/", r"/roo" + r"t/", r"pypi\.or" + "g", r"/op" + r"t/"]
    pattern = re.compile("|".join(words))
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked("*.py", "*.md", "*.cpp", "*.h", "*.cu", "*.cuh", "*.toml", "*.txt", "*.json", "Makefile")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not hits, hits


def test_environment_variables_are_documented():
    known = {"SPECDEC_BACKEND", "SPECDEC_LOG", "SPECDEC_CHECK", "SPECDEC_NVTX", "SPECDEC_BUILD_CUDA"}
    used = set()
    for path in tracked("specdec_kernels/**.py", "specdec_kernels/*.py", "setup.py"):
        used |= set(re.findall(r"environ[^\n]*?[\"'](SPECDEC_[A-Z_]+)", path.read_text()))
    assert used <= known, used - known
