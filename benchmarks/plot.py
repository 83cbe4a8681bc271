"""Pictures of measured rows: `python -m benchmarks.plot ROWS.jsonl... [--where B=8 ...] [--out FOLDER]` writes
FAMILY.svg and FAMILY.png.

One line a block: each provider's median with its p10..p90 range on a logarithmic axis of time, and the block's
roofline as a bar: one read of its bytes at the bandwidth measured beside it or, where the row has it, the arithmetic's
time if that is more (a bound only if reading and arithmetic do not overlap).

    B=8 context=8192     |        o--+--o ours      o---+---o torch
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.common import COLOURS
from benchmarks.harness import read_rows, shape_key

MEASURED = {
    "family", "provider", "median_s", "p10_s", "p90_s", "samples", "rounds", "base_over_own", "gated", "noisy",
    "read_gb_s", "foreign_cpu", "machine", "gb_s", "times_one_read", "read_s", "gemm_s", "exp_s", "sm_mhz", "mem_mhz",
    "energy_mj", "throttle", "nvml",
}  # fmt: skip


def block_of(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What a row's block is: everything in it that was not measured."""
    return tuple((k, v) for k, v in shape_key(row).items() if k not in MEASURED)


def blocks(rows: Sequence[dict[str, Any]]) -> dict[tuple, dict[str, dict[str, Any]]]:
    """Rows by block, in order of their numbers, and provider; of several runs in one file the last counts."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "median_s" in row:
            found.setdefault(block_of(row), {})[row["provider"]] = row
    return dict(sorted(found.items(), key=lambda item: [f"{value:>12}" for _, value in item[0]]))


def roofline(row: dict[str, Any]) -> float | None:
    """Seconds of the block's roofline: one read, or the arithmetic; None if the bytes are unknown."""
    if "read_s" in row:
        return max(row["read_s"], row["gemm_s"] + row["exp_s"])
    return row["median_s"] / row["times_one_read"] if row.get("times_one_read") else None


def label(block: tuple[tuple[str, Any], ...]) -> str:
    return " ".join(f"{v}" if k in ("op", "section", "dtype") else f"{k}={v}" for k, v in block)


def draw(family: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path | None:
    """FAMILY.svg and FAMILY.png in `folder`; None if no row has a time."""
    found = blocks(rows)
    if not found:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name for block in found.values() for name in block})
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": family}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8.5, 1.2 + 0.28 * len(found)))
        for y, (_, block) in enumerate(found.items()):
            floors = [f for row in block.values() if (f := roofline(row)) is not None]
            if floors:
                axes.plot([min(floors) * 1e3] * 2, [y - 0.38, y + 0.38], color="#444444", lw=2)
            for name, row in block.items():
                colour = COLOURS[names.index(name) % len(COLOURS)]
                axes.plot([row["p10_s"] * 1e3, row["p90_s"] * 1e3], [y, y], color=colour, lw=1.2)
                marker = "os^Dv"[names.index(name) // len(COLOURS) % 5]
                axes.plot(row["median_s"] * 1e3, y, marker, color=colour, ms=5)
        for index, name in enumerate(names):
            colour, marker = COLOURS[index % len(COLOURS)], "os^Dv"[index // len(COLOURS) % 5]
            axes.plot([], [], marker, color=colour, label=name)
        axes.plot([], [], color="#444444", lw=2, label="roofline")
        axes.set_xscale("log")
        axes.set_yticks(range(len(found)), [label(block) for block in found])
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_xlabel("ms, median and p10..p90")
        axes.set_title(family, loc="left", fontsize=10)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6 / (1.2 + 0.28 * len(found))), ncols=6, frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{family}.svg", bbox_inches="tight", metadata={"Date": None})
        figure.savefig(folder / f"{family}.png", bbox_inches="tight", dpi=140)
        pyplot.close(figure)
    return folder / f"{family}.svg"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path, help="JSONL files of benchmarks.run")
    parser.add_argument("--where", nargs="+", default=[], metavar="KEY=VALUE", help="only rows with these values")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: beside the rows)")
    options = parser.parse_args(argv)
    if wrong := [pair for pair in options.where if "=" not in pair]:
        parser.error(f"--where: expected KEY=VALUE, got {wrong[0]!r}")
    wanted = dict(pair.split("=", 1) for pair in options.where)
    for path in options.rows:
        rows = [row for row in read_rows(path) if all(str(row.get(key)) == value for key, value in wanted.items())]
        made = draw(path.stem, rows, options.out or path.parent)
        print(made or f"{path}: no timed rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
