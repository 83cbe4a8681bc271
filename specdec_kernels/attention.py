"""Room 2: tree attention over a paged KV cache, and the ops that fill the cache and merge partial attention.

The tree's own keys and values are in the cache: tree slot j of request b lies at position `context_lens[b] + j`
(`slot_mapping` says where that is, `write_kv` puts it there).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_kernels import _ops
from specdec_kernels._compile import constant_result

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# (head_dim of q and k, head_dim of v) that every backend has
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


class AttentionOutput(NamedTuple):
    """`out` [N, Hq, Dv] and `lse` [N, Hq] float32: natural log of the sum of exponentials, sinks excluded."""

    out: torch.Tensor
    lse: torch.Tensor


def _index(
    op: str, argument: str, value: torch.Tensor | None, shape: tuple[int | None, ...], dtype: torch.dtype = torch.int32
) -> None:
    """An optional contiguous index tensor of `shape` (None: any size)."""
    if value is None:
        return
    _ops.expect_tensor(op, argument, value, dtype, len(shape))
    same = all(want is None or size == want for size, want in zip(value.shape, shape))
    wanted = [("*" if want is None else want) for want in shape]
    _ops.expect(op, argument, same, f"shape {wanted}", list(value.shape))
    _ops.expect(op, argument, value.is_contiguous(), "a contiguous tensor", f"strides {value.stride()}")


def _scale(op: str, argument: str, value: torch.Tensor | None, num_kv_heads: int) -> None:
    if value is None:
        return
    _ops.expect_tensor(op, argument, value, torch.float32, 1)
    ok = value.shape[0] in (1, num_kv_heads)
    _ops.expect(op, argument, ok, f"shape [1] or [{num_kv_heads}]", list(value.shape))


def _dense(op: str, argument: str, value: torch.Tensor) -> None:
    ok = value.numel() == 0 or value.shape[-1] == 1 or value.stride(-1) == 1
    _ops.expect(op, argument, ok, "a dense last dimension (stride 1)", f"strides {value.stride()}")


def _caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, kv_layout: str) -> int:
    """Check a pair of paged caches meeting activations of `dtype`; returns the number of KV heads."""
    _ops.expect(op, "kv_layout", kv_layout in ("NHD", "HND"), "'NHD' or 'HND'", repr(kv_layout))
    _ops.expect_tensor(op, "k_cache", k_cache, (dtype, *FLOAT8), 4)
    _ops.expect_tensor(op, "v_cache", v_cache, k_cache.dtype, 4)
    ok = v_cache.shape[:3] == k_cache.shape[:3]
    _ops.expect(op, "v_cache", ok, f"pages, rows and heads of k_cache {list(k_cache.shape[:3])}", list(v_cache.shape))
    _dense(op, "k_cache", k_cache)
    _dense(op, "v_cache", v_cache)
    return k_cache.shape[2] if kv_layout == "NHD" else k_cache.shape[1]


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_nodes: torch.Tensor,
    tree_mask: torch.Tensor | None,
    *,
    max_nodes: int,
    softmax_scale: float | None = None,
    query_start: torch.Tensor | None = None,
    causal: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    request_order: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | AttentionOutput:
    """Attention of packed tree nodes over their request's context and over the tree slots their mask row names.

    Row `cu_nodes[b] + i` is tree slot `query_start[b] + i` of request b and attends positions 0..L-1 (L =
    `context_lens[b]`) and exactly the slots whose bit is set in its mask row; the diagonal is not forced. A row that
    sees nothing gives 0 and lse -inf; so do rows behind `cu_nodes[B]`. Rows of requests outside `request_order` are
    left as they are in `out` (0 and -inf in a fresh one).

    Args:
      q: [N, Hq, D] float32, bfloat16 or float16; strides free but for the last dimension.
      k_cache, v_cache: [num_pages, page_size, Hkv, D] and [.., Dv] ("NHD") or [num_pages, Hkv, page_size, D] ("HND"),
        in q's dtype or float8_e4m3fn / float8_e5m2. (D, Dv): (64, 64), (80, 80), (96, 96), (128, 128), (192, 128),
        (256, 256); on the CPU every pair of multiples of 16 up to 256. Hq is a multiple of Hkv; any page size.
      page_table: [B, max_pages] int32: page of each `page_size` positions. Entries behind a request's last page may
        hold anything; a needed entry that is no page hides its keys.
      context_lens: [B] int32, committed KV rows, the tree excluded.
      cu_nodes: [B + 1] int32, exclusive prefix sum of the requests' query counts (0 allowed).
      tree_mask: [N, W] int32 words, least significant bit first: bit j of a row = may attend slot j of its own request.
        Bits behind the last slot (`query_start[b] + N_b`) are ignored. None: causal chain.
      max_nodes: upper bound of one request's query count; at most 32 W unless `causal` is given.
      softmax_scale: D ** -0.5 when None.
      query_start: [B] int32, tree slot of each request's first query (None: 0).
      causal: [B] bool: True ignores the mask rows of that request; its queries may outnumber 32 W (prefill chunks).
      positions: [N] int32, `context_lens + depth`; needed with `window` and a mask.
      softcap: scores become softcap * tanh(score / softcap) before masking; 0: off.
      window: a key is visible iff position_q - position_k < window (the key itself counts); by depth; -1: off.
      sinks: [Hq] float32: one more logit a head, of value 0. Not part of `lse`.
      k_scale, v_scale: float32 [1] or [Hkv]: factors of the stored keys and values.
      request_order: int32: handle only these requests, in this order.
      plan: of `plan_tree_attention`, made this step from the same `context_lens`, `cu_nodes` and `request_order`;
        shared by all layers of one shape. None: the GPU kernel plans for itself. The CPU op does not use it.
      workspace: `workspace_size("tree_attention", ...)` zero bytes, left zero; None: allocated here where it is needed.
        The CPU op needs none.
      num_splits: KV chunks a request and head; 0: chosen from the shapes.
      batch_invariant: fixed chunks and order of summation: a row's bits do not depend on what else is in the batch.
      out: [N, Hq, Dv] of q's dtype to write to.

    Returns:
      `out` [N, Hq, Dv], or `AttentionOutput(out, lse)` with `return_lse=True`.

    Raises:
      TypeError, ValueError: `tree_attention: argument: expected X, got Y`, before anything is written.
      NotImplementedError: head dims outside the list (latent attention, 576/512, is not built).

    Source: online softmax over KV tiles (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022), split over the
    KV length with a merge by lse (flash-decoding, 2023), tree masks after SpecInfer (Miao et al., 2024).
    """
    op = "tree_attention"
    _ops.expect_tensor(op, "q", q, FLOATS, 3)
    num_kv_heads = _caches(op, k_cache, v_cache, q.dtype, kv_layout)
    num_rows, num_q_heads, head_dim = q.shape
    _ops.expect(op, "k_cache", k_cache.shape[3] == head_dim, f"head_dim {head_dim} of q", list(k_cache.shape))
    dims = (head_dim, v_cache.shape[3])
    wide = q.device.type == "cpu" and all(dim % 16 == 0 and 16 <= dim <= 256 for dim in dims)
    if dims not in HEAD_DIMS and not wide:
        latent = " (latent attention, MLA, is not built)" if dims == (576, 512) else ""
        supported = f"{list(HEAD_DIMS)} (on cpu also multiples of 16 up to 256)"
        raise NotImplementedError(f"{op}: q: expected (head_dim, v head_dim) in {supported}, got {dims}{latent}")
    ok = num_kv_heads > 0 and num_q_heads % num_kv_heads == 0
    _ops.expect(op, "q", ok, f"a multiple of {num_kv_heads} query heads", num_q_heads)
    _dense(op, "q", q)
    _ops.expect_tensor(op, "context_lens", context_lens, torch.int32, 1)
    batch = context_lens.shape[0]
    _index(op, "context_lens", context_lens, (batch,))
    _index(op, "cu_nodes", cu_nodes, (batch + 1,))
    _index(op, "page_table", page_table, (batch, None))
    _index(op, "tree_mask", tree_mask, (num_rows, None))
    _index(op, "query_start", query_start, (batch,))
    _index(op, "causal", causal, (batch,), torch.bool)
    _index(op, "positions", positions, (num_rows,))
    _index(op, "request_order", request_order, (None,))
    _index(op, "sinks", sinks, (num_q_heads,), torch.float32)
    _scale(op, "k_scale", k_scale, num_kv_heads)
    _scale(op, "v_scale", v_scale, num_kv_heads)
    _ops.expect_int(op, "max_nodes", max_nodes, 0, "a bound >= 0")
    _ops.expect(op, "softcap", softcap >= 0.0, "a cap > 0, or 0 for none", softcap)
    _ops.expect_int(op, "window", window, -1, "a length, or -1 for none")
    _ops.expect_int(op, "num_splits", num_splits, 0, "a count >= 0")
    if tree_mask is not None:
        if causal is None:
            words = tree_mask.shape[1]
            _ops.expect(op, "tree_mask", 32 * words >= max_nodes, f"words for max_nodes {max_nodes}", f"{words} a row")
        if window >= 0:
            _ops.expect(op, "positions", positions is not None, "a tensor (a window over a tree needs depths)", None)
            unknown = "None with a window over a tree (earlier slots have no depth here)"
            _ops.expect(op, "query_start", query_start is None, unknown, "a tensor")
    if plan is not None:
        order = batch if request_order is None else request_order.shape[0]
        _index(op, "plan", plan, (_plan_fields(order),))
    shape = (num_rows, num_q_heads, dims[1])
    if out is None:
        out = q.new_zeros(shape) if request_order is not None else q.new_empty(shape)
    else:
        _ops.expect_tensor(op, "out", out, q.dtype, 3)
        _ops.expect(op, "out", tuple(out.shape) == shape, f"shape {list(shape)}", list(out.shape))
        _dense(op, "out", out)
    native_cpu = q.device.type == "cpu" and backend in (None, "native")
    if workspace is None and not native_cpu and num_splits != 1 and not batch_invariant:
        bytes_needed = _workspace_bytes(
            batch=batch, max_nodes=max_nodes, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            v_dim=dims[1], num_splits=num_splits,
        )  # fmt: skip
        workspace = q.new_zeros(bytes_needed, dtype=torch.uint8)
    lse = None
    if return_lse:
        lse = q.new_full((num_rows, num_q_heads), float("-inf"), dtype=torch.float32)
    _ops.call(
        op, backend, q.device, q, k_cache, v_cache, page_table, context_lens, cu_nodes, tree_mask, query_start, causal,
        positions, request_order, sinks, k_scale, v_scale, plan, max_nodes,
        head_dim**-0.5 if softmax_scale is None else float(softmax_scale), float(softcap), window, kv_layout,
        num_splits, batch_invariant, workspace, out, lse,
    )  # fmt: skip
    return out if lse is None else AttentionOutput(out, lse)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    kv_layout: str = "NHD", k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:  # fmt: skip
    """Store row n of k and v at cache slot `slot_mapping[n]` = page * page_size + row. Mutates both caches.

    Args:
      k, v: [N, Hkv, D] and [N, Hkv, Dv] float32, bfloat16 or float16; strides free but for the last dimension.
      k_cache, v_cache: as in `tree_attention`; a float8 cache stores value / scale, rounded to nearest even and
        saturated at the largest finite value (448 for e4m3, 57344 for e5m2); NaN stays NaN.
      slot_mapping: [N] int32. A slot < 0 or behind the cache writes nothing; no slot may appear twice.
      k_scale, v_scale: float32 [1] or [Hkv]; None: 1.

    Raises:
      TypeError, ValueError: `write_kv: argument: expected X, got Y`, before anything is written.
    """
    op = "write_kv"
    _ops.expect_tensor(op, "k", k, FLOATS, 3)
    _ops.expect_tensor(op, "v", v, k.dtype, 3)
    num_kv_heads = _caches(op, k_cache, v_cache, k.dtype, kv_layout)
    num_rows = k.shape[0]
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = [num_rows, num_kv_heads, cache.shape[3]]
        _ops.expect(op, name, list(rows.shape) == wanted, f"shape {wanted}", list(rows.shape))
        _dense(op, name, rows)
    _index(op, "slot_mapping", slot_mapping, (num_rows,))
    _scale(op, "k_scale", k_scale, num_kv_heads)
    _scale(op, "v_scale", v_scale, num_kv_heads)
    _ops.call(op, backend, k.device, k, v, slot_mapping, k_scale, v_scale, kv_layout, k_cache, v_cache)


def slot_mapping(
    page_table: torch.Tensor, context_lens: torch.Tensor, cu_nodes: torch.Tensor, page_size: int, *, total_nodes: int,
    backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Cache slot of every tree node: node i of request b goes to position `context_lens[b] + i`.

    Args:
      page_table: [B, max_pages] int32; context_lens: [B] int32; cu_nodes: [B + 1] int32.
      page_size: rows a page.
      total_nodes: upper bound of `cu_nodes[B]`.

    Returns:
      [total_nodes] int32: page * page_size + row; -1 where the table has no page for the position (behind its last
      column, or a negative entry) and behind `cu_nodes[B]`.
    """
    op = "slot_mapping"
    _ops.expect_tensor(op, "context_lens", context_lens, torch.int32, 1)
    batch = context_lens.shape[0]
    _index(op, "context_lens", context_lens, (batch,))
    _index(op, "page_table", page_table, (batch, None))
    _index(op, "cu_nodes", cu_nodes, (batch + 1,))
    _ops.expect_int(op, "page_size", page_size, 1, "at least 1")
    _ops.expect_int(op, "total_nodes", total_nodes, 0, "a bound >= 0")
    slots = page_table.new_empty(total_nodes)
    _ops.call(op, backend, page_table.device, page_table, context_lens, cu_nodes, page_size, slots)
    return slots


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    backend: str | None = None,
) -> AttentionOutput:
    """Attention over the union of two disjoint key sets from the results over each.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b) [+ exp(sink)]), lse = log(exp(lse_a) +
    exp(lse_b)). Both empty (-inf): 0 and -inf. Give `sinks` once, in the last merge, and to none of the parts.

    Args:
      out_a, out_b: [N, H, D] float32, bfloat16 or float16; lse_a, lse_b: [N, H] float32, natural log.
      sinks: [H] float32 or None.

    Returns:
      AttentionOutput(out [N, H, D] of out_a's dtype, lse [N, H]); `lse` excludes the sinks.
    """
    op = "merge_attention"
    _ops.expect_tensor(op, "out_a", out_a, FLOATS, 3)
    _ops.expect_tensor(op, "out_b", out_b, out_a.dtype, 3)
    _ops.expect(op, "out_b", out_b.shape == out_a.shape, f"shape {list(out_a.shape)}", list(out_b.shape))
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        _ops.expect_tensor(op, name, value, torch.float32, 2)
        wanted = list(out_a.shape[:2])
        _ops.expect(op, name, list(value.shape) == wanted, f"shape {wanted}", list(value.shape))
        _dense(op, name, value)
    _dense(op, "out_a", out_a)
    _dense(op, "out_b", out_b)
    _index(op, "sinks", sinks, (out_a.shape[1],), torch.float32)
    out = out_a.new_empty(out_a.shape)
    lse = lse_a.new_empty(lse_a.shape)
    _ops.call(op, backend, out_a.device, out_a, lse_a, out_b, lse_b, sinks, out, lse)
    return AttentionOutput(out, lse)


def _plan_fields(num_order: int) -> int:
    """int32 fields of a plan: header, first unit of each request and one more, units of each request's items."""
    return 8 + 2 * num_order + 1


@constant_result
def _multiprocessors() -> int:
    """Of the current GPU; without one, of the CUDA-on-CPU runtime."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4


def _workspace_bytes(
    *, batch: int, max_nodes: int, num_q_heads: int, num_kv_heads: int, head_dim: int,
    v_dim: int | None = None, num_splits: int = 0, num_workers: int = 0,
) -> int:  # fmt: skip
    """Two partial results (outputs, maxima, sums of a row tile) and a counter for each worker, and a plan."""
    rows = max_nodes * (num_q_heads // max(num_kv_heads, 1))
    widths = [16, 32, 64, 128] if head_dim in (64, 128) else [64]
    tile = next((width for width in widths if rows <= width), widths[-1])
    items = batch * num_kv_heads * -(-rows // tile)
    workers = max(num_workers or 2 * _multiprocessors(), items * num_splits)
    return 512 + 4 * _plan_fields(batch) + workers * (4 + 8 * tile * ((v_dim or head_dim) + 2))


_ops.register_workspace("tree_attention", _workspace_bytes)


def plan_tree_attention(
    context_lens: torch.Tensor, cu_nodes: torch.Tensor, *, num_q_heads: int, num_kv_heads: int, head_dim: int,
    max_nodes: int, window: int = -1, request_order: torch.Tensor | None = None, num_workers: int = 0,
    batch_invariant: bool = False, out: torch.Tensor | None = None, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """How one step's attention is spread over the GPU: made on the device, once for all layers of one shape.

    The batch's key tiles lie on one line, which is cut into equal shares, one a thread block that stays; an item (row
    tile of a head of a request) that a cut falls into is split along its keys. Nothing is read on the host, so the call
    is captured in a graph and follows the lengths of each replay. A plan made from other lengths costs balance only;
    one made from other `cu_nodes`, heads or `max_nodes` does not fit.

    Args:
      context_lens: [B] int32; cu_nodes: [B + 1] int32; request_order: int32 or None: as in `tree_attention`.
      num_q_heads, num_kv_heads, head_dim, max_nodes, window: of the calls that will use the plan.
      num_workers: thread blocks; 0: two a multiprocessor. `workspace_size` takes the same number.
      batch_invariant: for calls with `batch_invariant=True`: items are not split.
      out: [9 + 2 n] int32 to write to, n the length of `request_order` or B.

    Returns:
      plan [9 + 2 n] int32, in a layout of its own (csrc/attention/plan.h).

    Raises:
      TypeError, ValueError: `plan_tree_attention: argument: expected X, got Y`, before anything is written.

    Source: the tile scheduler of FlashMLA (2025), as one prefix sum.
    """
    op = "plan_tree_attention"
    _ops.expect_tensor(op, "context_lens", context_lens, torch.int32, 1)
    batch = context_lens.shape[0]
    _index(op, "context_lens", context_lens, (batch,))
    _index(op, "cu_nodes", cu_nodes, (batch + 1,))
    _index(op, "request_order", request_order, (None,))
    _ops.expect_int(op, "num_kv_heads", num_kv_heads, 1, "at least 1")
    _ops.expect_int(op, "num_q_heads", num_q_heads, 1, f"a multiple of {num_kv_heads} KV heads")
    _ops.expect(
        op, "num_q_heads", num_q_heads % num_kv_heads == 0, f"a multiple of {num_kv_heads} KV heads", num_q_heads
    )
    dims = sorted({head for head, _ in HEAD_DIMS})
    _ops.expect(op, "head_dim", head_dim in dims, f"one of {dims}", head_dim)
    _ops.expect_int(op, "max_nodes", max_nodes, 0, "a bound >= 0")
    _ops.expect_int(op, "window", window, -1, "a length, or -1 for none")
    _ops.expect_int(op, "num_workers", num_workers, 0, "a count >= 0")
    fields = _plan_fields(batch if request_order is None else request_order.shape[0])
    if out is None:
        out = context_lens.new_empty(fields)
    _index(op, "out", out, (fields,))
    _ops.call(
        op, backend, context_lens.device, context_lens, cu_nodes, request_order, num_q_heads, num_kv_heads, head_dim,
        max_nodes, window, num_workers, batch_invariant, out,
    )  # fmt: skip
    return out
