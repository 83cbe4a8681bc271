"""Other engines' tree buffers, written out by plain loops from `parents`."""

from __future__ import annotations

from typing import Any

import numpy as np

from python_ref.tree import ancestors


def sees(parents: list[int], row: int, column: int) -> bool:
    """Whether node `row` may attend node `column`."""
    return column in ancestors(parents, row)


def links(parents: list[int], nodes: int) -> tuple[list[int], list[int]]:
    """First child and next sibling of each of `nodes` rows, -1 for none."""
    first, following = [-1] * nodes, [-1] * nodes
    for node in range(len(parents)):
        children = [c for c, p in enumerate(parents) if p == node]
        first[node] = children[0] if children else -1
        for child, after in zip(children, children[1:]):  # noqa: RUF007
            following[child] = after
    return first, following


def sglang(trees: list[list[int]], lens: list[int], nodes: int, mode: str) -> dict[str, Any]:
    """Flat mask in one of SGLang's three modes, positions, index and links."""
    mask: list[Any] = []
    for parents, context in zip(trees, lens):
        for row in range(nodes):
            tree = [row < len(parents) and c < len(parents) and sees(parents, row, c) for c in range(nodes)]
            if mode == "FULL_MASK":
                mask += [True] * context + tree
            elif mode == "QLEN_ONLY":
                mask += tree
            else:
                mask.append(sum(1 << c for c, bit in enumerate(tree) if bit))
    depth = [[len(ancestors(p, i)) - 1 + n if i < len(p) else 0 for i in range(nodes)] for p, n in zip(trees, lens)]
    return {
        "tree_mask": mask,
        "positions": [x for row in depth for x in row],
        "retrive_index": [[b * nodes + i for i in range(nodes)] for b in range(len(trees))],
        "retrive_next_token": [links(p, nodes)[0] for p in trees],
        "retrive_next_sibling": [links(p, nodes)[1] for p in trees],
    }


def tensorrt(trees: list[list[int]], nodes: int) -> dict[str, Any]:
    """Packed mask rows, depths, counts and links."""
    words = (nodes + 31) // 32
    packed = np.zeros((len(trees), nodes, words), np.int64)
    for b, parents in enumerate(trees):
        for row in range(len(parents)):
            for column in ancestors(parents, row):
                packed[b, row, column // 32] |= 1 << (column % 32)
    return {
        "packed_mask": packed.astype(np.uint32).astype(np.int32).tolist(),
        "position_offsets": [[len(ancestors(p, i)) - 1 if i < len(p) else 0 for i in range(nodes)] for p in trees],
        "generation_lengths": [len(p) for p in trees],
        "retrieve_index": [list(range(nodes)) for _ in trees],
        "retrieve_next_token": [links(p, nodes)[0] for p in trees],
        "retrieve_next_sibling": [links(p, nodes)[1] for p in trees],
    }


def medusa(trees: list[list[int]], nodes: int, max_depth: int) -> dict[str, Any]:
    """Boolean mask, depths, and the path of every leaf, the latest leaf first."""
    paths = []
    for parents in trees:
        leaves = [i for i in range(len(parents)) if i not in parents]
        rows = [ancestors(parents, leaf)[::-1] for leaf in reversed(leaves)]
        rows += [[]] * (nodes - len(rows))
        paths.append([row + [-1] * (max_depth + 1 - len(row)) for row in rows])
    return {
        "attention_mask": [
            [[r < len(p) and c < len(p) and sees(p, r, c) for c in range(nodes)] for r in range(nodes)] for p in trees
        ],
        "position_ids": [[len(ancestors(p, i)) - 1 if i < len(p) else 0 for i in range(nodes)] for p in trees],
        "retrieve_indices": paths,
    }


def flashinfer(trees: list[list[int]], lens: list[int]) -> tuple[list[int], list[int]]:
    """(packed bytes, byte offsets): each request's [N, L + N] mask packed on its own, least significant bit first."""
    packed: list[int] = []
    offsets = [0]
    for parents, context in zip(trees, lens):
        count = len(parents)
        bits = [c < context or sees(parents, r, c - context) for r in range(count) for c in range(context + count)]
        packed += np.packbits(np.array(bits, bool), bitorder="little").tolist()
        offsets.append(len(packed))
    return packed, offsets
