"""Draft trees: parents in, every derived array out. See docs/tree.md.

A request's tree has its root at node 0 (the last committed token, whose KV is not yet in the cache); all indices are
local to the request, -1 means none, parents precede their children, and children keep their order of creation, which
is the order in which siblings are tried.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._dynamic_tree import (
    Candidates,
    ExpandedLevel,
    RerankedTree,
    collect_candidates,
    expand_tree,
    rerank_tree,
)
from specdec_kernels._static_tree import StaticTree, sequoia_tree, static_tree

__all__ = [
    "MAX_NODES",
    "Candidates",
    "DraftTree",
    "ExpandedLevel",
    "RerankedTree",
    "StaticTree",
    "build_tree",
    "chain_tree",
    "collect_candidates",
    "expand_tree",
    "pack_mask",
    "rerank_tree",
    "sequoia_tree",
    "static_tree",
    "tree_from_mask",
    "unpack_mask",
]

MAX_NODES = 1024  # nodes of one request, root included


class DraftTree(NamedTuple):
    """A ragged batch of draft trees, all int32 on one device.

    parents, depths, positions, first_child, next_sibling: [N]; tree_mask: [N, ceil(max_nodes / 32)], bit j of row i
    set iff node i may attend node j of its own request; cu_nodes: [B + 1] offsets; flags: [B] bits of `Flag` (a
    flagged request keeps its root only); max_nodes, max_depth: host bounds of one request.
    """

    parents: Tensor
    cu_nodes: Tensor
    tree_mask: Tensor
    depths: Tensor
    positions: Tensor
    first_child: Tensor
    next_sibling: Tensor
    flags: Tensor
    max_nodes: int
    max_depth: int


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
    _ops.expect(op, "max_nodes", 0 <= max_nodes <= MAX_NODES, f"a value in [0, {MAX_NODES}]", max_nodes)
    if max_depth is None:
        return max(0, max_nodes - 1)
    _ops.expect(op, "max_depth", 0 <= max_depth <= MAX_NODES, f"a value in [0, {MAX_NODES}]", max_depth)
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
    _ops.expect(op, "total_nodes", total_nodes >= 0, "a value of at least 0", total_nodes)
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
    _ops.expect("unpack_mask", "num_columns", 0 <= num_columns <= limit, f"a value in [0, {limit}]", num_columns)
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
