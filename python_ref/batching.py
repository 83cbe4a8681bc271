"""Buckets, packing and padding counts in plain Python and NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np


def bucket_of(nodes: int, sizes: list[int]) -> int:
    """The first bucket that holds the request, the last if none does."""
    return next((k for k, size in enumerate(sizes) if nodes <= size), len(sizes) - 1)


def plan_buckets(num_nodes: list[int], sizes: list[int]) -> tuple[list[int], list[int], list[int]]:
    """(order, bucket_offsets, cu_nodes)."""
    members: list[list[int]] = [[] for _ in sizes]
    for b, nodes in enumerate(num_nodes):
        members[bucket_of(nodes, sizes)].append(b)
    offsets = [0]
    for bucket in members:
        offsets.append(offsets[-1] + len(bucket))
    cu = [0]
    for nodes in num_nodes:
        cu.append(cu[-1] + max(0, nodes))
    return [b for bucket in members for b in bucket], offsets, cu


def pack_rows(x: np.ndarray, cu: list[int], total: int) -> np.ndarray:
    """[B, rows, ...] -> [total, ...]."""
    out = np.zeros((total, *x.shape[2:]), x.dtype)
    for b, (begin, end) in enumerate(itertools.pairwise(cu)):
        for i in range(min(end - begin, x.shape[1])):
            out[begin + i] = x[b, i]
    return out


def unpack_rows(x: np.ndarray, cu: list[int], max_rows: int) -> np.ndarray:
    """[total, ...] -> [B, max_rows, ...]."""
    out = np.zeros((len(cu) - 1, max_rows, *x.shape[1:]), x.dtype)
    for b, (begin, end) in enumerate(itertools.pairwise(cu)):
        for i in range(min(end - begin, max_rows)):
            out[b, i] = x[begin + i]
    return out


def padding_stats(num_nodes: list[int], sizes: list[int], tile_rows: int, group_size: int) -> list[list[int]]:
    """Per bucket: requests, nodes, node slots padded to the bucket, rows of whole tiles."""
    order, offsets, _ = plan_buckets(num_nodes, sizes)
    stats = []
    for k, size in enumerate(sizes):
        counts = [max(0, num_nodes[b]) for b in order[offsets[k] : offsets[k + 1]]]
        tiles = sum(math.ceil(count * group_size / tile_rows) * tile_rows for count in counts)
        stats.append([len(counts), sum(counts), sum(max(size, count) for count in counts), tiles])
    return stats
