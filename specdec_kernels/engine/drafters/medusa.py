"""Medusa: one pass of a few small heads over the target's last state fills a static tree. No KV, no second pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.engine.batch import HiddenStates, TargetModel
from specdec_kernels.engine.drafters import Draft, DraftContext, Limit, Seen
from specdec_kernels.engine.head_files import bind_head, find_head
from specdec_kernels.engine.heads import DraftHead, MedusaHead
from specdec_kernels.engine.pack import make_sampling
from specdec_kernels.sampling import draft_sample, draft_topk
from specdec_kernels.tree import check_d2t, sequoia_tree, static_tree

# Chance that the child of rank 0, 1, ... is the accepted one; only shapes the default tree.
_BY_RANK = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02)
_Tree = list[tuple[tuple[int, ...], int]]  # (rank path, parent's node) of nodes 1, 2, ...


@dataclass
class _Notes:
    position: int  # of the text that `state` [H] belongs to
    state: Tensor


class MedusaDrafter:
    """Drafts with a Medusa set; one object serves one engine.

    `head`: a head, a checkpoint folder, or None: the set that ships for this target. `paths`: rank paths of the tree,
    such as [(0,), (1,), (0, 0)], the most useful first (a smaller budget takes the front); None: the best tree of
    `num_nodes` for typical acceptance. A chain is [(0,), (0, 0), ...]. `sampled`: for requests with a temperature, each
    node's children are drawn without replacement from its depth's law; False: the likeliest, as fixed choices.
    """

    name = "medusa"

    def __init__(
        self,
        head: DraftHead | str | Path | None = None,
        *,
        paths: Iterable[Sequence[int]] | None = None,
        num_nodes: int = 24,
        sampled: bool = True,
    ):
        self._given, self._paths, self.num_nodes, self.sampled = head, paths, num_nodes, sampled
        self.hidden_layers: tuple[int, ...] = ()

    def attach(self, model: TargetModel) -> None:
        """Bind the heads to the target and plan the tree; ValueError if they were made for another target."""
        head = find_head(self._given, self.name, model)
        if not isinstance(head, MedusaHead):
            raise ValueError(f"medusa drafter: head: expected a Medusa set, got {head.config.kind!r}")
        self.head, c = bind_head(head, model, pack=head is not self._given), head.config
        self.hidden_layers, self.vocab_size = c.feature_layers, model.vocab_size
        self.d2t, _ = check_d2t(
            head.d2t, draft_vocab_size=c.draft_vocab_size, target_vocab_size=c.vocab_size, kind="offset"
        )
        if self._paths is None:
            tree, _ = sequoia_tree(_BY_RANK, self.num_nodes + 1, c.num_medusa)
            value = {path: _product(_BY_RANK[rank] for rank in path) for path in tree.paths}
            self.paths = sorted((p for p in tree.paths if p), key=lambda p: (-value[p], len(p), p))
        else:
            self.paths = [tuple(path) for path in self._paths]
            static_tree(self.paths)  # raises on holes and repetitions
        for i, path in enumerate(self.paths):
            if len(path) > c.num_medusa:
                raise ValueError(f"medusa drafter: paths: expected at most {c.num_medusa} ranks, got {path}")
            if path[:-1] and path[:-1] not in self.paths[:i]:
                raise ValueError(f"medusa drafter: paths: expected {path[:-1]} before {path}")

    def weights_changed(self, model: Any) -> None:
        """The target has new weights: read its matrices again."""
        self.head.rebind(model.embedding(), model.output_matrix())

    def observe(self, seen: Sequence[Seen], hidden: HiddenStates, context: DraftContext) -> None:
        """Keep the state of each text's last computed token."""
        (layer,) = self.hidden_layers
        for state, first, rows in seen:
            # A copy: a view would keep the whole step's states.
            state.drafter_state = _Notes(first + len(rows) - 1, hidden.states[layer][rows[-1]].clone())

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext) -> list[Draft]:
        drafts = [Draft()] * len(states)
        ready = [b for b, s in enumerate(states) if self._current(s) and limits[b].nodes > 0]
        if not ready:
            return drafts
        logits = self.head(torch.stack([states[b].drafter_state.state for b in ready]))  # [B, depths, Vd]
        drawn = [b for b in ready if self.sampled and states[b].request.temperature > 1e-5]
        trees = {b: self._shape(limits[b]) for b in ready}
        row = {b: i for i, b in enumerate(ready)}
        if len(drawn) < len(ready):
            width = 1 + max(rank for path in self.paths for rank in path)
            ids, _, _ = draft_topk(logits.flatten(0, 1), width, d2t=self.d2t, vocab_size=self.vocab_size)
            table = ids.view(*logits.shape[:2], width).tolist()
            for b in set(ready) - set(drawn):
                tokens = [table[row[b]][len(path) - 1][path[-1]] for path, _ in trees[b]]
                drafts[b] = Draft(*_existing(tokens, [parent for _, parent in trees[b]], tokens)[:2])
        if drawn:
            laws = logits[[row[b] for b in drawn]]
            for b, draft in zip(drawn, self._draw([states[b] for b in drawn], [trees[b] for b in drawn], laws)):
                drafts[b] = draft
        return drafts

    def _current(self, state: Any) -> bool:
        notes = state.drafter_state
        return isinstance(notes, _Notes) and notes.position == state.context_len - 1

    def _shape(self, limit: Limit) -> _Tree:
        """(path, parent's node) of the most useful nodes within the limit."""
        kept = [path for path in self.paths if len(path) <= limit.depth][: limit.nodes]
        index = {(): 0, **{path: i + 1 for i, path in enumerate(kept)}}
        return [(path, index[path[:-1]]) for path in kept]

    def _draw(self, states: Sequence[Any], trees: Sequence[_Tree], logits: Tensor) -> list[Draft]:
        """Draw the children of every node. A tree says how many a node gets, never which: the j-th one drawn stands
        where the j-th child stands in the tree, in the order in which siblings are tried."""
        device = logits.device
        sampling = make_sampling(states, device)
        groups: list[tuple[int, int, int, list[int]]] = []  # (request, depth of the children, parent, children)
        for i, tree in enumerate(trees):
            children: dict[int, list[int]] = {}
            for node, (_, parent) in enumerate(tree):
                children.setdefault(parent, []).append(node)
            groups += [(i, len(tree[nodes[0]][0]), parent, nodes) for parent, nodes in children.items()]
        requests = torch.tensor([group[0] for group in groups], device=device)
        depths = torch.tensor([group[1] for group in groups], device=device)
        assert sampling.position is not None
        ids, _, _ = draft_sample(
            logits[requests, depths - 1],
            max(len(group[3]) for group in groups),
            sampling,
            row_requests=requests.int(),
            row_positions=sampling.position[requests] + depths - 1,
            row_paths=torch.tensor([group[2] for group in groups], dtype=torch.int32, device=device),
            d2t=self.d2t,
            vocab_size=self.vocab_size,
        )
        tokens = [[-1] * len(tree) for tree in trees]
        for (i, _, _, nodes), row in zip(groups, ids.tolist()):
            for node, token in zip(nodes, row):
                tokens[i][node] = token
        drafts = []
        for i, tree in enumerate(trees):
            rows = [len(path) - 1 for path, _ in tree]
            kept, parents, rows = _existing(tokens[i], [parent for _, parent in tree], rows)
            drafts.append(Draft(kept, parents, logits[i], rows, self.d2t))
        return drafts


def _existing(tokens: list[int], parents: list[int], rows: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Without the nodes that found no token (a filter left fewer than the tree has children) and what hangs on them."""
    place = {0: 0}
    kept: tuple[list[int], list[int], list[int]] = ([], [], [])
    for node, (token, parent, row) in enumerate(zip(tokens, parents, rows), 1):
        if token >= 0 and parent in place:
            place[node] = len(place)
            for values, value in zip(kept, (token, place[parent], row)):
                values.append(value)
    return kept


def _product(values: Iterable[float]) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result
