"""Reduced draft vocabularies: what a checkpoint's d2t means, and draft scores laid out in the target's vocabulary."""

from __future__ import annotations

import torch


def draft_to_target(
    d2t: torch.Tensor | None, *, draft_size: int, target_size: int, kind: str | None = None
) -> torch.Tensor:
    """Target id of every draft id, int64[draft_size].

    d2t: integers[draft_size], or None, which means identity and is refused unless both sizes agree. kind says what
    d2t holds and has no default: "offset" (target = draft id + d2t, as EAGLE-3 checkpoints store it) or "absolute".
    Errors: ValueError for a wrong length, a target outside 0..target_size-1, or two draft ids with one target.
    """
    if d2t is None:
        if draft_size != target_size:
            raise ValueError(
                f"draft_to_target: d2t: expected a map between {draft_size} and {target_size} ids, got None"
            )
        return torch.arange(draft_size)
    if kind not in ("offset", "absolute"):
        raise ValueError(f'draft_to_target: kind: expected "offset" or "absolute", got {kind!r}')
    if d2t.shape != (draft_size,) or d2t.is_floating_point() or d2t.is_complex():
        raise ValueError(f"draft_to_target: d2t: expected integers [{draft_size}], got {d2t.dtype} {list(d2t.shape)}")
    targets = d2t.to(torch.int64).cpu()
    if kind == "offset":
        targets = targets + torch.arange(draft_size)
    outside = ((targets < 0) | (targets >= target_size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"draft_to_target: d2t: expected targets in 0..{target_size - 1}, got {int(targets[at])} for draft id {at}"
        )
    ids, counts = targets.unique(return_counts=True)
    if (counts > 1).any():
        twice = int(ids[counts > 1][0])
        draft_ids = (targets == twice).nonzero().flatten().tolist()
        raise ValueError(f"draft_to_target: d2t: expected distinct targets, got {twice} for draft ids {draft_ids}")
    return targets


def scatter_logits(
    draft_logits: torch.Tensor, target_width: int, *, vocab_size: int, targets: torch.Tensor | None = None
) -> torch.Tensor:
    """Draft logits [..., Vd] in target columns, float64 [..., target_width]; -inf (no mass) where the draft has no
    token.

    vocab_size: ids that are tokens of both; draft columns whose target lies behind it lose their mass before
    normalisation, so a padded head of any width gives the law of its real tokens. targets: `draft_to_target`, or None
    for identity.
    """
    width = draft_logits.shape[-1]
    ids = torch.arange(width) if targets is None else targets
    if ids.shape != (width,):
        raise ValueError(f"scatter_logits: targets: expected [{width}], got {list(ids.shape)}")
    kept = (ids < min(vocab_size, target_width)).nonzero().flatten()
    if not len(kept):
        raise ValueError("scatter_logits: targets: expected at least one draft id below vocab_size, got none")
    out = torch.full((*draft_logits.shape[:-1], target_width), -torch.inf, dtype=torch.float64)
    out[..., ids[kept]] = draft_logits[..., kept].double().cpu()
    return out
