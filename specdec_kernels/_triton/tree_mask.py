"""pack_mask, unpack_mask and tree_from_mask in Triton: the same words as csrc/tree/mask_cuda.cu."""

import torch
import triton
import triton.language as tl

from specdec_kernels._triton.rng import check, check_dense, check_range, fail, node_range, tail_begin


@triton.jit(do_not_specialize=["columns", "width"])
def _pack_mask_kernel(mask_ptr, words_ptr, stride, columns, width, WORDS: tl.constexpr):
    """Grid: (rows, tiles of words)."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    column = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    bit = (tl.load(mask_ptr + row * stride + column, mask=column < columns, other=0) != 0).to(tl.int32)
    words = tl.sum(bit << tl.arange(0, 32)[None, :], 1)
    tl.store(words_ptr + row * width + word, words, mask=word < width)


@triton.jit(do_not_specialize=["columns", "width"])
def _unpack_mask_kernel(words_ptr, mask_ptr, stride, columns, width, BLOCK: tl.constexpr):
    """Grid: (rows, tiles of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + row * width + column // 32, mask=column < columns, other=0)
    tl.store(mask_ptr + row * stride + column, ((word >> (column % 32)) & 1).to(tl.int8), mask=column < columns)


@triton.jit(do_not_specialize=["num_requests", "nodes", "max_nodes", "width"])
def _tree_from_mask_kernel(mask_ptr, cu_ptr, parents_ptr, num_requests, nodes, max_nodes, width, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if b == num_requests:
        for start in range(tail_begin(cu_ptr, b, nodes), nodes.to(tl.int64), BLOCK):
            tl.store(parents_ptr + start + lanes, tl.full((BLOCK,), -1, tl.int32), mask=start + lanes < nodes)
        return
    first, count, _ = node_range(cu_ptr, b, nodes)
    for start in range(0, count, BLOCK):
        node = start + lanes
        active = node < tl.where(count <= max_nodes, count, 0)
        row = mask_ptr + (first + node) * width
        parent = tl.full((BLOCK,), -1, tl.int32)  # the highest bit below the node's own
        for word in range(0, (start + BLOCK + 31) // 32):
            bits = tl.load(row + word, mask=active & (word <= node // 32), other=0)
            bits = tl.where(word == node // 32, bits & ((1 << (node % 32)) - 1), bits)
            for j in range(0, 32):
                parent = tl.where((bits >> j) & 1 != 0, word * 32 + j, parent)
        above = mask_ptr + (first + tl.maximum(parent, 0)) * width
        sound = active & (parent >= 0)
        for word in range(0, (count + 31) // 32):  # the parent's row and the own bit, nothing else
            want = tl.load(above + word, mask=sound, other=0) | tl.where(word == node // 32, 1 << (node % 32), 0)
            used = tl.where(word == count // 32, (1 << (count % 32)) - 1, -1)
            sound = sound & (((tl.load(row + word, mask=sound, other=0) ^ want) & used) == 0)
        tl.store(parents_ptr + first + node, tl.where(sound, parent, -1), mask=node < count)


def impl_pack_mask(mask, words):
    """`specdec_triton::pack_mask`."""
    op = "pack_mask"
    if mask.dtype != torch.bool or mask.dim() != 2:
        fail(op, "mask", "bool [*, *]", f"{mask.dtype} {list(mask.shape)}")
    rows, columns = mask.shape
    width = (columns + 31) // 32
    check_dense(op, "mask", mask)
    check(op, "words", words, (rows, width))
    if rows and width:
        _pack_mask_kernel[(rows, triton.cdiv(width, 4))](
            mask.view(torch.int8), words, mask.stride(0), columns, width, WORDS=4, num_warps=1, enable_fp_fusion=False
        )


def impl_unpack_mask(words, mask):
    """`specdec_triton::unpack_mask`."""
    op = "unpack_mask"
    check(op, "words", words, (None, None))
    rows, width = words.shape
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] > 32 * width:
        fail(op, "mask", f"bool [{rows}, at most {32 * width}]", f"{mask.dtype} {list(mask.shape)}")
    check_dense(op, "mask", mask)
    if rows and mask.shape[1]:
        _unpack_mask_kernel[(rows, triton.cdiv(mask.shape[1], 128))](
            words, mask.view(torch.int8), mask.stride(0), mask.shape[1], width, BLOCK=128, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def impl_tree_from_mask(tree_mask, cu_nodes, max_nodes, parents):
    """`specdec_triton::tree_from_mask`."""
    op = "tree_from_mask"
    check_range(op, "max_nodes", max_nodes, 0, 1024)
    check(op, "tree_mask", tree_mask, (None, None))
    nodes, width = tree_mask.shape
    if width < (max_nodes + 31) // 32:
        fail(op, "tree_mask", f"at least {(max_nodes + 31) // 32} words a row", width)
    check(op, "cu_nodes", cu_nodes, (None,))
    if cu_nodes.numel() < 1:
        fail(op, "cu_nodes", "shape [B + 1]", "[0]")
    check(op, "parents", parents, (nodes,))
    requests = cu_nodes.numel() - 1
    _tree_from_mask_kernel[(requests + 1,)](
        tree_mask, cu_nodes, parents, requests, nodes, max_nodes, width, BLOCK=32, num_warps=1, enable_fp_fusion=False
    )
