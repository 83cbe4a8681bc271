"""The law of rows on vocabulary shards: the same scalars on every rank, by reductions (_sharded.py)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from specdec_kernels._ops import Flag
from specdec_kernels._sampling_args import Sampling
from specdec_kernels._sharded import (
    EMIT,
    LARGEST,
    LOG2E,
    MASS_SCALE,
    NO_TIE,
    Shards,
    exponentials,
    order_key,
    order_value,
    rounded,
    weights,
)

SCALARS = (
    *("threshold", "last_tie", "peak", "tau", "rate"),
    *("mass", "log_mass", "argmax", "is_point", "is_empty", "flags"),
)


class Law:
    """The law of rows [R, Vs] (this rank's columns, the ids from `start`) under the filters; its scalars, [R, 1], are
    the same everywhere. vocab: int64 [1], how many ids there are."""

    def __init__(self, x: Tensor, start: int, sampling: Sampling, shards: Shards, vocab: Tensor):
        self.shards, self.start = shards, start
        self.ids = ids = torch.arange(start, start + x.shape[1], device=x.device)
        nan, inf = (x != x).any(1), (x > LARGEST).any(1)
        self.x = x = torch.where(x != x, -torch.inf, x).clamp_max(LARGEST)
        seen = shards.largest(torch.stack([nan, inf], 1).to(torch.uint8)) > 0
        nan, inf = seen.unbind(1)
        key = shards.largest((order_key(x) << 31 | (NO_TIE - ids)).amax(1))
        peak = order_value(key >> 31)
        self.is_empty = ~(peak > -torch.inf)[:, None]
        self.argmax = torch.where(self.is_empty[:, 0], 0, NO_TIE - (key & NO_TIE))[:, None]
        self.peak = torch.where(self.is_empty, 0.0, peak[:, None])
        heat, p, least = sampling.temperature[:, None], sampling.top_p, sampling.min_p
        self.is_point = self.is_empty | ~(heat > 1e-5) | (heat > LARGEST)
        fault = ~((heat >= 0) & (heat <= LARGEST))[:, 0]
        for number in (p, least):
            fault |= number != number if number is not None else False
        self.tau = 1.0 / torch.where(self.is_point, 1.0, heat.clamp_max(1e36))
        self.rate = self.tau * rounded(LOG2E)
        self.threshold = torch.full_like(self.peak, -torch.inf)
        self.last_tie = torch.full_like(self.argmax, NO_TIE)
        if least is not None:
            self.threshold = torch.where((least > 0)[:, None], self._least_kept(least), self.threshold)
        top_k = sampling.top_k[:, None].long() if sampling.top_k is not None else torch.zeros_like(self.argmax)
        has_k = (top_k > 0) & (top_k < vocab)
        if sampling.top_k is not None:
            self._select(torch.ones_like(ids).expand(x.shape), top_k, has_k)
        one = (weights(self.x, self.peak, self.rate).double() * MASS_SCALE).round().long()
        mass = torch.where(has_k, torch.where(self.kept(), one, 0).sum(1, keepdim=True), self.fours())
        self.mass = shards.total(mass)
        self.flags = (nan * Flag.NAN_LOGIT | inf * Flag.INF_LOGIT | self.is_empty[:, 0] * Flag.DEAD_ROW).int()
        self.flags |= (fault * Flag.PARAMETER).int()
        if p is not None:
            share = p[:, None].double() * self.mass.double()
            self._select(one, share.ceil().clamp_min(1).long(), p[:, None] < 1.0)
        self.log_mass = torch.where(self.mass > 0, (self.mass.double() / MASS_SCALE).log(), 0.0)

    def kept(self) -> Tensor:
        tie = (self.x == self.threshold) & (self.ids <= self.last_tie)
        return ((self.x > self.threshold) | tie) & (self.x > -torch.inf)

    def _least_kept(self, least: Tensor) -> Tensor:
        """The smallest logit that min-p keeps, by bisection over the order keys."""
        distance = torch.where(least >= 1.0, 0.0, least.double().log().float())[:, None]
        low, high = order_key(torch.full_like(self.peak, -LARGEST)), order_key(self.peak)
        for _ in range(32):
            middle = low + (high - low) // 2
            inside = (order_value(middle) - self.peak) * self.tau >= distance
            low, high = torch.where(inside, low, torch.minimum(middle + 1, high)), torch.where(inside, middle, high)
        return order_value(low)

    def _select(self, one: Tensor, wanted: Tensor, active: Tensor) -> None:
        """Keeps the shortest prefix of the total order whose weight reaches `wanted`; `one`: every id's weight.

        Four rounds of 256 bins over the order keys, from their high bits down."""
        kept, key = self.kept(), order_key(self.x)
        weight = torch.where(kept, one, 0)
        wanted = torch.minimum(wanted, self.shards.total(weight.sum(1, keepdim=True)))
        prefix, above = torch.zeros_like(wanted), torch.zeros_like(wanted)
        at = above
        for shift in (24, 16, 8, 0):
            here = torch.where(key >> shift + 8 == prefix, weight, 0)
            bins = torch.zeros(len(key), 256, dtype=torch.int64, device=key.device)
            bins = self.shards.total(bins.scatter_add_(1, 255 - (key >> shift & 255), here))
            sums = above + bins.cumsum(1)
            found = (sums < wanted).sum(1, keepdim=True).clamp_max(255)
            at = bins.gather(1, found)
            above = sums.gather(1, found) - at
            prefix = prefix << 8 | 255 - found
        value = order_value(prefix)
        tie = kept & (self.x == value)
        each = self.shards.largest(torch.where(tie, one, 0).amax(1, keepdim=True)).clamp_min(1)
        ties = at // each
        needed = torch.minimum((wanted - above + each - 1) // each, ties)
        place = self.shards.before(tie.sum(1, keepdim=True)) + tie.cumsum(1)
        last = self.shards.largest(torch.where(tie & (place == needed), self.ids, -1).amax(1, keepdim=True))
        last = torch.where(needed < ties, last, torch.where(value > self.threshold, NO_TIE, self.last_tie))
        self.last_tie = torch.where(active, last, self.last_tie)
        self.threshold = torch.where(active, value, self.threshold)
        if hasattr(self, "mass"):
            self.mass = torch.where(active, above + needed * each, self.mass)

    def scalars(self, index: Tensor) -> Law:
        """The law of some rows without their columns."""
        part = copy.copy(self)
        for name in SCALARS:
            setattr(part, name, getattr(self, name)[index])
        return part

    def rows(self, index: Tensor) -> Law:
        """The law of some rows."""
        part = self.scalars(index)
        part.x = self.x[index]
        return part

    def scaled(self) -> Tensor:
        """float64 [R, Vs], log weights; -inf where not kept."""
        return torch.where(self.kept(), ((self.x - self.peak) * self.tau).double(), -torch.inf)

    def log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        """float64 [R, n], log p of ids whose logits are x; the scalars must be of the same rows."""
        kept = (x > self.threshold) | ((x == self.threshold) & (ids <= self.last_tie))
        value = ((x - self.peak) * self.tau).double() - self.log_mass
        point = torch.where(ids == self.argmax, 0.0, -torch.inf).double()
        return torch.where(self.is_point, point, torch.where(kept, value, -torch.inf))

    def log_probs(self) -> Tensor:
        """float64 [R, Vs], log p of this rank's columns."""
        return self.log_prob(self.x, self.ids)

    def plain(self) -> Law:
        """The same rows at temperature 1, unfiltered: what log-probabilities are reported of."""
        law = copy.copy(self)
        law.tau, law.rate = torch.ones_like(self.tau), torch.full_like(self.rate, LOG2E)
        law.threshold, law.last_tie = (
            torch.full_like(self.threshold, -torch.inf),
            torch.full_like(self.last_tie, NO_TIE),
        )
        law.is_point = self.is_empty
        law.mass = self.shards.total(law.fours())
        law.log_mass = torch.where(law.mass > 0, (law.mass.double() / MASS_SCALE).log(), 0.0)
        return law

    def fours(self) -> Tensor:
        """int64 [R, 1], mass of this rank's kept columns, four neighbours rounded as one."""
        w = torch.where(self.kept(), weights(self.x, self.peak, self.rate), 0.0)
        fours = torch.nn.functional.pad(w, (0, -w.shape[1] % 4)).view(len(w), -1, 2, 2).sum(-1).sum(-1)
        return (fours.double() * MASS_SCALE).round().long().sum(1, keepdim=True)

    def draw(self, seed: Tensor, position: Tensor) -> Tensor:
        """[R] ids: argmax of log weight + Gumbel noise, ties to the lowest."""
        time = exponentials(seed, position, EMIT, self.start, self.x.shape[1])
        score = self.scaled() - time.log()
        best = self.shards.largest(score.amax(1, keepdim=True))
        found = torch.where((score == best) & (score > -torch.inf), self.ids, NO_TIE).amin(1, keepdim=True)
        found = self.shards.smallest(found.int()).long()
        return torch.where(self.is_point | (found == NO_TIE), self.argmax, found)[:, 0]

    def logits_at(self, row: Tensor, token: Tensor) -> Tensor:
        """float32 [n, 1], logits of ids in rows; -inf where an id does not exist."""
        column = token - self.start
        mine = (column >= 0) & (column < self.x.shape[1])
        x = self.x[row, column.clamp(0, self.x.shape[1] - 1)]
        return self.shards.largest(torch.where(mine, x, -torch.inf))[:, None]


def reported(law: Law, plain: Law, x: Tensor, raw_plain: Law, raw_x: Tensor, token: Tensor, wanted: str) -> Tensor:
    """float32 [R] or [R, 2], log-probabilities of one id a row: raw, of the logits as they came (raw_x [R, 1]), and
    processed, of the edited ones (x [R, 1])."""
    raw = raw_plain.log_prob(raw_x, token[:, None])
    processed = torch.where(law.is_point, plain.log_prob(x, token[:, None]), law.log_prob(x, token[:, None]))
    columns = [raw] * (wanted != "processed") + [processed] * (wanted != "raw")
    return torch.cat(columns, 1).float().squeeze(1) if len(columns) == 1 else torch.cat(columns, 1).float()
