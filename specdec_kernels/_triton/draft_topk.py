"""draft_topk in Triton: the same ids as csrc/sampling/draft_topk_cuda.cu; a program a row, which is read once.

The k best keys so far stay in registers. A tile's best logit enters for the worst of them until none beats it, which
happens about k log(V / k) times a row. A key is the logit's order, then the lower id.
"""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import block_of, check, check_dense, check_range, fail

NONE = tl.constexpr(float("-inf"))
LARGEST = tl.constexpr(3.402823466e38)  # +inf is read as the largest float
LOWEST = tl.constexpr(-(1 << 63))  # below every key
HIGHEST = tl.constexpr((1 << 63) - 1)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _key(x, column):
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (rising.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))


@triton.jit(do_not_specialize=["valid", "vocab_size", "k", "tau"])
def _draft_topk_kernel(
    logits_ptr, d2t_ptr, ids_ptr, log_probs_ptr, lse_ptr, stride, valid, vocab_size, k, tau,
    MAPPED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, K)
    kept = tl.where(slots < k, LOWEST + slots.to(tl.int64), HIGHEST)  # distinct, and never a place too many
    worst = tl.min(kept, 0)
    top = tl.full((), NONE, tl.float32)
    total = tl.zeros((), tl.float32)
    for base in range(0, valid, BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + c, mask=c < valid, other=NONE).to(tl.float32)
        x = tl.minimum(tl.where(x == x, x, NONE), LARGEST)
        if MAPPED:
            target = c.to(tl.int64) + tl.load(d2t_ptr + c, mask=c < valid, other=0)
            x = tl.where((target >= 0) & (target < vocab_size), x, NONE)
        higher = tl.maximum(top, tl.max(x, 0))
        if higher > NONE:
            weights = tl.exp2((x - higher) * tau * LOG2E)
            total = total * tl.exp2((top - higher) * tau * LOG2E) + tl.sum(weights, 0)
            top = higher
        keys = tl.where(x > NONE, _key(x, c), LOWEST)
        best = tl.max(keys, 0)
        while best > worst:
            kept = tl.where(kept == worst, best, kept)
            worst = tl.min(kept, 0)
            keys = tl.where(keys == best, LOWEST, keys)
            best = tl.max(keys, 0)
    log_mass = tl.log(total.to(tl.float64))
    lse = tl.where(top > NONE, (top.to(tl.float64) * tau + log_mass).to(tl.float32), NONE)
    tl.store(lse_ptr + row, lse)
    kept = tl.where(slots < k, kept, LOWEST)
    for i in range(0, k):
        best = tl.max(kept, 0)
        kept = tl.where(kept == best, LOWEST, kept)
        found = best >= LOWEST + K
        rising = (best >> 32).to(tl.int32)
        x = tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)
        column = tl.where(found, 0xFFFFFFFF - (best & 0xFFFFFFFF), 0)
        if MAPPED:
            column += tl.load(d2t_ptr + column)
        log_prob = ((x - top) * tau).to(tl.float64) - log_mass
        tl.store(ids_ptr + row * k + i, tl.where(found, column, -1).to(tl.int32))
        tl.store(log_probs_ptr + row * k + i, tl.where(found, log_prob, NONE).to(tl.float32))


def impl_draft_topk(logits, d2t, k, temperature, vocab_size, token_ids, log_probs, lse):
    """`specdec_triton::draft_topk`."""
    op = "draft_topk"
    if logits.dim() != 2:
        fail(op, "logits", "2 dimensions", f"shape {list(logits.shape)}")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        fail(op, "logits", "float32, bfloat16 or float16", logits.dtype)
    check_dense(op, "logits", logits)
    rows, columns = logits.shape
    check_range(op, "logits", columns, 1, 1 << 19)
    check_range(op, "k", k, 1, 1024)
    if vocab_size < 1:
        fail(op, "vocab_size", "a positive number of ids", vocab_size)
    if d2t is not None:
        check(op, "d2t", d2t, (None,))
    check(op, "token_ids", token_ids, (rows, k))
    check(op, "log_probs", log_probs, (rows, k), torch.float32)
    check(op, "lse", lse, (rows,), torch.float32)
    if not temperature > 1e-5:
        fail(op, "temperature", "a value above 1e-5", temperature)
    if rows == 0:
        return
    block = block_of(columns, 512, 4096)
    _draft_topk_kernel[(rows,)](
        logits, token_ids if d2t is None else d2t, token_ids, log_probs, lse, logits.stride(0),
        min(columns, vocab_size if d2t is None else d2t.numel()), vocab_size, k, 1.0 / min(temperature, 1e36),
        MAPPED=d2t is not None, K=max(16, triton.next_power_of_2(k)), BLOCK=block, num_warps=8 if block > 512 else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
