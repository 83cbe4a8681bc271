"""Claim: a dense draft for a mixture-of-experts target falls under 50 % acceptance. Acceptance and cost are two things.

A byte-level Mixtral (2 of 16 experts), a dense draft and an MoE draft are trained here on source code. The drafts have
the same active size. Acceptance: chains of four at temperature 1, conditional, paired over requests. Cost: seconds of a
verification pass against tokens and batch, beside the distinct experts that it read, and the advisor's model of it.

    python -m benchmarks.claims.moe [--quick] [--out FOLDER] [--no-plot]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.claims import byte_models
from benchmarks.claims.common import Claim
from specdec_kernels.advisor.experts import ExpertCosts, ExpertSample
from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine import Engine, EngineConfig, TransformersModel
from specdec_kernels.engine.batch import Batch
from specdec_kernels.engine.drafters.draft_model_tree import DraftModelTreeDrafter

_DRAFTS, _CONTEXT, _PAGE = 4, 64, 16
_RESAMPLES = 2000


@dataclass(frozen=True)
class Size:
    """Target: width, layers, experts, their inner width, training steps. Drafts: width, layers, steps."""

    hidden: int = 256
    layers: int = 3
    experts: int = 16
    inner: int = 512
    steps: int = 150
    draft_hidden: int = 128
    draft_layers: int = 2
    draft_steps: int = 160
    requests: int = 24
    tokens: int = 96
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    counts: tuple[int, ...] = (1, 2, 3, 5, 8)  # tokens a request; 5 = four drafts and the root
    rounds: int = 9


QUICK = Size(64, 1, 4, 64, 8, 64, 1, 8, requests=3, tokens=16, batches=(1, 2, 4), counts=(1, 2, 5), rounds=2)


class Experts:
    """Counts which experts each pass reads, by hooks on the routers."""

    def __init__(self, module: Any):
        self.rows: list[torch.Tensor] = []  # expert ids [tokens, 2] of each layer of the latest passes
        routers = [m for m in module.modules() if type(m).__name__.endswith("TopKRouter")]
        self.layers, self.count = len(routers), module.config.num_local_experts
        for router in routers:
            router.register_forward_hook(lambda m, args, output: self.rows.append(output[2]))

    def take(self) -> list[torch.Tensor]:
        rows, self.rows = self.rows, []
        return rows


def verification(model: Any, texts: torch.Tensor, num_tokens: int) -> Any:
    """Call it for a pass over `num_tokens` tokens of each text int64 [B, context + n], behind its cached context."""
    count = len(texts)
    pages = -(-(_CONTEXT + num_tokens) // _PAGE)
    cache = model.allocate_cache(count * pages, _PAGE)
    table = torch.arange(count * pages, dtype=torch.int32).view(count, pages)

    def batch(first: int, size: int) -> Batch:
        lens = torch.full((count,), first, dtype=torch.int32)
        cu = torch.arange(count + 1, dtype=torch.int32) * size
        return Batch(
            token_ids=texts[:, first : first + size].reshape(-1),
            positions=torch.arange(first, first + size, dtype=torch.int32).repeat(count),
            slots=slot_mapping(table, lens, cu, _PAGE, total_nodes=count * size),
            page_table=table, context_lens=lens, cu_nodes=cu, max_nodes=size,
        )  # fmt: skip

    model.forward(batch(0, _CONTEXT), cache)
    step = batch(_CONTEXT, num_tokens)
    return lambda: model.forward(step, cache)


def measure(model: Any, text: torch.Tensor, size: Size) -> tuple[list[dict[str, Any]], ExpertCosts]:
    """(a row a batch and token count, the fitted model)."""
    watch = Experts(model.module)
    longest = _CONTEXT + max(size.counts)
    passes, rows, loads = {}, [], torch.zeros(watch.layers, watch.count, dtype=torch.float64)
    for batch in size.batches:
        for count in size.counts:
            run = verification(model, byte_models.pieces(text, batch, longest, seed=batch), count)
            watch.take()
            run()
            chosen = watch.take()
            for layer, ids in enumerate(chosen):
                loads[layer] += torch.bincount(ids.flatten(), minlength=watch.count) / ids.shape[0]
            experts = sum(len(ids.unique()) for ids in chosen)
            passes[batch, count] = run
            rows.append({"batch": batch, "tokens": count, "experts": experts})
    times: dict[tuple[int, int], list[float]] = {key: [] for key in passes}
    for _ in range(size.rounds):  # in turns, so that a slow moment of the machine meets all of them
        for key, run in passes.items():
            start = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - start)
            watch.take()
    for row in rows:
        row["seconds"] = statistics.median(times[row["batch"], row["tokens"]])
    samples = [ExpertSample(row["batch"] * row["tokens"], row["experts"], row["seconds"]) for row in rows]
    return rows, ExpertCosts.fit(samples, (loads / len(passes)).clamp(0, 1).tolist())


def accept(model: Any, draft: Any, prompts: list[list[int]], size: Size) -> np.ndarray:
    """[requests, 2]: accepted and rejected of each request."""
    drafter = DraftModelTreeDrafter(draft, top_k=1, depth=_DRAFTS, num_nodes=_DRAFTS)
    engine = Engine(model, drafter, EngineConfig(num_pages=1024, max_batch=8, num_drafts=_DRAFTS))
    results = engine.generate(prompts, max_tokens=size.tokens, temperature=1.0, seed=1, ignore_eos=True)
    return np.array([(r.stats.accepted, r.stats.rejected) for r in results], dtype=np.float64)


def rate(counts: np.ndarray) -> float:
    return float(counts[:, 0].sum() / counts.sum())


def interval(values: list[float]) -> tuple[float, float]:
    return float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("moe", __doc__, argv)
    size = QUICK if claim.quick else Size()
    text, rest = byte_models.split(byte_models.code())
    active = byte_models.inner_width(size.draft_hidden) // 2  # of an expert: two of them are a dense layer
    modules = {
        "target": byte_models.mixtral(size.hidden, size.layers, size.experts, size.inner),
        "dense draft": byte_models.llama(size.draft_hidden, size.draft_layers, seed=1),
        "MoE draft": byte_models.mixtral(size.draft_hidden, size.draft_layers, 8, active, seed=1),
    }
    quality = {}
    for name, module in modules.items():
        steps = size.steps if name == "target" else size.draft_steps
        byte_models.Trainer(module, 2e-3, batch=8, seed=2).run(text, steps, total=steps, report=name)
        quality[name] = byte_models.nats(module, rest)
    models = {name: TransformersModel(module, name=name) for name, module in modules.items()}
    prompts = [row.tolist() for row in byte_models.pieces(rest, size.requests, 32, seed=5)]
    counts = {name: accept(models["target"], models[name], prompts, size) for name in ("dense draft", "MoE draft")}
    draws = np.random.default_rng(0).integers(0, size.requests, (_RESAMPLES, size.requests))
    resampled = {name: [rate(found[draw]) for draw in draws] for name, found in counts.items()}
    apart = [a - b for a, b in zip(resampled["MoE draft"], resampled["dense draft"])]
    difference = rate(counts["MoE draft"]) - rate(counts["dense draft"])
    claim.table(
        f"Conditional acceptance, chains of {_DRAFTS}, temperature 1 ("
        f"{size.requests} requests of {size.tokens} tokens)",
        ["draft", "nats a byte", "acceptance", "low", "high"],
        [[name, quality[name], rate(found), *interval(resampled[name])] for name, found in counts.items()],
    )
    rows, costs = measure(models["target"], rest, size)
    seconds = {(row["batch"], row["tokens"]): row["seconds"] for row in rows}
    table, errors = [], []
    first, last = size.batches[0], size.batches[-1]
    verified = _DRAFTS + 1
    for row in rows:
        batch, tokens = row["batch"], row["tokens"]
        total = batch * tokens
        predicted = costs.seconds(total)
        errors.append(abs(predicted / row["seconds"] - 1))
        table.append([batch, tokens, row["experts"] / len(costs.loads), costs.experts(total) / len(costs.loads),
                      1e3 * row["seconds"], 1e3 * predicted, row["seconds"] / seconds[batch, 1]])  # fmt: skip
    claim.table(
        f"A verification pass of the target ({size.experts} experts a layer, 2 a token)",
        ["batch", "tokens a request", "experts read", "predicted", "ms", "predicted ms", "of a plain step"],
        table,
    )
    relative = {b: seconds[b, verified] / seconds[b, 1] for b in size.batches}
    modelled = {b: costs.verify(b)(verified) for b in size.batches}
    share = {b: (b - first) / (last - first) for b in size.batches}
    drawn = {b: (1 - share[b]) * relative[first] + share[b] * relative[last] for b in size.batches}
    with claim.plot(f"Verifying {_DRAFTS} drafts of an MoE target", "batch", "cost in plain steps") as axes:
        axes.plot(size.batches, list(relative.values()), marker="o", label="measured")
        axes.plot(size.batches, list(modelled.values()), ls="--", label="distinct experts (advisor)")
        axes.plot(size.batches, list(drawn.values()), ls=":", label="drawn from the first batch to the last")
        axes.set_xscale("log", base=2)
    claim.options.out.mkdir(parents=True, exist_ok=True)
    with (claim.options.out / "moe.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row | {"threads": torch.get_num_threads()}) + "\n")
    middle, (apart_low, apart_high) = statistics.median(errors), interval(apart)
    return claim.conclude(
        says="a dense draft for an MoE target falls under 50 % acceptance",
        so=f"acceptance {rate(counts['dense draft']):.3f} with the dense draft, {rate(counts['MoE draft']):.3f} with "
        f"the MoE one ({difference:+.3f}, {apart_low:+.3f} to {apart_high:+.3f}); "
        f"verifying costs {relative[first]:.2f} plain steps at batch {first}, "
        f"{max(relative.values()):.2f} at most, {relative[last]:.2f} at {last}",
        figures={
            "nats a byte": quality, "acceptance": {name: rate(found) for name, found in counts.items()},
            "difference": difference, "difference_interval": interval(apart), "relative": relative,
            "relative_predicted": modelled, "relative_interpolated": drawn, "median_error": middle,
            "worst_error": max(errors), "base_ms": 1e3 * costs.base, "per_expert_ms": 1e3 * costs.per_expert,
            "per_token_ms": 1e3 * costs.per_token, "alike": costs.alike, "threads": torch.get_num_threads(),
        },
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
