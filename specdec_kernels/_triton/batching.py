"""plan_buckets, pack_rows, unpack_rows and padding_stats in Triton: the same outputs as csrc/batching."""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import (
    INT32_MAX,
    as_bits,
    block_of,
    check,
    check_range,
    copy_row,
    fail,
    node_range,
    table,
    tail_begin,
)

MAX_BUCKETS = 64
COLUMNS = tl.constexpr(4)


@triton.jit
def _buckets(nodes, sizes_ptr, num_buckets):
    """The first bucket that holds each request, the last if none does."""
    bucket = tl.zeros(nodes.shape, tl.int32)
    for k in range(0, num_buckets - 1):
        bucket += (nodes > tl.load(sizes_ptr + k)).to(tl.int32)
    return bucket


@triton.jit(do_not_specialize=["requests", "num_buckets"])
def _plan_buckets_kernel(
    num_nodes_ptr, sizes_ptr, order_ptr, offsets_ptr, cu_ptr, requests, num_buckets, BLOCK: tl.constexpr
):
    """A lane a request: its place is the number of requests before it in the order (csrc/batching/batching_cuda.cu)."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, BLOCK)
    bucket = _buckets(tl.load(num_nodes_ptr + b, mask=b < requests, other=0), sizes_ptr, num_buckets)
    before = tl.zeros((BLOCK,), tl.int32)
    smaller = tl.zeros((BLOCK,), tl.int32)  # requests in buckets below number `lane`, the last lane's for all
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, requests, BLOCK):
        j = start + lanes
        nodes = tl.load(num_nodes_ptr + j, mask=j < requests, other=0)
        others = tl.where(j < requests, _buckets(nodes, sizes_ptr, num_buckets), 2 * BLOCK)[None, :]
        earlier = (others < bucket[:, None]) | ((others == bucket[:, None]) & (j[None, :] < b[:, None]))
        before += tl.sum(earlier.to(tl.int32), 1)
        smaller += tl.sum((others < lanes[:, None]).to(tl.int32), 1)
        counted = tl.where((j[None, :] < b[:, None]) & (j[None, :] < requests), tl.maximum(nodes, 0)[None, :], 0)
        total += tl.sum(counted.to(tl.int64), 1)
    tl.store(order_ptr + before, b, mask=b < requests)
    tl.store(cu_ptr + b, tl.minimum(total, INT32_MAX).to(tl.int32), mask=b <= requests)
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + lanes, smaller, mask=lanes < num_buckets)
        tl.store(offsets_ptr + num_buckets, requests)


@triton.jit(do_not_specialize=["requests", "tile_rows", "group_size"])
def _padding_stats_kernel(
    num_nodes_ptr, order_ptr, offsets_ptr, sizes_ptr, stats_ptr, requests, tile_rows, group_size, BLOCK: tl.constexpr
):
    """Grid: buckets."""
    bucket = tl.program_id(0)
    size = tl.load(sizes_ptr + bucket)
    begin, count, _ = node_range(offsets_ptr, bucket, requests)
    members = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    padded = tl.zeros((BLOCK,), tl.int64)
    tiled = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b = tl.load(order_ptr + begin + i, mask=i < count, other=-1)
        known = (b >= 0) & (b < requests)
        nodes = tl.maximum(tl.load(num_nodes_ptr + b, mask=known, other=0), 0).to(tl.int64)
        members += known.to(tl.int64)
        total += nodes
        padded += tl.where(known, tl.maximum(nodes, size), 0)
        tiled += (nodes * group_size + tile_rows - 1) // tile_rows * tile_rows
    row = stats_ptr + bucket * COLUMNS
    tl.store(row, tl.sum(members, 0))
    tl.store(row + 1, tl.sum(total, 0))
    tl.store(row + 2, tl.sum(padded, 0))
    tl.store(row + 3, tl.sum(tiled, 0))


@triton.jit(do_not_specialize=["requests", "rows", "total"])
def _pack_rows_kernel(
    x_ptr, cu_ptr, out_ptr, stride_b, stride_row, stride_out, item, requests, rows, total, BLOCK: tl.constexpr
):
    """Grid: (requests + 1, rows); the last request stands for the rows behind the batch."""
    b = tl.program_id(0)
    if b == requests:
        for row in range(tail_begin(cu_ptr, b, total) + tl.program_id(1), total.to(tl.int64), tl.num_programs(1)):
            copy_row(out_ptr + row * stride_out, x_ptr, 0, item, BLOCK)
        return
    begin, count, _ = node_range(cu_ptr, b, total)
    for i in range(tl.program_id(1), count, tl.num_programs(1)):
        source = x_ptr + b.to(tl.int64) * stride_b + tl.minimum(i, rows - 1).to(tl.int64) * stride_row
        copy_row(out_ptr + (begin + i) * stride_out, source, tl.where(i < rows, item, 0), item, BLOCK)


@triton.jit(do_not_specialize=["rows", "total"])
def _unpack_rows_kernel(x_ptr, cu_ptr, out_ptr, stride_b, stride_row, stride_x, item, rows, total, BLOCK: tl.constexpr):
    """Grid: (requests, rows)."""
    b = tl.program_id(0).to(tl.int64)
    begin, count, _ = node_range(cu_ptr, b, total)
    for i in range(tl.program_id(1), rows, tl.num_programs(1)):
        target = out_ptr + b * stride_b + (begin * 0 + i) * stride_row
        copy_row(target, x_ptr + (begin + i) * stride_x, tl.where(i < count, item, 0), item, BLOCK)


# ------------------------------------------------------------------ host
def _check_sizes(op: str, sizes: list[int]) -> None:
    check_range(op, "len(bucket_sizes)", len(sizes), 1, MAX_BUCKETS)
    for k, size in enumerate(sizes):
        if size < 1 or (k and size <= sizes[k - 1]):
            fail(op, "bucket_sizes", "rising sizes of at least 1", f"{size} at index {k}")


def impl_plan_buckets(num_nodes, bucket_sizes, order, bucket_offsets, cu_nodes):
    """`specdec_triton::plan_buckets`."""
    op, requests = "plan_buckets", num_nodes.numel()
    check(op, "num_nodes", num_nodes, (None,))
    _check_sizes(op, bucket_sizes)
    check(op, "order", order, (requests,))
    check(op, "bucket_offsets", bucket_offsets, (len(bucket_sizes) + 1,))
    check(op, "cu_nodes", cu_nodes, (requests + 1,))
    _plan_buckets_kernel[(requests // 64 + 1,)](
        num_nodes, table(tuple(bucket_sizes), num_nodes.device), order, bucket_offsets, cu_nodes, requests,
        len(bucket_sizes), BLOCK=64, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def impl_padding_stats(num_nodes, order, bucket_offsets, bucket_sizes, tile_rows, group_size, stats):
    """`specdec_triton::padding_stats`."""
    op, requests = "padding_stats", num_nodes.numel()
    check(op, "num_nodes", num_nodes, (None,))
    check(op, "order", order, (requests,))
    _check_sizes(op, bucket_sizes)
    check(op, "bucket_offsets", bucket_offsets, (len(bucket_sizes) + 1,))
    check_range(op, "tile_rows", tile_rows, 1, 1 << 20)
    check_range(op, "group_size", group_size, 1, 1 << 20)
    check(op, "stats", stats, (len(bucket_sizes), 4), torch.int64)
    _padding_stats_kernel[(len(bucket_sizes),)](
        num_nodes, order, bucket_offsets, table(tuple(bucket_sizes), num_nodes.device), stats, requests, tile_rows,
        group_size, BLOCK=128, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _item(op: str, padded: torch.Tensor, padded_name: str, packed: torch.Tensor, packed_name: str) -> int:
    """Elements of a row of `padded` [B, rows, ...] and of `packed` [total, ...], which must agree and be dense."""
    if padded.dim() < 2:
        fail(op, padded_name, "shape [B, rows, ...]", list(padded.shape))
    if packed.dtype != padded.dtype or packed.shape[1:] != padded.shape[2:]:
        fail(op, packed_name, f"{padded.dtype} [*, *{list(padded.shape[2:])}]", f"{packed.dtype} {list(packed.shape)}")
    item = 1
    for size, stride, packed_stride in zip(padded.shape[:1:-1], padded.stride()[:1:-1], packed.stride()[:0:-1]):
        if size > 1 and (stride != item or packed_stride != item):
            fail(op, padded_name, "dense items behind the row dimension", "a strided view")
        item *= size
    return item


def impl_pack_rows(x, cu, out):
    """`specdec_triton::pack_rows`."""
    op = "pack_rows"
    item = _item(op, x, "x", out, "out")
    check(op, "cu", cu, (x.shape[0] + 1,))
    if out.shape[0] == 0 or item == 0:
        return
    block = block_of(item)
    _pack_rows_kernel[(x.shape[0] + 1, max(1, min(x.shape[1], 65535)))](
        as_bits(op, "x", x), cu, as_bits(op, "out", out), x.stride(0), x.stride(1), out.stride(0), item, x.shape[0],
        x.shape[1], out.shape[0], BLOCK=block, num_warps=4 if block > 128 else 1, enable_fp_fusion=False,
    )  # fmt: skip


def impl_unpack_rows(x, cu, out):
    """`specdec_triton::unpack_rows`."""
    op = "unpack_rows"
    item = _item(op, out, "out", x, "x")
    check(op, "cu", cu, (out.shape[0] + 1,))
    if out.numel() == 0:
        return
    block = block_of(item)
    _unpack_rows_kernel[(out.shape[0], min(out.shape[1], 65535))](
        as_bits(op, "x", x), cu, as_bits(op, "out", out), out.stride(0), out.stride(1), x.stride(0), item,
        out.shape[1], x.shape[0], BLOCK=block, num_warps=4 if block > 128 else 1, enable_fp_fusion=False,
    )  # fmt: skip
