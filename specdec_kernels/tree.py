"""Draft trees: parents in, every derived array out. See docs/tree.md.

A request's tree has its root at node 0 (the last committed token, whose KV is not yet in the cache); all indices are
local to the request, -1 means none, parents precede their children, and children keep their order of creation, which
is the order in which siblings are tried.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels import _tree_layouts as _layouts
from specdec_kernels._draft_tree import MAX_NODES, DraftTree
from specdec_kernels._dynamic_tree import (
    Candidates,
    ExpandedLevel,
    RerankedTree,
    collect_candidates,
    expand_tree,
    rerank_tree,
)
from specdec_kernels._static_tree import StaticTree, sequoia_tree, static_tree
from specdec_kernels._tree_layouts import FlashInferMask, MedusaTree, SGLangTree, TensorRTTree

__all__ = [
    "MAX_NODES",
    "Candidates",
    "DraftTree",
    "ExpandedLevel",
    "FlashInferMask",
    "MedusaTree",
    "RerankedTree",
    "SGLangTree",
    "StaticTree",
    "TensorRTTree",
    "build_tree",
    "chain_tree",
    "check_d2t",
    "collect_candidates",
    "expand_tree",
    "from_layout",
    "pack_mask",
    "rerank_tree",
    "sequoia_tree",
    "static_tree",
    "to_layout",
    "tree_from_mask",
    "unpack_mask",
]


def _allocate(nodes: int, requests: int, max_nodes: int, device: torch.device) -> list[Tensor]:
    """Uninitialised parents, tree_mask, depths, positions, first_child, next_sibling, flags."""
    shapes: list[tuple[int, ...]] = [(nodes,), (nodes, (max_nodes + 31) // 32), *[(nodes,)] * 4, (requests,)]
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


def _assemble(out: list[Tensor], cu_nodes: Tensor, max_nodes: int, max_depth: int) -> DraftTree:
    parents, tree_mask, depths, positions, first_child, next_sibling, flags = out
    return DraftTree(
        parents, cu_nodes, tree_mask, depths, positions, first_child, next_sibling, flags, max_nodes, max_depth
    )


def _bounds(op: str, max_nodes: int, max_depth: int | None) -> int:
    _ops.expect_int(op, "max_nodes", max_nodes, 0, f"a value in [0, {MAX_NODES}]", MAX_NODES)
    if max_depth is None:
        return max(0, max_nodes - 1)
    _ops.expect_int(op, "max_depth", max_depth, 0, f"a value in [0, {MAX_NODES}]", MAX_NODES)
    return max_depth


def _raise_if_flagged(op: str, flags: Tensor) -> None:
    """SPECDEC_CHECK=1: name the malformed requests instead of only flagging them."""
    if _ops.checking() and flags.device.type != "meta":
        bad = torch.nonzero(flags).flatten().tolist()
        if bad:
            faults = ", ".join(f"request {b}: {_ops.Flag(int(flags[b]))!r}" for b in bad[:8])
            raise ValueError(f"{op}: parents: expected well-formed trees, got {faults}")


def build_tree(
    parents: Tensor,
    cu_nodes: Tensor,
    context_lens: Tensor,
    *,
    max_nodes: int,
    max_depth: int | None = None,
    backend: str | None = None,
) -> DraftTree:
    """Derive mask, depths, positions and child links of a ragged batch of trees in one launch, O(N W).

    parents: int32 [N], local parent of each node, the root's is -1. cu_nodes: int32 [B + 1], offsets of the requests.
    context_lens: int32 [B], committed KV rows; positions = context_lens + depth. max_nodes, max_depth: host upper
    bounds of one request, root included (max_nodes <= 1024; max_depth defaults to max_nodes - 1).

    A request with a missing or later parent (so also a cycle), an index out of range, more than max_nodes nodes or a
    node deeper than max_depth is flagged (`Flag.TREE`; `Flag.INDEX` for bad offsets or context lengths) and reduced to
    its root: its other rows have ids -1 and values 0, like all rows behind cu_nodes[B]. With SPECDEC_CHECK=1 that is
    a ValueError instead. Requests without nodes and B = 0 are legal.
    """
    op = "build_tree"
    _ops.expect_tensor(op, "parents", parents, torch.int32, 1)
    _ops.expect_tensor(op, "cu_nodes", cu_nodes, torch.int32, 1)
    _ops.expect_tensor(op, "context_lens", context_lens, torch.int32, 1)
    max_depth = _bounds(op, max_nodes, max_depth)
    out = _allocate(parents.shape[0], context_lens.shape[0], max_nodes, parents.device)
    _ops.call(op, backend, parents.device, parents, cu_nodes, context_lens, max_nodes, max_depth, *out)
    _raise_if_flagged(op, out[6])
    return _assemble(out, cu_nodes, max_nodes, max_depth)


def chain_tree(
    num_drafts: Tensor,
    context_lens: Tensor,
    *,
    total_nodes: int,
    max_nodes: int,
    backend: str | None = None,
) -> DraftTree:
    """Trees that are chains: request b has num_drafts[b] + 1 nodes, node i hanging on i - 1.

    num_drafts: int32 [B], 0: the root alone, -1: no node at all. context_lens: int32 [B]. total_nodes: host upper
    bound N of all nodes; max_nodes: of one request. A request that exceeds either is flagged and reduced to its root
    (`Flag.TREE`, `Flag.INDEX`); rows behind the last request have ids -1 and values 0.
    """
    op = "chain_tree"
    _ops.expect_tensor(op, "num_drafts", num_drafts, torch.int32, 1)
    _ops.expect_tensor(op, "context_lens", context_lens, torch.int32, 1)
    _ops.expect_int(op, "total_nodes", total_nodes, 0, "a value of at least 0")
    max_depth = _bounds(op, max_nodes, None)
    requests = num_drafts.shape[0]
    out = _allocate(total_nodes, requests, max_nodes, num_drafts.device)
    cu_nodes = torch.empty(requests + 1, dtype=torch.int32, device=num_drafts.device)
    _ops.call(op, backend, num_drafts.device, num_drafts, context_lens, max_nodes, out[0], cu_nodes, *out[1:])
    _raise_if_flagged(op, out[6])
    return _assemble(out, cu_nodes, max_nodes, max_depth)


def pack_mask(mask: Tensor, *, backend: str | None = None) -> Tensor:
    """Pack a boolean mask [N, T] into int32 words [N, ceil(T / 32)], least significant bit first; unused bits are 0.

    The layout of XQA and TensorRT-LLM packed masks. Rows may be strided, the last dimension is dense.
    """
    _ops.expect_tensor("pack_mask", "mask", mask, torch.bool, 2)
    words = torch.empty(mask.shape[0], (mask.shape[1] + 31) // 32, dtype=torch.int32, device=mask.device)
    _ops.call("pack_mask", backend, mask.device, mask, words)
    return words


def unpack_mask(words: Tensor, num_columns: int, *, backend: str | None = None) -> Tensor:
    """Unpack int32 words [N, W] into a boolean mask [N, num_columns], num_columns <= 32 W."""
    _ops.expect_tensor("unpack_mask", "words", words, torch.int32, 2)
    limit = 32 * words.shape[1]
    _ops.expect_int("unpack_mask", "num_columns", num_columns, 0, f"a value in [0, {limit}]", limit)
    mask = torch.empty(words.shape[0], num_columns, dtype=torch.bool, device=words.device)
    _ops.call("unpack_mask", backend, words.device, words, mask)
    return mask


def tree_from_mask(tree_mask: Tensor, cu_nodes: Tensor, *, max_nodes: int, backend: str | None = None) -> Tensor:
    """Parents int32 [N] of the trees that a packed ancestor mask describes: `build_tree`'s inverse.

    tree_mask: int32 [N, W] as in `DraftTree`; cu_nodes: int32 [B + 1]. A node's parent is its latest ancestor. A row
    that is not its parent's row plus its own bit gets -1, and so does a request of more than max_nodes nodes: hand the
    result to `build_tree`, which flags both. Bits at or above the request's node count are ignored.
    """
    op = "tree_from_mask"
    _ops.expect_tensor(op, "tree_mask", tree_mask, torch.int32, 2)
    _ops.expect_tensor(op, "cu_nodes", cu_nodes, torch.int32, 1)
    _bounds(op, max_nodes, None)
    parents = torch.empty(tree_mask.shape[0], dtype=torch.int32, device=tree_mask.device)
    _ops.call(op, backend, tree_mask.device, tree_mask, cu_nodes, max_nodes, parents)
    return parents


Layout: TypeAlias = "SGLangTree | TensorRTTree | MedusaTree | FlashInferMask"


def to_layout(
    tree: DraftTree,
    layout: str,
    *,
    mask_mode: str = "QLEN_ONLY",
    total_context: int | None = None,
    total_bytes: int | None = None,
) -> Layout:
    """The tree in another engine's buffers, rectangular over N = tree.max_nodes, without reading a value on the host.

    layout: "sglang" -> SGLangTree (mask_mode "FULL_MASK", "QLEN_ONLY" or "QLEN_ONLY_BITPACKING"; FULL_MASK needs
    total_context, the sum of the context lengths or a bound); "trtllm" -> TensorRTTree; "medusa" -> MedusaTree;
    "flashinfer" -> FlashInferMask (needs total_bytes, a bound on sum ceil(N_b (L_b + N_b) / 8)). What lies behind the
    last request is zero. Nodes that a smaller tree lacks see nothing (in FULL_MASK: the context) and are not linked.
    """
    if layout == "sglang":
        return _layouts.to_sglang(tree, mask_mode, total_context)
    if layout == "trtllm":
        return _layouts.to_tensorrt(tree)
    if layout == "medusa":
        return _layouts.to_medusa(tree)
    _ops.expect("to_layout", "layout", layout == "flashinfer", "sglang, trtllm, medusa or flashinfer", repr(layout))
    return _layouts.to_flashinfer(tree, total_bytes)


def from_layout(
    source: Layout,
    *,
    context_lens: Tensor | None = None,
    max_nodes: int | None = None,
    max_depth: int | None = None,
    backend: str | None = None,
) -> DraftTree:
    """A tree out of another engine's buffers; malformed ones are flagged as by `build_tree`.

    source: one of the tuples that `to_layout` returns. SGLangTree: links, or (retrive_next_token = None) the mask in
    any mode; context_lens defaults to the roots' positions. TensorRTTree and MedusaTree: links or paths;
    FlashInferMask: the mask, for which max_nodes is needed. context_lens: int32 [B], required but for SGLang.
    """
    op = "from_layout"
    if not isinstance(source, (SGLangTree, TensorRTTree, MedusaTree, FlashInferMask)):
        raise TypeError(f"{op}: source: expected what to_layout returns, got {type(source).__name__}")
    if isinstance(source, SGLangTree) and context_lens is None:
        context_lens = source.positions.view(source.retrive_index.shape)[:, :1].sum(1).int()
    if context_lens is None:
        raise TypeError(f"{op}: context_lens: expected int32 [B], got None")
    parents, cu_nodes, nodes = _layouts.parents_of(source, context_lens, max_nodes, backend)
    return build_tree(parents, cu_nodes, context_lens, max_nodes=nodes, max_depth=max_depth, backend=backend)


def check_d2t(
    d2t: Tensor | None, *, draft_vocab_size: int, target_vocab_size: int, kind: str
) -> tuple[Tensor | None, Tensor | None]:
    """Check a reduced draft vocabulary's map once, on the host; returns (d2t, t2d) as the sampling ops take them.

    d2t: integers [draft_vocab_size]. kind has no default, the reading is never guessed: "offset": target id = draft
    id + d2t[draft id], as EAGLE-3 checkpoints hold it; "absolute": the target id itself. d2t None means identity, which
    is refused unless both vocabularies have one size (then (None, None) is returned). Result: int32 offsets
    [draft_vocab_size] and int32 [target_vocab_size], the draft id of each target id or -1. ValueError for a wrong
    length, a target outside 0..target_vocab_size - 1, or two draft ids with one target.
    """
    op = "check_d2t"
    _ops.expect(op, "kind", kind in ("offset", "absolute"), "'offset' or 'absolute'", repr(kind))
    if d2t is None:
        same = draft_vocab_size == target_vocab_size
        _ops.expect(op, "d2t", same, f"a map from {draft_vocab_size} to {target_vocab_size} ids", None)
        return None, None
    integer = not (d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool)
    shaped = integer and list(d2t.shape) == [draft_vocab_size]
    _ops.expect(op, "d2t", shaped, f"integers [{draft_vocab_size}]", f"{d2t.dtype} {list(d2t.shape)}")
    ids = torch.arange(draft_vocab_size, device=d2t.device)
    targets = d2t.long() + ids if kind == "offset" else d2t.long()
    outside = torch.nonzero((targets < 0) | (targets >= target_vocab_size)).flatten().tolist()
    if outside:
        got = f"{int(targets[outside[0]])} for draft id {outside[0]}"
        raise ValueError(f"{op}: d2t: expected targets in 0..{target_vocab_size - 1}, got {got}")
    t2d = torch.full((target_vocab_size,), -1, dtype=torch.int32, device=d2t.device)
    t2d[targets] = ids.int()
    twice = torch.nonzero(t2d[targets] != ids).flatten().tolist()
    if twice:
        other = int(t2d[targets[twice[0]]])
        raise ValueError(f"{op}: d2t: expected distinct targets, got one for draft ids {twice[0]} and {other}")
    return (targets - ids).int(), t2d
