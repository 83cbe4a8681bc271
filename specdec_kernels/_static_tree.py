"""Trees planned on the host: Medusa's rank paths and Sequoia's dynamic programme."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._draft_tree import MAX_NODES


class StaticTree(NamedTuple):
    """A tree shape shared by requests. Nodes are ordered by depth, then by path, so parents precede children.

    parents, ranks, depths: int32 [N]; node i takes the draft of rank ranks[i] (0: the likeliest) among its parent's
    candidates; the root has parent and rank -1. paths: the rank path of each node, the root's is ().
    """

    parents: Tensor
    ranks: Tensor
    depths: Tensor
    paths: tuple[tuple[int, ...], ...]

    @property
    def max_depth(self) -> int:
        return max(map(len, self.paths))

    def repeat(self, num_requests: int) -> tuple[Tensor, Tensor]:
        """(parents [B N], cu_nodes [B + 1]) of `num_requests` copies, ready for `build_tree`."""
        nodes = len(self.paths)
        cu_nodes = torch.arange(num_requests + 1, dtype=torch.int32, device=self.parents.device) * nodes
        return self.parents.repeat(num_requests), cu_nodes


def static_tree(paths: Iterable[Sequence[int]], *, device: torch.device | str = "cpu") -> StaticTree:
    """Compile Medusa-style rank paths, such as [(0,), (1,), (0, 0)], into a tree (the root is added).

    Every path's prefix must be among the paths, and no path may occur twice, else ValueError. Runs on the host.
    """
    listed = [tuple(int(rank) for rank in path) for path in paths]
    known = {(), *listed}
    _ops.expect("static_tree", "paths", len(known) == len(listed) + 1, "distinct paths without the root ()", listed)
    for path in listed:
        _ops.expect("static_tree", "paths", min(path) >= 0, "ranks of at least 0", path)
        _ops.expect("static_tree", "paths", path[:-1] in known, f"the prefix {path[:-1]} of every path", path)
    ordered = [(), *sorted(listed, key=lambda path: (len(path), path))]
    index = {path: i for i, path in enumerate(ordered)}

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StaticTree(
        column([index[path[:-1]] if path else -1 for path in ordered]),
        column([path[-1] if path else -1 for path in ordered]),
        column([len(path) for path in ordered]),
        tuple(ordered),
    )


def sequoia_tree(
    acceptance_by_rank: Sequence[float], num_nodes: int, max_depth: int, *, device: torch.device | str = "cpu"
) -> tuple[StaticTree, float]:
    """The static tree with the longest expected accepted length, and that length (bonus token included).

    acceptance_by_rank[k]: probability that the walk, standing at a node, accepts its child of rank k (earlier ones
    rejected included); taken to be the same at every node, as in Sequoia (Chen et al. 2024). num_nodes counts the
    root. Children of a node are ranks 0, 1, ... without holes. Dynamic programming over (nodes, depth, rank) on the
    host, O(num_nodes^2 * max_depth * ranks). Fewer nodes are returned if the depth and the ranks allow no more.
    """
    op = "sequoia_tree"
    rates = [float(rate) for rate in acceptance_by_rank]
    _ops.expect(op, "acceptance_by_rank", all(0 <= r <= 1 for r in rates), "probabilities", rates)
    _ops.expect_int(op, "num_nodes", num_nodes, 1, f"a value in [1, {MAX_NODES}]", MAX_NODES)
    _ops.expect_int(op, "max_depth", max_depth, 0, "a value of at least 0")

    # subtree(n, d): best sum of path products in a tree of at most n nodes and depth d, and its children's sizes.
    # forest(n, d, k): the same for the children of rank >= k of one node, n nodes among them.
    @functools.cache
    def subtree(nodes: int, depth: int) -> float:
        return 1.0 + (forest(nodes - 1, depth - 1, 0)[0] if depth > 0 else 0.0)

    @functools.cache
    def forest(nodes: int, depth: int, rank: int) -> tuple[float, int]:
        if rank == len(rates):
            return 0.0, 0
        best = (0.0, 0)
        for size in range(1, nodes + 1):
            value = rates[rank] * subtree(size, depth) + forest(nodes - size, depth, rank + 1)[0]
            if value > best[0]:
                best = (value, size)
        return best

    def place(path: tuple[int, ...], nodes: int, depth: int) -> None:
        left = nodes - 1
        for rank in range(len(rates)):
            size = forest(left, depth - 1, rank)[1] if depth > 0 else 0
            if size == 0:
                return
            paths.append((*path, rank))
            place((*path, rank), size, depth - 1)
            left -= size

    for nodes in range(1, num_nodes):  # fill small tables first: the recursion then never gets deep
        for depth in range(min(nodes, max_depth)):
            for rank in reversed(range(len(rates))):
                forest(nodes, depth, rank)
    paths: list[tuple[int, ...]] = []
    place((), num_nodes, max_depth)
    return static_tree(paths, device=device), subtree(num_nodes, max_depth)
