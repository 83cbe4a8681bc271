"""`python -m specdec_kernels train-head`: text to features to a trained, evaluated, exported head, resumable."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec_kernels.engine import load_model
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.heads import KINDS
from specdec_kernels.training.data import named_sources, read_corpus
from specdec_kernels.training.evaluate import evaluate_head
from specdec_kernels.training.features import compute_features
from specdec_kernels.training.heads import HeadTrainer, TrainOptions, feature_layers, new_head
from specdec_kernels.training.losses import LOSSES
from specdec_kernels.training.measure import measure_head

_PLACES = ("out", "features", "begin", "command", "resume")
_OPTIONS = ("kind", "begin", "depths", "rows", "batch", "lr", "loss", "decay", "draft_vocab", "intermediate", "seed")
_TREE_NODES, _PROMPTS, _TOKENS = 16, 8, 64  # of the engine run in a card


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
    command.add_argument(
        "--prompt-tokens", type=int, nargs="+",
        help="let the target continue so many tokens of each chunk; several numbers: shard by shard in turns",
    )  # fmt: skip
    command.add_argument("--begin", help="folder of a head to begin at (default: a linear guess); its shape is kept")
    command.add_argument("--epochs", type=float, default=3.0)
    command.add_argument("--depths", type=int, default=default.depths, help="rollout steps, or Medusa heads")
    command.add_argument("--rows", type=int, default=default.rows, help="rows a chunk that go deeper; 0: all")
    command.add_argument("--batch", type=int, default=default.batch, help="chunks a step")
    command.add_argument("--lr", type=float, default=default.lr)
    command.add_argument("--loss", choices=LOSSES, default=default.loss)
    command.add_argument("--decay", type=float, default=default.decay)
    command.add_argument("--draft-vocab", type=int, default=default.draft_vocab, help="0: the whole vocabulary")
    command.add_argument("--intermediate", type=int, help="width of the head's MLP (default: the target's)")
    command.add_argument("--evaluate-every", type=int, help="steps between two evaluations (default: an epoch)")
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
    done = train(trainer, model, options, max(1, steps // max(1, round(options.epochs))))
    (options.out / "losses.json").write_text(json.dumps([round(loss, 5) for loss in trainer.losses]) + "\n")
    _card(options, trainer, corpus.held_out_names)
    print("finished" if done else f"stopped at step {trainer.step} of {steps}; the same command with --resume goes on")
    return 0


def train(trainer: HeadTrainer, model: Any, options: argparse.Namespace, epoch: int) -> bool:
    """Train to the end, or as long as `--minutes` says; whether the end was reached. At every evaluation the head goes
    to out/head if no earlier one was better on held-out text: more tokens a step of a greedy chain. A loss that falls
    says nothing, because a head can learn its training text by heart."""
    path, steps = options.out / "evaluations.json", trainer.options.num_steps
    every = options.evaluate_every or epoch
    found = json.loads(path.read_text()) if path.exists() and options.resume else []
    found = [entry for entry in found if entry["step"] <= trainer.step]
    stop = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    with Progress(f"training {options.kind}") as progress:
        while True:
            until = min(steps, (trainer.step // every + 1) * every)
            trainer.run(
                until=until, minutes=None if stop is None else (stop - time.monotonic()) / 60,
                checkpoint_minutes=options.checkpoint_minutes,
                report=lambda t: progress(t.step, steps, f"loss {sum(t.losses[-20:]) / len(t.losses[-20:]):.4f}"),
            )  # fmt: skip
            if not found or found[-1]["step"] < trainer.step:
                recent = trainer.losses[-20:] or [float("nan")]
                now = asdict(evaluate_head(trainer.head, trainer.store, model, trainer.options.depths))
                now |= {"step": trainer.step, "loss": round(sum(recent) / len(recent), 4)}
                if all(now["tokens"][0] > entry["tokens"][0] for entry in found):
                    trainer.export(options.out / "head", with_embedding=not options.no_embedding)
                found.append(now)
                path.write_text(json.dumps(found, indent=1) + "\n")
                print(f"step {now['step']}: loss {now['loss']}, held-out: {now['tokens'][0]} tokens a step, greedy "
                      f"{[value for value, *_ in now['greedy']]}", flush=True)  # fmt: skip
            if trainer.step < until or trainer.step == steps:
                return trainer.step == steps


def _card(options: argparse.Namespace, trainer: HeadTrainer, held_out: list[str]) -> None:
    """Write the model card of the best head beside it, and run that head in the engine for it."""
    found = json.loads((options.out / "evaluations.json").read_text())
    best = max(found, key=lambda entry: entry["tokens"][0])
    folder, store, depths = options.out / "head", trainer.store, trainer.options.depths
    model = load_model(options.target, dtype=options.dtype, device=options.device)  # packed, as the engine runs it
    kept = min(options.prompt_tokens or [store.meta["length"] // 4])
    tokens = [store.chunk("held_out", i, ["tokens"])[0] for i in range(min(_PROMPTS, store.num_chunks("held_out")))]
    measured = measure_head(
        model,
        lambda: (
            MedusaDrafter(folder, num_nodes=_TREE_NODES)
            if options.kind == "medusa"
            else EagleDrafter(folder, kind=options.kind, num_nodes=_TREE_NODES)
        ),
        [chunk[:kept].tolist() for chunk in tokens],
        min(_TOKENS, store.meta["length"] - kept),
    )
    chosen = {name: str(value) for name, value in sorted(vars(options).items()) if name not in _PLACES}
    chunks, length = {part: store.num_chunks(part) for part in ("train", "held_out")}, store.meta["length"]
    lines = [
        f"# {options.kind} head for {model.name}",
        "",
        f"- step {best['step']} of {trainer.options.num_steps}, loss {best['loss']}: the best of {len(found)} held-out "
        f"evaluations (tokens a step of a chain: { {entry['step']: entry['tokens'][0] for entry in found} })",
        f"- options: {json.dumps(chosen)}",
        f"- chunks of {length} tokens: {chunks}",
        f"- greedy acceptance by depth (95 % over chunks): {best['greedy']}, rows reached: {best['reached']}",
        f"- acceptance at temperature 1 by depth: {best['sampled']}",
        f"- tokens a step of a greedy chain of {depths} on this text: {best['tokens']}",
        *measured.lines(),
        f"- held-out documents: {', '.join(held_out)}",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")
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
