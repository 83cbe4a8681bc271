"""Gumbel noise and residuals in Triton: csrc/sampling/noise.h and acceptance.h by the float64 logarithm alone.

log1p is a few terms of its series near 0, so scores may differ from the CPU op's by a part in 10^13.
"""

import triton
import triton.language as tl

from specdec_kernels._triton.rng import draw

PURPOSE_TAIL = tl.constexpr(0x80)
TAIL_WORDS = tl.constexpr(4096)
WORD = tl.constexpr(2.3283064365386962890625e-10)  # 2^-32
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))


@triton.jit
def minus_log1m(u):
    """-log(1 - u) for u in (0, 1)."""
    near = u < 0.0009765625
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    return tl.where(near, small, -tl.log(tl.where(near, 0.5, 1.0 - u)))


@triton.jit
def one_word(words, token):
    """Of four words a token's own."""
    at = token & 3
    return tl.where(at == 0, words[0], tl.where(at == 1, words[1], tl.where(at == 2, words[2], words[3])))


@triton.jit
def words_of(seed, position, purpose, salt, first, BLOCK: tl.constexpr):
    """Words of tokens first .. first + BLOCK - 1; `first` is a multiple of 4."""
    w = draw(seed, position, purpose, first // 4 + tl.arange(0, BLOCK // 4), salt)
    return tl.interleave(tl.interleave(w[0], w[2]), tl.interleave(w[1], w[3]))


@triton.jit
def exponential(seed, position, purpose, salt, token, word):
    """-log(1 - u), u the midpoint of the word's cell; a small word takes a second word."""
    cell = tl.full(word.shape, 0.5, tl.float64)
    far = word < TAIL_WORDS
    if tl.max(far.to(tl.int32), 0) > 0:
        tail = one_word(draw(seed, position, purpose | PURPOSE_TAIL, token >> 2, salt), token)
        cell = tl.where(far, (tail.to(tl.float64) + 0.5) * WORD, 0.5)
    return minus_log1m((word.to(tl.float64) + cell) * WORD)


@triton.jit
def gumbel(seed, position, purpose, salt, token, word):
    return -tl.log(exponential(seed, position, purpose, salt, token, word))


@triton.jit
def coin_of(high, low):
    """(u, log u), float64, of two words."""
    high, low = high.to(tl.int64) & 0xFFFFFFFF, low.to(tl.int64) & 0xFFFFFFFF
    u = (high.to(tl.float64) + (low.to(tl.float64) + 0.5) * WORD) * WORD
    rest = ((0xFFFFFFFF - high).to(tl.float64) + ((0xFFFFFFFF - low).to(tl.float64) + 0.5) * WORD) * WORD
    log_u = tl.where(high < 0x80000000, tl.log(u), -minus_log1m(tl.minimum(rest, 0.5)))
    return tl.minimum(u, 1.0 - 1.1102230246251565e-16), log_u


@triton.jit
def highest_gumbel(word):
    """Not below `gumbel` of a word, in float32: -log1p(-u) >= u."""
    bound = (32.0 - tl.log2(word.to(tl.float32) + 0.25)) * LN2 + 1e-3
    return tl.where(word < TAIL_WORDS, 50.0, bound)


@triton.jit
def draft_salt(path, step):
    """Salt of a draft draw, uint32."""
    h = path.to(tl.uint32, bitcast=True) * 0x9E3779B1 + (step & 0xFFFFFFFF).to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def minus_expm1(d):
    """1 - exp(d), d <= 0, float64. Near 0 exp(d) - 1 loses what a few terms of its series keep."""
    near = d > -0.0009765625
    small = -d * (1.0 + d * (0.5 + d * (1.0 / 6.0 + d * (1.0 / 24.0 + d * (1.0 / 120.0)))))
    return tl.where(near, small, 1.0 - tl.exp(tl.where(near, -1.0, d)))


@triton.jit
def log_residual(log_p, log_q, log_c):
    """log max(p - c q, 0), float64: never NaN; -inf where the residual has no mass."""
    d = log_c + log_q - log_p
    some = (d > NONE) & (d < 0.0)
    value = log_p + tl.log(minus_expm1(tl.where(some, d, -1.0)))
    value = tl.where(d > NONE, tl.where(d < 0.0, value, NONE), log_p)
    return tl.where(log_p > NONE, value, NONE)
