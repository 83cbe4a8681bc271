"""The recovered token in Triton: a race of groups of 32 ids, csrc/sampling/race.h. A block of 1024 ids at a time."""

import triton
import triton.language as tl

from specdec_kernels._triton.rng import INT32_MAX, PURPOSE_RACE, draw
from specdec_kernels._triton.sampling_noise import NONE, WORD, coin_of, exponential, minus_log1m, words_of
from specdec_kernels._triton.sampling_rows import clean, edited, keeps
from specdec_kernels._triton.sampling_walk import log_weights

PURPOSE_RING = tl.constexpr(0x40)
LOG_RACE_END = tl.constexpr(6.931471805599453)  # log 1024


@triton.jit
def race(row, law, seed, position, tree, node, kind, what, drafted, log_c, view, ALLOWED: tl.constexpr,
         BIASED: tl.constexpr, ROWS: tl.constexpr, DRAWN: tl.constexpr, MAPPED: tl.constexpr):  # fmt: skip
    """The id of the first ring that is taken; -1 where none is in time.

    Columns of a block are its groups; each rings until one of its rings is taken or comes too late."""
    salt = tl.zeros((), tl.uint32)
    best = law[7] - LOG_RACE_END  # -log of the best time so far
    best_id = tl.full((), -1, tl.int32)
    for base in range(0, row[5], 1024):
        x = clean(edited(row, base + tl.arange(0, 1024), ALLOWED, BIASED))
        most = tl.max(tl.reshape(x, (32, 32)), 0)
        lane = tl.arange(0, 32)
        group = base // 32 + lane
        word = words_of(seed, position, PURPOSE_RACE, salt, base // 32, 32)
        rung = exponential(seed, position, PURPOSE_RACE, salt, group, word)
        steps = tl.minimum((most - law[0]) * law[3] * -8.0, 255.0)  # rounded up to a multiple of 1/8
        bound = steps.to(tl.int32).to(tl.float64) * -0.125
        live = (most > NONE) & (most >= law[4]) & (bound - tl.log(rung) > best)
        count = tl.zeros((), tl.int32)
        while tl.max(live.to(tl.int32), 0) > 0:
            w = draw(seed, position, PURPOSE_RACE | PURPOSE_RING, group + (count << 14), salt)
            c = base + (w[0] >> 27).to(tl.int32) * 32 + lane
            logit = clean(edited(row, tl.where(live, c, row[5]), ALLOWED, BIASED))
            own = ((logit - law[0]) * law[3]).to(tl.float64)
            _, log_u = coin_of(w[1], w[2])
            takes = live & (logit > NONE) & keeps(logit, c, law[4], law[5]) & (log_u < own - bound)
            if tl.max(takes.to(tl.int32), 0) > 0:
                value = log_weights(c, logit, law, tree, node, kind, what, drafted, log_c, view, ROWS, DRAWN, MAPPED)
                takes = takes & (log_u < value - bound)
                score = tl.where(takes, bound - tl.log(rung), NONE)
                here = tl.max(score, 0)
                if here > best:
                    best = here
                    best_id = tl.min(tl.where(score == here, c, INT32_MAX), 0)
            rung += minus_log1m((w[3].to(tl.float64) + 0.5) * WORD)
            live = live & ~takes & (bound - tl.log(rung) > best)
            count += 1
    return best_id
