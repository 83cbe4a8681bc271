"""SGLang plug-in: our tree building, verification, KV compaction and eviction policy on SGLang's layouts.

SGLang calls `register` at start (entry point group `sglang.srt.plugins`); the functions below take the place of those
that its EAGLE workers call, with the same arguments, and write into the buffers that SGLang brings. Its trees are
rectangular: every request has N = num_verify_tokens nodes, [B, N], with first-child and next-sibling links.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.integrations._hooks import Hook, missing_hooks, usable
from specdec_kernels.integrations.sglang_cache import compact_kv_for_sglang, register_eviction_policy
from specdec_kernels.integrations.sglang_verify import (
    sample_chain_for_sglang,
    sample_target_only_for_sglang,
    verify_greedy_for_sglang,
)
from specdec_kernels.tree import SGLangTree, build_tree, to_layout

TESTED = ("0.5.23",)
MASK_MODES = ("FULL_MASK", "QLEN_ONLY", "QLEN_ONLY_BITPACKING")
_USER = "sglang.srt.speculative.eagle_utils"  # hooks go to the module that imported the functions


def candidate_parents(parent_list: Tensor, top_scores_index: Tensor, topk: int) -> Tensor:
    """Parents int32 [B, N] of the re-ranked candidates, root included.

    Candidate i of the flattened levels was proposed under entry i // topk of parent_list [B, *]: 0 is the root, entry
    e > 0 names the candidate parent_list[e]. top_scores_index: int64 [B, N - 1], the candidates kept, rising. A kept
    candidate whose parent was not kept gets its own index, which `build_tree` flags and leaves out.
    """
    entry = torch.div(top_scores_index, topk, rounding_mode="floor")
    batch, kept = top_scores_index.shape
    if parent_list.shape[1] == 0:  # one level: all candidates hang on the root
        return torch.zeros(batch, kept + 1, dtype=torch.int32, device=entry.device).index_fill_(
            1, entry.new_zeros(1), -1
        )
    above = parent_list.gather(1, entry.clamp(max=parent_list.shape[1] - 1))
    same = top_scores_index[:, None, :] == above[:, :, None]  # [B, child, candidate]
    own = torch.arange(1, kept + 1, device=entry.device).expand(batch, kept)
    found = torch.where(same.any(-1), same.int().argmax(-1) + 1, own)
    parents = torch.where(entry == 0, 0, found)
    return torch.cat([parents.new_full((batch, 1), -1), parents], 1).int()


def build_tree_for_sglang(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any = 0,
) -> None:
    """`build_tree_kernel_efficient_func`: fills tree_mask, positions and the three links."""
    batch, nodes = seq_lens.numel(), num_verify_tokens
    parents = candidate_parents(parent_list, top_scores_index, topk)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=parents.device) * nodes
    tree = build_tree(parents.reshape(-1), cu, seq_lens.to(torch.int32), max_nodes=nodes)
    mode = MASK_MODES[int(getattr(tree_mask_mode, "value", tree_mask_mode))]
    context = tree_mask.numel() // nodes - batch * nodes if mode == "FULL_MASK" else None
    made = to_layout(tree, "sglang", mask_mode=mode, total_context=context)
    assert isinstance(made, SGLangTree)
    tree_mask.view(-1)[: made.tree_mask.numel()].copy_(made.tree_mask[: tree_mask.numel()])
    positions.copy_(made.positions)
    retrieve_index.copy_(made.retrive_index)
    if made.retrive_next_token is not None and made.retrive_next_sibling is not None:
        retrieve_next_token.copy_(made.retrive_next_token)
        retrieve_next_sibling.copy_(made.retrive_next_sibling)


HOOKS: dict[str, Callable[..., Any]] = {
    f"{_USER}.build_tree_kernel_efficient_func": build_tree_for_sglang,
    f"{_USER}.verify_tree_greedy_func": verify_greedy_for_sglang,
    f"{_USER}.tree_speculative_sampling_target_only": sample_target_only_for_sglang,
    f"{_USER}.chain_speculative_sampling_triton": sample_chain_for_sglang,
}
_CACHE_HOOK = Hook(
    "sglang.srt.speculative.spec_utils", "move_accept_tokens_to_target_kvcache",
    ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
)  # fmt: skip


def _hook(path: str, ours: Callable[..., Any]) -> Hook:
    module, name = path.rsplit(".", 1)
    return Hook(module, name, tuple(inspect.signature(ours).parameters), may_be_none="sampling" in name)


_NEEDED = (
    *(_hook(path, ours) for path, ours in HOOKS.items()),
    _CACHE_HOOK,
    Hook("sglang.srt.mem_cache.utils", "get_eviction_strategy", ("eviction_policy", "config")),
)


def moved_hooks() -> list[str]:
    """A line for every function that SGLang does not have any more, or calls with other parameters. The samplers are
    None where SGLang has no kernel for them, as on the CPU."""
    return missing_hooks(_NEEDED)


def register() -> bool:
    """Register our functions with SGLang's plug-in registry, and our eviction policy. Returns whether it did; never
    raises. On a mismatch SGLang stays as it is, and one line says what moved."""
    if not usable("SGLang", "sglang", TESTED, moved_hooks):
        return False
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    for path, ours in HOOKS.items():
        module, name = path.rsplit(".", 1)
        # A None must not be replaced: SGLang's registry puts the new value wherever any module has the old one.
        if getattr(importlib.import_module(module), name) is not None:
            hooks.HookRegistry.register(path, ours, hooks.HookType.REPLACE)
    hooks.HookRegistry.register(_CACHE_HOOK.path, compact_kv_for_sglang, hooks.HookType.AROUND)
    register_eviction_policy()
    return True
