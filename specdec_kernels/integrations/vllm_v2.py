"""vLLM's GPU model runner (V2): our `verify` in the place of the `rejection_sample` that its sampler imported."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.integrations._hooks import Hook, missing_hooks, usable
from specdec_kernels.sampling import Sampling, verify
from specdec_kernels.tree import chain_tree

TESTED = ("0.32.0", "0.33.0")  # 0.33.0: signatures alone
_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
HOOKS = (
    Hook(_SAMPLER, "rejection_sample", (
        "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "expanded_idx_mapping",
        "expanded_local_pos", "temperature", "seed", "num_speculative_steps", "synthetic_conditional_rates", "use_fp64",
        "use_block_verification",
    )),
)  # fmt: skip


def rejection_sample(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Verify B chains of at most K drafts; every request's rows in order, row i's token is that of draft i, -1 none.

    target_logits: [L, V], temperature and filters applied; draft_logits: [slots, K, V'] before temperature, by request
    slot, None: drafts are deterministic; draft_sampled, pos, expanded_*: [L]; cu_num_logits: [B + 1]; idx_mapping: [B],
    a request's slot; temperature, seed: by slot. Returns (sampled int64 [B, K + 1], -1 behind the last, num_sampled
    int32 [B]). Noise is keyed by the request's seed and position. Synthetic acceptance, watermarks and the lossy "fly"
    rule go to vLLM's own.
    """
    special = {name for name, value in others.items() if value is not None and name in ("contexts", "watermarking")}
    if synthetic_conditional_rates is not None or special or others.get("fly_window_size"):
        return rejection_sample.replaced(  # type: ignore[attr-defined]
            target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
            expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates,
            use_fp64=use_fp64, use_block_verification=use_block_verification, **others,
        )  # fmt: skip
    rows, steps = target_logits.shape[0], num_speculative_steps
    counts = torch.diff(cu_num_logits).int()
    tree = chain_tree(counts - 1, torch.zeros_like(counts), total_nodes=rows, max_nodes=steps + 1)
    slots = idx_mapping.long()
    heat = temperature[slots].float()
    first = cu_num_logits[:-1].long().clamp(max=max(rows - 1, 0))
    neutral = torch.ones_like(heat)
    sampling = Sampling(
        torch.where(heat <= 1e-5, 0.0, neutral), seed=seed[slots].long(), position=pos[first].long(),
        step=torch.zeros_like(slots),
    )  # fmt: skip
    laws: dict[str, Any] = {}
    if draft_logits is not None:
        row = expanded_idx_mapping.long() * steps + expanded_local_pos.long() - 1
        laws = {
            "draft_logits": draft_logits.reshape(-1, draft_logits.shape[-1]), "draft_sampling": Sampling(heat),
            "draft_rows": torch.where(expanded_local_pos > 0, row, -1).int(),
        }  # fmt: skip
    method = "target_only" if not laws else "block" if use_block_verification else "rejection"
    found = verify(target_logits, draft_sampled.int(), tree, sampling, method=method, **laws)
    return found.output_token_ids.long(), found.num_emitted


def register() -> bool:
    """Replace the function in the V2 sampler's module. Returns whether it is replaced; never raises."""
    if not usable("vLLM's V2 runner", "vllm", TESTED, lambda: missing_hooks(HOOKS)):
        return False
    sampler: Any = importlib.import_module(_SAMPLER)
    if sampler.rejection_sample is not rejection_sample:
        rejection_sample.replaced = sampler.rejection_sample  # type: ignore[attr-defined]
        sampler.rejection_sample = rejection_sample
    return True
