"""Where a head begins: the linear map from what it reads to the target's next state, in closed form.

The state of pair p (target states of position p, token p + 1) should become the target's last state at p + 1, which the
output matrix reads. Ridge regression over a few hundred chunks gives the best linear guess before the first step:

    EAGLE-3     fc [H, 3H]: features of p           -> last state of p + 1    (the token enters by attention alone)
    EAGLE, MTP  fc [H, 2H]: token p + 1, state of p -> last state of p + 1
    Medusa      block d [H, H]: last state of p     -> last state of p + d

The decoder layer adds nothing at first (its output projections are zero), so training begins at that guess.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_kernels.engine.heads import AutoregressiveHead, DraftHead, MedusaHead
from specdec_kernels.training.features import FeatureStore

_CHUNKS = 384  # of the training part, for the regression
_RIDGE = 0.01  # against the mean square of each input, which is 1


def input_scales(head: DraftHead, store: FeatureStore) -> dict[str, Tensor]:
    """Root mean squares [layers * H] of the features that an EAGLE-3 head's fc reads; nothing for other kinds, whose
    inputs are normed or of one scale. The first position is left out: models park huge values there."""
    if head.config.kind != "eagle3":
        return {}
    total = torch.zeros(head.fc.in_features, dtype=torch.float64)
    count = min(store.num_chunks("train"), _CHUNKS)
    for index in range(count):
        total += _features(head, store, index)[1:].double().pow(2).mean(0)
    return {"fc.weight": (total / count).sqrt().float().clamp(min=1e-6)}


@torch.no_grad()
def begin(head: DraftHead, store: FeatureStore, num_layers: int) -> None:
    """Set the weights of a bound head of `num_layers` target layers to the linear guess (see above)."""
    if isinstance(head, MedusaHead):
        for depth, block in enumerate(head.blocks, 1):
            block.weight.copy_(_regression(head, store, num_layers, depth)[0])
            block.bias.zero_()
        return
    assert isinstance(head, AutoregressiveHead)
    layer = head.layers[0]
    for name, value in layer.named_parameters():
        if value.dim() == 1:
            value.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        else:
            value.normal_(0.0, value.shape[1] ** -0.5)
    weight, size = _regression(head, store, num_layers)
    head.fc.weight.copy_(weight)
    if head.config.kind != "eagle":
        head.norm.weight.fill_(size)


def _regression(head: DraftHead, store: FeatureStore, num_layers: int, depth: int = 1) -> tuple[Tensor, float]:
    """(matrix [H, inputs] of what is read at p to the last state at p + depth, root mean square of the last states)."""
    size = head.config.hidden_size
    width = head.fc.in_features if isinstance(head, AutoregressiveHead) else size
    gram = torch.zeros(width, width, dtype=torch.float64)
    cross = torch.zeros(width, size, dtype=torch.float64)
    square, rows = 0.0, 0
    for index in range(min(store.num_chunks("train"), _CHUNKS)):
        tokens, last = store.chunk("train", index, ("tokens", f"state.{num_layers}"))
        x, y = (
            _inputs(head, _features(head, store, index), tokens)[1 : len(last) - depth].float(),
            last[1 + depth :].float(),
        )
        gram += x.T @ x
        cross += x.T @ y
        square, rows = square + y.pow(2).sum().item(), rows + len(y)
    scale = (gram.diagonal() / rows).sqrt().clamp(min=1e-6)
    gram, cross = gram / scale / scale[:, None] / rows, cross / scale[:, None] / rows
    gram.diagonal().add_(_RIDGE)
    return (torch.linalg.solve(gram, cross) / scale[:, None]).T.float(), math.sqrt(square / rows / size)


def _features(head: DraftHead, store: FeatureStore, index: int) -> Tensor:
    names = [f"state.{layer}" for layer in head.config.feature_layers]
    return torch.cat([state.float() for state in store.chunk("train", index, names)], -1)


def _inputs(head: DraftHead, features: Tensor, tokens: Tensor) -> Tensor:
    """What the first matrix reads for pairs 0 .. T - 2 of a chunk, [T - 1, inputs]."""
    features = features[:-1]
    if head.config.kind in ("eagle3", "medusa"):
        return features
    assert head.embedding is not None
    embedded = F.embedding(tokens[1:].long(), head.embedding.cpu()).float()
    if head.config.kind == "mtp":
        eps = head.config.rms_norm_eps
        embedded, features = (F.rms_norm(part, part.shape[-1:], eps=eps) for part in (embedded, features))
    return torch.cat([embedded, features], -1)
