"""Self-speculation: the target drafts for itself with some of its layers left out.

No weights and no memory of its own: a draft pass reads the target's cache for the committed text and writes its rows to
the slots of the coming tree, which the verification overwrites. Which layers are left out is measured (`layer_search`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch
from specdec_kernels.engine.drafters import Draft, DraftContext, Limit
from specdec_kernels.engine.drafters.draft_model import next_tokens
from specdec_kernels.engine.drafters.layer_search import LayerChoice, choose_layers


class SelfDrafter:
    """Chains drafted with `layers` of the target (None: measured on first use, then remembered on disk).

    `num_drafts`: chain length (None: measured too). A chain ends early behind a token whose probability under the
    draft's law is below `min_prob`. Greedy requests get the draft's best token, sampled ones a draw from its law.
    """

    name = "self"

    def __init__(self, layers: Sequence[int] | None = None, num_drafts: int | None = None, min_prob: float = 0.5):
        self.choice = None if layers is None else LayerChoice(tuple(layers), num_drafts or 4)
        self.num_drafts, self.min_prob = num_drafts, min_prob

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext) -> list[Draft]:
        if self.choice is None:
            self.choice = choose_layers(context.model)
        length = self.num_drafts or self.choice.num_drafts
        bounds = [min(length, limit.depth, limit.nodes) for limit in limits]
        chains: list[list[int]] = [[] for _ in states]
        laws: list[list[torch.Tensor]] = [[] for _ in states]
        active = [i for i, bound in enumerate(bounds) if bound > 0]
        floor = math.log(self.min_prob) if self.min_prob > 0 else -math.inf
        for depth in range(max(bounds, default=0)):
            ids, log_probs, logits = self._level([states[i] for i in active], [chains[i] for i in active], context)
            for row, i in enumerate(active):
                chains[i].append(ids[row])
                if states[i].request.temperature > 1e-5:
                    laws[i].append(logits[row])
            active = [i for row, i in enumerate(active) if bounds[i] > depth + 1 and log_probs[row] >= floor]
            if not active:
                break
        return [Draft.chain(chain, torch.stack(law) if law else None) for chain, law in zip(chains, laws)]

    def _level(
        self, states: list[Any], chains: list[list[int]], context: DraftContext
    ) -> tuple[list[int], list[float], torch.Tensor]:
        """One more token for every chain: its id, its log-probability under the draft, and the logits it came from."""
        assert self.choice is not None
        model, page_size = context.model, context.cache.page_size
        device = model.device
        width = max(len(state.pages) for state in states)
        table = torch.tensor(
            [s.pages + [-1] * (width - len(s.pages)) for s in states], dtype=torch.int32, device=device
        )
        lens = torch.tensor([s.context_len + len(c) for s, c in zip(states, chains)], dtype=torch.int32, device=device)
        cu = torch.arange(len(states) + 1, dtype=torch.int32, device=device)
        last = [(chain or state.tokens)[-1] for state, chain in zip(states, chains)]
        batch = Batch(
            token_ids=torch.tensor(last, device=device),
            positions=lens,
            slots=slot_mapping(table, lens, cu, page_size, total_nodes=len(states)),
            page_table=table,
            context_lens=lens,
            cu_nodes=cu,
            max_nodes=1,
        )
        logits = model.forward(batch, context.cache, self.choice.layers)[:, : model.vocab_size]
        return next_tokens(logits, states, [len(chain) for chain in chains])
