"""TensorRT-LLM's tree buffers in, its acceptance buffers out: our `verify` between its forward pass and its KV update.

The layouts follow a reading of its dynamic-tree ops and attention metadata (November 2026); nothing of it runs here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.sampling import Sampling, Verified, verify
from specdec_kernels.tree import DraftTree, TensorRTTree, from_layout


class TensorRTAccepted(NamedTuple):
    """What its verification ops write, S = num_spec_step columns, 0 behind the last.

    accept_index: int64 [B, S], accepted nodes, local, the root first; accept_token_num: int64 [B], accepted drafts;
    accept_token: int64 [B, S], the emitted tokens: accepted drafts, then the recovered or bonus token.
    """

    accept_index: Tensor
    accept_token_num: Tensor
    accept_token: Tensor


def _tree_of(next_token: Tensor, next_sibling: Tensor, tree_valid: Tensor, depth: int) -> DraftTree:
    """Its links as our tree. A request without a valid tree gets one whose nodes all hang on the root."""
    batch, nodes = next_token.shape
    slots = torch.arange(nodes, dtype=next_token.dtype, device=next_token.device)
    child = torch.where(slots == 0, 1 if nodes > 1 else -1, -1)
    sibling = torch.where((slots > 0) & (slots < nodes - 1), slots + 1, -1)
    links = (
        torch.where(tree_valid[:, None], own, star) for own, star in ((next_token, child), (next_sibling, sibling))
    )
    none = torch.zeros(batch, dtype=torch.int32, device=next_token.device)
    layout = TensorRTTree(none, none, torch.full_like(none, nodes), none, *(link.int() for link in links))
    return from_layout(layout, context_lens=none, max_depth=depth)  # positions do not matter to verification


def verify_for_trtllm(
    draft_tokens: Tensor,
    target_logits: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    tree_valid: Tensor,
    num_spec_step: int,
    sampling: Sampling,
    *,
    method: str = "target_only",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
) -> tuple[TensorRTAccepted, Verified]:
    """In place of `trtllm::verify_dynamic_tree_rejection_out_op` and of the softmax and filters before it.

    draft_tokens: int64 [B, N - 1], the root left out; target_logits: [B * N, V], as the model leaves them, a row a
    node; retrieve_next_token, retrieve_next_sibling: integers [B, N], links, -1 for none; tree_valid: bool [B], false
    for requests whose first step or dummy row has no tree: they get the root's token alone. num_spec_step: depth of the
    deepest node + 1. sampling: a row a request. method, draft_logits, draft_rows: as in `verify` ("rejection" takes the
    law that siblings were drawn from; "target_only" is TensorRT-LLM's own rule, without its `coin <= mass`).

    Returns the buffers, and `verify`'s own result (its flags, and what `commit_kv` takes). Links that are no tree
    reduce their request to its root and flag it; nobody else's rows change.
    """
    op = "verify_for_trtllm"
    batch, nodes = retrieve_next_token.shape
    if draft_tokens.shape != (batch, nodes - 1):
        raise ValueError(f"{op}: draft_tokens: expected shape {[batch, nodes - 1]}, got {list(draft_tokens.shape)}")
    if target_logits.dim() != 2 or target_logits.shape[0] != batch * nodes:
        got = list(target_logits.shape)
        raise ValueError(f"{op}: target_logits: expected {batch * nodes} rows, one a node, got shape {got}")
    if num_spec_step < 1:
        raise ValueError(f"{op}: num_spec_step: expected a depth + 1, at least 1, got {num_spec_step}")
    tree = _tree_of(retrieve_next_token, retrieve_next_sibling, tree_valid, num_spec_step - 1)
    ids = torch.full((batch, nodes), -1, dtype=torch.int32, device=target_logits.device)  # -1: never drafted
    ids[:, 1:] = torch.where(tree_valid[:, None], draft_tokens, -1)
    found = verify(
        target_logits, ids.flatten(), tree, sampling, method=method, draft_logits=draft_logits, draft_rows=draft_rows
    )
    taken = torch.arange(num_spec_step, device=ids.device) < found.num_emitted[:, None]
    index, token = (torch.where(taken, values, 0).long() for values in (found.accepted_nodes, found.output_token_ids))
    return TensorRTAccepted(index, found.num_emitted.long() - 1, token), found
