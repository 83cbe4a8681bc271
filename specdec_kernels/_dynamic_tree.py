"""Dynamic trees (EAGLE-2/3): expand level by level, then keep the best nodes. Re-exported by `specdec_kernels.tree`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._draft_tree import MAX_NODES


class ExpandedLevel(NamedTuple):
    """child_scores: float32 [B, M R], cumulative log scores of all children (-inf: none).

    beam: int32 [B, k], the best children as indices into child_scores, best first, -1 where fewer exist; beam_scores:
    float32 [B, k], -inf there. Child i belongs to beam entry i // R of the level above.
    """

    child_scores: Tensor
    beam: Tensor
    beam_scores: Tensor


class Candidates(NamedTuple):
    """All candidates of a batch, request by request, root first: inputs of `rerank_tree`.

    scores: float32 [B C]; parents: int32 [B C], local; cu_candidates: int32 [B + 1]; per_request: C.
    """

    scores: Tensor
    parents: Tensor
    cu_candidates: Tensor
    per_request: int


class RerankedTree(NamedTuple):
    """selected: int32 [total_nodes], local candidate index of each kept node (root: 0), -1 behind cu_nodes[B].

    parents: int32 [total_nodes], cu_nodes: int32 [B + 1]: ready for `build_tree`. flags: int32 [B].
    """

    selected: Tensor
    parents: Tensor
    cu_nodes: Tensor
    flags: Tensor

    def take(self, values: Tensor, fill: int | float = -1) -> Tensor:
        """values [B, C] of the candidates (token ids, draft rows, ...) -> [total_nodes] of the kept nodes."""
        place = torch.arange(self.selected.shape[0], dtype=self.cu_nodes.dtype, device=self.selected.device)
        request = torch.searchsorted(self.cu_nodes[1:], place, right=True).clamp_(max=max(0, values.shape[0] - 1))
        index = request * values.shape[1] + self.selected.clamp(min=0)
        flat = values.reshape(-1)
        picked = flat[index] if flat.shape[0] else torch.zeros_like(place, dtype=values.dtype)
        return torch.where(self.selected >= 0, picked, fill)


def expand_tree(scores: Tensor, child_log_probs: Tensor, k: int, *, backend: str | None = None) -> ExpandedLevel:
    """One level of EAGLE-2: cumulative log scores of the children, and the k best as the next beam.

    scores: float32 [B, M], cumulative log scores of the expanded nodes (zeros [B, 1] for the root; -inf: no such
    node). child_log_probs: float32 [B, M, R], log probabilities of each node's R children (`draft_topk`'s). NaN and
    -inf children do not exist and are never chosen. Ties go to the earlier child. k: 0 to 1024; M R below 2^20
    children. Li et al., EAGLE-2 (2024).
    """
    op = "expand_tree"
    _ops.expect_tensor(op, "scores", scores, torch.float32, 2)
    _ops.expect_tensor(op, "child_log_probs", child_log_probs, torch.float32, 3)
    _ops.expect_int(op, "k", k, 0, f"a value in [0, {MAX_NODES}]", MAX_NODES)
    (requests, parents, ranks), device = child_log_probs.shape, scores.device
    child_scores = child_log_probs.new_empty(requests, parents * ranks)
    beam = torch.empty(requests, k, dtype=torch.int32, device=device)
    beam_scores = scores.new_empty(requests, k)
    _ops.call(op, backend, device, scores, child_log_probs, k, child_scores, beam, beam_scores)
    return ExpandedLevel(child_scores, beam, beam_scores)


def collect_candidates(levels: Sequence[ExpandedLevel]) -> Candidates:
    """Line up the children of all levels, root first: C = 1 + sum of M R, parents by each level's beam.

    levels: what `expand_tree` returned for depth 1, 2, ...; level d expanded the beam of level d - 1 (depth 1: the
    root). Token ids line up in the same order: a root column, then each level's [B, M R].
    """
    op = "collect_candidates"
    _ops.expect(op, "levels", len(levels) > 0, "at least one level", "none")
    requests, device = levels[0].child_scores.shape[0], levels[0].child_scores.device
    scores = [torch.zeros(requests, 1, dtype=torch.float32, device=device)]
    parents = [torch.full((requests, 1), -1, dtype=torch.int32, device=device)]
    expanded = torch.zeros(requests, 1, dtype=torch.int32, device=device)  # candidate index of each expanded node
    width = 1
    for depth, level in enumerate(levels, 1):
        children, count = level.child_scores.shape[1], expanded.shape[1]
        fits = count > 0 and children % count == 0
        _ops.expect(op, f"levels[{depth - 1}]", fits, f"children of {count} nodes", children)
        scores.append(level.child_scores)
        parents.append(expanded.repeat_interleave(children // count, dim=1))
        expanded = torch.where(level.beam >= 0, level.beam + width, -1)
        width += children
    cu_candidates = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
    return Candidates(torch.cat(scores, 1).view(-1), torch.cat(parents, 1).view(-1), cu_candidates, width)


def _rerank_workspace(requests: int, candidates: int) -> int:
    """Bytes: a ticket, a count a request, a list entry and a 64-bit key a candidate (RerankWorkspace, csrc/tree)."""
    return 4 * (4 + (requests + 3) // 4 * 4 + (candidates + 3) // 4 * 4 + 2 * candidates)


_ops.register_workspace("rerank_tree", _rerank_workspace)


def rerank_tree(
    scores: Tensor,
    parents: Tensor,
    cu_candidates: Tensor,
    num_nodes: Tensor,
    *,
    total_nodes: int,
    sampled: bool = False,
    workspace: Tensor | None = None,
    backend: str | None = None,
) -> RerankedTree:
    """Keep each request's best num_nodes - 1 candidates and its root, closed under ancestors.

    scores: float32 [C], cumulative log scores relative to the root (whose own entry is ignored), NaN or -inf: no such
    candidate. parents: int32 [C], local, root first (-1), parents before children, siblings in draw order.
    cu_candidates: int32 [B + 1]. num_nodes: int32 [B], root included; fewer are kept if fewer exist. total_nodes:
    host upper bound of all kept nodes. At most 1024 nodes and 2^20 candidates a request.

    A candidate ranks by the least score on its path; ties go to the shallower, then to the earlier. Kept nodes keep
    their order. A candidate whose parent is missing or later is dropped and the request flagged (`Flag.TREE`); a
    request that does not fit total_nodes keeps its best that do (`Flag.INDEX`).

    sampled=True: siblings were **drawn at random** (`draft_sample`), and verification trusts that the j-th one was
    drawn from the draft law given the earlier ones. Keeping a sibling because of what it turned out to be breaks that
    (for q = (.6, .3, .1) and target (.2, .5, .3), keeping the likelier of two draws emits (.31, .38, .31)). Candidates
    then rank by score(parent) + log(1 - q of the earlier siblings), the estimated chance of being tried at all: a
    prefix of every parent's draws is kept, and its length never looks at the law of the token it keeps.

    workspace: uint8 [workspace_size("rerank_tree", requests=B, candidates=C)], zeroed once, for GPUs (default: a new
    one; the CPU needs none).
    """
    op = "rerank_tree"
    _ops.expect_tensor(op, "scores", scores, torch.float32, 1)
    _ops.expect_tensor(op, "parents", parents, torch.int32, 1)
    _ops.expect_tensor(op, "cu_candidates", cu_candidates, torch.int32, 1)
    _ops.expect_tensor(op, "num_nodes", num_nodes, torch.int32, 1)
    _ops.expect_int(op, "total_nodes", total_nodes, 0, "a value of at least 0")
    requests, device = num_nodes.shape[0], scores.device
    selected, parents_out = (torch.empty(total_nodes, dtype=torch.int32, device=device) for _ in range(2))
    cu_nodes = torch.empty(requests + 1, dtype=torch.int32, device=device)
    flags = torch.empty(requests, dtype=torch.int32, device=device)
    if workspace is None and not (device.type in ("cpu", "meta") and backend in (None, "native")):
        size = _ops.workspace_size(op, requests=requests, candidates=scores.shape[0])
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    _ops.call(
        op, backend, device, scores, parents, cu_candidates, num_nodes, sampled, workspace,
        selected, parents_out, cu_nodes, flags,
    )  # fmt: skip
    return RerankedTree(selected, parents_out, cu_nodes, flags)
