"""A decoder layer of the Llama family as one function over packed weights: a small model's step on a CPU is hundreds of
short calls, and half of its time goes into starting them.

    x --norm--> q k v (one product) --rotate q and k together--> write_kv, attention --product + x--> x'
    x' --norm--> gate up (one product) --silu, multiply--> product + x'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec_kernels.engine.linear import PackedLinear, SharedLinear

_FAMILY = ("LlamaDecoderLayer", "Qwen2DecoderLayer")

# (layer_idx, q [T, Hq, D], k, v [T, Hkv, D], scale) -> [T, Hq, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Rotary:
    """Rotation of a step's positions, in the form that all layers of the step use: rotate(x) is
    x * cos + swap_halves(x) * (-sin | sin)."""

    def __init__(self) -> None:
        self._sin: torch.Tensor | None = None
        self._pair: tuple[torch.Tensor, torch.Tensor]

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [1, T, D], made once a step by transformers -> both [T, 1, D], sin with its first half negated."""
        if self._sin is not sin:
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
            self._sin, self._pair = sin, (cos[0].unsqueeze(1), signed.unsqueeze(1))
        return self._pair


class FusedDecoderLayer(nn.Module):
    """Takes the place of a `transformers` decoder layer whose linear layers are packed; called as that one is."""

    def __init__(self, layer: Any, attend: Attend, rotary: Rotary):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx, self.head_dim, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.output = attention.q_proj.state.packed, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.state.packed, mlp.down_proj
        q, k, v = (size // self.head_dim for size in self.qkv.sizes)
        self.heads, self.rotated = (q, k, v), q + k
        self.attend, self.rotary = attend, rotary

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        x = hidden_states  # [1, T, H]
        cos, sin = self.rotary.of(*position_embeddings)
        qkv = self.qkv(self.input_norm(x)).view(x.shape[1], -1, self.head_dim)
        qk, half = qkv[:, : self.rotated], self.head_dim // 2
        swapped = torch.cat([qk[..., half:], qk[..., :half]], -1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        attended = self.attend(
            self.layer_idx, qk[:, : self.heads[0]], qk[:, self.heads[0] :], qkv[:, self.rotated :], self.scale
        )
        x = self.output.add_to(x, attended.view(1, x.shape[1], -1))
        gate, up = self.gate_up(self.mlp_norm(x)).split(self.gate_up.sizes, -1)
        return self.down.add_to(x, nn.functional.silu(gate) * up)


def fuse_layers(layers: nn.ModuleList, attend: Attend) -> int:
    """Replace those of `layers` that a `FusedDecoderLayer` can stand for; returns how many."""
    rotary, replaced = Rotary(), 0
    for i, layer in enumerate(layers):
        if _fits(layer):
            layers[i] = FusedDecoderLayer(layer, attend, rotary)
            replaced += 1
    return replaced


def _fits(layer: Any) -> bool:
    """A layer of known mathematics, all of whose products are packed; windows are left to the layer itself."""
    if type(layer).__name__ not in _FAMILY or getattr(layer.self_attn, "sliding_window", None):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    stacked = isinstance(attention.q_proj, SharedLinear) and isinstance(mlp.gate_proj, SharedLinear)
    alone = isinstance(attention.o_proj, PackedLinear) and isinstance(mlp.down_proj, PackedLinear)
    return stacked and alone and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
