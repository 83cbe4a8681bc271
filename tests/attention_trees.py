"""Draft trees and arbitrary masks for the attention suite: per row the slots it may see, and the depth of each slot."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from python_ref.attention import ancestors

Rng = np.random.Generator


@dataclass
class Tree:
    """visible[i]: slots row i attends; depths[i]: distance from the last committed token."""

    visible: list[list[int]]
    depths: list[int]

    def __len__(self) -> int:
        return len(self.visible)


def from_parents(parents: Sequence[int]) -> Tree:
    paths = [ancestors(parents, i) for i in range(len(parents))]
    return Tree([sorted(path) for path in paths], [len(path) - 1 for path in paths])


def chain(num_nodes: int) -> Tree:
    return from_parents(range(-1, num_nodes - 1))


def star(num_nodes: int) -> Tree:
    return from_parents([-1] + [0] * (num_nodes - 1))


def levels(*child_counts: Sequence[int]) -> Tree:
    """child_counts[d][k]: children of the k-th node of depth d (missing entries: none)."""
    parents, level = [-1], [0]
    for counts in child_counts:
        grown = []
        for node, count in zip(level, counts):
            for _ in range(count):
                grown.append(len(parents))
                parents.append(node)
        level = grown
    return from_parents(parents)


def full(branching: int, depth: int) -> Tree:
    return levels(*[[branching] * branching**d for d in range(depth)])


def eagle26() -> Tree:
    """EAGLE-1's static shape: 26 nodes, level widths 1 4 8 8 3 2."""
    return levels([4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2])


def best_first(num_nodes: int, rng: Rng | None = None, branching: int = 10) -> Tree:
    """The num_nodes best nodes by product of rank probabilities: static (Medusa-like), or random (EAGLE-2-like)."""
    parents: list[int] = []
    heap = [(0.0, 0, -1)]
    pushed = 0
    while len(parents) < num_nodes:
        cost, _, parent = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        for rank in range(branching):
            pushed += 1
            step = 0.5 + 0.7 * rank if rng is None else float(rng.exponential(1.0) + 0.2 * rank)
            heapq.heappush(heap, (cost + step, pushed, node))
    return from_parents(parents)


def random_tree(num_nodes: int, rng: Rng) -> Tree:
    return from_parents([-1] + [int(rng.integers(0, i)) for i in range(1, num_nodes)])


def permuted(tree: Tree, rng: Rng) -> Tree:
    """The same tree with its slots renamed: parents may come after children, nothing is lower-triangular."""
    name = rng.permutation(len(tree))
    visible: list[list[int]] = [[] for _ in name]
    depths = [0] * len(tree)
    for i, slots in enumerate(tree.visible):
        visible[name[i]] = sorted(int(name[j]) for j in slots)
        depths[name[i]] = tree.depths[i]
    return Tree(visible, depths)


def bernoulli(num_nodes: int, rng: Rng, diagonal: bool = True, empty_rows: bool = False) -> Tree:
    """Any slot visible with probability 1/2, later ones too; optionally rows that see no slot at all."""
    bits = rng.random((num_nodes, num_nodes)) < 0.5
    if diagonal:
        np.fill_diagonal(bits, True)
    if empty_rows:
        bits[rng.random(num_nodes) < 0.4] = False
    return Tree([np.flatnonzero(row).tolist() for row in bits], rng.integers(0, 9, num_nodes).tolist())


CHAINS = (1, 2, 4, 8, 16, 32, 33, 63, 64, 65, 128)
FULL_TREES = ((1, 1), (1, 4), (4, 1), (3, 2), (2, 3), (5, 3), (10, 2))

# Every kind of tree the suite must cover; small ones run on emulated backends too.
KINDS: dict[str, Callable[[Rng], Tree]] = {
    **{f"chain{n}": lambda rng, n=n: chain(n) for n in CHAINS},
    **{f"full{b}x{d}": lambda rng, b=b, d=d: full(b, d) for b, d in FULL_TREES},
    "star20": lambda rng: star(20),
    "star65": lambda rng: star(65),
    "eagle26": lambda rng: eagle26(),
    "medusa63": lambda rng: best_first(63),
    "medusa64": lambda rng: best_first(64),
    "dynamic60": lambda rng: best_first(60, rng),
    "random13": lambda rng: random_tree(13, rng),
    "random77": lambda rng: random_tree(77, rng),
    "permuted26": lambda rng: permuted(eagle26(), rng),
    "permuted70": lambda rng: permuted(random_tree(70, rng), rng),
    "bernoulli19": lambda rng: bernoulli(19, rng),
    "bernoulli66": lambda rng: bernoulli(66, rng),
    "holes40": lambda rng: bernoulli(40, rng, diagonal=False),
    "empty_rows17": lambda rng: bernoulli(17, rng, diagonal=False, empty_rows=True),
    "empty_rows64": lambda rng: bernoulli(64, rng, empty_rows=True),
    "nothing": lambda rng: Tree([], []),
    "all_rows_empty": lambda rng: Tree([[] for _ in range(6)], [0] * 6),
}
