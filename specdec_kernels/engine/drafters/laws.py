"""Random drafts of a whole step, with the laws they were drawn from, as `verify` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels.engine.drafters import Draft


def draft_laws(drafts: Sequence[Draft], vocab_size: int, device: torch.device) -> dict[str, torch.Tensor | None]:
    """`draft_logits` of all drawn drafts; per tree node its row there (-1: root or fixed choice); the vocabulary map.

    One map for all is passed on; where drafters of different vocabularies meet, rows are laid out in the target's.
    """
    drawn = [draft for draft in drafts if draft.logits is not None]
    rows: list[int] = []
    first = 0
    for draft in drafts:
        rows.append(-1)
        if draft.logits is None:
            rows.extend([-1] * len(draft))
            continue
        rows.extend(first + row for row in (range(len(draft)) if draft.rows is None else draft.rows))
        first += draft.logits.shape[0]
    d2t = drawn[0].d2t
    laws = [draft.logits for draft in drawn if draft.logits is not None]
    if any(draft.d2t is not d2t or law.shape[1] != laws[0].shape[1] for draft, law in zip(drawn, laws)):
        laws = [_in_target_columns(law, draft.d2t, vocab_size) for draft, law in zip(drawn, laws)]
        d2t = None
    return {
        "draft_logits": torch.cat(laws),
        "draft_rows": torch.tensor(rows, dtype=torch.int32, device=device),
        "d2t": d2t,
    }


def _in_target_columns(logits: torch.Tensor, d2t: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits [R, Vd] -> float32 [R, vocab_size], -inf where the drafter knows no such token."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    if d2t is not None:
        ids = ids + d2t
    kept = ids < vocab_size
    out = torch.full((logits.shape[0], vocab_size), -torch.inf, device=logits.device)
    out[:, ids[kept]] = logits[:, kept].float()
    return out
