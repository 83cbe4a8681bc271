"""`python -m benchmarks.report FOLDER [--base FOLDER] [--out FILE] [--fail]`: the rows of a run as one HTML page.

--base: a stored run to compare with. Times of two runs are not compared, machines have moods: what is compared is each
provider's speed over the base provider of its own block, measured side by side. A ratio that fell by more than both
runs' spread and by more than TOLERANCE is a regression; --fail makes the exit code say so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import read_rows
from benchmarks.page import Cell, page, picture, table
from benchmarks.plot import blocks, draw, label, roofline

TOLERANCE = 0.1


class Change(NamedTuple):
    """A provider's ratio to the base of its block, then and now; spread: relative, of both runs together."""

    family: str
    block: tuple[tuple[str, Any], ...]
    provider: str
    then: float
    now: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.now / self.then

    @property
    def regressed(self) -> bool:
        return self.ratio < 1 - max(TOLERANCE, self.spread)


def spread(row: dict[str, Any]) -> float:
    """Half of p10..p90 over the median."""
    return (row["p90_s"] - row["p10_s"]) / 2 / row["median_s"]


def changes(family: str, rows: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> list[Change]:
    """One for each provider and block that both runs have, but for the base provider itself."""
    now, then, found = blocks(rows), blocks(stored), []
    for block, providers in now.items():
        for name, row in providers.items():
            old = then.get(block, {}).get(name)
            if old is None or row["base_over_own"] == old["base_over_own"] == 1.0:
                continue
            bases = [min(side.values(), key=lambda r: abs(r["base_over_own"] - 1)) for side in (providers, then[block])]
            width = sum(map(spread, (row, old, *bases)))
            found.append(Change(family, block, name, old["base_over_own"], row["base_over_own"], width))
    return found


def described(row: dict[str, Any]) -> list[tuple[str, Any]]:
    facts = row.get("machine", {})
    return [(k, " ".join(v) if isinstance(v, list) else v) for k, v in facts.items()] + [
        (k, row[k]) for k in ("sm_mhz", "mem_mhz", "energy_mj", "throttle", "nvml") if k in row
    ]


def timed(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for block, providers in blocks(rows).items():
        for name, row in providers.items():
            floor = roofline(row)
            notes = [] if row["gated"] else ["no gate"]
            notes += ["noisy"] * row["noisy"]
            lines.append([
                label(block), name, row["median_s"] * 1e3, f"{row['p10_s'] * 1e3:.3g}..{row['p90_s'] * 1e3:.3g}",
                row["base_over_own"], row["median_s"] / floor if floor else "", Cell(", ".join(notes), "bad"),
            ])  # fmt: skip
    return table(["block", "provider", "ms", "p10..p90", "x base", "x roofline", ""], lines) if lines else ""


def other(rows: Sequence[dict[str, Any]]) -> str:
    """Rows without times of their own (engine, policy, advisor), by what they are, one table each."""
    parts: dict[tuple[str, ...], list[list[Any]]] = {}
    for row in rows:
        if "median_s" not in row:
            names = tuple(k for k, v in row.items() if isinstance(v, (int, float, str)) and k != "family")
            parts.setdefault(names, []).append([row[name] for name in names])
    return "".join(table(names, lines) for names, lines in parts.items())


def compared(found: Sequence[Change]) -> str:
    lines = [
        [
            c.family, label(c.block), c.provider, c.then, c.now,
            Cell(f"{c.ratio:.2f}", "bad" if c.regressed else "good" if c.ratio > 1 + max(TOLERANCE, c.spread) else ""),
            f"+-{c.spread:.0%}",
        ]
        for c in sorted(found, key=lambda c: c.ratio)
    ]  # fmt: skip
    return table(["family", "block", "provider", "x base, stored", "x base, now", "now / stored", "spread"], lines)


def report(folder: Path, base: Path | None) -> tuple[str, list[Change]]:
    """(the page, what changed against `base`)"""
    runs = {path.stem: read_rows(path) for path in sorted(folder.glob("*.jsonl"))}
    if not any(runs.values()):
        raise FileNotFoundError(f"report: folder: expected FAMILY.jsonl files with rows, got none in {folder}")
    last = next(rows[-1] for rows in reversed(runs.values()) if rows)
    body = "<h2>Machine</h2>\n" + table(["what", "value"], described(last))
    found: list[Change] = []
    if base is not None:
        for family, rows in runs.items():
            stored = base / f"{family}.jsonl"
            found += changes(family, rows, read_rows(stored) if stored.exists() else [])
        worse = sum(change.regressed for change in found)
        body += f"<h2>Against {base.name}</h2>\n<p>{len(found)} ratios compared, {worse} regressed.</p>\n"
        body += compared(found)
    with tempfile.TemporaryDirectory() as scratch:
        for family, rows in runs.items():
            body += f"<h2>{family}</h2>\n"
            try:
                drawn = draw(family, rows, Path(scratch))
            except ImportError:
                drawn = None
                body += '<p class="dim">No picture: matplotlib is not installed.</p>\n'
            if drawn is not None:
                body += picture(drawn, f"times of {family}, median and p10..p90, with rooflines")
            body += timed(rows) + other(rows)
    return page(f"specdec_kernels: {folder.name}", body), found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of a run: FAMILY.jsonl files")
    parser.add_argument("--base", type=Path, help="folder of a stored run, as benchmarks/results/MACHINE")
    parser.add_argument("--out", type=Path, help="the page (default: FOLDER/report.html)")
    parser.add_argument("--fail", action="store_true", help="exit code 1 if a ratio regressed")
    options = parser.parse_args(argv)
    try:
        text, found = report(options.folder, options.base)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    out = options.out or options.folder / "report.html"
    out.write_text(text)
    worse = [change for change in found if change.regressed]
    for c in worse:
        print(f"regressed: {c.family} {label(c.block)} {c.provider}: {c.then:.2f} -> {c.now:.2f} (x{c.ratio:.2f})")
    print(f"{out}: {len(found)} ratios compared, {len(worse)} regressed" if options.base else out)
    return 1 if worse and options.fail else 0


if __name__ == "__main__":
    sys.exit(main())
