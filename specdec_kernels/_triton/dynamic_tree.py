"""expand_tree and rerank_tree in Triton: the same outputs as csrc/tree/dynamic_cuda.cu.

Keys are signed here: they rise as the rank falls, then with depth, then with the index (candidate_key of
csrc/tree/rerank.h). rerank_tree is one launch: a program a request lists what is kept, the last one to finish lays the
requests out and leaves the workspace zeroed.
"""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import (
    FLAG_INDEX,
    FLAG_TREE,
    block_of,
    check,
    check_dense,
    check_range,
    fail,
    node_range,
)

MAX_NODES = tl.constexpr(1024)
MAX_CANDIDATES = tl.constexpr(1 << 20)
ABSENT = tl.constexpr((1 << 63) - 1)
NONE = tl.constexpr(float("-inf"))


@triton.jit
def _key(rank, depth, index):
    bits = tl.where(rank == 0, 0.0, rank).to(tl.int32, bitcast=True)  # -0 and +0 are one rank
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    place = (tl.minimum(depth, 4095) << 20) | index
    key = ((~rising).to(tl.int64) << 32) | place.to(tl.int64)
    return tl.where(rank > NONE, key, ABSENT)


@triton.jit
def _child_keys(scores_ptr, steps_ptr, sums_ptr, children, ranks, stride_p, start, BLOCK: tl.constexpr):
    """Keys of a tile of children, their sums stored."""
    i = start + tl.arange(0, BLOCK)
    active = i < children
    step = tl.load(steps_ptr + (i // ranks).to(tl.int64) * stride_p + i % ranks, mask=active, other=NONE)
    total = tl.load(scores_ptr + i // ranks, mask=active, other=NONE) + step
    total = tl.where(total > NONE, total, NONE)
    tl.store(sums_ptr + i, total, mask=active)
    return _key(total, i * 0, i)


@triton.jit(do_not_specialize=["k", "children"])
def _expand_tree_kernel(
    scores_ptr, steps_ptr, sums_ptr, beam_ptr, beam_scores_ptr, stride_b, step_stride_b, step_stride_p, ranks, children,
    k, BLOCK: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    scores = scores_ptr + b * stride_b
    steps = steps_ptr + b * step_stride_b
    sums = sums_ptr + b * children
    keys = _child_keys(scores, steps, sums, children, ranks, step_stride_p, 0, BLOCK)
    best = tl.min(keys, 0)
    last = tl.full((), -(1 << 63), tl.int64)  # below every key
    for i in range(0, k):
        if not ONE_TILE:
            for start in range(BLOCK, children, BLOCK):
                more = _child_keys(scores, steps, sums, children, ranks, step_stride_p, start, BLOCK)
                best = tl.minimum(best, tl.min(tl.where(more > last, more, ABSENT), 0))
        found = best != ABSENT
        rising = ~(best >> 32).to(tl.int32)
        score = tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)
        tl.store(beam_ptr + b * k + i, tl.where(found, (best & 0xFFFFF).to(tl.int32), -1))
        tl.store(beam_scores_ptr + b * k + i, tl.where(found, score, NONE))
        last = best
        best = tl.min(tl.where(keys > last, keys, ABSENT), 0)


@triton.jit
def _drawn_rank(scores, parents, i, count, active):
    """rank of drawn candidates by themselves: the draft mass of the earlier siblings, in the order of the draws."""
    score = tl.load(scores + i, mask=active, other=NONE)
    parent = tl.load(parents + i, mask=active, other=-1)
    there = active & (i > 0) & (score > NONE) & (parent >= 0) & (parent < i)
    above = tl.load(scores + parent, mask=there & (parent > 0), other=0.0).to(tl.float64)
    used = tl.zeros(i.shape, tl.float64)
    for j in range(1, tl.minimum(tl.max(i, 0) + 1, count)):
        sibling = there & (tl.load(parents + j) == parent) & (j < i)
        drawn = tl.load(scores + j)
        made = tl.where(drawn > NONE, 1, 0)  # a draw that was not made ends its siblings
        there = there & (sibling.to(tl.int32) <= made)
        used += tl.where(sibling & there, tl.exp(drawn.to(tl.float64) - above), 0.0)
    left = tl.maximum(1.0 - used, 5.9604644775390625e-08)
    return tl.where(there, (above + tl.log(left)).to(tl.float32), NONE)


@triton.jit
def _own_rank(scores, parents, own, i, active, SAMPLED: tl.constexpr):
    if SAMPLED:
        return tl.load(own + i, mask=active, other=0).to(tl.float32, bitcast=True)
    score = tl.load(scores + i, mask=active, other=NONE)
    parent = tl.load(parents + i, mask=active, other=-1)
    return tl.where((score > NONE) & (parent >= 0) & (parent < i), score, NONE)


@triton.jit
def _select(
    scores, parents, own, keys, count, wanted, rows_left, flags, SAMPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the kept candidates in `own`; (nodes that would be kept if there were room, flags)."""
    lanes = tl.arange(0, BLOCK)
    if SAMPLED:
        for start in range(0, count, BLOCK):
            i = start + lanes
            rank = _drawn_rank(scores, parents, i, count, i < count)
            tl.store(own + i, rank.to(tl.int32, bitcast=True), mask=i < count)
        tl.debug_barrier()
    present = 0
    bad = 0
    for start in range(0, count, BLOCK):
        i = start + lanes
        active = i < count
        score = tl.load(scores + i, mask=active, other=NONE)
        parent = tl.load(parents + i, mask=active, other=-1)
        rank = _own_rank(scores, parents, own, i, active & (i > 0), SAMPLED)
        rank = tl.where(active & (i > 0), rank, NONE)
        sound = tl.where(i == 0, parent == -1, (parent >= 0) & (parent < i))
        bad |= tl.max((active & ((i == 0) | (score > NONE)) & (sound == 0)).to(tl.int32), 0)
        depth = tl.full((BLOCK,), 1, tl.int32)
        node = tl.where(rank > NONE, parent, 0)
        while tl.max(node, 0) > 0:
            above = _own_rank(scores, parents, own, node, node > 0, SAMPLED)
            rank = tl.where((node > 0) & ((above < rank) | (depth >= MAX_NODES)), above, rank)
            rank = tl.where((node > 0) & (depth >= MAX_NODES), NONE, rank)
            depth += (node > 0).to(tl.int32)
            up = tl.load(parents + node, mask=node > 0, other=0)
            node = tl.where(rank > NONE, up, 0)
        key = _key(rank, depth, i)
        present += tl.sum((active & (key != ABSENT)).to(tl.int32), 0)
        tl.store(keys + i, key, mask=active)
    tl.debug_barrier()
    flags = flags | tl.where(bad != 0, FLAG_TREE, 0)
    fitting = tl.maximum(tl.minimum(tl.minimum(wanted, present + 1), MAX_NODES), 0)
    fitting = tl.where((count > 0) | ((flags & FLAG_INDEX) != 0), fitting, 0)
    kept = tl.minimum(fitting.to(tl.int64), rows_left).to(tl.int32)
    # Bisection: fewer than kept - 1 keys lie below `low`; done when exactly as many lie below `bound`.
    least = tl.full((), -(1 << 63), tl.int64)
    low = least
    bound = least
    step = tl.full((), 1 << 62, tl.int64)
    trial = tl.zeros((), tl.int64)
    searching = kept > 1
    while searching:
        below = 0
        for start in range(0, count, BLOCK):
            i = start + lanes
            key = tl.load(keys + i, mask=i < count, other=ABSENT)
            below += tl.sum((key < trial).to(tl.int32), 0)
        if below < kept - 1:
            low = trial
        bound = tl.where(below == kept - 1, trial, low + 1)
        searching = (below != kept - 1) & (step > 0)
        trial = low + step
        step = step >> 1
    listed = 0
    for start in range(0, count, BLOCK):
        i = start + lanes
        key = tl.load(keys + i, mask=i < count, other=ABSENT)
        keep = ((i < tl.where(kept > 0, count, 0)) & ((i == 0) | (key < bound))).to(tl.int32)
        place = listed + tl.cumsum(keep, 0) - 1
        tl.store(own + place, i, mask=keep != 0)
        listed += tl.sum(keep, 0)
    tl.debug_barrier()
    return fitting, flags


@triton.jit(do_not_specialize=["num_requests", "candidates", "nodes", "kept_at", "lists_at", "words"])
def _rerank_tree_kernel(
    scores_ptr, parents_ptr, cu_ptr, num_nodes_ptr, workspace_ptr, keys_ptr, selected_ptr, parents_out_ptr,
    cu_nodes_ptr, flags_ptr, num_requests, candidates, nodes, kept_at, lists_at, words,
    SAMPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    lists_ptr = workspace_ptr + lists_at
    if num_requests > 0:
        first, count, sound = node_range(cu_ptr, b, candidates)
        flags = tl.where(sound & (count <= MAX_CANDIDATES), 0, FLAG_INDEX)
        fitting, flags = _select(
            scores_ptr + first, parents_ptr + first, lists_ptr + first, keys_ptr + first,
            tl.minimum(count, MAX_CANDIDATES), tl.load(num_nodes_ptr + b), (count * 0 + 2147483647).to(tl.int64), flags,
            SAMPLED, BLOCK,
        )  # fmt: skip
        tl.store(workspace_ptr + kept_at + b, fitting)
        tl.store(flags_ptr + b, flags)
    tl.debug_barrier()
    ticket = tl.atomic_add(workspace_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    if ticket != tl.num_programs(0) - 1:
        return

    row = tl.zeros((), tl.int64)  # offsets: the kept counts summed, cut at the rows there are
    for start in range(0, num_requests, BLOCK):
        i = start + lanes
        fitting = tl.load(workspace_ptr + kept_at + i, mask=i < num_requests, other=0)
        ends = row + tl.cumsum(fitting, 0)
        tl.store(cu_nodes_ptr + i, tl.minimum(ends - fitting, nodes).to(tl.int32), mask=i < num_requests)
        cut = (i < num_requests) & (fitting > 0) & (ends > nodes)
        flags = tl.load(flags_ptr + i, mask=cut, other=0)
        tl.store(flags_ptr + i, flags | FLAG_INDEX, mask=cut)
        row += tl.sum(fitting, 0)
    row = tl.minimum(row, nodes)
    tl.store(cu_nodes_ptr + num_requests, row.to(tl.int32))
    tl.debug_barrier()
    for j in range(0, num_requests):  # the one request that is cut in two
        begin = tl.load(cu_nodes_ptr + j)
        room = tl.load(cu_nodes_ptr + j + 1) - begin
        if (room > 0) & (room < tl.load(workspace_ptr + kept_at + j)):
            first, count, _ = node_range(cu_ptr, j, candidates)
            _select(
                scores_ptr + first, parents_ptr + first, lists_ptr + first, keys_ptr + first,
                tl.minimum(count, MAX_CANDIDATES), tl.load(num_nodes_ptr + j), room.to(tl.int64), count * 0,
                SAMPLED, BLOCK,
            )  # fmt: skip
    for start in range(0, nodes, BLOCK):
        out = start + lanes
        inside = out < row
        request = tl.zeros((BLOCK,), tl.int32)  # the last one that begins at or before the row
        above = tl.zeros((BLOCK,), tl.int32) + num_requests
        width = num_requests
        while width > 1:
            middle = (request + above) // 2
            open_ = inside & (above - request > 1)
            before = tl.load(cu_nodes_ptr + middle, mask=open_, other=0) <= out
            request = tl.where(open_ & before, middle, request)
            above = tl.where(open_ & (before == 0), middle, above)
            width = (width + 1) // 2
        begin = tl.load(cu_ptr + request, mask=inside, other=0)
        end = tl.load(cu_ptr + request + 1, mask=inside, other=0)
        listed = inside & (begin >= 0) & (end > begin) & (end <= candidates)  # else the root alone
        at = out - tl.load(cu_nodes_ptr + request, mask=inside, other=0)
        own_list = lists_ptr + tl.where(listed, begin, 0)
        chosen = tl.load(own_list + at, mask=listed, other=0)
        parent = tl.load(parents_ptr + tl.where(listed, begin, 0) + chosen, mask=listed & (at > 0), other=-1)
        low = tl.zeros((BLOCK,), tl.int32)
        high = tl.where(listed & (at > 0), at, 0)
        while tl.max(high - low, 0) > 0:
            middle = (low + high) // 2
            entry = tl.load(own_list + middle, mask=low < high, other=0)
            right = (low < high) & (entry < parent)
            high = tl.where((low < high) & (entry >= parent), middle, high)
            low = tl.where(right, middle + 1, low)
        tl.store(selected_ptr + out, tl.where(inside, chosen, -1), mask=out < nodes)
        tl.store(parents_out_ptr + out, tl.where(listed & (at > 0), low, -1), mask=out < nodes)
    tl.debug_barrier()
    for start in range(0, words, BLOCK):
        tl.store(workspace_ptr + start + lanes, tl.zeros((BLOCK,), tl.int32), mask=start + lanes < words)


# ------------------------------------------------------------------ host
def impl_expand_tree(scores, child_log_probs, k, child_scores, beam, beam_scores):
    """`specdec_triton::expand_tree`."""
    op = "expand_tree"
    if scores.dtype != torch.float32 or scores.dim() != 2:
        fail(op, "scores", "float32 [*, *]", f"{scores.dtype} {list(scores.shape)}")
    requests, parents = scores.shape
    same = child_log_probs.dtype == torch.float32 and child_log_probs.dim() == 3
    if not same or child_log_probs.shape[:2] != scores.shape:
        fail(op, "child_log_probs", f"float32 [{requests}, {parents}, *]", list(child_log_probs.shape))
    ranks = child_log_probs.shape[2]
    children = parents * ranks
    check_dense(op, "scores", scores)
    check_dense(op, "child_log_probs", child_log_probs)
    check_range(op, "k", k, 0, 1024)
    check_range(op, "children of a request", children, 0, (1 << 20) - 1)
    check(op, "child_scores", child_scores, (requests, children), torch.float32)
    check(op, "beam", beam, (requests, k))
    check(op, "beam_scores", beam_scores, (requests, k), torch.float32)
    if requests == 0:
        return
    block = block_of(children, 64, 256)
    _expand_tree_kernel[(requests,)](
        scores, child_log_probs, child_scores, beam, beam_scores, scores.stride(0), child_log_probs.stride(0),
        child_log_probs.stride(1), max(1, ranks), children, k, BLOCK=block, ONE_TILE=children <= block,
        num_warps=1 if block == 64 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def impl_rerank_tree(
    scores, parents, cu_candidates, num_nodes, sampled, workspace, selected, parents_out, cu_nodes, flags
):
    """`specdec_triton::rerank_tree`."""
    op, requests, candidates, nodes = "rerank_tree", num_nodes.numel(), scores.numel(), selected.numel()
    check(op, "scores", scores, (None,), torch.float32)
    check(op, "selected", selected, (None,))
    for argument, tensor, size in (
        ("parents", parents, candidates), ("num_nodes", num_nodes, requests), ("flags", flags, requests),
        ("cu_candidates", cu_candidates, requests + 1), ("parents_out", parents_out, nodes),
        ("cu_nodes", cu_nodes, requests + 1),
    ):  # fmt: skip
        check(op, argument, tensor, (size,))
    lists_at = 4 + (requests + 3) // 4 * 4
    keys_at = lists_at + (candidates + 3) // 4 * 4
    size = 4 * (keys_at + 2 * candidates)
    if workspace is None or workspace.dtype != torch.uint8 or workspace.numel() < size:
        fail(op, "workspace", f"uint8 [{size}] (workspace_size)", None if workspace is None else list(workspace.shape))
    words = workspace[:size].view(torch.int32)
    _rerank_tree_kernel[(max(1, requests),)](
        scores, parents, cu_candidates, num_nodes, words, words[keys_at:].view(torch.int64), selected, parents_out,
        cu_nodes, flags, requests, candidates, nodes, 4, lists_at, size // 4, SAMPLED=sampled, BLOCK=256, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
