"""The loss of a head on one batch, and its acceptance at every depth: the same rollout for training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_kernels.engine.heads import AutoregressiveHead, DraftHead, MedusaHead
from specdec_kernels.training.losses import Teacher, law_loss, teacher_law
from specdec_kernels.training.rollout import rollout, shifted, taken


class HeadBatch(NamedTuple):
    """tokens int64 [B, T]; features [B, T, layers * H], what the head reads; last [B, T, H], the target's last states;
    teacher: its laws."""

    tokens: Tensor
    features: Tensor
    last: Tensor
    teacher: Teacher


class DepthOutput(NamedTuple):
    """Depth d = 1, 2, ... of chains: logits [B, T, Vd] of row i are for the token behind position i + d; valid bool
    [B, T]; predicted: states [B, T, H] for EAGLE's feature loss, or None. rows: int64 [B, S], those that all this is
    given for, or None for all T."""

    depth: int
    logits: Tensor
    valid: Tensor
    predicted: Tensor | None
    rows: Tensor | None = None


def names_needed(head: DraftHead, num_layers: int) -> list[str]:
    """Tensors of a feature store that a batch for this head is made of."""
    states = sorted({*head.config.feature_layers, num_layers})
    return ["tokens", "lse", "best", *(f"state.{layer}" for layer in states)]


def make_batch(head: DraftHead, stored: dict[str, Tensor], num_layers: int, output_rows: Tensor) -> HeadBatch:
    """From the stored tensors [B, T, ...]; output_rows [Vd, H]: the target's, of the draft vocabulary."""
    device, dtype = output_rows.device, next(head.parameters()).dtype
    stored = {name: value.to(device) for name, value in stored.items()}
    features = torch.cat([stored[f"state.{layer}"] for layer in head.config.feature_layers], -1).to(dtype)
    last = stored[f"state.{num_layers}"]
    with torch.no_grad():
        teacher = teacher_law(last, stored["lse"], stored["best"], output_rows)
    return HeadBatch(stored["tokens"].long(), features, last, teacher)


def depths(head: DraftHead, batch: HeadBatch, num_depths: int, rows: Tensor | None = None) -> Iterator[DepthOutput]:
    """What the head says at each depth of the chains that begin at every row, or at `rows` int64 [B, S]; of an
    autoregressive head, whose other rows are context, these are the ones that go deeper than 1."""
    length = batch.tokens.shape[1]
    places = torch.arange(length, device=batch.tokens.device).expand(batch.tokens.shape)
    if isinstance(head, MedusaHead):
        logits = head(taken(batch.features, rows))
        for depth in range(1, num_depths + 1):
            yield DepthOutput(depth, logits[:, :, depth - 1], taken(places, rows) + depth < length, None, rows)
        return
    assert isinstance(head, AutoregressiveHead)
    for depth, state in enumerate(rollout(head, batch.tokens, batch.features, num_depths, rows), 1):
        predicted, going = state if head.config.kind == "eagle" else None, rows if depth > 1 else None
        yield DepthOutput(depth, head.logits(state), taken(places, going) + depth < length, predicted, going)


def batch_loss(
    head: DraftHead,
    batch: HeadBatch,
    num_depths: int,
    kind: str,
    decay: float,
    feature_weight: float = 1.0,
    rows: Tensor | None = None,
) -> Tensor:
    """Mean loss over rows and depths; depth d weighs decay ** (d - 1). EAGLE also learns the target's states."""
    total = batch.last.new_zeros((), dtype=torch.float32)
    weights = 0.0
    for out in depths(head, batch, num_depths, rows):
        law = taken(shifted(batch.teacher.log_probs, out.depth), out.rows)[out.valid]
        loss = law_loss(kind, law, out.logits[out.valid]).mean()
        if out.predicted is not None:
            wanted = taken(shifted(batch.last, out.depth), out.rows)[out.valid].float()
            loss = loss + feature_weight * F.smooth_l1_loss(out.predicted[out.valid].float(), wanted)
        weight = decay ** (out.depth - 1)
        total, weights = total + weight * loss, weights + weight
    return total / weights
