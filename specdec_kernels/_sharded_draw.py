"""The last token of a step on vocabulary shards: a race of groups for what is left of a row, else token by token.

    every rank's columns     ... | block of 1024 | block of 1024 | blo:ck of 1024 | block ...
                                                     rank 0        :      rank 1
    group                    a lane of 32 tokens of a block (csrc/sampling/race.h), its bound one of 256: the blocks
                             that a boundary cuts (one a boundary) have their 32 bounds reduced, a byte each

A rank takes the rings whose token is its own; the first taken ring anywhere wins, so the best score over ranks is the
race of one process. A race lasts until 1161 rings are expected, and no more than 2048 / n groups ring n times (but with
probability exp(-275)): eleven steps of 2048 rings, twice as many of half as many groups each time, look at all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels._sharded import EMIT, NO_TIE, RACE, draw, exponentials
from specdec_kernels._sharded_law import Law
from specdec_kernels._sharded_trees import log_residual

BLOCK_TOKENS, LANES, PLACES = 1024, 32, 32
RING, MAX_GROUPS = 0x40, 1 << 14
RACE_END, RINGS = 1024.0, 2048
BOUND_STEPS, LAST_BOUND = 8.0, 255.0
CELL = 2.0**-32


def coins(words: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(u, log u), float64, of 64-bit coins from words (high, low) (csrc/sampling/noise.h)."""
    high, low = words[0].double(), words[1].double()
    u = (high + (low + 0.5) * CELL) * CELL
    rest = (4294967295.0 - high + (4294967295.0 - low + 0.5) * CELL) * CELL
    return u.clamp_max(1.0 - 2.0**-53), torch.where(words[0] < 1 << 31, u.log(), torch.log1p(-rest))


def _bounds(law: Law, starts: Tensor) -> Tensor:
    """float64 [R, groups], log of the bound of every group of this rank's blocks (csrc/sampling/race.h)."""
    rows, first = len(law.x), law.start // BLOCK_TOKENS
    ahead, width = law.start % BLOCK_TOKENS, law.x.shape[1]
    kept = torch.where(law.kept(), law.x, -torch.inf)
    kept = torch.nn.functional.pad(kept, (ahead, -(ahead + width) % BLOCK_TOKENS), value=-math.inf)
    largest = kept.view(rows, -1, PLACES, LANES).amax(2)
    steps = ((largest - law.peak[:, None]) * law.tau[:, None] * -BOUND_STEPS).clamp_max(LAST_BOUND).to(torch.uint8)
    blocks = steps.shape[1]
    if len(starts) > 1:
        cut = starts[1:] // BLOCK_TOKENS - first
        mine = torch.where((cut >= 0) & (cut < blocks), cut, blocks)  # the spare block is nobody's
        wide = torch.cat([steps, torch.full_like(steps[:, :1], int(LAST_BOUND))], 1)
        wide[:, mine] = law.shards.smallest(wide[:, mine])
        steps = wide[:, :blocks]
    return steps.double().flatten(1) / -BOUND_STEPS


def race(law: Law, weights: list[Tensor], starts: Tensor, seed: Tensor, position: Tensor):
    """(score, id) [R] of this rank's best ring for each of `weights` (float64 [R, Vs], at most the row's own)."""
    bound = _bounds(law, starts)
    group = law.start // BLOCK_TOKENS * LANES + torch.arange(bound.shape[1], device=bound.device)
    time = exponentials(seed, position, RACE, law.start // BLOCK_TOKENS * LANES, bound.shape[1])
    end = (bound - (law.log_mass - math.log(RACE_END))).exp()
    group = group.expand_as(bound)
    none = torch.full((len(bound),), -torch.inf, dtype=torch.float64, device=bound.device)
    best = [(none, torch.full_like(position, NO_TIE)) for _ in weights]
    scaled, steps = law.scaled(), RINGS.bit_length() - 1
    for step in range(steps):
        index = (time < end).float().topk(min(bound.shape[1], RINGS >> step), 1).indices
        bound, group, time, end = (x.gather(1, index) for x in (bound, group, time, end))
        count = torch.arange(2**step - 1, 2 ** (step + 1) - 1, device=bound.device)
        words = draw(seed, position, RACE | RING, (group[..., None] + count * MAX_GROUPS).flatten(1))
        wait = -(-(words[3].double() + 0.5) * CELL).log1p().view(*group.shape, -1)
        rings = torch.cat([time[..., None], wait], 2).cumsum(2)
        place = (words[0] >> 27).view(*group.shape, -1)
        token = (group // LANES * BLOCK_TOKENS + group % LANES)[..., None] + place * LANES
        local = token - law.start
        takes = (rings[..., :-1] < end[..., None]) & (local >= 0) & (local < law.x.shape[1])
        at = local.clamp(0, law.x.shape[1] - 1).flatten(1)
        log_u = coins(words[1:3])[1]
        takes = takes.flatten(1) & (log_u < scaled.gather(1, at) - bound.repeat_interleave(len(count), 1))
        score = (bound[..., None] - rings[..., :-1].log()).flatten(1)
        for which, weight in enumerate(weights):
            taken = takes & (log_u < weight.gather(1, at) - bound.repeat_interleave(len(count), 1))
            best[which] = _leader(torch.where(taken, score, -torch.inf), token.flatten(1), *best[which])
        time = rings[..., -1]
    return best


def _leader(score: Tensor, ids: Tensor, best: Tensor, best_id: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score and its lowest id, of [R, n] candidates and the leader so far."""
    top = torch.maximum(score.amax(1), best)
    found = torch.where((score == top[:, None]) & (score > -torch.inf), ids, NO_TIE).amin(1)
    return top, torch.minimum(found, torch.where(best == top, best_id, NO_TIE))


@dataclass
class Leftover:
    """What the last token of a request is drawn from: its row's law, or that without the rejected drafts."""

    rejected: Tensor  # bool [B]: by a race; else from the row itself
    drawn: Tensor  # bool: max(p - c q, 0); else the row without `tried`
    twice: Tensor  # bool: where nothing is left of that, the residual at last_log_c
    tried: Tensor  # bool [B, Vs]
    log_c: Tensor
    last_log_c: Tensor


def draw_last(
    p: Law,
    log_q: Tensor | None,
    what: Leftover,
    starts: Tensor,
    seed: Tensor,
    position: Tensor,
    can_reject: bool,
) -> tuple[Tensor, Tensor]:
    """(ids, whether the residual was empty) [B]. p: the laws of the last rows; log_q: float64 [B, Vs] or None.

    Five levels: race and pick from the residual, race and pick from the one before, pick from the row. The first level
    at which any rank has a candidate decides."""
    scaled = p.scaled()
    left = torch.where(what.tried, -torch.inf, scaled)
    weights = [left]
    if log_q is not None:
        log_p = p.log_probs()

        def residual(log_c: Tensor) -> Tensor:
            return log_residual(log_p, log_q, log_c[:, None]) + p.log_mass

        weights = [torch.where(what.drawn[:, None], residual(what.log_c), left), residual(what.last_log_c)]
    weights = [
        torch.where(on[:, None], w, -torch.inf)
        for on, w in zip((what.rejected, what.rejected & what.twice), weights, strict=False)
    ]
    noise = -exponentials(seed, position, EMIT, p.start, p.x.shape[1]).log()
    levels = []
    raced = race(p, weights, starts, seed, position) if can_reject else []
    for weight, winner in zip(weights, raced, strict=False):
        levels += [winner, _pick(weight + noise, p.ids)]
    levels.append(_pick(scaled + noise, p.ids))
    scores, ids = torch.stack([score for score, _ in levels]), torch.stack([found for _, found in levels])
    some = scores > -torch.inf
    mine = torch.where(some.any(0), some.int().argmax(0), len(levels))
    level = p.shards.smallest(mine.to(torch.uint8)).long()
    at = level.clamp_max(len(levels) - 1)[None]
    score = torch.where(mine == level, scores.gather(0, at)[0], -torch.inf)
    best = p.shards.largest(score)
    found = torch.where((score == best) & (best > -torch.inf), ids.gather(0, at)[0], NO_TIE)
    found = p.shards.smallest(found.int()).long()
    return torch.where(found == NO_TIE, p.argmax[:, 0], found), what.rejected & (level >= 2)


def _pick(score: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    best = score.amax(1)
    return best, torch.where((score == best[:, None]) & (score > -torch.inf), ids, NO_TIE).amin(1)
