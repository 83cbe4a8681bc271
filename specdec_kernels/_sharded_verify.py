"""`sample` and `verify` on vocabulary shards; what crosses ranks: _sharded.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._sampling_args import LOGPROBS, Sampling, logits_arg
from specdec_kernels._sharded import Shards, draw_rows, matched_tree
from specdec_kernels.sampling import Sampled, Verified, verify
from specdec_kernels.tree import DraftTree


def _rows_of(sampling: Sampling, requests: Tensor) -> dict[str, Tensor | None]:
    """The columns of `sampling` a row, by its request."""
    return {name: None if column is None else column[requests] for name, column in vars(sampling).items()}


def sample_sharded(
    logits: Tensor,
    sampling: Sampling,
    *,
    vocab_start: int,
    group: Any | None,
    return_logprobs: str | None = None,
) -> Sampled:
    """`sample` where every rank of `group` holds columns [vocab_start, vocab_start + Vs) of logits [B, Vs].

    Ranks follow one another in the vocabulary and begin at multiples of 32; every rank gets the tokens, flags and
    log-probabilities that one process gets from the whole rows, whatever the number of ranks. An unfiltered row costs
    48 bytes of reductions (torch.distributed), top-k and top-p 8 KiB each.
    """
    op = "sample_sharded"
    rows = logits_arg(op, "logits", logits).shape[0]
    _ops.expect(op, "return_logprobs", return_logprobs in LOGPROBS, f"one of {LOGPROBS}", repr(return_logprobs))
    _ops.expect(op, "sampling", len(sampling.temperature) == rows, f"{rows} requests", len(sampling.temperature))
    return Sampled(*draw_rows(op, logits, sampling, vocab_start, group, return_logprobs))


def verify_sharded(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    tree: DraftTree,
    sampling: Sampling,
    *,
    method: str,
    vocab_start: int,
    group: Any | None,
    return_logprobs: str | None = None,
    backend: str | None = None,
) -> Verified:
    """`verify` by "greedy" or "coupled" on vocabulary shards, as in `sample_sharded`: target_logits [N, Vs].

    The target's own token of every node is drawn on the shards; every rank then walks the tree alike. The other methods
    need the draft's law and raise NotImplementedError.
    """
    op = "verify_sharded"
    if method not in ("greedy", "coupled"):
        raise NotImplementedError(f"{op}: method: expected 'greedy' or 'coupled', got {method!r}")
    nodes, columns = logits_arg(op, "target_logits", target_logits).shape
    _ops.expect(op, "return_logprobs", return_logprobs in LOGPROBS, f"one of {LOGPROBS}", repr(return_logprobs))
    device, requests = target_logits.device, len(sampling.temperature)
    n = torch.arange(nodes, device=device, dtype=torch.int32)
    owner = torch.searchsorted(tree.cu_nodes[1:].contiguous(), n, right=True).clamp_max(max(requests - 1, 0))
    row = _rows_of(sampling, owner)
    assert row["position"] is not None
    row["position"] = row["position"] + tree.depths
    heat = sampling.temperature
    if method == "greedy":
        row = row | {"temperature": torch.zeros(nodes, device=device), "top_k": None, "top_p": None, "min_p": None}
    drawn, seen, logprobs = draw_rows(op, target_logits, Sampling(**row), vocab_start, group, return_logprobs)
    vocab = Shards(group).total(torch.tensor([columns], device=device))
    logits, ids = matched_tree(draft_token_ids, drawn, (seen & _ops.Flag.DEAD_ROW) != 0, vocab, tree)
    still = Sampling.of(requests, temperature=0.0, device=device)
    out = verify(logits, ids, tree, still, method="greedy", backend=backend)
    emitted = torch.arange(out.output_token_ids.shape[1], device=device) < out.num_emitted[:, None]
    at = (tree.cu_nodes[:-1, None] + out.accepted_nodes).clamp(0, max(nodes - 1, 0)).long()
    flags = out.flags
    if method == "greedy":
        flags = flags | torch.where((heat >= 0) & (heat < torch.inf), 0, _ops.Flag.PARAMETER).int()
    for step in range(at.shape[1] if nodes else 0):
        flags = flags | torch.where(emitted[:, step], seen[at[:, step]], 0)
    tokens = torch.where(emitted, drawn[at], -1) if nodes else out.output_token_ids
    if logprobs is not None and nodes:
        wide = emitted if logprobs.dim() == 1 else emitted[..., None]
        logprobs = torch.where(wide, logprobs[at], 0.0)
    return Verified(tokens, out.num_emitted, out.accepted_nodes, flags, logprobs)
