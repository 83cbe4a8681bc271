"""Claim: as the target's weights move, acceptance falls from 78 to 55 %; online distillation restores it for 3 %.

A byte-level Llama and its MTP head are trained here on source code; then the target is fine-tuned in small steps on
prose. Two engines serve the same requests behind every step: one keeps the head as it was (frozen), one lets it learn
from its own steps (online). Half of the prompts are code, half prose, at temperature 1, chains of three drafts.
The first chunks are served before anything moves. Acceptance is conditional: accepted / (accepted + rejected).

    python -m benchmarks.claims.distillation [--shares S ...] [--quick] [--out FOLDER] [--no-plot]
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats

from benchmarks.claims import byte_models
from benchmarks.claims.common import Claim
from specdec_kernels.engine import Engine, EngineConfig, TransformersModel
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.heads import DraftHead
from specdec_kernels.training import Corpus, HeadTrainer, OnlineDrafter, OnlineOptions, TrainOptions, compute_features
from specdec_kernels.training.heads import new_head

_DEPTH = 3
_LAST = 20  # chunks that the closing comparison takes


@dataclass(frozen=True)
class Size:
    """Of the target; training steps of target and head; chunks served before and during the drift; a chunk: `requests`
    of `tokens` tokens, behind `drift` steps of the target. length: tokens that are learnt from at once."""

    hidden: int = 128
    layers: int = 3
    steps: int = 400
    head_steps: int = 150
    still: int = 4
    moving: int = 30
    drift: int = 5
    requests: int = 12
    tokens: int = 192
    length: int = 30


QUICK = Size(hidden=64, layers=1, steps=16, head_steps=3, still=1, moving=2, drift=2, requests=3, tokens=40, length=12)


def train_head(model: Any, text: torch.Tensor, steps: int) -> tuple[DraftHead, list[float]]:
    """(MTP head trained on the target's states of a text, losses)."""
    options = TrainOptions(kind="mtp", depths=_DEPTH, rows=0, num_steps=steps, batch=8, draft_vocab=0, dtype="float32")
    chunks = byte_models.pieces(text, max(16, 2 * steps), 96, seed=7).int()
    with tempfile.TemporaryDirectory() as folder:
        store = compute_features(folder, model, Corpus(chunks[8:], chunks[:8], [], []), [model.num_layers])
        trainer = HeadTrainer(model, new_head(model, options, store), store, options, folder)
        for _ in range(steps):
            trainer.train_step()
    return trainer.head, trainer.losses


class Arm:
    """One engine and what it did in each chunk."""

    def __init__(self, model: Any, head: DraftHead, size: Size, share: float | None):
        self.name = "frozen" if share is None else f"online, at most {share:.0%}"
        drafter = EagleDrafter(copy.deepcopy(head), top_k=1, depth=_DEPTH, num_nodes=_DEPTH)
        self.online: OnlineDrafter | None = None
        if share is not None:
            options = OnlineOptions(share=share, length=size.length, waiting=4, batch=8, depths=_DEPTH, lr=0.02)
            self.online = OnlineDrafter(drafter, options)
        config = EngineConfig(num_pages=1024, max_batch=size.requests, num_drafts=_DEPTH)
        self.engine, self.size = Engine(model, self.online or drafter, config), size
        self.rows: list[dict[str, float]] = []

    def serve(self, prompts: list[list[int]], seed: int) -> None:
        m = self.engine.metrics
        before = (m.accepted, m.rejected, m.emitted, m.steps)
        self.engine.generate(prompts, max_tokens=self.size.tokens, temperature=1.0, seed=seed, ignore_eos=True)
        accepted, rejected, emitted, steps = (
            now - then for now, then in zip((m.accepted, m.rejected, m.emitted, m.steps), before)
        )
        self.rows.append({"acceptance": accepted / (accepted + rejected), "tokens a step": emitted / steps})

    @property
    def rate(self) -> float:
        """Tokens a second, training included."""
        trained = 0.0 if self.online is None else self.online.counters.train_time_s
        return self.engine.metrics.emitted / (self.engine.metrics.step_time_s + trained)

    def mean(self, rows: slice, what: str = "acceptance") -> float:
        values = [row[what] for row in self.rows[rows]]
        return sum(values) / len(values)

    def above(self, other: Arm, rows: slice) -> tuple[float, float]:
        """Mean difference of acceptance, paired over chunks, and the reach of its 95 % interval (Student's t)."""
        values = [mine["acceptance"] - theirs["acceptance"] for mine, theirs in zip(self.rows[rows], other.rows[rows])]
        error = float(stats.sem(values))
        return sum(values) / len(values), float(stats.t.ppf(0.975, len(values) - 1)) * error


def run(size: Size, shares: Sequence[float]) -> tuple[list[Arm], dict[str, Any]]:
    """Train, drift, serve: (arms, the frozen one first; figures)."""
    code, code_rest = byte_models.split(byte_models.code())
    prose, prose_rest = byte_models.split(byte_models.prose())
    module = byte_models.llama(size.hidden, size.layers)
    byte_models.Trainer(module, 3e-3, batch=8).run(code, size.steps, total=size.steps, report="target")
    model = TransformersModel(module, name="bytes", pack=False)
    before = byte_models.nats(module, code_rest), byte_models.nats(module, prose_rest)
    head, losses = train_head(model, code, size.head_steps)
    arms = [Arm(model, head, size, share) for share in (None, *shares)]
    tuner = byte_models.Trainer(module, 1e-3, batch=8, seed=1)
    for chunk in range(size.still + size.moving):
        if chunk >= size.still:
            tuner.run(prose, size.drift)
            for arm in arms:
                arm.engine.weights_changed()
        half = size.requests // 2
        prompts = [*byte_models.pieces(code_rest, half, 32, chunk), *byte_models.pieces(prose_rest, half, 32, chunk)]
        for arm in arms:
            arm.serve([prompt.tolist() for prompt in prompts], seed=chunk)
        if chunk % 4 == 3:
            now = ", ".join(f"{arm.name} {arm.rows[-1]['acceptance']:.3f}" for arm in arms)
            print(f"chunk {chunk + 1}: {now}", flush=True)
    after = byte_models.nats(module, code_rest), byte_models.nats(module, prose_rest)
    return arms, {"nats_before": before, "nats_after": after, "head_loss": (losses[0], losses[-1])}


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim(
        "distillation", __doc__, argv,
        lambda p: p.add_argument("--shares", type=float, nargs="+", default=[0.03, 0.1, 0.25],
                                 help="one online arm each: most of all time that its training may take"),
    )  # fmt: skip
    size = QUICK if claim.quick else Size()
    arms, figures = run(size, claim.options.shares)
    frozen, end = arms[0], len(arms[0].rows)
    last = slice(max(0, end - _LAST), end)
    count = len(frozen.rows[last])
    rows = []
    for arm in arms:
        online, (mean, reach) = arm.online, arm.above(frozen, last)
        figures[arm.name] = {
            "before": arm.mean(slice(0, size.still)), "end": arm.mean(last), "above_frozen": mean, "reach": reach,
            "tokens_a_step": arm.mean(last, "tokens a step"), "tokens_a_second": arm.rate,
        }  # fmt: skip
        rows.append([arm.name, *figures[arm.name].values()])
        if online is not None:
            figures[arm.name] |= {"cost_share": online.counters.cost_share, "untested": online.capture.untested} | {
                name: value for name, value in vars(online.counters).items() if isinstance(value, int)
            }
    claim.table(
        f"A moving target: {end} chunks of {size.requests} requests, {size.tokens} tokens each; end: last {count}",
        ["arm", "before", "end", "above frozen", "+-", "tokens a step", "tokens/s"],
        rows,
    )
    names = ["cost_share", "chunks", "untested", "updates", "published", "rolled_back", "restarted"]
    claim.table("What the learning took", ["arm", *names],
                [[arm.name, *(figures[arm.name][name] for name in names)] for arm in arms[1:]])  # fmt: skip
    with claim.plot("Acceptance as the target is fine-tuned", "chunk", "conditional acceptance") as axes:
        for arm in arms:
            axes.plot(range(1, end + 1), [row["acceptance"] for row in arm.rows], marker="o", ms=3, label=arm.name)
        axes.axvline(size.still + 0.5, color="#888888", lw=1, ls="--")
    claim.options.out.mkdir(parents=True, exist_ok=True)
    with (claim.options.out / "distillation.jsonl").open("w") as file:
        for chunk in range(end):
            served = {arm.name: arm.rows[chunk] for arm in arms}
            file.write(json.dumps({"chunk": chunk + 1, "moving": chunk >= size.still, "arms": served}) + "\n")
    best = max(arms[1:], key=lambda arm: figures[arm.name]["end"])
    found = figures[best.name]
    return claim.conclude(
        says="acceptance falls from 78 to 55 %, and distillation restores it for 3 % of the time",
        so=f"frozen {rows[0][1]:.3f} before, {rows[0][2]:.3f} at the end; {best.name}: {found['above_frozen']:+.3f} "
        f"(+-{found['reach']:.3f}, paired over {count} chunks) for {found['cost_share']:.1%} of all time",
        figures={"chunks": count, "threads": torch.get_num_threads(), "arms": figures},
    )


if __name__ == "__main__":
    sys.exit(main())
