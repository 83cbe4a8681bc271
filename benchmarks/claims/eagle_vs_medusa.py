"""Claim: EAGLE-2 beats Medusa by .4x.

The heads that ship for SmolLM2, trained on the same text, at equal numbers of verified nodes, on text that neither was
trained on: EAGLE-3 (a dynamic tree, a pass a level), the MTP module where one ships (the same), and the Medusa set (a
static tree, the best for its acceptance by depth and rank on other held-out text; one pass). Beside them n-gram drafts,
which cost nothing. Greedy, batch 1. What the heads weigh is in the table too: they do not have equally many parameters.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.claims.common import Claim
from benchmarks.claims.heads import (
    COLUMNS,
    SHOWN,
    best_paths,
    comb,
    figures_of,
    gains,
    gate,
    held_out_prompts,
    keep_rows,
    options_of,
    rank_table,
)
from specdec_kernels.engine import load_model
from specdec_kernels.engine.costs import DecodingCosts, measure_costs
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.head_files import SHIPPED
from specdec_kernels.engine.policy import FREE_DRAFTS
from specdec_kernels.training.measure import Arm, race

DEPTH, TOP_K = 4, 4


def shipped_kinds() -> dict[str, float]:
    """Megabytes of the weights of each kind that ships, by name."""
    found = {}
    for path in sorted(SHIPPED.glob("*/config.json")):
        kind = json.loads(path.read_text())["speculators_model_type"]
        found[kind] = (path.parent / "model.safetensors").stat().st_size / 1e6
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("eagle_vs_medusa", __doc__, argv, options_of)
    options, model = claim.options, load_model("smollm2")
    count, tokens = (2, 16) if claim.quick else (options.prompts, options.tokens)
    budgets = [8] if claim.quick else options.budgets
    documents = held_out_prompts(model.tokenizer, count + (1 if claim.quick else 3))
    names = list(documents)
    watched = MedusaDrafter(paths=comb(DEPTH, TOP_K))
    table = rank_table(watched, model, [documents[name] for name in names[count:]], tokens)
    prompts = [documents[name] for name in names[:count]]
    sizes = {**shipped_kinds(), "ngram": 0.0}

    def drafter(kind: str, nodes: int) -> Any:
        if kind == "ngram":
            return "ngram"
        if kind == "medusa":
            return MedusaDrafter(paths=best_paths(table, nodes))
        return EagleDrafter(kind=kind, num_nodes=nodes)

    rounds = 2 if claim.quick else 8
    steps = sorted({0, 1, 2, 3, 4, *budgets})
    costs = {
        kind: measure_costs(model, drafter(kind, max(budgets)), prompts[:1], sizes=steps, rounds=rounds)
        for kind in sizes
        if kind != "ngram"
    }
    costs["ngram"] = DecodingCosts(
        costs["eagle3"].forward, FREE_DRAFTS
    )  # a look-up in the text takes no time to speak of
    longest = max(map(len, prompts)) + tokens
    arms = {"plain": Arm.of(model, "none", longest=longest)}
    for nodes in budgets:
        for kind in sizes:
            arms[f"{kind} {nodes}"] = Arm.of(model, drafter(kind, nodes), longest=longest, num_drafts=nodes)
    with machine.Quiet() as quiet:
        race(arms, prompts, tokens)
    plain = arms.pop("plain")
    ties = gate("eagle_vs_medusa", model, prompts, plain, arms)
    context = statistics.mean(map(len, prompts)) + tokens / 2
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {"prompts": names[:count], "megabytes": sizes, "medusa_ranks": table, "ties": ties}
    cells = figures["cells"] = {}
    for nodes in budgets:
        for kind in sizes:
            arm = arms[f"{kind} {nodes}"]
            found = cells[f"{kind}/{nodes}"] = figures_of(plain, arm, costs[kind], context)
            step = costs[kind].seconds(found["drafts"], found["levels"], context=context)
            found["step_in_plain_steps"] = step / costs[kind].seconds(0, 0, context=context)
            rows.append([nodes, kind, sizes[kind], found["step_in_plain_steps"], *(found[name] for name in SHOWN)])
        figures.setdefault("eagle3_over_medusa", {})[str(nodes)] = gains(
            arms[f"eagle3 {nodes}"], arms[f"medusa {nodes}"]
        )
    claim.table(
        f"{count} held-out documents, {tokens} tokens each, batch 1; foreign CPU {quiet.foreign:.2f} cores",
        ["nodes", "head", "MB", "cost of a step", *COLUMNS], rows,
    )  # fmt: skip
    with claim.plot("Speed-up over plain decoding by verified draft nodes", "draft nodes a step", "speed-up") as axes:
        for kind in sizes:
            axes.plot(budgets, [cells[f"{kind}/{n}"]["speedup"] for n in budgets], marker="o", label=kind)
        axes.axhline(1.0, color="#888888", lw=1, ls=":")
    figures |= {"foreign_cpu": quiet.foreign, "machine": machine.describe(), "dtype": str(model.dtype)}
    keep_rows(claim, figures)
    listed = "; ".join(
        f"at {n} nodes {cells[f'eagle3/{n}']['tokens_a_step']:.2f} against {cells[f'medusa/{n}']['tokens_a_step']:.2f} "
        f"tokens a step, {cells[f'eagle3/{n}']['speedup']:.2f}x against {cells[f'medusa/{n}']['speedup']:.2f}x"
        for n in budgets
    )
    best = {kind: max(cells[f"{kind}/{n}"]["speedup"] for n in budgets) for kind in sizes}
    return claim.conclude(
        says="EAGLE-2 beats Medusa by .4x",
        so=f"EAGLE-3 against Medusa {listed}; each at its best budget {best['eagle3']:.2f}x against "
        f"{best['medusa']:.2f}x, a difference of {best['eagle3'] - best['medusa']:+.2f}x",
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
