"""The documentation as a site: every page has its place, and nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import site_hooks

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv" / "tools"
CONFIG = (ROOT / "mkdocs.yml").read_text()


def test_every_page_stands_in_the_navigation():
    listed = re.findall(r": (\w+\.md)$", CONFIG, re.M)
    assert sorted(listed) == sorted([p.name for p in (ROOT / "docs").glob("*.md")] + list(site_hooks.PAGES))


def test_code_of_the_site_is_not_published():
    assert all(path.name in CONFIG for path in (ROOT / "docs").glob("*.py") if path.name != "embed_in_your_engine.py")


def test_the_readmes_links_are_turned(tmp_path):
    (tmp_path / "x.md").write_text("[a](docs/kv.md) ![b](benchmarks/results/m/c.svg)")
    assert site_hooks.home(tmp_path / "x.md") == "[a](kv.md) ![b](results/m/c.svg)"
    shown = site_hooks.on_page_markdown("![b](../benchmarks/results/m/claims/c.svg)", None, None, None)
    assert shown == "![b](results/m/claims/c.svg)"


@pytest.mark.skipif(not (TOOLS / "mkdocs").exists(), reason="no mkdocs here (make site)")
def test_the_site_builds_and_fetches_nothing(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(TOOLS)},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    foreign = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)\s*=\s*["']?(?:https?:)?//""")
    for page in pages:
        assert not foreign.search(page.read_text()), page.name
    styles = sorted((tmp_path / "site").rglob("*.css"))
    assert styles
    for style in styles:
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style.name
    assert "scheduling" in (tmp_path / "site" / "index.html").read_text()
