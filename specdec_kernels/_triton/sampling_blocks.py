"""row_stats, filter_rows and residual_log_weights in Triton: a program a row (csrc/sampling/sample_cuda.cu)."""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_INDEX, block_of, check, check_range, fail
from specdec_kernels._triton.sampling_noise import log_residual
from specdec_kernels._triton.sampling_rows import (
    NONE,
    check_rows,
    check_sampling,
    clean,
    edited,
    filters_of,
    row_arguments,
    row_law,
    row_of,
)


@triton.jit(do_not_specialize=["size", "vocab_start", "temperatures", "entries"])
def _row_stats_kernel(
    logits, stride, allowed, allowed_stride, cu, ids, values, entries, size, temperature, requests, temperatures,
    vocab_start, max_ptr, log_sum_ptr, argmax_ptr, flags_ptr,
    ALLOWED: tl.constexpr, HEATED: tl.constexpr, OWNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row = row_of(logits, stride, allowed, allowed_stride, cu, ids, values, entries, r, size, False)
    heat = tl.full((), 1.0, tl.float32)
    known = r >= 0
    if HEATED:
        b = r
        if OWNED:
            b = tl.load(requests + r).to(tl.int64)
        known = (b >= 0) & (b < temperatures)
        heat = tl.load(temperature + b, mask=known, other=1.0)
    law = row_law(row, heat, tl.zeros((), tl.int32), tl.full((), 1.0, tl.float32), tl.zeros((), tl.float32), True,
                  ALLOWED, False, BLOCK)  # fmt: skip
    tl.store(max_ptr + r, tl.where(law[11], NONE, law[0]))
    tl.store(log_sum_ptr + r, law[7].to(tl.float32))
    tl.store(argmax_ptr + r, vocab_start + law[8])
    tl.store(flags_ptr + r, law[9] | tl.where(known, 0, FLAG_INDEX))


@triton.jit(do_not_specialize=["size", "count", "entries"])
def _filter_rows_kernel(
    logits, stride, allowed, allowed_stride, cu, ids, values, entries, size, temperature, top_k, top_p, min_p, count,
    requests, threshold_ptr, budget_ptr, max_ptr, log_sum_ptr, flags_ptr,
    ALLOWED: tl.constexpr, BIASED: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr,
    OWNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row = row_of(logits, stride, allowed, allowed_stride, cu, ids, values, entries, r, size, BIASED)
    b = r
    if OWNED:
        b = tl.load(requests + r).to(tl.int64)
    known = (b >= 0) & (b < count)
    heat, k, p, least = filters_of(temperature, top_k, top_p, min_p, b, known, HAS_K, HAS_P, HAS_MIN)
    law = row_law(row, heat, k, p, least, True, ALLOWED, BIASED, BLOCK)
    # Greedy: the lowest id of the maximum alone.
    threshold = tl.where(law[10], tl.where(law[11], NONE, law[0]), law[4])
    last_tie = tl.where(law[10], law[8], law[5])
    ties = tl.zeros((), tl.int32)
    for base in range(0, size, BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, BIASED))
        ties += tl.sum(((c < size) & (c <= last_tie) & (x == threshold)).to(tl.int32), 0)
    tl.store(threshold_ptr + r, threshold)
    tl.store(budget_ptr + r, ties)
    tl.store(max_ptr + r, tl.where(law[11], NONE, law[0]))
    tl.store(log_sum_ptr + r, law[7].to(tl.float32))
    tl.store(flags_ptr + r, law[9] | tl.where(known, 0, FLAG_INDEX))


@triton.jit(do_not_specialize=["columns"])
def _residual_log_weights_kernel(p_ptr, q_ptr, scale_ptr, out_ptr, columns, p_stride, q_stride, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log_p = tl.load(p_ptr + r * p_stride + c, mask=c < columns, other=NONE).to(tl.float64)
    log_q = tl.load(q_ptr + r * q_stride + c, mask=c < columns, other=NONE).to(tl.float64)
    value = log_residual(log_p, log_q, tl.load(scale_ptr + r).to(tl.float64))
    tl.store(out_ptr + r * columns.to(tl.int64) + c, value.to(tl.float32), mask=c < columns)


def _launch(columns):
    block = block_of(columns, 512, 2048)
    return dict(BLOCK=block, num_warps=8 if block > 512 else 4, enable_fp_fusion=False)


def impl_row_stats(logits, temperature, row_requests, allowed, vocab_start, vocab_size, max, log_sum, argmax, flags):
    """`specdec_triton::row_stats`."""
    op = "row_stats"
    check_range(op, "vocab_start", vocab_start, 0, (1 << 31) - 1)
    if vocab_size <= vocab_start:
        fail(op, "vocab_size", f"more than vocab_start {vocab_start}", vocab_size)
    rows, columns, size = check_rows(op, logits, vocab_size - vocab_start, allowed)
    if row_requests is not None:
        check(op, "row_requests", row_requests, (rows,))
    if temperature is not None:
        check(op, "temperature", temperature, (None if row_requests is not None else rows,), torch.float32)
    for name, out, dtype in (
        ("max", max, torch.float32), ("log_sum", log_sum, torch.float32), ("argmax", argmax, torch.int32),
        ("flags", flags, torch.int32),
    ):  # fmt: skip
        check(op, name, out, (rows,), dtype)
    if rows == 0:
        return
    heated = temperature is not None
    _row_stats_kernel[(rows,)](
        *row_arguments(logits, allowed, (None, None, None)), size, temperature if heated else logits,
        flags if row_requests is None else row_requests, temperature.numel() if heated else 0, vocab_start,
        max, log_sum, argmax, flags,
        ALLOWED=allowed is not None, HEATED=heated, OWNED=row_requests is not None, **_launch(columns),
    )  # fmt: skip


def impl_filter_rows(
    logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, allowed, bias_cu, bias_ids,
    bias_values, vocab_size, threshold, tie_budget, max, log_sum, flags,
):  # fmt: skip
    """`specdec_triton::filter_rows`."""
    op, bias = "filter_rows", (bias_cu, bias_ids, bias_values)
    rows, columns, size = check_rows(op, logits, vocab_size, allowed, bias)
    count = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step)
    if row_requests is not None:
        check(op, "row_requests", row_requests, (rows,))
    elif count != rows:
        fail(op, "row_requests", f"given ({rows} rows, {count} requests)", "none")
    for name, out, dtype in (
        ("threshold", threshold, torch.float32), ("tie_budget", tie_budget, torch.int32), ("max", max, torch.float32),
        ("log_sum", log_sum, torch.float32), ("flags", flags, torch.int32),
    ):  # fmt: skip
        check(op, name, out, (rows,), dtype)
    if rows == 0:
        return
    optional = [logits if tensor is None else tensor for tensor in (top_k, top_p, min_p)]
    _filter_rows_kernel[(rows,)](
        *row_arguments(logits, allowed, bias), size, temperature, *optional, count,
        flags if row_requests is None else row_requests, threshold, tie_budget, max, log_sum, flags,
        ALLOWED=allowed is not None, BIASED=bias_cu is not None, HAS_K=top_k is not None, HAS_P=top_p is not None,
        HAS_MIN=min_p is not None, OWNED=row_requests is not None, **_launch(columns),
    )  # fmt: skip


def impl_residual_log_weights(target_log_probs, draft_log_probs, log_scale, out):
    """`specdec_triton::residual_log_weights`."""
    op = "residual_log_weights"
    if target_log_probs.dim() != 2:
        fail(op, "target_log_probs", "2 dimensions", f"shape {list(target_log_probs.shape)}")
    rows, columns = target_log_probs.shape
    for name, tensor in (("target_log_probs", target_log_probs), ("draft_log_probs", draft_log_probs)):
        if tensor.dtype != torch.float32 or tensor.shape != (rows, columns) or (columns > 1 and tensor.stride(1) != 1):
            fail(op, name, f"float32 {[rows, columns]} with dense rows", f"{tensor.dtype} {list(tensor.shape)}")
    check(op, "log_scale", log_scale, (rows,), torch.float32)
    check(op, "out", out, (rows, columns), torch.float32)
    if rows and columns:
        block = block_of(columns, 512, 2048)
        _residual_log_weights_kernel[(rows, triton.cdiv(columns, block))](
            target_log_probs, draft_log_probs, log_scale, out, columns, target_log_probs.stride(0),
            draft_log_probs.stride(0), BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip
