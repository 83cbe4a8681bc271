"""Batches without padding: buckets as slices of an order, packing, and what padding costs. See docs/batching.md."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._batch_cost import BatchCostModel, SplitDecision, StepSample
from specdec_kernels._graph_buckets import GraphBuckets

__all__ = [
    "BatchCostModel",
    "BucketPlan",
    "GraphBuckets",
    "PaddingStats",
    "SplitDecision",
    "StepSample",
    "pack_rows",
    "padding_stats",
    "plan_buckets",
    "unpack_rows",
]

MAX_BUCKETS = 64


class BucketPlan(NamedTuple):
    """Requests sorted into buckets; nothing is gathered, a bucket is a slice of `order`.

    order: int32 [B], a permutation, in batch order within a bucket; bucket k is
    order[bucket_offsets[k]:bucket_offsets[k + 1]]. bucket_offsets: int32 [K + 1]. cu_nodes: int32 [B + 1] in batch
    order. num_nodes: int32 [B], the input. bucket_sizes: K rising sizes.
    """

    order: Tensor
    bucket_offsets: Tensor
    cu_nodes: Tensor
    num_nodes: Tensor
    bucket_sizes: tuple[int, ...]

    def bucket(self, k: int) -> Tensor:
        """Bucket k as a `request_order` of fixed size [B], -1 behind its members: no device value is read."""
        last = len(self.bucket_sizes) - 1
        _ops.expect_int("BucketPlan.bucket", "k", k, 0, f"a bucket in [0, {last}]", last)
        place = torch.arange(self.order.shape[0], dtype=torch.int64, device=self.order.device)
        place = place + self.bucket_offsets[k]
        members = self.order[place.clamp(max=max(0, self.order.shape[0] - 1))] if place.numel() else self.order
        return torch.where(place < self.bucket_offsets[k + 1], members, -1)


class PaddingStats(NamedTuple):
    """Per bucket, int64 [K] on the device: what a step computes under each way of executing it.

    requests, nodes: real ones; bucketed: node slots if every request is padded to its bucket's size; padded: node
    slots if every request is padded to the largest bucket; tile_rows: rows of (node, query head of the group) that
    ragged execution computes for one KV head, tiles rounded up; useful_rows: those that belong to a node.
    """

    requests: Tensor
    nodes: Tensor
    bucketed: Tensor
    padded: Tensor
    tile_rows: Tensor
    useful_rows: Tensor


def _sizes(op: str, bucket_sizes: Sequence[int]) -> list[int]:
    sizes = [int(size) for size in bucket_sizes]
    _ops.expect(op, "bucket_sizes", 1 <= len(sizes) <= MAX_BUCKETS, f"1 to {MAX_BUCKETS} sizes", len(sizes))
    rising = sizes[0] >= 1 and all(a < b for a, b in itertools.pairwise(sizes))
    _ops.expect(op, "bucket_sizes", rising, "rising sizes of at least 1", sizes)
    return sizes


def plan_buckets(num_nodes: Tensor, bucket_sizes: Sequence[int], *, backend: str | None = None) -> BucketPlan:
    """Sort requests into buckets of similar tree size, on the device.

    num_nodes: int32 [B], nodes of each request (negative counts as 0). bucket_sizes: 1 to 64 rising host integers; a
    request goes into the first bucket that holds it, an oversized one into the last. The sort is stable.
    """
    op = "plan_buckets"
    _ops.expect_tensor(op, "num_nodes", num_nodes, torch.int32, 1)
    sizes = _sizes(op, bucket_sizes)
    requests, device = num_nodes.shape[0], num_nodes.device
    order = torch.empty(requests, dtype=torch.int32, device=device)
    bucket_offsets = torch.empty(len(sizes) + 1, dtype=torch.int32, device=device)
    cu_nodes = torch.empty(requests + 1, dtype=torch.int32, device=device)
    _ops.call(op, backend, device, num_nodes, sizes, order, bucket_offsets, cu_nodes)
    return BucketPlan(order, bucket_offsets, cu_nodes, num_nodes, tuple(sizes))


def _expect_rows(op: str, x: Tensor, ndim: int, cu: Tensor) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() < ndim:
        shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{op}: x: expected a tensor of at least {ndim} dimensions, got {shape}")
    _ops.expect_tensor(op, "cu", cu, torch.int32, 1)


def pack_rows(x: Tensor, cu: Tensor, *, total: int, backend: str | None = None) -> Tensor:
    """Drop the padding: x [B, rows, ...] -> [total, ...], the first cu[b + 1] - cu[b] rows of each request.

    cu: int32 [B + 1]; total: host upper bound of cu[B]. Rows behind cu[B], or beyond a request's x rows, are 0. Any
    dtype; the dimensions behind the rows are dense.
    """
    op = "pack_rows"
    _expect_rows(op, x, 2, cu)
    _ops.expect_int(op, "total", total, 0, "a value of at least 0")
    out = torch.empty(total, *x.shape[2:], dtype=x.dtype, device=x.device)
    _ops.call(op, backend, x.device, x, cu, out)
    return out


def unpack_rows(x: Tensor, cu: Tensor, *, max_rows: int, backend: str | None = None) -> Tensor:
    """Pad again: x [total, ...] -> [B, max_rows, ...], zeros behind each request's rows (rows beyond max_rows are cut).

    cu: int32 [B + 1]. Any dtype; the dimensions behind the rows are dense.
    """
    op = "unpack_rows"
    _expect_rows(op, x, 1, cu)
    _ops.expect_int(op, "max_rows", max_rows, 0, "a value of at least 0")
    _ops.expect(op, "cu", cu.shape[0] >= 1, "shape [B + 1]", list(cu.shape))
    out = torch.empty(cu.shape[0] - 1, max_rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    _ops.call(op, backend, x.device, x, cu, out)
    return out


def padding_stats(
    plan: BucketPlan, *, tile_rows: int = 16, group_size: int = 1, backend: str | None = None
) -> PaddingStats:
    """Count what padded, bucketed and ragged execution of `plan` compute, on the device.

    tile_rows: query rows of a kernel's tile; group_size: query heads per KV head (they share a tile).
    """
    op = "padding_stats"
    sizes = list(plan.bucket_sizes)
    stats = torch.empty(len(sizes), 4, dtype=torch.int64, device=plan.order.device)
    _ops.call(
        op, backend, stats.device, plan.num_nodes, plan.order, plan.bucket_offsets, sizes, tile_rows, group_size, stats
    )
    requests, nodes, bucketed, tiled = stats.unbind(1)
    return PaddingStats(requests, nodes, bucketed, requests * sizes[-1], tiled, nodes * group_size)
