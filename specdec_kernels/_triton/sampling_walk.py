"""Parts of verify in Triton: laws in the workspace, siblings, coins, and sums over a target and a draft row.

A tree is (token ids, first children, siblings, draft rows of nodes, first node, nodes, request, ids that exist, draft
rows in all), its pointers at the request's first node. Rows and laws: sampling_rows.py. Acceptance rules:
csrc/sampling/acceptance.h.
"""

import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_INDEX, INT32_MAX, draw
from specdec_kernels._triton.sampling_noise import (
    NONE,
    coin_of,
    gumbel,
    highest_gumbel,
    log_residual,
    words_of,
)
from specdec_kernels._triton.sampling_rows import MASS_SCALE, ROUNDER, clean, edited, keeps, weight

FLAG_RANGE = tl.constexpr(8)
FLAG_SIBLINGS = tl.constexpr(256)
RESIDUAL_SCALE = tl.constexpr(1125899906842624.0)  # 2^50
NO_ROWS = tl.constexpr(0)  # every draft is deterministic
GIVEN_ROWS = tl.constexpr(1)
PACKED_ROWS = tl.constexpr(2)  # node n of request b has draft row n - b - 1


# ------------------------------------------------------------------ laws: float32 [., 5], int32 [., 5], 8 bytes [., 2]
@triton.jit
def store_law(floats, ints, wides, n, law):
    for i in tl.static_range(5):
        tl.store(floats + n * 5 + i, law[i])
    tl.store(ints + n * 5, law[5])
    tl.store(ints + n * 5 + 1, law[8])
    tl.store(ints + n * 5 + 2, law[9])
    tl.store(ints + n * 5 + 3, law[10].to(tl.int32))
    tl.store(ints + n * 5 + 4, law[11].to(tl.int32))
    tl.store(wides + n * 2, law[6])
    tl.store(wides + n * 2 + 1, law[7].to(tl.int64, bitcast=True))


@triton.jit
def load_law(laws, n):
    f, i, w = laws[0] + n * 5, laws[1] + n * 5, laws[2] + n * 2
    log_mass = tl.load(w + 1).to(tl.float64, bitcast=True)
    return (tl.load(f), tl.load(f + 1), tl.load(f + 2), tl.load(f + 3), tl.load(f + 4), tl.load(i), tl.load(w),
            log_mass, tl.load(i + 1), tl.load(i + 2), tl.load(i + 3) != 0, tl.load(i + 4) != 0)  # fmt: skip


@triton.jit
def log_prob(law, x, c):
    """log p of logits x of ids c, float64."""
    kept = tl.where(keeps(x, c, law[4], law[5]), ((x - law[0]) * law[3]).to(tl.float64) - law[7], NONE)
    return tl.where(law[10], tl.where(c == law[8], 0.0, NONE), kept)


@triton.jit
def logit_at(row, c, ALLOWED: tl.constexpr, BIASED: tl.constexpr):
    """One cleaned logit; -inf for an id that does not exist."""
    x = clean(edited(row, tl.maximum(c, 0) + tl.zeros((1,), tl.int32), ALLOWED, BIASED))
    return tl.where(c >= 0, tl.max(x, 0), NONE)


# ------------------------------------------------------------------ siblings
@triton.jit
def draft_row_of(tree, kid, ROWS: tl.constexpr):
    """Row a node was drawn from: -1 deterministic, -2 out of range."""
    row = tl.full((), -1, tl.int64)
    if ROWS == GIVEN_ROWS:
        row = tl.load(tree[3] + kid).to(tl.int64)
    if ROWS == PACKED_ROWS:
        row = tree[4] + kid - tree[6] - 1
    return tl.where((row >= -1) & (row < tree[8]), row, -2).to(tl.int32)


@triton.jit
def next_kid(tree, node, kid):
    """The sibling after `kid` (-1: the first one); -1 behind the last. A link that does not lead on ends the list."""
    following = tl.load(tl.where(kid < 0, tree[1] + node, tree[2] + kid))
    return tl.where((following > tl.where(kid < 0, node, kid)) & (following < tree[5]), following, -1)


@triton.jit
def is_twin(tree, node, kid, kind, ROWS: tl.constexpr):
    """Whether an earlier sibling of the same kind has its id."""
    token = tl.load(tree[0] + kid)
    twin = kid < 0
    if (token >= 0) & (token < tree[7]):
        other = next_kid(tree, node, -1 + node * 0)
        while (other >= 0) & (other != kid) & ~twin:
            twin = (tl.load(tree[0] + other) == token) & (draft_row_of(tree, other, ROWS) == kind)
            other = next_kid(tree, node, other)
    return twin


@triton.jit
def scan_kids(tree, node, ROWS: tl.constexpr):
    """(kind, first that can be tried or -1, its trial, several, flags) of a node's children."""
    kind = tl.full((), -1, tl.int32)
    first = tl.full((), -1, tl.int32)
    first_trial = tl.zeros((), tl.int32)
    count = tl.zeros((), tl.int32)
    flags = tl.zeros((), tl.int32)
    known = node < 0
    trial = tl.zeros((), tl.int32)
    kid = next_kid(tree, node, -1 + node * 0)
    while kid >= 0:
        token = tl.load(tree[0] + kid)
        if token != -1:
            row = draft_row_of(tree, kid, ROWS)
            flags |= tl.where((token < 0) | (token >= tree[7]), FLAG_RANGE, 0) | tl.where(row == -2, FLAG_INDEX, 0)
            kind = tl.where(known, kind, row)
            known = known | (kid >= 0)
            flags |= tl.where(row != kind, FLAG_SIBLINGS, 0)
            if (row != -2) & (row == kind):
                if is_twin(tree, node, kid, kind, ROWS):
                    flags |= FLAG_SIBLINGS
                else:
                    first_trial = tl.where(first < 0, trial, first_trial)
                    first = tl.where(first < 0, kid, first)
                    count += 1
        kid = next_kid(tree, node, kid)
        trial += 1
    return kind, first, first_trial, count > 1, flags


@triton.jit
def kid_after(tree, node, kid, trial, kind, ROWS: tl.constexpr):
    """(the next one that can be tried, its trial)."""
    looking = kid >= 0
    while looking:
        kid = next_kid(tree, node, kid)
        trial += 1
        looking = kid >= 0
        if looking:
            other = (tl.load(tree[0] + kid) == -1) | (draft_row_of(tree, kid, ROWS) != kind)
            looking = other | is_twin(tree, node, kid, kind, ROWS)
    return kid, trial


@triton.jit
def without_kids(tree, node, kind, c, x, ROWS: tl.constexpr):
    """x, -inf at the ids of the children of this kind."""
    kid = next_kid(tree, node, -1 + node * 0)
    while kid >= 0:
        mine = draft_row_of(tree, kid, ROWS) == kind
        x = tl.where(mine & (c == tl.load(tree[0] + kid)), NONE, x)
        kid = next_kid(tree, node, kid)
    return x


# ------------------------------------------------------------------ coins and rules
@triton.jit
def coin(seed, position, purpose, salt, trial, uniforms, kid, COINS: tl.constexpr):
    """(u, log u), float64: the caller's, or drawn."""
    if COINS:
        u = tl.load(uniforms + kid).to(tl.float64)
        return u, tl.where(u > 0, tl.log(tl.where(u > 0, u, 1.0)), NONE)
    words = draw(seed, position, purpose, trial + tl.zeros((1,), tl.int32), salt)
    return coin_of(tl.sum(words[0].to(tl.int64), 0), tl.sum(words[1].to(tl.int64), 0))


# ------------------------------------------------------------------ a draft row in target ids
@triton.jit
def draft_columns(view, c, MAPPED: tl.constexpr):
    """Draft columns of target ids, -1 where there is none. A view is (row, law, t2d, d2t, ids that exist)."""
    column = c
    if MAPPED:
        column = tl.load(view[2] + c, mask=(c >= 0) & (c < view[4]), other=-1)
    return tl.where((c >= 0) & (c < view[4]) & (column >= 0) & (column < view[0][5]), column, -1)


@triton.jit
def draft_logits(view, column, MAPPED: tl.constexpr):
    x = clean(edited(view[0], tl.where(column >= 0, column, 2147483647), MAPPED, False))
    return tl.where(column >= 0, x, NONE)


@triton.jit
def log_q_of(view, c, MAPPED: tl.constexpr):
    """log q of target ids c."""
    column = draft_columns(view, c, MAPPED)
    y = log_prob(view[1], draft_logits(view, column, MAPPED), column)
    return tl.where((column >= 0) & ~view[1][11], y, NONE)


@triton.jit
def residual_mass(row, law, view, c_scale, ALLOWED: tl.constexpr, BIASED: tl.constexpr, MAPPED: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """sum over the vocabulary of max(p - c q, 0), float64."""
    law_q = view[1]
    result = tl.full((), 1.0, tl.float64)
    if law_q[10] & ~law_q[11]:  # q is one-hot
        only = law_q[8]
        if MAPPED:
            only += tl.load(view[3] + law_q[8])
        column = tl.max(draft_columns(view, only + tl.zeros((1,), tl.int32), MAPPED), 0)
        p = tl.exp(log_prob(law, logit_at(row, only, ALLOWED, BIASED), only))
        result = 1.0 - tl.minimum(c_scale, tl.where(column == law_q[8], p, 0.0))
    elif ~law_q[11]:
        scale = tl.full((), MASS_SCALE, tl.float64)
        a = (scale / law[6].to(tl.float64)).to(tl.float32)
        b = (c_scale * (scale / law_q[6].to(tl.float64))).to(tl.float32)
        total = tl.zeros((), tl.int64)
        for base in range(0, row[5], BLOCK):
            c = base + tl.arange(0, BLOCK)
            x = clean(edited(row, c, ALLOWED, BIASED))
            column = draft_columns(view, c, MAPPED)
            y = draft_logits(view, column, MAPPED)
            p = weight(tl.where(keeps(x, c, law[4], law[5]), x, NONE), law[0], law[1], law[2]) * a
            kept = keeps(y, column, law_q[4], law_q[5])
            q = weight(tl.where(kept, y, NONE), law_q[0], law_q[1], law_q[2]) * b
            left = tl.maximum(p - q, 0.0).to(tl.float64) * RESIDUAL_SCALE
            total += tl.sum(((left + ROUNDER) - ROUNDER).to(tl.int64), 0)
        result = total.to(tl.float64) / RESIDUAL_SCALE
    return result


@triton.jit
def row_entropy(row, law, ALLOWED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    if ~law[10]:
        for base in range(0, row[5], BLOCK):
            c = base + tl.arange(0, BLOCK)
            x = clean(edited(row, c, ALLOWED, BIASED))
            d = tl.maximum(x - law[0], law[2]) * law[3]
            part = (weight(x, law[0], law[1], law[2]) * d).to(tl.float64) * -MASS_SCALE
            kept = (x > NONE) & keeps(x, c, law[4], law[5])
            total += tl.sum(tl.where(kept, ((part + ROUNDER) - ROUNDER).to(tl.int64), 0), 0)
    share = total.to(tl.float64) / tl.maximum(law[6], 1).to(tl.float64)
    return tl.where(law[10], 0.0, law[7] + share)


# ------------------------------------------------------------------ the last token
PLAIN = tl.constexpr(1)  # kinds of draw
ONE_HOT = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)
BLOCK_ONE_HOT = tl.constexpr(4)


@triton.jit
def log_weights(c, x, law, tree, node, kind, what, drafted, log_c, view, ROWS: tl.constexpr, DRAWN: tl.constexpr,
                MAPPED: tl.constexpr):  # fmt: skip
    """What ids c with logits x weigh in a draw of this kind, float64, in units of the row's maximum."""
    value = ((x - law[0]) * law[3]).to(tl.float64)
    if what == ONE_HOT:
        value = without_kids(tree, node, kind, c, value, ROWS)
    if what >= RESIDUAL:
        log_q = tl.where(c == drafted, 0.0, NONE).to(tl.float64)
        if DRAWN and what == RESIDUAL:
            log_q = log_q_of(view, c, MAPPED)
        value = log_residual(log_prob(law, x, c), log_q, log_c) + law[7]
    return value


@triton.jit
def pick(row, law, seed, position, purpose, tree, node, kind, what, drafted, log_c, view, ALLOWED: tl.constexpr,
         BIASED: tl.constexpr, ROWS: tl.constexpr, DRAWN: tl.constexpr, MAPPED: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Argmax of log weight + Gumbel noise over the kept ids; -1 where none has weight."""
    best = tl.full((), NONE, tl.float64)
    best_id = tl.full((), -1, tl.int32)
    for base in range(0, row[5], BLOCK):
        c = base + tl.arange(0, BLOCK)
        x = clean(edited(row, c, ALLOWED, BIASED))
        word = words_of(seed, position, purpose, tl.zeros((), tl.uint32), base, BLOCK)
        hope = (x > NONE) & keeps(x, c, law[4], law[5])
        hope = hope & ((x - law[0]) * law[3] + highest_gumbel(word) >= best.to(tl.float32) - 0.01)
        if tl.max(hope.to(tl.int32), 0) > 0:
            value = log_weights(c, x, law, tree, node, kind, what, drafted, log_c, view, ROWS, DRAWN, MAPPED)
            score = value + gumbel(seed, position, purpose, tl.zeros((), tl.uint32), c, word)
            score = tl.where(hope & (value > NONE), score, NONE)
            here = tl.max(score, 0)
            if here > best:
                best = here
                best_id = tl.min(tl.where(score == here, c, INT32_MAX), 0)
    return best_id
