"""All claims by one command: `python -m benchmarks.claims [name ...] [--quick] [--resume] [--out FOLDER]`.

Each claim runs in a process of its own and leaves NAME.json and NAME.svg in FOLDER; at the end FOLDER/claims.html sets
"what the text says" beside "what is so", in the order of the text, with tables and pictures. What nobody has measured
yet stands there as such.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.common import OUT, cell
from benchmarks.page import Cell, page, picture, table

HERE = Path(__file__).parent
# The text's claims in its order, and the scripts that measure them; none, or none of that name here: not measured yet.
TEXT = (
    ("the speed-up is at most (1-q^(g+1))/((1-q)(1+c g)), q the rejection rate: 2.4x at g=5, c=.1, q=.3", ["formula"]),
    ("accepted length 3.5 at 70 % and g=5", ["accepted_length"]),
    ("trees give 4.8 and 2.7x where a chain gives 2.0x, at equal acceptance", ["tree", "tree_vs_chain"]),
    ("acceptance under 65 % gives under 1.3x; under 70 % speculation gets rolled back", ["threshold"]),
    ("the prefix hit rate falls from 85 % to 62 % with speculation; soft pages restore 78 %", ["prefix_cache"]),
    ("utilisation .95 for chains, .71 for trees, .85 with look-ahead grouping; 25 % padding at width 64",
     ["padding", "grouping"]),
    ("rejection sampling gives NaN at extreme ratios: clamp, or the log domain", ["stability"]),
    ("acceptance must be token-weighted", ["weighting"]),
    ("a draft batch of 1 to 4 cuts draft time by 35 %, saturated beyond 8", ["draft_batch"]),
    ("a fixed 10 % of memory for drafts wastes it; a dynamic pool lifts its use from 65 % to 82 %", ["memory_pool"]),
    ("target weights drift: acceptance 78 to 55 % in five days, distillation restores it for 3 %", ["distillation"]),
    ("depth 4 to 6 adds .8 tokens for 18 % cost, best above 70 %", ["depth"]),
    ("acceptance from 75 to 60 % doubles P99", ["p99"]),
    ("EAGLE-3 at c=.05 reaches 3.2x", ["eagle3_cost"]),
    ("long prompts favour trees, middle ones chains, short ones gain nothing", ["prompt_length"]),
    ("EAGLE-2 beats Medusa by .4x", ["eagle_vs_medusa"]),
    ("levers in order: draft quality, depth, prefix mode, batch scheduling", ["levers"]),
    ("a dense draft for a mixture-of-experts target falls under 50 %", ["moe"]),
)  # fmt: skip
CLAIMS = [name for _, names in TEXT for name in names if (HERE / f"{name}.py").exists()]


def record(folder: Path, name: str) -> dict[str, Any] | None:
    """What a claim's script concluded, if it was run into `folder`."""
    path = folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else None
    return found if isinstance(found, dict) and {"says", "so"} <= found.keys() else None


def summary(folder: Path) -> str:
    lines: list[list[Any]] = []
    for claim, names in TEXT:
        written = [name for name in names if name in CLAIMS]
        if not written:
            lines.append([claim, Cell("not measured yet", "dim"), ""])
        for name in written:
            found = record(folder, name)
            so = found["so"] if found else Cell("not run into this folder", "dim")
            lines.append([claim, so, name + (" (quick)" if found and found["quick"] else "")])
    return table(["what the text says", "what is so", "script"], lines)


def details(folder: Path) -> str:
    body = ""
    for name in CLAIMS:
        found = record(folder, name)
        if found is None:
            continue
        body += f"<h2>{name}</h2>\n"
        pictures = [folder / f"{name}{suffix}" for suffix in (".svg", ".png")]
        body += next((picture(path, found["so"]) for path in pictures if path.exists()), "")
        for part in found["tables"]:
            body += f"<p>{part['title']}</p>\n" + table(part["columns"], [[cell(v) for v in r] for r in part["rows"]])
    return body


def write_page(folder: Path) -> Path:
    """claims.html of what lies in `folder`."""
    out = folder / "claims.html"
    out.write_text(page("What the text says, and what is so", summary(folder) + details(folder)))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("claims", nargs="*", metavar="name", help=f"any of: {', '.join(CLAIMS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer points and samples: do they run, are they right?")
    parser.add_argument("--resume", action="store_true", help="keep what the folder has already, at this size")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the figures and of claims.html")
    parser.add_argument("--page", action="store_true", help="only write the page of what the folder has")
    options = parser.parse_args(argv)
    unknown = set(options.claims) - set(CLAIMS)
    if unknown:
        parser.error(f"name: expected any of {CLAIMS}, got {sorted(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed, names = [], [] if options.page else options.claims or CLAIMS
    for index, name in enumerate(names, 1):
        found = record(options.out, name)
        if options.resume and found is not None and found["quick"] == options.quick:
            print(f"[{index}/{len(names)}] {name}: kept", flush=True)
            continue
        print(f"[{index}/{len(names)}] {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.claims.{name}", "--out", str(options.out)]
        env, start = {**os.environ, "OMP_WAIT_POLICY": "passive"}, time.perf_counter()
        if subprocess.run(command + ["--quick"] * options.quick, env=env, cwd=HERE.parents[1]).returncode:
            failed.append(name)
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
    print(write_page(options.out))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
