"""build_tree and chain_tree in Triton: the same outputs, bit for bit, as csrc/tree.

One program a request. A node's mask row is its ancestors' bits; pointer doubling gathers them in log2(depth) rounds:

    round 0   bits = own bit                      jump = parent
    round r   bits |= bits[jump]                  jump = jump[jump]      (the root points at itself)

Siblings come from comparing parents, a tile of 32 later nodes at a time.
"""

import triton
import triton.language as tl

from specdec_kernels._triton.rng import FLAG_INDEX, FLAG_TREE, INT32_MAX, check, check_range, node_range, tail_begin

MAX_NODES = 1024


@triton.jit
def _write_inert(parents, tree_mask, depths, positions, first_child, next_sibling, words, rows, active):
    """Rows that are nobody's: ids -1, values 0."""
    minus = tl.full(rows.shape, -1, tl.int32)
    zero = tl.zeros(rows.shape, tl.int32)
    tl.store(parents + rows, minus, mask=active)
    tl.store(first_child + rows, minus, mask=active)
    tl.store(next_sibling + rows, minus, mask=active)
    tl.store(depths + rows, zero, mask=active)
    tl.store(positions + rows, zero, mask=active)
    for word in range(words):
        tl.store(tree_mask + rows * words + word, zero, mask=active)


@triton.jit
def _reduce_to_root(parents, tree_mask, depths, positions, first_child, next_sibling, words, begin, count, context_len):
    """The root alone, the other rows inert. The root's own words are stored by the same lane as its inert row."""
    lanes = tl.arange(0, 32)
    for start in range(0, count, 32):
        node = start + lanes
        rows = begin + node
        active = node < count
        minus = tl.full((32,), -1, tl.int32)
        root = node == 0
        tl.store(parents + rows, minus, mask=active)
        tl.store(first_child + rows, minus, mask=active)
        tl.store(next_sibling + rows, minus, mask=active)
        tl.store(depths + rows, tl.zeros((32,), tl.int32), mask=active)
        tl.store(positions + rows, tl.where(root, tl.maximum(context_len, 0), 0), mask=active)
        for word in range(words):
            tl.store(tree_mask + rows * words + word, (root & (word == 0)).to(tl.int32), mask=active)


@triton.jit(do_not_specialize=["total_nodes", "num_requests", "max_nodes", "max_depth", "words"])
def _build_tree_kernel(
    parents_ptr, cu_nodes_ptr, context_lens_ptr, parents_out, tree_mask, depths, positions, first_child, next_sibling,
    flags, total_nodes, num_requests, max_nodes, max_depth, words, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if b == num_requests:  # the rows behind the batch
        start = tail_begin(cu_nodes_ptr, b, total_nodes)
        for row in range(start, total_nodes.to(tl.int64), 32):
            rows = row + tl.arange(0, 32)
            _write_inert(
                parents_out, tree_mask, depths, positions, first_child, next_sibling, words, rows, rows < total_nodes
            )
        return
    first_row, count, valid = node_range(cu_nodes_ptr, b, total_nodes)
    context_len = tl.load(context_lens_ptr + b)
    flag = tl.where(valid, 0, FLAG_INDEX)
    flag = flag | tl.where((context_len >= 0) & (context_len <= INT32_MAX - count), 0, FLAG_INDEX)

    node = tl.arange(0, BLOCK)
    fits = count <= max_nodes
    active = node < tl.where(fits, count, 0)
    parent = tl.load(parents_ptr + first_row + node, mask=active, other=-1)
    sound = tl.where(node == 0, parent == -1, (parent >= 0) & (parent < node))
    bad = tl.max(tl.where(active & (sound == 0), 1, 0), 0) | tl.where(fits, 0, 1)

    # Depth: hops of the doubled pointers. An unsound parent becomes the node itself, so no gather leaves the tile.
    up = tl.where(active & sound & (node > 0), parent, node)
    jump = up
    depth = (up != node).to(tl.int32)
    for _ in range(ROUNDS):
        depth += tl.gather(depth, jump, 0)
        jump = tl.gather(jump, jump, 0)
    deepest = tl.max(tl.where(active, depth, 0), 0)
    flag = flag | tl.where((bad != 0) | ((flag == 0) & (deepest > max_depth)), FLAG_TREE, 0)
    tl.store(flags + b, flag)
    if flag != 0:
        _reduce_to_root(
            parents_out, tree_mask, depths, positions, first_child, next_sibling, words, first_row, count, context_len
        )
        return

    rows = first_row + node
    tl.store(parents_out + rows, parent, mask=active)
    tl.store(depths + rows, depth, mask=active)
    tl.store(positions + rows, context_len + depth, mask=active)
    for word in range(words):
        bits = tl.where(node // 32 == word, 1 << (node % 32), 0)
        jump = up
        for _ in range(ROUNDS):
            bits |= tl.gather(bits, jump, 0)
            jump = tl.gather(jump, jump, 0)
        tl.store(tree_mask + rows * words + word, bits, mask=active)

    nothing = tl.full((BLOCK,), 1 << 30, tl.int32)
    sibling = nothing
    child = nothing
    for start in range(0, BLOCK, 32):
        later = start + tl.arange(0, 32)
        theirs = tl.load(parents_ptr + first_row + later, mask=(later > 0) & (later < count), other=-2)
        same = (theirs[None, :] == parent[:, None]) & (later[None, :] > node[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(same, later[None, :], 1 << 30), 1))
        mine = theirs[None, :] == node[:, None]
        child = tl.minimum(child, tl.min(tl.where(mine, later[None, :], 1 << 30), 1))
    tl.store(next_sibling + rows, tl.where(sibling == nothing, -1, sibling), mask=active)
    tl.store(first_child + rows, tl.where(child == nothing, -1, child), mask=active)


@triton.jit
def _chain_size(drafts, context_len, max_nodes, rows_left):
    """(nodes, flags) of a chain request; elementwise. Mirrors chain_size in csrc/tree/tree.h."""
    wanted = drafts.to(tl.int64) + 1
    flag = tl.where((drafts < -1) | (wanted > max_nodes), FLAG_TREE, 0)
    room = (wanted <= rows_left) & (context_len >= 0) & (context_len <= INT32_MAX - max_nodes)
    flag = tl.where(drafts == -1, 0, flag | tl.where(room, 0, FLAG_INDEX))
    reduced = ((rows_left > 0) & (drafts > -1)).to(tl.int64)
    return tl.where(flag != 0, reduced, wanted), flag


@triton.jit(do_not_specialize=["total_nodes", "num_requests", "max_nodes", "words"])
def _chain_tree_kernel(
    num_drafts_ptr, context_lens_ptr, parents_out, cu_nodes, tree_mask, depths, positions, first_child, next_sibling,
    flags, total_nodes, num_requests, max_nodes, words, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    total = total_nodes.to(tl.int64)
    # As long as everything fits, a request begins at the sum of the sizes before it.
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, b, BLOCK):
        j = start + tl.arange(0, BLOCK)
        drafts = tl.load(num_drafts_ptr + j, mask=j < b, other=-1)
        size, _ = _chain_size(drafts, tl.load(context_lens_ptr + j, mask=j < b, other=0), max_nodes, total)
        sums += size
    begin = tl.sum(sums, 0)
    if begin > total:  # behind a request that did not fit, sizes depend on the rows left
        begin = total * 0
        for j in range(0, b):
            size, _ = _chain_size(tl.load(num_drafts_ptr + j), tl.load(context_lens_ptr + j), max_nodes, total - begin)
            begin += size
    tl.store(cu_nodes + b, begin.to(tl.int32))
    lanes = tl.arange(0, 32)
    if b == num_requests:
        for row in range(begin, total, 32):
            rows = row + lanes
            _write_inert(
                parents_out, tree_mask, depths, positions, first_child, next_sibling, words, rows, rows < total
            )
        return
    context_len = tl.load(context_lens_ptr + b)
    size, flag = _chain_size(tl.load(num_drafts_ptr + b), context_len, max_nodes, total - begin)
    tl.store(flags + b, flag)
    if flag != 0:
        _reduce_to_root(
            parents_out, tree_mask, depths, positions, first_child, next_sibling, words, begin, size, context_len
        )
        return
    count = size.to(tl.int32)
    for start in range(0, count, 32):
        node = start + lanes
        rows = begin + node
        active = node < count
        tl.store(parents_out + rows, node - 1, mask=active)
        tl.store(depths + rows, node, mask=active)
        tl.store(positions + rows, context_len + node, mask=active)
        tl.store(first_child + rows, tl.where(node + 1 < count, node + 1, -1), mask=active)
        tl.store(next_sibling + rows, tl.full((32,), -1, tl.int32), mask=active)
        for word in range(words):
            set_bits = tl.minimum(tl.maximum(node + 1 - 32 * word, 0), 32)  # at or below the node
            bits = tl.where(set_bits == 32, -1, (1 << (set_bits % 32)) - 1)
            tl.store(tree_mask + rows * words + word, bits, mask=active)


def _check_outputs(op, nodes, requests, max_nodes, rows, tree_mask, flags):
    check_range(op, "max_nodes", max_nodes, 0, MAX_NODES)
    for argument, tensor in rows.items():
        check(op, argument, tensor, (nodes,))
    check(op, "tree_mask", tree_mask, (nodes, (max_nodes + 31) // 32))
    check(op, "flags", flags, (requests,))


def impl_build_tree(
    parents, cu_nodes, context_lens, max_nodes, max_depth,
    parents_out, tree_mask, depths, positions, first_child, next_sibling, flags,
):  # fmt: skip
    """`specdec_triton::build_tree`."""
    op, nodes, requests = "build_tree", parents.numel(), context_lens.numel()
    rows = dict(parents=parents, parents_out=parents_out, depths=depths, positions=positions, first_child=first_child,
                next_sibling=next_sibling)  # fmt: skip
    _check_outputs(op, nodes, requests, max_nodes, rows, tree_mask, flags)
    check(op, "context_lens", context_lens, (requests,))
    check(op, "cu_nodes", cu_nodes, (requests + 1,))
    check_range(op, "max_depth", max_depth, 0, MAX_NODES)
    block = max(32, triton.next_power_of_2(max_nodes))
    _build_tree_kernel[(requests + 1,)](
        parents, cu_nodes, context_lens, parents_out, tree_mask, depths, positions, first_child, next_sibling, flags,
        nodes, requests, max_nodes, max_depth, tree_mask.shape[1],
        BLOCK=block, ROUNDS=block.bit_length() - 1, num_warps=4 if block >= 128 else 1,
        enable_fp_fusion=False,
    )  # fmt: skip


def impl_chain_tree(
    num_drafts, context_lens, max_nodes,
    parents_out, cu_nodes, tree_mask, depths, positions, first_child, next_sibling, flags,
):  # fmt: skip
    """`specdec_triton::chain_tree`."""
    op, nodes, requests = "chain_tree", parents_out.numel(), num_drafts.numel()
    rows = dict(parents_out=parents_out, depths=depths, positions=positions, first_child=first_child,
                next_sibling=next_sibling)  # fmt: skip
    _check_outputs(op, nodes, requests, max_nodes, rows, tree_mask, flags)
    check(op, "num_drafts", num_drafts, (requests,))
    check(op, "context_lens", context_lens, (requests,))
    check(op, "cu_nodes", cu_nodes, (requests + 1,))
    _chain_tree_kernel[(requests + 1,)](
        num_drafts, context_lens, parents_out, cu_nodes, tree_mask, depths, positions, first_child, next_sibling, flags,
        nodes, requests, max_nodes, tree_mask.shape[1], BLOCK=128, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
