"""Draft heads as modules: small networks that read the target's hidden states and guess the tokens behind them.

Autoregressive heads (EAGLE, EAGLE-3, MTP) have one decoder layer. Row p pairs the target's state at text position p
with the token at p + 1, and predicts the token at p + 2; further rows take the head's own output for the state:

    text      x0   x1   x2   x3 (root)        pair 0: (h0, x1)   pair 1: (h1, x2)   pair 2: (h2, x3) -> x4?
    states    h0   h1   h2                    drafts: (g2, x4?) -> x5?, where g2 is the output of pair 2, ...

Medusa heads read h2 alone: head d predicts the token at d positions behind the root.
Sources: Cai et al., Medusa (2024); Li et al., EAGLE (2024), EAGLE-3 (2025); DeepSeek-AI, DeepSeek-V3 (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec_kernels.tree import check_d2t

KINDS = ("eagle", "eagle3", "mtp", "medusa")
MEDUSA_BLOCK = "linear"  # of a Medusa set: what maps the target's state, in the words of a checkpoint
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head. `feature_layers`: the target states it reads (see `HiddenStates`); three of them for EAGLE-3,
    the last one for the others. `num_medusa`: depth of a Medusa set. `draft_vocab_size` < `vocab_size`: the head knows
    only the tokens of its map d2t. `target`: name and fingerprint of the model it was trained for ("": any)."""

    kind: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    num_q_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 2048
    norm_before_residual: bool = False
    num_medusa: int = 0
    target_hidden_size: int = 0  # 0: the head's own
    target: str = ""
    fingerprint: str = ""

    def validate(self) -> None:
        """Raise ValueError naming the field that cannot be."""
        autoregressive = self.kind != "medusa"
        for name, holds, expected in (
            ("kind", self.kind in KINDS, f"one of {KINDS}"),
            ("hidden_size", self.hidden_size > 0, "a positive size"),
            ("draft_vocab_size", 0 < self.draft_vocab_size <= self.vocab_size, f"1..{self.vocab_size}"),
            ("feature_layers", len(self.feature_layers) > 0, "at least one layer"),
            ("feature_layers", self.kind == "eagle3" or len(self.feature_layers) == 1, "one layer for this kind"),
            ("num_q_heads", self.num_q_heads % max(1, self.num_kv_heads) == 0, f"a multiple of {self.num_kv_heads}"),
            ("intermediate_size", not autoregressive or self.intermediate_size > 0, "a positive size"),
            ("num_medusa", autoregressive or self.num_medusa > 0, "at least one head"),
        ):
            if not holds:
                raise ValueError(f"HeadConfig: {name}: expected {expected}, got {getattr(self, name)!r}")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections and rotary positions; the sum over keys is the caller's (`attend`), who owns the cache."""

    def __init__(self, c: HeadConfig, width: int):
        super().__init__()
        self.head_dim, self.theta = c.head_dim, c.rope_theta
        self.q_proj = nn.Linear(width, c.num_q_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_q_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        half = self.head_dim // 2
        rates = self.theta ** -(torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angle = positions[..., None, None].float() * rates
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def rotate(y: Tensor) -> Tensor:  # halves, not neighbours: Llama's layout
            a, b = y.split(half, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return self.o_proj(attend(rotate(q), rotate(k), v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, c: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer. EAGLE-3's reads [embedding, state] normed apart; EAGLE's has no norm before attention."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.self_attn = Attention(c, 2 * c.hidden_size if c.kind == "eagle3" else c.hidden_size)
        self.mlp = MLP(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.kind != "eagle":
            self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.kind == "eagle3":
            self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class DraftHead(nn.Module):
    """What all heads share: the vocabulary map, the target's embedding and output matrix.

    `embedding` [V, H] and `output` [Vd, H] are the target's own tensors unless the checkpoint brought some (`bind`).
    Buffer `d2t` int64 [Vd]: target id = draft id + d2t[draft id].
    """

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None):
        super().__init__()
        config.validate()
        self.config = config
        if d2t is None and config.draft_vocab_size != config.vocab_size:
            d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if d2t is None else d2t.to(torch.int64))
        check_d2t(
            self.d2t, draft_vocab_size=config.draft_vocab_size, target_vocab_size=config.vocab_size, kind="offset"
        )
        self.lm_head: nn.Linear | None = None
        self.embedding: Tensor | None = None
        self.output: Tensor | None = None
        self._targets: set[str] = set()  # which of the two are the target's, by content

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id, int64 [Vd]."""
        if self.d2t is None:
            return torch.arange(self.config.draft_vocab_size)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def bind(self, embedding: Tensor, output: Tensor) -> None:
        """Take the target's embedding [V, H] and output matrix [V, H] where the head has none of its own; a
        checkpoint's that equals the target's counts as the target's."""
        c = self.config
        needed = [("embedding", embedding)] if self.embedding is None and c.kind != "medusa" else []
        needed += [("output matrix", output)] if self.lm_head is None and self.output is None else []
        for name, value in needed:
            if value.shape[0] < c.vocab_size or value.shape[1] != c.hidden_size:
                raise ValueError(
                    f"{c.kind} head: target: expected an {name} of [{c.vocab_size}, {c.hidden_size}], "
                    f"got {list(value.shape)}"
                )
        if self.embedding is None:
            self.embedding = embedding.detach()
        if self.lm_head is None and self.output is None:
            whole = self.d2t is None and c.draft_vocab_size == output.shape[0]
            self.output = output.detach() if whole else output.detach()[self.draft_ids.to(output.device)]
        for name, own, theirs in self._pairs(embedding, output):
            if own is theirs or torch.equal(own, theirs.to(own)):
                self._targets.add(name)

    @torch.no_grad()
    def rebind(self, embedding: Tensor, output: Tensor) -> None:
        """The target's weights have changed: read its matrices [V, H] again, in place, where they are the target's."""
        for name, own, theirs in self._pairs(embedding, output):
            if name in self._targets:
                own.copy_(theirs)

    def _pairs(self, embedding: Tensor, output: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """(name, the head's own, the same rows of the target's) of the matrices that the head has."""
        found = []
        if self.embedding is not None:
            found.append(("embedding", self.embedding, embedding[: len(self.embedding)]))
        if self.output is not None:
            whole = len(self.output) == len(output)
            found.append(("output", self.output, output if whole else output[self.draft_ids.to(output.device)]))
        return [(name, own, theirs) for name, own, theirs in found if own.shape == theirs.shape]

    def project(self, x: Tensor) -> Tensor:
        """States [.., H] -> logits [.., Vd]."""
        if self.lm_head is not None:
            return self.lm_head(x)
        assert self.output is not None, "bind() first"
        return F.linear(x, self.output)


class AutoregressiveHead(DraftHead):
    """EAGLE, EAGLE-3 or MTP (see the module's drawing)."""

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None):
        super().__init__(config, d2t)
        c, size = config, config.hidden_size
        inputs = len(c.feature_layers) * (c.target_hidden_size or size) if c.kind == "eagle3" else 2 * size
        self.fc = nn.Linear(inputs, size, bias=False)
        self.layers = nn.ModuleList([Layer(c)])
        if c.kind != "eagle":
            self.norm = RMSNorm(size, c.rms_norm_eps)
        if c.kind == "mtp":
            self.hidden_layernorm, self.token_layernorm = (RMSNorm(size, c.rms_norm_eps) for _ in range(2))
        if c.kind == "eagle3":
            self.lm_head = nn.Linear(size, c.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Target states [.., num_layers H] -> the state of a pair [.., H]."""
        return self.fc(features) if self.config.kind == "eagle3" else features

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Rows of pairs: token_ids int64 [.., T], states [.., T, H] (fused, or the head's own output), positions
        integers [.., T] -> output states [.., T, H], which `logits` reads and the next level takes for its states."""
        assert self.embedding is not None, "bind() first"
        embedded = F.embedding(token_ids, self.embedding).to(states.dtype)
        layer, kind = self.layers[0], self.config.kind
        if kind == "eagle3":
            normed = layer.hidden_norm(states)
            residual = normed if self.config.norm_before_residual else states
            x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        elif kind == "mtp":
            residual = self.fc(torch.cat([self.token_layernorm(embedded), self.hidden_layernorm(states)], -1))
            x = layer.input_layernorm(residual)
        else:
            residual = x = self.fc(torch.cat([embedded, states], -1))
        x = residual + layer.self_attn(x, positions, attend)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) if kind == "mtp" else x  # MTP hands on what the output matrix reads, as the target does

    def logits(self, states: Tensor) -> Tensor:
        """Output states [.., H] -> logits [.., Vd]."""
        return self.project(self.norm(states) if self.config.kind == "eagle3" else states)


class MedusaHead(DraftHead):
    """`num_medusa` linear maps of the target's last state, sharing one output matrix: head d predicts the state that
    the output matrix will read d positions further on.

    The residual block of the paper, x + SiLU(W x), is made for output matrices of each head's own: with the target's,
    which is shared and fixed, it can hardly lower what a state holds (SiLU is never below -0.28), and it learned less.
    """

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None):
        super().__init__(config, d2t)
        size = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_medusa))
        for block in self.blocks:  # at first every head repeats the target's own prediction
            nn.init.eye_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, states: Tensor) -> Tensor:
        """States [.., H] -> logits [.., num_medusa, Vd]."""
        return self.project(torch.stack([block(states) for block in self.blocks], -2))


def make_head(config: HeadConfig, d2t: Tensor | None = None) -> DraftHead:
    """A head of `config.kind` with fresh weights."""
    return (MedusaHead if config.kind == "medusa" else AutoregressiveHead)(config, d2t)
