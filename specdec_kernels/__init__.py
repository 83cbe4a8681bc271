"""Speculative-decoding kernels as torch ops. Rooms: tree, attention, sampling, kv, batching; engine above them."""

from specdec_kernels._ops import SCHEMAS, Flag, supports, workspace_size
from specdec_kernels.attention import (
    AttentionOutput,
    merge_attention,
    plan_tree_attention,
    slot_mapping,
    tree_attention,
    write_kv,
)

__version__ = "0.1.0"
__all__ = [
    "SCHEMAS",
    "AttentionOutput",
    "Flag",
    "__version__",
    "merge_attention",
    "plan_tree_attention",
    "slot_mapping",
    "supports",
    "tree_attention",
    "workspace_size",
    "write_kv",
]
