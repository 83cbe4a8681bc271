"""`python -m specdec_kernels train-head`: text to features to a trained, evaluated, exported head, resumable."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec_kernels.engine import load_model
from specdec_kernels.engine.heads import KINDS
from specdec_kernels.training.data import named_sources, read_corpus
from specdec_kernels.training.evaluate import evaluate_head, predicted_speedup, time_passes
from specdec_kernels.training.features import FeatureStore, compute_features
from specdec_kernels.training.heads import HeadTrainer, TrainOptions, feature_layers, new_head
from specdec_kernels.training.losses import LOSSES

_PLACES = ("out", "features", "command", "resume")
_OPTIONS = ("kind", "depths", "rows", "batch", "lr", "loss", "decay", "draft_vocab", "seed")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Options of `train-head`."""
    default = TrainOptions()
    command.add_argument("--target", default="smollm2", help="smollm2, or a transformers checkpoint folder")
    command.add_argument("--kind", choices=KINDS, default=default.kind)
    command.add_argument(
        "--data", nargs="+", default=["stdlib"], help=f"folders of text, or of {sorted(named_sources())}"
    )
    command.add_argument("--out", required=True, type=Path, help="folder of features, checkpoint and exported head")
    command.add_argument(
        "--features", type=Path, help="folder of the features (default: in --out); heads can share one"
    )
    command.add_argument("--tokens", type=int, default=1_000_000, help="training tokens (default: %(default)s)")
    command.add_argument("--chunks", type=int, help="compute and use only the first so many training chunks")
    command.add_argument("--held-out-tokens", type=int, default=32_768)
    command.add_argument("--length", type=int, default=512, help="tokens a chunk")
    command.add_argument("--prompt-tokens", type=int, help="let the target continue so many tokens of each chunk")
    command.add_argument("--epochs", type=float, default=3.0)
    command.add_argument("--depths", type=int, default=default.depths, help="rollout steps, or Medusa heads")
    command.add_argument("--rows", type=int, default=default.rows, help="rows a chunk that go deeper; 0: all")
    command.add_argument("--batch", type=int, default=default.batch, help="chunks a step")
    command.add_argument("--lr", type=float, default=default.lr)
    command.add_argument("--loss", choices=LOSSES, default=default.loss)
    command.add_argument("--decay", type=float, default=default.decay)
    command.add_argument("--draft-vocab", type=int, default=default.draft_vocab, help="0: the whole vocabulary")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--dtype", help="of target and head: float32 or bfloat16 (default: the fastest here)")
    command.add_argument("--device", default="cpu")
    command.add_argument("--minutes", type=float, help="stop training after so long; --resume goes on")
    command.add_argument("--checkpoint-minutes", type=float, default=2.0)
    command.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out if there is one")
    command.add_argument(
        "--no-embedding", action="store_true", help="export without the target's embedding and output rows"
    )


def run(options: argparse.Namespace) -> int:
    """Features, training, evaluation, export."""
    checkpoint = options.out / "checkpoint.safetensors"
    if checkpoint.exists() and not options.resume:
        raise ValueError(f"train-head: --out: expected a folder without a checkpoint, or --resume, got {options.out}")
    model = load_model(options.target, dtype=options.dtype, device=options.device, pack=False)
    corpus = read_corpus(
        options.data, model.tokenizer, length=options.length, num_tokens=options.tokens,
        held_out_tokens=options.held_out_tokens, seed=options.seed,
    )  # fmt: skip
    layers = sorted({*feature_layers("eagle3", model.num_layers), *feature_layers(options.kind, model.num_layers)})
    with Progress("features") as progress:
        store = compute_features(
            options.features or options.out / "features", model, corpus, layers,
            prompt_tokens=options.prompt_tokens, train_chunks=options.chunks, report=progress,
        )  # fmt: skip
    steps = max(1, int(options.epochs * max(1, store.num_chunks("train") // options.batch)))
    chosen = TrainOptions(num_steps=steps, dtype=options.dtype, **{name: getattr(options, name) for name in _OPTIONS})
    trainer = HeadTrainer(model, new_head(model, chosen, store), store, chosen, options.out)
    if checkpoint.exists():
        trainer.resume()
    with Progress(f"training {options.kind}") as progress:
        done = trainer.run(
            minutes=options.minutes, checkpoint_minutes=options.checkpoint_minutes,
            report=lambda t: progress(t.step, steps, f"loss {sum(t.losses[-20:]) / len(t.losses[-20:]):.4f}"),
        )  # fmt: skip
    trainer.export(options.out / "head", with_embedding=not options.no_embedding)
    (options.out / "losses.json").write_text(json.dumps([round(loss, 5) for loss in trainer.losses]) + "\n")
    _card(options, trainer, store, model, corpus.held_out_names)
    print("finished" if done else f"stopped at step {trainer.step} of {steps}; the same command with --resume goes on")
    return 0


def _card(options: Any, trainer: HeadTrainer, store: FeatureStore, model: Any, held_out: list[str]) -> None:
    """Evaluate and write the model card beside the head."""
    depths = trainer.options.depths
    found = evaluate_head(trainer.head, store, model, depths)
    packed = load_model(options.target, dtype=options.dtype, device=options.device)  # as the engine runs it
    costs = time_passes(packed, trainer.head, depths)
    passes = 1 if options.kind == "medusa" else depths
    speedups = [predicted_speedup(tokens, costs, passes) for tokens in found.tokens]
    recent = trainer.losses[-20:] or [float("nan")]
    chosen = {name: str(value) for name, value in sorted(vars(options).items()) if name not in _PLACES}
    chunks, length = {part: store.num_chunks(part) for part in ("train", "held_out")}, store.meta["length"]
    lines = [
        f"# {options.kind} head for {model.name}",
        "",
        f"- step {trainer.step} of {trainer.options.num_steps}, loss {sum(recent) / len(recent):.4f}",
        f"- options: {json.dumps(chosen)}",
        f"- chunks of {length} tokens: {chunks}",
        f"- greedy acceptance by depth (95 % over chunks): {found.greedy}, rows reached: {found.reached}",
        f"- acceptance at temperature 1 by depth: {found.sampled}",
        f"- tokens a step of a greedy chain of {depths}: {found.tokens}",
        f"- seconds: plain {costs.plain:.4f}, verify {costs.verify:.4f}, draft pass {costs.draft:.4f}",
        f"- predicted speed-up of the chain, batch 1: {speedups[0]:.2f} ({speedups[1]:.2f} to {speedups[2]:.2f})",
        f"- held-out documents: {', '.join(held_out)}",
    ]
    (options.out / "head" / "README.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[2:-1]))


class Progress:
    """A rich progress bar on a terminal, else a line now and then. Call it with (done, total, note)."""

    def __init__(self, what: str, every: float = 30.0):
        self.what, self.every = what, every
        self._bar: Any = None
        self._task: Any = None
        self._said = self._start = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> Callable[..., None]:
        if sys.stdout.isatty():
            with contextlib.suppress(ImportError):  # rich comes with the extra `engine`
                from rich import progress

                columns = (*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[note]}"))
                self._bar = progress.Progress(*columns)
                self._bar.start()
                self._task = self._bar.add_task(self.what, total=None, note="")
        return self._show

    def _show(self, done: int, total: int, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = done
        if now - self._said >= self.every or done == total:
            rate = (done - self._first) / max(1e-9, now - self._start)
            left = f", {(total - done) / rate / 60:.0f} min left" if rate > 0 and done < total else ""
            print(f"{self.what}: {done} of {total}{left} {note}".rstrip(), flush=True)
            self._said = now

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
