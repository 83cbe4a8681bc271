"""Is the advisor right? `python -m benchmarks.bench_advisor [--quick]`: predicted against measured speed-up, SmolLM2.

`select_draft_model` predicts from every second prompt. The other prompts are then served by plain decoding and by each
candidate, every arm with an engine and a queue of its own at a full batch, the arms in turn step by step. An arm is
done when its queue has been served once (texts that follow keep the batch full); its speed-up is its tokens a second
over plain decoding's in the same turns, steps with prefill left out on both sides. Plain decoding wrote the texts
first, and every arm writes these again (`benchmarks.recorded`), so that all arms serve the same tokens.

Heads that ship for the target join by themselves. Prompts are slices of the standard library's source, cut to
PROMPT_TOKENS. One JSONL row a batch size and candidate: predicted, measured (all rounds; least and greatest round),
their ratio, and whether the advisor's choice was the best.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.recorded import Guided
from specdec_kernels.advisor.draft_selection import PLAIN, Candidate, DraftSelection, select_draft_model
from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.head_files import find_head
from specdec_kernels.engine.tokens import encode_prompt

PROMPT_TOKENS = 48
MODULES = "argparse ast asyncio collections csv datetime decimal difflib email enum functools heapq inspect io json"
MODULES += " logging os pathlib pickle queue random re sched shutil socket sqlite3 string subprocess tarfile threading"
MODULES += " timeit typing unittest urllib.parse uuid weakref zipfile"


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Slices of the modules' sources: the modules' heads, then their middles, and so on."""
    sources = [encode_prompt(tokenizer, inspect.getsource(importlib.import_module(name))) for name in MODULES.split()]
    slices = [ids[at : at + PROMPT_TOKENS] for at in range(0, 4000, 1000) for ids in sources]
    return [ids for ids in slices if len(ids) == PROMPT_TOKENS][:count]


def candidates_for(model: Any) -> dict[str, Candidate]:
    """n-gram and self-drafts, and the heads that ship for this target."""
    found = {"ngram": Candidate("ngram", 15), "self/4": Candidate("self", 4)}
    for kind, nodes in (("eagle3", 8), ("mtp", 8), ("medusa", 8)):
        try:
            find_head(None, kind, model)
        except (ValueError, FileNotFoundError):
            continue
        found[f"{kind}/{nodes}"] = Candidate(kind, nodes)
    return found


class Arm:
    """One candidate serving an endless queue of the recorded texts at a full batch."""

    def __init__(self, model: Any, candidate: Candidate, batch: int, texts: Sequence[tuple[list[int], list[int]]]):
        drafter = candidate.make if isinstance(candidate.make, str) else candidate.make()
        config = EngineConfig(
            max_batch=batch, num_drafts=candidate.num_drafts, prefix_cache=False, max_step_tokens=4096
        )  # fmt: skip
        self.engine = Guided(model, drafter, config)
        self.engine.texts = {}
        self.texts, self.batch, self.added, self.left = texts, batch, 0, len(texts)

    def step(self) -> tuple[int, float]:
        """Tokens and seconds of one step; none if it prefilled or its batch was not full."""
        engine = self.engine
        while len(engine.texts) < self.batch + 2:
            prompt, output = self.texts[self.added % len(self.texts)]
            key = engine.add(Request(prompt, max_tokens=len(output), ignore_eos=True))
            engine.texts[key], self.added = prompt + output, self.added + 1
        before, start = engine.metrics.prefill_tokens, time.perf_counter()
        events = engine.step()
        spent = time.perf_counter() - start
        for event in events:
            if event.result is not None:
                self.left -= 1
                tail = engine.texts.pop(event.request_id)[-len(event.result.token_ids) :]
                if tail != event.result.token_ids:
                    raise AssertionError(f"bench_advisor: request {event.request_id} left its recorded text")
        counts = engine.metrics.prefill_tokens == before and len(events) == self.batch
        return counts * sum(len(event.token_ids) for event in events), counts * spent


def written(model: Any, prompts: Sequence[list[int]], tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, plain decoding's text)"""
    engine = Engine(model, "none", EngineConfig(num_pages=1024, max_batch=8))
    return [
        (prompt, list(result.token_ids))
        for prompt, result in zip(prompts, engine.generate(prompts, max_tokens=tokens, ignore_eos=True))
    ]


def measured(
    model: Any, candidates: dict[str, Candidate], texts: Sequence[tuple[list[int], list[int]]], batch: int
) -> dict[str, float]:
    """Speed-ups by candidate: the queue served once."""
    plain = Arm(model, Candidate(PLAIN, 0), batch, texts)
    arms = {name: Arm(model, candidate, batch, texts) for name, candidate in candidates.items()}
    sums = {name: np.zeros(4) for name in arms}  # tokens, seconds; plain decoding's in the same turns
    for arm in (plain, *arms.values()):
        arm.step()  # prefill, and what a first step sets up
    while waiting := [name for name in arms if arms[name].left > 0]:
        base = plain.step()
        for name in waiting:
            sums[name] += (*arms[name].step(), *base)
    return {name: float(s[0] / s[1] / (s[2] / s[3])) for name, s in sums.items()}


def rows_of(selection: DraftSelection, gains: Mapping[str, Sequence[float]], batch: int) -> list[dict[str, Any]]:
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
    parser.add_argument("--prompts", type=int, default=64, help="half of them for the prediction")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(argv)
    if options.quick:
        options.prompts, options.max_tokens, options.rounds, options.batches = 4, 12, 1, "1"
    model = load_model("smollm2")
    prompts = prompts_of(model.tokenizer, options.prompts)
    candidates = {"ngram": Candidate("ngram", 4)} if options.quick else candidates_for(model)
    batches = [int(b) for b in options.batches.split(",")]
    tokens = max(options.max_tokens, 3 * (1 + max(c.num_drafts for c in candidates.values())))
    texts = written(model, prompts[1::2], tokens)
    selection = select_draft_model(
        model, candidates, prompts[::2], batches, max_tokens=tokens, steps_per_turn=2,
        turns=2 if options.quick else 15, report=lambda line: print(line, flush=True),
    )  # fmt: skip
    for batch in batches:
        with machine.Quiet() as quiet:
            rounds = [measured(model, candidates, texts, batch) for _ in range(options.rounds)]
        gains = {name: [found[name] for found in rounds] for name in candidates}
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
