"""One HTML file that needs nothing else: tables, pictures as data, light or dark as the reader's system prefers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fdfdfc; --line: #dcdcd8; --soft: #f2f2ef; --bad: #b3261e;
        --good: #2e7d4f; --dim: #6b6b68; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e1; --paper: #17181a; --line: #3a3b3e; --soft: #212326; --bad: #ff8a80; --good: #7fd1a0;
          --dim: #9b9b98; }
  img.plot { filter: invert(0.91) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 74rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 0.8rem 0; display: block; overflow-x: auto;
        font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--soft); font-weight: 600; } td.number { text-align: right; white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); } .dim { color: var(--dim); }
img.plot { max-width: 100%; }
"""


class Cell:
    """Text of a table cell with one of the style's classes: "bad", "good" or "dim"."""

    def __init__(self, text: Any, kind: str):
        self.text, self.kind = text, kind


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table; numbers stand on the right, floats with three significant places."""

    def cell(value: Any) -> str:
        kind = ""
        if isinstance(value, Cell):
            value, kind = value.text, value.kind
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)
        classes = " ".join(name for name in ("number" if number else "", kind) if name)
        return f'<td class="{classes}">{escape(shown)}</td>' if classes else f"<td>{escape(shown)}</td>"

    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"


def picture(path: Path, about: str) -> str:
    """An SVG or PNG file inside the page."""
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img class="plot" alt="{escape(about)}" src="data:image/{kind};base64,{data}"></p>\n'


def page(title: str, body: str) -> str:
    """The whole file."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}\n<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}</body></html>\n'  # noqa: E501
