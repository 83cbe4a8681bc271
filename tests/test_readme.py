"""What the README and the docs say is run: code blocks, the support matrix, generated pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate_ops

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# ```python blocks run, each page in one namespace from top to bottom; ```py blocks are fragments and do not
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.name)
def test_code_blocks_run(page: Path):
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, page.name, "exec"), namespace)


def test_generated_pages_are_fresh():
    """The support matrix says "not yet" exactly where an op raises NotImplementedError."""
    result = subprocess.run(
        [sys.executable, "-m", "docs.generate_ops", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_a_stale_build_writes_no_page(monkeypatch: pytest.MonkeyPatch):
    """An op that is written but not compiled here would turn into "not yet"."""
    monkeypatch.setattr(generate_ops, "supports", lambda op: op != "build_tree")
    with pytest.raises(SystemExit, match=r"expected \['build_tree'\].*make build"):
        generate_ops.matrix()


def test_local_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "csrc" / "README.md"]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]*[./][^)#\s]*)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
