"""verify_probs in Triton: a program a request, which walks its tree alone (csrc/sampling/probs_cuda.cu).

The last token by inverse CDF with float64 sums, whose order is not the CPU op's: a coin within 1e-15 of a boundary may
fall on its other side.
"""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_INDEX, FLAG_TREE, INT32_MAX, block_of, check, check_range, fail

FLAG_DEAD = tl.constexpr(2)
FLAG_RANGE = tl.constexpr(8)
FLAG_DRAFT_MASS = tl.constexpr(16)
FLAG_ZERO_RESIDUAL = tl.constexpr(32)
FLAG_SIBLINGS = tl.constexpr(256)


@triton.jit
def _mass(row_ptr, c, vocab):
    """Probabilities of ids c; NaN, negative values and ids outside the vocabulary have none."""
    x = tl.load(row_ptr + c, mask=(c >= 0) & (c < vocab), other=0.0)
    return tl.where(x > 0, x, 0.0)


@triton.jit
def _tried(ids, siblings, first, end, c):
    """Whether ids c are among those of the siblings from `first` to before `end`."""
    found = c != c
    kid = first
    while (kid != -1) & (kid != end):
        found = found | (c == tl.load(ids + kid))
        kid = tl.load(siblings + kid)
    return found


@triton.jit
def _weights(target_row, draft_row, ids, siblings, first, behind, drafted, c, vocab, plain, REJECTION: tl.constexpr,
             DRAWN: tl.constexpr):  # fmt: skip
    """What the last token is drawn from: the residual, or the target itself."""
    w = _mass(target_row, c, vocab)
    if not plain:
        if REJECTION:
            if drafted >= 0:
                if DRAWN:
                    w = tl.maximum(w - _mass(draft_row, c, vocab), 0.0)
                else:
                    w = tl.where(c == tl.load(ids + drafted), 0.0, w)
        else:
            w = tl.where(_tried(ids, siblings, first, behind, c), 0.0, w)
    return w.to(tl.float64)


@triton.jit(do_not_specialize=["nodes", "max_depth", "vocab"])
def _verify_probs_kernel(
    target_ptr, target_stride, draft_ptr, draft_stride, ids_ptr, cu_ptr, first_ptr, sibling_ptr, uniforms_ptr,
    final_ptr, tokens_ptr, emitted_ptr, accepted_ptr, flags_ptr, nodes, max_depth, vocab,
    REJECTION: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    tokens = tokens_ptr + b * (max_depth + 1)
    accepted = accepted_ptr + b * (max_depth + 1)
    for i in range(0, max_depth + 1):
        tl.store(tokens + i, -1)
        tl.store(accepted + i, -1)
    begin = tl.load(cu_ptr + b).to(tl.int64)
    count = tl.load(cu_ptr + b + 1) - begin
    sound = (begin >= 0) & (count >= 0) & (begin + count <= nodes)
    flags = tl.where(sound, 0, FLAG_INDEX)
    begin = tl.where(sound, begin, 0)
    node = tl.where(sound & (count > 0), 0, -1)
    ids, siblings = ids_ptr + begin, sibling_ptr + begin
    tl.store(accepted, 0, mask=node == 0)
    depth = tl.zeros((), tl.int32)
    while node >= 0:
        row = begin + node
        target_row = target_ptr + row * target_stride
        first = tl.load(first_ptr + row, mask=depth < max_depth, other=-1)
        kid = first
        before = node
        chosen = tl.full((), -1, tl.int32)
        drafted = tl.full((), -1, tl.int32)
        behind = tl.full((), -1, tl.int32)
        cumulative = tl.zeros((), tl.float64)
        while kid != -1:
            following = tl.full((), -1, tl.int32)
            if (kid <= before) | (kid >= count):
                flags |= FLAG_TREE
                behind = kid
            else:
                before = kid
                token = tl.load(ids + kid)
                if token != -1:
                    flags |= tl.where((token < 0) | (token >= vocab), FLAG_RANGE, 0)
                    p = tl.sum(_mass(target_row, token + tl.zeros((1,), tl.int32), vocab), 0)
                    if REJECTION:
                        if drafted >= 0:
                            flags |= FLAG_SIBLINGS
                        else:
                            q = tl.full((), 1.0, tl.float32)
                            if DRAWN:
                                row_q = draft_ptr + (begin + kid) * draft_stride
                                q = tl.sum(_mass(row_q, token + tl.zeros((1,), tl.int32), vocab), 0)
                            missing = ~(q > 0) & (token >= 0) & (token < vocab)
                            flags |= tl.where(missing, FLAG_DRAFT_MASS, 0)
                            drafted = kid
                            u = tl.load(uniforms_ptr + begin + kid).to(tl.float64)
                            takes = (q > 0) & (p > 0) & (u * q.to(tl.float64) < p.to(tl.float64))
                            chosen = tl.where(takes, kid, -1)
                    else:
                        if _tried(ids, siblings, first, kid, token):
                            flags |= FLAG_SIBLINGS
                        else:
                            cumulative += p.to(tl.float64)
                            u = tl.load(uniforms_ptr + begin + first).to(tl.float64)
                            chosen = tl.where((p > 0) & (u < cumulative), kid, -1)
                if chosen < 0:
                    following = tl.load(siblings + kid)
            kid = following
        if chosen >= 0:
            tl.store(tokens + depth, tl.load(ids + chosen))
            tl.store(accepted + depth + 1, chosen)
        else:
            token = tl.full((), -1, tl.int32)
            draft_row = draft_ptr + (begin + tl.maximum(drafted, 0)) * draft_stride
            for attempt in range(0, 2):  # the residual, then the target itself
                if token < 0:
                    flags |= tl.where(attempt == 1, FLAG_ZERO_RESIDUAL, 0)
                    total = tl.zeros((), tl.float64)
                    last = tl.full((), -1, tl.int32)
                    for base in range(0, vocab, BLOCK):
                        c = base + tl.arange(0, BLOCK)
                        w = _weights(target_row, draft_row, ids, siblings, first, behind, drafted, c, vocab,
                                     attempt == 1, REJECTION, DRAWN)  # fmt: skip
                        total += tl.sum(w, 0)
                        last = tl.maximum(last, tl.max(tl.where(w > 0, c, -1), 0))
                    bar = tl.load(final_ptr + b).to(tl.float64) * total
                    found = tl.full((), INT32_MAX, tl.int32)
                    cumulative = tl.zeros((), tl.float64)
                    for base in range(0, vocab, BLOCK):
                        if (found == INT32_MAX) & (last >= 0):
                            c = base + tl.arange(0, BLOCK)
                            w = _weights(target_row, draft_row, ids, siblings, first, behind, drafted, c, vocab,
                                         attempt == 1, REJECTION, DRAWN)  # fmt: skip
                            reached = cumulative + tl.cumsum(w, 0)
                            found = tl.min(tl.where((w > 0) & (reached > bar), c, INT32_MAX), 0)
                            cumulative += tl.sum(w, 0)
                    token = tl.minimum(found, last)
            flags |= tl.where(token < 0, FLAG_DEAD, 0)
            tl.store(tokens + depth, tl.maximum(token, 0))
        depth += 1
        node = chosen
    tl.store(emitted_ptr + b, depth)
    tl.store(flags_ptr + b, flags)


def impl_verify_probs(
    target_probs, draft_probs, draft_token_ids, cu_nodes, first_child, next_sibling, uniforms, final_uniforms, method,
    max_depth, output_token_ids, num_emitted, accepted_nodes, flags,
):  # fmt: skip
    """`specdec_triton::verify_probs`."""
    op = "verify_probs"
    if method not in ("rejection", "target_only"):
        fail(op, "method", "rejection or target_only", repr(method))
    if target_probs.dim() != 2:
        fail(op, "target_probs", "2 dimensions", f"shape {list(target_probs.shape)}")
    nodes, vocab = target_probs.shape
    check_range(op, "max_depth", max_depth, 0, 1 << 20)
    for name, tensor in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if tensor is None:
            continue
        dense = vocab <= 1 or tensor.stride(1) == 1
        if tensor.dtype != torch.float32 or tensor.shape != (nodes, vocab) or not dense:
            fail(op, name, f"float32 {[nodes, vocab]} with dense rows", f"{tensor.dtype} {list(tensor.shape)}")
    check(op, "cu_nodes", cu_nodes, (None,))
    if cu_nodes.numel() < 1:
        fail(op, "cu_nodes", "shape [B + 1]", "[0]")
    requests, width = cu_nodes.numel() - 1, max_depth + 1
    for name, tensor, shape, dtype in (
        ("draft_token_ids", draft_token_ids, (nodes,), torch.int32),
        ("first_child", first_child, (nodes,), torch.int32),
        ("next_sibling", next_sibling, (nodes,), torch.int32),
        ("uniforms", uniforms, (nodes,), torch.float32),
        ("final_uniforms", final_uniforms, (requests,), torch.float32),
        ("output_token_ids", output_token_ids, (requests, width), torch.int32),
        ("num_emitted", num_emitted, (requests,), torch.int32),
        ("accepted_nodes", accepted_nodes, (requests, width), torch.int32),
        ("flags", flags, (requests,), torch.int32),
    ):
        check(op, name, tensor, shape, dtype)
    if requests == 0:
        return
    drawn = draft_probs is not None
    _verify_probs_kernel[(requests,)](
        target_probs, target_probs.stride(0), draft_probs if drawn else target_probs,
        draft_probs.stride(0) if drawn else 0, draft_token_ids, cu_nodes, first_child, next_sibling, uniforms,
        final_uniforms, output_token_ids, num_emitted, accepted_nodes, flags, nodes, max_depth, vocab,
        REJECTION=method == "rejection", DRAWN=drawn, BLOCK=block_of(vocab, 256, 2048), enable_fp_fusion=False,
    )  # fmt: skip
