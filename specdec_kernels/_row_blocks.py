"""Building blocks of the sampling room: statistics and filters of a row, the residual's log weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._sampling_args import Bias, Sampling, edit_args, index_arg, logits_arg, request_args, vocab_arg


class RowStats(NamedTuple):
    """max, log_sum: float32 [R], log-sum-exp of logits / temperature = max / temperature + log_sum; argmax: int32 [R]
    global id, lowest among equals; flags: int32 [R]. A dead row has max -inf and log_sum 0."""

    max: Tensor
    log_sum: Tensor
    argmax: Tensor
    flags: Tensor


def row_stats(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    row_requests: Tensor | None = None,
    allowed: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> RowStats:
    """Maximum, log-sum-exp over it and argmax of every row of logits [R, V]: a vocabulary shard or a whole row.

    temperature: float32, one a row or, with row_requests (int32 [R]), one a request (default 1; greedy requests get
    log_sum 0); vocab_start: global id of column 0; vocab_size: global ids at and behind it do not exist.
    """
    op = "row_stats"
    rows, columns = logits_arg(op, "logits", logits).shape
    if temperature is not None:
        _ops.expect_tensor(op, "temperature", temperature, torch.float32, 1)
    if allowed is not None:
        _ops.expect_tensor(op, "allowed", allowed, torch.int32, 2)
    peak, log_sum = (torch.empty((rows,), dtype=torch.float32, device=logits.device) for _ in range(2))
    argmax, flags = (torch.empty((rows,), dtype=torch.int32, device=logits.device) for _ in range(2))
    limit = vocab_arg(op, vocab_size, vocab_start + columns, shard=True)
    requests = index_arg(op, "row_requests", row_requests, rows)
    out = (peak, log_sum, argmax, flags)
    _ops.call(op, backend, logits.device, logits, temperature, requests, allowed, vocab_start, limit, *out)
    return RowStats(*out)


TILE_LOGITS = 4096


def tile_stats(logits: Tensor, *, temperature: Tensor | None = None, row_requests: Tensor | None = None) -> Tensor:
    """(maximum, sum of exp((logit - maximum) / temperature)) of every tile of 4096 logits of rows [R, V].

    What an output layer may compute while its logits are still on chip and hand to `verify`: float32 [R, T, 2], T =
    ceil(V / 4096). The last tile ends at the vocabulary. A tile that holds NaN or +inf has that maximum: `verify` then
    reads the row itself. temperature: float32, one a row or, with row_requests (int32 [R]), one a request.
    """
    op = "tile_stats"
    rows, columns = logits_arg(op, "logits", logits).shape
    padding = -columns % TILE_LOGITS
    tiles = torch.nn.functional.pad(logits.float(), (0, padding), value=-torch.inf).view(rows, -1, TILE_LOGITS)
    peak = tiles.amax(-1)
    scale = torch.ones((rows,), device=logits.device)
    if temperature is not None:
        _ops.expect_tensor(op, "temperature", temperature, torch.float32, 1)
        requests = index_arg(op, "row_requests", row_requests, rows)
        scale = temperature if requests is None else temperature[requests.long()]
        _ops.expect(op, "temperature", scale.shape == (rows,), f"{rows} rows", list(scale.shape))
    base = torch.where(peak.isneginf(), 0.0, peak)
    total = ((tiles - base[..., None]) / scale.clamp_min(1e-5)[:, None, None]).exp().sum(-1)
    return torch.stack([peak, total], -1)


class FilteredRows(NamedTuple):
    """A row's filters as scalars, [R] each.

    An id is kept iff its edited logit is above `threshold`, or equals it and is among the `tie_budget` lowest such ids;
    log p = (logit - max) / temperature - log_sum over the kept ids.
    """

    threshold: Tensor
    tie_budget: Tensor
    max: Tensor
    log_sum: Tensor
    flags: Tensor


def filter_rows(
    logits: Tensor,
    sampling: Sampling,
    *,
    row_requests: Tensor | None = None,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> FilteredRows:
    """Temperature, min-p, top-k and top-p of every row of logits [R, V], without sorting or rewriting it.

    row_requests: int32 [R] (default: row r is request r); other arguments as in `verify`. threshold is float32, -inf
    where nothing is filtered; a greedy row keeps its lowest-id maximum alone.
    """
    op = "filter_rows"
    rows, columns = logits_arg(op, "logits", logits).shape
    threshold, peak, log_sum = (torch.empty((rows,), dtype=torch.float32, device=logits.device) for _ in range(3))
    tie_budget, flags = (torch.empty((rows,), dtype=torch.int32, device=logits.device) for _ in range(2))
    _ops.call(
        op,
        backend,
        logits.device,
        logits,
        *request_args(op, sampling),
        index_arg(op, "row_requests", row_requests, rows),
        *edit_args(op, allowed, bias),
        vocab_arg(op, vocab_size, columns),
        *(threshold, tie_budget, peak, log_sum, flags),
    )
    return FilteredRows(threshold, tie_budget, peak, log_sum, flags)


def residual_log_weights(
    target_log_probs: Tensor, draft_log_probs: Tensor, log_scale: Tensor, *, backend: str | None = None
) -> Tensor:
    """log max(p - c q, 0) from log p, log q (float32 [R, V]) and log c (float32 [R]); -inf where it is 0, never NaN."""
    op = "residual_log_weights"
    _ops.expect_tensor(op, "target_log_probs", target_log_probs, torch.float32, 2)
    _ops.expect_tensor(op, "draft_log_probs", draft_log_probs, torch.float32, 2)
    index_arg(op, "log_scale", log_scale, target_log_probs.shape[0], torch.float32)
    out = torch.empty(target_log_probs.shape, dtype=torch.float32, device=target_log_probs.device)
    _ops.call(op, backend, target_log_probs.device, target_log_probs, draft_log_probs, log_scale, out)
    return out
