"""FlashInfer's signatures over our ops, so that code written for it can be run and compared.

Same arguments, shapes and results; randomness is torch's, so that sampled tokens have the same law but are others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention import tree_attention
from specdec_kernels.sampling import Verified, verify_probs
from specdec_kernels.tree import chain_tree

LOG2E = 1.4426950408889634


def verify_chains(
    draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, coins: Tensor, final_coins: Tensor
) -> Verified:
    """The chain rule on laws, K drafts a request.

    draft_probs: [B, K, V], row k the law draft k was drawn from; draft_token_ids: [B, K]; target_probs: [B, K + 1, V];
    coins: [B, K], draft k is accepted iff coin * q < p; final_coins: [B], for the last token, by inverse CDF.
    """
    batch, drafts, vocab = draft_probs.shape
    device = target_probs.device
    counts = torch.full((batch,), drafts, dtype=torch.int32, device=device)
    tree = chain_tree(counts, torch.zeros_like(counts), total_nodes=batch * (drafts + 1), max_nodes=drafts + 1)

    def behind_root(values: Tensor, dtype: torch.dtype) -> Tensor:
        """One row a node: the root has none of its own."""
        rooted = torch.zeros(batch, drafts + 1, *values.shape[2:], dtype=dtype, device=device)
        rooted[:, 1:] = values
        return rooted.flatten(0, 1)

    return verify_probs(
        target_probs.float().reshape(-1, vocab), behind_root(draft_token_ids, torch.int32), tree,
        behind_root(coins, torch.float32), final_coins.float().contiguous(), method="rejection",
        draft_probs=behind_root(draft_probs, torch.float32),
    )  # fmt: skip


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flashinfer.sampling.chain_speculative_sampling`.

    draft_probs: [B, K, V]; draft_token_ids: [B, K]; target_probs: [B, K + 1, V]. The two counters, int32 [B], are added
    to if given. Results are always deterministic; seed and offset: a generator of their own (reading tensors waits for
    the device).

    Returns (output_token_ids int32 [B, K + 1], -1 behind the last, accepted int32 [B]: drafts that their own coin
    accepts, whatever came before them; emitted int32 [B]: accepted drafts in the output).
    """
    if seed is not None:
        generator = torch.Generator(target_probs.device)
        generator.manual_seed((int(seed) * 0x9E3779B97F4A7C15 + int(offset or 0)) % 2**63)
    batch, drafts = draft_token_ids.shape
    coins = torch.rand(batch, drafts + 1, generator=generator, device=target_probs.device)
    found = verify_chains(draft_probs, draft_token_ids, target_probs, coins[:, :drafts], coins[:, drafts])
    ids = draft_token_ids.long().clamp(min=0)[..., None]
    p, q = (probs.float().gather(2, ids)[..., 0] for probs in (target_probs[:, :drafts], draft_probs))
    passes = (coins[:, :drafts] * q < p) & (draft_token_ids >= 0)

    def counter(values: Tensor, given: Tensor | None) -> Tensor:
        return values.int() if given is None else given.add_(values.to(given.dtype))

    accepted = counter(passes.sum(1), maybe_output_accepted_token_num)
    emitted = counter(found.num_emitted - 1, maybe_output_emitted_draft_token_num)
    return found.output_token_ids, accepted, emitted


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    window_left: int = -1,
    return_lse: bool = False,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flashinfer.single_prefill_with_kv_cache` with a custom mask.

    q: [Nq, Hq, D]; k, v: [Nk, Hkv, D] ("NHD") or [Hkv, Nk, D] ("HND"). custom_mask: bool [Nq, Nk], or
    packed_custom_mask: uint8 [ceil(Nq Nk / 8)], its bits in a row, least significant first; causal: query i sees keys
    up to Nk - Nq + i. With neither every query sees every key. Returns out [Nq, Hq, D], with return_lse also lse
    float32 [Nq, Hq] in base 2. NotImplementedError for window_left and for what else FlashInfer takes.
    """
    op = "single_prefill_with_kv_cache"
    given = sorted(name for name, value in unsupported.items() if value is not None)
    if given or window_left >= 0:
        raise NotImplementedError(f"{op}: not supported: {', '.join(given or ['window_left'])}")
    num_queries, num_keys = q.shape[0], k.shape[0 if kv_layout == "NHD" else 1]
    if custom_mask is None and packed_custom_mask is not None:
        size, bits = num_queries * num_keys, torch.arange(8, device=q.device)
        custom_mask = (packed_custom_mask[:, None] >> bits & 1).flatten()[:size].view(num_queries, num_keys)
    if custom_mask is None and causal:
        custom_mask = torch.ones(num_queries, num_keys, device=q.device).tril(num_keys - num_queries)
    if custom_mask is None:
        custom_mask = torch.ones(num_queries, num_keys, device=q.device)
    if custom_mask.numel() != num_queries * num_keys:
        raise ValueError(f"{op}: custom_mask: expected {num_queries} x {num_keys} bits, got {custom_mask.numel()}")
    # All keys are slots of one tree without context; the queries are its last ones.
    words = torch.nn.functional.pad(custom_mask.bool().view(num_queries, -1), (0, -num_keys % 32)).long()
    words = (words.view(num_queries, -1, 32) << torch.arange(32, device=q.device)).sum(-1)
    cu = torch.tensor([0, num_queries], dtype=torch.int32, device=q.device)
    zero = cu[:1]
    found = tree_attention(
        q, k[None], v[None], zero[:, None], zero, cu, torch.where(words >= 2**31, words - 2**32, words).int(),
        max_nodes=num_queries, query_start=zero + (num_keys - num_queries), softmax_scale=sm_scale,
        softcap=logits_soft_cap or 0.0, kv_layout=kv_layout, return_lse=return_lse,
    )  # fmt: skip
    if isinstance(found, Tensor):
        return found
    return found.out, torch.where(found.lse == -math.inf, found.lse, found.lse * LOG2E)
