"""Draft trees in plain Python: lists in, lists out, one obvious loop each."""

from __future__ import annotations

import itertools
from typing import NamedTuple

MAX_NODES = 1024
FLAG_TREE, FLAG_INDEX = 64, 512
INT32_MAX = 2**31 - 1


class Tree(NamedTuple):
    """Derived arrays of a packed batch; `mask[row]` is the set of nodes the row may attend."""

    parents: list[int]
    mask: list[set[int]]
    depths: list[int]
    positions: list[int]
    first_child: list[int]
    next_sibling: list[int]
    flags: list[int]


def _inert(rows: int) -> Tree:
    return Tree([-1] * rows, [set() for _ in range(rows)], [0] * rows, [0] * rows, [-1] * rows, [-1] * rows, [])


def ancestors(parents: list[int], node: int) -> list[int]:
    """The path from `node` up to the root, both included."""
    path = [node]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    return path


def well_formed(parents: list[int], max_nodes: int, max_depth: int) -> bool:
    """Root first, every parent before its children, nothing too large or too deep."""
    if len(parents) > max_nodes:
        return False
    for node, parent in enumerate(parents):
        if (node == 0 and parent != -1) or (node > 0 and not 0 <= parent < node):
            return False
    return all(len(ancestors(parents, node)) - 1 <= max_depth for node in range(len(parents)))


def build_tree(
    parents: list[int], cu_nodes: list[int], context_lens: list[int], max_nodes: int, max_depth: int
) -> Tree:
    """All derived arrays of a packed batch; a malformed request keeps its root only."""
    rows = len(parents)
    out = _inert(rows)
    for b, context in enumerate(context_lens):
        begin, end = cu_nodes[b], cu_nodes[b + 1]
        if not 0 <= begin <= end <= rows:
            out.flags.append(FLAG_INDEX)
            continue
        own = parents[begin:end]
        bad_context = not 0 <= context <= INT32_MAX - len(own)  # the depth is not looked at then
        flags = 0 if well_formed(own, max_nodes, MAX_NODES if bad_context else max_depth) else FLAG_TREE
        flags |= FLAG_INDEX if bad_context else 0
        out.flags.append(flags)
        if flags:
            own = own[:1] and [-1]
            context = max(context, 0)
        for node, parent in enumerate(own):
            row = begin + node
            path = ancestors(own, node)
            out.parents[row] = parent
            out.mask[row] = set(path) if max_nodes else set()
            out.depths[row] = len(path) - 1
            out.positions[row] = context + len(path) - 1
            children = [child for child, p in enumerate(own) if p == node]
            out.first_child[row] = children[0] if children else -1
            for child, following in itertools.pairwise(children):
                out.next_sibling[begin + child] = following
    return out


def chain_tree(
    num_drafts: list[int], context_lens: list[int], total_nodes: int, max_nodes: int
) -> tuple[Tree, list[int]]:
    """Chains of num_drafts + 1 nodes (-1: no node), and their cu_nodes."""
    parents: list[int] = []
    cu_nodes, flags = [0], []
    for drafts, context in zip(num_drafts, context_lens):
        count = drafts + 1
        left = total_nodes - len(parents)
        flag = FLAG_TREE if count < 0 or count > max_nodes else 0
        if drafts != -1 and (count > left or not 0 <= context <= INT32_MAX - max_nodes):
            flag |= FLAG_INDEX
        if flag:
            count = 1 if left > 0 and drafts > -1 else 0
        parents += list(range(-1, count - 1))
        cu_nodes.append(len(parents))
        flags.append(flag)
    parents += [-1] * (total_nodes - len(parents))
    lens = [max(0, length) for length in context_lens]
    tree = build_tree(parents, cu_nodes, lens, MAX_NODES, MAX_NODES)
    if max_nodes == 0:
        tree = tree._replace(mask=[set() for _ in tree.mask])
    return tree._replace(flags=flags), cu_nodes


def pack_words(columns: set[int], words: int) -> list[int]:
    """The set bits of a row as `words` signed 32-bit words, least significant bit first."""
    out = []
    for w in range(words):
        word = sum(1 << (j - 32 * w) for j in columns if 32 * w <= j < 32 * w + 32)
        out.append(word - 2**32 if word >= 2**31 else word)
    return out


def unpack_words(words: list[int], columns: int) -> set[int]:
    """Set bits below `columns` of a packed row."""
    return {j for j in range(columns) if (words[j // 32] >> (j % 32)) & 1}


def tree_from_mask(mask: list[set[int]], cu_nodes: list[int], max_nodes: int) -> list[int]:
    """Parents from ancestor sets; -1 for the root and for a row that is not its parent's set plus itself."""
    out = [-1] * len(mask)
    for begin, end in itertools.pairwise(cu_nodes):
        if not 0 <= begin <= end <= len(mask) or end - begin > max_nodes:
            continue
        rows = [{j for j in row if j < end - begin} for row in mask[begin:end]]
        for node, row in enumerate(rows):
            earlier = [j for j in row if j < node]
            if earlier and row == rows[max(earlier)] | {node}:
                out[begin + node] = max(earlier)
    return out


def static_tree(paths: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Medusa-style rank paths as (parents, ranks), root first, by depth and then by rank."""
    ordered: list[tuple[int, ...]] = [(), *sorted(paths, key=lambda path: (len(path), path))]
    index = {path: i for i, path in enumerate(ordered)}
    return [index[p[:-1]] if p else -1 for p in ordered], [p[-1] if p else -1 for p in ordered]


def expected_emitted(parents: list[int], ranks: list[int], acceptance_by_rank: list[float]) -> float:
    """Expected tokens of a step: 1 for the root's own sample, plus each node's chance to be accepted."""
    reach = [1.0]
    for node in range(1, len(parents)):
        reach.append(reach[parents[node]] * acceptance_by_rank[ranks[node]])
    return sum(reach)


def all_rank_trees(num_nodes: int, max_depth: int, max_children: int) -> list[list[tuple[int, ...]]]:
    """Every set of rank paths with `num_nodes` nodes (root included), prefix-closed in depth and in rank."""
    found: set[frozenset[tuple[int, ...]]] = {frozenset([()])}
    for _ in range(num_nodes - 1):
        grown = set()
        for tree in found:
            for path in tree:
                rank = sum(1 for other in tree if len(other) == len(path) + 1 and other[: len(path)] == path)
                if rank < max_children and len(path) < max_depth:
                    grown.add(tree | {(*path, rank)})
        found = grown
    return [sorted(tree - {()}) for tree in found]
