"""Tree attention by path unrolling, float64: each query gathers the keys on its own list and takes a softmax over it.

No key a query may not see is ever multiplied, so a mask mistake in an op cannot be repeated here. `visible[n]` is the
list of tree slots query row n attends; three ways to obtain it stand below (parents walked, bits read, causal).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Array = np.ndarray


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors, root first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def slots_of_words(words: Iterable[int], num_slots: int) -> list[int]:
    """Slots whose bit is set: bit j % 32 (least significant first) of word j // 32; bits >= num_slots are ignored."""
    unsigned = [int(word) & 0xFFFFFFFF for word in words]
    return [j for j in range(min(num_slots, 32 * len(unsigned))) if unsigned[j // 32] >> (j % 32) & 1]


def words_of_slots(slots: Iterable[int], num_words: int) -> list[int]:
    """The inverse: int32 words (two's complement)."""
    words = [0] * num_words
    for j in slots:
        words[j // 32] |= 1 << (j % 32)
    return [word - (1 << 32) if word >> 31 else word for word in words]


def attend(
    q: Array, keys: Sequence[Array], values: Sequence[Array], scale: float, softcap: float = 0.0
) -> tuple[Array, Array]:
    """Query heads of one KV head over their common list of keys: softmax(cap(scale * q.k)) v, natural log of the sum.

    The list comes in pieces (context, path). q [G, D], keys [n_i, D], values [n_i, Dv] -> out [G, Dv], lse [G].
    No keys: zeros and -inf.
    """
    if sum(map(len, keys)) == 0:
        return np.zeros((len(q), values[0].shape[1])), np.full(len(q), -math.inf)
    scores = np.concatenate([scale * (q @ piece.T) for piece in keys], axis=1)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1)
    split = np.split(weights, np.cumsum([len(piece) for piece in values])[:-1], axis=1)
    out = sum(part @ piece for part, piece in zip(split, values))
    return out / total[:, None], top[:, 0] + np.log(total)


def gather(cache: Array, page_row: Array, length: int, kv_layout: str = "NHD") -> Array:
    """Rows 0..length-1 of one request as [length, Hkv, D]; pages in the order of its table row."""
    page_size = cache.shape[1] if kv_layout == "NHD" else cache.shape[2]
    rows = []
    for page in page_row[: -(-length // page_size)]:
        block = cache[page]
        rows.append(block if kv_layout == "NHD" else block.swapaxes(0, 1))
    if not rows:
        heads = cache.shape[2] if kv_layout == "NHD" else cache.shape[1]
        return np.zeros((0, heads, cache.shape[3]))
    return np.concatenate(rows)[:length].astype(np.float64)


def per_head(scale: Array | None, num_kv_heads: int) -> Array:
    """A scale of shape [1] or [Hkv] (None: 1) as [Hkv]."""
    return np.broadcast_to(np.ones(1) if scale is None else scale.astype(np.float64), (num_kv_heads,))


def tree_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    context_lens: Array,
    cu_nodes: Array,
    visible: Sequence[Sequence[int]],
    *,
    softmax_scale: float | None = None,
    query_start: Array | None = None,
    query_positions: Array | None = None,
    slot_positions: Sequence[Sequence[int]] | None = None,
    softcap: float = 0.0,
    window: int = -1,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_layout: str = "NHD",
) -> tuple[Array, Array]:
    """out [N, Hq, Dv] and lse [N, Hq]; rows behind cu_nodes[-1] are 0 and -inf.

    `query_positions[n]` and `slot_positions[b][j]` (both only with window >= 0) are depths counted from the start of
    the text; a context key's position is its index. Visible iff position_q - position_k < window.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2] if kv_layout == "NHD" else k_cache.shape[1]
    group = num_q_heads // num_kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    k_factor, v_factor = per_head(k_scale, num_kv_heads), per_head(v_scale, num_kv_heads)
    out = np.zeros((num_rows, num_q_heads, v_cache.shape[3]))
    lse = np.full((num_rows, num_q_heads), -math.inf)
    for b, length in enumerate(int(x) for x in context_lens):
        rows = range(int(cu_nodes[b]), int(cu_nodes[b + 1]))
        if len(rows) == 0:
            continue
        slots = (0 if query_start is None else int(query_start[b])) + len(rows)
        keys = gather(k_cache, page_table[b], length + slots, kv_layout) * k_factor[:, None]
        values = gather(v_cache, page_table[b], length + slots, kv_layout) * v_factor[:, None]
        for n in rows:
            first, path = 0, np.asarray(visible[n], dtype=np.int64)
            if window >= 0:
                assert query_positions is not None
                assert slot_positions is not None
                position = int(query_positions[n])
                first = min(max(0, position - window + 1), length)
                path = path[position - np.asarray(slot_positions[b], dtype=np.int64)[path] < window]
            for h in range(num_kv_heads):
                heads = slice(h * group, (h + 1) * group)
                out[n, heads], lse[n, heads] = attend(
                    q[n, heads].astype(np.float64),
                    [keys[first:length, h], keys[length + path, h]],
                    [values[first:length, h], values[length + path, h]],
                    scale,
                    softcap,
                )
    return (out if sinks is None else apply_sinks(out, lse, sinks)), lse


def apply_sinks(out: Array, lse: Array, sinks: Array) -> Array:
    """A sink is one more key with logit sinks[h] and value 0: it shrinks `out`, and is not part of `lse`."""
    top = np.maximum(lse, sinks)
    return out * (np.exp(lse - top) / (np.exp(lse - top) + np.exp(sinks - top)))[..., None]


def merge_attention(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Attention over two disjoint key lists from the result over each; both empty: 0 and -inf."""
    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0.0, top)
    weight_a, weight_b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = weight_a + weight_b
    nonzero = np.where(total > 0, total, 1.0)
    # An empty side (lse -inf) counts for nothing, whatever its rows hold.
    side_a = np.where(weight_a[..., None] > 0, out_a, 0.0) * (weight_a / nonzero)[..., None]
    side_b = np.where(weight_b[..., None] > 0, out_b, 0.0) * (weight_b / nonzero)[..., None]
    lse = np.where(total > 0, safe + np.log(nonzero), -math.inf)
    out = side_a + side_b
    return (out if sinks is None else apply_sinks(out, lse, sinks)), lse
