"""Small byte-level language models, trained here in a minute or two: targets and drafts of the claims that need both to
be trained. Two texts that every Python has: the standard library's source, and the prose of its help topics."""

from __future__ import annotations

import contextlib
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

VOCAB = 256
_MOST = 4_000_000  # bytes of one text
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def code() -> Tensor:
    """uint8 [n]: modules of the standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT & set(path.relative_to(root).parts) and len(text) < _MOST:
            text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)


def prose() -> Tensor:
    """uint8 [n]: what `help("topics")` knows, as text."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def pieces(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """int64 [count, length]: random pieces of a text uint8 [n]."""
    starts = torch.randint(0, len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[s : s + length] for s in starts.tolist()]).long()


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """The first nine tenths, for training, and the rest."""
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def inner_width(hidden: int) -> int:
    """Of a dense layer: a multiple of 16, so that half of it still suits grouped products."""
    return 8 * hidden // 3 // 16 * 16


def llama(hidden: int, layers: int, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(intermediate_size=inner_width(hidden), **_shape(hidden, layers)))


def mixtral(hidden: int, layers: int, experts: int, intermediate: int, seed: int = 0) -> Any:
    """Two of `experts` experts a token and layer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        intermediate_size=intermediate, num_local_experts=experts, num_experts_per_tok=2, router_aux_loss_coef=0.02,
        sliding_window=None, **_shape(hidden, layers),
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _shape(hidden: int, layers: int) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


@contextlib.contextmanager
def own_attention(module: Any) -> Iterator[None]:
    """Whole texts instead of packed batches, also for a module that serves as an engine's target."""
    served = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        module.set_attn_implementation(served)


class Trainer:
    """AdamW with a warm-up on random pieces of a text. `loss`: of the latest step, nats a byte."""

    def __init__(self, module: Any, lr: float, *, batch: int = 16, length: int = 128, seed: int = 0):
        self.module, self.lr, self.batch, self.length, self.seed = module, lr, batch, length, seed
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.sparse = hasattr(module.config, "num_local_experts")
        self.step, self.loss = 0, math.nan

    def run(self, text: Tensor, steps: int, *, total: int | None = None, report: str = "") -> float:
        """`steps` more; with `total` the rate falls to a tenth of itself by then. Returns seconds taken. Weights change
        in place."""
        start = time.perf_counter()
        with own_attention(self.module):
            self._run(text, steps, total, report)
        return time.perf_counter() - start

    def _run(self, text: Tensor, steps: int, total: int | None, report: str) -> None:
        said = time.perf_counter()
        self.module.train().requires_grad_(True)
        for _ in range(steps):
            rate = self.lr * min(1.0, (self.step + 1) / 20)
            if total is not None:
                rate *= 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, self.step / total)))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            tokens = pieces(text, self.batch, self.length + 1, self.seed * 1_000_003 + self.step)
            extra = {"output_router_logits": True} if self.sparse else {}
            out = self.module(tokens[:, :-1], use_cache=False, **extra)
            loss = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.loss = loss.item()
            if self.sparse:  # keeps the experts in use
                loss = loss + self.module.router_aux_loss_coef * out.aux_loss
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            if report and time.perf_counter() - said > 20:
                said = time.perf_counter()
                print(f"{report}: step {self.step}, {self.loss:.2f} nats a byte", flush=True)
        self.module.eval().requires_grad_(False)


@torch.no_grad()
def nats(module: Any, text: Tensor, seed: int = 99) -> float:
    """Mean nats a byte on 16 pieces of 128."""
    tokens = pieces(text, 16, 129, seed)
    with own_attention(module):
        logits = module(tokens[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
