"""Paged KV caches after a step: commit the accepted path, advance the lengths, copy pages. See docs/kv.md.

A cache is [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or [num_pages, num_kv_heads, page_size, head_dim]
("HND"), of any dtype and any strides with a dense last dimension, optionally with a layer dimension in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from specdec_kernels import _ops

__all__ = ["KVHandle", "advance", "commit_kv", "copy_pages", "kv_handle"]

LAYOUTS = ("NHD", "HND")


class KVHandle(NamedTuple):
    """The caches of one KV group (layers that share a page table), checked once by `kv_handle`."""

    k_caches: tuple[Tensor, ...]
    v_caches: tuple[Tensor, ...]
    page_size: int
    kv_layout: str


Caches: TypeAlias = "Tensor | Sequence[Tensor]"


def _listed(op: str, argument: str, caches: Caches) -> tuple[Tensor, ...]:
    listed = (caches,) if isinstance(caches, torch.Tensor) else tuple(caches)
    for cache in listed:
        if not isinstance(cache, torch.Tensor):
            raise TypeError(f"{op}: {argument}: expected a tensor or a list of tensors, got {type(cache).__name__}")
        _ops.expect(
            op, argument, cache.dim() in (4, 5), "4 dimensions (5 with layers in front)", f"shape {list(cache.shape)}"
        )
    _ops.expect(op, argument, len(listed) > 0, "at least one cache", "none")
    return listed


def _page_size(op: str, caches: tuple[Tensor, ...], kv_layout: str) -> int:
    _ops.expect(op, "kv_layout", kv_layout in LAYOUTS, f"one of {LAYOUTS}", repr(kv_layout))
    return int(caches[0].shape[-3 if kv_layout == "NHD" else -2])


def kv_handle(k_caches: Caches, v_caches: Caches, *, kv_layout: str = "NHD") -> KVHandle:
    """Bundle the K and V caches of one KV group, checked once, so that a step does not look at every layer again.

    k_caches, v_caches: a tensor [L, ...] with all layers, or a list of one tensor a layer; every cache has the same
    pages and page size. Make it outside CUDA graph capture. Pass it to `commit_kv` and `copy_pages` in place of
    k_caches, with v_caches=None.
    """
    op = "kv_handle"
    keys, values = _listed(op, "k_caches", k_caches), _listed(op, "v_caches", v_caches)
    page_size = _page_size(op, keys, kv_layout)
    page_axis = -3 if kv_layout == "NHD" else -2
    wanted = (keys[0].shape[-4], page_size)
    for argument, caches in (("k_caches", keys), ("v_caches", values)):
        for cache in caches:
            got = (cache.shape[-4], cache.shape[page_axis])
            _ops.expect(op, argument, got == wanted, f"{wanted[0]} pages of {wanted[1]} rows", f"{got[0]} of {got[1]}")
            dense = cache.shape[-1] <= 1 or cache.stride(-1) == 1
            _ops.expect(op, argument, dense, "a dense last dimension", f"strides {cache.stride()}")
            _ops.expect(op, argument, cache.device == keys[0].device, f"device {keys[0].device}", cache.device)
    return KVHandle(keys, values, page_size, kv_layout)


def _group(op: str, k_caches: Caches | KVHandle, v_caches: Caches | None, kv_layout: str | None) -> KVHandle:
    if isinstance(k_caches, KVHandle):
        _ops.expect(op, "v_caches", v_caches is None, "None beside a handle", type(v_caches).__name__)
        own = k_caches.kv_layout
        _ops.expect(op, "kv_layout", kv_layout in (None, own), f"the handle's {own!r}, or None", repr(kv_layout))
        return k_caches
    kv_layout = "NHD" if kv_layout is None else kv_layout
    if v_caches is None:
        raise TypeError(f"{op}: v_caches: expected a tensor or a list of tensors, got None (only a handle has both)")
    keys = _listed(op, "k_caches", k_caches)
    return KVHandle(keys, _listed(op, "v_caches", v_caches), _page_size(op, keys, kv_layout), kv_layout)


def commit_kv(
    k_caches: Caches | KVHandle,
    v_caches: Caches | None,
    page_table: Tensor,
    context_lens: Tensor,
    cu_nodes: Tensor,
    accepted_nodes: Tensor,
    num_emitted: Tensor,
    *,
    kv_layout: str | None = None,
    page_size: int | None = None,
    request_order: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Move the KV of each request's accepted nodes to positions L, L + 1, ... in every layer, as if simultaneously.

    k_caches*, v_caches*: the caches (see the module) or a `kv_handle` and None. kv_layout: "NHD" (None) or "HND"; a
    handle has its own. page_table: int32 [B, max_pages].
    context_lens: int32 [B], L before `advance`; node j's KV lies at position L + j. cu_nodes: int32 [B + 1].
    accepted_nodes: int32 [B, W], local, root first, -1 behind the path, num_emitted: int32 [B], how many of them
    count (as `verify` or `truncate` return them). page_size: checked against the caches if given. request_order:
    int32 [n], handle only these requests; entries outside 0..B-1 are skipped.

    A path that is already dense (0, 1, 2, ...) moves nothing. Entries behind one that is out of range or does not
    rise are ignored, rows without a valid page are neither read nor written. Call it before `advance`.
    """
    op = "commit_kv"
    group = _group(op, k_caches, v_caches, kv_layout)
    _ops.expect(op, "page_size", page_size in (None, group.page_size), f"the caches' {group.page_size}", page_size)
    _ops.expect_tensor(op, "page_table", page_table, torch.int32, 2)
    _ops.expect_tensor(op, "accepted_nodes", accepted_nodes, torch.int32, 2)
    for argument, value in (("context_lens", context_lens), ("cu_nodes", cu_nodes), ("num_emitted", num_emitted)):
        _ops.expect_tensor(op, argument, value, torch.int32, 1)
    if request_order is not None:
        _ops.expect_tensor(op, "request_order", request_order, torch.int32, 1)
    _ops.call(
        op, backend, page_table.device, page_table, context_lens, cu_nodes, accepted_nodes, num_emitted,
        request_order, group.kv_layout, group.k_caches, group.v_caches,
    )  # fmt: skip


def advance(context_lens: Tensor, num_emitted: Tensor, *, backend: str | None = None) -> None:
    """context_lens* += num_emitted, both int32 [B]: the root and the accepted drafts are now in the cache.

    The last emitted token is the next root, whose KV is not. Negative counts add nothing.
    """
    _ops.expect_tensor("advance", "context_lens", context_lens, torch.int32, 1)
    _ops.expect_tensor("advance", "num_emitted", num_emitted, torch.int32, 1)
    _ops.call("advance", backend, context_lens.device, num_emitted, context_lens)


def copy_pages(
    k_caches: Caches | KVHandle,
    v_caches: Caches | None,
    src: Tensor,
    dst: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy whole pages src[i] -> dst[i] in every layer (copy-on-write of shared prefixes).

    k_caches*, v_caches*: as for `commit_kv`, either layout. src, dst: int32 [n]; a pair with an id outside the cache
    (such as -1) is skipped. Pairs run at once: no page may be a destination twice, or a source and a destination;
    SPECDEC_CHECK=1 raises ValueError if one is.
    """
    op = "copy_pages"
    group = _group(op, k_caches, v_caches, None)
    _ops.expect_tensor(op, "src", src, torch.int32, 1)
    _ops.expect_tensor(op, "dst", dst, torch.int32, 1)
    if _ops.checking() and src.device.type != "meta":
        pairs = [(a, b) for a, b in zip(src.tolist(), dst.tolist()) if a >= 0 and b >= 0 and a != b]
        targets = [b for _, b in pairs]
        distinct = len(set(targets)) == len(targets) and not {a for a, _ in pairs} & set(targets)
        _ops.expect(op, "dst", distinct, "distinct pages that are no sources", pairs)
    _ops.call(op, backend, src.device, src, dst, group.k_caches, group.v_caches)
