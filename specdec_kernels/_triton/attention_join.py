"""merge_attention in Triton: the arithmetic of csrc/attention/merge.h."""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.attention_tile import LN2, LOG2E
from specdec_kernels._triton.rng import check, check_dense, fail


@triton.jit(do_not_specialize=["rows", "heads"])
def _merge_attention_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, sinks_ptr, out_ptr, lse_ptr, rows, heads, a_row, a_head, a_lse, b_row,
    b_head, b_lse, to_row, to_head, to_lse, SINKS: tl.constexpr, LSE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BLOCK rows of heads. A part whose weight is 0 may hold anything: it is left out."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    n, h = row // heads, row % heads
    first = tl.load(lse_a_ptr + n * a_lse + h, mask=there, other=float("-inf"))
    second = tl.load(lse_b_ptr + n * b_lse + h, mask=there, other=float("-inf"))
    top = tl.maximum(first, second)
    seen = top > float("-inf")
    base = tl.where(seen, top, 0.0)
    weight_a, weight_b = tl.exp2((first - base) * LOG2E), tl.exp2((second - base) * LOG2E)
    total = weight_a + weight_b
    norm = total
    if SINKS:
        norm += tl.exp2((tl.load(sinks_ptr + h, mask=there, other=0.0) - base) * LOG2E)
    inverse = 1.0 / tl.where(seen, norm, 1.0)
    weight_a, weight_b = tl.where(seen, weight_a * inverse, 0.0), tl.where(seen, weight_b * inverse, 0.0)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = there[:, None] & (d < D)
    at_a, at_b, at = (
        (n * a_row + h * a_head)[:, None] + d,
        (n * b_row + h * b_head)[:, None] + d,
        (n * to_row + h * to_head)[:, None] + d,
    )
    a = tl.load(out_a_ptr + at_a, mask=inside & (weight_a != 0.0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(out_b_ptr + at_b, mask=inside & (weight_b != 0.0)[:, None], other=0.0).to(tl.float32)
    merged = weight_a[:, None] * a + weight_b[:, None] * b
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=inside)
    if LSE:
        lse = tl.where(seen, base + tl.log2(tl.where(seen, total, 1.0)) * LN2, float("-inf"))
        tl.store(lse_ptr + n * to_lse + h, lse, mask=there)


def impl_merge_attention(out_a, lse_a, out_b, lse_b, sinks, out, lse):
    """`specdec_triton::merge_attention`."""
    op = "merge_attention"
    if out_a.dtype not in (torch.float32, torch.bfloat16, torch.float16) or out_a.dim() != 3:
        fail(op, "out_a", "float32, bfloat16 or float16 [*, *, *]", f"{out_a.dtype} {list(out_a.shape)}")
    rows, heads, dim = out_a.shape
    for name, x in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        if x.dtype != out_a.dtype or x.shape != out_a.shape:
            fail(op, name, f"{out_a.dtype} {list(out_a.shape)}", f"{x.dtype} {list(x.shape)}")
        check_dense(op, name, x)
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if x is not None and (x.dtype != torch.float32 or x.shape != (rows, heads)):
            fail(op, name, f"torch.float32 [{rows}, {heads}]", f"{x.dtype} {list(x.shape)}")
        if x is not None:
            check_dense(op, name, x)
    if sinks is not None:
        check(op, "sinks", sinks, (heads,), torch.float32)
    if rows * heads == 0:
        return
    block_d = triton.next_power_of_2(max(dim, 1))
    block = max(1, 1024 // block_d)
    _merge_attention_kernel[(triton.cdiv(rows * heads, block),)](
        out_a, lse_a, out_b, lse_b, lse_a if sinks is None else sinks, out, lse_a if lse is None else lse, rows * heads,
        heads, out_a.stride(0), out_a.stride(1), lse_a.stride(0), out_b.stride(0), out_b.stride(1), lse_b.stride(0),
        out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), SINKS=sinks is not None, LSE=lse is not None,
        D=dim, BLOCK_D=block_d, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
