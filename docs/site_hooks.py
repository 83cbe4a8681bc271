"""What mkdocs (`make site`) needs beside docs/: the README as home, and the pictures that pages show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PICTURE = re.compile(r"\.\./benchmarks/results/([\w./-]+\.(?:svg|png))")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=home(ROOT / source)))
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name in sorted(set(PICTURE.findall(page.read_text()))):
            if files.get_file_from_path(f"results/{name}") is None:
                path = ROOT / "benchmarks" / "results" / name
                files.append(File.generated(config, f"results/{name}", abs_src_path=str(path)))
    return files


def home(path: Path) -> str:
    """A page from outside docs/, its links as seen from there."""
    text = re.sub(r"\]\(docs/", "](", path.read_text())
    return re.sub(r"\]\(benchmarks/results/", "](results/", text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return PICTURE.sub(r"results/\1", markdown)
