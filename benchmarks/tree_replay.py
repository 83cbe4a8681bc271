"""Shapes of a head's trees compared on one record: how wide and how deep to grow, static or by the head's own scores.

What a greedy engine emits does not depend on its drafts, so a document is decoded plainly, once: at every place of its
text the head grows its widest tree, and a shape then decodes the text from that record, step by step as the engine
would. Beside the head: n-gram drafts, replayed too. Static trees are the best ones for the acceptance by rank on these
very texts, which is more than one could know; nodes of theirs that the widest tree did not reach count as refused.

python -m benchmarks.tree_replay --kind mtp --documents 43
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.claims.heads import held_out_prompts
from specdec_kernels.engine import Engine, EngineConfig, load_model
from specdec_kernels.engine.drafters import Draft, Limit, grow
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.ngram import NgramDrafter

BUDGETS = (4, 8, 16, 24)
WIDTHS_AND_DEPTHS = ((4, 6), (4, 9), (8, 6), (8, 9))


class Record(NamedTuple):
    """`text`, its `places` [P] where a step can begin (text lengths), and of each the candidates [P, C], level by
    level, root first: `parents`; `log_probs` among their siblings (-inf: no such candidate); `depths`; `hits`, those
    that the text goes on with. Children of one parent stand together, `top_k` of them by rank."""

    text: list[int]
    places: list[int]
    top_k: int
    parents: np.ndarray
    log_probs: np.ndarray
    depths: np.ndarray
    hits: np.ndarray


def record(model: Any, prompt: Sequence[int], max_tokens: int, head: Any = None, **options: Any) -> Record:
    """Decode plainly behind a prompt while a head (options of `EagleDrafter`) grows all it can at every place."""
    places: list[int] = []
    found: list[list[np.ndarray]] = []
    top_k, depth = options["top_k"], options["depth"]
    width = 1 + top_k + top_k * top_k * (depth - 1)

    class Watched(EagleDrafter):
        def propose(self, states: Any, limits: Any, context: Any) -> list[Draft]:
            before = len(found)
            super().propose(states, [Limit(width, depth)] * len(states), context)
            if len(found) > before:
                places.append(len(states[0].tokens))
            return [Draft()] * len(states)

    def keep(candidates: Any, tokens: Any, _: Any, group: list[int], *more: Any) -> list[Any]:
        row = [x.reshape(-1).numpy() for x in (candidates.scores, candidates.parents, tokens)]
        missing = width - len(row[0])
        found.append([np.pad(x, (0, missing), constant_values=fill) for x, fill in zip(row, (-np.inf, -1, -1))])
        return [([], [], []) for _ in group]

    pages = 2 * ((len(prompt) + max_tokens + top_k * depth) // 16 + 3)
    engine = Engine(
        model, Watched(head, num_nodes=width, **options), EngineConfig(num_pages=pages, max_batch=1, prefix_cache=False)
    )
    ours, grow._rerank = grow._rerank, keep  # type: ignore[assignment]
    try:
        (result,) = engine.generate([list(prompt)], max_tokens=max_tokens, ignore_eos=True)
    finally:
        grow._rerank = ours
    text = [*prompt, *result.token_ids]
    scores, parents, tokens = (np.stack(part) for part in zip(*found))
    return _lined_up(text, places, top_k, scores.astype(float), parents.astype(int), tokens)


def _lined_up(text: list[int], places: list[int], top_k: int, scores: Any, parents: Any, tokens: Any) -> Record:
    log_probs = np.full(scores.shape, -np.inf)
    depths, hits = np.zeros(scores.shape, int), np.zeros(scores.shape, bool)
    hits[:, 0], log_probs[:, 0] = True, 0.0
    ends = np.array([*text, -2])
    for first in range(1, scores.shape[1], top_k):  # parents before children
        group = slice(first, first + top_k)
        above = parents[:, group].clip(min=0)
        exists = (parents[:, group] >= 0) & np.isfinite(scores[:, group])
        before = np.take_along_axis(scores, above, 1)
        log_probs[:, group] = np.where(exists, scores[:, group] - np.where(exists, before, 0), -np.inf)
        depths[:, group] = np.take_along_axis(depths, above, 1) + 1
        wanted = ends[np.minimum(np.array(places)[:, None] + depths[:, group] - 1, len(text))]
        hits[:, group] = np.take_along_axis(hits, above, 1) & (tokens[:, group] == wanted) & exists
    return Record(text, places, top_k, parents, log_probs, depths, hits)


def accepted(r: Record, nodes: int, top_k: int, depth: int, by_rank: Sequence[float] | None = None) -> np.ndarray:
    """Drafts accepted at each place by a tree of `nodes` that grows `top_k` wide and `depth` deep; [P]."""
    own = r.log_probs.copy()
    ranks = (np.arange(own.shape[1]) - 1) % r.top_k
    if by_rank is not None:
        chances = np.log(np.array([*by_rank, *[1e-9] * (r.top_k - len(by_rank))]))
        own = np.where(np.isfinite(own), chances[ranks], -np.inf)
    own[(r.depths > depth) | (ranks >= top_k)] = -np.inf
    own[:, 0] = 0.0
    scores = np.zeros(own.shape)
    expanded = np.zeros(own.shape, bool)
    expanded[:, 0] = True
    level = slice(1, 1 + r.top_k)
    while level.start < own.shape[1]:
        above = r.parents[:, level].clip(min=0)
        grown = np.take_along_axis(expanded, above, 1) & (r.parents[:, level] >= 0)
        scores[:, level] = np.where(grown, np.take_along_axis(scores, above, 1) + own[:, level], -np.inf)
        best = np.argsort(-scores[:, level], 1, kind="stable")[:, :top_k] + level.start
        np.put_along_axis(expanded, best, True, 1)
        level = slice(level.stop, level.stop + r.top_k**2)
    scores[:, 0] = np.inf
    kept = np.zeros(own.shape, bool)
    np.put_along_axis(kept, np.argsort(-scores, 1, kind="stable")[:, : nodes + 1], True, 1)
    return np.where(kept & r.hits & np.isfinite(own), r.depths, 0).max(1)


def replay(r: Record, drafts_accepted: Sequence[int]) -> tuple[int, int]:
    """(tokens, steps) behind the first place."""
    at, steps, by_place = r.places[0], 0, dict(zip(r.places, drafts_accepted))
    while at < len(r.text):  # plain steps where there was no draft
        at, steps = min(at + 1 + int(by_place.get(at, 0)), len(r.text)), steps + 1
    return at - r.places[0], steps


def ngram(r: Record, nodes: int) -> tuple[int, int]:
    """(tokens, steps) of the engine's n-gram drafts."""
    drafter, at, steps = NgramDrafter(), r.places[0], 0
    state = SimpleNamespace(tokens=r.text[:at], drafter_state=None)
    while at < len(r.text):
        state.tokens = r.text[:at]
        (draft,) = drafter.propose([state], [Limit(nodes, nodes)], None)
        children = {(p, t): n for n, (t, p) in enumerate(zip(draft.token_ids, draft.parents), 1)}
        node, at, steps = 0, at, steps + 1
        while at < len(r.text) and (node, r.text[at]) in children:
            node, at = children[node, r.text[at]], at + 1
        at = min(at + 1, len(r.text))
    return at - r.places[0], steps


def rank_chances(records: Sequence[Record]) -> list[float]:
    """How often the child of each rank is what the text goes on with, at depth 1; falling."""
    count = sum(len(r.places) for r in records)
    hits = [sum(int(r.hits[:, 1 + rank].sum()) for r in records) for rank in range(records[0].top_k)]
    return np.minimum.accumulate([max(n, 0.5) / count for n in hits]).tolist()


def ratio(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Tokens a step of `a` [documents, (tokens, steps)] over those of `b`, with a 95 % bootstrap over documents."""
    draws = np.random.default_rng(0).integers(0, len(a), (4000, len(a)))
    sums = [np.concatenate([x.sum(0)[None], x[draws].sum(1)]) for x in (a, b)]
    rates = [s[:, 0] / s[:, 1] for s in sums]
    value = rates[0] / rates[1]
    return float(value[0]), *(float(x) for x in np.quantile(value[1:], [0.025, 0.975]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", default="eagle3", help="of a head that ships (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=20, help="held-out ones (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="behind each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file of the figures (JSON)")
    options = parser.parse_args(argv)
    model = load_model("smollm2")
    prompts = held_out_prompts(model.tokenizer, options.documents)
    top_k, depth = max(w for w, _ in WIDTHS_AND_DEPTHS), max(d for _, d in WIDTHS_AND_DEPTHS)
    records = []
    for name, prompt in prompts.items():
        records.append(record(model, prompt, options.tokens, kind=options.kind, top_k=top_k, depth=depth))
        print(f"recorded {name}", flush=True)
    ranks = rank_chances(records)
    figures: dict[str, Any] = {"kind": options.kind, "documents": list(prompts), "ranks": ranks, "cells": {}}
    for nodes in BUDGETS:
        arms = {"n-gram": np.array([ngram(r, nodes) for r in records], float)}
        for width, deep in WIDTHS_AND_DEPTHS:
            for rule, chances in (("static", ranks[:width]), ("dynamic", None)):
                arms[f"{rule} {width} {deep}"] = np.array(
                    [replay(r, accepted(r, nodes, width, deep, chances)) for r in records], float
                )
        rates = {name: float(arm[:, 0].sum() / arm[:, 1].sum()) for name, arm in arms.items()}
        best = max((name for name in rates if name.startswith("static")), key=lambda name, r=rates: r[name])
        for name, arm in arms.items():
            cell = {"tokens_a_step": rates[name], "over_best_static": ratio(arm, arms[best]),
                    "over_ngram": ratio(arm, arms["n-gram"])}  # fmt: skip
            figures["cells"][f"{name}/{nodes}"] = cell
            shown = ", ".join(f"{key} {v[0]:.3f} ({v[1]:.3f}-{v[2]:.3f})" for key, v in list(cell.items())[1:])  # type: ignore[index]
            print(f"{nodes:2} nodes, {name:12}: {rates[name]:.3f} tokens a step, {shown}")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
