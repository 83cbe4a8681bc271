"""Vocabulary shards: every rank of a group holds some columns of a row.

Rank r's columns follow rank r - 1's; shards begin at multiples of 32 ids. What crosses ranks is integers (order keys,
masses of 2^-44, ids) and one float64 score a row, so the result depends on neither the number of shards nor their order
of arrival: an unfiltered row takes 30 bytes of reductions in all, top-k and top-p 8 KiB of histograms each. Plain torch
on any device; nothing is read on the host.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
MASS_SCALE = 2.0**44
LOG2E = 1.44269504088896341
NO_TIE = 2**31 - 1
ACCEPT, EMIT, BLOCK, RACE, TAIL, TAIL_WORDS = 1, 2, 4, 5, 0x80, 4096
MASK = 0xFFFFFFFF


class Shards:
    """The reductions over a process group (None: this process holds the whole vocabulary)."""

    def __init__(self, group: Any | None):
        self.group = group
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.world: int = dist.get_world_size(group) if group is not None else 1

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op, self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor.clone(), dist.ReduceOp.MAX)

    def smallest(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor.clone(), dist.ReduceOp.MIN)

    def total(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor.clone(), dist.ReduceOp.SUM)

    def vocabulary(self, columns: int, vocab_size: int | None, device: torch.device) -> Tensor:
        """int64 [1], how many ids there are."""
        every = self.total(torch.full((1,), columns, dtype=torch.int64, device=device))
        return every if vocab_size is None else every.clamp_max(vocab_size)

    def starts(self, start: int, device: torch.device) -> Tensor:
        """int64 [world], where every rank's columns begin."""
        mine = torch.full((1,), start, dtype=torch.int64, device=device)
        if self.group is None:
            return mine
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, self.group)
        return torch.cat(every)

    def before(self, counts: Tensor) -> Tensor:
        """Sum of the earlier ranks' counts."""
        if self.group is None:
            return torch.zeros_like(counts)
        every = [torch.empty_like(counts) for _ in range(self.world)]
        dist.all_gather(every, counts, self.group)
        return torch.stack(every)[: self.rank].sum(0)


def order_key(x: Tensor) -> Tensor:
    """int64 in [0, 2^32) that rises with x; -0 and +0 are one number."""
    bits = torch.where(x == 0, 0.0, x).contiguous().view(torch.int32).long() & MASK
    return torch.where(bits >> 31 == 1, MASK - bits, bits | 1 << 31)


def order_value(key: Tensor) -> Tensor:
    bits = torch.where(key >> 31 == 1, key & 0x7FFFFFFF, MASK - key)
    return torch.where(bits >> 31 == 1, bits - (1 << 32), bits).int().view(torch.float32)


def rounded(x: float) -> float:
    """x in float32. On the host: a constant made into a tensor would be a copy to the device that waits for it."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of float32 numbers, rounded once (up to ties of the float64 sum)."""

    def wide(x: Tensor | float) -> Tensor | float:
        return x.double() if isinstance(x, Tensor) else rounded(x)

    return (a.double() * wide(b) + wide(c)).float()


def weights(x: Tensor, peak: Tensor, rate: Tensor) -> Tensor:
    """exp((x - peak) tau), by the operations of exp_scaled in csrc/sampling/law.h. Rows [R, V], scalars [R, 1]."""
    lowest = -125.0 / rate
    d = torch.maximum(x - peak, lowest)
    shifted = fused(d, rate, 12582912.0)
    r = fused(d, rate, 12582912.0 - shifted)
    value = fused(r, 1.32647273e-3, 9.67151299e-3)
    for c in (5.55073358e-2, 2.40222424e-1, 6.93147004e-1, 1.0):
        value = fused(value, r, c)
    return (value.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def philox(c: list[Tensor], k0: Tensor, k1: Tensor) -> list[Tensor]:
    """Philox4x32-10 of int64 tensors that hold 32-bit words."""
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # modulo 2^64: the halves are right
        c = [(product1 >> 32 & MASK) ^ c[1] ^ k0, product1 & MASK, (product0 >> 32 & MASK) ^ c[3] ^ k1, product0 & MASK]
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c


def draw(seed: Tensor, position: Tensor, purpose: int, block: Tensor, salt: Tensor | None = None) -> list[Tensor]:
    """Four words a block (csrc/common/rng.h). seed, position: [R]; block: [R, n] or [R]; salt: [R]."""

    def wide(x: Tensor) -> Tensor:
        return x.view(-1, *[1] * (block.dim() - 1)) + 0 * block

    low, high = wide(position & MASK), wide((position >> 32 & 0xFFFFFF) << 8 | purpose)
    counter = [block & MASK, low, high, 0 * block if salt is None else wide(salt & MASK)]
    return philox(counter, wide(seed & MASK), wide(seed >> 32 & MASK))


def exponentials(seed: Tensor, position: Tensor, purpose: int, start: int, count: int) -> Tensor:
    """float64 [R, count], exponential times of the ids from `start` (a multiple of 4)."""
    blocks = torch.arange(start // 4, (start + count + 3) // 4, device=seed.device).expand(len(seed), -1)

    def words(kind: int) -> Tensor:
        return torch.stack(draw(seed, position, kind, blocks), -1).flatten(1)[:, :count]

    first = words(purpose)
    cell = torch.where(first < TAIL_WORDS, (words(purpose | TAIL).double() + 0.5) * 2.0**-32, 0.5)
    return -(-(first.double() + cell) * 2.0**-32).log1p()
