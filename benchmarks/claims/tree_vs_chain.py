"""Claim: a tree accepts 4.8 tokens and is 2.7x as fast, a chain 2.0x, at equal acceptance.

The shipped EAGLE-3 head on text that it was not trained on, greedy, batch 1, at equal numbers of verified nodes: a
chain, a static tree (one shape, the best for the acceptance by rank that was measured on other held-out text) and a
dynamic tree (EAGLE-2: the head's own probabilities choose the nodes of every step). Speed is measured behind the first
token, all arms taking turns prompt by prompt, and predicted from tokens a step and the engine's fitted step costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.claims.common import Claim
from benchmarks.claims.heads import (
    COLUMNS,
    SHOWN,
    figures_of,
    gains,
    gate,
    held_out_prompts,
    keep_rows,
    options_of,
    rank_table,
)
from specdec_kernels.engine import load_model
from specdec_kernels.engine.costs import measure_costs
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.training.measure import Arm, race

KINDS = ("chain", "static tree", "dynamic tree")
TREE_DEPTH, TOP_K = 8, 8


def drafter(kind: str, nodes: int, chances: Sequence[float]) -> EagleDrafter:
    if kind == "chain":
        return EagleDrafter(top_k=1, depth=nodes, num_nodes=nodes)
    static = chances if kind == "static tree" else None
    return EagleDrafter(top_k=TOP_K, depth=min(nodes, TREE_DEPTH), num_nodes=nodes, by_rank=static)


def main(argv: Sequence[str] | None = None) -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        options_of(parser)
        parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these (default: all)")

    claim = Claim("tree_vs_chain", __doc__, argv, more)
    options, model = claim.options, load_model("smollm2")
    kinds = [kind for kind in KINDS if kind in options.kinds]
    count, tokens = (2, 16) if claim.quick else (options.prompts, options.tokens)
    budgets = [8] if claim.quick else options.budgets
    documents = held_out_prompts(model.tokenizer, count + (1 if claim.quick else 3))
    names = list(documents)
    watched = EagleDrafter(top_k=TOP_K, depth=1, num_nodes=TOP_K)
    (chances,) = rank_table(watched, model, [documents[name] for name in names[count:]], tokens)
    prompts = [documents[name] for name in names[:count]]
    sizes, few = sorted({0, *range(1, 5), *budgets}), {"rounds": 2} if claim.quick else {}
    costs = measure_costs(model, drafter("dynamic tree", max(budgets), chances), prompts[:1], sizes=sizes, **few)
    longest = max(map(len, prompts)) + tokens
    arms = {"plain": Arm.of(model, "none", longest=longest)}
    for nodes in budgets:
        for kind in kinds:
            arms[f"{kind} {nodes}"] = Arm.of(model, drafter(kind, nodes, chances), longest=longest, num_drafts=nodes)
    with machine.Quiet() as quiet:
        race(arms, prompts, tokens)
    plain = arms.pop("plain")
    ties = gate("tree_vs_chain", model, prompts, plain, arms)
    context = statistics.mean(map(len, prompts)) + tokens / 2
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {"prompts": names[:count], "by_rank": chances, "cells": {}, "ties": ties}
    for nodes in budgets:
        for kind in kinds:
            found = figures["cells"][f"{kind}/{nodes}"] = figures_of(plain, arms[f"{kind} {nodes}"], costs, context)
            rows.append([nodes, kind, *(found[name] for name in SHOWN)])
        for name, above, below in (
            ("tree_over_chain", "dynamic tree", "chain"), ("dynamic_over_static", "dynamic tree", "static tree"),
            ("static_over_chain", "static tree", "chain"),
        ):  # fmt: skip
            if above in kinds and below in kinds:
                figures.setdefault(name, {})[str(nodes)] = gains(arms[f"{above} {nodes}"], arms[f"{below} {nodes}"])
    claim.table(
        f"{count} held-out documents, {tokens} tokens each, batch 1; foreign CPU {quiet.foreign:.2f} cores",
        ["nodes", "drafts", *COLUMNS], rows,
    )  # fmt: skip
    with claim.plot("Tokens a step by verified draft nodes", "draft nodes verified a step", "tokens a step") as axes:
        for kind in kinds:
            axes.plot(budgets, [arms[f"{kind} {n}"].tokens_a_step for n in budgets], marker="o", label=kind)
    figures |= {"foreign_cpu": quiet.foreign, "machine": machine.describe(), "dtype": str(model.dtype)}
    keep_rows(claim, figures)
    best = {kind: max(budgets, key=lambda n, k=kind: arms[f"{k} {n}"].tokens_a_step) for kind in kinds}  # type: ignore[misc]
    most = max(budgets)
    compared = {"tree_over_chain": "the chain's", "dynamic_over_static": "the static tree's"}
    ratios = [
        f"{figures[name][str(most)][0]:.2f} times {whose} ({figures[name][str(most)][1]:.2f}.."
        f"{figures[name][str(most)][2]:.2f})"
        for name, whose in compared.items()
        if name in figures
    ]
    fastest = max(rows, key=lambda row: row[4])
    return claim.conclude(
        says="a tree accepts 4.8 tokens and gives 2.7x, a chain 2.0x, at equal acceptance",
        so="; ".join(
            f"{kind} {arms[f'{kind} {n}'].tokens_a_step:.2f} tokens a step at {n} nodes" for kind, n in best.items()
        )
        + f"; at {most} nodes the dynamic tree emits {' and '.join(ratios) or '-'} tokens; "
        f"fastest: {fastest[1]} of {fastest[0]}, {fastest[4]:.2f}x",
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
