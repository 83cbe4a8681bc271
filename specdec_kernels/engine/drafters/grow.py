"""Trees grown level by level (EAGLE-2): expand the best nodes, and in the end keep the best of all that were seen.

A level of two requests with top_k = 2; slots are where the drafter's own KV of a node lies, behind its context:

    request 0:  root -> x y          expand both:  x -> a b,  y -> c d      best two by cumulative score: a, c
                slots of x, y: 0, 1                slots of a, c: 2, 3      mask of c: slots 1 and 3
    request 1:  the same, in the same pass: each level is one forward of B * top_k rows

Only nodes are expanded whose children may still be kept: a child's score is at most its parent's, so a node that is not
itself among the best num_nodes seen so far has none, and growing ends at the first level without such a node. The tree
is the one that growing to full depth and width would give; the passes follow what the head is sure of.

A chain is top_k = 1. Fixed choices are the top_k tokens of every node. Random ones are drawn without replacement; they
are kept by `rerank_tree(sampled=True)`, because keeping a sibling for what it turned out to be would bias the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.engine.drafters import Draft, Limit
from specdec_kernels.engine.pack import make_sampling
from specdec_kernels.sampling import draft_sample, draft_topk
from specdec_kernels.tree import collect_candidates, expand_tree, pack_mask, rerank_tree


class Level(NamedTuple):
    """The nodes whose children are wanted: B requests with k rows each.

    token_ids: int64 [B, k]; parents: int64 [B, k], their parents' rows in the level before (0 for the root); mask:
    int32 [B k, W], slots each row sees; first_slot: slot of row 0; depth: of these nodes (1: children of the root).
    """

    token_ids: Tensor
    parents: Tensor
    mask: Tensor
    first_slot: int
    depth: int


class Shape(NamedTuple):
    """top_k: children a node, and most nodes expanded a level; depth: at most; num_nodes: kept in the end, the root not
    counted."""

    top_k: int
    depth: int
    num_nodes: int

    def validate(self, who: str) -> None:
        """Raise ValueError naming the number that is out of range."""
        for name, value in self._asdict().items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{who}: {name}: expected an int >= 1, got {value!r}")

    @property
    def num_slots(self) -> int:
        """KV slots that growing a tree takes: the deepest level is never expanded."""
        return self.top_k * (self.depth - 1)


def grow_trees(
    root_logits: Tensor,
    forward: Callable[[Level], Tensor],
    states: Sequence[Any],
    limits: Sequence[Limit],
    shape: Shape,
    *,
    sampled: bool,
    vocab_size: int,
    d2t: Tensor | None = None,
    by_rank: Sequence[float] | None = None,
) -> list[Draft]:
    """One Draft per request. root_logits: [B, Vd], the law behind each root; forward: logits [B k, Vd] of a level.
    by_rank: chance that the child of rank 0, 1, ... is the accepted one; it takes the place of the head's own
    probabilities as a node's score, so that the tree has the same shape in every step (a static tree).

    A device is waited for once a level, which says how wide the next one is, and at the end.

    sampled: requests with a temperature get siblings drawn without replacement, verified by the law they came from;
    else, and for greedy requests, the likeliest tokens, verified as fixed choices. Both are lossless.
    """
    batch, device = len(states), root_logits.device
    k, depth = shape.top_k, min(shape.depth, max(limit.depth for limit in limits))
    sampling = make_sampling(states, device)
    drawn = [sampled and s.request.temperature > 1e-5 for s in states]
    drawing = torch.tensor(drawn, device=device)
    depths = torch.tensor([limit.depth for limit in limits], device=device)
    fixed = None if by_rank is None else torch.tensor(by_rank, device=device).log()
    own_slot = torch.eye(max(1, shape.num_slots), dtype=torch.bool, device=device)

    def children(logits: Tensor, width: int, paths: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """(ids, log probabilities) [B, width, k] of the children at depth `at` of `width` nodes a request."""
        ids = log_probs = None
        if not all(drawn):
            ids, log_probs, _ = draft_topk(logits, k, d2t=d2t, vocab_size=vocab_size)
        if any(drawn):
            requests = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(width)
            assert sampling.position is not None
            positions = (sampling.position + (at - 1)).repeat_interleave(width)
            draws = draft_sample(
                logits, k, sampling, row_requests=requests, row_positions=positions,
                row_paths=paths.reshape(-1).int(), d2t=d2t, vocab_size=vocab_size,
            )  # fmt: skip
            if ids is None or log_probs is None:
                ids, log_probs = draws.token_ids, draws.log_probs
            else:
                mine = drawing.repeat_interleave(width)[:, None]
                ids = torch.where(mine, draws.token_ids, ids)
                log_probs = torch.where(mine, draws.log_probs, log_probs)
        assert ids is not None
        assert log_probs is not None
        if fixed is not None:
            log_probs = torch.where(log_probs == -torch.inf, log_probs, fixed)
        log_probs = log_probs.view(batch, width, k).masked_fill((depths < at)[:, None, None], -torch.inf)
        return ids.view(batch, width, k), log_probs

    most = [min(shape.num_nodes, limit.nodes) for limit in limits]
    sizes = torch.tensor(most, device=device)
    best = torch.empty(batch, 0, device=device)  # ranks of the best candidates so far
    scores = torch.zeros(batch, 1, device=device)
    paths = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # a number of its own for each expanded node
    seen = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # slots each expanded node sees
    logits, laws, levels, width = root_logits, [root_logits.view(batch, 1, -1)], [], 1
    token_columns = [torch.full((batch, 1), -1, dtype=torch.int32, device=device)]
    row_columns = [torch.zeros(batch, 1, dtype=torch.int32, device=device)]
    row, slot, path = 0, 0, 1  # first law row of the level; slots taken; first number of the level's nodes
    for at in range(1, depth + 1):
        ids, log_probs = children(logits, width, paths, at)
        level = expand_tree(scores, log_probs.contiguous(), k)
        token_columns.append(ids.reshape(batch, -1))
        rows = torch.arange(row, row + width, dtype=torch.int32, device=device).repeat_interleave(k)
        row_columns.append(rows.expand(batch, -1))
        best = _best(best, scores, log_probs, drawing, sizes, max(most))
        useful = int((level.beam_scores > best[:, -1:]).sum(1).max()) if at < depth else 0
        levels.append(level._replace(beam=level.beam[:, :useful], beam_scores=level.beam_scores[:, :useful]))
        if not useful:
            break
        chosen = levels[-1].beam.long().clamp(min=0)
        parents = chosen // k
        before = seen.gather(1, parents[:, :, None].expand(-1, -1, slot)) if slot else seen.expand(-1, useful, 0)
        own = own_slot[slot : slot + useful, slot : slot + useful].expand(batch, useful, useful)
        seen = torch.cat([before, own], -1)
        token_ids = ids.reshape(batch, -1).gather(1, chosen).long().clamp(min=0)
        mask = pack_mask(seen.reshape(batch * useful, -1))
        logits = forward(Level(token_ids, parents, mask, slot, at))
        laws.append(logits.view(batch, useful, -1))
        # Numbered as if all levels were k wide: a request's draws do not depend on how wide others make the batch.
        scores, paths, path = levels[-1].beam_scores, path + chosen, path + (k if at == 1 else k * k)
        row, slot, width = row + width, slot + useful, useful

    candidates = collect_candidates(levels)
    tokens, rows = torch.cat(token_columns, 1), torch.cat(row_columns, 1)
    drafts = [Draft()] * batch
    all_laws = torch.cat(laws, 1)
    for kind in (False, True):
        group = [b for b in range(batch) if drawn[b] == kind]
        if group:
            kept = _rerank(candidates, tokens, rows, group, [most[b] for b in group], kind)
            for b, (ids, parents_, law_rows) in zip(group, kept):
                drafts[b] = _drawn_draft(ids, parents_, law_rows, all_laws[b], d2t) if kind else Draft(ids, parents_)
    return drafts


def _best(best: Tensor, scores: Tensor, log_probs: Tensor, drawing: Tensor, sizes: Tensor, most: int) -> Tensor:
    """Ranks of the `most` best candidates so far, now with a level's children, whose parents have `scores` [B, M] and
    which have log_probs [B, M, k]: [B, most + 1], with each request's `sizes`-th best in the last column (-inf: none).

    Ranks as `rerank_tree` has them: the cumulative score, and of drawn children the chance to be tried at all.
    """
    chances = log_probs.exp().nan_to_num()
    tried = (1 - chances.cumsum(-1) + chances).clamp(2.0**-24, 1).log()
    own = torch.where(drawing[:, None, None] & (log_probs > -torch.inf), tried, log_probs)
    ranks = (scores[:, :, None] + own).flatten(1).nan_to_num(-torch.inf, neginf=-torch.inf)
    merged = torch.cat([best[:, :-1], ranks], 1)
    merged = torch.nn.functional.pad(merged, (0, max(0, most - merged.shape[1])), value=-torch.inf)
    merged = merged.topk(most, dim=1).values
    return torch.cat([merged, merged.gather(1, (sizes - 1).clamp(min=0)[:, None])], 1)


def _rerank(
    candidates: Any, tokens: Tensor, rows: Tensor, group: list[int], num_nodes: list[int], sampled: bool
) -> list[tuple[list[int], list[int], list[int]]]:
    """(token ids, parents, law rows) of the nodes kept of each request of `group`, without roots."""
    device, width = tokens.device, candidates.per_request
    index = torch.tensor(group, device=device)
    sizes, total = (
        torch.tensor([n + 1 for n in num_nodes], dtype=torch.int32, device=device),
        sum(num_nodes) + len(group),
    )
    kept = rerank_tree(
        candidates.scores.view(-1, width)[index].reshape(-1),
        candidates.parents.view(-1, width)[index].reshape(-1),
        torch.arange(len(group) + 1, dtype=torch.int32, device=device) * width,
        sizes,
        total_nodes=total,
        sampled=sampled,
    )
    columns = [kept.take(tokens[index]), kept.parents, kept.take(rows[index]), kept.cu_nodes]
    read = torch.cat(columns).tolist()  # in one go: every read waits for the device
    ids, parents, law_rows = (read[i * total : (i + 1) * total] for i in range(3))
    return [(ids[a + 1 : b], parents[a + 1 : b], law_rows[a + 1 : b]) for a, b in itertools.pairwise(read[3 * total :])]


def _drawn_draft(ids: list[int], parents: list[int], rows: list[int], laws: Tensor, d2t: Tensor | None) -> Draft:
    """A random draft with only the laws that something was kept of."""
    used = sorted(set(rows))
    place = {row: i for i, row in enumerate(used)}
    return Draft(ids, parents, laws[used], [place[row] for row in rows], d2t)
