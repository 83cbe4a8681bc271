"""write_kv and slot_mapping in Triton: the same bytes as csrc/attention/write_kv.h.

float8 is made by integer arithmetic on the float's bits (csrc/common/numerics.h), because not every GPU that runs the
kernel can convert to it. KIND names what is stored: "bits" copies the elements as they are.
"""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import INT32_MAX, as_bits, block_of, cache_slot, check, check_dense, check_range, fail


@triton.jit
def _float8_bits(x, FRACTION: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, STEP: tl.constexpr,
                 REBIAS: tl.constexpr, TOP: tl.constexpr, NAN: tl.constexpr):  # fmt: skip
    """to_float8_*: rounded to nearest even, saturated, NaN kept; below the least normal an addition rounds."""
    bits = x.to(tl.uint32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    shift: tl.constexpr = 23 - FRACTION
    rounded = rest + REBIAS + ((1 << (shift - 1)) - 1) + ((rest >> shift) & 1)
    small = (rest.to(tl.float32, bitcast=True) + STEP).to(tl.uint32, bitcast=True)
    step = tl.full(x.shape, STEP, tl.float32).to(tl.uint32, bitcast=True)
    result = tl.where(rest < LEAST, small - step, rounded >> shift)
    result = tl.where(rest > LARGEST, TOP, result)
    result = tl.where(rest > 0x7F800000, NAN, result)
    return (sign | result).to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def _stored_bits(x, KIND: tl.constexpr):
    """A float32 as the cache's integers."""
    if KIND == "float8_e4m3fn":
        return _float8_bits(x, 3, 0x43E00000, 0x3C800000, 16384.0, 0xC4000000, 0x7E, 0x7F)
    elif KIND == "float8_e5m2":
        return _float8_bits(x, 2, 0x47600000, 0x38800000, 128.0, 0xC8000000, 0x7B, 0x7F)
    elif KIND == "float16":
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    elif KIND == "bfloat16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def _write_row(
    x_ptr, cache_ptr, scale_ptr, n, page, row, heads, dim, stride_n, stride_h, stride_page, stride_row, stride_head,
    scale_stride, KIND: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, heads * dim, BLOCK):
        i = start + tl.arange(0, BLOCK)
        head = (i // dim).to(tl.int64)
        d = i % dim
        x = tl.load(x_ptr + n * stride_n + head * stride_h + d, mask=i < heads * dim)
        if KIND != "bits":
            value = x.to(tl.float32)
            if SCALED:
                scale = tl.load(scale_ptr + head * scale_stride, mask=i < heads * dim, other=1.0)
                value = tl.div_rn(value, scale)
            x = _stored_bits(value, KIND)
        tl.store(cache_ptr + page * stride_page + row * stride_row + head * stride_head + d, x, mask=i < heads * dim)


@triton.jit(do_not_specialize=["num_slots", "page_size"])
def _write_kv_kernel(
    k_ptr, v_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, k_cache_ptr, v_cache_ptr, num_slots, page_size, heads,
    k_dim, k_stride_n, k_stride_h, k_stride_page, k_stride_row, k_stride_head, k_scale_stride,
    v_dim, v_stride_n, v_stride_h, v_stride_page, v_stride_row, v_stride_head, v_scale_stride,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, 2)."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page = slot // page_size
    row = slot % page_size
    if tl.program_id(1) == 0:
        _write_row(k_ptr, k_cache_ptr, k_scale_ptr, n, page, row, heads, k_dim, k_stride_n, k_stride_h, k_stride_page,
                   k_stride_row, k_stride_head, k_scale_stride, K_KIND, K_SCALED, BLOCK)  # fmt: skip
    else:
        _write_row(v_ptr, v_cache_ptr, v_scale_ptr, n, page, row, heads, v_dim, v_stride_n, v_stride_h, v_stride_page,
                   v_stride_row, v_stride_head, v_scale_stride, V_KIND, V_SCALED, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=["requests", "max_pages", "page_size", "total"])
def _slot_mapping_kernel(
    page_table_ptr, context_lens_ptr, cu_ptr, slots_ptr, requests, max_pages, page_size, total, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.full((BLOCK,), -1, tl.int32)  # the last request that begins at or before the row, by bisection
    above = tl.zeros((BLOCK,), tl.int32) + requests
    width = requests + 1
    while width > 1:
        middle = b + (above - b) // 2
        searching = above - b > 1
        before = tl.load(cu_ptr + middle, mask=searching, other=0) <= n
        b = tl.where(searching & before, middle, b)
        above = tl.where(searching & (before == 0), middle, above)
        width = (width + 1) // 2
    known = b >= 0
    begin = tl.load(cu_ptr + b, mask=known, other=0)
    end = tl.load(cu_ptr + b + 1, mask=known, other=0)
    length = tl.load(context_lens_ptr + b, mask=known, other=-1).to(tl.int64)
    known = known & (n < end) & (length >= 0) & (n < total)
    pages = page_table_ptr + tl.where(known, b, 0).to(tl.int64) * max_pages
    slot = cache_slot(pages, max_pages, page_size, INT32_MAX, length + (n - begin), known)
    tl.store(slots_ptr + n, slot.to(tl.int32), mask=n < total)


def _kind(x: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> str:
    return "bits" if x.dtype == cache.dtype and scale is None else str(cache.dtype).removeprefix("torch.")


def impl_write_kv(k, v, slot_mapping, k_scale, v_scale, kv_layout, k_cache, v_cache):
    """`specdec_triton::write_kv`."""
    op = "write_kv"
    if kv_layout not in ("NHD", "HND"):
        fail(op, "kv_layout", "'NHD' or 'HND'", repr(kv_layout))
    row_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    num_rows, heads, page_size = k.shape[0], k_cache.shape[head_axis], k_cache.shape[row_axis]
    check(op, "slot_mapping", slot_mapping, (num_rows,))
    floats, float8 = (torch.float32, torch.bfloat16, torch.float16), (torch.float8_e4m3fn, torch.float8_e5m2)
    if k.dtype not in floats or k_cache.dtype not in (k.dtype, *float8):
        fail(op, "k_cache", f"{k.dtype} (the dtype of k) or float8", k_cache.dtype)
    strides = []
    for argument, x, cache, scale in (("k", k, k_cache, k_scale), ("v", v, v_cache, v_scale)):
        if x.shape != (num_rows, heads, cache.shape[3]) or x.dtype != k.dtype:
            fail(op, argument, f"{k.dtype} [{num_rows}, {heads}, {cache.shape[3]}]", f"{x.dtype} {list(x.shape)}")
        if cache.shape[:3] != k_cache.shape[:3] or cache.dtype != k_cache.dtype:
            fail(op, "v_cache", f"{k_cache.dtype} {list(k_cache.shape[:3])}", f"{cache.dtype} {list(cache.shape[:3])}")
        check_dense(op, argument, x)
        check_dense(op, f"{argument}_cache", cache)
        if scale is not None and (scale.dtype != torch.float32 or scale.dim() != 1 or len(scale) not in (1, heads)):
            fail(op, f"{argument}_scale", f"float32 [1] or [{heads}]", f"{scale.dtype} {list(scale.shape)}")
        per_head = scale is not None and len(scale) > 1
        strides += [cache.shape[3], x.stride(0), x.stride(1), cache.stride(0), cache.stride(row_axis),
                    cache.stride(head_axis), scale.stride(0) if per_head else 0]  # fmt: skip
    if num_rows == 0:
        return
    kinds = {"K_KIND": _kind(k, k_cache, k_scale), "V_KIND": _kind(v, v_cache, v_scale)}
    k, v = (as_bits(op, "k", x) if kind == "bits" else x for x, kind in zip((k, v), kinds.values()))
    block = block_of(heads * max(k.shape[2], v.shape[2]))
    _write_kv_kernel[(num_rows, 2)](
        k, v, slot_mapping, slot_mapping if k_scale is None else k_scale, slot_mapping if v_scale is None else v_scale,
        as_bits(op, "k_cache", k_cache), as_bits(op, "v_cache", v_cache),
        k_cache.shape[0] * page_size, page_size, heads, *strides,
        K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
        BLOCK=block, num_warps=4 if block > 128 else 1, enable_fp_fusion=False, **kinds,
    )  # fmt: skip


def impl_slot_mapping(page_table, context_lens, cu_nodes, page_size, slots):
    """`specdec_triton::slot_mapping`."""
    op, requests, total = "slot_mapping", context_lens.numel(), slots.numel()
    check(op, "context_lens", context_lens, (None,))
    check(op, "page_table", page_table, (requests, None))
    check(op, "cu_nodes", cu_nodes, (requests + 1,))
    check(op, "slots", slots, (None,))
    check_range(op, "page_size", page_size, 1, 2**31 - 1)
    if total:
        _slot_mapping_kernel[(triton.cdiv(total, 128),)](
            page_table, context_lens, cu_nodes, slots, requests, page_table.shape[1], page_size, total,
            BLOCK=128, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
