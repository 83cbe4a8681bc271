"""verify in Triton: the laws of all rows, a program a row, then a program a request that walks its tree and draws the
last token. Both values of `form` do this; tile_stats are checked and not used. As csrc/sampling/walk_cpu.cpp."""

import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_INDEX, FLAG_TREE, PURPOSE_ACCEPT, PURPOSE_EMIT
from specdec_kernels._triton.sampling_laws import (
    COUPLED,
    GREEDY,
    METHOD_BLOCK,
    TARGET_ONLY,
    TYPICAL,
    has_stored_law,
    span_of,
)
from specdec_kernels._triton.sampling_noise import NONE, log_residual
from specdec_kernels._triton.sampling_paths import (
    FLAG_DRAFT_MASS,
    draft_view,
    target_row,
    walk_chain,
    walk_typical,
    write_token,
)
from specdec_kernels._triton.sampling_race import race
from specdec_kernels._triton.sampling_rows import FLAG_INF, FLAG_NAN, FLAG_PARAMETER, filters_of, keeps, mass_of, weight
from specdec_kernels._triton.sampling_walk import (
    NO_ROWS,
    ONE_HOT,
    PLAIN,
    RESIDUAL,
    coin,
    kid_after,
    load_law,
    log_prob,
    log_q_of,
    logit_at,
    pick,
    residual_mass,
    scan_kids,
)

FLAG_ZERO_RESIDUAL = tl.constexpr(32)


@triton.jit
def _tree_is_sound(parents, first_child, next_sibling, count):
    sound = count >= 0
    for i in range(0, count):
        parent, child, following = tl.load(parents + i), tl.load(first_child + i), tl.load(next_sibling + i)
        sound = sound & tl.where(i == 0, (parent == -1) & (following == -1), (parent >= 0) & (parent < i))
        if child != -1:
            here = (child > i) & (child < count)
            sound = sound & here & (tl.load(parents + child, mask=here, other=-2) == i)
        if following != -1:
            here = (following > i) & (following < count)
            sound = sound & here & (tl.load(parents + following, mask=here, other=-2) == parent)
    return sound


@triton.jit
def _walk(q, node, what, draw_kind, drafted, stored, log_c, heat, k, p, least, METHOD: tl.constexpr,
          ALLOWED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, MAPPED: tl.constexpr, KNOWN_Q: tl.constexpr,
          STORED: tl.constexpr, COINS: tl.constexpr, RAW: tl.constexpr, PROCESSED: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Greedy, one-hot, sampled siblings, coupled: node by node from `node` (-1: nothing to do).

    (flags, emitted, what is drawn, where, of which children, stored law, log c, whether there was a residual before,
    its log c)."""
    DRAWN: tl.constexpr = ROWS != NO_ROWS
    tree, args, source, out, targets, q_laws, accepted = q[0], q[1], q[2], q[3], q[4], q[5], q[6]
    seed, position, uniforms, max_depth = q[7], q[8], q[9], q[10]
    begin, count, b, size = tree[4], tree[5], tree[6], tree[7]
    flags, emitted, depth = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    has_last, last_log_c = depth > 0, tl.full((), NONE, tl.float64)
    draw_node = tl.zeros((), tl.int32)
    while node >= 0:  # greedy, one-hot, sampled siblings, coupled: node by node from the root
        n = begin + node
        law = load_law(targets, n)
        flags |= law[9]
        row = target_row(args, n, BIASED)
        kind, first, trial, several, seen = -1 + node * 0, -1 + node * 0, node * 0, node < 0, node * 0
        if (depth < max_depth) & (count > 1):
            kind, first, trial, several, seen = scan_kids(tree, node, ROWS)
        flags |= seen
        following = -1 + node * 0
        token = -1 + node * 0  # what this step emits, or -1
        if law[11]:  # dead row: id 0, nothing behind it
            token = node * 0
        elif law[10] | (METHOD == COUPLED):
            token = law[8]
            if METHOD == COUPLED and ~law[10]:
                view = draft_view(source, targets, n, node * 0, b, node < 0)
                own = pick(row, law, seed, position + depth, PURPOSE_EMIT, tree, node, kind, node * 0 + PLAIN, token,
                           log_c, view, ALLOWED, BIASED, ROWS, False, False, BLOCK)  # fmt: skip
                token = tl.where(own >= 0, own, token)
            kid = first
            while (kid >= 0) & (following < 0):
                following = tl.where(tl.load(tree[0] + kid) == token, kid, -1)
                kid, trial = kid_after(tree, node, kid, trial, kind, ROWS)
        elif first < 0:
            what = tl.full((), PLAIN, tl.int32)
        elif (METHOD == TARGET_ONLY) | (kind == -1):
            u, log_u = coin(seed, position + depth, PURPOSE_ACCEPT, tl.zeros((), tl.uint32), depth * 0,
                            uniforms, tl.load(tree[1] + node), COINS)  # fmt: skip
            bar = u * law[6].to(tl.float64)
            if COINS:
                bar = bar * (1.0 + 2.384185791015625e-7)  # see walk_cpu.cpp
            mass = tl.zeros((), tl.int64)
            kid = first
            while (kid >= 0) & (following < 0):
                candidate = tl.load(tree[0] + kid)
                x = logit_at(row, candidate, ALLOWED, BIASED)
                counts = (candidate < size) & (x > NONE) & keeps(x, candidate, law[4], law[5])
                mass += tl.where(counts, mass_of(weight(x, law[0], law[1], law[2])), 0)
                takes = counts & ((mass.to(tl.float64) > bar) | (mass >= law[6]))
                following = tl.where(takes, kid, -1)
                token = tl.where(takes, candidate, token)
                kid, trial = kid_after(tree, node, kid, trial, kind, ROWS)
            if following < 0:
                what = tl.full((), ONE_HOT, tl.int32)
                draw_kind = kind
        elif DRAWN:
            if STORED:
                stored = ~several & has_stored_law(source[1], heat, k, p, least, kind)
            view = draft_view(source, q_laws, n, kind, b, stored)
            flags |= view[1][9] & (FLAG_NAN | FLAG_INF | FLAG_PARAMETER)
            c, Z, W = tl.zeros((), tl.float64), tl.full((), 1.0, tl.float64), tl.full((), 1.0, tl.float64)
            last_c = tl.zeros((), tl.float64)
            kid = first
            while (kid >= 0) & (following < 0) & (W > 1e-12):
                stop = kid < 0
                if kid != first:
                    mass_left = residual_mass(row, law, view, c, ALLOWED, BIASED, MAPPED, BLOCK)
                    stop = ~(mass_left > 0.0)
                    Z = tl.where(stop, Z, mass_left)
                if stop:
                    flags |= FLAG_ZERO_RESIDUAL
                    c = last_c
                    kid = kid * 0 - 1
                else:
                    candidate = tl.load(tree[0] + kid)
                    inside = (candidate >= 0) & (candidate < size)
                    log_p = tl.full((), NONE, tl.float64)
                    if inside:
                        log_p = log_prob(law, logit_at(row, candidate, ALLOWED, BIASED), candidate)
                    log_q = tl.max(log_q_of(view, candidate + tl.zeros((1,), tl.int32), MAPPED), 0)
                    if KNOWN_Q and inside:
                        log_q = tl.load(q[11] + kid).to(tl.float64)
                        log_q = tl.where(log_q == log_q, log_q, NONE)
                        log_p = log_p.to(tl.float32).to(tl.float64)
                    flags |= tl.where(inside & ~(log_q > NONE), FLAG_DRAFT_MASS, 0)
                    log_c = tl.where(c > 0, tl.log(tl.where(c > 0, c, 1.0)), NONE)
                    some_q = tl.where(log_q > NONE, log_q, 0.0)
                    ratio = log_residual(log_p, some_q, log_c) - tl.log(Z) + tl.log(W) - some_q
                    ratio = tl.where(c == 0.0, log_p - some_q, ratio)
                    ratio = tl.where(log_q > NONE, ratio, NONE)
                    u, log_u = coin(seed, position + depth, PURPOSE_ACCEPT, tl.zeros((), tl.uint32), trial,
                                    uniforms, kid, COINS)  # fmt: skip
                    if (ratio > NONE) & ((ratio >= 0.0) | (log_u < ratio)):
                        following = kid
                        token = candidate
                    else:
                        last_c = c
                        c += Z / W
                        W -= tl.where(log_q > NONE, tl.exp(some_q), 0.0)
                        kid, trial = kid_after(tree, node, kid, trial, kind, ROWS)
            if following < 0:
                what = tl.full((), RESIDUAL, tl.int32)
                draw_kind = kind
                has_last = node >= 0
                log_c = tl.where(c > 0, tl.log(tl.where(c > 0, c, 1.0)), NONE)
                last_log_c = tl.where(last_c > 0, tl.log(tl.where(last_c > 0, last_c, 1.0)), NONE)
        if what != 0:
            draw_node = node
        else:
            write_token(out, emitted, token, n, ALLOWED, BIASED, RAW, PROCESSED)
            emitted += 1
        if following >= 0:
            depth += 1
            tl.store(accepted + depth, following)
        node = following
    return flags, emitted, what, draw_node, draw_kind, stored, log_c, has_last, last_log_c


@triton.jit(do_not_specialize=["size", "draft_size", "entries", "requests", "nodes", "max_nodes", "max_depth",
                               "draft_rows_in_all"])  # fmt: skip
def walk_kernel(
    logits, stride, allowed, allowed_stride, cu_bias, bias_ids, bias_values, entries, size,
    draft_logits, draft_stride, draft_allowed, draft_allowed_stride, draft_size, t2d, d2t, draft_rows,
    draft_rows_in_all, draft_log_probs, draft_lse, draft_heat, draft_k, draft_p, draft_min,
    order, requests, cu, nodes, max_nodes, max_depth, token_ids, parents, first_child, next_sibling, tree_flags,
    seeds, positions, steps, uniforms, epsilon, delta, passes,
    floats, ints, wides, raw_floats, raw_ints, raw_wides, edit_floats, edit_ints, edit_wides, q_floats, q_ints, q_wides,
    tokens_out, emitted_out, accepted_out, flags_out, logprobs_out,
    METHOD: tl.constexpr, ALLOWED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, MAPPED: tl.constexpr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, KNOWN_Q: tl.constexpr, STORED: tl.constexpr,
    ORDERED: tl.constexpr, TOLD: tl.constexpr, STEPPED: tl.constexpr, COINS: tl.constexpr, RAW: tl.constexpr,
    PROCESSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    DRAWN: tl.constexpr = ROWS != NO_ROWS
    b = tl.program_id(0).to(tl.int64)
    if ORDERED:
        b = tl.load(order + b).to(tl.int64)
    known = (b >= 0) & (b < requests)
    if known:
        begin, count, sound = span_of(cu, b, nodes, max_nodes)
        flags = tl.where(sound, 0, FLAG_INDEX)
        width: tl.constexpr = 2 if RAW and PROCESSED else 1
        tokens, accepted = tokens_out + b * (max_depth + 1), accepted_out + b * (max_depth + 1)
        logprobs = logprobs_out + b * (max_depth + 1) * width
        for i in range(0, max_depth + 1):
            tl.store(tokens + i, -1)
            tl.store(accepted + i, tl.where((i == 0) & (count > 0), 0, -1))
            if RAW or PROCESSED:
                for j in tl.static_range(width):
                    tl.store(logprobs + i * width + j, 0.0)
        told = tl.zeros((), tl.int32)
        if TOLD:
            told += tl.load(tree_flags + b)
        if count > 0:
            is_sound = _tree_is_sound(parents + begin, first_child + begin, next_sibling + begin, count)
            broken = (told != 0) | ~is_sound
            flags |= tl.where(broken, FLAG_TREE, 0) | told
            count = tl.where(broken, 1, count)
        tree = (token_ids + begin, first_child + begin, next_sibling + begin, draft_rows + begin, begin, count, b, size,
                draft_rows_in_all)  # fmt: skip
        args = (logits, stride, allowed, allowed_stride, cu_bias, bias_ids, bias_values, entries, size)
        q_args = (draft_logits, draft_stride, draft_allowed, draft_allowed_stride, cu_bias, bias_ids, bias_values, 0,
                  draft_size)  # fmt: skip
        source = (q_args, draft_lse, draft_heat, t2d, d2t, size)
        targets, q_laws = (floats, ints, wides), (q_floats, q_ints, q_wides)
        out = (tokens, logprobs, args, targets, (edit_floats, edit_ints, edit_wides), (raw_floats, raw_ints, raw_wides))
        seed, position = tl.load(seeds + b), tl.load(positions + b)
        q = (tree, args, source, out, targets, q_laws, accepted, seed, position, uniforms + begin, max_depth,
             draft_log_probs + begin)  # fmt: skip
        heat, k, p, least = filters_of(draft_heat, draft_k, draft_p, draft_min, b, known, HAS_K, HAS_P, HAS_MIN)
        # The last token: drawn at node `at` as `what` says (0: none is to be drawn).
        emitted, what, at = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        kind, drafted, stored, has_last = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32), emitted > 0, emitted > 0
        log_c, last_log_c = tl.full((), NONE, tl.float64), tl.full((), NONE, tl.float64)
        walking = count > 0
        if METHOD == METHOD_BLOCK:
            salt = tl.zeros((), tl.uint32)
            if STEPPED:
                salt = (tl.load(steps + b) & 0xFFFFFFFF).to(tl.uint32)
            walking, seen, emitted, what, at, kind, drafted, stored, log_c = walk_chain(
                q, salt, heat, k, p, least, ALLOWED, BIASED, ROWS, MAPPED, KNOWN_Q, STORED, COINS, RAW, PROCESSED, BLOCK
            )
            flags |= seen
        if METHOD == TYPICAL:
            seen, emitted, what, at = walk_typical(
                q, parents + begin, passes + begin, epsilon, delta, ALLOWED, BIASED, RAW, PROCESSED, BLOCK
            )
            flags |= seen
        elif walking:
            seen, emitted, what, at, kind, stored, log_c, has_last, last_log_c = _walk(
                q, at * 0, what, kind, drafted, stored, log_c, heat, k, p, least, METHOD, ALLOWED, BIASED, ROWS, MAPPED,
                KNOWN_Q, STORED, COINS, RAW, PROCESSED, BLOCK,
            )  # fmt: skip
            flags |= seen
        if METHOD != GREEDY and METHOD != COUPLED and what != 0:
            n = begin + at
            law = load_law(targets, n)
            row = target_row(args, n, BIASED)
            view = draft_view(source, q_laws, n, tl.maximum(kind, 0), b, stored)
            if METHOD == METHOD_BLOCK and what == RESIDUAL:
                flags |= view[1][9] & (FLAG_NAN | FLAG_INF | FLAG_PARAMETER)
            token = law[8]
            looking = ~law[10]
            while looking:
                found = emitted * 0 - 1
                if what != PLAIN:
                    found = race(row, law, seed, position + emitted, tree, at, kind, what, drafted, log_c, view,
                                 ALLOWED, BIASED, ROWS, DRAWN, MAPPED)  # fmt: skip
                if found < 0:
                    found = pick(row, law, seed, position + emitted, PURPOSE_EMIT, tree, at, kind, what, drafted,
                                 log_c, view, ALLOWED, BIASED, ROWS, DRAWN, MAPPED, BLOCK)  # fmt: skip
                token = tl.where(found >= 0, found, token)
                looking = (found < 0) & (what != PLAIN)
                flags |= tl.where(looking, FLAG_ZERO_RESIDUAL, 0)
                what = tl.where(looking & ~has_last, PLAIN, what)
                log_c = last_log_c
                has_last = emitted < 0
            write_token(out, emitted, token, n, ALLOWED, BIASED, RAW, PROCESSED)
            emitted += 1
        tl.store(emitted_out + b, emitted)
        tl.store(flags_out + b, flags)
