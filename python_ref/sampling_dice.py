"""Where the verifiers of `sampling_rules` get their randomness: exact enumeration, or the ops' Philox keys.

A verifier asks its dice four things: `coin(r)` (true with probability min(r, 1)), `bucket(masses)` (one coin against
cumulative masses: the index hit, or None behind the last), `pick(weights)` (an index in proportion to weights) and
`race(law, weights)` (the same for weights that the law bounds, on other noise).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from python_ref import rng


class ExactDice:
    """Follows `script` through the choices, then takes first options; `open` lists the alternatives it left out."""

    def __init__(self, script: tuple[int, ...]):
        self.script, self.made, self.weight = script, 0, Fraction(1)
        self.open: list[tuple[int, ...]] = []

    def _choose(self, weights: Sequence[Fraction]) -> int:
        options = [index for index, weight in enumerate(weights) if weight > 0]
        if self.made < len(self.script):
            option = self.script[self.made]
        else:
            option = options[0]
            self.open += [(*self.script, other) for other in options[1:]]
            self.script = (*self.script, option)
        self.made += 1
        self.weight *= Fraction(weights[option])
        return option

    def coin(self, ratio: Fraction, **key: int) -> bool:
        ratio = min(Fraction(ratio), Fraction(1))
        return self._choose([1 - ratio, ratio]) == 1

    def bucket(self, masses: Sequence[Fraction], **key: int) -> int | None:
        index = self._choose([*masses, 1 - sum(masses)])
        return None if index == len(masses) else index

    def pick(self, weights: Sequence[Fraction], **key: int) -> int:
        total = sum(weights)
        return self._choose([Fraction(weight) / total for weight in weights])

    def race(self, law: Sequence[Fraction], weights: Sequence[Fraction], **key: int) -> int:
        return self.pick(weights)


def enumerate_law(run: Callable[[ExactDice], Hashable]) -> dict[Any, Fraction]:
    """Exact law of `run(dice)` over every outcome of every coin and pick it makes."""
    law: defaultdict[Any, Fraction] = defaultdict(Fraction)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        dice = ExactDice(scripts.pop())
        law[run(dice)] += dice.weight
        scripts += dice.open
    return dict(law)


TAIL = 0x80  # or-ed to a purpose: the second word of a draw in the far tail
TAIL_WORDS = 4096  # words below this (probability 2^-20) are refined to 64 bits


def gumbel(word: int, tail: int | None = None) -> float:
    """-log(-log1p(-u)): u the midpoint of the word's 2^-32 cell, or of its 2^-64 cell where a `tail` word is given."""
    cell = 0.5 if tail is None else (tail + 0.5) * 2.0**-32
    return float(-np.log(-np.log1p(-(word + cell) * 2.0**-32)))


def noise_words(vocab: int, seed: int, position: int, purpose: int, salt: int = 0) -> np.ndarray:
    """[vocab] words of `rng.draw` for all tokens at once: token t takes word t % 4 of block t // 4."""
    blocks = np.arange((vocab + 3) // 4, dtype=np.uint64)
    seed, position, low = seed % 2**64, position % 2**64, np.uint64(rng.MASK)
    c = [blocks] + [
        np.full_like(blocks, value & rng.MASK) for value in (position, (position >> 32) << 8 | purpose, salt)
    ]
    k0, k1 = seed & rng.MASK, seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & rng.MASK, (k1 + 0xBB67AE85) & rng.MASK
    return np.stack(c, axis=1).ravel()[:vocab]


def gumbel_row(vocab: int, seed: int, position: int, purpose: int, salt: int = 0) -> np.ndarray:
    """[vocab] float64 Gumbel noise of one row."""
    words = noise_words(vocab, seed, position, purpose, salt)
    noise = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32))
    for token in np.flatnonzero(words < TAIL_WORDS):
        tail = rng.draw(seed, position, purpose | TAIL, int(token) // 4, salt)[token % 4]
        noise[token] = gumbel(int(words[token]), tail)
    return noise


RING = 0x40  # or-ed to a purpose: place, coin and waiting time of one ring of a group's clock
BLOCK_TOKENS, GROUPS = 1024, 32  # group 32 b + l: the tokens 1024 b + 32 place + l, place from 0 to 31
RACE_END = 1024.0  # in units of 32 / (the row's mass)
BOUND_STEPS, LAST_BOUND = 8.0, 255.0  # bounds lie at multiples of 1/8 below the row's largest log weight, 255 at most


def exponential_row(count: int, seed: int, position: int, purpose: int) -> np.ndarray:
    """[count] float64 exponential times, the Gumbel noise of the same words read as times."""
    return np.exp(-gumbel_row(count, seed, position, purpose))


def draft_salt(path: int, step: int) -> int:
    """Salt of a draft draw: branches at one depth and repeated steps get independent noise; (0, 0) stays 0."""
    h = (path * 0x9E3779B1 + step * 0x85EBCA77) & rng.MASK
    h = (h ^ (h >> 16)) * 0x85EBCA6B & rng.MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & rng.MASK
    return h ^ (h >> 16)


class PhiloxDice:
    """The ops' own randomness in float64.

    `margin` is the smallest distance of any decision so far from turning out otherwise (a coin from its threshold, the
    best perturbed score from the second): decisions with a margin above float32 rounding must agree with the ops.
    """

    def __init__(self, seed: int, position: int, step: int = 0, uniforms: Sequence[float] | None = None):
        self.seed, self.position, self.step, self.uniforms = seed, position, step, uniforms
        self.margin = float("inf")

    def _uniform(self, node: int, depth: int, trial: int, purpose: int) -> float:
        if self.uniforms is not None:
            return float(self.uniforms[node])
        salt = self.step if purpose == rng.BLOCK else 0
        high, low, _, _ = rng.draw(self.seed, self.position + depth - 1, purpose, trial, salt)
        return (high + rng.coin(low)) * 2.0**-32

    def coin(self, ratio: float, *, node: int, depth: int, trial: int = 0, purpose: int = rng.ACCEPT) -> bool:
        if ratio <= 0 or ratio >= 1:
            if 0 < ratio < 1 + 1e-5:
                self.margin = min(self.margin, ratio - self._uniform(node, depth, trial, purpose))
            return ratio > 0
        u = self._uniform(node, depth, trial, purpose)
        self.margin = min(self.margin, abs(u - ratio))
        return u < ratio

    def bucket(self, masses: Sequence[float], *, node: int, depth: int) -> int | None:
        u, cumulative, hit = self._uniform(node, depth, 0, rng.ACCEPT), 0.0, None
        for index, mass in enumerate(masses):
            cumulative += mass
            self.margin = min(self.margin, abs(u - cumulative))
            if hit is None and u < cumulative:
                hit = index
        return hit

    def pick(self, weights: np.ndarray, *, depth: int) -> int:
        weights = np.asarray(weights, dtype=np.float64)
        noise = gumbel_row(len(weights), self.seed, self.position + depth, rng.EMIT)
        with np.errstate(divide="ignore"):
            scores = np.log(weights) + noise
        best = int(np.argmax(scores))
        if np.isfinite(scores).sum() > 1:
            self.margin = min(self.margin, float(scores[best] - np.partition(scores, -2)[-2]))
        return best

    def race(self, law: np.ndarray, weights: np.ndarray, *, depth: int) -> int:
        """An index in proportion to `weights` <= `law` (of mass 1): the first ring that is taken (race.h).

        Clock g rings at rate 32 b, b the largest mass of its 32 tokens (rounded up to exp(-n/8) of the row's); a ring
        chooses a place evenly, and its token takes it with probability weights / b. Undecided by RACE_END: `pick`."""
        position, padded = self.position + depth, -len(law) % BLOCK_TOKENS
        law, weights = (np.pad(np.asarray(row, dtype=np.float64), (0, padded)) for row in (law, weights))
        largest = law.reshape(-1, BLOCK_TOKENS // GROUPS, GROUPS).max(axis=1).ravel()
        first = exponential_row(len(largest), self.seed, position, rng.RACE)
        with np.errstate(divide="ignore"):
            steps = np.minimum(np.log(law.max() / largest) * BOUND_STEPS, LAST_BOUND)
            bounds = np.where(largest > 0, law.max() * np.exp(-np.floor(steps) / BOUND_STEPS), 0.0)
            first = first / bounds
        # where rounding goes is a decision too, for groups that can ring before the end either way
        unsure = np.where((steps > 0) & (steps < LAST_BOUND), np.abs(steps - np.round(steps)) / BOUND_STEPS, np.inf)
        early = first * np.exp(-1 / BOUND_STEPS)

        def settle(end: float) -> None:
            self.margin = min(self.margin, float(unsure[early < end].min(initial=np.inf)))

        rings = [(float(first[g]), int(g), 0) for g in np.flatnonzero(first < RACE_END * (1 + 1e-5))]
        heapq.heapify(rings)
        while rings and rings[0][0] < RACE_END:
            time, group, count = heapq.heappop(rings)
            words = rng.draw(self.seed, position, rng.RACE | RING, group + (count << 14))
            token = group // GROUPS * BLOCK_TOKENS + (words[0] >> 27) * GROUPS + group % GROUPS
            u, bound = (words[1] + rng.coin(words[2])) * 2.0**-32, bounds[group]
            if law[token] > 0:  # distances in units of what float32 logits leave open
                self.margin = min(self.margin, abs(u * bound - weights[token]) / law[token])
            if u * bound < weights[token]:
                following = min(rings[0][0] if rings else np.inf, RACE_END)
                self.margin = min(self.margin, float(np.log(following / time)))
                settle(time)
                return token
            heapq.heappush(rings, (time - float(np.log1p(-rng.coin(words[3]))) / bound, group, count + 1))
        if rings:
            self.margin = min(self.margin, float(np.log(rings[0][0] / RACE_END)))
        settle(RACE_END)
        return self.pick(weights[: len(weights) - padded], depth=depth)
