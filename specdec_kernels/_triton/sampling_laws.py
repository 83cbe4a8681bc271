"""The laws of the rows that verify reads, in Triton: a program a row, stored as in sampling_walk.py."""

import triton
import triton.language as tl

from specdec_kernels._triton.sampling_rows import FLAG_PARAMETER, LARGEST, filters_of, row_law, row_of
from specdec_kernels._triton.sampling_walk import scan_kids, store_law

METHODS = ("greedy", "rejection", "target_only", "block", "coupled", "typical")
GREEDY = tl.constexpr(0)
REJECTION = tl.constexpr(1)
TARGET_ONLY = tl.constexpr(2)
METHOD_BLOCK = tl.constexpr(3)
COUPLED = tl.constexpr(4)
TYPICAL = tl.constexpr(5)
TARGET_LAW = tl.constexpr(0)  # what follows a node is drawn from it
PLAIN_LAW = tl.constexpr(1)  # the row at temperature 1
DRAFT_LAW = tl.constexpr(2)  # a node's children were drawn from


@triton.jit
def span_of(cu, b, nodes, max_nodes):
    """(first node, nodes, sound) of request b."""
    begin, end = tl.load(cu + b), tl.load(cu + b + 1)
    sound = (begin >= 0) & (end <= nodes) & (begin <= end) & (end - begin <= max_nodes)
    return tl.where(sound, begin, 0).to(tl.int64), tl.where(sound, end - begin, 0), sound


@triton.jit
def has_stored_law(draft_lse, heat, k, p, least, row):
    """Whether the stored log-sum-exp is a draft row's law: no filters, and a number."""
    greedy = ~(heat > 1e-5) | (heat > LARGEST)
    lse = tl.load(draft_lse + row)
    return ~greedy & ~(k > 0) & ~(p < 1.0) & ~(least > 0) & (lse == lse)


@triton.jit(do_not_specialize=["size", "entries", "requests", "nodes", "max_nodes", "draft_rows_in_all", "vocab"])
def laws_kernel(
    logits, stride, allowed, allowed_stride, cu_bias, ids, values, entries, size, temperature, top_k, top_p, min_p,
    order, requests, cu, nodes, max_nodes, token_ids, first_child, next_sibling, draft_rows, draft_rows_in_all, vocab,
    draft_lse, floats, ints, wides, only_points,
    KIND: tl.constexpr, METHOD: tl.constexpr, ALLOWED: tl.constexpr, BIASED: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, PROCESSED: tl.constexpr,
    STORED: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    if ORDERED:
        b = tl.load(order + b).to(tl.int64)
    known = (b >= 0) & (b < requests)
    b = tl.where(known, b, 0)
    node = tl.program_id(1)
    begin, count, _sound = span_of(cu, b, nodes, max_nodes)
    n = begin + node
    wanted = known & (node < count)
    if POINTS:
        wanted = wanted & (tl.load(only_points + n * 5 + 3, mask=wanted, other=0) != 0)
    if wanted:
        at = n
        need_mass = n >= 0
        heat, k, p, least = filters_of(temperature, top_k, top_p, min_p, b, known, HAS_K, HAS_P, HAS_MIN)
        fault = tl.where((heat >= 0) & (heat <= LARGEST), 0, FLAG_PARAMETER)
        if KIND == TARGET_LAW:
            need_mass = PROCESSED | ((tl.load(first_child + n) >= 0) & (METHOD != COUPLED))
            if METHOD == GREEDY:
                heat = tl.zeros((), tl.float32)
                k, p, least = tl.zeros((), tl.int32), tl.full((), 1.0, tl.float32), tl.zeros((), tl.float32)
        if KIND == PLAIN_LAW:
            heat, k = tl.full((), 1.0, tl.float32), tl.zeros((), tl.int32)
            p, least = tl.full((), 1.0, tl.float32), tl.zeros((), tl.float32)
        if KIND == DRAFT_LAW:
            tree = (token_ids + begin, first_child + begin, next_sibling + begin, draft_rows + begin, begin, count, b,
                    vocab, draft_rows_in_all)  # fmt: skip
            kind, first, _trial, several, _ignored = scan_kids(tree, node, ROWS)
            at = kind.to(tl.int64)
            wanted = (first >= 0) & (kind >= 0)
            if STORED:
                whole = several | (METHOD == METHOD_BLOCK)
                wanted = wanted & (whole | ~has_stored_law(draft_lse, heat, k, p, least, tl.maximum(at, 0)))
        if wanted:
            row = row_of(logits, stride, allowed, allowed_stride, cu_bias, ids, values, entries, at, size, BIASED)
            law = row_law(row, heat, k, p, least, need_mass, ALLOWED, BIASED, BLOCK)
            store_law(floats, ints, wides, n, law)
            if KIND == TARGET_LAW and METHOD == GREEDY:
                tl.store(ints + n * 5 + 2, law[9] | fault)
