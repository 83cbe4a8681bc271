"""Front door of the microbenchmarks: `python -m benchmarks.run [family ...] [--quick] [--out FOLDER]`.

Each family is `benchmarks/bench_<family>.py` with `main(argv) -> int`; it runs in a process of its own, with threads
that sleep instead of spinning, and appends JSONL rows to FOLDER/<family>.jsonl. Failures are listed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FAMILIES = sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family", help=f"any of: {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few shapes, few rounds: does it run and is it right?")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "local", help="folder of the JSONL rows")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 16))
    options = parser.parse_args(argv)
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"family: expected any of {FAMILIES}, got {sorted(unknown)}")
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(options.threads)}
    failed = []
    families = options.families or FAMILIES
    for index, family in enumerate(families, 1):
        print(f"[{index}/{len(families)}] {family}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{family}", "--out", str(options.out / f"{family}.jsonl")]
        start = time.perf_counter()
        if subprocess.run(command + ["--quick"] * options.quick, env=env, cwd=HERE.parent).returncode:
            failed.append(family)
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
