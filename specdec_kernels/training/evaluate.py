"""What a head is worth on held-out text: acceptance at every depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.engine.heads import DraftHead
from specdec_kernels.training.features import FeatureStore
from specdec_kernels.training.losses import acceptance
from specdec_kernels.training.objective import depths, make_batch, names_needed

_RESAMPLES = 1000


@dataclass(frozen=True)
class Acceptance:
    """Per depth: `greedy`, P(the head's best token is the target's | those before were, and the text is the target's
    own there); `sampled`, mean of sum min(p, q) at temperature 1 on the text; (value, low, high) with a 95 % bootstrap
    over chunks. `reached`: rows behind `greedy`. `tokens`: emitted a step by a greedy chain of all depths."""

    greedy: list[tuple[float, float, float]]
    sampled: list[tuple[float, float, float]]
    reached: list[int]
    tokens: tuple[float, float, float]


@torch.no_grad()
def evaluate_head(head: DraftHead, store: FeatureStore, model: Any, num_depths: int, *, batch: int = 4) -> Acceptance:
    """Teacher-forced acceptance on the held-out chunks of a store."""
    store.expect_target(model)
    training = head.training
    head.eval()
    count, rows = store.num_chunks("held_out"), model.output_matrix()[head.draft_ids].to(next(head.parameters()).dtype)
    tried, hit, mass, seen = (torch.zeros(count, num_depths, dtype=torch.float64) for _ in range(4))
    for first in range(0, count, batch):
        indices = list(range(first, min(first + batch, count)))
        stored = store.batch("held_out", indices, names_needed(head, model.num_layers))
        data = make_batch(head, stored, model.num_layers, rows)
        best, text = data.teacher.best, data.tokens
        reached = torch.ones_like(text, dtype=torch.bool)
        for out in depths(head, data, num_depths):
            d = out.depth - 1
            # Row i drafts the token behind position i + depth; that position's token must be what the target had said.
            reached &= out.valid & (_at(best, out.depth - 1) == _at(text, out.depth))
            drafted = head.draft_ids.to(text.device)[out.logits.argmax(-1)]
            right = reached & (drafted == _at(best, out.depth))
            tried[indices, d], hit[indices, d] = reached.sum(1).double().cpu(), right.sum(1).double().cpu()
            law = _at(data.teacher.log_probs, out.depth)
            share = acceptance(law.flatten(0, 1), out.logits.flatten(0, 1)).view(text.shape) * out.valid
            mass[indices, d], seen[indices, d] = share.sum(1).double().cpu(), out.valid.sum(1).double().cpu()
            reached = right
    head.train(training)
    draws = torch.randint(0, count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    greedy = _ratios(hit, tried, draws)
    tokens = 1 + greedy.cumprod(1).sum(1)
    return Acceptance(
        _intervals(greedy), _intervals(_ratios(mass, seen, draws)), [int(n) for n in tried.sum(0)],
        _intervals(tokens[:, None])[0],
    )  # fmt: skip


def _at(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] read `by` places further on; the end repeats (and is invalid)."""
    length = x.shape[1]
    return x[:, (torch.arange(length, device=x.device) + by).clamp(max=length - 1)]


def _ratios(above: Tensor, below: Tensor, draws: Tensor) -> Tensor:
    """[1 + resamples, depths]: the ratio of sums, then of each resample's."""
    index = torch.cat([torch.arange(len(above))[None], draws])
    return above[index].sum(1) / below[index].sum(1).clamp(min=1e-9)


def _intervals(values: Tensor) -> list[tuple[float, float, float]]:
    low, high = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=values.dtype), dim=0)
    return [(round(v, 4), round(a, 4), round(b, 4)) for v, a, b in zip(values[0].tolist(), low.tolist(), high.tolist())]
