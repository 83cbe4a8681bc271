"""Verification and sampling from raw logits. See docs/sampling.md; numerics and proofs: docs/numerics.md.

B requests, N tree nodes in all (ragged, roots included), V vocabulary. Every function reads logits as they leave the
model (float32, bfloat16 or float16, last dimension dense); temperature, min-p, top-k and top-p are applied per request
inside. Draws depend on the request's seed, its output position, the purpose and the token only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._handover import gather_accepted, prepare_next, truncate
from specdec_kernels._row_blocks import (
    FilteredRows,
    RowStats,
    filter_rows,
    residual_log_weights,
    row_stats,
    tile_stats,
)
from specdec_kernels._sampling_args import (
    LOGPROBS,
    Bias,
    Sampling,
    draft_sampling_args,
    edit_args,
    index_arg,
    logits_arg,
    request_args,
    tree_arg,
    vocab_arg,
)
from specdec_kernels.tree import DraftTree

__all__ = [
    "METHODS",
    "Drafted",
    "FilteredRows",
    "RowStats",
    "Sampled",
    "Sampling",
    "Verified",
    "draft_sample",
    "draft_topk",
    "filter_rows",
    "gather_accepted",
    "prepare_next",
    "residual_log_weights",
    "row_stats",
    "sample",
    "tile_stats",
    "truncate",
    "verify",
    "verify_probs",
]

METHODS = ("greedy", "rejection", "target_only", "block", "coupled", "typical")


def _verify_workspace(requests: int, nodes: int) -> int:
    """Bytes: two tickets, a draw and 16 winners a request, four laws a node (csrc/sampling/verify_cuda.cu)."""
    return 8 * requests + 304 * requests + 232 * nodes + 32


_ops.register_workspace("verify", _verify_workspace)


class Verified(NamedTuple):
    """Outcome of `verify`; int32 unless said otherwise.

    output_token_ids: [B, max_depth + 1], accepted drafts, then the recovered or bonus token, then -1; num_emitted: [B],
    at least 1 where the request has nodes (accepted drafts + 1), else 0; accepted_nodes: [B, max_depth + 1] local
    indices, root first, then -1; flags: [B] bits of `Flag`; logprobs: float32 of the emitted tokens, 0 behind them,
    [B, max_depth + 1] for "raw" or "processed", [B, max_depth + 1, 2] = (raw, processed) for "both", else None.
    """

    output_token_ids: Tensor
    num_emitted: Tensor
    accepted_nodes: Tensor
    flags: Tensor
    logprobs: Tensor | None


def verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    tree: DraftTree,
    sampling: Sampling,
    *,
    method: str,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    draft_log_probs: Tensor | None = None,
    draft_lse: Tensor | None = None,
    d2t: Tensor | None = None,
    t2d: Tensor | None = None,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
    vocab_size: int | None = None,
    uniforms: Tensor | None = None,
    request_order: Tensor | None = None,
    return_logprobs: str | None = None,
    epsilon: float = 0.3,
    delta: float = 0.09,
    form: str = "auto",
    workspace: Tensor | None = None,
    tile_stats: Tensor | None = None,
    backend: str | None = None,
) -> Verified:
    """Accept drafts along the tree and draw the token behind the last accepted one.

    target_logits: [N, V], row n is the target's prediction behind node n; draft_token_ids: int32 [N] in target ids, the
    root's is ignored, -1 means never drafted; tree: from `build_tree` or `chain_tree`.

    method: lossless "greedy"; "rejection" (chain rule; siblings drawn without replacement in draw order; deterministic
    drafts one-hot); "target_only" (every draft deterministic); "block" (chains); "coupled" (output equals plain
    decoding with the same seed); lossy "typical" (Medusa; `epsilon`, `delta`).

    draft_logits: [Rd, Vd] before temperature. None: every draft is deterministic, a law of one token; drafts that were
    drawn at random are not verified losslessly without it. draft_rows: int32 [N], the row a node's token was drawn
    from, -1 where it is deterministic (default: n - b - 1 for node n of request b, the drafts packed without roots);
    draft_sampling: what shaped the law drawn from (default `sampling`); draft_log_probs: float32 [N] and draft_lse:
    float32 [Rd] as `draft_sample` returned them, to spare reading rows; d2t: int32 [Vd], target id = draft id +
    d2t[draft id]; t2d: int32 [V], its inverse, -1 where an id has no draft column.

    allowed: int32 [N, ceil(V / 32)] bit mask a node; bias: (cu_entries int32 [N + 1], ids int32, values float32), added
    to the logits; vocab_size: ids at and behind it do not exist; uniforms: float32 or float64 [N], the coins (of a
    sampled node its own, of deterministic siblings the first one's); request_order: int32, handle only these requests;
    return_logprobs: "raw", "processed" or "both"; form: "auto", "eager" (all rows) or "lazy" (rows along the path);
    tile_stats: float32 [N, ceil(vocabulary / 4096), 2] of `tile_stats`, from a fused output layer: spares reading rows
    without top-k and top-p (sums in float32: a decision closer than about 1e-6 may fall the other way); workspace:
    uint8 of `workspace_size("verify", requests=, nodes=)`, for GPUs; t2d spares a GPU its making from d2t.

    Data faults set bits in `flags` of their own request. Raises ValueError or TypeError on shapes and dtypes.
    """
    op = "verify"
    if method not in METHODS:
        _ops.expect(op, "method", False, f"one of {METHODS}", repr(method))
    if return_logprobs not in LOGPROBS:
        _ops.expect(op, "return_logprobs", False, f"one of {LOGPROBS}", repr(return_logprobs))
    if tile_stats is not None:
        _ops.expect_tensor(op, "tile_stats", tile_stats, torch.float32, 3)
    nodes, columns = logits_arg(op, "target_logits", target_logits).shape
    index_arg(op, "draft_token_ids", draft_token_ids, nodes)
    sampling_tensors = request_args(op, sampling)
    requests = sampling.temperature.shape[0]
    tree_arg(op, tree, nodes, requests)
    if draft_logits is not None:
        logits_arg(op, "draft_logits", draft_logits)
        index_arg(op, "draft_lse", draft_lse, draft_logits.shape[0], torch.float32)
    device, width = target_logits.device, tree.max_depth + 1
    new = torch.empty if request_order is None else torch.zeros
    output_token_ids = new((requests, width), dtype=torch.int32, device=device)
    accepted_nodes = torch.empty_like(output_token_ids)
    num_emitted, flags = (new((requests,), dtype=torch.int32, device=device) for _ in range(2))
    if request_order is not None:  # requests left out emit nothing
        output_token_ids.fill_(-1)
        accepted_nodes.fill_(-1)
    logprobs = None
    if return_logprobs is not None:
        shape = (requests, width, 2) if return_logprobs == "both" else (requests, width)
        logprobs = new(shape, dtype=torch.float32, device=device)
    if device.type == "cuda" or backend not in (None, "native"):  # the CPU op needs neither
        if workspace is None and form != "lazy":
            workspace = torch.zeros(_verify_workspace(requests, nodes), dtype=torch.uint8, device=device)
        if d2t is not None and t2d is None:
            t2d = _inverse(d2t, columns)
    if uniforms is not None:
        _ops.expect_tensor(op, "uniforms", uniforms, (torch.float32, torch.float64), 1)
    _ops.call(
        op,
        backend,
        device,
        *(target_logits, draft_token_ids, tree.cu_nodes, tree.parents, tree.first_child, tree.next_sibling, tree.flags),
        *sampling_tensors,
        draft_logits,
        index_arg(op, "draft_rows", draft_rows, nodes),
        *draft_sampling_args(op, draft_sampling, requests),
        index_arg(op, "draft_log_probs", draft_log_probs, nodes, torch.float32),
        *(draft_lse, d2t, t2d),
        *edit_args(op, allowed, bias),
        *(uniforms, request_order, tile_stats),
        *(method, vocab_arg(op, vocab_size, columns), tree.max_nodes, tree.max_depth, return_logprobs or ""),
        *(epsilon, delta, form, workspace),
        *(output_token_ids, num_emitted, accepted_nodes, flags, logprobs),
    )
    return Verified(output_token_ids, num_emitted, accepted_nodes, flags, logprobs)


def _inverse(d2t: Tensor, vocab: int) -> Tensor:
    """[vocab] column of every target id, the first one of several; -1 where there is none."""
    columns = torch.arange(d2t.shape[0], dtype=torch.int32, device=d2t.device)
    ids = columns + d2t
    none = torch.iinfo(torch.int32).max
    ids = torch.where((ids >= 0) & (ids < vocab), ids, vocab)  # the spare entry behind the vocabulary
    table = torch.full((vocab + 1,), none, dtype=torch.int32, device=d2t.device)
    table.scatter_reduce_(0, ids.long(), columns, "amin")
    return torch.where(table == none, -1, table)[:vocab]


class Sampled(NamedTuple):
    """token_ids, flags: int32 [R]; logprobs: float32 [R], [R, 2] (raw, processed) or None."""

    token_ids: Tensor
    flags: Tensor
    logprobs: Tensor | None


def sample(
    logits: Tensor,
    sampling: Sampling,
    *,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
    vocab_size: int | None = None,
    return_logprobs: str | None = None,
    backend: str | None = None,
) -> Sampled:
    """One token a row of logits [R, V], with the law and the noise of `verify`'s last token.

    row_requests: int32 [R], the request of a row (default: row r is request r); row_positions: int64 [R], the output
    position of the token drawn (default: the request's `position`). Other arguments as in `verify`.
    """
    op = "sample"
    _ops.expect(op, "return_logprobs", return_logprobs in LOGPROBS, f"one of {LOGPROBS}", repr(return_logprobs))
    rows, columns = logits_arg(op, "logits", logits).shape
    sampling_tensors = request_args(op, sampling)
    if row_requests is None:
        requests = sampling.temperature.shape[0]
        _ops.expect(op, "row_requests", requests == rows, f"given ({rows} rows, {requests} requests)", None)
    token_ids, flags = (torch.empty((rows,), dtype=torch.int32, device=logits.device) for _ in range(2))
    logprobs = None
    if return_logprobs is not None:
        shape = (rows, 2) if return_logprobs == "both" else (rows,)
        logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _ops.call(
        op,
        backend,
        logits.device,
        logits,
        *sampling_tensors,
        index_arg(op, "row_requests", row_requests, rows),
        index_arg(op, "row_positions", row_positions, rows, torch.int64),
        *edit_args(op, allowed, bias),
        vocab_arg(op, vocab_size, columns),
        *(return_logprobs or "", token_ids, flags, logprobs),
    )
    return Sampled(token_ids, flags, logprobs)


class Drafted(NamedTuple):
    """token_ids: int32 [R, k] in target ids, -1 behind the last; log_probs: float32 [R, k], -inf there; lse: [R]."""

    token_ids: Tensor
    log_probs: Tensor
    lse: Tensor


def _drafted(op: str, rows: int, k: int, device: torch.device) -> Drafted:
    _ops.expect_int(op, "k", k, 1, "a value in [1, 1024]", 1024)
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    log_probs = torch.empty((rows, k), dtype=torch.float32, device=device)
    return Drafted(ids, log_probs, torch.empty((rows,), dtype=torch.float32, device=device))


_ALL_IDS = 2**31 - 1


def _draft_vocab(op: str, vocab_size: int | None, d2t: Tensor | None, columns: int) -> int:
    if d2t is not None:
        _ops.expect_tensor(op, "d2t", d2t, torch.int32, 1)
        return vocab_arg(op, vocab_size, _ALL_IDS)
    return vocab_arg(op, vocab_size, columns)


def draft_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float | None = None,
    d2t: Tensor | None = None,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> Drafted:
    """The k most likely tokens of every row of draft logits [R, Vd], best first (equal logits: lowest draft id first).

    Deterministic proposals (EAGLE-2): verify them with `draft_rows` -1. k: 1 to 1024. log_probs and lse are those of
    the softmax at `temperature` (default 1). Columns whose target id (column + d2t[column]) is outside [0, vocab_size)
    do not exist.
    """
    op = "draft_topk"
    rows, columns = logits_arg(op, "logits", logits).shape
    out = _drafted(op, rows, k, logits.device)
    limit = _draft_vocab(op, vocab_size, d2t, columns)
    scale = 1.0 if temperature is None else float(temperature)
    _ops.call(op, backend, logits.device, logits, d2t, k, scale, limit, *out)
    return out


def draft_sample(
    logits: Tensor,
    k: int,
    sampling: Sampling,
    *,
    row_requests: Tensor,
    row_positions: Tensor,
    row_paths: Tensor | None = None,
    d2t: Tensor | None = None,
    coupled: bool = False,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> Drafted:
    """k (1 to 1024) siblings without replacement of every row of draft logits [R, Vd], in draw order (Gumbel top-k).

    row_requests: int32 [R]; row_positions: int64 [R], the output position the siblings compete for; row_paths: int32
    [R], any number that tells the parents of one step apart (a node index will do): their noise is independent.
    log_probs: log q of each token under the whole row law; lse: log-sum-exp of that law's kept logits over temperature:
    `verify` takes both. coupled: use the target's own noise, for `method="coupled"`. A greedy request gets one token.
    Source: Kool et al. 1903.06059.
    """
    op = "draft_sample"
    rows, columns = logits_arg(op, "logits", logits).shape
    out = _drafted(op, rows, k, logits.device)
    _ops.expect_tensor(op, "row_requests", row_requests, torch.int32, 1)
    _ops.expect_tensor(op, "row_positions", row_positions, torch.int64, 1)
    _ops.call(
        op,
        backend,
        logits.device,
        logits,
        *request_args(op, sampling),
        index_arg(op, "row_requests", row_requests, rows),
        index_arg(op, "row_positions", row_positions, rows, torch.int64),
        index_arg(op, "row_paths", row_paths, rows),
        *(d2t, k, coupled, _draft_vocab(op, vocab_size, d2t, columns)),
        *out,
    )
    return out


def verify_probs(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    tree: DraftTree,
    uniforms: Tensor,
    final_uniforms: Tensor,
    *,
    method: str,
    draft_probs: Tensor | None = None,
    backend: str | None = None,
) -> Verified:
    """`verify` for engines that hold probabilities and bring their own coins.

    target_probs: float32 [N, V], normalised; uniforms: float32 [N], a node's coin; final_uniforms: float32 [B], for the
    last token by inverse CDF (first id whose cumulative weight exceeds u times the total). method: "rejection" (chains;
    draft_probs: float32 [N, V], row n is the law node n was drawn from, None: deterministic drafts; FlashInfer's
    chain_speculative_sampling) or "target_only" (trees, the coin of the first sibling against their cumulative mass;
    SGLang's tree_speculative_sampling_target_only at thresholds 1). Nothing is mutated.
    """
    op = "verify_probs"
    _ops.expect(op, "method", method in ("rejection", "target_only"), "'rejection' or 'target_only'", repr(method))
    nodes = _ops.expect_tensor(op, "target_probs", target_probs, torch.float32, 2).shape[0]
    tree_arg(op, tree, nodes)
    requests = tree.cu_nodes.shape[0] - 1
    if draft_probs is not None:
        _ops.expect_tensor(op, "draft_probs", draft_probs, torch.float32, 2)
    device, width = target_probs.device, tree.max_depth + 1
    tokens, accepted = (torch.empty((requests, width), dtype=torch.int32, device=device) for _ in range(2))
    num_emitted, flags = (torch.empty((requests,), dtype=torch.int32, device=device) for _ in range(2))
    _ops.call(
        op,
        backend,
        device,
        *(target_probs, draft_probs, index_arg(op, "draft_token_ids", draft_token_ids, nodes)),
        *(tree.cu_nodes, tree.first_child, tree.next_sibling),
        index_arg(op, "uniforms", uniforms, nodes, torch.float32),
        index_arg(op, "final_uniforms", final_uniforms, requests, torch.float32),
        *(method, tree.max_depth, tokens, num_emitted, accepted, flags),
    )
    return Verified(tokens, num_emitted, accepted, flags, None)
