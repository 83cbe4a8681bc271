"""Command-line words of the advisor that only compute: `speedup` and `choose-drafts`; and `monitoring`, which hands out
the alert rules and the dashboard. Each `main(argv)` returns its exit code; wrong input is one line and exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_kernels.advisor.selection import CostTable, choose_num_drafts
from specdec_kernels.advisor.speedup import (
    StepCosts,
    acceptance_for,
    expected_emitted,
    free_verification,
    optimal_depth,
    printed_speedup,
    speedup_chain,
    verify_curve,
)

WRONG_INPUT = 2


def guarded(name: str, run: Callable[[], int]) -> int:
    """Run a command; what the user got wrong becomes one line on stderr and exit code 2."""
    try:
        return run()
    except (ValueError, TypeError, OSError, ImportError, KeyError, NotImplementedError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return WRONG_INPUT


def _acceptance(text: str) -> float | list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected acceptances in [0, 1], got {text}")
    return values[0] if len(values) == 1 else values


def _verify_times(text: str) -> dict[int, float]:
    try:
        return {int(nodes): float(time) for nodes, time in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TOKENS:TIME,TOKENS:TIME,... got {text}") from None


def speedup_main(argv: Sequence[str] | None = None) -> int:
    """`speedup`: what a chain of drafts gives. Exit code 0: it pays; 1: plain decoding is faster; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="specdec speedup",
        description="Predicted speed-up of a chain of drafts over plain decoding, in plain decode steps.",
        epilog="exit code: 0 it pays, 1 plain decoding is faster, 2 wrong input. "
        "Example: speedup --acceptance 0.7 --drafts 5 --draft-cost 0.1 --json",
    )
    parser.add_argument("--acceptance", type=_acceptance, required=True, help="conditional; one, or one a position")
    parser.add_argument("--drafts", type=int, required=True, help="drafts a step")
    parser.add_argument("--draft-cost", type=float, default=0.1, help="one draft pass (default: %(default)s)")
    parser.add_argument(
        "--verify", type=_verify_times, help="forward times by tokens, e.g. 1:10,6:11.2 (default: free)"
    )
    parser.add_argument("--overhead", type=float, default=0.0, help="sampling, commit, host, a step (default: none)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)

    def run() -> int:
        verify = free_verification if args.verify is None else verify_curve(args.verify)
        costs = StepCosts(args.draft_cost, verify, args.overhead)
        value = speedup_chain(args.acceptance, args.drafts, costs)
        most = args.drafts if args.verify is None else max(args.verify) - 1
        depth, best = optimal_depth(args.acceptance, costs, max_drafts=min(16, max(most, args.drafts)))
        found: dict[str, Any] = {
            "speedup": value,
            "tokens_a_step": expected_emitted(args.acceptance, args.drafts),
            "best_drafts": depth,
            "best_speedup": best,
            "break_even_acceptance": acceptance_for(1.0, args.drafts, costs) if args.drafts else None,
        }
        if isinstance(args.acceptance, float):  # the formula of the text, with the rejection rate where it has it
            found["text_prints"] = printed_speedup(1 - args.acceptance, args.drafts, args.draft_cost)
        code = 0 if value > 1 else 1
        if args.json:
            print(json.dumps(found | {"exit_code": code}, indent=2))
            return code
        print(f"{value:.3f}x plain decoding, {found['tokens_a_step']:.3f} tokens a step")
        print(f"best: {depth} drafts, {best:.3f}x")
        if found["break_even_acceptance"] is not None:
            print(
                f"{args.drafts} drafts break even at a conditional acceptance of {found['break_even_acceptance']:.3f}"
            )
        return code

    return guarded("speedup", run)


def read_costs(path: Path) -> CostTable:
    """{"BATCH": {"verify": {"0": time, "DRAFTS": time, ...}, "draft": time}, ...}, one unit of time throughout."""
    raw = json.loads(path.read_text())
    if not isinstance(raw, Mapping) or not raw:
        raise ValueError(f"--costs: expected batch -> verify, draft, got {type(raw).__name__}")
    try:
        verify = {int(b): {int(k): float(t) for k, t in row["verify"].items()} for b, row in raw.items()}
        draft = {int(b): float(row["draft"]) for b, row in raw.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"--costs: expected batch -> verify (drafts -> time), draft, got {error!r}") from None
    return CostTable(verify, draft)


def choose_main(argv: Sequence[str] | None = None) -> int:
    """`choose-drafts`: how many drafts at a batch size. Exit code 0: some; 1: none pay; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="specdec choose-drafts",
        description="How many drafts a request should get, from measured costs; none where none pay.",
        epilog="exit code: 0 draft, 1 do not draft, 2 wrong input. COSTS: a JSON file "
        '{"BATCH": {"verify": {"0": time, "DRAFTS": time}, "draft": time}}. '
        "Example: choose-drafts costs.json --acceptance 0.5 --batch 64 --json",
    )
    parser.add_argument("costs", type=Path, help="JSON file of measured times")
    parser.add_argument("--acceptance", type=_acceptance, required=True, help="conditional; one, or one a position")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--current", type=int, help="the choice in force: it is kept unless another clearly wins")
    parser.add_argument("--json", action="store_true", help="print the whole choice as JSON")
    args = parser.parse_args(argv)

    def run() -> int:
        choice = choose_num_drafts(read_costs(args.costs), args.acceptance, args.batch, args.current)
        code = 0 if choice.num_drafts else 1
        if args.json:
            times = {str(drafts): time for drafts, time in choice.time_per_token.items()}
            print(json.dumps({"num_drafts": choice.num_drafts, "time_per_token": times, "reason": choice.reason,
                              "exit_code": code}, indent=2))  # fmt: skip
            return code
        print(f"{choice.num_drafts} drafts: {choice.reason}")
        for drafts, time in choice.time_per_token.items():
            print(f"  {drafts:2d} drafts: {time:.4g} a token")
        return code

    return guarded("choose-drafts", run)


def monitoring_main(argv: Sequence[str] | None = None) -> int:
    """`monitoring`: where the alert rules and the dashboard are, or a copy of them."""
    parser = argparse.ArgumentParser(
        prog="specdec monitoring",
        description="The alert rules for Prometheus and the Grafana dashboard that come with the package.",
        epilog="exit code: 0, 2 wrong input. Example: monitoring --write rules --json",
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="copy them there")
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")
    args = parser.parse_args(argv)

    def run() -> int:
        files = sorted(Path(__file__).parents[1].joinpath("monitoring").glob("specdec_*"))
        if args.write is not None:
            args.write.mkdir(parents=True, exist_ok=True)
            for file in files:
                args.write.joinpath(file.name).write_bytes(file.read_bytes())
            files = [args.write / file.name for file in files]
        print(json.dumps([str(file) for file in files]) if args.json else "\n".join(map(str, files)))
        return 0

    return guarded("monitoring", run)
