"""Training a draft head: bfloat16 weights with float32 masters, checkpoints that resume to the same loss curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.engine.checkpoint import resolve_dtype
from specdec_kernels.engine.head_files import bind_head, load_head, save_head
from specdec_kernels.engine.heads import DraftHead, HeadConfig, make_head
from specdec_kernels.training.begin import begin, input_scales
from specdec_kernels.training.features import FeatureStore
from specdec_kernels.training.losses import LOSSES
from specdec_kernels.training.objective import batch_loss, make_batch, names_needed
from specdec_kernels.training.optimizer import Optimizer

_CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class TrainOptions:
    """`depths`: rollout steps (of a Medusa set: its heads). `rows` of each chunk, drawn anew every time, go deeper than
    the first step (of a Medusa set: are trained on); 0: all. `num_steps` optimizer steps of `batch` chunks; warm-up
    over the first 5 %, then a cosine to a fiftieth of `lr`. `decay`: weight of a depth against the one before.
    `draft_vocab`: most frequent tokens kept (0: all). `intermediate`: width of the head's MLP (None: the target's).
    `dtype` of the weights: None is the fastest here. `begin`: folder of a head to begin at, whose shape and vocabulary
    are kept; None: the linear guess of `begin.py`."""

    kind: str = "eagle3"
    depths: int = 4
    rows: int = 64
    num_steps: int = 1000
    batch: int = 4
    lr: float = 0.02
    loss: str = "kl"
    decay: float = 0.8
    draft_vocab: int = 4096
    intermediate: int | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    dtype: str | None = None
    begin: str | None = None

    def validate(self) -> None:
        for name, holds, expected in (
            ("depths", self.depths >= 1, "at least 1"),
            ("rows", self.rows >= 0, "a number of rows, or 0 for all"),
            ("num_steps", self.num_steps >= 1, "at least 1"),
            ("batch", self.batch >= 1, "at least 1"),
            ("lr", self.lr > 0, "a positive rate"),
            ("loss", self.loss in LOSSES, f"one of {LOSSES}"),
            ("draft_vocab", self.draft_vocab >= 0, "a size, or 0 for the whole vocabulary"),
            ("intermediate", self.intermediate is None or self.intermediate >= 1, "a positive width"),
        ):
            if not holds:
                raise ValueError(f"TrainOptions: {name}: expected {expected}, got {getattr(self, name)!r}")


def feature_layers(kind: str, num_layers: int) -> tuple[int, ...]:
    """Target states a head of this kind reads: EAGLE-3's low, middle and high one, else the last."""
    if kind != "eagle3":
        return (num_layers,)
    low, middle, high = min(2, num_layers), num_layers // 2, max(0, num_layers - 3)
    return (low, middle, high)


def new_head(model: Any, options: TrainOptions, store: FeatureStore) -> DraftHead:
    """A head of the target's own shape: its width, heads and rotary positions, one layer deep. It reads the target's
    own output matrix, and begins at the linear guess of `begin`. With `options.begin`: the head of that folder."""
    torch.manual_seed(options.seed)
    if options.begin is not None:
        head = load_head(options.begin, num_layers=model.num_layers)
        if head.config.kind != options.kind:
            raise ValueError(f"new_head: begin: expected a head of kind {options.kind}, got {head.config.kind}")
        return bind_head(head, model).requires_grad_(True)
    text = model.module.config.get_text_config()
    d2t = None
    vocab = model.vocab_size
    if options.draft_vocab and options.draft_vocab < vocab:
        chosen = store.counts().topk(options.draft_vocab).indices.sort().values
        d2t, vocab = chosen - torch.arange(len(chosen)), len(chosen)
    rope = getattr(text, "rope_parameters", None) or {}
    config = HeadConfig(
        kind=options.kind,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        draft_vocab_size=vocab,
        feature_layers=feature_layers(options.kind, model.num_layers),
        num_q_heads=text.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=options.intermediate or text.intermediate_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0),
        max_positions=model.max_context,
        norm_before_residual=options.kind == "eagle3",  # states differ in size by orders of magnitude
        num_medusa=options.depths if options.kind == "medusa" else 0,
        target=model.name,
        fingerprint=model.fingerprint() if hasattr(model, "fingerprint") else "",
    )
    head = make_head(config, d2t)
    head.lm_head = None
    head.bind(model.embedding(), model.output_matrix())
    begin(head, store, model.num_layers)
    return head


class HeadTrainer:
    """Trains `head` on `store`; everything it needs to go on is in `folder`'s checkpoint, written as one file.

    `losses`: of every step so far. The order of chunks and the learning rate depend on the options and the step alone,
    so a run that was interrupted and resumed has the loss curve of one that was not.
    """

    def __init__(self, model: Any, head: DraftHead, store: FeatureStore, options: TrainOptions, folder: str | Path):
        options.validate()
        store.expect_target(model)
        if head.config.vocab_size != store.meta["vocab_size"]:
            raise ValueError(
                f"HeadTrainer: head: expected a vocabulary of {store.meta['vocab_size']} ids as the features', "
                f"got {head.config.vocab_size}"
            )
        missing = set(head.config.feature_layers) - set(store.meta["layers"])
        if missing:
            raise ValueError(
                f"HeadTrainer: store: expected states of layers {sorted(missing)}, got {store.meta['layers']}"
            )
        self.store, self.options, self.folder = store, options, Path(folder)
        self.num_layers = model.num_layers
        dtype = resolve_dtype(options.dtype, str(model.device.type))
        head.bind(model.embedding(), model.output_matrix())
        self.masters = {name: p.detach().float().clone() for name, p in head.named_parameters()}
        self.head = head.to(model.device, dtype).train()
        for name in ("embedding", "output"):
            value = getattr(head, name)
            if value is not None:
                setattr(head, name, value.to(dtype))
        self.output_rows = model.output_matrix()[head.draft_ids].to(dtype)
        self.names = names_needed(head, self.num_layers)
        self.losses: list[float] = []
        scales = {name: value.to(model.device) for name, value in input_scales(head, store).items()}
        self.optimizer = Optimizer(self.masters, scales, weight_decay=options.weight_decay, clip=options.clip)
        self._publish()

    @property
    def step(self) -> int:
        return len(self.losses)

    def run(
        self,
        *,
        until: int | None = None,
        minutes: float | None = None,
        checkpoint_minutes: float = 2.0,
        report: Callable[[HeadTrainer], None] | None = None,
    ) -> bool:
        """Train to step `until` (default: the end) or for `minutes`; whether the end was reached. Checkpoints every
        `checkpoint_minutes` and when it returns or is interrupted."""
        last = self.options.num_steps if until is None else min(until, self.options.num_steps)
        start = saved = time.monotonic()
        try:
            while self.step < last and (minutes is None or time.monotonic() - start < 60 * minutes):
                self.train_step()
                if report is not None:
                    report(self)
                if time.monotonic() - saved > 60 * checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()
        return self.step == self.options.num_steps

    def train_step(self) -> float:
        """One optimizer step; returns its loss."""
        stored = self.store.batch("train", self._chunks(self.step), self.names)
        batch = make_batch(self.head, stored, self.num_layers, self.output_rows)
        o, rows = self.options, self._rows(*batch.tokens.shape)
        loss = batch_loss(self.head, batch, o.depths, o.loss, o.decay, rows=rows)
        self.head.zero_grad(set_to_none=True)
        loss.backward()
        grads = {name: p.grad.float() for name, p in self.head.named_parameters() if p.grad is not None}
        self.optimizer.update(grads, self.learning_rate(self.step), self.step)
        self._publish()
        self.losses.append(loss.item())
        return self.losses[-1]

    def learning_rate(self, step: int) -> float:
        warm = max(1, self.options.num_steps // 20)
        if step < warm:
            return self.options.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.options.num_steps - warm)
        return self.options.lr * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))

    def _chunks(self, step: int) -> list[int]:
        count = self.store.num_chunks("train")
        size = min(self.options.batch, count)
        epoch, place = divmod(step, count // size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.options.seed * 65537 + epoch))
        return order[place * size : (place + 1) * size].tolist()

    def _rows(self, count: int, length: int) -> Tensor | None:
        """int64 [count, rows], ascending: rows of this step's chunks that go deeper."""
        usable = length - self.options.depths
        if self.options.rows == 0 or self.options.rows >= usable:
            return None
        draw = torch.Generator().manual_seed((self.options.seed << 32) + self.step)
        order = torch.rand(count, usable, generator=draw).argsort(1)[:, : self.options.rows]
        return order.sort(1).values.to(self.output_rows.device)

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self.head.named_parameters():
            parameter.copy_(self.masters[name])

    # ---- on disk

    def save(self) -> Path:
        """Write the checkpoint; it replaces the one before as a whole."""
        from safetensors.torch import save_file

        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        for name, master in self.masters.items():
            tensors[f"master.{name}"] = master
        tensors |= self.optimizer.state()
        if self.head.d2t is not None:
            tensors["d2t"] = self.head.d2t
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch, path = self.folder / f"{_CHECKPOINT}.writing", self.folder / _CHECKPOINT
        save_file({k: t.contiguous() for k, t in tensors.items()}, scratch, metadata={"run": json.dumps(self._run())})
        scratch.rename(path)
        return path

    def resume(self) -> None:
        """Go on from the folder's checkpoint; ValueError if it is damaged or of another run."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / _CHECKPOINT
        if not path.exists():
            raise FileNotFoundError(f"HeadTrainer: resume: expected {path}, got no such file")
        try:
            with safe_open(path, "pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                run = json.loads((file.metadata() or {}).get("run", "{}"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"HeadTrainer: resume: expected an intact {path.name}, got {error}") from error
        for name, value in self._run().items():
            if run.get(name) != value:
                raise ValueError(f"HeadTrainer: resume: expected a run with {name} {value}, got {run.get(name)}")
        if self.head.d2t is not None and not torch.equal(stored["d2t"], self.head.d2t.cpu()):
            raise ValueError("HeadTrainer: resume: expected the checkpoint's draft vocabulary, got another")
        for name, master in self.masters.items():
            master.copy_(stored[f"master.{name}"])
        self.optimizer.load(stored)
        self.losses = stored["losses"].tolist()
        self._publish()

    def export(self, folder: str | Path, *, with_embedding: bool = True) -> Path:
        """Write the head as it is now (see `save_head`)."""
        return save_head(self.head, folder, with_embedding=with_embedding, num_drafts=self.options.depths)

    def _run(self) -> dict[str, Any]:
        meta = self.store.meta
        return {**asdict(self.options), "tokens": meta["tokens"], "chunks": self.store.num_chunks("train"),
                "fingerprint": meta["fingerprint"]}  # fmt: skip
