"""Mixture-of-experts targets: how many experts a pass reads, and what verification costs because of it.

While memory-bound, a pass costs what it reads: the dense weights, and each expert that any of its tokens goes to, once.
One token reads top_k experts a layer; n tokens read

    experts(n) = sum over experts of 1 - (1 - load) ** (n ** alike)       loads of a layer sum to top_k

with alike = 1 for independent tokens, less for tokens that resemble each other, as those of one text do. So a step that
verifies K + 1 tokens a request is dear in a way of its own, against a plain step of the same batch:

    batch        1     few       many: all experts anyway     beyond: arithmetic
    K + 1 read   some  most      all                          all
    1 reads      top_k some      all                          all
    relative     rises ------->  falls ------------------->   rises

It is not monotonic in the batch: a curve taken at batch 1, or drawn between two batches far apart, misses the hill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec_kernels.advisor.selection import CostTable
from specdec_kernels.batching import BatchCostModel, StepSample


class ExpertSample(NamedTuple):
    """One measured pass: tokens in it, distinct experts it read (summed over layers), seconds."""

    tokens: int
    experts: int
    seconds: float


@dataclass(frozen=True)
class ExpertCosts:
    """seconds = base + per_expert * experts(tokens) + per_token * tokens.

    loads[layer][expert]: share of all tokens that go to this expert; a layer's sum to top_k. relative_error: root mean
    square over the fitted samples, with their own counts of experts.
    """

    loads: tuple[tuple[float, ...], ...]
    base: float
    per_expert: float
    per_token: float
    alike: float = 1.0
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        op = "ExpertCosts"
        if not self.loads or any(not 0 <= load <= 1 for layer in self.loads for load in layer):
            raise ValueError(f"{op}: loads: expected shares in [0, 1] of at least one layer, got {self.loads}")
        for name in ("base", "per_expert", "per_token"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{op}: {name}: expected seconds >= 0, got {getattr(self, name)}")
        if not 0 < self.alike <= 1:
            raise ValueError(f"{op}: alike: expected an exponent in (0, 1], got {self.alike}")

    @classmethod
    def fit(cls, samples: Sequence[ExpertSample], loads: Sequence[Sequence[float]]) -> ExpertCosts:
        """Least squares of relative errors: first the costs, against the experts counted; then `alike`, against the
        counts that the loads predict. ValueError for fewer than 5 samples or a single number of tokens."""
        costs = BatchCostModel.fit([StepSample(s.tokens, s.experts, 0, s.seconds) for s in samples], knees=(0,))
        shares = tuple(tuple(float(load) for load in layer) for layer in loads)

        def candidate(alike: float) -> ExpertCosts:
            return cls(shares, costs.base, costs.per_request, costs.per_node, alike, costs.relative_error)

        def error(alike: float) -> float:
            model = candidate(alike)
            return sum((model.experts(s.tokens) / s.experts - 1.0) ** 2 for s in samples)

        return candidate(min((i / 100 for i in range(30, 101)), key=error))

    def experts(self, num_tokens: float) -> float:
        """Expected distinct experts that a pass over so many tokens reads, summed over layers."""
        power = float(num_tokens) ** self.alike
        return sum(1.0 - (1.0 - load) ** power for layer in self.loads for load in layer)

    def seconds(self, num_tokens: float) -> float:
        """Predicted seconds of a pass."""
        return self.base + self.per_expert * self.experts(num_tokens) + self.per_token * num_tokens

    def verify(self, batch: int) -> Callable[[int], float]:
        """For `StepCosts`: cost of a step with n tokens a request at this batch, in plain steps of the same batch."""
        if batch < 1:
            raise ValueError(f"ExpertCosts: batch: expected at least 1, got {batch}")
        return lambda num_tokens: self.seconds(batch * num_tokens) / self.seconds(batch)

    def cost_table(self, batch_sizes: Sequence[int], max_drafts: int, draft_time: float) -> CostTable:
        """A row for every batch size asked for, so that nothing is interpolated over the hill."""
        rows = {b: {k: self.seconds(b * (k + 1)) for k in range(max_drafts + 1)} for b in batch_sizes}
        return CostTable(rows, draft_time)
