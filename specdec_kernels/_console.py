"""Output of the command line: rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def rich_console() -> Any:
    """A rich console if this is a terminal and rich is installed, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table; the first column is left-aligned, the others right-aligned."""
    console = rich_console()
    if console is None:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]

        def line(cells: Sequence[str]) -> str:
            padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
            return "  ".join(padded).rstrip()

        print(f"\n{title}\n{line(columns)}\n{'-' * len(line(columns))}", *map(line, rows), sep="\n")
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


class Stream:
    """Text that grows: accepted draft tokens in green, the target's own plain, and on a terminal a live line below."""

    def __init__(self, live: bool = True):
        self.console = rich_console()
        self.live: Any = None
        self._line: Any = None
        self._status = ""
        if self.console is not None and live:
            from rich.live import Live
            from rich.text import Text

            self._line = Text()
            self.live = Live(console=self.console, refresh_per_second=12, transient=False)
            self.live.start()

    def write(self, accepted: str, own: str, status: str = "") -> None:
        """Show the next piece of text; `status` replaces the live line."""
        self._status = status
        if self.live is None:
            print(accepted + own, end="", flush=True)
            return
        from rich.console import Group
        from rich.text import Text

        self._line.append(accepted, style="green").append(own)
        *done, self._line = self._line.split("\n", allow_blank=True)
        for line in done:
            self.live.console.print(line)
        self.live.update(Group(self._line, Text(status, style="dim")))

    def close(self) -> None:
        """End the text; plain output gets the last status as a line on stderr."""
        if self.live is not None:
            self.live.stop()
        else:
            print(flush=True)
            if self._status:
                print(self._status, file=sys.stderr)
