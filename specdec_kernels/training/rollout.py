"""Training-time test: a head is trained on its own outputs, several steps deep, as it will be used.

Row i starts a chain at pair i (target state i, token i + 1). Step s of row i is at position i + s: it reads token
i + s + 1 and the output of step s - 1 of the same row, and predicts the token at i + s + 2. Its keys are the first
step's up to row i (context, true states) and then its own row of each later step:

    step 2, row 3 sees   k0[0] k0[1] k0[2] k0[3] | k1[3] k2[3]

All rows go through a step at once, or all through the first and a sample of them through the later ones: neighbouring
rows teach much the same, and a later step costs what a first one does. Source: Li et al., EAGLE-3 (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_kernels.engine.heads import AutoregressiveHead


class ChainAttention:
    """Attention of the drawing above; one object serves one rollout. Tensors [B, T, heads, D]; `rows` int64 [B, S]:
    those that go on behind the first step, whose tensors are [B, S, heads, D]."""

    def __init__(self, rows: Tensor | None = None) -> None:
        self.rows = rows
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            swapped = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True).transpose(1, 2)
        length = self.keys[0].shape[1]
        rows = torch.arange(length, device=q.device)[None] if self.rows is None else self.rows
        grouped = (q * q.shape[-1] ** -0.5).unflatten(2, (k.shape[2], -1))
        context = torch.einsum("bihgd,bjhd->bhgij", grouped, self.keys[0]).float()
        future = torch.arange(length, device=q.device) > rows[..., None]
        own = torch.stack([torch.einsum("bihgd,bihd->bhgi", grouped, key) for key in self.keys[1:]], -1).float()
        weights = torch.cat([context.masked_fill(future[:, None, None], -torch.inf), own], -1).softmax(-1).to(v.dtype)
        out = torch.einsum("bhgij,bjhd->bihgd", weights[..., :length], self.values[0])
        for step, value in enumerate(self.values[1:]):
            out = out + torch.einsum("bhgi,bihd->bihgd", weights[..., length + step], value)
        return out.flatten(2, 3)


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved `by` places to the left; the end is filled with zeros."""
    return F.pad(x[:, by:], [0, 0] * (x.dim() - 2) + [0, by]) if by else x


def taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """x [B, T, ...] at `rows` int64 [B, S] -> [B, S, ...]; x itself for None."""
    if rows is None:
        return x
    index = rows.reshape(*rows.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def rollout(
    head: AutoregressiveHead, tokens: Tensor, features: Tensor, num_steps: int, rows: Tensor | None = None
) -> list[Tensor]:
    """Output states of each step, for tokens int64 [B, T] and target states [B, T, num_layers * H]: [B, T, H] of the
    first, and [B, S, H] of the others for `rows` int64 [B, S] (None: all). Row i of step s means something while
    i + s + 1 < T."""
    attend = ChainAttention(rows)
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    state = head.fuse(features)
    outputs = []
    for step in range(num_steps):
        if step == 1:
            state, places = taken(state, rows), taken(places, rows)
        ids = shifted(tokens, step + 1)
        state = head(taken(ids, rows) if step else ids, state, places + step, attend)
        outputs.append(state)
    return outputs
