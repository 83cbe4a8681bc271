"""From one step's outcome to the next step's inputs, without the host: re-exported by `specdec_kernels.sampling`."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specdec_kernels import _ops

__all__ = ["GatheredRows", "NextStep", "gather_accepted", "prepare_next", "truncate"]


class _Verified(Protocol):
    @property
    def output_token_ids(self) -> Tensor: ...
    @property
    def num_emitted(self) -> Tensor: ...
    @property
    def accepted_nodes(self) -> Tensor: ...


V = TypeVar("V", bound=_Verified)


class GatheredRows(NamedTuple):
    """rows: [total, H], those of the accepted nodes, request by request, root first; cu_rows: int32 [B + 1]."""

    rows: Tensor
    cu_rows: Tensor


class NextStep(NamedTuple):
    """Inputs of the next step, int32: root_token_ids [B]; token_ids, positions, slots [total]; cu_tokens [B + 1]."""

    root_token_ids: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cu_tokens: Tensor


def _check(op: str, verified: _Verified) -> None:
    _ops.expect_tensor(op, "verified.output_token_ids", verified.output_token_ids, torch.int32, 2)
    _ops.expect_tensor(op, "verified.num_emitted", verified.num_emitted, torch.int32, 1)
    _ops.expect_tensor(op, "verified.accepted_nodes", verified.accepted_nodes, torch.int32, 2)


def truncate(verified: V, limit: Tensor, *, backend: str | None = None) -> V:
    """Keep at most limit[b] emitted tokens of each request, in place: EOS, stop strings, token budgets.

    verified*: what `verify` returned; limit: int32 [B], negative counts as 0. Cut tokens and nodes become -1, so that
    `commit_kv`, `advance`, `gather_accepted` and `prepare_next` see a step that ended there. Returns `verified`.
    """
    op = "truncate"
    _check(op, verified)
    _ops.expect_tensor(op, "limit", limit, torch.int32, 1)
    _ops.call(
        op, backend, limit.device, limit, verified.output_token_ids, verified.num_emitted, verified.accepted_nodes
    )
    return verified


def gather_accepted(
    x: Tensor,
    cu_nodes: Tensor,
    accepted_nodes: Tensor,
    num_emitted: Tensor,
    *,
    total: int | None = None,
    backend: str | None = None,
) -> GatheredRows:
    """Gather the rows (hidden states, say) of the accepted nodes into a packed batch.

    x: [N, H], any dtype, rows may be strided. cu_nodes: int32 [B + 1]. accepted_nodes: int32 [B, W], local, root
    first. num_emitted: int32 [B], rows of each request. total: host upper bound of all rows (default B W); rows
    behind the last are 0, and so is the row of a node that does not exist. Row i of a request pairs with its i-th
    emitted token: the rows and those of `prepare_next` have the same offsets, if both got the same `total`.
    """
    op = "gather_accepted"
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        raise TypeError(f"{op}: x: expected a tensor [N, H], got {getattr(x, 'shape', type(x).__name__)}")
    _ops.expect_tensor(op, "cu_nodes", cu_nodes, torch.int32, 1)
    _ops.expect_tensor(op, "accepted_nodes", accepted_nodes, torch.int32, 2)
    _ops.expect_tensor(op, "num_emitted", num_emitted, torch.int32, 1)
    total = accepted_nodes.numel() if total is None else total
    _ops.expect_int(op, "total", total, 0, "a value of at least 0")
    rows = torch.empty(total, x.shape[1], dtype=x.dtype, device=x.device)
    cu_rows = torch.empty(num_emitted.shape[0] + 1, dtype=torch.int32, device=x.device)
    _ops.call(op, backend, x.device, x, cu_nodes, accepted_nodes, num_emitted, rows, cu_rows)
    return GatheredRows(rows, cu_rows)


def prepare_next(
    verified: _Verified,
    context_lens: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    total: int | None = None,
    position_offset: int = 0,
    root_token_ids: Tensor | None = None,
    backend: str | None = None,
) -> NextStep:
    """New roots, and the packed tokens a drafter has to see before it drafts again.

    verified: what `verify` or `truncate` returned, emitted tokens e_1 .. e_m of each request. context_lens: int32
    [B], L **before** `advance`. page_table: int32 [B, max_pages] and page_size: of the drafter's cache. total: host
    upper bound of all emitted tokens (default: the size of output_token_ids).

    Token e_i is given position L + position_offset + i - 1 and that position's slot (-1 where the table has no page).
    position_offset = 0 is the shifted pairing of feature-level heads (EAGLE, MTP): the state of the node at position
    p beside the token at p + 1; 1 is a language model's own position of the token. root_token_ids*: the roots of the
    step just verified, updated in place; requests that emitted nothing keep theirs (default: a new tensor, -1 there).
    Rows behind the last have id and slot -1, position 0.
    """
    op = "prepare_next"
    _check(op, verified)
    _ops.expect_tensor(op, "context_lens", context_lens, torch.int32, 1)
    _ops.expect_tensor(op, "page_table", page_table, torch.int32, 2)
    device, requests = context_lens.device, context_lens.shape[0]
    total = verified.output_token_ids.numel() if total is None else total
    _ops.expect_int(op, "total", total, 0, "a value of at least 0")
    if root_token_ids is None:
        root_token_ids = torch.full((requests,), -1, dtype=torch.int32, device=device)
    token_ids, positions, slots = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(3))
    cu_tokens = torch.empty(requests + 1, dtype=torch.int32, device=device)
    _ops.call(
        op, backend, device, verified.output_token_ids, verified.num_emitted, context_lens, page_table,
        page_size, position_offset, root_token_ids, token_ids, positions, slots, cu_tokens,
    )  # fmt: skip
    return NextStep(root_token_ids, token_ids, positions, slots, cu_tokens)
