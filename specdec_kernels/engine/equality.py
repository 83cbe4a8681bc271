"""When two greedy texts of one model may differ: the tie rule.

Packed, padded and single-token matrix products round differently, so a real model may prefer another token where two
logits are all but equal. A first divergence is excused only if the gap between the two logits is within twice the
largest difference that the same prefix shows between a one-token and a many-token pass, and within a bound a dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch

LARGEST_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.125}
_PAGE = 16
_MANY = 16


@dataclass(frozen=True)
class Divergence:
    """First position (in the output) where two texts differ; `gap`: between the logits of the two tokens there;
    `noise`: largest logit difference between a one-token and a many-token pass on that prefix."""

    position: int
    gap: float
    noise: float
    excused: bool


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, a missing token included; None if the texts are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def compare_greedy(model: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """None if `other` equals the plain greedy output, else its first divergence, judged by the tie rule."""
    position = first_difference(plain, other)
    if position is None:
        return None
    if position >= min(len(plain), len(other)):  # one text just ends: no pair of logits can excuse that
        return Divergence(position, float("inf"), 0.0, False)
    prefix = [*prompt, *plain[:position]]
    one, many = _last_logits(model, prefix, 1), _last_logits(model, prefix, min(_MANY, len(prefix)))
    noise = (one - many).abs().max().item()
    gap = abs(one[plain[position]] - one[other[position]]).item()
    return Divergence(position, gap, noise, gap <= min(2 * noise, LARGEST_GAP[model.dtype]))


def _last_logits(model: Any, tokens: Sequence[int], size: int) -> torch.Tensor:
    """Logits behind `tokens`, the last `size` of which are computed in one pass, the others in a pass before."""
    pages = -(-len(tokens) // _PAGE)
    cache = model.allocate_cache(pages, _PAGE)
    table = torch.arange(pages, dtype=torch.int32, device=model.device)[None]
    logits = torch.empty(0)
    for start, end in ((0, len(tokens) - size), (len(tokens) - size, len(tokens))):
        if start == end:
            continue
        lens = torch.tensor([start], dtype=torch.int32, device=model.device)
        cu = torch.tensor([0, end - start], dtype=torch.int32, device=model.device)
        batch = Batch(
            token_ids=torch.tensor(tokens[start:end], device=model.device),
            positions=torch.arange(start, end, dtype=torch.int32, device=model.device),
            slots=slot_mapping(table, lens, cu, _PAGE, total_nodes=end - start),
            page_table=table,
            context_lens=lens,
            cu_nodes=cu,
            max_nodes=end - start,
            logit_rows=torch.tensor([end - start - 1], device=model.device),
        )
        logits = model.forward(batch, cache)
    return logits[0, : model.vocab_size].float()
