"""tree_attention in Triton: the same arguments, mask words and edge rules as csrc/attention.

One program a (row tile x split, KV head, request). A request's rows are packed node-major, row r = node * group + g, so
that the heads of a group share every key they read:

    key tile     0 .......... a | a ............. b | b ......... end       64 or 32 keys a tile
    section      a window's edge| seen by every row | the end of the context and the tree slots
    looks at     rows' windows  | no mask           | mask words, windows, values that are not finite

A split takes a run of tiles; with more than one, a second kernel merges the partial results in split order. Scores,
softmax and sums are float32, products take q's dtype (float32: no TF32). float8 values are decoded by their bits, which
is exact and needs no float8 hardware.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.attention_tile import LOG2E, attend, finish, request

MAX_DIM = 256
MIN_SPLIT_TILES = 4  # below 256 keys a split costs more to merge than it saves
FLOAT8 = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


@functools.cache
def _tuned() -> list[dict[str, int]]:
    path = Path(__file__).resolve().parents[1] / "_tuned" / "attention_triton.json"
    return json.loads(path.read_text())["choices"]


def choose(rows: int, dim: int, element_bytes: int) -> dict[str, int]:
    """Tile sizes and launch options for at most `rows` rows a KV head: the first entry of the table that fits."""
    bounds = {"rows": rows, "dim": dim, "element_bytes": element_bytes}
    fitting = (entry for entry in _tuned() if all(value <= entry[name] for name, value in bounds.items()))
    return {k: v for k, v in next(fitting).items() if k not in bounds}


# Scalars whose value or divisibility is no reason to compile another kernel.
_PLAIN = ["num_requests", "num_rows", "num_words", "capacity", "max_pages", "num_pages", "page_size", "group",
          "row_tiles", "num_splits", "window", "k_scale_stride", "v_scale_stride", "lse_stride_n"]  # fmt: skip


@triton.jit(do_not_specialize=[*_PLAIN, "scale", "cap"])
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, context_lens_ptr, cu_nodes_ptr, mask_ptr, query_start_ptr, causal_ptr,
    positions_ptr, order_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, partial_ptr,
    q_stride_n, q_stride_h, k_stride_page, k_stride_row, k_stride_head, v_stride_page, v_stride_row, v_stride_head,
    out_stride_n, out_stride_h, lse_stride_n, k_scale_stride, v_scale_stride,
    num_requests, num_rows, num_words, capacity, max_pages, num_pages, page_size, group, row_tiles, num_splits, window,
    scale, cap, WINDOW: tl.constexpr, FLOAT8: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row_tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    kv_head, z = tl.program_id(1), tl.program_id(2)
    b, first_row, num_nodes, start, length, causal = request(
        z, order_ptr, cu_nodes_ptr, context_lens_ptr, query_start_ptr, causal_ptr, num_requests, num_rows, capacity,
        mask_ptr is not None,
    )  # fmt: skip
    if row_tile * BLOCK_M >= num_nodes * group:
        return
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = r // group
    active = node < num_nodes
    tree = tl.where(causal, 0, 1)
    tree_row = tl.where(active, tree, 0) != 0
    rows = first_row + node
    heads = kv_head * group + r % group
    d = tl.arange(0, BLOCK_D)
    q_at = rows * q_stride_n + heads.to(tl.int64) * q_stride_h
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=active[:, None] & (d < D)[None, :], other=0)

    first_node = (row_tile * BLOCK_M) // group
    last_node = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group, num_nodes - 1)
    slots = length + start
    key_end = tl.minimum(slots + tl.where(causal, last_node + 1, num_nodes), capacity)
    dense_end = tl.minimum(tl.where(causal, slots + node + 1, length), key_end).to(tl.int32)
    full_end = tl.minimum(tl.where(causal, slots + first_node + 1, length), key_end)
    position = slots + node
    begin = tl.zeros_like(length)
    full_begin = begin
    if WINDOW:
        if positions_ptr is not None:
            of_node = tl.load(positions_ptr + rows, mask=tree_row, other=0).to(tl.int64)
            position = tl.where(causal, position, of_node)
        furthest = tl.where(active, position, 1 << 40)
        nearest = tl.where(active, position, -(1 << 40))
        begin = tl.minimum(tl.maximum(tl.min(furthest, 0) - window + 1, 0), length)
        full_begin = tl.maximum(tl.max(nearest, 0) - window + 1, 0)

    # Sections of whole tiles, then the share of this split.
    tile0 = (begin // BLOCK_N).to(tl.int32)
    tile3 = ((key_end + BLOCK_N - 1) // BLOCK_N).to(tl.int32)
    chunk = (tl.maximum(tile3 - tile0, 0) + num_splits - 1) // num_splits
    low = tile0 + split * chunk
    high = tl.minimum(low + chunk, tile3)
    tile1 = tl.minimum((tl.minimum(full_begin, 1 << 30) + BLOCK_N - 1) // BLOCK_N, tile3).to(tl.int32)
    tile2 = (full_end // BLOCK_N).to(tl.int32)
    tile1 = tl.minimum(tl.maximum(tile1, low), high)
    tile2 = tl.minimum(tl.maximum(tile2, tile1), high)

    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * k_scale_stride)
    k_base = k_ptr + kv_head.to(tl.int64) * k_stride_head
    v_base = v_ptr + kv_head.to(tl.int64) * v_stride_head
    table = page_table_ptr + b.to(tl.int64) * max_pages
    words = context_lens_ptr + tl.zeros_like(rows)
    if mask_ptr is not None:
        words = mask_ptr + rows * num_words
    positions = positions_ptr
    if positions_ptr is not None:
        positions = positions_ptr + first_row
    length = length.to(tl.int32)
    key_end = key_end.to(tl.int32)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if WINDOW:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, low, tile1, k_base, v_base, table, positions, k_stride_page, k_stride_row,
            v_stride_page, v_stride_row, page_size, num_pages, key_end, length, dense_end, position, words, num_words,
            tree_row, tree, window, scale, cap, True, True, FLOAT8, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, tile1, tile2, k_base, v_base, table, positions, k_stride_page, k_stride_row,
        v_stride_page, v_stride_row, page_size, num_pages, key_end, length, dense_end, position, words, num_words,
        tree_row, tree, window, scale, cap, False, False, FLOAT8, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, tile2, high, k_base, v_base, table, positions, k_stride_page, k_stride_row,
        v_stride_page, v_stride_row, page_size, num_pages, key_end, length, dense_end, position, words, num_words,
        tree_row, tree, window, scale, cap, True, WINDOW, FLOAT8, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip

    if partial_ptr is None:
        finish(acc, row_max, row_sum, rows, heads, active, kv_head, out_ptr, lse_ptr, sinks_ptr, v_scale_ptr,
                v_scale_stride, out_stride_n, out_stride_h, lse_stride_n, DV, BLOCK_DV)  # fmt: skip
    else:
        tile = (z.to(tl.int64) * tl.num_programs(1) + kv_head) * row_tiles + row_tile
        part = partial_ptr + ((tile * num_splits + split) * BLOCK_M + tl.arange(0, BLOCK_M)) * (BLOCK_DV + 2)
        dv = tl.arange(0, BLOCK_DV)
        tl.store(part[:, None] + dv[None, :], acc)
        tl.store(part + BLOCK_DV, row_max)
        tl.store(part + BLOCK_DV + 1, row_sum)


@triton.jit(do_not_specialize=_PLAIN)
def _merge_splits_kernel(
    partial_ptr, context_lens_ptr, cu_nodes_ptr, order_ptr, sinks_ptr, v_scale_ptr, out_ptr, lse_ptr,
    out_stride_n, out_stride_h, lse_stride_n, v_scale_stride, num_requests, num_rows, capacity, group, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The splits of a row tile, in order: the sum does not depend on who finished when."""
    row_tile, kv_head, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, first_row, num_nodes, _, _, _ = request(
        z, order_ptr, cu_nodes_ptr, context_lens_ptr, None, None, num_requests, num_rows, capacity, False
    )
    if row_tile * BLOCK_M >= num_nodes * group:
        return
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = r // group
    tile = (z.to(tl.int64) * tl.num_programs(1) + kv_head) * tl.num_programs(0) + row_tile
    part = partial_ptr + (tile * num_splits * BLOCK_M + tl.arange(0, BLOCK_M)) * (BLOCK_DV + 2)
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for split in range(0, num_splits):
        at = part + split * BLOCK_M * (BLOCK_DV + 2)
        their_max, their_sum = tl.load(at + BLOCK_DV), tl.load(at + BLOCK_DV + 1)
        top = tl.maximum(row_max, their_max)
        base = tl.where(top == float("-inf"), 0.0, top)
        mine, theirs = tl.exp2(row_max - base), tl.exp2(their_max - base)
        acc = acc * mine[:, None] + tl.load(at[:, None] + dv[None, :]) * theirs[:, None]
        row_sum = row_sum * mine + their_sum * theirs
        row_max = top
    finish(acc, row_max, row_sum, first_row + node, kv_head * group + r % group, node < num_nodes, kv_head, out_ptr,
            lse_ptr, sinks_ptr, v_scale_ptr, v_scale_stride, out_stride_n, out_stride_h, lse_stride_n, DV,
            BLOCK_DV)  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_rows", "num_heads", "out_stride_n", "out_stride_h", "lse_stride_n"])
def _clear_tail_kernel(
    out_ptr, lse_ptr, cu_nodes_ptr, out_stride_n, out_stride_h, lse_stride_n, num_requests, num_rows, num_heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Rows behind the last request hold no query: 0 and -inf. One program a row."""
    row = tl.program_id(0)
    lanes = tl.arange(0, 128)
    last = tl.zeros((128,), tl.int32)
    for first in range(0, num_requests, 128):
        b = first + lanes
        begin = tl.load(cu_nodes_ptr + b, mask=b < num_requests, other=0)
        end = tl.load(cu_nodes_ptr + b + 1, mask=b < num_requests, other=0)
        last = tl.maximum(last, tl.where((begin >= 0) & (end >= begin) & (end <= num_rows), end, 0))
    if row < tl.max(last, 0):
        return
    dv = tl.arange(0, BLOCK_DV)
    zero = tl.zeros((BLOCK_DV,), tl.float32).to(out_ptr.dtype.element_ty)
    for head in range(0, num_heads):
        tl.store(out_ptr + row.to(tl.int64) * out_stride_n + head * out_stride_h + dv, zero, mask=dv < DV)
        if lse_ptr is not None:
            tl.store(lse_ptr + row.to(tl.int64) * lse_stride_n + head, float("-inf"))


def _check(argument: str, ok: bool, expected: object, got: object) -> None:
    if not ok:
        raise ValueError(f"tree_attention: {argument}: expected {expected}, got {got}")


def _check_inputs(tensors: dict[str, Any], kv_layout: str, window: int) -> None:
    """What callers of the op below the public function can get wrong."""
    q, k_cache, v_cache, out = (tensors[name] for name in ("q", "k_cache", "v_cache", "out"))
    _check("kv_layout", kv_layout in ("NHD", "HND"), "'NHD' or 'HND'", repr(kv_layout))
    _check("q", q.dtype in (torch.float32, torch.bfloat16, torch.float16), "float32, bfloat16 or float16", q.dtype)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check(name, cache.dtype == k_cache.dtype and cache.dtype in (q.dtype, *FLOAT8),
               f"{q.dtype} (the dtype of q) or float8", cache.dtype)  # fmt: skip
        _check(name, cache.shape[:3] == k_cache.shape[:3] and cache.shape[3] <= MAX_DIM, f"heads of at most {MAX_DIM}",
               list(cache.shape))  # fmt: skip
    _check("k_cache", k_cache.shape[3] == q.shape[2], f"head_dim {q.shape[2]} of q", list(k_cache.shape))
    kv_heads = k_cache.shape[2 if kv_layout == "NHD" else 1]
    _check("q", kv_heads > 0 and q.shape[1] % kv_heads == 0, f"a multiple of {kv_heads} query heads", q.shape[1])
    batch, rows = tensors["context_lens"].shape[0], q.shape[0]
    shapes = {"cu_nodes": (batch + 1,), "page_table": (batch, None), "tree_mask": (rows, None), "query_start": (batch,),
              "causal": (batch,), "positions": (rows,), "sinks": (q.shape[1],)}  # fmt: skip
    for name, shape in shapes.items():
        t = tensors[name]
        same = t is None or (t.dim() == len(shape) and all(w in (None, n) for w, n in zip(shape, t.shape)))
        _check(name, same and (t is None or t.is_contiguous()), f"a contiguous tensor of shape {list(shape)}",
               t if t is None else list(t.shape))  # fmt: skip
    _check("out", out.shape == (*q.shape[:2], v_cache.shape[3]), "shape [N, Hq, Dv]", list(out.shape))
    for name in ("q", "k_cache", "v_cache", "out", "lse"):
        t = tensors[name]
        _check(name, t is None or t.numel() == 0 or t.stride(-1) == 1 or t.shape[-1] == 1, "a dense last dimension",
               t if t is None else t.stride())  # fmt: skip
    if window >= 0 and tensors["tree_mask"] is not None:
        _check("positions", tensors["positions"] is not None, "a tensor (a window over a tree needs depths)", None)
        unknown = "None with a window over a tree (earlier slots have no depth here)"
        _check("query_start", tensors["query_start"] is None, unknown, "a tensor")


def _splits(wanted: int, programs: int, tiles: int, device: torch.device) -> int:
    """KV splits: as asked, or what fills the machine twice without crumbs."""
    if wanted == 0:
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        wanted = min(-(-2 * processors // programs), tiles // MIN_SPLIT_TILES)
    return max(1, min(wanted, tiles))


def impl_tree_attention(
    q, k_cache, v_cache, page_table, context_lens, cu_nodes, tree_mask, query_start, causal, positions, request_order,
    sinks, k_scale, v_scale, plan, max_nodes, softmax_scale, softcap, window, kv_layout, num_splits, batch_invariant,
    workspace, out, lse,
):  # fmt: skip
    """`specdec_triton::tree_attention`. Partial results of splits come from torch's allocator: no workspace."""
    tensors = dict(q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table, context_lens=context_lens,
                   cu_nodes=cu_nodes, tree_mask=tree_mask, query_start=query_start, causal=causal, positions=positions,
                   sinks=sinks, out=out, lse=lse)  # fmt: skip
    _check_inputs(tensors, kv_layout, window)
    _check("plan", plan is None, None, "a tensor (every program plans for itself)")
    num_rows, num_heads, dim = q.shape
    v_dim, requests = v_cache.shape[3], context_lens.shape[0]
    if num_rows == 0 or num_heads == 0:
        return
    order = requests if request_order is None else request_order.shape[0]
    _check("request_order", order <= 65535, "at most 65535 requests (the third dimension of a grid)", order)
    block_dv = triton.next_power_of_2(v_dim)
    lse_stride = 0 if lse is None else lse.stride(0)
    _clear_tail_kernel[(num_rows,)](
        out, lse, cu_nodes, out.stride(0), out.stride(1), lse_stride, requests, num_rows, num_heads, DV=v_dim,
        BLOCK_DV=block_dv, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    row_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    kv_heads, page_size = k_cache.shape[head_axis], k_cache.shape[row_axis]
    group = num_heads // kv_heads
    # Causal requests may be longer than the masks are wide.
    most_rows = (num_rows if causal is not None else min(max_nodes, num_rows)) * group
    if order == 0 or most_rows == 0:
        return
    options = choose(16 if batch_invariant else most_rows, max(dim, v_dim), q.element_size())
    block_m, block_n = options["BLOCK_M"], options["BLOCK_N"]
    capacity = min(page_table.shape[1] * page_size, 2**31 - 1 - block_n)
    row_tiles, tiles = -(-most_rows // block_m), -(-capacity // block_n)
    splits = 1 if batch_invariant else _splits(num_splits, row_tiles * kv_heads * order, tiles, q.device)
    partial = None
    if splits > 1:
        parts = order * kv_heads * row_tiles * splits * block_m
        partial = torch.empty(parts * (block_dv + 2), dtype=torch.float32, device=q.device)
    float8 = FLOAT8.get(k_cache.dtype, 0)
    if float8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    scale = softmax_scale / softcap if softcap > 0.0 else softmax_scale * LOG2E.value
    cap = softcap * LOG2E.value if softcap > 0.0 else 0.0
    scale_strides = [0 if s is None or s.shape[0] == 1 else s.stride(0) for s in (k_scale, v_scale)]
    cache_strides = [c.stride(axis) for c in (k_cache, v_cache) for axis in (0, row_axis, head_axis)]
    _tree_attention_kernel[(row_tiles * splits, kv_heads, order)](
        q, k_cache, v_cache, page_table, context_lens, cu_nodes, tree_mask, query_start, causal, positions,
        request_order, sinks, k_scale, v_scale, out, lse, partial, q.stride(0), q.stride(1), *cache_strides,
        out.stride(0), out.stride(1), lse_stride, *scale_strides, requests, num_rows,
        0 if tree_mask is None else tree_mask.shape[1], capacity, page_table.shape[1], k_cache.shape[0], page_size,
        group, row_tiles, splits, min(window, 2**31 - 1), scale, cap, WINDOW=window >= 0, FLOAT8=float8, D=dim,
        DV=v_dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_DV=block_dv, enable_fp_fusion=True, **options,
    )  # fmt: skip
    if partial is not None:
        _merge_splits_kernel[(row_tiles, kv_heads, order)](
            partial, context_lens, cu_nodes, request_order, sinks, v_scale, out, lse, out.stride(0), out.stride(1),
            lse_stride, scale_strides[1], requests, num_rows, capacity, group, splits, DV=v_dim, BLOCK_DV=block_dv,
            BLOCK_M=block_m, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
