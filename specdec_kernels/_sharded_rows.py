"""A shard's columns of rows before their law is taken: edits of target rows, the target ids of draft columns."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._sampling_args import Bias, edit_args


def check_edits(op: str, rows: int, columns: int, allowed: Tensor | None, bias: Bias | None) -> None:
    """`allowed` holds the words of this shard's columns; `bias` is that of whole rows."""
    edit_args(op, allowed, bias)
    if allowed is not None:
        words = (rows, (columns + 31) // 32)
        _ops.expect(op, "allowed", tuple(allowed.shape) == words, f"this shard's words {list(words)}", allowed.shape)
    if bias is not None:
        _ops.expect(op, "bias cu_entries", len(bias[0]) == rows + 1, f"{rows + 1} entries", len(bias[0]))
        _ops.expect(op, "bias values", len(bias[2]) == len(bias[1]), f"{len(bias[1])} entries", len(bias[2]))


def edited(x: Tensor, start: int, allowed: Tensor | None, bias: Bias | None) -> Tensor:
    """float32 [R, Vs] logits with their edits: bias entries added in their order, forbidden ids -inf."""
    if bias is not None:
        cu, ids, values = bias
        number = torch.arange(len(ids), device=x.device)
        row = torch.searchsorted(cu[1:].contiguous(), number.int(), right=True).clamp_max(len(x) - 1)
        mine = (number >= cu[row]) & (cu[row] >= 0) & (cu[row + 1] <= len(ids))
        column = ids.long() - start
        mine &= (column >= 0) & (column < x.shape[1])
        wide = torch.nn.functional.pad(x, (0, 1))  # the spare column takes what is not ours
        wide.index_put_((row, torch.where(mine, column, x.shape[1])), values, accumulate=True)
        x = wide[:, :-1]
    if allowed is not None:
        ids = torch.arange(x.shape[1], device=x.device)
        x = torch.where((allowed[:, ids >> 5] >> (ids & 31) & 1) == 1, x, -torch.inf)
    return x


def within(x: Tensor, start: int, vocab_size: int | None) -> Tensor:
    """Columns whose ids are `vocab_size` or above do not exist."""
    if vocab_size is None or vocab_size >= start + x.shape[1]:
        return x
    return torch.where(torch.arange(start, start + x.shape[1], device=x.device) < vocab_size, x, -torch.inf)


class DraftColumns:
    """Which column of a reduced draft vocabulary stands for a target id: the first one of several. The others, and
    those without an id below `vocab`, do not exist."""

    def __init__(self, d2t: Tensor, columns: int, vocab: Tensor):
        number = torch.arange(columns, device=d2t.device)
        target = number + d2t[:columns]
        self.target, self.column = target.sort(stable=True)
        self.exists = (target >= 0) & (target < vocab) & (self.of(target) == number)

    def of(self, ids: Tensor) -> Tensor:
        """int64, -1 where an id has no column."""
        at = torch.searchsorted(self.target, ids.contiguous()).clamp_max(len(self.target) - 1)
        return torch.where(self.target[at] == ids, self.column[at], -1)
