"""Trees planned on the host: Medusa paths, and Sequoia's dynamic programme against every possible tree."""

from __future__ import annotations

import itertools

import pytest
import torch

from python_ref import tree as ref
from specdec_kernels.tree import build_tree, sequoia_tree, static_tree

PATHS = [(1,), (0,), (0, 0), (0, 2), (0, 1), (1, 0), (0, 0, 0)]


def test_static_tree_orders_paths():
    tree = static_tree(PATHS)
    assert tree.paths == ((), (0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0))
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 1, 2, 3]
    assert tree.ranks.tolist() == [-1, 0, 1, 0, 1, 2, 0, 0]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 2, 3]
    assert tree.max_depth == 3
    assert (tree.parents.tolist(), tree.ranks.tolist()) == ref.static_tree(PATHS)


def test_static_tree_repeats_for_a_batch():
    parents, cu_nodes = static_tree(PATHS).repeat(3)
    tree = build_tree(parents, cu_nodes, torch.tensor([5, 0, 9], dtype=torch.int32), max_nodes=8, max_depth=3)
    assert tree.flags.tolist() == [0, 0, 0]
    assert tree.positions.tolist() == [c + d for c in (5, 0, 9) for d in static_tree(PATHS).depths.tolist()]
    # the same tree for drafts of depth 2 only (TM-04): flagged, not half built
    assert build_tree(parents, cu_nodes, tree.flags, max_nodes=8, max_depth=2).flags.tolist() == [64] * 3


def test_static_tree_refuses_what_is_no_tree():
    with pytest.raises(ValueError, match=r"^static_tree: paths: expected the prefix \(0, 1\) of every path"):
        static_tree([(0,), (0, 1, 0)])
    with pytest.raises(ValueError, match=r"^static_tree: paths: expected distinct paths without the root"):
        static_tree([(0,), (0,)])
    with pytest.raises(ValueError, match=r"^static_tree: paths: expected distinct paths without the root"):
        static_tree([(), (0,)])
    with pytest.raises(ValueError, match=r"^static_tree: paths: expected ranks of at least 0"):
        static_tree([(-1,)])


RATES = [[0.7, 0.15, 0.05], [0.4, 0.35, 0.2], [0.3, 0.5, 0.1], [0.9, 0.0, 0.05], [1.0]]


@pytest.mark.parametrize("rates", RATES, ids=str)
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (2, 1), (4, 2), (6, 3), (7, 2), (7, 6), (8, 4)])
def test_sequoia_tree_is_the_best_of_all(rates: list[float], nodes: int, depth: int):
    tree, length = sequoia_tree(rates, nodes, depth)
    assert len(tree.paths) <= nodes
    assert tree.max_depth <= depth
    own = ref.expected_emitted(tree.parents.tolist(), tree.ranks.tolist(), rates)
    assert own == pytest.approx(length, rel=1e-12)
    every = [
        ref.expected_emitted(*ref.static_tree(paths), rates)
        for count in range(1, nodes + 1)
        for paths in ref.all_rank_trees(count, depth, len(rates))
    ]
    assert length == pytest.approx(max(every), rel=1e-12)


def test_sequoia_tree_against_a_beaten_rival():
    """Negative control: the search space of the test holds trees that are worse, so `max` is not vacuous."""
    values = [ref.expected_emitted(*ref.static_tree(p), RATES[0]) for p in ref.all_rank_trees(6, 3, 3)]
    assert min(values) < max(values) - 0.3
    assert len(values) == len({tuple(map(tuple, p)) for p in ref.all_rank_trees(6, 3, 3)})


def test_sequoia_tree_grows_with_its_budget():
    lengths = [sequoia_tree([0.6, 0.2, 0.1, 0.03], n, 6)[1] for n in (1, 2, 8, 26, 64)]
    assert lengths[0] == 1.0
    assert all(a < b for a, b in itertools.pairwise(lengths))
    assert sequoia_tree([0.6], 64, 3)[0].parents.tolist() == [-1, 0, 1, 2]  # depth and ranks allow no more


def test_sequoia_tree_refuses_bad_input():
    with pytest.raises(ValueError, match=r"^sequoia_tree: acceptance_by_rank: expected probabilities"):
        sequoia_tree([1.5], 4, 2)
    with pytest.raises(ValueError, match=r"^sequoia_tree: num_nodes: expected a value in \[1, 1024\], got 0"):
        sequoia_tree([0.5], 0, 2)
