"""Committing the accepted path and handing over to the next step, in plain Python and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def slot(page_row: list[int], page_size: int, num_pages: int, position: int) -> tuple[int, int] | None:
    """(page, row) of a position, or None where the table has no page of the cache."""
    column, row = divmod(position, page_size)
    if position < 0 or column >= len(page_row) or not 0 <= page_row[column] < num_pages:
        return None
    return page_row[column], row


def accepted_path(accepted: list[int], num_emitted: int, num_nodes: int) -> list[int]:
    """The entries that count: rising node numbers of this request."""
    path: list[int] = []
    for node in accepted[: max(0, num_emitted)]:
        if not (path[-1] if path else -1) < node < num_nodes:
            break
        path.append(node)
    return path


def commit_kv(
    caches: list[np.ndarray],
    page_table: list[list[int]],
    context_lens: list[int],
    cu_nodes: list[int],
    accepted_nodes: list[list[int]],
    num_emitted: list[int],
    request_order: list[int] | None = None,
    kv_layout: str = "NHD",
) -> list[np.ndarray]:
    """New caches: everything is copied out first, so that no move can disturb another."""
    result = [cache.copy() for cache in caches]
    requests = range(len(context_lens)) if request_order is None else request_order
    for cache, out in zip(caches, result):
        if kv_layout == "HND":
            cache, out = cache.swapaxes(1, 2), out.swapaxes(1, 2)
        num_pages, page_size = cache.shape[:2]
        for b in requests:
            if not 0 <= b < len(context_lens) or context_lens[b] < 0:
                continue
            path = accepted_path(accepted_nodes[b], num_emitted[b], cu_nodes[b + 1] - cu_nodes[b])
            for j, node in enumerate(path):
                source = slot(page_table[b], page_size, num_pages, context_lens[b] + node)
                target = slot(page_table[b], page_size, num_pages, context_lens[b] + j)
                if source is not None and target is not None:
                    out[target] = cache[source]
    return result


def advance(context_lens: list[int], num_emitted: list[int]) -> list[int]:
    """Committed lengths after the step."""
    return [length + max(0, count) for length, count in zip(context_lens, num_emitted)]


def copy_pages(caches: list[np.ndarray], src: list[int], dst: list[int]) -> list[np.ndarray]:
    """New caches with page src[i] copied to dst[i]; ids outside the cache are skipped."""
    result = [cache.copy() for cache in caches]
    for cache, out in zip(caches, result):
        for a, b in zip(src, dst):
            if 0 <= a < len(cache) and 0 <= b < len(cache):
                out[b] = cache[a]
    return result


def truncate(
    limit: list[int], output_token_ids: list[list[int]], num_emitted: list[int], accepted_nodes: list[list[int]]
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """At most limit[b] tokens of each request."""
    kept = [min(max(0, cut), max(0, n), len(row)) for cut, n, row in zip(limit, num_emitted, output_token_ids)]
    tokens = [row[:n] + [-1] * (len(row) - n) for row, n in zip(output_token_ids, kept)]
    nodes = [row[:n] + [-1] * (len(row) - n) for row, n in zip(accepted_nodes, kept)]
    return tokens, kept, nodes


def gather_accepted(
    x: np.ndarray, cu_nodes: list[int], accepted_nodes: list[list[int]], num_emitted: list[int], total: int
) -> tuple[np.ndarray, list[int]]:
    """Rows of the accepted nodes, request by request; zeros behind them and for nodes that do not exist."""
    rows: list[np.ndarray] = []
    cu = [0]
    for b, accepted in enumerate(accepted_nodes):
        for node in accepted[: max(0, num_emitted[b])]:
            exists = 0 <= node < cu_nodes[b + 1] - cu_nodes[b]
            rows.append(x[cu_nodes[b] + node] if exists else np.zeros_like(x[0] if len(x) else x.sum(0)))
        cu.append(min(len(rows), total))
    out = np.zeros((total, x.shape[1]), x.dtype)
    for i, row in enumerate(rows[:total]):
        out[i] = row
    return out, cu


def prepare_next(
    output_token_ids: list[list[int]],
    num_emitted: list[int],
    context_lens: list[int],
    page_table: list[list[int]],
    page_size: int,
    position_offset: int,
    root_token_ids: list[int],
    total: int,
) -> dict[str, Any]:
    """Roots, packed tokens, their positions and slots, and the offsets."""
    roots, tokens, positions, slots, cu = list(root_token_ids), [], [], [], [0]
    for b, row in enumerate(output_token_ids):
        emitted = row[: max(0, num_emitted[b])]
        if emitted:
            roots[b] = emitted[-1]
        for i, token in enumerate(emitted):
            position = context_lens[b] + position_offset + i
            place = slot(page_table[b], page_size, 2**31 // page_size, position)
            tokens.append(token)
            positions.append(position)
            slots.append(-1 if place is None else place[0] * page_size + place[1])
        cu.append(min(len(tokens), total))
    pad = max(0, total - len(tokens))
    return {
        "root_token_ids": roots,
        "token_ids": (tokens + [-1] * pad)[:total],
        "positions": (positions + [0] * pad)[:total],
        "slots": (slots + [-1] * pad)[:total],
        "cu_tokens": cu,
    }
