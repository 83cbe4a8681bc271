"""Front door of the microbenchmarks: `python -m benchmarks.run [family ...] [--quick] [--resume] [--out FOLDER]`.

Each family is `benchmarks/bench_<family>.py` with `main(argv) -> int`; it runs in a process of its own, with threads
that sleep instead of spinning, and appends JSONL rows to FOLDER/<family>.jsonl. Failures are listed at the end, and
FOLDER/report.html shows what there is (`benchmarks/report.py`; --base compares with a stored run).

A stopped run goes on with --resume: families that ended well with the same options are left out, and those on
`benchmarks/harness.py` keep the blocks that they have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FAMILIES = sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))
BY_BLOCKS = ("attention", "batching", "kv", "sampling", "tree")  # those that take --resume themselves
STATE = "run.json"  # {family: {"options": ..., "seconds": ...}} of what ended well


def bar(done: int, total: int, width: int = 24) -> str:
    """[######------------------] of so many families."""
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def expected(families: list[str], state: dict[str, dict]) -> str:
    """What the families that are left took last time; "" if one of them has not been run yet."""
    known = [state[family]["seconds"] for family in families if family in state]
    return f", about {sum(known):.0f} s left" if known and len(known) == len(families) else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family", help=f"any of: {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few shapes, few rounds: does it run and is it right?")
    parser.add_argument("--resume", action="store_true", help="go on where a run into the same folder was stopped")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "local", help="folder of the JSONL rows")
    parser.add_argument("--base", type=Path, help="folder of a stored run: ratios against it, in the report")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 16))
    options = parser.parse_args(argv)
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"family: expected any of {FAMILIES}, got {sorted(unknown)}")
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(options.threads)}
    from benchmarks import machine  # torch, which --help can do without

    described = ", ".join(f"{name} {value}" for name, value in machine.describe().items() if name != "threads")
    print(f"{described}, threads {options.threads} (--threads)", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path, given = options.out / STATE, {"quick": options.quick, "threads": options.threads}
    state: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
    families, failed = options.families or FAMILIES, []
    if options.resume:
        ended = [family for family in families if state.get(family, {}).get("options") == given]
        families = [family for family in families if family not in ended]
        print(f"kept: {', '.join(ended) or 'nothing'}", flush=True)
    for index, family in enumerate(families):
        print(f"{bar(index, len(families))} {family}{expected(families[index:], state)}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{family}", "--out", str(options.out / f"{family}.jsonl")]
        command += ["--quick"] * options.quick + ["--resume"] * (options.resume and family in BY_BLOCKS)
        start = time.perf_counter()
        if subprocess.run(command, env=env, cwd=HERE.parent).returncode:
            failed.append(family)
            continue
        state[family] = {"options": given, "seconds": round(time.perf_counter() - start, 1)}
        path.write_text(json.dumps(state, indent=1) + "\n")
    print(f"{bar(len(families), len(families))} done", flush=True)
    if list(options.out.glob("*.jsonl")):
        from benchmarks import report

        report.main([str(options.out)] + (["--base", str(options.base)] if options.base else []))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
