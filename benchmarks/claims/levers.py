"""Claim: the levers, in the order of what they give: draft quality, depth, prefix mode, batch scheduling.

Two rounds of chats behind one system text (held-out source code of the standard library stands for both), served by the
engine at a fixed batch, greedy. All levers are on in one arm; in each of the others one lever is off, and what it gives
is the time of that arm over the time of the first, prefill included:

    draft quality      EAGLE-3's head                      off: the poorest head that ships (Medusa), n-gram drafts
    depth              up to 5 drafts a request and step   off: one
    prefix mode        cached prefixes, soft pages         off: every prompt computed anew
    batch scheduling   drafts by predicted goodput         off: always 5 drafts a request

Arms take turns, round by round. A lever's worth depends on load, prompts and machine: this is one point.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.claims.common import Claim
from benchmarks.claims.heads import TIE, held_out_prompts, keep_rows
from specdec_kernels.engine import Engine, EngineConfig, load_model
from specdec_kernels.engine.costs import fit_costs, record_steps
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.drafters.ngram import NgramDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.policy import FixedDrafts, GoodputPolicy

DEPTH = 5
ORDER = ("draft quality", "depth", "prefix mode", "batch scheduling")  # the text's


class Setting(NamedTuple):
    """One arm: a drafter's name, the deepest draft, whether prefixes are cached, whether the policy chooses depths."""

    drafter: str = "eagle3"
    depth: int = DEPTH
    prefix_cache: bool = True
    goodput: bool = True


ARMS = {
    "all on": Setting(),
    "draft quality: Medusa": Setting(drafter="medusa"),
    "draft quality: n-gram": Setting(drafter="ngram"),
    "depth: 1": Setting(depth=1),
    "prefix mode: none": Setting(prefix_cache=False),
    "batch scheduling: fixed": Setting(goodput=False),
}


def drafter(name: str) -> Any:
    if name == "ngram":
        return NgramDrafter()
    if name == "medusa":
        return MedusaDrafter(paths=[(0,) * depth for depth in range(1, 5)])
    return EagleDrafter(kind=name, top_k=1, depth=DEPTH, num_nodes=DEPTH)


def config(chats: list[list[list[int]]], setting: Setting, tokens: int, batch: int) -> EngineConfig:
    longest = max(len(prompt) for turn in chats for prompt in turn) + tokens + 16
    pages = (2 * batch + len(chats[0])) * (longest // 16 + 2)
    return EngineConfig(num_pages=pages, max_batch=batch, num_drafts=DEPTH, prefix_cache=setting.prefix_cache)


def conversations(model: Any, count: int, tokens: int, sizes: tuple[int, int, int]) -> list[list[list[int]]]:
    """[turn][chat]: prompts; the second turn's hold the first's, the answer of plain decoding and a question more."""
    system, question, more = sizes
    documents = list(held_out_prompts(model.tokenizer, count + 2).values())
    common = (documents[0] + documents[1])[:system]
    first = [common + ids[:question] for ids in documents[2:]]
    engine = Engine(model, "none", EngineConfig(num_pages=1024, max_batch=count))
    answers = [r.token_ids for r in engine.generate(first, max_tokens=tokens, ignore_eos=True)]
    second = [p + a + ids[question : question + more] for p, a, ids in zip(first, answers, documents[2:])]
    return [first, second]


def serve(model: Any, chats: list[list[list[int]]], setting: Setting, policy: Any, tokens: int, batch: int) -> Any:
    """(seconds, texts, engine) of all chats' turns, one turn after the other."""
    engine = Engine(model, drafter(setting.drafter), config(chats, setting, tokens, batch), policy=policy)
    start, texts = time.perf_counter(), []
    for prompts in chats:
        texts += [r.token_ids for r in engine.generate(prompts, max_tokens=tokens, ignore_eos=True)]
    return time.perf_counter() - start, texts, engine


def main(argv: Sequence[str] | None = None) -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--batch", type=int, default=4, help="requests at a time (default: %(default)s)")
        parser.add_argument("--rounds", type=int, default=3, help="times that every arm runs (default: %(default)s)")

    claim = Claim("levers", __doc__, argv, more)
    batch, rounds = (2, 1) if claim.quick else (claim.options.batch, claim.options.rounds)
    chats, tokens, sizes = (2, 8, (32, 8, 8)) if claim.quick else (batch, 32, (192, 32, 32))
    model = load_model("smollm2")
    turns = conversations(model, chats, tokens, sizes)
    prompts = [prompt for turn in turns for prompt in turn]
    costs = {}
    for name in dict.fromkeys(setting.drafter for setting in ARMS.values()):
        timings = []
        for size in (1, batch):
            options = {"sizes": (0, 1, 2, 3, 5), "rounds": 2 if claim.quick else 6}
            timings += record_steps(model, drafter(name), turns[0][:size], **options)
        costs[name] = fit_costs(timings)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    cells: dict[str, dict[str, Any]] = {}
    plain: list[list[int]] | None = None
    serve(model, turns, Setting(), FixedDrafts(DEPTH), 4, batch)  # a process's first steps have more to do than others
    with machine.Quiet() as quiet:
        for turn in range(rounds):
            names = list(ARMS)[turn % len(ARMS) :] + list(ARMS)[: turn % len(ARMS)]
            for name in names:
                setting = ARMS[name]
                goodput = GoodputPolicy(*costs[setting.drafter], max_depth=setting.depth)
                policy = goodput if setting.goodput else FixedDrafts(setting.depth)
                spent, texts, engine = serve(model, turns, setting, policy, tokens, batch)
                seconds[name].append(spent)
                m = engine.metrics
                cells[name] = {
                    "tokens_a_step": m.mean_accepted_length, "drafts_a_step": m.drafted / max(1, m.steps),
                    "prefix_hits": m.prefix_hits / max(1, m.prefix_queries), "texts": texts,
                }  # fmt: skip
    _, plain, _ = serve(model, turns, Setting("ngram", 1), FixedDrafts(0), tokens, batch)
    for name, cell in cells.items():
        for prompt, wanted, text in zip(prompts, plain or [], cell.pop("texts")):
            found = compare_greedy(model, prompt, wanted, text)
            if found is not None and not found.excused and found.gap > TIE:
                raise AssertionError(f"levers: {name} writes another text: {found}")
    gains: dict[str, list[float]] = {}
    rows = []
    for name, cell in cells.items():
        ratios = [off / on for off, on in zip(seconds[name], seconds["all on"])]
        cell |= {"seconds": seconds[name], "gain": statistics.median(ratios)}
        between = f"{min(ratios):.2f}..{max(ratios):.2f}"
        if name != "all on":
            gains.setdefault(name.split(":")[0], []).append(cell["gain"])
        rows.append([name, statistics.median(seconds[name]), cell["gain"], between, cell["tokens_a_step"],
                     cell["drafts_a_step"], cell["prefix_hits"]])  # fmt: skip
    claim.table(
        f"{chats} chats of two turns, batch {batch}, {tokens} tokens a turn; foreign CPU {quiet.foreign:.2f} cores",
        ["arm", "seconds", "the lever gives", "range", "tokens a step", "drafts a step", "prompt found"], rows,
    )  # fmt: skip
    worth = {name: min(gains[name]) for name in ORDER}  # against the best of what else there is
    ranked = sorted(worth, key=lambda name: -worth[name])
    with claim.plot("What each lever gives, all others on", "time without it over time with it", "") as axes:
        axes.barh(list(reversed(ranked)), [worth[name] for name in reversed(ranked)])
        axes.axvline(1.0, color="#888888", lw=1, ls=":")
    figures = {"gains": gains, "ranked": ranked, "cells": cells, "batch": batch, "foreign_cpu": quiet.foreign,
               "machine": machine.describe(), "dtype": str(model.dtype)}  # fmt: skip
    keep_rows(claim, figures)
    return claim.conclude(
        says=", ".join(ORDER) + ", in this order",
        so=f"here, at batch {batch}: "
        + ", ".join(f"{name} {worth[name]:.2f}x" for name in ranked)
        + f" (draft quality against n-gram drafts {gains['draft quality'][1]:.2f}x, against Medusa "
        f"{gains['draft quality'][0]:.2f}x)",
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
