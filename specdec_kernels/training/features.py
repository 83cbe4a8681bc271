"""What heads are trained on, computed once: the target's hidden states of every chunk, in safetensors shards.

    folder/meta.json                  target, layers, sizes: what must agree before anything is reused
    folder/train/tokens.safetensors   all chunks, written first
    folder/train/shard-00000.safetensors, ...   tokens int32 [n, T]; state.<layer> [n, T, H]; lse float32 [n, T], of the
                                      target's logits; best int32 [n, T], the target's own next token
    folder/held_out/...

A shard appears whole or not at all, with its digest in a .sha256 file beside it, so an interrupted run goes on behind
the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch, HiddenStates
from specdec_kernels.engine.drafters import NoDrafter
from specdec_kernels.training.data import Corpus

_PAGE = 16
_ROWS = 1024  # rows of one forward pass


def compute_features(
    folder: str | Path,
    model: Any,
    corpus: Corpus,
    layers: Sequence[int],
    *,
    shard_chunks: int = 32,
    prompt_tokens: int | Sequence[int] | None = None,
    train_chunks: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Run the target over the corpus, unless that was done; returns the store.

    layers: states to keep (see `HiddenStates`); the last one is always kept. prompt_tokens: keep only so many tokens of
    each chunk and let the target continue it greedily (on-policy data); several numbers: shard by shard in turns; None:
    the text itself. train_chunks: do only the first so many of the corpus's training chunks (None: all); the rest can
    be added later. report(done, total) is called with chunk counts. ValueError if `folder` holds features of something
    else.
    """
    folder = Path(folder)
    turns = [prompt_tokens] if prompt_tokens is None or isinstance(prompt_tokens, int) else list(prompt_tokens)
    if not turns or any(kept is not None and not 1 <= kept <= corpus.train.shape[1] for kept in turns):
        raise ValueError(
            f"compute_features: prompt_tokens: expected 1..{corpus.train.shape[1]} tokens of a chunk, got {turns}"
        )
    layers = sorted({*layers, model.num_layers})
    meta = {
        "target": model.name,
        "fingerprint": model.fingerprint() if hasattr(model, "fingerprint") else "",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "layers": layers,
        "length": corpus.train.shape[1],
        "shard_chunks": shard_chunks,
        "prompt_tokens": turns if len(turns) > 1 else turns[0],
        "chunks": {"train": len(corpus.train), "held_out": len(corpus.held_out)},
        "tokens": hashlib.sha256(corpus.train.numpy().tobytes() + corpus.held_out.numpy().tobytes()).hexdigest(),
    }
    path = folder / "meta.json"
    if path.exists():
        _expect_same(folder, json.loads(path.read_text()), meta)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(meta, indent=2) + "\n")
    shards = corpus.train.split(shard_chunks)
    if train_chunks is not None:
        shards = shards[: -(-train_chunks // shard_chunks)]  # whole ones, so that more can follow
    total = sum(map(len, shards)) + len(corpus.held_out)
    done = 0
    for part, chunks in (("train", shards), ("held_out", corpus.held_out.split(shard_chunks))):
        (folder / part).mkdir(exist_ok=True)
        for index, tokens in enumerate(chunks):
            shard = folder / part / f"shard-{index:05}.safetensors"
            if not shard.with_suffix(".sha256").exists():
                kept = turns[index % len(turns)]
                if kept is not None and kept < tokens.shape[1]:
                    tokens = continue_chunks(model, tokens, kept)
                _write(shard, shard_features(model, tokens, layers))
            done += len(tokens)
            if report is not None:
                report(done, total)
    return FeatureStore(folder, train_chunks)


@torch.inference_mode()
def shard_features(model: Any, tokens: Tensor, layers: Sequence[int]) -> dict[str, Tensor]:
    """Tensors of one shard for chunks int32 [n, T]."""
    per_pass = max(1, _ROWS // tokens.shape[1])
    parts = [_forward(model, chunk, layers) for chunk in tokens.split(per_pass)]
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {"tokens": tokens, **found}


def _forward(model: Any, tokens: Tensor, layers: Sequence[int]) -> dict[str, Tensor]:
    count, length = tokens.shape
    pages = -(-length // _PAGE)
    device = model.device
    cache = model.allocate_cache(count * pages, _PAGE)
    table = torch.arange(count * pages, dtype=torch.int32, device=device).view(count, pages)
    lens = torch.zeros(count, dtype=torch.int32, device=device)
    cu = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    batch = Batch(
        token_ids=tokens.reshape(-1).long().to(device),
        positions=torch.arange(length, dtype=torch.int32, device=device).repeat(count),
        slots=slot_mapping(table, lens, cu, _PAGE, total_nodes=count * length),
        page_table=table,
        context_lens=lens,
        cu_nodes=cu,
        max_nodes=length,
    )
    hidden = HiddenStates(layers)
    logits = model.forward(batch, cache, hidden=hidden)[:, : model.vocab_size]
    lse = torch.cat([part.float().logsumexp(-1) for part in logits.split(256)])
    best = logits.argmax(-1).int()
    states = {f"state.{layer}": hidden.states[layer].view(count, length, -1).cpu().contiguous() for layer in layers}
    first = hidden.states[model.num_layers][0].float()
    own = model.output_matrix().float() @ first
    if abs(own[: model.vocab_size].logsumexp(-1).item() - lse[0].item()) > 0.05 * max(1.0, abs(lse[0].item())):
        raise NotImplementedError(
            "train-head: target: expected logits that are the output matrix times the last state, got a model that "
            "scales or caps them"
        )
    return {**states, "lse": lse.view(count, length).cpu(), "best": best.view(count, length).cpu()}


def continue_chunks(model: Any, tokens: Tensor, prompt_tokens: int) -> Tensor:
    """Chunks int32 [n, T] whose first `prompt_tokens` are kept and whose rest the target writes, greedily."""
    from specdec_kernels.engine import Engine, EngineConfig

    count, length = tokens.shape
    pages = count * (-(-length // _PAGE) + 1)
    engine = Engine(model, NoDrafter(), EngineConfig(page_size=_PAGE, num_pages=pages, max_batch=count))
    prompts = tokens[:, :prompt_tokens].tolist()
    results = engine.generate(prompts, max_tokens=length - prompt_tokens, ignore_eos=True)
    return torch.tensor([p + r.token_ids for p, r in zip(prompts, results)], dtype=torch.int32)


class FeatureStore:
    """Reads what `compute_features` wrote. `meta`: its meta.json. `train_chunks`: use only the first so many."""

    def __init__(self, folder: str | Path, train_chunks: int | None = None):
        self.folder, self.train_chunks = Path(folder), train_chunks
        path = self.folder / "meta.json"
        if not path.exists():
            raise FileNotFoundError(f"FeatureStore: folder: expected features with a meta.json, got {self.folder}")
        self.meta: dict[str, Any] = json.loads(path.read_text())
        self._open: dict[Path, Any] = {}

    def num_chunks(self, part: str) -> int:
        count: int = self.meta["chunks"][part]
        return count if part != "train" or self.train_chunks is None else min(count, self.train_chunks)

    def expect_target(self, model: Any) -> None:
        """ValueError unless the features are this model's."""
        own = model.fingerprint() if hasattr(model, "fingerprint") else ""
        for name, got in (("fingerprint", own), ("vocab_size", model.vocab_size), ("hidden_size", model.hidden_size)):
            if self.meta[name] != got:
                raise ValueError(
                    f"FeatureStore: {self.folder}: expected features of {model.name!r} ({name} {got}), got those of "
                    f"{self.meta['target']!r} ({name} {self.meta[name]})"
                )

    def chunk(self, part: str, index: int, names: Sequence[str]) -> list[Tensor]:
        """Tensors of one chunk, without its first dimension."""
        if not 0 <= index < self.num_chunks(part):
            raise IndexError(f"FeatureStore: chunk: expected 0..{self.num_chunks(part) - 1}, got {index}")
        shard, row = divmod(index, self.meta["shard_chunks"])
        file = self._shard(self.folder / part / f"shard-{shard:05}.safetensors")
        return [file.get_slice(name)[row : row + 1][0] for name in names]

    def batch(self, part: str, indices: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors [n, T, ...] of several chunks."""
        rows = [self.chunk(part, index, names) for index in indices]
        return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}

    def counts(self) -> Tensor:
        """How often each token follows in the training part, in the text or by the target's choice; int64 [V]."""
        counts = torch.zeros(self.meta["vocab_size"], dtype=torch.int64)
        for index in range(self.num_chunks("train")):
            for tensor in self.chunk("train", index, ("tokens", "best")):
                counts += torch.bincount(tensor.long(), minlength=len(counts))
        return counts

    def _shard(self, path: Path) -> Any:
        """The open shard; its digest and header are checked once."""
        from safetensors import SafetensorError, safe_open

        if path not in self._open:
            redo = "; delete it and its .sha256 and run the command again"
            try:
                if hashlib.sha256(path.read_bytes()).hexdigest() != path.with_suffix(".sha256").read_text().strip():
                    raise ValueError(
                        f"FeatureStore: {path.name}: expected the digest it was written with, got another{redo}"
                    )
                self._open[path] = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"FeatureStore: {path.name}: expected an intact shard, got {error}{redo}") from error
        return self._open[path]


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    scratch = path.with_suffix(".writing")
    save_file({name: value.contiguous() for name, value in tensors.items()}, scratch)
    digest = hashlib.sha256(scratch.read_bytes()).hexdigest()
    scratch.rename(path)
    path.with_suffix(".sha256").write_text(digest + "\n")


def _expect_same(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if stored.get(name) != value:
            raise ValueError(
                f"compute_features: {folder}: expected features with {name} {value}, got {stored.get(name)}; give "
                "another folder, or the options it was begun with"
            )
