"""Command-line words that measure on a real model: `select` (candidates against plain decoding) and `advise` (what to
deploy, from that and a trace). Wrong input is one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdec_kernels._console import print_table
from specdec_kernels.advisor.cli import guarded
from specdec_kernels.advisor.deployment import Workload, advise
from specdec_kernels.advisor.draft_selection import PLAIN, Candidate, DraftSelection, select_draft_model
from specdec_kernels.advisor.serve import read_prompts
from specdec_kernels.engine import Engine, EngineConfig, load_model

_HEADS = ("eagle", "eagle3", "mtp", "medusa")


def parse_candidate(text: str) -> tuple[str, Candidate]:
    """ "NAME[/NODES][@FOLDER]": a drafter, its most draft nodes, the folder of its head -> (label, candidate)."""
    words, _, folder = text.partition("@")
    name, _, nodes = words.partition("/")
    if nodes and not nodes.isdigit():
        raise ValueError(f"--candidate: expected NAME[/NODES][@FOLDER], got {text!r}")
    if folder and name not in _HEADS:
        raise ValueError(f"--candidate: expected a folder with {', '.join(_HEADS)} only, got {text!r}")
    size = int(nodes) if nodes else 15
    if name not in _HEADS:
        return words, Candidate(name, size)

    def make() -> Any:
        from specdec_kernels.engine.drafters.eagle import EagleDrafter
        from specdec_kernels.engine.drafters.medusa import MedusaDrafter

        if name == "medusa":
            return MedusaDrafter(folder or None, num_nodes=size)
        return EagleDrafter(folder or None, kind=name, num_nodes=size)

    return words, Candidate(make, size)


def select_main(argv: Sequence[str] | None = None) -> int:
    """`select`. Exit code 0: something pays at some batch size; 1: nothing does; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="specdec select",
        description="Measure drafters on your prompts, and predict what each gives at each batch size.",
        epilog="exit code: 0 a candidate is predicted to pay somewhere, 1 none is, 2 wrong input. "
        "Example: select --candidate ngram --candidate self/4 --prompts prompts.txt --batch-sizes 1,4 --json",
    )
    parser.add_argument("--target", default="smollm2", help="smollm2, or a transformers checkpoint folder")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the fastest here)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--candidate", action="append", required=True, metavar="NAME[/NODES][@FOLDER]",
        help="ngram, self, or a head; NODES: most draft nodes a step (default 15); FOLDER: of the head",
    )  # fmt: skip
    parser.add_argument("--prompts", type=Path, help="file with a prompt a line (default: the demo's three)")
    parser.add_argument("--batch-sizes", default="1,4,8", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=9, help="timed turns a batch size (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result as JSON: `advise` reads it")
    parser.add_argument("--plot", type=Path, help="write a plot, SVG or PNG")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)

    def run() -> int:
        candidates = dict(parse_candidate(text) for text in args.candidate)
        try:
            sizes = [int(size) for size in args.batch_sizes.split(",")]
        except ValueError:
            raise ValueError(f"--batch-sizes: expected N,N,... got {args.batch_sizes}") from None
        prompts = read_prompts(args.prompts)
        target = load_model(args.target, dtype=args.dtype, device=args.device)
        chat = getattr(target.tokenizer, "chat_template", None) is not None
        found = select_draft_model(
            target, candidates, [[{"role": "user", "content": p}] if chat else p for p in prompts], sizes,
            max_tokens=args.max_tokens, turns=args.turns, temperature=args.temperature, report=_progress(),
        )  # fmt: skip
        if args.out is not None:
            args.out.write_text(found.to_json() + "\n")
        if args.plot is not None:
            found.plot(args.plot)
        if args.json:
            print(found.to_json())
        else:
            columns, rows = found.table()
            print_table(f"{found.target}, {found.num_prompts} prompts: predicted speed-up", columns, rows)
        return 0 if any(found.best(size) != PLAIN for size in sizes) else 1

    return guarded("select", run)


def _progress() -> Callable[[str], None]:
    start = time.perf_counter()
    return lambda line: print(f"[{time.perf_counter() - start:6.1f} s] {line}", file=sys.stderr, flush=True)


def advise_main(argv: Sequence[str] | None = None) -> int:
    """`advise`. Exit code 0: speculate; 1: plain decoding is predicted faster; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="specdec advise",
        description="What to deploy, from `select --out` and a trace of requests; each answer with its figure.",
        epilog="exit code: 0 speculate, 1 do not, 2 wrong input. TRACE: a JSON object a line, "
        '{"prompt_tokens": 812, "output_tokens": 190, "batch": 4, "shared_tokens": 512, "temperature": 0.7}. '
        "Example: advise selection.json trace.jsonl --kv-bytes 23040 --json",
    )
    parser.add_argument("selection", type=Path, help="what `select --out` wrote")
    parser.add_argument("trace", type=Path, help="a request a line")
    kv = parser.add_mutually_exclusive_group(required=True)
    kv.add_argument("--target", help="measures prefill and takes the KV size from it: smollm2 or a checkpoint folder")
    kv.add_argument("--kv-bytes", type=int, help="of one token of the target; prefill is left out of the advice")
    parser.add_argument("--updates-per-day", type=float, default=0.0, help="how often the target's weights change")
    parser.add_argument("--soft-hits", type=float, help="share of prompt tokens found in rejected drafts' KV")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)

    def run() -> int:
        selection = DraftSelection.from_json(args.selection.read_text())
        workload = Workload.from_jsonl(args.trace, updates_per_day=args.updates_per_day)
        prefill, kv_bytes = None, args.kv_bytes
        if args.target is not None:
            model = load_model(args.target)
            kv_bytes = model.kv_shape.bytes_per_token
            prefill = measure_prefill(model, workload.prompt_tokens)
        advice = advise(
            selection, workload, target_kv_bytes=kv_bytes, prefill_seconds=prefill, soft_hits=args.soft_hits
        )
        if args.json:
            print(advice.to_json())
        else:
            print_table(
                "Advice", ["question", "answer", "why"], [[r.topic, r.choice, r.reason] for r in advice.recommendations]
            )
            print_table("Thresholds often quoted", ["rule", "measured here", "borne out"],
                        [[r.rule, r.measured, r.borne_out] for r in advice.rules])  # fmt: skip
        return 0 if advice["drafter"].choice != PLAIN else 1

    return guarded("advise", run)


def measure_prefill(model: Any, prompt_tokens: Sequence[int], *, repeats: int = 3) -> dict[int, float]:
    """Seconds to the first token at four prompt lengths between the shortest and the longest of the load (longer ones
    than the model's context leave room for one token); best of `repeats`."""
    low = min(prompt_tokens)
    high = max(low + 1, min(max(prompt_tokens), model.max_context - 1))
    lengths = sorted({round(low + (high - low) * part) for part in (0, 0.15, 0.4, 1)})
    found = {}
    for length in lengths:
        engine = Engine(model, "none", EngineConfig(num_pages=length // 16 + 2, max_batch=1, prefix_cache=False))
        best = float("inf")
        for turn in range(repeats):
            prompt = [(7 * i + turn) % min(1000, model.vocab_size) for i in range(length)]
            start = time.perf_counter()
            engine.generate([prompt], max_tokens=1, ignore_eos=True)
            best = min(best, time.perf_counter() - start)
        found[length] = best
    return found
