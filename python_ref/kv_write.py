"""Slots of a step's tokens in the paged cache, and the write itself, in plain loops. Rounding is done by arithmetic."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray

# name: (stored mantissa bits, exponent of the smallest normal, largest finite value, what lies beyond it)
FORMATS = {
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127, math.inf),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127, math.inf),
    "float16": (10, -14, 65504.0, math.inf),
    "float8_e4m3fn": (3, -6, 448.0, 448.0),  # scaled formats saturate: an overflow must not become NaN
    "float8_e5m2": (2, -14, 57344.0, 57344.0),
}


def round_to(x: Array, name: str) -> Array:
    """Round to nearest, ties to even, into the format `name`; values stay float64. NaN stays NaN."""
    mantissa, min_exponent, largest, beyond = FORMATS[name]
    x = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(x)
    magnitude = np.where(finite & (x != 0), np.abs(x), 1.0)
    exponent = np.maximum(np.floor(np.log2(magnitude)), min_exponent)
    ulp = np.exp2(exponent - mantissa)
    rounded = np.where(finite, np.round(np.where(finite, x, 0.0) / ulp) * ulp, x)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(rounded) > largest, np.copysign(beyond, rounded), rounded)


def slot_mapping(
    page_table: Array, context_lens: Array, cu_nodes: Array, page_size: int, total_nodes: int
) -> list[int]:
    """Slot page * page_size + row of every node (position context_lens[b] + i), or -1 where it has none.

    None: the length or the page id is negative, the position is behind the table's row, or the slot does not fit an
    int32.
    Rows behind cu_nodes[-1] get -1.
    """
    slots = [-1] * total_nodes
    for b in range(len(context_lens)):
        for i, n in enumerate(range(int(cu_nodes[b]), int(cu_nodes[b + 1]))):
            column, row = divmod(int(context_lens[b]) + i, page_size)
            if n >= total_nodes or context_lens[b] < 0 or column >= page_table.shape[1]:
                continue
            page = int(page_table[b, column])
            if page >= 0 and (page + 1) * page_size - 1 <= 2**31 - 1:
                slots[n] = page * page_size + row
    return slots


def write_kv(
    x: Array, cache: Array, slots: Array, dtype: str, *, scale: Array | None = None, kv_layout: str = "NHD"
) -> Array:
    """A copy of `cache` with rows x[n] / scale stored at slots[n]; slots outside the cache write nothing."""
    cache = cache.copy()
    num_pages = cache.shape[0]
    page_size = cache.shape[1] if kv_layout == "NHD" else cache.shape[2]
    for n, slot in enumerate(int(s) for s in slots):
        if not 0 <= slot < num_pages * page_size:
            continue
        page, row = divmod(slot, page_size)
        for h in range(x.shape[1]):
            factor = 1.0 if scale is None else float(scale[h if len(scale) > 1 else 0])
            stored = round_to(x[n, h] / factor, dtype)
            if kv_layout == "NHD":
                cache[page, row, h] = stored
            else:
                cache[page, h, row] = stored
    return cache
