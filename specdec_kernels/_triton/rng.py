"""Philox4x32-10 and the keys of every random draw, word for word as csrc/common/rng.h, and what the rooms share."""

import functools
from collections.abc import Sequence
from typing import NoReturn

import torch
import triton
import triton.language as tl

# Purposes of a draw (csrc/common/rng.h).
PURPOSE_DRAFT = tl.constexpr(0)
PURPOSE_ACCEPT = tl.constexpr(1)
PURPOSE_EMIT = tl.constexpr(2)
PURPOSE_PLAN = tl.constexpr(3)
PURPOSE_BLOCK = tl.constexpr(4)
PURPOSE_RACE = tl.constexpr(5)


@triton.jit
def draw(seed, position, purpose, block, salt):
    """Four uint32 words for tokens 4 block .. 4 block + 3. `seed`, `position`: int64; `block`, `salt`: 32-bit."""
    seed_bits = seed.to(tl.uint64)
    position_bits = position.to(tl.uint64)
    c0 = block.to(tl.uint32, bitcast=True)
    c1 = (position_bits & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((position_bits >> 32).to(tl.uint32) << 8) | purpose
    c3 = salt.to(tl.uint32, bitcast=True)
    k0 = (seed_bits & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed_bits >> 32).to(tl.uint32)
    # One shape for all of the state: rounds mix them.
    c1 = c1 + tl.zeros_like(c0)
    c2 = c2 + tl.zeros_like(c0)
    c3 = c3 + tl.zeros_like(c0)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)


@triton.jit
def coin(word):
    """Midpoint of the word's 2^-32 cell, in (0, 1), as an exact float64."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10


# ------------------------------------------------------------------ shared by the rooms: ranges, slots, rows, checks
# In the interpreter a scalar condition is no mask of a tile: kernels narrow the count that a tile is compared with.
FLAG_TREE = tl.constexpr(64)  # csrc/common/flags.h
FLAG_INDEX = tl.constexpr(512)
INT32_MAX = tl.constexpr(2147483647)


@triton.jit
def node_range(cu_ptr, b, total):
    """(first row, rows, sound) of request b, as node_range of csrc/tree/tree.h: unsound offsets give no rows."""
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    sound = (begin >= 0) & (end >= begin) & (end <= total)
    return tl.where(sound, begin, 0).to(tl.int64), tl.where(sound, end - begin, 0), sound


@triton.jit
def tail_begin(cu_ptr, requests, total):
    """First row behind the batch, as tail_begin of csrc/tree/tree.h: behind the last request with sound offsets."""
    last = tl.load(cu_ptr + requests)
    before = tl.load(cu_ptr + requests - 1, mask=requests > 0, other=0)
    first = tl.load(cu_ptr + requests - 2, mask=requests > 1, other=0)
    sound = (last >= before) & (last >= 0) & (last <= total)
    sound_before = (requests > 0) & (before >= first) & (before >= 0) & (before <= total)
    return tl.where(sound, last, tl.where(sound_before, before, total)).to(tl.int64)


@triton.jit
def cache_slot(page_row_ptr, max_pages, page_size, num_pages, position, active):
    """page * page_size + row of int64 positions; -1 where the table, the cache or int32 has no such page."""
    column = position // page_size
    known = active & (position >= 0) & (column < max_pages)
    page = tl.load(page_row_ptr + column, mask=known, other=-1).to(tl.int64)
    known = known & (page >= 0) & (page < num_pages) & (page * page_size + page_size - 1 <= INT32_MAX)
    return tl.where(known, page * page_size + position % page_size, -1)


@triton.jit
def copy_row(target_ptr, source_ptr, have, count, BLOCK: tl.constexpr):
    """`count` dense elements of which the source has `have`: zeros behind them."""
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(source_ptr + i, mask=i < have, other=0)
        tl.store(target_ptr + i, value, mask=i < count)


def fail(op: str, argument: str, expected: object, got: object) -> NoReturn:
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def check(
    op: str,
    argument: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype = torch.int32,
) -> None:
    """A contiguous tensor of this dtype and shape; None matches any size."""
    same = tensor.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, tensor.shape))
    if tensor.dtype != dtype or not same or not tensor.is_contiguous():
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        have, want = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
        fail(op, argument, f"a contiguous {want} {wanted}", f"{have} {list(tensor.shape)}")


def check_range(op: str, argument: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        fail(op, argument, f"a value in [{low}, {high}]", value)


def check_dense(op: str, argument: str, tensor: torch.Tensor) -> None:
    """A last dimension without gaps."""
    if tensor.dim() and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, argument, "a dense last dimension (stride 1)", f"stride {tensor.stride(-1)}")


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(op: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its element size: rows are moved, not computed with."""
    if tensor.element_size() not in _BITS:
        raise NotImplementedError(f"{op}: {argument}: elements of 1, 2, 4 or 8 bytes are built, got {tensor.dtype}")
    return tensor.view(_BITS[tensor.element_size()])


def block_of(count: int, small: int = 128, large: int = 1024) -> int:
    """Elements of a tile: one of two sizes, so that few kernels are compiled."""
    return small if count <= small else large


@functools.cache
def table(values: tuple, device: torch.device) -> torch.Tensor:
    """Host integers (or rows of them) as int64 on the device: copied there at the first use, then kept for good, as a
    captured graph goes on reading it."""
    return torch.tensor(values, dtype=torch.int64, device=device)
