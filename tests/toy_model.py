"""The toy target behind the engine's model protocol: its sums go through our paged cache and `tree_attention`."""

from __future__ import annotations

import random

import torch

from python_ref.decoder import ToyTarget
from specdec_kernels.attention import tree_attention, write_kv
from specdec_kernels.engine import Batch, Draft, KVCache, KVShape
from specdec_kernels.engine.batch import HiddenStates

HEAD_DIM = 64


class ToyModel:
    """`ToyTarget` with its two sums as uniform attention (zero queries) over value rows that hold one integer."""

    def __init__(self, target: ToyTarget | None = None, max_context: int = 512, eos: tuple[int, ...] = ()):
        self.target = target or ToyTarget()
        self.name, self.tokenizer = "toy", None
        self.vocab_size, self.max_context = self.target.vocab, max_context
        self.num_layers = self.target.num_layers
        self.eos_token_ids = frozenset(eos)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.greatest_position = -1
        self.nan_token: int | None = None  # behind this token all logits are NaN

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_layers, 1, HEAD_DIM, self.dtype)

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        return KVCache.allocate(self.num_layers, num_pages, page_size, 1, HEAD_DIM, self.dtype, self.device)

    hidden_size = 64

    def embedding(self) -> torch.Tensor:
        return torch.randn(self.vocab_size, self.hidden_size, generator=torch.Generator().manual_seed(1))

    def output_matrix(self) -> torch.Tensor:
        return torch.randn(self.vocab_size, self.hidden_size, generator=torch.Generator().manual_seed(2))

    def state(self, layer: int, token: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """What drafters with heads are shown: waves whose phase tells the layer, the token and the sum so far."""
        phase = 0.7 * token + 0.31 * (total % 16) + 0.2 * layer
        return torch.sin(phase[:, None] * torch.arange(1, self.hidden_size + 1) / 7)

    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        layers: tuple[int, ...] | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor:
        toy = self.target
        token, position = batch.token_ids.long(), batch.positions.long()
        self.greatest_position = max(self.greatest_position, int(position.max()))
        total = torch.zeros_like(token)
        sums = {}
        for layer in range(self.num_layers) if layers is None else layers:
            sums[layer] = total
            if layer == 0:
                value = (3 * token + 5 * position + 1) % 16
            else:
                value = (total + 7 * token + 3 * position) % 16
            rows = value.to(self.dtype)[:, None, None].repeat(1, 1, HEAD_DIM)
            write_kv(rows, rows, cache.k[layer], cache.v[layer], batch.slots)
            mean = tree_attention(
                torch.zeros(len(token), 2, HEAD_DIM),
                cache.k[layer],
                cache.v[layer],
                batch.page_table,
                batch.context_lens,
                batch.cu_nodes,
                batch.tree_mask,
                max_nodes=batch.max_nodes,
                causal=batch.causal,
                query_start=batch.query_start,
            )
            visible = position + 1
            total = (mean.mean(dim=(1, 2)).double() * visible).nan_to_num(-1).round().long()
        sums[self.num_layers] = total
        for layer in hidden.layers if hidden is not None else ():
            hidden.states[layer] = self.state(layer, token, sums[layer])
        surprised = total % toy.surprise == 0
        best = torch.where(surprised, (token + total) % toy.vocab, (5 * token + 7) % toy.vocab)
        logits = torch.zeros(len(token), toy.vocab)
        for offset, level in ((2, 1.0), (1, 2.0), (0, 3.0)):
            logits.scatter_(1, ((best + offset) % toy.vocab)[:, None], level)
        if self.nan_token is not None:
            logits[token == self.nan_token] = float("nan")
        return logits if batch.logit_rows is None else logits[batch.logit_rows]


class OracleDrafter:
    """Random trees, in which the true continuation is hidden with probability `hit_rate` a level."""

    name = "oracle"

    def __init__(self, target: ToyTarget, hit_rate: float = 0.7, width: int = 3, seed: int = 0):
        self.target, self.hit_rate, self.width = target, hit_rate, width
        self.random = random.Random(seed)

    def tree(self, tokens: list[int], nodes: int, depth: int) -> tuple[list[int], list[int]]:
        rng = self.random
        ids: list[int] = []
        parents: list[int] = []
        frontier = [(0, list(tokens))]
        for _ in range(rng.randint(0, depth) if depth > 0 else 0):
            following = []
            for node, text in frontier:
                choices = {rng.randrange(self.target.vocab) for _ in range(rng.randint(0, self.width))}
                if rng.random() < self.hit_rate:
                    choices.add(self.target.greedy(text))
                for token in rng.sample(sorted(choices), len(choices)):
                    if len(ids) < nodes:
                        ids.append(token)
                        parents.append(node)
                        following.append((len(ids), [*text, token]))
            frontier = following[:4]
        return ids, parents

    def propose(self, states, limits, context):
        return [Draft(*self.tree(s.tokens, limit.nodes, limit.depth)) for s, limit in zip(states, limits)]


class FixedDrafter:
    """Proposes a given list of chains, one a step."""

    name = "fixed"

    def __init__(self, *chains: list[int]):
        self.chains = list(chains)

    def propose(self, states, limits, context):
        chain = self.chains.pop(0) if self.chains else []
        return [Draft.chain(chain[: limit.depth]) for limit in limits]
