"""draft_sample in Triton: a program a row; its law, then k passes, each for the largest perturbed score behind the one
before (csrc/sampling/draft_sample_cuda.cu)."""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import (
    INT32_MAX,
    PURPOSE_DRAFT,
    PURPOSE_EMIT,
    block_of,
    check,
    check_range,
    draw,
)
from specdec_kernels._triton.sampling_noise import draft_salt, gumbel, highest_gumbel, one_word, words_of
from specdec_kernels._triton.sampling_rows import (
    MAX_VOCAB,
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


@triton.jit
def _next_sibling(row, law, seed, position, purpose, salt, ceiling, ceiling_id, d2t, ALLOWED: tl.constexpr,
                  BY_TARGET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(score, column, logit) of the best column behind the ceiling: scores fall, then columns rise."""
    best = tl.full((), NONE, tl.float64)
    best_id = tl.full((), INT32_MAX, tl.int32)
    logit = tl.full((), NONE, tl.float32)
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, False))
        token = c
        if BY_TARGET:  # noise of the target's ids: no runs of four in draft order
            token = c + tl.load(d2t + c, mask=c < row[5], other=0)
            word = one_word(draw(seed, position, purpose, token >> 2, salt), token)
        else:
            word = words_of(seed, position, purpose, salt, base, BLOCK)
        scaled = (x - law[0]) * law[3]
        hope = (x > NONE) & keeps(x, c, law[4], law[5])
        hope = hope & (scaled + highest_gumbel(word) >= best.to(tl.float32) - 0.01)
        if tl.max(hope.to(tl.int32), 0) > 0:
            score = scaled.to(tl.float64) + gumbel(seed, position, purpose, salt, token, word)
            hope = hope & ((score < ceiling) | ((score == ceiling) & (c > ceiling_id)))
            score = tl.where(hope, score, NONE)
            here = tl.max(score, 0)
            if here > best:
                best = here
                best_id = tl.min(tl.where(score == here, c, INT32_MAX), 0)
                logit = tl.max(tl.where(c == best_id, x, NONE), 0)
    return best, best_id, logit


@triton.jit(do_not_specialize=["size", "count", "entries", "k"])
def _draft_sample_kernel(
    logits, stride, allowed, allowed_stride, cu, ids, values, entries, size, temperature, top_k, top_p, min_p, seeds,
    steps, count, requests, positions, paths, d2t, k, ids_ptr, log_probs_ptr, lse_ptr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, STEPPED: tl.constexpr, PATHS: tl.constexpr,
    MAPPED: tl.constexpr, COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    token_ids, log_probs = ids_ptr + r * k, log_probs_ptr + r * k
    b = tl.load(requests + r).to(tl.int64)
    known = (b >= 0) & (b < count)
    b = tl.where(known, b, 0)
    lse = tl.zeros((), tl.float32)
    drawn = tl.zeros((), tl.int32)
    if known:
        row = row_of(logits, stride, allowed, allowed_stride, cu, ids, values, entries, r, size, False)
        heat, top, share, least = filters_of(temperature, top_k, top_p, min_p, b, known, HAS_K, HAS_P, HAS_MIN)
        law = row_law(row, heat, top, share, least, True, MAPPED, False, BLOCK)
        if law[10]:
            if ~law[11]:
                target = law[8]
                if MAPPED:
                    target += tl.load(d2t + law[8])
                tl.store(token_ids, target)
                tl.store(log_probs, 0.0)
                drawn += 1
        else:
            lse = (law[0].to(tl.float64) * law[3].to(tl.float64) + law[7]).to(tl.float32)
            seed, position = tl.load(seeds + b), tl.load(positions + r)
            path, step = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
            if PATHS:
                path = tl.load(paths + r)
            if STEPPED:
                step = tl.load(steps + b)
            salt = draft_salt(path, step)
            if COUPLED:
                salt = salt * 0
            purpose: tl.constexpr = PURPOSE_EMIT if COUPLED else PURPOSE_DRAFT
            ceiling = tl.full((), float("inf"), tl.float64)
            column = tl.full((), -1, tl.int32)
            more = k > 0
            while more:
                score, found, logit = _next_sibling(
                    row, law, seed, position, purpose, salt, ceiling, column, d2t, MAPPED, COUPLED and MAPPED, BLOCK
                )
                ceiling, column = score, found
                more = found != INT32_MAX
                if more:
                    target = found
                    if MAPPED:
                        target += tl.load(d2t + found)
                    tl.store(token_ids + drawn, target)
                    log_p = ((logit - law[0]) * law[3]).to(tl.float64) - law[7]
                    tl.store(log_probs + drawn, log_p.to(tl.float32))
                    drawn += 1
                    more = drawn < k
    for i in range(drawn, k):
        tl.store(token_ids + i, -1)
        tl.store(log_probs + i, NONE)
    tl.store(lse_ptr + r, lse)


def columns_with_ids(d2t, columns, size, vocab_size, t2d=None):
    """int32 [1, ceil(columns / 32)] bits of the columns whose target id lies in [0, vocab_size); of two columns of one
    id the one that t2d names exists."""
    c = torch.arange(size, device=d2t.device)
    target = c + d2t[:size].long()
    exists = (target >= 0) & (target < vocab_size)
    if t2d is not None:
        exists &= t2d[torch.where(exists, target, 0)] == c
    bits = torch.zeros((columns + 31) // 32 * 32, dtype=torch.int64, device=d2t.device)
    bits[:size] = exists.long()
    words = (bits.view(-1, 32) << torch.arange(32, device=d2t.device)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()[None]


def impl_draft_sample(
    logits, temperature, top_k, top_p, min_p, seed, position, step, row_requests, row_positions, row_paths, d2t, k,
    coupled, vocab_size, token_ids, log_probs, lse,
):  # fmt: skip
    """`specdec_triton::draft_sample`."""
    op = "draft_sample"
    rows, columns, size = check_rows(op, logits, MAX_VOCAB if d2t is not None else vocab_size)
    if d2t is not None:
        check(op, "d2t", d2t, (None,))
        size = min(size, d2t.numel())
    count = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step)
    check_range(op, "k", k, 1, 1024)
    check(op, "token_ids", token_ids, (rows, k))
    check(op, "log_probs", log_probs, (rows, k), torch.float32)
    check(op, "lse", lse, (rows,), torch.float32)
    check(op, "row_requests", row_requests, (rows,))
    check(op, "row_positions", row_positions, (rows,), torch.int64)
    if row_paths is not None:
        check(op, "row_paths", row_paths, (rows,))
    if rows == 0:
        return
    allowed = None if d2t is None else columns_with_ids(d2t, columns, size, vocab_size).expand(rows, -1)
    optional = [logits if tensor is None else tensor for tensor in (top_k, top_p, min_p)]
    block = block_of(columns, 512, 2048)
    _draft_sample_kernel[(rows,)](
        *row_arguments(logits, allowed, (None, None, None)), size, temperature, *optional, seed,
        seed if step is None else step, count, row_requests, row_positions,
        row_requests if row_paths is None else row_paths, row_requests if d2t is None else d2t, k,
        token_ids, log_probs, lse,
        HAS_K=top_k is not None, HAS_P=top_p is not None, HAS_MIN=min_p is not None, STEPPED=step is not None,
        PATHS=row_paths is not None, MAPPED=d2t is not None, COUPLED=coupled, BLOCK=block,
        num_warps=8 if block > 512 else 4, enable_fp_fusion=False,
    )  # fmt: skip
