"""Speculative-decoding kernels as torch ops. Rooms: tree, attention, sampling, kv, batching; engine above them."""

from specdec_kernels._handover import GatheredRows, NextStep, gather_accepted, prepare_next, truncate
from specdec_kernels._ops import SCHEMAS, Flag, supports, workspace_size
from specdec_kernels.attention import (
    AttentionOutput,
    merge_attention,
    plan_tree_attention,
    slot_mapping,
    tree_attention,
    write_kv,
)
from specdec_kernels.batching import BucketPlan, PaddingStats, pack_rows, padding_stats, plan_buckets, unpack_rows
from specdec_kernels.kv import KVHandle, advance, commit_kv, copy_pages, kv_handle
from specdec_kernels.sampling import (
    Drafted,
    Sampled,
    Sampling,
    Verified,
    draft_sample,
    draft_topk,
    sample,
    verify,
)
from specdec_kernels.tree import (
    DraftTree,
    StaticTree,
    build_tree,
    chain_tree,
    pack_mask,
    sequoia_tree,
    static_tree,
    tree_from_mask,
    unpack_mask,
)

__version__ = "0.1.0"
__all__ = [
    "SCHEMAS",
    "AttentionOutput",
    "BucketPlan",
    "DraftTree",
    "Drafted",
    "Flag",
    "GatheredRows",
    "KVHandle",
    "NextStep",
    "PaddingStats",
    "Sampled",
    "Sampling",
    "StaticTree",
    "Verified",
    "__version__",
    "advance",
    "build_tree",
    "chain_tree",
    "commit_kv",
    "copy_pages",
    "draft_sample",
    "draft_topk",
    "gather_accepted",
    "kv_handle",
    "merge_attention",
    "pack_mask",
    "pack_rows",
    "padding_stats",
    "plan_buckets",
    "plan_tree_attention",
    "prepare_next",
    "sample",
    "sequoia_tree",
    "slot_mapping",
    "static_tree",
    "supports",
    "tree_attention",
    "tree_from_mask",
    "truncate",
    "unpack_mask",
    "unpack_rows",
    "verify",
    "workspace_size",
    "write_kv",
]
