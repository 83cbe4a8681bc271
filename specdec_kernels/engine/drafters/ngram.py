"""Prompt lookup: what followed an earlier occurrence of the text's latest tokens is proposed to follow again.

The rule of prompt-lookup decoding (the longest match wins) with three additions: several continuations become a tree;
a match may jump over a few replaced tokens (an edit: the text is a copy but for a renamed word); and how far to draft
is chosen per request from what matches of that length were worth so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels.engine.drafters import Draft, DraftContext, Limit

_KEY = 2  # tokens that an occurrence must share at least
_LONGEST = 32  # matches are measured up to here
_CANDIDATES = 32  # latest occurrences looked at
_JUMP = 3  # replaced tokens a match may jump over ...
_JUMP_MATCH = 6  # ... if this many tokens before them agree
_PRIORS = ((2, 0.3), (4, 0.5), (8, 0.8), (16, 0.9), (_LONGEST, 0.95))  # (match length up to, acceptance assumed)
_PRIOR_WEIGHT = 4.0
_DECAY = 0.95


_Match = tuple[int, int]  # (length, position): the text at `position` continues a match of `length` tokens


@dataclass
class _Notes:
    """Per request: where each key occurred, and how drafts fared by match length."""

    index: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    indexed: int = _KEY
    accepted: list[float] = field(default_factory=lambda: [a * _PRIOR_WEIGHT for _, a in _PRIORS])
    tried: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * len(_PRIORS))
    last: tuple[int, int, list[int]] | None = None  # text length, class of match and main chain of the last draft


class NgramDrafter:
    """Drafts from the request's own prompt and output.

    `branches`: continuations tried at once. `slot_cost`: what one more draft costs, as a share of a step; a draft is
    made only where its chance of acceptance is above it.
    """

    name = "ngram"

    def __init__(self, branches: int = 2, slot_cost: float = 0.04):
        self.branches, self.slot_cost = branches, slot_cost

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext | None) -> list[Draft]:
        return [self._propose(state, limit) for state, limit in zip(states, limits)]

    def _propose(self, state: Any, limit: Limit) -> Draft:
        notes: _Notes | None = state.drafter_state
        if notes is None:
            notes = state.drafter_state = _Notes()
        tokens = state.tokens
        self._learn(notes, tokens)
        matches = self._matches(notes, tokens)
        ids: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}  # (node, token) -> child node
        chance = 1.0  # that this branch is needed at all
        for rank, (length, position) in enumerate(matches[: self.branches]):
            kind = _kind(length)
            rate = notes.accepted[kind] / notes.tried[kind]
            depth = min(self._depth(rate, chance), limit.depth, len(tokens) - position)
            chain = tokens[position : position + depth]
            if rank == 0:
                notes.last = (len(tokens), kind, chain)
            node = 0
            for token in chain:
                child = children.get((node, token))
                if child is None:
                    if len(ids) == limit.nodes:
                        break
                    ids.append(token)
                    parents.append(node)
                    child = children[node, token] = len(ids)
                node = child
            chance *= 1.0 - rate
        return Draft(tuple(ids), tuple(parents))

    def _depth(self, rate: float, chance: float) -> int:
        """Depth at which the chance of acceptance falls to the cost of a slot."""
        if rate * chance <= self.slot_cost:
            return 0
        return int(math.log(self.slot_cost / chance) / math.log(min(rate, 0.99)))

    def _matches(self, notes: _Notes, tokens: list[int]) -> list[_Match]:
        """Earlier occurrences of the text's end, best first: longest, then latest; each continues differently."""
        size = len(tokens)
        found: list[_Match] = []
        for jump in range(_JUMP + 1):
            end = size - jump
            if end < _KEY or (jump and found and found[0][0] >= _KEY + 1):
                break
            for position in reversed(notes.index.get(tuple(tokens[end - _KEY : end]), [])[-_CANDIDATES:]):
                if position >= end or position + jump >= size:
                    continue
                length = _KEY
                while length < min(_LONGEST, position) and tokens[position - 1 - length] == tokens[end - 1 - length]:
                    length += 1
                if jump == 0:
                    found.append((length, position))
                elif length >= _JUMP_MATCH:
                    found.append((max(_KEY, length // (2 * jump)), position + jump))
            found.sort(reverse=True)
        distinct: dict[int, _Match] = {}
        for match in found:
            distinct.setdefault(tokens[match[1]], match)
        return list(distinct.values())

    def _learn(self, notes: _Notes, tokens: list[int]) -> None:
        """Index the new tokens and see what became of the last draft."""
        for position in range(notes.indexed, len(tokens)):
            notes.index.setdefault(tuple(tokens[position - _KEY : position]), []).append(position)
        notes.indexed = max(notes.indexed, len(tokens))
        if notes.last is not None:
            start, kind, chain = notes.last
            notes.last = None
            came = tokens[start:]
            hits = 0
            while hits < min(len(chain), len(came)) and chain[hits] == came[hits]:
                hits += 1
            refused = hits < len(chain) and hits < len(came)
            notes.accepted[kind] = notes.accepted[kind] * _DECAY + hits
            notes.tried[kind] = notes.tried[kind] * _DECAY + hits + refused


def _kind(length: int) -> int:
    return next(i for i, (longest, _) in enumerate(_PRIORS) if length <= longest)
