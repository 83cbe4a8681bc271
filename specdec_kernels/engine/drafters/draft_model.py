"""Chains by a smaller model over the same vocabulary, with KV of its own in the arena's draft tenant.

text        t0 t1 ... tn-1 tn          tn: the root
fed         t0 t1 ... tn-1             after a step that accepted none
this step   feed tn -> d1, feed d1 -> d2, feed d2 -> d3        (the last draft is not fed)
next step   accepted 1: feed the recovered token; accepted 3: feed d3, then the bonus token
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch, KVShape, TargetModel
from specdec_kernels.engine.drafters import Draft, DraftContext, Limit
from specdec_kernels.engine.pack import make_sampling
from specdec_kernels.engine.pages import Tenant
from specdec_kernels.sampling import draft_sample, draft_topk


@dataclass
class _Notes:
    """Per request: how much of the text is in the draft's KV, and the drafts fed behind it."""

    length: int = 0
    drafts: list[int] = field(default_factory=list)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Drafts that became text stay, the others are forgotten: their rows are written over."""
        for draft in self.drafts:
            if self.length >= len(tokens) - 1 or tokens[self.length] != draft:
                break
            self.length += 1
        self.drafts = []


class DraftModelDrafter:
    """`num_drafts`: chain length. A chain ends early behind a token whose probability under the draft's law is below
    `min_prob`. At most `max_catch_up` tokens of a text are read in a step; until all of it is, there are no drafts.
    A request whose pages cannot be had is not drafted for in that step."""

    name = "draft_model"

    def __init__(self, model: TargetModel, num_drafts: int = 4, min_prob: float = 0.0, max_catch_up: int = 512):
        self.model, self.num_drafts, self.min_prob, self.max_catch_up = model, num_drafts, min_prob, max_catch_up
        self.max_context = model.max_context

    @property
    def kv_shape(self) -> KVShape:
        return self.model.kv_shape

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext) -> list[Draft]:
        bounds = [self._prepare(s, min(self.num_drafts, *limit), context) for s, limit in zip(states, limits)]
        chains: list[list[int]] = [[] for _ in states]
        laws: list[list[torch.Tensor]] = [[] for _ in states]
        active = [i for i, bound in enumerate(bounds) if bound >= 0]  # 0: only read text
        floor = math.log(self.min_prob) if self.min_prob > 0 else -math.inf
        while active:
            rows = [(states[i], chains[i]) for i in active]
            ids, log_probs, logits = self._level(rows, context)
            going = []
            for row, i in enumerate(active):
                if bounds[i] == 0:
                    continue
                chains[i].append(ids[row])
                if states[i].request.temperature > 1e-5:
                    laws[i].append(logits[row])
                if len(chains[i]) < bounds[i] and log_probs[row] >= floor:
                    going.append(i)
            active = going
        for state, chain, bound in zip(states, chains, bounds):
            if bound >= 0:
                state.drafter_state.drafts = chain[:-1]
        return [Draft.chain(chain, torch.stack(law) if law else None) for chain, law in zip(chains, laws)]

    def _prepare(self, state: Any, bound: int, context: DraftContext) -> int:
        """Hold the pages for a chain of `bound` drafts; returns how long it may be, -1 if nothing can be done."""
        assert context.arena is not None
        notes = state.drafter_state
        if not isinstance(notes, _Notes):
            notes = state.drafter_state = _Notes()
        if not state.draft_pages:  # taken back by the engine
            notes.length, notes.drafts = 0, []
        notes.catch_up(state.tokens)
        known = len(state.tokens)
        if known - notes.length > self.max_catch_up:
            known, bound = notes.length + self.max_catch_up, 0
        if not context.arena.grow(state.draft_pages, known + max(0, bound - 1), Tenant.DRAFT):
            return -1
        return bound

    def _level(
        self, rows: list[tuple[Any, list[int]]], context: DraftContext
    ) -> tuple[list[int], list[float], torch.Tensor]:
        """Feed each request what its KV lacks; the next token, its log-probability, and the logits it came from."""
        assert context.draft_cache is not None
        device, page_size = self.model.device, context.draft_cache.page_size
        fed: list[list[int]] = []
        starts: list[int] = []
        for state, chain in rows:
            notes = state.drafter_state
            if chain:
                starts.append(notes.length + len(chain) - 1)
                fed.append(chain[-1:])
            else:
                starts.append(notes.length)
                fed.append(state.tokens[notes.length : notes.length + self.max_catch_up])
                notes.length += len(fed[-1])
        width = max(len(state.draft_pages) for state, _ in rows)
        table = torch.tensor(
            [s.draft_pages + [-1] * (width - len(s.draft_pages)) for s, _ in rows], dtype=torch.int32, device=device
        )
        lens = torch.tensor(starts, dtype=torch.int32, device=device)
        sizes = torch.tensor([0] + [len(ids) for ids in fed], dtype=torch.int32)
        cu = sizes.cumsum(0).to(torch.int32).to(device)
        flat = [token for ids in fed for token in ids]
        batch = Batch(
            token_ids=torch.tensor(flat, device=device).clamp(0, self.model.vocab_size - 1),
            positions=torch.tensor(
                [start + i for start, ids in zip(starts, fed) for i in range(len(ids))],
                dtype=torch.int32,
                device=device,
            ),
            slots=slot_mapping(table, lens, cu, page_size, total_nodes=len(flat)),
            page_table=table,
            context_lens=lens,
            cu_nodes=cu,
            max_nodes=max(map(len, fed)),
            logit_rows=(cu[1:] - 1).long(),
        )
        logits = self.model.forward(batch, context.draft_cache)[:, : self.model.vocab_size]
        return next_tokens(logits, [state for state, _ in rows], [len(chain) for _, chain in rows])


def next_tokens(
    logits: torch.Tensor, states: Sequence[Any], depths: Sequence[int]
) -> tuple[list[int], list[float], torch.Tensor]:
    """One draft a row of logits [R, V]: the best token for greedy requests, for others a draw from the row's law.
    depths[r]: drafts the request has in this step already."""
    if all(state.request.temperature <= 1e-5 for state in states):
        ids, log_probs, _ = draft_topk(logits, 1)
    else:
        sampling = make_sampling(states, logits.device)
        rows = torch.arange(len(states), dtype=torch.int32, device=logits.device)
        offsets = torch.tensor(depths, device=logits.device)
        assert sampling.position is not None
        ids, log_probs, _ = draft_sample(
            logits, 1, sampling, row_requests=rows, row_positions=sampling.position + offsets
        )
    return ids[:, 0].tolist(), log_probs[:, 0].tolist(), logits
