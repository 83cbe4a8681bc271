"""Which layers a self-draft can do without, found by measuring agreement with the whole model and time."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch, KVCache
from specdec_kernels.engine.checkpoint import cache_dir

logger = logging.getLogger("specdec_kernels")

_VERSION = 6
_PAGE = 16
_TRIED = 3  # layers tried in each round, in the order of the harm that leaving out one alone does
_HOPELESS = 0.3  # leaving out still more only makes it worse
_CONTINUED = 64  # tokens of the model's own that drafts are judged on
_SLOT_COST = 0.03  # one more slot to verify, as a share of a step
_CALIBRATION = """The river rises in the hills north of the town and is joined by two smaller streams before it \
reaches the old mill. In spring, when the snow melts,"""


@dataclass(frozen=True)
class LayerChoice:
    """`layers` run in a draft pass; chains of `num_drafts`. The other numbers are what the choice was made from:
    `agreement` of the best tokens with the whole model's, `cost` of a draft pass as a share of a whole one, `speedup`
    expected over plain decoding."""

    layers: tuple[int, ...]
    num_drafts: int
    agreement: float = 0.0
    cost: float = 0.0
    speedup: float = 0.0


def choose_layers(model: Any, cache: bool = True) -> LayerChoice:
    """Measure (some seconds), or read what an earlier measurement on this machine chose for this model, in this dtype,
    on this kind of device, with as many threads."""
    path: Path | None = None
    if cache and hasattr(model, "fingerprint"):
        kind = f"{str(model.dtype).removeprefix('torch.')}-{model.device.type}-t{torch.get_num_threads()}"
        path = cache_dir() / f"self-draft-{model.fingerprint()}-{kind}-v{_VERSION}.json"
        stored = _read(path, model.num_layers)
        if stored is not None:
            return stored
    choice = search(model)
    logger.info("self-draft: %s", choice)
    if path is not None:
        _write(path, choice)
    return choice


def _read(path: Path, num_layers: int) -> LayerChoice | None:
    """The stored choice; None if there is none, or none that can be used."""
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text())
        choice = LayerChoice(tuple(stored.pop("layers")), **stored)
        if choice.num_drafts < 1 or not choice.layers or not set(choice.layers) <= set(range(num_layers)):
            raise ValueError(f"expected layers of {num_layers} and a number of drafts, got {choice}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("self-draft: %s cannot be used (%r); measuring again", path, error)
        return None
    return choice


def _write(path: Path, choice: LayerChoice) -> None:
    """Whole or not at all; without a place to write to, the next process measures again."""
    scratch: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="choosing-", delete=False) as file:
            scratch = Path(file.name)
            file.write(json.dumps(choice.__dict__))
        scratch.replace(path)
    except OSError as error:
        logger.warning("self-draft: %s cannot be written (%r)", path, error)
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def search(model: Any) -> LayerChoice:
    """Rank layers by how much leaving one out hurts, then leave out more and more: each time the best of a few."""
    count = model.num_layers
    everything = tuple(range(count))
    if count < 3:
        return LayerChoice(everything, 1)
    if model.tokenizer is not None:
        ids = list(model.tokenizer(_CALIBRATION)["input_ids"])
    else:
        ids = [(i * 7919 + 13) % model.vocab_size for i in range(128)]
    probe = _Probe(model, ids)
    best = probe.best

    def score(layers: tuple[int, ...]) -> tuple[float, float]:
        """(agreement, mean log-probability of the whole model's choice)"""
        logits = probe.logits(layers)
        chosen = logits.gather(-1, best[:, None])[:, 0] - logits.logsumexp(-1)
        return (logits.argmax(-1) == best).float().mean().item(), chosen.mean().item()

    inner = everything[1:-1]  # the first and the last layer talk to the embeddings
    harmless = sorted(inner, key=lambda i: -score(tuple(x for x in everything if x != i))[1])
    half = probe.relative_time(everything[: count // 2])
    options = []
    layers = everything
    while len(layers) > max(2, count // 3):
        nearest = [i for i in harmless if i in layers][:_TRIED]
        scored = [(score(tried), tried) for i in nearest for tried in [tuple(x for x in layers if x != i)]]
        (agreement, _), layers = max(scored, key=lambda pair: pair[0][1])
        cost = half + (1.0 - half) * (len(layers) - count // 2) / (count - count // 2)
        for drafts in range(1, 7):
            speedup = expected_speedup(agreement, drafts, cost)
            options.append(LayerChoice(layers, drafts, round(agreement, 4), round(cost, 4), round(speedup, 4)))
        if agreement < _HOPELESS:
            break
    return max(options, key=lambda option: option.speedup)


def expected_speedup(agreement: float, drafts: int, cost: float, slot_cost: float = _SLOT_COST) -> float:
    """Expected tokens a step over its cost in plain steps, for independent acceptance (Leviathan et al., 2023)."""
    tokens = sum(agreement**i for i in range(drafts + 1))
    return tokens / (1 + drafts * (cost + slot_cost))


class _Probe:
    """A text that the whole model continued greedily, in a small cache of its own. Drafts are judged on the model's own
    continuation, because that is what they will have to guess; on given text agreement is lower."""

    def __init__(self, model: Any, ids: list[int]):
        self.model, self.num_given = model, len(ids)
        num_pages = -(-(len(ids) + _CONTINUED + 1) // _PAGE)
        self.cache: KVCache = model.allocate_cache(num_pages, _PAGE)
        self.table = torch.arange(num_pages, dtype=torch.int32, device=model.device)[None]
        everything = tuple(range(model.num_layers))
        self.ids, fresh = list(ids), list(ids)
        for _ in range(_CONTINUED):
            logits = self._forward(fresh, len(self.ids) - len(fresh), everything)
            fresh = [int(logits[-1, : model.vocab_size].argmax())]
            self.ids += fresh
        self.best = torch.tensor(self.ids[self.num_given :], device=model.device)

    def logits(self, layers: tuple[int, ...]) -> torch.Tensor:
        """Float logits [_CONTINUED, V] of the subset for the tokens of `best`, fed with the text itself."""
        logits = self._forward(self.ids[:-1], 0, layers)[self.num_given - 1 :, : self.model.vocab_size]
        return logits.float()

    def relative_time(self, layers: tuple[int, ...]) -> float:
        """Time of a one-token pass of the subset as a share of a whole one: best of several, taking turns. It is at
        least the subset's share of the layers; beyond 0.9 only noise puts it, which must not rule drafting out."""
        everything = tuple(range(self.model.num_layers))
        best = {layers: float("inf"), everything: float("inf")}
        for _ in range(12):
            for subset in best:
                start = time.perf_counter()
                self._forward(self.ids[-1:], len(self.ids), subset)
                best[subset] = min(best[subset], time.perf_counter() - start)
        return min(0.9, max(len(layers) / len(everything), best[layers] / best[everything]))

    def _forward(self, ids: list[int], context: int, layers: tuple[int, ...]) -> torch.Tensor:
        device = self.model.device
        lens = torch.tensor([context], dtype=torch.int32, device=device)
        cu = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
        batch = Batch(
            token_ids=torch.tensor(ids, device=device),
            positions=torch.arange(context, context + len(ids), dtype=torch.int32, device=device),
            slots=slot_mapping(self.table, lens, cu, _PAGE, total_nodes=len(ids)),
            page_table=self.table,
            context_lens=lens,
            cu_nodes=cu,
            max_nodes=len(ids),
        )
        return self.model.forward(batch, self.cache, layers)
