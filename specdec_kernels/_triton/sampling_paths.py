"""verify in Triton: the methods that choose a whole path before they emit it, and what all methods write."""

import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_TREE, PURPOSE_BLOCK
from specdec_kernels._triton.sampling_laws import has_stored_law
from specdec_kernels._triton.sampling_noise import NONE, minus_expm1
from specdec_kernels._triton.sampling_rows import FLAG_INF, FLAG_NAN, FLAG_PARAMETER, NO_TIE, row_of
from specdec_kernels._triton.sampling_walk import (
    BLOCK_ONE_HOT,
    FLAG_RANGE,
    PLAIN,
    RESIDUAL,
    coin,
    load_law,
    log_prob,
    log_q_of,
    logit_at,
    residual_mass,
    row_entropy,
    scan_kids,
)

FLAG_DRAFT_MASS = tl.constexpr(16)


@triton.jit
def target_row(args, n, BIASED: tl.constexpr):
    return row_of(args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7], n, args[8], BIASED)


@triton.jit
def write_token(out, at, token, n, ALLOWED: tl.constexpr, BIASED: tl.constexpr, RAW: tl.constexpr,
                PROCESSED: tl.constexpr):  # fmt: skip
    """Emits a token behind node n; `out`: (tokens, log-probabilities, logits' arguments, laws, at 1, as they came)."""
    width: tl.constexpr = 2 if RAW and PROCESSED else 1
    tl.store(out[0] + at, token)
    if PROCESSED:
        law = load_law(out[3], n)
        x = logit_at(target_row(out[2], n, BIASED), token, ALLOWED, BIASED)
        value = tl.zeros((), tl.float64)
        if law[10]:
            value += log_prob(load_law(out[4], n), x, token)
        else:
            value += log_prob(law, x, token)
        tl.store(out[1] + at * width + width - 1, value.to(tl.float32))
    if RAW:
        x = logit_at(target_row(out[2], n, False), token, False, False)
        tl.store(out[1] + at * width, log_prob(load_law(out[5], n), x, token).to(tl.float32))


@triton.jit
def draft_view(source, laws, n, row, b, stored):
    """(row, law, t2d, d2t, ids that exist) of the draft row behind node n's children; `source`: (logits' arguments,
    stored log-sum-exps, temperatures, t2d, d2t, ids that exist)."""
    args = source[0]
    view_row = row_of(args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7], row.to(tl.int64), args[8],
                      False)  # fmt: skip
    law = load_law(laws, n)
    heat = tl.load(source[2] + b)
    tau = tl.div_rn(1.0, tl.where(heat > 1e-5, tl.minimum(heat, 1e36), 1.0))
    rate = tau * 1.44269504088896341
    lse = tl.load(source[1] + tl.where(stored, row, 0)).to(tl.float64)
    law = (tl.where(stored, 0.0, law[0]), tl.where(stored, rate, law[1]),
           tl.where(stored, tl.div_rn(-125.0, rate), law[2]), tl.where(stored, tau, law[3]),
           tl.where(stored, NONE, law[4]), tl.where(stored, NO_TIE, law[5]), tl.where(stored, 0, law[6]),
           tl.where(stored, lse, law[7]), tl.where(stored, 0, law[8]), tl.where(stored, 0, law[9]), ~stored & law[10],
           ~stored & law[11])  # fmt: skip
    return view_row, law, source[3], source[4], source[5]


@triton.jit
def walk_chain(q, salt, heat, k, p, least, ALLOWED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
               MAPPED: tl.constexpr, KNOWN_Q: tl.constexpr, STORED: tl.constexpr, COINS: tl.constexpr,
               RAW: tl.constexpr, PROCESSED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Block verification: every node of the chain is visited, the deepest cut counts.

    (whether the token rule takes over, flags, emitted, what is drawn, where, of which children, drafted id, stored law,
    log c)."""
    tree, args, source, out, targets, q_laws, accepted = q[0], q[1], q[2], q[3], q[4], q[5], q[6]
    seed, position, uniforms, max_depth = q[7], q[8], q[9], q[10]
    begin, count, b, size = tree[4], tree[5], tree[6], tree[7]
    flags, depth, emitted = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    what, draw_kind, drafted = tl.zeros((), tl.int32), tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    stored, log_c = depth > 0, tl.full((), NONE, tl.float64)
    node, at = tl.where(count > 0, 0, -1), tl.zeros((), tl.int32)
    rho, cut_rho = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    cut, length = tl.zeros((), tl.int32), tl.full((), 1, tl.int32)
    walking = node < 0
    while (node >= 0) & ~walking:
        n = begin + node
        law = load_law(targets, n)
        flags |= law[9]
        kind, first, _trial, _several, seen = -1 + node * 0, -1 + node * 0, node * 0, node < 0, node * 0
        if (depth < max_depth) & (count > 1):
            kind, first, _trial, _several, seen = scan_kids(tree, node, ROWS)
        flags |= seen | tl.where(tl.load(tree[2] + node) != -1, FLAG_TREE, 0)
        following = -1 + node * 0
        if law[10]:  # greedy rows: block and chain rule agree
            walking = node >= 0
            for i in range(1, length):
                tl.store(accepted + i, -1)
        else:
            row = target_row(args, n, BIASED)
            last = first < 0
            drawn = ~last & (kind >= 0)
            view = draft_view(source, q_laws, n, tl.maximum(kind, 0), b, node < 0)
            if drawn:
                flags |= view[1][9] & (FLAG_NAN | FLAG_INF | FLAG_PARAMETER)
            token = tl.load(tree[0] + tl.maximum(first, 0))
            inside = (token >= 0) & (token < size)
            log_p = tl.full((), NONE, tl.float64)
            if ~last & inside:
                log_p = log_prob(law, logit_at(row, token, ALLOWED, BIASED), token)
            if depth > 0:
                chance = tl.exp(rho)
                if drawn:
                    Z = chance * residual_mass(row, law, view, 1.0 / chance, ALLOWED, BIASED, MAPPED, BLOCK)
                    missing = minus_expm1(rho)
                    chance = tl.where(missing == 0.0, 1.0, Z / (Z + missing))
                elif ~last:
                    mass = tl.exp(log_p)
                    Z = chance * (1.0 - mass) + tl.maximum(chance * mass - 1.0, 0.0)
                    missing = minus_expm1(rho)
                    chance = tl.where(missing == 0.0, 1.0, Z / (Z + missing))
                u, _log_u = coin(seed, position + depth - 1, PURPOSE_BLOCK, salt, depth * 0,
                                uniforms, node, COINS)  # fmt: skip
                cut_rho = tl.where(u < chance, rho, cut_rho)
                cut = tl.where(u < chance, depth, cut)
            if ~last:
                log_q = tl.zeros((), tl.float64)
                if drawn:
                    log_q += tl.max(log_q_of(view, token + tl.zeros((1,), tl.int32), MAPPED), 0)
                    if KNOWN_Q and inside:
                        log_q = tl.load(q[11] + first).to(tl.float64)
                        log_q = tl.where(log_q == log_q, log_q, NONE)
                        log_p = log_p.to(tl.float32).to(tl.float64)
                flags |= tl.where(inside & ~(log_q > NONE), FLAG_DRAFT_MASS, 0)
                rho = rho + log_p - log_q
                rho = tl.where((log_q > NONE) & (rho > NONE), tl.minimum(rho, 0.0), NONE)
                depth += 1
                length = depth + 1
                tl.store(accepted + depth, first)
                following = tl.where(rho > NONE, first, -1)  # no cut behind a draft without target mass
        node = following
    if ~walking & (count > 0):
        tl.debug_barrier()  # the path is in memory
        for i in range(0, cut):
            child = tl.load(accepted + i + 1)
            write_token(out, emitted, tl.load(tree[0] + child), begin + at, ALLOWED, BIASED, RAW, PROCESSED)
            emitted += 1
            at = child
        tl.debug_barrier()
        for i in range(cut + 1, length):
            tl.store(accepted + i, -1)
        what = tl.full((), PLAIN, tl.int32)
        if cut + 1 < length:
            kind, first, _trial, _several, seen = scan_kids(tree, at, ROWS)
            log_c = -cut_rho
            drafted = tl.load(tree[0] + first)
            draw_kind = kind
            what = tl.where(kind >= 0, RESIDUAL, BLOCK_ONE_HOT)
            if STORED:
                stored = (kind >= 0) & has_stored_law(source[1], heat, k, p, least, tl.maximum(kind, 0))
    return walking, flags, emitted, what, at, draw_kind, drafted, stored, log_c


@triton.jit
def walk_typical(q, parents, passes, epsilon, delta, ALLOWED: tl.constexpr, BIASED: tl.constexpr, RAW: tl.constexpr,
                 PROCESSED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Typical acceptance: the deepest node whose whole path passes, the first one among equals.

    (flags, emitted, what is drawn, where). passes: depth of every node that passes, else -1."""
    tree, args, out, targets, accepted, max_depth = q[0], q[1], q[3], q[4], q[6], q[10]
    begin, count, size = tree[4], tree[5], tree[7]
    flags, emitted, what = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    at = tl.zeros((), tl.int32)
    for i in range(0, count):
        tl.store(passes + i, tl.where(i == 0, 0, -1))
    tl.debug_barrier()
    best, best_depth, of = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.full((), -1, tl.int32)
    entropy = tl.zeros((), tl.float64)
    for i in range(1, count):
        parent, token = tl.load(parents + i), tl.load(tree[0] + i)
        above = tl.load(passes + parent)
        if (above >= 0) & (above < max_depth) & (token != -1):
            n = begin + parent
            law = load_law(targets, n)
            inside = (token >= 0) & (token < size)
            flags |= law[9] | tl.where(inside, 0, FLAG_RANGE)
            if inside & ~law[11]:
                row = target_row(args, n, BIASED)
                if parent != of:
                    entropy = row_entropy(row, law, ALLOWED, BIASED, BLOCK)
                of = parent
                log_p = log_prob(law, logit_at(row, token, ALLOWED, BIASED), token)
                bar = tl.minimum(delta * tl.exp(-entropy), epsilon)
                if (log_p > NONE) & (tl.exp(log_p) > bar):
                    tl.store(passes + i, above + 1)
                    tl.debug_barrier()
                    best = tl.where(above + 1 > best_depth, i, best)
                    best_depth = tl.maximum(best_depth, above + 1)
    if count > 0:
        at = best
        i = best_depth
        while i > 0:
            tl.store(accepted + i, at)
            at = tl.load(parents + at)
            i -= 1
        tl.debug_barrier()
        at = at * 0
        for i in range(0, best_depth):
            child = tl.load(accepted + i + 1)
            flags |= tl.load(targets[1] + (begin + at) * 5 + 2)
            write_token(out, emitted, tl.load(tree[0] + child), begin + at, ALLOWED, BIASED, RAW, PROCESSED)
            emitted += 1
            at = child
        law = load_law(targets, begin + at)
        flags |= law[9]
        if law[11]:
            write_token(out, emitted, 0, begin + at, ALLOWED, BIASED, RAW, PROCESSED)
            emitted += 1
        else:
            what = tl.full((), PLAIN, tl.int32)
    return flags, emitted, what, at
