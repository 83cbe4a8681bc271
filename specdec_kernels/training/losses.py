"""What a head is asked for: the target's next-token law, on the draft vocabulary, at every depth."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LOSSES = ("kl", "lk")


class Teacher(NamedTuple):
    """The target's law behind each position: log_probs float32 [B, T, Vd], those of the draft vocabulary within the
    whole one (their sum is what a head can reach); best int64 [B, T], the target's own next token."""

    log_probs: Tensor
    best: Tensor


def teacher_law(last_states: Tensor, lse: Tensor, best: Tensor, output_rows: Tensor) -> Teacher:
    """From the target's last states [B, T, H], its log-sum-exp [B, T] over all tokens, and the rows [Vd, H] of its
    output matrix that belong to the draft vocabulary."""
    logits = (last_states.to(output_rows.dtype) @ output_rows.T).float()
    return Teacher(logits - lse[..., None], best.long())


def law_loss(kind: str, teacher_log_probs: Tensor, logits: Tensor) -> Tensor:
    """Loss [rows] of draft logits [rows, Vd] against the target's log-probabilities [rows, Vd].

    "kl": sum of p (log p - log q), the target's mass outside the draft vocabulary left out. "lk": -log of the
    acceptance sum min(p, q) itself (2602.23881).
    """
    if kind == "kl":
        return _Divergence.apply(teacher_log_probs, logits)
    log_q = logits.float().log_softmax(-1)
    if kind == "lk":
        return -torch.minimum(teacher_log_probs, log_q).exp().sum(-1).clamp(min=1e-6).log()
    raise ValueError(f"law_loss: kind: expected one of {LOSSES}, got {kind!r}")


class _Divergence(torch.autograd.Function):
    """Sum of p (log p - log q) over the last dimension, with its gradient (sum p) q - p formed in the forward pass: a
    third of the memory traffic of the same by autograd, which is what bounds it on a CPU."""

    @staticmethod
    def forward(ctx: Any, teacher_log_probs: Tensor, logits: Tensor) -> Tensor:
        p = teacher_log_probs.exp()
        q = logits.float()
        q = q - q.logsumexp(-1, keepdim=True)
        loss = (p * (teacher_log_probs - q)).sum(-1)
        ctx.save_for_backward(q.exp_().mul_(p.sum(-1, keepdim=True)).sub_(p).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (grad,) = ctx.saved_tensors
        return None, grad * grads[0][..., None].to(grad.dtype)


def acceptance(teacher_log_probs: Tensor, logits: Tensor) -> Tensor:
    """Chance [rows] that a token drawn from the draft's law is accepted at temperature 1: sum of min(p, q)."""
    return torch.minimum(teacher_log_probs, logits.float().log_softmax(-1)).exp().sum(-1)
