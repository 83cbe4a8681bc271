"""What people would use instead of `verify`: logits in, tokens out, on plain torch and on transformers.

Chains of `gamma` drafts: target [B, gamma + 1, V], draft [B, gamma, V], ids [B, gamma]. Every function returns
(num_emitted [B], last token [B]).
"""

from __future__ import annotations

import torch
from torch import Tensor

Out = tuple[Tensor, Tensor]


def sort_filter(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k, then top-p over what is kept, by sorting whole rows."""
    if top_k:
        kth = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    ordered, order = logits.sort(-1)
    tail = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    tail[..., -1] = False
    return logits.masked_fill(tail.scatter(-1, order, tail), -torch.inf)


def _accepted(p: Tensor, q: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
    p_x = p[:, :-1].gather(-1, ids[..., None])[..., 0]
    q_x = q.gather(-1, ids[..., None])[..., 0]
    return (uniforms * q_x < p_x).long().cumprod(-1).sum(-1)


def _last_law(p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
    """Residual at the first rejection, the target's law behind a chain accepted in full; not normalised."""
    row = torch.arange(p.shape[0])
    law = p[row, accepted]
    drafted = accepted < q.shape[1]
    residual = (law - q[row, accepted.clamp(max=q.shape[1] - 1)]).clamp_(min=0)
    return torch.where(drafted[:, None], residual, law)


def torch_straight(target: Tensor, draft: Tensor, ids: Tensor, uniforms: Tensor) -> Out:
    """The obvious version: two softmaxes, gather, residual, multinomial."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    accepted = _accepted(p, q, ids, uniforms)
    law = _last_law(p, q, accepted)
    return accepted + 1, torch.multinomial(law / law.sum(-1, keepdim=True), 1)[:, 0]


def torch_inverse_cdf(target: Tensor, draft: Tensor, ids: Tensor, uniforms: Tensor) -> Out:
    """The best torch formulation found: the same with cumsum and searchsorted instead of multinomial."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    accepted = _accepted(p, q, ids, uniforms)
    cdf = _last_law(p, q, accepted).cumsum(-1)
    u = torch.rand(cdf.shape[0], 1) * cdf[:, -1:]
    return accepted + 1, torch.searchsorted(cdf, u, right=True).clamp_(max=cdf.shape[1] - 1)[:, 0]


def torch_sorted(target: Tensor, draft: Tensor, ids: Tensor, uniforms: Tensor, top_k: int, top_p: float) -> Out:
    """Filters by sorting on both sides, then the best formulation."""
    return torch_inverse_cdf(
        sort_filter(target.float(), top_k, top_p), sort_filter(draft.float(), top_k, top_p), ids, uniforms
    )


def transformers_speculative(target: Tensor, draft: Tensor, ids: Tensor, top_k: int = 0, top_p: float = 1.0) -> Out:
    """transformers' `_speculative_sampling` (batch 1, hence a loop), behind its own warpers where filters are asked."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper
    from transformers.generation.utils import _speculative_sampling

    warpers = ([TopKLogitsWarper(top_k)] if top_k else []) + ([TopPLogitsWarper(top_p)] if top_p < 1 else [])
    emitted, last = [], []
    for p, q, x in zip(target, draft, ids, strict=True):
        new, candidate = p.float(), q.float()
        for warper in warpers:
            new, candidate = warper(None, new), warper(None, candidate)
        tokens, _ = _speculative_sampling(x[None], candidate[None], x.shape[0], new[None], False)
        emitted.append(tokens.shape[1])
        last.append(int(tokens[0, -1]))
    return torch.tensor(emitted), torch.tensor(last)
