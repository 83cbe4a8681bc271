"""What a draft policy knows: each request's own acceptance per depth, and how far a cost model is from the truth."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_kernels.batching import BatchCostModel

_LEAST, _MOST = 1e-3, 1.0 - 1e-3  # no acceptance is ever certain: odds stay finite


class AcceptanceTable:
    """Conditional acceptance by depth, P(accepted at i | accepted at all depths before), of many requests.

    The estimator is censored: a depth counts as reached only if everything before it was accepted; what lay behind a
    rejection, or was never drafted, says nothing. Recent steps count most (`memory` steps). A request that has said
    little leans on all requests together (`prior_weight` observations' worth), shifted by the odds ratio it has shown
    so far; a depth that nobody reached leans on the depth before it. Estimates are corrected by how past ones of the
    same depth came true, so that a bias of this estimator does not last.
    """

    def __init__(self, depth: int, *, memory: float = 24.0, prior: float = 0.6, prior_weight: float = 12.0):
        self.depth, self.prior, self.prior_weight = depth, prior, prior_weight
        self._keep = 1.0 - 1.0 / memory
        self._row: dict[int, int] = {}
        self._free: list[int] = []
        self._reached = np.zeros((0, depth))
        self._accepted = np.zeros((0, depth))
        self._shown = np.zeros((0, depth))  # the latest estimate given out, before correction
        self.pool_reached = np.zeros(depth)
        self.pool_accepted = np.zeros(depth)
        self._predicted = np.zeros(depth)
        self._realised = np.zeros(depth)

    def __len__(self) -> int:
        return len(self._row)

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        """Table rows of requests, int64 [n]; unknown ones start empty."""
        for key in ids:
            if key not in self._row:
                if not self._free:
                    size = len(self._reached)
                    for name in ("_reached", "_accepted", "_shown"):
                        setattr(self, name, np.concatenate([getattr(self, name), np.zeros((size + 16, self.depth))]))
                    self._free = list(range(2 * size + 15, size - 1, -1))
                row = self._free.pop()
                self._reached[row] = self._accepted[row] = self._shown[row] = 0.0
                self._row[key] = row
        return np.fromiter((self._row[key] for key in ids), np.int64, len(ids))

    def forget(self, request_id: int) -> None:
        """Free a request's row; unknown ids are ignored."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def pooled(self) -> np.ndarray:
        """Acceptance by depth over all requests, float64 [depth]."""
        out, before, weight = [], self.prior, self.prior_weight
        for accepted, reached in zip(self.pool_accepted.tolist(), self.pool_reached.tolist()):
            before = (accepted + weight * before) / (reached + weight)
            out.append(before)
        return np.array(out).clip(_LEAST, _MOST)

    def raw(self, ids: Sequence[int]) -> np.ndarray:
        """Estimates before the correction by past outcomes, float64 [n, depth]."""
        rows = self.rows(ids)
        reached, accepted, pooled = self._reached[rows], self._accepted[rows], self.pooled()
        tried, taken = reached.sum(1), accepted.sum(1)
        mean = np.where(tried > 0, (reached @ pooled) / np.maximum(tried, 1e-9), pooled[0])
        weight = self.prior_weight
        ratio = (taken + weight * mean) / (tried - taken + weight * (1 - mean)) * (1 - mean) / mean
        own = pooled * ratio[:, None] / (1 - pooled + pooled * ratio[:, None])
        return (accepted + weight * own) / (reached + weight)

    def estimate(self, ids: Sequence[int]) -> np.ndarray:
        """Conditional acceptance of each request at depth 1, 2, ..., float64 [n, depth]."""
        raw, rows = self.raw(ids), self.rows(ids)
        self._shown[rows] = raw
        correction = (self._realised + 10.0) / (self._predicted + 10.0)
        return (raw * correction).clip(_LEAST, _MOST)

    def record(self, ids: Sequence[int], accepted: np.ndarray, rejected: np.ndarray) -> None:
        """One step: `accepted` leading drafts of each request (int [n]); whether the next one was tried and refused.
        Requests that are over by now still count for all together."""
        if not len(ids):
            return
        place = np.arange(self.depth)
        reached = (place < (accepted + rejected)[:, None]).astype(np.float64)
        taken = (place < accepted[:, None]).astype(np.float64)
        self.pool_reached += reached.sum(0)
        self.pool_accepted += taken.sum(0)
        _fade(self.pool_reached, self.pool_accepted, 1000.0)
        known = np.fromiter((key in self._row for key in ids), bool, len(ids))
        reached, taken = reached[known], taken[known]
        rows = self.rows([key for key in ids if key in self._row])
        tried = reached.any(1)
        self._reached[rows[tried]] *= self._keep
        self._accepted[rows[tried]] *= self._keep
        self._reached[rows] += reached
        self._accepted[rows] += taken
        shown = self._shown[rows] * reached
        self._predicted += shown.sum(0)
        self._realised += np.where(shown > 0, taken, 0.0).sum(0)
        _fade(self._predicted, self._realised, 200.0)


def _fade(count: np.ndarray, other: np.ndarray, limit: float) -> None:
    """Scale both down where `count` passed `limit`: the older half of what was seen fades as new things are seen."""
    scale = np.minimum(1.0, limit / np.maximum(count, limit))
    count *= scale
    other *= scale


class CostCorrection:
    """Measured over predicted seconds, learnt online: one factor for everything, and one by (logarithmic) node count.

    The first follows what slows all steps (clocks, other tenants); the second bends the curve where the model's shape
    is wrong (a knee elsewhere, a padded graph). A step cannot tell the two apart, so two thirds of a surprise are taken
    for the first. Between node counts that were seen it interpolates; beyond them it holds the nearest.
    """

    def __init__(self, rate: float = 0.04):
        self.rate = rate
        self._global, self._steps = 0.0, 0
        self._bins: dict[int, list[float]] = {}  # bin -> [log factor, observations]
        self._key_list: list[int] = []  # the curve by bin, for one number ...
        self._value_list: list[float] = []
        self._keys, self._values = np.zeros(0), np.zeros(0)  # ... and for arrays

    def factor(self, nodes: np.ndarray) -> np.ndarray:
        """What to multiply predictions for `nodes` by."""
        if not len(self._keys):
            return np.full(np.shape(nodes), math.exp(self._global))
        return np.exp(self._global + np.interp(_bin(nodes), self._keys, self._values))

    def factor_of(self, nodes: float) -> float:
        """`factor` of one number."""
        return math.exp(self._global + self._shape_at(4.0 * math.log2(max(nodes, 1.0))))

    def _shape_at(self, place: float) -> float:
        """The curve at a place between bins."""
        keys, values = self._key_list, self._value_list
        right = bisect.bisect_left(keys, place)
        if right == len(keys):
            return values[-1] if values else 0.0
        if right == 0:
            return values[0]
        low, high = keys[right - 1], keys[right]
        return values[right - 1] + (values[right] - values[right - 1]) * (place - low) / (high - low)

    def observe(self, nodes: int, predicted: float, measured: float) -> None:
        """One step. A wild outlier (a pause) moves the estimate by at most what a factor of 1.65 would."""
        if not (predicted > 0 and measured > 0):
            return
        key = round(4.0 * math.log2(max(nodes, 1)))
        if key not in self._bins:
            self._bins[key] = [self._shape_at(key), 0.0]
        entry = self._bins[key]
        error = math.log(measured / predicted) - self._global - entry[0]
        if self._steps:
            error = min(max(error, -0.5), 0.5)
        self._steps += 1
        moved = max(2 * self.rate, 1.0 / self._steps)
        self._global += moved * error
        entry[1] += 1.0
        entry[0] += max(self.rate, 1.0 / (entry[1] + 1.0)) * (1.0 - moved) * error
        self._key_list = sorted(self._bins)
        self._value_list = [self._bins[k][0] for k in self._key_list]
        self._keys, self._values = np.array(self._key_list, np.float64), np.array(self._value_list)


class ForwardCorrection:
    """Corrects a `BatchCostModel` online: a factor on each side of its knee, and a `CostCorrection` for what is left.

    Below the knee a step waits for memory (base), above it for arithmetic (the line that leaves the knee). Every step
    tells about its own side, and the knee moves to where the two meet: a step of 200 nodes says what one of 400 takes.
    """

    def __init__(self, costs: BatchCostModel, rate: float = 0.1, rest: float = 0.02):
        self.costs, self.rate = costs, rate
        self._reads = self._computes = 0.0  # log factors
        self.shape = CostCorrection(rest)

    def seconds(self, nodes: np.ndarray, fixed: float) -> np.ndarray:
        """Predicted seconds of `nodes`; fixed: the model's own for a step below the knee."""
        costs = self.costs
        sides = np.maximum(costs.base * math.exp(self._reads), self._line(nodes))
        return (fixed - costs.base + sides) * self.shape.factor(nodes)

    def seconds_of(self, nodes: float, fixed: float) -> float:
        """`seconds` of one number of nodes: a step asks often, and arrays of one number are slow."""
        costs = self.costs
        sides = max(costs.base * math.exp(self._reads), float(self._line(nodes)))
        return (fixed - costs.base + sides) * self.shape.factor_of(nodes)

    def observe(self, nodes: int, fixed: float, measured: float) -> None:
        """One step. A wild outlier counts as a factor of 1.65."""
        predicted = self.seconds_of(nodes, fixed)
        if not (predicted > 0 and measured > 0):
            return
        reads, line = self.costs.base * math.exp(self._reads), float(self._line(nodes))
        share = max(reads, line) / (fixed - self.costs.base + max(reads, line))  # of what the factor works on
        error = min(max(math.log(measured / predicted), -0.5), 0.5) / max(share, 0.2)
        if reads >= line:
            self._reads += self.rate * error
        else:
            self._computes += self.rate * error
        self.shape.observe(nodes, self.seconds_of(nodes, fixed) / self.shape.factor_of(nodes), measured)

    def _line(self, nodes: Any) -> Any:
        costs = self.costs
        if not costs.per_node:
            return 0.0 * nodes
        return (costs.base + costs.per_node * (nodes - costs.free_nodes)) * math.exp(self._computes)


def _bin(nodes: np.ndarray) -> np.ndarray:
    return 4.0 * np.log2(np.maximum(nodes, 1))
