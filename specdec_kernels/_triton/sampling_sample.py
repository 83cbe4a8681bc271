"""sample in Triton: a program a row; its law and one draw (csrc/sampling/sample_cuda.cu)."""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_INDEX, INT32_MAX, PURPOSE_EMIT, block_of, check, fail
from specdec_kernels._triton.sampling_noise import gumbel, highest_gumbel, words_of
from specdec_kernels._triton.sampling_rows import (
    LOGPROBS,
    NONE,
    check_rows,
    check_sampling,
    clean,
    edited,
    filters_of,
    keeps,
    row_arguments,
    row_law,
    row_of,
)
from specdec_kernels._triton.sampling_walk import log_prob, logit_at


@triton.jit
def draw_token(row, law, seed, position, ALLOWED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Argmax of log weight + Gumbel noise over the kept ids; ties go to the lowest."""
    salt = tl.zeros((), tl.uint32)
    best = tl.full((), NONE, tl.float64)
    token = law[8]
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, BIASED))
        word = words_of(seed, position, PURPOSE_EMIT, salt, base, BLOCK)
        scaled = (x - law[0]) * law[3]
        hope = (x > NONE) & keeps(x, c, law[4], law[5])
        hope = hope & (scaled + highest_gumbel(word) >= best.to(tl.float32) - 0.01)
        if tl.max(hope.to(tl.int32), 0) > 0:
            score = scaled.to(tl.float64) + gumbel(seed, position, PURPOSE_EMIT, salt, c, word)
            score = tl.where(hope, score, NONE)
            here = tl.max(score, 0)
            if here > best:
                best = here
                token = tl.min(tl.where(score == here, c, INT32_MAX), 0)
    return token


@triton.jit(do_not_specialize=["size", "count", "entries"])
def _sample_kernel(
    logits, stride, allowed, allowed_stride, cu, ids, values, entries, size, temperature, top_k, top_p, min_p, seeds,
    positions, count, requests, row_positions, tokens_ptr, flags_ptr, logprobs_ptr,
    ALLOWED: tl.constexpr, BIASED: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr,
    OWNED: tl.constexpr, PLACED: tl.constexpr, RAW: tl.constexpr, PROCESSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = 2 if RAW and PROCESSED else 1
    b = r
    if OWNED:
        b = tl.load(requests + r).to(tl.int64)
    known = (b >= 0) & (b < count)
    token = tl.full((), -1, tl.int32)  # a row of no request: nothing is drawn
    flags = tl.full((), FLAG_INDEX, tl.int32)
    raw = tl.zeros((), tl.float64)
    processed = tl.zeros((), tl.float64)
    if known:
        row = row_of(logits, stride, allowed, allowed_stride, cu, ids, values, entries, r, size, BIASED)
        heat, k, p, least = filters_of(temperature, top_k, top_p, min_p, b, known, HAS_K, HAS_P, HAS_MIN)
        law = row_law(row, heat, k, p, least, PROCESSED, ALLOWED, BIASED, BLOCK)
        flags = law[9]
        token = law[8]
        if ~law[10]:
            position = tl.load(positions + b)
            if PLACED:
                position = tl.load(row_positions + r)
            token = draw_token(row, law, tl.load(seeds + b), position, ALLOWED, BIASED, BLOCK)
        none, one, off = tl.zeros((), tl.int32), tl.full((), 1.0, tl.float32), tl.zeros((), tl.float32)
        if PROCESSED:
            processed = log_prob(law, logit_at(row, token, ALLOWED, BIASED), token)
            if law[10]:  # greedy: the edited logits at temperature 1
                plain = row_law(row, one, none, one, off, True, ALLOWED, BIASED, BLOCK)
                processed = log_prob(plain, logit_at(row, token, ALLOWED, BIASED), token)
        if RAW:
            untouched = row_of(logits, stride, allowed, allowed_stride, cu, ids, values, entries, r, size, False)
            plain = row_law(untouched, one, none, one, off, True, False, False, BLOCK)
            raw = log_prob(plain, logit_at(untouched, token, False, False), token)
    tl.store(tokens_ptr + r, token)
    tl.store(flags_ptr + r, flags)
    if RAW:
        tl.store(logprobs_ptr + r * width, raw.to(tl.float32))
    if PROCESSED:
        tl.store(logprobs_ptr + r * width + width - 1, processed.to(tl.float32))


def impl_sample(
    logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, row_positions, allowed, bias_cu,
    bias_ids, bias_values, vocab_size, return_logprobs, token_ids, flags, logprobs,
):  # fmt: skip
    """`specdec_triton::sample`."""
    op, bias = "sample", (bias_cu, bias_ids, bias_values)
    if return_logprobs not in LOGPROBS:
        fail(op, "return_logprobs", "'', 'raw', 'processed' or 'both'", repr(return_logprobs))
    rows, columns, size = check_rows(op, logits, vocab_size, allowed, bias)
    count = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step)
    if row_requests is not None:
        check(op, "row_requests", row_requests, (rows,))
    elif count != rows:
        fail(op, "row_requests", f"given, as there are {rows} rows and {count} requests", "none")
    if row_positions is not None:
        check(op, "row_positions", row_positions, (rows,), torch.int64)
    check(op, "token_ids", token_ids, (rows,))
    check(op, "flags", flags, (rows,))
    raw, processed = LOGPROBS[return_logprobs]
    if raw or processed:
        if logprobs is None:
            fail(op, "logprobs", "an output tensor", "none")
        check(op, "logprobs", logprobs, (rows, 2) if raw and processed else (rows,), torch.float32)
    if rows == 0:
        return
    optional = [logits if tensor is None else tensor for tensor in (top_k, top_p, min_p)]
    block = block_of(columns, 512, 2048)
    _sample_kernel[(rows,)](
        *row_arguments(logits, allowed, bias), size, temperature, *optional, seed, position, count,
        flags if row_requests is None else row_requests, position if row_positions is None else row_positions,
        token_ids, flags, flags if logprobs is None else logprobs,
        ALLOWED=allowed is not None, BIASED=bias_cu is not None, HAS_K=top_k is not None, HAS_P=top_p is not None,
        HAS_MIN=min_p is not None, OWNED=row_requests is not None, PLACED=row_positions is not None, RAW=raw,
        PROCESSED=processed, BLOCK=block, num_warps=8 if block > 512 else 4, enable_fp_fusion=False,
    )  # fmt: skip
