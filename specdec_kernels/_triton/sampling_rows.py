"""A program's view of one row of logits in Triton: its law under the filters (csrc/sampling/law.h and filters.h).

The same masses (64-bit integers) and thresholds as the CPU op, by the same fused operations; Triton's interpreter
rounds twice where a GPU fuses, so masses may differ there in their last bits. A filter's threshold is found by
bisection over the order keys, 32 sums over the row (from L2), where the CUDA kernels keep histograms.

A row is (logits, allowed bits, bias ids, bias values, bias entries, size); a law (max, rate, lowest, tau, threshold,
last tie, mass, log mass, argmax, flags, is a point, is empty).
"""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import check, check_dense, check_range, fail

FLAG_NAN = tl.constexpr(1)
FLAG_DEAD = tl.constexpr(2)
FLAG_INF = tl.constexpr(4)
FLAG_PARAMETER = tl.constexpr(128)
NONE = tl.constexpr(float("-inf"))
LARGEST = tl.constexpr(3.402823466e38)  # +inf is read as the largest float
NO_TIE = tl.constexpr(2147483647)
MASS_SCALE = tl.constexpr(17592186044416.0)  # 2^44
ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it rounds a float64 to an integer
EXP_SHIFT = tl.constexpr(12582912.0)
LOG2E = tl.constexpr(1.44269504088896341)
MAX_VOCAB = 1 << 19
LOGPROBS = {  # return_logprobs: raw?, processed?
    "": (False, False),
    "none": (False, False),
    "raw": (True, False),
    "processed": (False, True),
    "both": (True, True),
}


@triton.jit
def order_key(x):
    """A signed integer that rises with x; -0 and +0 are one number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def order_value(key):
    rising = key.to(tl.int32)
    return tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)


@triton.jit
def clean(x):
    return tl.minimum(tl.where(x == x, x, NONE), LARGEST)


@triton.jit
def row_of(logits, stride, allowed, allowed_stride, cu, ids, values, entries, r, size, BIASED: tl.constexpr):
    """Row r with its edits; bias offsets that lie outside the entries name none."""
    begin, count = 0, 0
    if BIASED:
        begin = tl.load(cu + r)
        end = tl.load(cu + r + 1)
        sound = (begin >= 0) & (begin < end) & (end <= entries)
        begin, count = tl.where(sound, begin, 0), tl.where(sound, end - begin, 0)
    return logits + r * stride, allowed + r * allowed_stride, ids + begin, values + begin, count, size


@triton.jit
def edited(row, c, ALLOWED: tl.constexpr, BIASED: tl.constexpr):
    """Logits of columns c after their edits, before cleaning; -inf where there is no such column."""
    known = c < row[5]
    x = tl.load(row[0] + c, mask=known, other=NONE).to(tl.float32)
    if BIASED:
        for e in range(0, row[4]):
            x = tl.where(known & (c == tl.load(row[2] + e)), x + tl.load(row[3] + e), x)
    if ALLOWED:
        word = tl.load(row[1] + (c >> 5), mask=known, other=0)
        x = tl.where(((word >> (c & 31)) & 1) != 0, x, NONE)
    return x


@triton.jit
def first_read(row, ALLOWED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """(maximum, its lowest id, flags); -inf, 0 for a row without a usable logit."""
    best = tl.full((), -(1 << 63), tl.int64)
    seen = tl.zeros((), tl.int32)
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = edited(row, c, ALLOWED, BIASED)
        seen |= tl.max(tl.where(x != x, FLAG_NAN, 0), 0)
        seen |= tl.max(tl.where(x > LARGEST, FLAG_INF, 0), 0)
        key = (order_key(clean(x)) << 32) | (0xFFFFFFFF - c.to(tl.int64))
        best = tl.maximum(best, tl.max(tl.where(c < row[5], key, -(1 << 63)), 0))
    peak = order_value(best >> 32)
    dead = ~(peak > NONE)
    argmax = tl.where(dead, 0, 0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
    return peak, argmax, tl.where(dead, seen | FLAG_DEAD, seen)


@triton.jit
def weight(x, peak, rate, lowest):
    """exp((x - peak) tau) as exp_scaled of law.h."""
    d = x - peak
    d = tl.where(d > lowest, d, lowest)
    shifted = tl.fma(d, rate, EXP_SHIFT)
    r = tl.fma(d, rate, EXP_SHIFT - shifted)
    value = tl.fma(r, 1.32647273e-3, 9.67151299e-3)
    value = tl.fma(value, r, 5.55073358e-2)
    value = tl.fma(value, r, 2.40222424e-1)
    value = tl.fma(value, r, 6.93147004e-1)
    value = tl.fma(value, r, 1.0)
    bits = value.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mass_of(w):
    return ((w.to(tl.float64) * MASS_SCALE + ROUNDER) - ROUNDER).to(tl.int64)


@triton.jit
def keeps(x, c, threshold, last_tie):
    return (x > threshold) | ((x == threshold) & (c <= last_tie))


@triton.jit
def kept_mass(row, peak, rate, lowest, threshold, last_tie, fours, ALLOWED: tl.constexpr, BIASED: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Sum of the kept masses; `fours`: of neighbours that share one rounding."""
    total = tl.zeros((), tl.int64)
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, BIASED))
        w = tl.where((x > NONE) & keeps(x, c, threshold, last_tie), weight(x, peak, rate, lowest), 0.0)
        if fours:
            pairs = tl.sum(tl.reshape(w, (BLOCK // 2, 2)), 1)
            total += tl.sum(mass_of(tl.sum(tl.reshape(pairs, (BLOCK // 4, 2)), 1)), 0)
        else:
            total += tl.sum(mass_of(w), 0)
    return total


@triton.jit
def weight_from(row, lowest_key, peak, rate, lowest, threshold, last_tie, by_mass, ALLOWED: tl.constexpr,
                BIASED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Mass, or number, of the kept ids whose key is at least `lowest_key`."""
    total = tl.zeros((), tl.int64)
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, BIASED))
        kept = (x > NONE) & keeps(x, c, threshold, last_tie) & (order_key(x) >= lowest_key)
        one = tl.full((BLOCK,), 1, tl.int64)
        if by_mass:
            one = mass_of(weight(x, peak, rate, lowest))
        total += tl.sum(tl.where(kept, one, 0), 0)
    return total


@triton.jit
def find_tie(row, value, needed, threshold, last_tie, ALLOWED: tl.constexpr, BIASED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """The id of the needed-th kept logit equal to `value`, in order of ids."""
    found = tl.full((), 2147483647, tl.int32)
    seen = tl.zeros((), tl.int32)
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, BIASED))
        tie = ((x == value) & (c < row[5]) & keeps(x, c, threshold, last_tie)).to(tl.int32)
        at = seen + tl.cumsum(tie, 0)
        found = tl.minimum(found, tl.min(tl.where((tie != 0) & (at == needed), c, 2147483647), 0))
        seen += tl.sum(tie, 0)
    return found


@triton.jit
def select(row, wanted, by_mass, peak, rate, lowest, threshold, last_tie, ALLOWED: tl.constexpr, BIASED: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """(threshold, last tie, weight) of the shortest prefix of the total order whose weight reaches `wanted`."""
    low = order_key(tl.full((), -LARGEST, tl.float32))
    high = order_key(peak)
    total = weight_from(row, low, peak, rate, lowest, threshold, last_tie, by_mass, ALLOWED, BIASED, BLOCK)
    wanted = tl.minimum(wanted, total)
    reached = total
    while low < high:
        middle = low + (high - low + 1) // 2
        here = weight_from(row, middle, peak, rate, lowest, threshold, last_tie, by_mass, ALLOWED, BIASED, BLOCK)
        enough = here >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        reached = tl.where(enough, here, reached)
    above = weight_from(row, low + 1, peak, rate, lowest, threshold, last_tie, by_mass, ALLOWED, BIASED, BLOCK)
    value = order_value(low)
    one = tl.full((), 1, tl.int64)
    if by_mass:
        one = mass_of(weight(value, peak, rate, lowest))
    ties = (reached - above) // one
    needed = tl.minimum((wanted - above + one - 1) // one, ties)
    last = last_tie
    if needed < ties:
        last = find_tie(row, value, needed.to(tl.int32), threshold, last_tie, ALLOWED, BIASED, BLOCK)
    else:
        last = tl.where(value > threshold, NO_TIE, last_tie)
    return value, last, above + needed * one


@triton.jit
def min_p_threshold(peak, tau, min_p):
    """The smallest logit that min-p keeps, found on the order keys."""
    distance = tl.where(min_p >= 1.0, 0.0, tl.log(min_p.to(tl.float64)).to(tl.float32))
    low = order_key(tl.full((), -LARGEST, tl.float32))
    high = order_key(peak)
    while low < high:
        middle = low + (high - low) // 2
        inside = (order_value(middle) - peak) * tau >= distance
        high = tl.where(inside, middle, high)
        low = tl.where(inside, low, middle + 1)
    return order_value(low)


@triton.jit
def row_law(row, temperature, top_k, top_p, min_p, need_mass, ALLOWED: tl.constexpr, BIASED: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """The row's law under the filters; see block_row_law in csrc/sampling/rows_cuda.cuh."""
    peak, argmax, flags = first_read(row, ALLOWED, BIASED, BLOCK)
    flags |= tl.where((temperature >= 0) & (temperature <= LARGEST), 0, FLAG_PARAMETER)
    flags |= tl.where((top_p != top_p) | (min_p != min_p), FLAG_PARAMETER, 0)
    empty = ~(peak > NONE)
    greedy = ~(temperature > 1e-5) | (temperature > LARGEST)
    point = empty | greedy
    peak = tl.where(empty, 0.0, peak)
    heat = tl.where(point, 1.0, tl.minimum(temperature, 1e36))
    tau = tl.div_rn(1.0, heat)
    rate = tau * LOG2E
    lowest = tl.div_rn(-125.0, rate)
    threshold = tl.full((), NONE, tl.float32)
    last_tie = tl.full((), NO_TIE, tl.int32)
    mass = tl.zeros((), tl.int64)
    if ~point:
        if min_p > 0:
            threshold = min_p_threshold(peak, tau, min_p)
        has_k = (top_k > 0) & (top_k < row[5])
        has_p = top_p < 1.0
        if has_k:
            threshold, last_tie, mass = select(row, top_k.to(tl.int64), False, peak, rate, lowest, threshold, last_tie,
                                               ALLOWED, BIASED, BLOCK)  # fmt: skip
        if has_k | has_p | need_mass:
            mass = kept_mass(row, peak, rate, lowest, threshold, last_tie, ~has_k, ALLOWED, BIASED, BLOCK)
        if has_p:
            share = top_p.to(tl.float64) * mass.to(tl.float64)
            budget = share.to(tl.int64)
            budget = tl.maximum(tl.where(budget.to(tl.float64) < share, budget + 1, budget), 1)
            threshold, last_tie, mass = select(row, budget, True, peak, rate, lowest, threshold, last_tie,
                                               ALLOWED, BIASED, BLOCK)  # fmt: skip
    log_mass = tl.where(mass > 0, tl.log(tl.maximum(mass, 1).to(tl.float64) / MASS_SCALE), 0.0)
    return peak, rate, lowest, tau, threshold, last_tie, mass, log_mass, argmax, flags, point, empty


@triton.jit
def filters_of(temperature, top_k, top_p, min_p, b, known, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
               HAS_MIN: tl.constexpr):  # fmt: skip
    """Request b's (temperature, top_k, top_p, min_p); without a request: no filters."""
    heat = tl.load(temperature + b, mask=known, other=1.0)
    k = tl.zeros((), tl.int32)
    p = tl.full((), 1.0, tl.float32)
    least = tl.zeros((), tl.float32)
    if HAS_K:
        k = tl.load(top_k + b, mask=known, other=0)
    if HAS_P:
        p = tl.load(top_p + b, mask=known, other=1.0)
    if HAS_MIN:
        least = tl.load(min_p + b, mask=known, other=0.0)
    return heat, k, p, least


def check_rows(op, logits, vocab_size, allowed=None, bias=(None, None, None)):
    """Checks logits with their edits; (rows, columns, columns that exist)."""
    if logits.dim() != 2:
        fail(op, "logits", "2 dimensions", f"shape {list(logits.shape)}")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        fail(op, "logits", "float32, bfloat16 or float16", logits.dtype)
    check_dense(op, "logits", logits)
    rows, columns = logits.shape
    check_range(op, "logits", columns, 1, MAX_VOCAB)
    if vocab_size < 1:
        fail(op, "vocab_size", "a positive number of ids", vocab_size)
    if allowed is not None:
        if allowed.dtype != torch.int32 or list(allowed.shape) != [rows, (columns + 31) // 32]:
            fail(op, "allowed", f"int32 {[rows, (columns + 31) // 32]}", f"{allowed.dtype} {list(allowed.shape)}")
        check_dense(op, "allowed", allowed)
    cu, ids, values = bias
    if cu is not None:
        if ids is None or values is None:
            fail(op, "bias", "(cu_entries, ids, values)", "a part of it")
        check(op, "bias cu_entries", cu, (rows + 1,))
        check(op, "bias ids", ids, (None,))
        check(op, "bias values", values, (ids.numel(),), torch.float32)
    return rows, columns, min(columns, vocab_size)


def check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step):
    """Checks a request's parameters; the number of requests."""
    check(op, "temperature", temperature, (None,), torch.float32)
    count = (temperature.numel(),)
    for name, tensor, dtype in (
        ("top_k", top_k, torch.int32), ("top_p", top_p, torch.float32), ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64), ("position", position, torch.int64), ("step", step, torch.int64),
    ):  # fmt: skip
        if tensor is not None:
            check(op, name, tensor, count, dtype)
    return count[0]


def row_arguments(logits, allowed, bias):
    """The kernel arguments that `row_of` takes before the row's number; absent tensors become the logits themselves."""
    cu, ids, values = bias
    entries = 0 if ids is None else ids.numel()
    return (
        logits, logits.stride(0), logits if allowed is None else allowed, 0 if allowed is None else allowed.stride(0),
        logits if cu is None else cu, logits if ids is None else ids, logits if values is None else values, entries,
    )  # fmt: skip
