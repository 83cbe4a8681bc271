"""What every claim script shares: options, the table, the plot, the JSON of its figures, and the closing line.

claim = Claim("formula", __doc__, argv)
claim.table("...", ["alpha", "speed-up"], rows)
with claim.plot("...", "alpha", "speed-up") as axes: axes.plot(...)
return claim.conclude(says="2.4x", so="1.96x", figures={...})
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "results" / "local" / "claims"
COLOURS = ["#1f5fa8", "#c8502d", "#3c8d5a", "#7d5ba6", "#8a8a8a"]


def cell(value: Any) -> str:
    """Numbers to three significant places, everything else as it is."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "-" if math.isnan(value) else "inf"
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    return str(value)


class Claim:
    """One claim of the text and what was found. Options: --quick, --out FOLDER, --no-plot; `add` puts in more."""

    def __init__(
        self,
        name: str,
        about: str | None,
        argv: Sequence[str] | None,
        add: Callable[[argparse.ArgumentParser], Any] | None = None,
    ) -> None:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.claims.{name}",
            description=(about or "").splitlines()[0],
            epilog=f"Example: python -m benchmarks.claims.{name} --quick",
        )
        parser.add_argument("--quick", action="store_true", help="fewer points and samples: does it run, is it right?")
        parser.add_argument("--out", type=Path, default=OUT, help="folder of NAME.json, NAME.svg and NAME.png")
        parser.add_argument("--no-plot", action="store_true", help="no pictures (matplotlib is not needed then)")
        if add is not None:
            add(parser)
        self.name, self.options = name, parser.parse_args(argv)
        self.quick: bool = self.options.quick
        self.tables: list[dict[str, Any]] = []

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table (with `rich` where it is installed) and keep it for the JSON."""
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
        texts = [[cell(value) for value in row] for row in rows]
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            widths = [max(len(row[i]) for row in [list(columns), *texts]) for i in range(len(columns))]
            print(f"\n{title}")
            for row in [list(columns), *texts]:
                print("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths)))
            return
        shown = Table(title=title, title_justify="left")
        for column in columns:
            shown.add_column(column, justify="right")
        for row in texts:
            shown.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 120).print(shown)

    @contextlib.contextmanager
    def plot(self, title: str, xlabel: str, ylabel: str) -> Iterator[Any]:
        """Axes of the claim's one picture, in a light style; saved as SVG and PNG on leaving."""
        if self.options.no_plot:
            yield _Nothing()
            return
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        style = {
            "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e6e6e6",
            "axes.edgecolor": "#888888",
            "legend.frameon": False,
            "font.size": 10,
            "svg.hashsalt": self.name,  # one input, one file
        }
        with pyplot.rc_context(style):
            figure, axes = pyplot.subplots(figsize=(7.2, 4.2))
            yield axes
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
            self.options.out.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.options.out / f"{self.name}.svg", bbox_inches="tight", metadata={"Date": None})
            figure.savefig(self.options.out / f"{self.name}.png", bbox_inches="tight", dpi=140)
            pyplot.close(figure)

    def conclude(self, *, says: str, so: str, figures: dict[str, Any]) -> int:
        """Write NAME.json ({claim, says, so, quick, figures, tables}) and print the closing line."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        record = {"claim": self.name, "says": says, "so": so, "quick": self.quick, "figures": figures}
        text = json.dumps(_plain(record | {"tables": self.tables}), indent=1, allow_nan=False)
        (self.options.out / f"{self.name}.json").write_text(text + "\n")
        print(f"the text says {says}; what is so: {so}")
        return 0


class _Nothing:
    """Stands for axes with --no-plot."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _plain(value: Any) -> Any:
    """JSON types; NaN and infinities as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
