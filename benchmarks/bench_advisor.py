"""Is the advisor right? `python -m benchmarks.bench_advisor [--quick]`: predicted against measured speed-up, SmolLM2.

`select_draft_model` predicts from one half of the prompts; then the other half is decoded from beginning to end, plain
and with each candidate, interleaved, at every batch size. Heads that ship for the target join by themselves. Prompts
are documentation strings of the standard library, cut to PROMPT_TOKENS. One JSONL row a batch size and candidate:
predicted, measured (median over rounds, range), their ratio, and whether the advisor's choice was the best.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from specdec_kernels.advisor.draft_selection import PLAIN, Candidate, DraftSelection, select_draft_model
from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.head_files import find_head
from specdec_kernels.engine.tokens import encode_prompt

PROMPT_TOKENS = 48
MODULES = "argparse ast asyncio collections csv datetime decimal difflib email enum functools heapq inspect io json"
MODULES += " logging os pathlib pickle queue random re sched shutil socket sqlite3 string subprocess tarfile threading"
MODULES += " timeit typing unittest urllib.parse uuid weakref zipfile"


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """A prompt a module: its source's first tokens."""
    found = []
    for name in MODULES.split():
        ids = encode_prompt(tokenizer, inspect.getsource(importlib.import_module(name))[:4000])
        if len(ids) >= PROMPT_TOKENS:
            found.append(ids[:PROMPT_TOKENS])
    return found


def candidates_for(model: Any) -> dict[str, Candidate]:
    """n-gram and self-drafts, and the heads that ship for this target."""
    found = {"ngram": Candidate("ngram", 15), "self/4": Candidate("self", 4)}
    for kind, nodes in (("eagle3", 24), ("mtp", 24), ("medusa", 24)):
        try:
            find_head(None, kind, model)
        except (ValueError, FileNotFoundError):
            continue
        found[f"{kind}/{nodes}"] = Candidate(kind, nodes)
    return found


def decode(model: Any, candidate: Candidate, prompts: Sequence[list[int]], batch: int, max_tokens: int) -> Any:
    """(seconds a token behind the prefill of the first batch, texts): all prompts through `batch` places."""
    drafter = candidate.make if isinstance(candidate.make, str) else candidate.make()
    config = EngineConfig(max_batch=batch, num_drafts=candidate.num_drafts, prefix_cache=False, max_step_tokens=4096)
    engine = Engine(model, drafter, config)
    texts: dict[int, list[int]] = {}
    for prompt in prompts:
        texts[engine.add(Request(prompt, max_tokens=max_tokens, ignore_eos=True))] = []
    while sum(map(bool, texts.values())) < min(batch, len(prompts)):
        for event in engine.step():
            texts[event.request_id] += event.token_ids
    before, start = sum(map(len, texts.values())), time.perf_counter()
    while engine.has_work:
        for event in engine.step():
            texts[event.request_id] += event.token_ids
    return (time.perf_counter() - start) / (sum(map(len, texts.values())) - before), list(texts.values())


def measured(
    model: Any, candidates: dict[str, Candidate], prompts: Sequence[list[int]], batch: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Speed-ups by candidate, one a round; texts are compared with plain decoding's first."""
    arms = {PLAIN: Candidate(PLAIN, 0), **candidates}
    gains: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds):
        order = list(arms) if turn % 2 else list(arms)[::-1]
        found = {name: decode(model, arms[name], prompts, batch, tokens) for name in order}
        for name in candidates:
            if turn == 0:
                for prompt, a, b in zip(prompts, found[PLAIN][1], found[name][1]):
                    difference = compare_greedy(model, prompt, a, b)
                    if difference is not None and not difference.excused and difference.gap > 0.25:
                        raise AssertionError(
                            f"bench_advisor: {name} at batch {batch} writes another text: {difference}"
                        )
            gains[name].append(found[PLAIN][0] / found[name][0])
    return gains


def rows_of(selection: DraftSelection, gains: dict[str, list[float]], batch: int) -> list[dict[str, Any]]:
    medians = {name: statistics.median(values) for name, values in gains.items()} | {PLAIN: 1.0}
    chosen, best = selection.best(batch), max(medians, key=lambda name: medians[name])
    rows = []
    for name, values in gains.items():
        m = selection.at(name, batch)
        rows.append({
            "op": "advisor", "B": batch, "candidate": name, "predicted": round(m.speedup.value, 3),
            "predicted_low": round(m.speedup.low, 3), "predicted_high": round(m.speedup.high, 3),
            "measured": round(medians[name], 3), "measured_min": round(min(values), 3),
            "measured_max": round(max(values), 3), "rounds": len(values),
            "predicted_over_measured": round(m.speedup.value / medians[name], 3),
            "tokens_per_step": round(m.tokens_per_step.value, 3), "step_cost": round(m.step_cost, 3),
            "chosen": chosen, "best": best, "chosen_over_best": round(medians[chosen] / medians[best], 3),
        })  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts and tokens: does it run?")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--prompts", type=int, default=16, help="half of them for the prediction")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(argv)
    if options.quick:
        options.prompts, options.max_tokens, options.rounds, options.batches = 4, 32, 1, "1,2"
    model = load_model("smollm2")
    prompts, candidates = prompts_of(model.tokenizer)[: options.prompts], candidates_for(model)
    batches = [int(b) for b in options.batches.split(",")]
    tokens = max(options.max_tokens, 3 * (1 + max(c.num_drafts for c in candidates.values())))
    for batch in batches:
        with machine.Quiet() as quiet:
            selection = select_draft_model(
                model, candidates, prompts[::2], [batch], max_tokens=tokens, steps_per_turn=2,
                turns=3 if options.quick else 9, report=lambda line: print(line, flush=True),
            )  # fmt: skip
            gains = measured(model, candidates, prompts[1::2], batch, tokens, options.rounds)
        rows = rows_of(selection, gains, batch)
        for row in rows:
            row |= {
                "family": "advisor",
                "gated": True,
                "foreign_cpu": round(quiet.foreign, 3),
                "machine": machine.describe(),
            }
            print(
                f"batch {batch}, {row['candidate']}: predicted {row['predicted']} ({row['predicted_low']} to "
                f"{row['predicted_high']}), measured {row['measured']} ({row['measured_min']} to "
                f"{row['measured_max']}); chosen {row['chosen']}, best {row['best']}", flush=True,
            )  # fmt: skip
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
