"""SGLang's KV cache: compaction of accepted paths by `commit_kv`, and an eviction policy that knows soft nodes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.kv import KVHandle, commit_kv, kv_handle

SOFT_PRIORITY = -1
SOFT_FIRST = "specdec_soft_first"
_KEPT = "_specdec_kernels_handle"  # on the pool: (its first buffer, our handle)


def compact_kv_for_sglang(
    theirs: Callable[..., None],
    batch: Any,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
    token_to_kv_pool_allocator: Any,
) -> None:
    """`move_accept_tokens_to_target_kvcache`, registered around SGLang's own (`theirs`): one launch for all layers.

    batch.out_cache_loc: [B N], the cache slots of each request's N nodes; accept_index: [B, depth + 1], accepted nodes
    by their place in the batch, -1 behind; num_correct_drafts: [B]. A slot is a page of one row:

        slots of request b    40 41 42 43 97 98      accepted nodes 0, 2, 5
        moves                 42 -> 41, 98 -> 42     as if at once, nothing where the path is dense

    Pools with another layout than a plain [slots, heads, dim] tensor a layer (MLA, HND, fp4 scales, hybrids) go to
    `theirs`.
    """
    pool = token_to_kv_pool_allocator.get_kvcache()
    handle = _handle_of(pool)
    if handle is None:
        theirs(batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator)
        return
    requests = accept_index.shape[0]
    window = batch.out_cache_loc.view(requests, -1).int()
    first = torch.arange(requests + 1, dtype=torch.int32, device=window.device) * window.shape[1]
    nodes = torch.where(accept_index >= 0, accept_index - first[:-1, None], -1)
    commit_kv(
        handle, None, window, torch.zeros_like(first[:-1]), first, nodes.int(), (num_correct_drafts + 1).int()
    )  # fmt: skip


def _handle_of(pool: Any) -> KVHandle | None:
    """The pool's buffers as ours, checked once; None for a pool that is not a plain one."""
    plain = type(pool).__name__ == "MHATokenToKVPool" and getattr(pool, "kv_cache_layout", "nhd") == "nhd"
    if not plain or getattr(pool, "k_scale_buffer", None) is not None or not pool.layer_num:
        return None
    kept = getattr(pool, _KEPT, None)
    if kept is None or kept[0] is not pool.k_buffer[0]:
        keys, values = ([buffer.unsqueeze(1) for buffer in part] for part in (pool.k_buffer, pool.v_buffer))
        kept = (pool.k_buffer[0], kv_handle(keys, values))
        setattr(pool, _KEPT, kept)
    return kept[1]


class SoftFirst:
    """Eviction in two rounds: soft nodes, then the others, the longest unused first in each.

    A node is soft if its priority is below 0: drafts that were rejected, inserted with `InsertParams(priority=
    SOFT_PRIORITY)` by a worker that keeps them. SGLang raises a node's priority to that of every text inserted through
    it, so a soft node that turns out to be a text's own becomes an ordinary one by itself.
    """

    def get_priority(self, node: Any) -> tuple[int, float]:
        return (0 if node.priority < 0 else 1, node.last_access_time)


def register_eviction_policy() -> None:
    """Make `--radix-eviction-policy specdec_soft_first` known to SGLang."""
    utils: Any = importlib.import_module("sglang.srt.mem_cache.utils")
    choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
    if SOFT_FIRST not in utils._EVICTION_POLICY_FACTORIES:
        utils._EVICTION_POLICY_FACTORIES[SOFT_FIRST] = SoftFirst
        choices.add_radix_eviction_policy_choices([SOFT_FIRST])
