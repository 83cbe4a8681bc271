"""Side-by-side timing: interleaved rounds, medians with spread, a correctness gate, one JSONL row per provider.

    bench = Bench("attention")
    bench.compare({"B": 8, "context": 8192}, {"ours": f, "torch": g}, gate=check, bytes_read=n)

Providers of one call run in the same rounds, in alternating order, so that a ratio never spans two machine states.
A block whose read bandwidth fell below half of the best seen is measured again (at most twice), then marked noisy.
`Bench(..., resume=True)` keeps blocks that the file has already, from the same machine with as many rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine


@dataclass
class Timing:
    """Seconds of one provider."""

    samples: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def _once(function: Callable[[], Any], calls: int) -> float:
    if torch.cuda.is_available():
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def interleave(
    providers: dict[str, Callable[[], Any]], rounds: int = 30, min_sample: float = 2e-3, budget: float = 20.0
) -> dict[str, Timing]:
    """Time every provider `rounds` times, alternating their order; a sample lasts at least `min_sample` seconds."""
    calls, cost = {}, 0.0
    for name, function in providers.items():
        function()
        single = _once(function, 1)
        calls[name] = max(1, int(min_sample / max(single, 1e-9)))
        cost += single * calls[name]
    rounds = max(5, min(rounds, int(budget / max(cost, 1e-9))))
    timings = {name: Timing() for name in providers}
    order = list(providers)
    for index in range(rounds):
        for name in order if index % 2 == 0 else reversed(order):
            timings[name].samples.append(_once(providers[name], calls[name]))
    return timings


class Bench:
    """Collects rows of one family; `path` (JSONL) is appended to at once, so that a stopped run loses nothing."""

    best_bandwidth = 0.0

    def __init__(
        self, family: str, path: Path | None = None, rounds: int = 30, quiet: bool = False, resume: bool = False
    ):
        self.family, self.path, self.rounds, self.silent = family, path, rounds, quiet
        self.rows: list[dict[str, Any]] = []
        self.stored: list[dict[str, Any]] = []
        if resume and path and path.exists():
            self.stored = read_rows(path)
            whole, _, cut = path.read_text().rpartition("\n")
            if cut:  # rows to come begin on a line of their own
                path.write_text(whole + "\n" * bool(whole))

    def compare(
        self,
        shape: dict[str, Any],
        providers: dict[str, Callable[[], Any]],
        gate: Callable[[], bool] | None = None,
        bytes_read: int = 0,
        base: str | None = None,
    ) -> list[dict[str, Any]]:
        """Measure `providers` side by side. `gate` must return True first; rows without one carry gated=false.

        base: the provider that `base_over_own` refers to (default: the first); above 1 means faster than the base.
        """
        if kept := self._kept(shape, providers):
            self.rows += kept
            print(f"{describe_rows(shape, kept)} (kept)", flush=True)
            return kept
        if gate is not None and not gate():
            raise AssertionError(f"{self.family} {shape}: wrong result, nothing measured")
        timings: dict[str, Timing] = {}
        for _ in range(3):
            before = machine.read_bandwidth()
            with machine.Quiet() as quiet:
                timings = interleave(providers, self.rounds)
            low = min(before, machine.read_bandwidth())
            Bench.best_bandwidth = max(Bench.best_bandwidth, before)
            noisy = low < Bench.best_bandwidth / 2
            if not noisy:
                break
        reference = timings[base or next(iter(providers))].median
        rows = []
        for name, timing in timings.items():
            row = {
                "family": self.family,
                **shape,
                "provider": name,
                "median_s": timing.median,
                "p10_s": timing.quantile(0.1),
                "p90_s": timing.quantile(0.9),
                "samples": len(timing.samples),
                "rounds": self.rounds,
                "base_over_own": reference / timing.median,
                "gated": gate is not None,
                "noisy": noisy,
                "read_gb_s": low,
                "foreign_cpu": round(quiet.foreign, 3),
                "machine": machine.describe(),
                **machine.gpu_state(),
            }
            if bytes_read:
                row["gb_s"] = bytes_read / timing.median / 1e9
                row["times_one_read"] = timing.median / (bytes_read / (low * 1e9))
            rows.append(row)
            if self.path:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as sink:
                    sink.write(json.dumps(row) + "\n")
        self.rows += rows
        if not self.silent:
            print(describe_rows(shape, rows), flush=True)
        return rows

    def _kept(self, shape: dict[str, Any], providers: dict[str, Any]) -> list[dict[str, Any]]:
        """The stored rows of this block, one a provider; [] unless all are there. Numbers with a point in `shape` are
        measured bounds, not part of what the block is."""
        wanted = {"family": self.family, "rounds": self.rounds, **shape_key(shape)}
        found = {}
        for row in self.stored:
            if row.get("machine") == machine.describe() and all(row.get(k) == v for k, v in wanted.items()):
                found[row["provider"]] = row
        return [found[name] for name in providers] if found.keys() >= providers.keys() else []


def shape_key(shape: dict[str, Any]) -> dict[str, Any]:
    """What a block is, without the numbers that were measured for it."""
    return {name: value for name, value in shape.items() if not isinstance(value, float)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, without a last line that a stopped run left unfinished."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def add_options(parser: argparse.ArgumentParser, quick: str = "few shapes: does it run, is it right?") -> None:
    """The options every family has."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    parser.add_argument("--resume", action="store_true", help="keep blocks that --out has already")


def describe_rows(shape: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One line: the shape, then each provider's median, its p10..p90 range and its speed in that of the base."""
    label = " ".join(f"{k}={v}" for k, v in shape.items())
    base = min(rows, key=lambda r: abs(r["base_over_own"] - 1))["provider"]
    cells = [
        f"{r['provider']} {r['median_s'] * 1e3:.3f} ms [p10..p90 {r['p10_s'] * 1e3:.3f}..{r['p90_s'] * 1e3:.3f}]"
        + ("" if r["provider"] == base else f", {r['base_over_own']:.3g} times as fast as {base}")
        for r in rows
    ]
    return f"{label}: " + "; ".join(cells) + (" NOISY" if any(r["noisy"] for r in rows) else "")
