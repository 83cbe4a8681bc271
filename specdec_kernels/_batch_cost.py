"""What a step costs, fitted from measurements, and whether splitting a batch pays. Re-exported by `batching`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec_kernels import _ops


class StepSample(NamedTuple):
    """One measured step: node slots it computed (padding included), requests, KV rows read, seconds."""

    nodes: int
    requests: int
    context: int
    seconds: float


class SplitDecision(NamedTuple):
    """split: whether several launches are predicted to be faster; together, apart: predicted seconds of both."""

    split: bool
    together: float
    apart: float


class BatchCostModel(NamedTuple):
    """seconds = base + per_request * requests + per_context * context + per_node * max(0, nodes - free_nodes).

    base is what every launch pays again, above all one read of the weights; up to free_nodes, node slots are hidden
    behind it (the memory-bound regime), beyond that each costs per_node. relative_error: root mean square over the
    fitted samples. All coefficients are at least 0.
    """

    base: float
    per_request: float
    per_context: float
    per_node: float
    free_nodes: int
    relative_error: float

    @classmethod
    def fit(cls, samples: Sequence[StepSample], *, knees: Sequence[int] | None = None) -> BatchCostModel:
        """Least squares of the relative errors, coefficients kept non-negative, free_nodes tried at every node count
        (or at `knees` only).

        samples: at least 5, with at least two different node counts, positive seconds; else ValueError. Fitting fewer
        effects than the samples vary (one request count only, say) leaves those coefficients at 0.
        """
        op = "BatchCostModel.fit"
        _ops.expect(op, "samples", len(samples) >= 5, "at least 5 samples", len(samples))
        data = np.array([tuple(sample) for sample in samples], dtype=np.float64)
        _ops.expect(op, "samples", bool((data[:, 3] > 0).all()), "positive seconds", data[:, 3].min())
        counts = sorted(set(data[:, 0].tolist()))
        _ops.expect(op, "samples", len(counts) > 1, "at least two node counts", counts)
        best: BatchCostModel | None = None
        for knee in [0.0, *counts[:-1]] if knees is None else knees:
            features = np.stack(
                [np.ones(len(data)), data[:, 1], data[:, 2], np.maximum(0.0, data[:, 0] - knee)], axis=1
            )
            weighted = features / data[:, 3:]  # against a target of 1: errors are relative
            coefficients = _non_negative(weighted)
            error = float(np.sqrt(np.mean((weighted @ coefficients - 1.0) ** 2)))
            if best is None or error < best.relative_error - 1e-12:
                base, per_request, per_context, per_node = coefficients.tolist()
                best = cls(base, per_request, per_context, per_node, int(knee), error)
        assert best is not None
        return best

    def predict(self, nodes: float, requests: float, context: float) -> float:
        """Seconds of one step that computes `nodes` slots for `requests` requests over `context` KV rows in all."""
        beyond = max(0.0, nodes - self.free_nodes)
        return self.base + self.per_request * requests + self.per_context * context + self.per_node * beyond

    def should_split(
        self,
        num_nodes: Sequence[int],
        context_lens: Sequence[int],
        bucket_sizes: Sequence[int],
        *,
        padded: bool = True,
    ) -> SplitDecision:
        """Compare one launch over all requests with one launch a bucket, each of which pays `base` again.

        num_nodes, context_lens: of each request. bucket_sizes: rising, as for `plan_buckets`. padded: a launch pads
        its requests to the largest bucket among them (rectangular execution); False: ragged execution, where
        splitting saves no slot and so never wins.
        """
        op = "BatchCostModel.should_split"
        same = len(num_nodes) == len(context_lens)
        _ops.expect(op, "context_lens", same, f"{len(num_nodes)} entries", len(context_lens))
        groups: dict[int, list[int]] = {}
        for b, nodes in enumerate(num_nodes):
            size = next((s for s in bucket_sizes if nodes <= s), max([nodes, *bucket_sizes]))
            groups.setdefault(size, []).append(b)

        def cost(members: Sequence[int], size: int) -> float:
            slots = size * len(members) if padded else sum(num_nodes[b] for b in members)
            return self.predict(slots, len(members), sum(context_lens[b] for b in members))

        if len(groups) < 2:
            seconds = sum(cost(members, size) for size, members in groups.items())
            return SplitDecision(False, seconds, seconds)
        together = cost(range(len(num_nodes)), max(groups))
        apart = sum(cost(members, size) for size, members in groups.items())
        return SplitDecision(apart < together, together, apart)


def _non_negative(matrix: np.ndarray) -> np.ndarray:
    """argmin |matrix x - 1| over x >= 0: the best of the unconstrained solutions on every subset of columns."""
    rows, columns = matrix.shape
    target = np.ones(rows)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    best, best_error = np.zeros(columns), float("inf")
    for size in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), size):
            part = matrix[:, subset] / scale[list(subset)]
            solution, _, rank, _ = np.linalg.lstsq(part, target, rcond=1e-9)
            if rank < size or (solution < 0).any():
                continue
            error = float(np.sum((part @ solution - target) ** 2))
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(columns)
                best[list(subset)] = solution / scale[list(subset)]
    return best
