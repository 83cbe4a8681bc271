"""Claim: acceptance under 65 % gives less than 1.3x; under 70 % speculation gets rolled back.

Whether that is so depends on what a draft and a verification cost. Here both are measured: forwards over 1 to 6 tokens
a request behind 256 cached ones, at several batch sizes, of a decoder of SmolLM2-135M's shape and of a one-layer draft
of the same width with a 4096-token head (the size of an EAGLE head). Random weights, bfloat16, through transformers:
time does not depend on the values. --costs FILE takes measured costs instead:
{"batch": {"verify": {"1": seconds, "2": ...}, "draft": seconds}}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.claims.common import Claim
from benchmarks.harness import interleave
from specdec_kernels.advisor.speedup import StepCosts, acceptance_for, optimal_depth, speedup_chain, verify_curve

CONTEXT, NUM_DRAFTS = 256, 5


def decoder(layers: int, dtype: torch.dtype, vocab_size: int = 49152) -> Any:
    """A LlamaForCausalLM of SmolLM2-135M's width with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


def forward(model: Any, batch: int, num_tokens: int) -> Callable[[], torch.Tensor]:
    """A call that runs num_tokens new tokens a request behind CONTEXT cached ones, and leaves the cache as it was."""
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.randint(
        0, model.config.vocab_size, (batch, CONTEXT + num_tokens), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        model(ids[:, :CONTEXT], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            logits = model(ids[:, CONTEXT:], past_key_values=cache, use_cache=True).logits
        cache.crop(-num_tokens)
        return logits

    return call


def gate() -> bool:
    """Tokens verified together give the scores of tokens run one by one (float32, two layers)."""
    model = decoder(2, torch.float32)
    together = forward(model, 1, 4)()
    again = forward(model, 1, 4)
    again()
    ids = torch.randint(0, 49152, (1, CONTEXT + 4), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        alone = model(ids).logits[:, CONTEXT:]
    return bool(torch.allclose(together, alone, atol=1e-3)) and bool(torch.allclose(again(), alone, atol=1e-3))


def measure(quick: bool) -> dict[int, dict[str, Any]]:
    """Seconds of target and draft forwards by batch size; all of one batch size in the same interleaved rounds."""
    if not gate():
        raise AssertionError("threshold: cached forward differs from the whole one, nothing measured")
    target, draft = decoder(4 if quick else 30, torch.bfloat16), decoder(1, torch.bfloat16, vocab_size=4096)
    counts = [1, NUM_DRAFTS + 1] if quick else [1, 2, 4, NUM_DRAFTS + 1]
    costs: dict[int, dict[str, Any]] = {}
    for batch in [1, 2] if quick else [1, 4]:
        calls: dict[str, Callable[[], Any]] = {str(n): forward(target, batch, n) for n in counts}
        timings = interleave(calls | {"draft": forward(draft, batch, 1)}, rounds=5 if quick else 12, budget=20.0)
        seconds = {name: timing.median for name, timing in timings.items()}
        spread = {name: [timing.quantile(0.1), timing.quantile(0.9)] for name, timing in timings.items()}
        drafting = seconds.pop("draft")
        costs[batch] = {"verify": {int(n): t for n, t in seconds.items()}, "draft": drafting, "p10_p90": spread}
    return costs


def load(path: Path) -> dict[int, dict[str, Any]]:
    """Costs from a file; ValueError where something is missing."""
    found = json.loads(path.read_text())
    try:
        return {
            int(batch): {"verify": {int(n): float(t) for n, t in row["verify"].items()}, "draft": float(row["draft"])}
            for batch, row in found.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"threshold: --costs: expected batch -> verify, draft in seconds, got {error!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--costs", type=Path, help="measured costs (JSON) instead of measuring")

    claim = Claim("threshold", __doc__, argv, more)
    measured = load(claim.options.costs) if claim.options.costs else measure(claim.quick)
    steps = {"model: draft .1, verification free": StepCosts(0.1)}
    for batch, row in measured.items():
        plain = row["verify"][1]
        steps[f"measured, batch {batch}"] = StepCosts(row["draft"] / plain, verify_curve(row["verify"]))
    rows = []
    for name, costs in steps.items():
        at = [speedup_chain(alpha, NUM_DRAFTS, costs) for alpha in (0.65, 0.7)]
        needed = [acceptance_for(level, NUM_DRAFTS, costs) for level in (1.0, 1.3)]
        shown = ["out of reach" if alpha is None else alpha for alpha in needed]
        best = optimal_depth(0.65, costs, max_drafts=NUM_DRAFTS)
        rows.append([name, costs.draft, costs.verify(NUM_DRAFTS + 1), *at, *shown, *best])
    columns = ["costs", "draft", "verify 6", "at .65", "at .70", "pays from", "1.3x from", "best depth", "its speed-up"]
    claim.table(f"speed-up of {NUM_DRAFTS} drafts against conditional acceptance", columns, rows)
    with claim.plot(f"Speed-up of {NUM_DRAFTS} drafts", "conditional acceptance", "speed-up") as axes:
        grid = [i / 100 for i in range(20, 100)]
        for name, costs in steps.items():
            axes.plot(grid, [speedup_chain(alpha, NUM_DRAFTS, costs) for alpha in grid], label=name)
        axes.axhline(1.3, color="#888888", lw=1, ls=":")
        axes.axvline(0.65, color="#888888", lw=1, ls=":")
    clauses = [
        f"{row[0]}: {row[3]:.2f}x at .65, 1.3x {row[6] if isinstance(row[6], str) else f'from {row[6]:.2f}'}"
        for row in rows
    ]
    return claim.conclude(
        says="under 65 % acceptance the gain is under 1.3x",
        so=("it depends on the costs; " if min(row[3] for row in rows) < 1.3 <= max(row[3] for row in rows) else "")
        + "; ".join(clauses)
        + f"; at .65 the best depth within {NUM_DRAFTS} is "
        + ", ".join(f"{row[7]} ({row[8]:.2f}x)" for row in rows)
        + " in the same order",
        figures={
            "speedup_at_0.65": {row[0]: row[3] for row in rows},
            "acceptance_for_1.3": {row[0]: row[6] for row in rows},
            "draft_cost": {row[0]: row[1] for row in rows},
            "verify_cost_6": {row[0]: row[2] for row in rows},
            "measured": measured,
            "machine": None if claim.options.costs else machine.describe(),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
