"""What a request does to the rows it is judged by: forbidden tokens (a grammar, a minimum length) and added values
(biases, penalties), for every node of its tree at the node's own state of the text.

    text ... r        the root's row: counts of the text up to r
             +- a     a's row: counts of the text and a; grammar advanced over a
             |  +- b
             +- c     c's row: a is not part of its text
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from specdec_kernels.engine.drafters import Draft

if TYPE_CHECKING:
    from specdec_kernels.engine.request import Request, RequestState

logger = logging.getLogger("specdec_kernels")

NEVER = float("-inf")


class Grammar(Protocol):
    """A matcher that has read the output so far. Those of xgrammar and llguidance fit behind a few lines."""

    def fill_allowed(self, row: torch.Tensor) -> None:
        """Set the bits of the tokens that may come next in a row of zeros, int32 [ceil(V / 32)]: bit t % 32 of word
        t // 32 is token t."""

    def accept(self, token_id: int) -> bool:
        """Read one token; False (and nothing changed) if it may not come here."""

    def rollback(self, count: int) -> None:
        """Unread the last `count` tokens."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow; then the matcher is not asked any more."""


class RowEdits:
    """One request's edits. `None` in `of` if it has none: then its rows cost nothing."""

    def __init__(self, request: Request, prompt: Sequence[int], stop_ids: frozenset[int]):
        self.request = request
        self.grammar = None if request.grammar is None else request.grammar()
        self._slots: dict[int, int] = {}  # token id -> its column in the lists below
        self._bias: list[float] = []
        self._counts: list[int] = []  # in the output
        self._seen: list[bool] = []  # in prompt or output
        self._stop_ids = stop_ids
        for token, value in request.logit_bias.items():
            self._bias[self._slot(token)] = value
        if request.min_tokens:
            for token in stop_ids:
                self._slot(token)
        self.counting = request.presence_penalty != 0 or request.frequency_penalty != 0
        self.repeating = request.repetition_penalty != 1
        self.ended = False
        if self.repeating:
            for token in prompt:
                self._seen[self._slot(token)] = True

    @staticmethod
    def of(request: Request, prompt: Sequence[int], stop_ids: frozenset[int]) -> RowEdits | None:
        edits = RowEdits(request, prompt, stop_ids)
        return edits if edits.grammar is not None or edits._slots or edits.counting or edits.repeating else None

    def accept(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Take in emitted tokens. Returns how many belong to the text (the grammar may end before the last of them) and
        what is wrong, if the grammar does not allow one or raises. `ended`: whether the grammar's text is complete."""
        for token in tokens if self.counting or self.repeating else ():
            slot = self._slot(token)
            self._counts[slot] += 1
            self._seen[slot] = True
        kept = 0
        if self.grammar is None:
            return len(tokens), None
        try:
            for token in tokens:
                if self.grammar.ended:
                    break
                if not self.grammar.accept(token):
                    return kept, f"grammar: expected an allowed token, got {token}"
                kept += 1
            self.ended = self.grammar.ended
        except Exception as error:
            return kept, f"grammar: {error!r}"
        return kept, None

    def _slot(self, token: int) -> int:
        if token not in self._slots:
            self._slots[token] = len(self._slots)
            self._bias.append(0.0)
            self._counts.append(0)
            self._seen.append(False)
        return self._slots[token]

    # ---- a step

    def biases(self, draft: Draft, num_output: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int32 [D] and values float32 [nodes, D] to add to `rows`, the nodes' logits [nodes, V]."""
        request, nodes = self.request, len(draft) + 1
        if self.counting or self.repeating:
            for token in draft.token_ids:
                if 0 <= token < rows.shape[1]:
                    self._slot(token)
        device = rows.device
        ids = torch.tensor(list(self._slots), dtype=torch.int64, device=device)
        counts = torch.tensor(self._counts, dtype=torch.float32).repeat(nodes, 1)
        seen = torch.tensor(self._seen, dtype=torch.bool).repeat(nodes, 1)
        depths = [0]
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents), 1):
            depths.append(depths[parent] + 1)
            counts[node], seen[node] = counts[parent], seen[parent]
            if (self.counting or self.repeating) and token in self._slots:
                counts[node, self._slots[token]] += 1
                seen[node, self._slots[token]] = True
        counts, seen = counts.to(device), seen.to(device)
        values = torch.tensor(self._bias, dtype=torch.float32, device=device).repeat(nodes, 1)
        if self.repeating:
            before = rows[:, ids].float()
            biased = before + values
            factor = request.repetition_penalty
            penal = torch.where(biased > 0, biased / factor, biased * factor)
            values = torch.where(seen & before.isfinite(), penal - before, values)
        if self.counting:
            values = values - request.frequency_penalty * counts - request.presence_penalty * (counts > 0)
        if num_output < request.min_tokens:
            early = torch.tensor([num_output + depth < request.min_tokens for depth in depths], device=device)
            stops = torch.tensor([token in self._stop_ids for token in self._slots], device=device)
            values = values.masked_fill(early[:, None] & stops, NEVER)
        return ids.to(torch.int32), values

    def fill_allowed(self, draft: Draft, rows: torch.Tensor, vocab_size: int) -> None:
        """The grammar's bits for every node, int32 [nodes, W]. Nothing is allowed behind a token that is not, or that
        is outside the vocabulary; behind the end of the text everything is, because the stop cuts it off. The grammar
        is left as it was, also if it raises."""
        grammar = self.grammar
        assert grammar is not None
        rows.zero_()
        children: list[list[int]] = [[] for _ in range(len(draft) + 1)]
        for node, parent in enumerate(draft.parents, 1):
            children[parent].append(node)

        def visit(node: int) -> None:
            if grammar.ended:
                for child in self._below(children, node):
                    rows[child].fill_(-1)
                return
            grammar.fill_allowed(rows[node])
            for child in children[node]:
                token = draft.token_ids[child - 1]
                if 0 <= token < vocab_size and grammar.accept(token):
                    try:
                        visit(child)
                    finally:
                        grammar.rollback(1)

        visit(0)

    @staticmethod
    def _below(children: list[list[int]], node: int) -> list[int]:
        found = [node]
        for parent in found:
            found += children[parent]
        return found


def process_rows(states: Sequence[RequestState], drafts: Sequence[Draft], logits: torch.Tensor) -> torch.Tensor:
    """`logits` [N, V or more] after the requests' own processors, every node with the text of its path; float32 if
    there is one. A node below an id outside the vocabulary is left alone: it is never accepted. A processor that raises
    is its request's `fault`."""
    if all(state.request.logits_processor is None for state in states):
        return logits
    logits, start = logits.to(torch.float32, copy=True), 0
    for state, draft in zip(states, drafts):
        processor = state.request.logits_processor
        if processor is not None:
            texts: list[list[int] | None] = [state.tokens]
            for token, parent in zip(draft.token_ids, draft.parents):
                above = texts[parent]
                texts.append(None if above is None or not 0 <= token < logits.shape[1] else [*above, token])
            try:
                for row, text in enumerate(texts, start):
                    if text is not None:
                        logits[row] = processor(text, logits[row])
            except Exception as error:
                _blame(state, "logits_processor", error)
        start += len(draft) + 1
    return logits


def _blame(state: RequestState, what: str, error: Exception) -> None:
    """A request's own code raised: it ends with this step, and no other does."""
    state.fault = f"{what}: {error!r}"
    logger.warning("%s of request %d failed", what, state.id, exc_info=error)


def step_edits(
    states: Sequence[RequestState], drafts: Sequence[Draft], logits: torch.Tensor, vocab_size: int
) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`allowed` and `bias` of a step's verification, as far as any of its requests needs them.

    logits: [N, V or more], one row a node, requests in the order of `states`, roots first. A grammar that raises is its
    request's `fault`.
    """
    if all(state.edits is None for state in states):
        return {}
    device = logits.device
    allowed: torch.Tensor | None = None
    ids: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    sizes: list[int] = []
    start = 0
    for state, draft in zip(states, drafts):
        nodes = len(draft) + 1
        if state.edits is not None and state.edits.grammar is not None:
            if allowed is None:
                allowed = torch.full((len(logits), -(-vocab_size // 32)), -1, dtype=torch.int32)
            mine = allowed[start : start + nodes]
            try:
                state.edits.fill_allowed(draft, mine, vocab_size)
            except Exception as error:
                mine.fill_(-1)
                _blame(state, "grammar", error)
        width = 0
        if state.edits is not None:
            columns, added = state.edits.biases(draft, state.num_output, logits[start : start + nodes])
            width = len(columns)
            ids.append(columns.repeat(nodes))
            values.append(added.flatten())
        sizes += [width] * nodes
        start += nodes
    edits: dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    if allowed is not None:
        edits["allowed"] = allowed.to(device)
    if sum(sizes):
        offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        edits["bias"] = (offsets.to(device), torch.cat(ids), torch.cat(values))
    return edits
