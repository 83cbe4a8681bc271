"""Philox4x32-10 and the keys of every random draw, word for word as csrc/common/rng.h, and what the rooms share."""

import triton
import triton.language as tl

# Purposes of a draw (csrc/common/rng.h).
PURPOSE_DRAFT = tl.constexpr(0)
PURPOSE_ACCEPT = tl.constexpr(1)
PURPOSE_EMIT = tl.constexpr(2)
PURPOSE_PLAN = tl.constexpr(3)
PURPOSE_BLOCK = tl.constexpr(4)


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
