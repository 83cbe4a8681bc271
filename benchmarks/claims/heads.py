"""What the claims about draft heads share: prompts nobody trained on, the shipped heads, their ranks, the gate."""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims.common import Claim
from specdec_kernels.engine import Engine, EngineConfig
from specdec_kernels.engine.costs import DecodingCosts
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.training.data import is_held_out, named_sources
from specdec_kernels.training.measure import Arm

PROMPT_TOKENS, SKIP_TOKENS = 128, 200  # a file's beginning is often a licence
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
TIE = 0.25  # as in bench_engine: two units in the last place of a bfloat16 logit between 16 and 32


def held_out_prompts(tokenizer: Any, count: int) -> dict[str, list[int]]:
    """Token ids by document that no head here was trained on: files of the standard library, every sixth of them in
    turns, and behind these the documentation's sources where they are installed. ValueError if there are too few."""
    found = {}
    for source, folders in named_sources().items():
        for root in folders:
            names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if _is_text(path, root)]
            names = [name for name in names if is_held_out(f"{source}/{name}")]
            for i in sorted(range(len(names)), key=lambda i: (i % 6, i)):
                if len(found) == count:
                    return found
                ids = tokenizer((root / names[i]).read_text())["input_ids"][SKIP_TOKENS : SKIP_TOKENS + PROMPT_TOKENS]
                if len(ids) == PROMPT_TOKENS:
                    found[names[i] if source == "stdlib" else f"{source}/{names[i]}"] = ids
    if len(found) < count:
        raise ValueError(f"held_out_prompts: count: expected at most {len(found)} documents, got {count}")
    return found


def _is_text(path: Path, root: Path) -> bool:
    return (
        path.name.endswith((".py", ".rst.txt"))
        and not LEFT_OUT & set(path.relative_to(root).parts)
        and path.stat().st_size > 4000
    )


def gate(claim: str, model: Any, prompts: Sequence[Sequence[int]], plain: Arm, arms: dict[str, Arm]) -> int:
    """AssertionError if an arm wrote another text than plain decoding that no tie explains; returns the ties."""
    ties = 0
    for name, arm in arms.items():
        for prompt, wanted, text in zip(prompts, plain.texts, arm.texts):
            found = compare_greedy(model, list(prompt), wanted, text)
            if found is not None and not found.excused and found.gap > TIE:
                raise AssertionError(f"{claim}: {name} writes another text: {found}")
            ties += found is not None
    return ties


def rank_table(drafter: Any, model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
    """[depth][rank]: how often the child of this rank is the token that the target emits, given that the likeliest
    tokens were at all depths before, on greedy texts behind `prompts`. The drafter's tree must hold these children."""
    seen: list[tuple[Any, int, Any]] = []
    propose = drafter.propose

    def watched(states: Any, limits: Any, context: Any) -> Any:
        drafts = propose(states, limits, context)
        seen.extend((state, len(state.tokens), draft) for state, draft in zip(states, drafts))
        return drafts

    drafter.propose = watched
    engine = Engine(model, drafter, EngineConfig(num_pages=256, max_batch=1, prefix_cache=False))
    engine.generate([list(prompt) for prompt in prompts], max_tokens=tokens, ignore_eos=True)
    hits: list[list[int]] = []
    tried: list[int] = []
    for state, at, draft in seen:
        children: dict[int, list[tuple[int, int]]] = {}  # of each node: (node, token), in the order of their ranks
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents), 1):
            children.setdefault(parent, []).append((node, token))
        node, depth = 0, 0
        while at + depth < len(state.tokens) and node in children:
            nodes, ids = zip(*children[node])
            if depth == len(hits):
                hits.append([0] * len(ids))
                tried.append(0)
            tried[depth] += 1
            if state.tokens[at + depth] not in ids:
                break
            rank = ids.index(state.tokens[at + depth])
            hits[depth][rank] += 1
            if rank:
                break
            node, depth = nodes[0], depth + 1
    # Half a hit for what was never seen; a rank is worth no more than the one before it.
    table = [[max(n, 0.5) / max(1, count) for n in row] for row, count in zip(hits, tried)]
    return [[min(row[: rank + 1]) for rank in range(len(row))] for row in table]


def comb(depth: int, width: int) -> list[tuple[int, ...]]:
    """Rank paths of a tree with `width` children at every depth of the likeliest path: what `rank_table` needs."""
    return [(0,) * d + (rank,) for d in range(depth) for rank in range(width)]


def best_paths(table: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """Rank paths of the static tree of `nodes` nodes that emits most, by a `rank_table`: the largest products. No child
    has a larger one than its parent or than its elder sibling."""
    queue, chosen = [(-table[0][0], (0,))], []
    while queue and len(chosen) < nodes:
        value, path = heapq.heappop(queue)
        chosen.append(path)
        *before, rank = path
        row = table[len(before)]
        if rank + 1 < len(row):
            heapq.heappush(queue, (value / row[rank] * row[rank + 1], (*before, rank + 1)))
        if len(path) < len(table):
            heapq.heappush(queue, (value * table[len(path)][0], (*path, 0)))
    return chosen


def gains(a: Arm, b: Arm) -> tuple[float, float, float]:
    """Tokens a step of arm `a` over those of arm `b`, with a 95 % interval by bootstrap over prompts."""
    table = np.array([a.tokens, a.steps, b.tokens, b.steps], float)
    draws = np.random.default_rng(0).integers(0, table.shape[1], (2000, table.shape[1]))
    sums = np.concatenate([table.sum(1)[:, None], table[:, draws].sum(2)], 1)
    ratio = sums[0] / sums[1] / (sums[2] / sums[3])
    low, high = np.quantile(ratio[1:], [0.025, 0.975])
    return float(ratio[0]), float(low), float(high)


def figures_of(plain: Arm, arm: Arm, costs: DecodingCosts, context: float) -> dict[str, Any]:
    """Tokens a step, speed-up behind the first token (median, range, of the total time), and what the costs predict."""
    drafts, levels = arm.mean_draft
    ratios = [p / a for p, a in zip(plain.seconds, arm.seconds)]
    return {
        "tokens_a_step": arm.tokens_a_step,
        "drafts": drafts,
        "levels": levels,
        "speedup": statistics.median(ratios),
        "range": f"{min(ratios):.2f}..{max(ratios):.2f}",
        "speedup_total": sum(plain.seconds) / sum(arm.seconds),
        "predicted": costs.speedup(arm.tokens_a_step, drafts, levels, context=context),
        "tokens": arm.tokens,
        "steps": arm.steps,
    }


def keep_rows(claim: Claim, figures: dict[str, Any]) -> None:
    """NAME.jsonl beside NAME.json: a row an arm, each with what it was measured on."""
    shared = {name: figures[name] for name in ("foreign_cpu", "machine", "dtype")}
    claim.options.out.mkdir(parents=True, exist_ok=True)
    with (claim.options.out / f"{claim.name}.jsonl").open("w") as file:
        for name, cell in figures["cells"].items():
            file.write(json.dumps({"claim": claim.name, "arm": name, **cell, **shared}) + "\n")


SHOWN = ("tokens_a_step", "levels", "speedup", "range", "speedup_total", "predicted")
COLUMNS = ("tokens a step", "levels", "speed-up", "range", "of total time", "predicted")


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=10, help="held-out documents (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens behind each (default: %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16], help="verified draft nodes")
