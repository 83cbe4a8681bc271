"""SGLang plug-in: our tree building, greedy verification and target-only sampling on SGLang's layouts.

SGLang calls `register` at start (entry point group `sglang.srt.plugins`); the functions below take the place of those
that its EAGLE workers call, with the same arguments, and write into the buffers that SGLang brings. Its trees are
rectangular: every request has N = num_verify_tokens nodes, [B, N], with first-child and next-sibling links.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.sampling import Sampling, verify, verify_probs
from specdec_kernels.tree import DraftTree, SGLangTree, build_tree, from_layout, to_layout

logger = logging.getLogger("specdec_kernels")
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


def _tree_of(retrieve_index: Tensor, next_token: Tensor, next_sibling: Tensor) -> DraftTree:
    """Their links as our tree, at context length 0 (positions do not matter to verification)."""
    batch, nodes = retrieve_index.shape
    none = torch.zeros(batch, dtype=torch.int32, device=next_token.device)
    mask = torch.zeros(0, dtype=torch.bool, device=next_token.device)
    links = SGLangTree(mask, mask, retrieve_index, next_token.long(), next_sibling.long(), "QLEN_ONLY")
    return from_layout(links, context_lens=none, max_nodes=nodes)


def _write(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    retrieve_index: Tensor,
    tokens: Tensor,
    nodes: Tensor,
    num_emitted: Tensor,
) -> None:
    """Our outcome in their buffers: accepted nodes by their place in the batch, each place's next token in predicts."""
    steps = min(accept_index.shape[1], nodes.shape[1])
    nodes, tokens = nodes[:, :steps].long(), tokens[:, :steps]
    taken = torch.arange(steps, device=nodes.device) < num_emitted[:, None]
    place = retrieve_index.long().gather(1, nodes.clamp(min=0))
    accept_index.fill_(-1)
    accept_index[:, :steps] = torch.where(taken, place, -1).to(accept_index.dtype)
    accept_token_num.copy_(num_emitted - 1)
    predicts[place[taken]] = tokens[taken].to(predicts.dtype)


def verify_greedy_for_sglang(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_tree_greedy_func`: the longest path on which every token is the target's own choice at its parent.

    The walk needs no vocabulary: to `verify`, a draft is token 1 if it is its parent's prediction, else 0, and every
    row of the target says 1.
    """
    batch, nodes = candidates.shape
    tree = _tree_of(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    counts = (tree.cu_nodes[1:] - tree.cu_nodes[:-1]).long()
    row = torch.arange(batch, device=candidates.device).repeat_interleave(nodes)
    slot = torch.arange(nodes, device=candidates.device).repeat(batch)
    exists = slot < counts[row]
    parents = torch.zeros(batch * nodes, dtype=torch.int64, device=candidates.device)
    packed = tree.cu_nodes[row].long() + slot
    parents[exists] = tree.parents[packed[exists]].long().clamp(min=0)
    hit = candidates[row, slot] == target_predict[row, parents]
    ids = torch.zeros(tree.parents.shape[0], dtype=torch.int32, device=candidates.device)
    ids[packed[exists]] = hit[exists].int()
    says = torch.tensor([0.0, 1.0], device=candidates.device).expand(tree.parents.shape[0], 2)
    sampling = Sampling.of(batch, temperature=0.0, device=candidates.device)
    found = verify(says, ids, tree, sampling, method="greedy")
    tokens = target_predict.gather(1, found.accepted_nodes.long().clamp(min=0))
    _write(
        predicts, accept_index, accept_token_num, retrieve_index, tokens, found.accepted_nodes, found.num_emitted
    )  # fmt: skip
    return predicts, accept_index, accept_token_num


def sample_target_only_for_sglang(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """`tree_speculative_sampling_target_only` at thresholds 1, where it is lossless: a coin a visited node against the
    cumulative mass of its children. uniform_samples: float32 [B, N], the coin of a node decides among its children.
    NotImplementedError for lower thresholds, which accept tokens that the target would not have drawn."""
    if threshold_single < 1.0 or threshold_acc < 1.0:
        raise NotImplementedError(
            f"specdec_kernels.sglang: thresholds: expected 1 (lossless), got {threshold_single} and {threshold_acc}"
        )
    batch, nodes = candidates.shape
    tree = _tree_of(retrive_index, retrive_next_token, retrive_next_sibling)
    total = tree.parents.shape[0]
    place = torch.arange(total, device=candidates.device)
    b = torch.searchsorted(tree.cu_nodes[1:].contiguous(), place.int(), right=True).clamp(max=max(batch - 1, 0))
    slot = (place - tree.cu_nodes[b]).clamp(0, nodes - 1)
    probs = target_probs.reshape(batch, nodes, -1)[b, slot].float()
    ids = candidates[b, slot].to(torch.int32)
    coins = uniform_samples.reshape(batch, nodes)[b, tree.parents.long().clamp(0, nodes - 1)].float()
    final = uniform_samples_for_final_sampling.reshape(-1)[:batch].float()
    found = verify_probs(probs, ids, tree, coins, final, method="target_only")
    _write(
        predicts, accept_index, accept_token_num, retrive_index, found.output_token_ids, found.accepted_nodes,
        found.num_emitted,
    )  # fmt: skip


REPLACED: dict[str, Callable[..., Any]] = {
    "build_tree_kernel_efficient_func": build_tree_for_sglang,
    "verify_tree_greedy_func": verify_greedy_for_sglang,
    "tree_speculative_sampling_target_only": sample_target_only_for_sglang,
}


def moved_hooks() -> list[str]:
    """A line for every function that SGLang's EAGLE module does not have any more, or calls with other parameters."""
    user = importlib.import_module(_USER)
    found = []
    for name, ours in REPLACED.items():
        theirs = getattr(user, name, None)
        if theirs is None:
            if name != "tree_speculative_sampling_target_only":  # None where SGLang has no kernel: on the CPU
                found.append(f"{_USER}.{name}: not there")
            continue
        own, expected = list(inspect.signature(theirs).parameters), list(inspect.signature(ours).parameters)
        if own[: len(expected)] != expected[: len(own)]:
            found.append(f"{_USER}.{name}: expected parameters {', '.join(expected)}, got {', '.join(own)}")
    return found


def register() -> bool:
    """Register REPLACE hooks for the three functions. Returns whether it did; never raises. On a mismatch SGLang stays
    as it is, and one line says what moved."""
    try:
        version = str(importlib.import_module("sglang").__version__)
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
        moved = moved_hooks()
    except Exception as error:  # SGLang goes on without us, whatever is wrong here
        logger.warning("specdec_kernels: SGLang unchanged: %r", error)
        return False
    if moved:
        logger.warning("specdec_kernels: SGLang %s unchanged, tested with %s: %s", version, ", ".join(TESTED), moved[0])
        return False
    for name, ours in REPLACED.items():
        hooks.HookRegistry.register(f"{_USER}.{name}", ours, hooks.HookType.REPLACE)
    return True
