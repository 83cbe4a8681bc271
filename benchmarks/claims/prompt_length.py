"""Claim: prompts under 500 tokens gain nothing from speculation, 500 to 2000 favour chains, over 2000 trees.

Whole requests on the engine, prefill included: plain decoding, n-gram chains and n-gram trees at three prompt lengths
and two output lengths, batch 1, on SmolLM2, interleaved; and the same of decoding alone. Prompts are pieces of the
standard library's source and of prose. Where neither column differs between lengths, length was not what mattered.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.claims.common import Claim
from specdec_kernels.engine import Engine, EngineConfig, load_model
from specdec_kernels.engine.drafters.ngram import NgramDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.tokens import encode_prompt

ARMS = ("plain", "chain", "tree")


def texts(tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of a long source file and of long prose."""
    import heapq

    code = Path(heapq.__file__).read_text()
    prompts = Path(__file__).parents[2] / "specdec_kernels" / "engine" / "prompts"
    prose = (prompts / "summary.txt").read_text() + "\n".join(
        block for block in (heapq.__about__ or "").split("\n\n")
    )  # the module's essay on heaps
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return {"code": encode_prompt(tokenizer, code), "prose": encode_prompt(tokenizer, prose + "\n" + license_text)}


def drafter(arm: str) -> Any:
    return "none" if arm == "plain" else NgramDrafter(branches=1 if arm == "chain" else 3)


def run(model: Any, arm: str, prompt: list[int], max_tokens: int) -> tuple[float, float, list[int], float]:
    """(seconds in all, seconds behind the first token, text, tokens a step)."""
    config = EngineConfig(num_pages=len(prompt) // 16 + max_tokens // 16 + 8, max_batch=1, max_step_tokens=4096)
    engine = Engine(model, drafter(arm), config)
    first: list[float] = []
    start = time.perf_counter()

    def note(index: int, event: Any) -> None:
        if not first:
            first.append(time.perf_counter())

    (result,) = engine.generate([prompt], max_tokens=max_tokens, ignore_eos=True, on_event=note)
    end = time.perf_counter()
    return end - start, end - first[0], result.token_ids, result.stats.mean_accepted_length


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("prompt_length", __doc__, argv)
    model = load_model("smollm2")
    lengths = [24, 64] if claim.quick else [128, 1000, 3000]
    outputs = [4] if claim.quick else [32, 160]
    rounds = 1 if claim.quick else 3
    rows: list[list[Any]] = []
    cells: dict[str, Any] = {}
    with machine.Quiet() as quiet:
        for kind, ids in list(texts(model.tokenizer).items())[: 1 if claim.quick else None]:
            for length in lengths:
                for num in outputs:
                    prompt = (ids * (1 + length // len(ids)))[:length]
                    whole: dict[str, list[float]] = {arm: [] for arm in ARMS}
                    behind: dict[str, list[float]] = {arm: [] for arm in ARMS}
                    emitted: dict[str, float] = {}
                    written: dict[str, list[int]] = {}
                    for turn in range(rounds):
                        for arm in ARMS if turn % 2 else reversed(ARMS):
                            total, decoding, written[arm], emitted[arm] = run(model, arm, prompt, num)
                            whole[arm].append(total)
                            behind[arm].append(decoding)
                    for arm in ARMS[1:]:  # gate: the same text, or a tie that rounding decided
                        found = compare_greedy(model, prompt, written["plain"], written[arm])
                        if found is not None and not found.excused and found.gap > 0.25:
                            raise AssertionError(f"prompt_length: {kind} {length}: {arm} writes another text: {found}")
                        gains = [p / s for p, s in zip(whole["plain"], whole[arm])]
                        alone = [p / s for p, s in zip(behind["plain"], behind[arm])]
                        middle, decoding = statistics.median(gains), statistics.median(alone)
                        spread = f"{min(gains):.2f}..{max(gains):.2f}"
                        rows.append([kind, length, num, arm, emitted[arm], middle, spread, decoding])
                        cells[f"{kind}/{length}/{num}/{arm}"] = {
                            "tokens_a_step": emitted[arm], "whole_request": middle, "range": gains, "decoding": decoding
                        }  # fmt: skip
    claim.table(
        "speed-up over plain decoding, batch 1",
        ["text", "prompt", "output", "drafts", "tokens a step", "whole request", "range", "decoding alone"], rows,
    )  # fmt: skip
    with claim.plot("Whole requests, prefill included", "prompt tokens", "speed-up") as axes:
        for kind in dict.fromkeys(row[0] for row in rows):
            for num in outputs:
                at = [row for row in rows if row[0] == kind and row[2] == num and row[3] == "tree"]
                axes.plot(
                    [row[1] for row in at], [row[5] for row in at], marker="o", label=f"{kind}, {num} tokens, tree"
                )
        axes.axhline(1.0, color="#888888", lw=1, ls=":")
    best = {length: max((row for row in rows if row[1] == length), key=lambda row: row[5]) for length in lengths}
    listed = "; ".join(
        f"{length} tokens: {min(row[5] for row in rows if row[1] == length):.2f}x to {row[5]:.2f}x ({row[0]}, {row[2]} "
        f"tokens, {row[3]})"
        for length, row in best.items()
    )
    trees = {length: _tree_over_chain(rows, length) for length in lengths}
    return claim.conclude(
        says="under 500 tokens nothing, 500 to 2000 chains, over 2000 trees",
        so=f"{listed}; tree over chain (median of whole requests): "
        + ", ".join(f"{value:.2f} at {length}" for length, value in trees.items()),
        figures={
            "cells": cells, "tree_over_chain": trees, "machine": machine.describe(), "foreign_cpu": quiet.foreign
        },
    )  # fmt: skip


def _tree_over_chain(rows: Sequence[Sequence[Any]], length: int) -> float:
    by_arm = {arm: [row[5] for row in rows if row[1] == length and row[3] == arm] for arm in ARMS[1:]}
    return statistics.median(t / c for t, c in zip(by_arm["tree"], by_arm["chain"]))


if __name__ == "__main__":
    sys.exit(main())
