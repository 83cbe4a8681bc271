"""Triton twins of the ops: same names, same argument order, namespace `specdec_triton`, dispatch key CUDA."""

import importlib
from typing import Any

# op -> module of this package that defines `impl_<op>` with the schema's arguments
OPS: dict[str, str] = {
    "build_tree": "tree",
    "chain_tree": "tree",
    "expand_tree": "dynamic_tree",
    "rerank_tree": "dynamic_tree",
    "pack_mask": "tree_mask",
    "unpack_mask": "tree_mask",
    "tree_from_mask": "tree_mask",
    "plan_buckets": "batching",
    "pack_rows": "batching",
    "unpack_rows": "batching",
    "padding_stats": "batching",
    "draft_topk": "draft_topk",
    "draft_sample": "sampling_drafts",
    "verify": "sampling_launch",
    "sample": "sampling_sample",
    "row_stats": "sampling_blocks",
    "filter_rows": "sampling_blocks",
    "residual_log_weights": "sampling_blocks",
    "verify_probs": "sampling_probs",
    "write_kv": "kv_write",
    "slot_mapping": "kv_write",
    "commit_kv": "kv",
    "advance": "kv",
    "copy_pages": "kv",
    "truncate": "kv",
    "gather_accepted": "kv",
    "prepare_next": "kv",
    "tree_attention": "attention",
    "merge_attention": "attention_join",
}

_loaded: dict[str, Any] = {}  # keeps each Library alive: it unregisters when collected


def load(op: str) -> str:
    """Import the module that implements `op` and register it for CUDA; ImportError if there is none."""
    if op not in OPS:
        raise ImportError(f"{op}: no Triton implementation")
    if op not in _loaded:
        import torch

        module = importlib.import_module(f"specdec_kernels._triton.{OPS[op]}")
        library = torch.library.Library("specdec_triton", "IMPL", "CUDA")
        library.impl(op, getattr(module, f"impl_{op}"))
        _loaded[op] = library
    return OPS[op]
