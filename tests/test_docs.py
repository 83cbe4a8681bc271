"""What the troubleshooting page quotes is what the package says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specdec_kernels import _ops

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(p.read_text() for p in [ROOT / "setup.py", *sorted((ROOT / "specdec_kernels").rglob("*.py"))])


@pytest.mark.parametrize(
    "words",
    [
        "is not built; this build has: ",
        "does not load into torch ",
        "(built for the stable ABI of torch >= 2.11): ",
        "backend: native on cuda has code for ",
        "setup: CUDA_HOME: expected one directory, got ",
        "setup: CUDA_HOME: expected a CUDA toolkit with bin/nvcc, got ",
        "_C not built for this Python; the ops library does not need it",
        "needs the package ",
        "SPECDEC_CHECK",
        "SPECDEC_LOG",
        "SPECDEC_BUILD_CUDA",
    ],
)
def test_quoted_messages_are_the_packages_own(words: str):
    assert words in PAGE
    assert words in SOURCES


def test_every_variable_that_is_read_is_in_the_table():
    read = set(re.findall(r"[\"'](SPECDEC_(?!BUILD)[A-Z]+)[\"']", SOURCES))
    assert read == {"SPECDEC_BACKEND", "SPECDEC_LOG", "SPECDEC_CHECK", "SPECDEC_NVTX"}
    for name in read:
        assert f"| `{name}` |" in PAGE


def test_the_map_of_the_engine_has_every_file():
    tables = [line for line in (ROOT / "docs" / "engine.md").read_text().splitlines() if line.startswith("| `")]
    files = {path.name for path in (ROOT / "specdec_kernels" / "engine").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if not any(f"`{name}`" in line for line in tables)} == set()


def test_claims_are_quoted_as_they_were_recorded():
    """README, advisor and training say what the newest runs of the claims with heads say."""
    found = {}
    for name in ("tree_vs_chain", "eagle_vs_medusa", "levers"):
        path = ROOT / "benchmarks" / "results" / "epyc-zen4-2cores" / "claims" / f"{name}.json"
        found[name] = json.loads(path.read_text())["figures"]
    advisor, training, readme = ((ROOT / p).read_text() for p in ("docs/advisor.md", "docs/training.md", "README.md"))
    rows = {name: next(line for line in advisor.splitlines() if line.startswith(f"| `{name}`")) for name in found}
    trees, heads = (found[name]["cells"] for name in ("tree_vs_chain", "eagle_vs_medusa"))

    def both(cell: dict) -> str:
        return f"{cell['tokens_a_step']:.2f} and {cell['speedup']:.2f}x"

    tree, line = trees["dynamic tree/8"], trees["chain/8"]
    assert f"8 nodes: {both(tree).replace(' and', ' tokens and')}, chain {both(line)}" in rows["tree_vs_chain"]
    best = [max(heads[f"{kind}/{n}"]["speedup"] for n in (8, 16)) for kind in ("eagle3", "medusa")]
    assert f"{best[0]:.2f}x and {best[1]:.2f}x" in rows["eagle_vs_medusa"]
    gains = found["levers"]["gains"]
    said = {"prefix mode": "prefix mode", "batch scheduling": "scheduling", "depth": "depth", "draft quality": "draft quality"}  # fmt: skip  # noqa: E501
    words = ", ".join(f"{said[name]} {min(gains[name]):.2f}x" for name in found["levers"]["ranked"])
    assert words in rows["levers"]
    for cell in (tree, line, *(heads[f"{kind}/{n}"] for kind in ("eagle3", "medusa", "mtp") for n in (8, 16))):
        median, total = (f"{cell[key]:.2f}" for key in ("speedup", "speedup_total"))
        assert re.search(rf"\| {cell['tokens_a_step']:.2f} \| {median} \([^)]*\) \| {total} \|", training)
    assert f"**{tree['speedup_total']:.1f} times** plain decoding" in readme


def test_the_page_of_ops_has_the_bounds_of_every_workspace():
    page = (ROOT / "docs" / "ops.md").read_text()
    assert len(_ops._WORKSPACES) == 3
    for op in _ops._WORKSPACES:
        assert f'`workspace_size("{op}", {", ".join(f"{name}=" for name in _ops.workspace_bounds(op))})`' in page
