"""The kv room and the hand-over in Triton: the same bytes as csrc/kv.

The caches of a call are named by a table of addresses and byte strides, one row a cache, so that all layers take one
launch. It is made at the first call with these caches (a host-to-device copy: make that call outside graph capture) and
kept.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import (
    INT32_MAX,
    as_bits,
    block_of,
    cache_slot,
    check,
    check_dense,
    check_range,
    copy_row,
    fail,
    node_range,
    table,
)

COLUMNS = tl.constexpr(6)  # of the table: address, bytes a page, a row, a head, heads, bytes of a head


@triton.jit
def _pointer(address, WORD: tl.constexpr):
    """A pointer to words at an address (an int64 scalar)."""
    if WORD == 1:
        return address.to(tl.pointer_type(tl.int8))
    pointer = address.to(tl.pointer_type(tl.int32))
    if WORD == 16:  # what lets four words travel in one instruction
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["requests", "max_pages", "width", "page_size", "num_pages"])
def _commit_kv_kernel(
    table_ptr, page_table_ptr, context_lens_ptr, cu_nodes_ptr, accepted_ptr, emitted_ptr, order_ptr,
    requests, max_pages, width, page_size, num_pages, ORDERED: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (requests handled, caches, heads). The moves of the path in order."""
    n = tl.program_id(0)
    b = n
    if ORDERED:
        b = tl.load(order_ptr + n)
    row_ptr = table_ptr + tl.program_id(1) * COLUMNS
    head = tl.program_id(2)
    heads = tl.load(row_ptr + 4)
    if (b < 0) | (b >= requests) | (head >= heads):
        return
    base = tl.load(row_ptr) + head * tl.load(row_ptr + 3)
    stride_page = tl.load(row_ptr + 1)
    stride_row = tl.load(row_ptr + 2)
    words = (tl.load(row_ptr + 5) // (1 if WORD == 1 else 4)).to(tl.int32)
    _, count, _ = node_range(cu_nodes_ptr, b, INT32_MAX)
    context_len = tl.load(context_lens_ptr + b).to(tl.int64)
    limit = tl.minimum(tl.load(emitted_ptr + b), width)
    pages = page_table_ptr + b.to(tl.int64) * max_pages
    path = accepted_ptr + b.to(tl.int64) * width
    rising = context_len >= 0
    before = n * 0 - 1
    for j in range(0, limit):
        node = tl.load(path + j)
        rising = rising & (node > before) & (node < count)
        before = node
        source = cache_slot(pages, max_pages, page_size, num_pages, context_len + node, rising)
        target = cache_slot(pages, max_pages, page_size, num_pages, context_len + j, rising)
        if (source >= 0) & (target >= 0) & (source != target):
            source_ptr = _pointer(base + source // page_size * stride_page + source % page_size * stride_row, WORD)
            target_ptr = _pointer(base + target // page_size * stride_page + target % page_size * stride_row, WORD)
            for start in range(0, words, BLOCK):
                i = start + tl.arange(0, BLOCK)
                tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < words), mask=i < words)
            tl.debug_barrier()  # lanes may stand for each other: all have read before a later move overwrites


@triton.jit(do_not_specialize=["num_pages", "rows"])
def _copy_pages_kernel(table_ptr, source_ptr, target_ptr, num_pages, rows, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (pairs, caches, heads)."""
    a = tl.load(source_ptr + tl.program_id(0)).to(tl.int64)
    b = tl.load(target_ptr + tl.program_id(0)).to(tl.int64)
    row_ptr = table_ptr + tl.program_id(1) * COLUMNS
    head = tl.program_id(2)
    if (a < 0) | (b < 0) | (a >= num_pages) | (b >= num_pages) | (a == b) | (head >= tl.load(row_ptr + 4)):
        return
    base = tl.load(row_ptr) + head * tl.load(row_ptr + 3)
    stride_page = tl.load(row_ptr + 1)
    stride_row = tl.load(row_ptr + 2)
    words = (tl.load(row_ptr + 5) // (1 if WORD == 1 else 4)).to(tl.int32)
    for row in range(0, rows):
        from_ptr = _pointer(base + a * stride_page + row * stride_row, WORD)
        to_ptr = _pointer(base + b * stride_page + row * stride_row, WORD)
        for start in range(0, words, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < words), mask=i < words)


@triton.jit(do_not_specialize=["requests"])
def _advance_kernel(emitted_ptr, context_lens_ptr, requests, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(context_lens_ptr + b, mask=b < requests, other=0).to(tl.int64)
    length += tl.maximum(tl.load(emitted_ptr + b, mask=b < requests, other=0), 0)
    tl.store(context_lens_ptr + b, tl.minimum(length, INT32_MAX).to(tl.int32), mask=b < requests)


@triton.jit(do_not_specialize=["width"])
def _truncate_kernel(limit_ptr, tokens_ptr, emitted_ptr, nodes_ptr, width, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    emitted = tl.load(emitted_ptr + b)
    kept = tl.minimum(tl.maximum(tl.load(limit_ptr + b), 0), tl.minimum(tl.maximum(emitted, 0), width))
    tl.debug_barrier()  # every lane has read the count
    tl.store(emitted_ptr + b, kept)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = b.to(tl.int64) * width + i
        cut = (i < width) & (i >= kept)
        tl.store(tokens_ptr + at, tl.full((BLOCK,), -1, tl.int32), mask=cut)
        tl.store(nodes_ptr + at, tl.full((BLOCK,), -1, tl.int32), mask=cut)


@triton.jit
def _first_row(emitted_ptr, b, width, total, BLOCK: tl.constexpr):
    """The emitted counts before request b, cut at `total`."""
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, b, BLOCK):
        j = start + tl.arange(0, BLOCK)
        count = tl.load(emitted_ptr + j, mask=j < b, other=0)
        sums += tl.minimum(tl.maximum(count, 0), width)
    return tl.minimum(tl.sum(sums, 0), total)


@triton.jit(do_not_specialize=["x_rows", "requests", "width", "total"])
def _gather_accepted_kernel(
    x_ptr, cu_nodes_ptr, nodes_ptr, emitted_ptr, out_ptr, cu_out_ptr, x_stride, out_stride, hidden,
    x_rows, requests, width, total, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (requests + 1, rows of a request)."""
    b = tl.program_id(0)
    begin = _first_row(emitted_ptr, b, width, total.to(tl.int64), 128)
    if tl.program_id(1) == 0:
        tl.store(cu_out_ptr + b, begin.to(tl.int32))
    if b == requests:
        for row in range(begin + tl.program_id(1), total.to(tl.int64), tl.num_programs(1)):
            copy_row(out_ptr + row * out_stride, x_ptr, 0, hidden, BLOCK)
        return
    first, nodes, _ = node_range(cu_nodes_ptr, b, x_rows)
    rows = tl.minimum(tl.maximum(tl.load(emitted_ptr + b), 0), width)
    rows = tl.minimum(rows, total - begin)
    for i in range(tl.program_id(1).to(tl.int64), rows.to(tl.int64), tl.num_programs(1)):
        node = tl.load(nodes_ptr + b.to(tl.int64) * width + i)
        exists = (node >= 0) & (node < nodes)
        source = x_ptr + (first + tl.where(exists, node, 0)) * x_stride
        copy_row(out_ptr + (begin + i) * out_stride, source, tl.where(exists, hidden, 0), hidden, BLOCK)


@triton.jit(do_not_specialize=["requests", "width", "max_pages", "page_size", "position_offset", "total"])
def _prepare_next_kernel(
    tokens_ptr, emitted_ptr, context_lens_ptr, page_table_ptr, roots_ptr, ids_ptr, positions_ptr, slots_ptr, cu_ptr,
    requests, width, max_pages, page_size, position_offset, total, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: requests + 1."""
    b = tl.program_id(0)
    begin = _first_row(emitted_ptr, b, width, total.to(tl.int64), 128)
    tl.store(cu_ptr + b, begin.to(tl.int32))
    lanes = tl.arange(0, BLOCK)
    if b == requests:
        for start in range(begin, total.to(tl.int64), BLOCK):
            row = start + lanes
            tl.store(ids_ptr + row, tl.full((BLOCK,), -1, tl.int32), mask=row < total)
            tl.store(positions_ptr + row, tl.zeros((BLOCK,), tl.int32), mask=row < total)
            tl.store(slots_ptr + row, tl.full((BLOCK,), -1, tl.int32), mask=row < total)
        return
    count = tl.minimum(tl.maximum(tl.load(emitted_ptr + b), 0), width)
    tokens = tokens_ptr + b.to(tl.int64) * width
    if count > 0:
        tl.store(roots_ptr + b, tl.load(tokens + count - 1))
    context_len = tl.load(context_lens_ptr + b).to(tl.int64)
    pages = page_table_ptr + b.to(tl.int64) * max_pages
    for start in range(0, count, BLOCK):
        i = start + lanes
        row = begin + i
        active = (i < count) & (row < total)
        position = context_len + position_offset + i
        valid = active & (i < tl.where(context_len >= 0, count, 0)) & (position <= INT32_MAX)
        slot = cache_slot(pages, max_pages, page_size, INT32_MAX, position, valid)
        tl.store(ids_ptr + row, tl.load(tokens + i, mask=active, other=-1), mask=active)
        tl.store(positions_ptr + row, tl.where(valid, position, 0).to(tl.int32), mask=active)
        tl.store(slots_ptr + row, slot.to(tl.int32), mask=active)


# ------------------------------------------------------------------ host
class _Group(NamedTuple):
    """The caches of a call: their table on the device, and what all of them share."""

    table: torch.Tensor
    caches: int
    heads: int  # most heads of a row
    pages: int
    page_size: int
    launch: dict[str, int]


def _group(op: str, k_caches: Sequence[Any], v_caches: Sequence[Any], hnd: bool, device: torch.device) -> _Group:
    facts = tuple((c.data_ptr(), c.element_size(), tuple(c.shape), c.stride()) for c in (*k_caches, *v_caches))
    return _group_of(op, facts, len(k_caches), hnd, device)


@functools.cache  # for good: captured graphs read its table
def _group_of(op: str, facts: tuple[Any, ...], num_k: int, hnd: bool, device: torch.device) -> _Group:
    row_axis, head_axis = (2, 1) if hnd else (1, 2)
    rows: list[tuple[int, ...]] = []
    pages = page_size = -1
    for i, (address, size, shape, stride) in enumerate(facts):
        argument = "k_caches" if i < num_k else "v_caches"
        if len(shape) not in (4, 5):
            fail(op, argument, "4 dimensions (5 with layers in front)", list(shape))
        if shape[-1] > 1 and stride[-1] != 1 and 0 not in shape:
            fail(op, argument, "a dense last dimension (stride 1)", f"stride {stride[-1]}")
        layers, between = (shape[0], stride[0] * size) if len(shape) == 5 else (1, 0)
        shape, stride = shape[-4:], stride[-4:]
        if page_size < 0:
            pages, page_size = shape[0], shape[row_axis]
        if (shape[0], shape[row_axis]) != (pages, page_size):
            fail(op, argument, f"the same pages in every cache ({pages} of {page_size} rows)", list(shape))
        heads, stride_head, piece = shape[head_axis], stride[head_axis] * size, shape[3] * size
        if stride_head == piece:
            heads, piece = 1, heads * piece  # one dense row
        strides = (stride[0] * size, stride[row_axis] * size, stride_head)
        rows += [(address + layer * between, *strides, heads, piece) for layer in range(layers)]
    if page_size < 1:
        fail(op, "k_caches", "at least one cache of at least one row a page", "none")
    bits = 16
    for address, stride_page, stride_row, stride_head, heads, piece in rows:
        bits |= address | stride_page | stride_row | piece | (stride_head if heads > 1 else 0)
    word = 16 if bits % 16 == 0 else 4 if bits % 4 == 0 else 1
    block = block_of(max(row[5] for row in rows) // min(word, 4))
    launch = {"WORD": word, "BLOCK": block, "num_warps": 4 if block > 128 else 1}
    return _Group(table(tuple(rows), device), len(rows), max(row[4] for row in rows), pages, page_size, launch)


def impl_commit_kv(
    page_table, context_lens, cu_nodes, accepted_nodes, num_emitted, request_order, kv_layout, k_caches, v_caches
):
    """`specdec_triton::commit_kv`."""
    op, requests = "commit_kv", context_lens.numel()
    if kv_layout not in ("NHD", "HND"):
        fail(op, "kv_layout", "'NHD' or 'HND'", repr(kv_layout))
    group = _group(op, k_caches, v_caches, kv_layout == "HND", page_table.device)
    check(op, "context_lens", context_lens, (None,))
    check(op, "page_table", page_table, (requests, None))
    check(op, "cu_nodes", cu_nodes, (requests + 1,))
    check(op, "accepted_nodes", accepted_nodes, (requests, None))
    check(op, "num_emitted", num_emitted, (requests,))
    if request_order is not None:
        check(op, "request_order", request_order, (None,))
    handled = requests if request_order is None else request_order.numel()
    if handled == 0:
        return
    _commit_kv_kernel[(handled, group.caches, group.heads)](
        group.table, page_table, context_lens, cu_nodes, accepted_nodes, num_emitted,
        context_lens if request_order is None else request_order,
        requests, page_table.shape[1], accepted_nodes.shape[1], group.page_size, group.pages,
        ORDERED=request_order is not None, enable_fp_fusion=False, **group.launch,
    )  # fmt: skip


def impl_copy_pages(src, dst, k_caches, v_caches):
    """`specdec_triton::copy_pages`."""
    op = "copy_pages"
    check(op, "src", src, (None,))
    check(op, "dst", dst, (src.numel(),))
    group = _group(op, k_caches, v_caches, False, src.device)  # both layouts: a page is a page
    if src.numel() == 0:
        return
    _copy_pages_kernel[(src.numel(), group.caches, group.heads)](
        group.table, src, dst, group.pages, group.page_size, enable_fp_fusion=False, **group.launch
    )


def impl_advance(num_emitted, context_lens):
    """`specdec_triton::advance`."""
    check("advance", "num_emitted", num_emitted, (None,))
    check("advance", "context_lens", context_lens, (num_emitted.numel(),))
    requests = num_emitted.numel()
    if requests:
        _advance_kernel[(triton.cdiv(requests, 128),)](
            num_emitted, context_lens, requests, BLOCK=128, num_warps=1, enable_fp_fusion=False
        )


def impl_truncate(limit, output_token_ids, num_emitted, accepted_nodes):
    """`specdec_triton::truncate`."""
    op, requests = "truncate", limit.numel()
    check(op, "limit", limit, (None,))
    check(op, "output_token_ids", output_token_ids, (requests, None))
    width = output_token_ids.shape[1]
    check(op, "num_emitted", num_emitted, (requests,))
    check(op, "accepted_nodes", accepted_nodes, (requests, width))
    if requests:
        _truncate_kernel[(requests,)](
            limit, output_token_ids, num_emitted, accepted_nodes, width, BLOCK=32, num_warps=1, enable_fp_fusion=False
        )


def impl_gather_accepted(x, cu_nodes, accepted_nodes, num_emitted, out, cu_out):
    """`specdec_triton::gather_accepted`."""
    op, requests = "gather_accepted", num_emitted.numel()
    check(op, "num_emitted", num_emitted, (None,))
    check(op, "cu_nodes", cu_nodes, (requests + 1,))
    check(op, "accepted_nodes", accepted_nodes, (requests, None))
    check(op, "cu_out", cu_out, (requests + 1,))
    if x.dim() != 2:
        fail(op, "x", "shape [*, *]", list(x.shape))
    if out.dtype != x.dtype or out.dim() != 2 or out.shape[1] != x.shape[1]:
        fail(op, "out", f"{x.dtype} [*, {x.shape[1]}]", f"{out.dtype} {list(out.shape)}")
    check_dense(op, "x", x)
    check_dense(op, "out", out)
    width = accepted_nodes.shape[1]
    block = block_of(x.shape[1])
    _gather_accepted_kernel[(requests + 1, max(1, min(width, 65535)))](
        as_bits(op, "x", x), cu_nodes, accepted_nodes, num_emitted, as_bits(op, "out", out), cu_out,
        x.stride(0), out.stride(0), x.shape[1], x.shape[0], requests, width, out.shape[0],
        BLOCK=block, num_warps=4 if block > 128 else 1, enable_fp_fusion=False,
    )  # fmt: skip


def impl_prepare_next(
    output_token_ids, num_emitted, context_lens, page_table, page_size, position_offset,
    root_token_ids, token_ids, positions, slots, cu_tokens,
):  # fmt: skip
    """`specdec_triton::prepare_next`."""
    op, requests, total = "prepare_next", num_emitted.numel(), token_ids.numel()
    check(op, "num_emitted", num_emitted, (None,))
    check(op, "output_token_ids", output_token_ids, (requests, None))
    check(op, "page_table", page_table, (requests, None))
    check_range(op, "page_size", page_size, 1, 2**31 - 1)
    check_range(op, "position_offset", position_offset, 0, 2**31 - 1)
    for argument, tensor, count in (
        ("context_lens", context_lens, requests), ("root_token_ids", root_token_ids, requests),
        ("token_ids", token_ids, None), ("positions", positions, total), ("slots", slots, total),
        ("cu_tokens", cu_tokens, requests + 1),
    ):  # fmt: skip
        check(op, argument, tensor, (count,))
    _prepare_next_kernel[(requests + 1,)](
        output_token_ids, num_emitted, context_lens, page_table, root_token_ids, token_ids, positions, slots, cu_tokens,
        requests, output_token_ids.shape[1], page_table.shape[1], page_size, position_offset, total,
        BLOCK=32, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
