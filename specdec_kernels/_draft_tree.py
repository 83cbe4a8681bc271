"""The tree that rooms hand to each other. Re-exported by `specdec_kernels.tree`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
