"""Markov models and a batched simulator: many requests speculate for several steps; the law of their text is known.

A verifier is `verify(state) -> (output_token_ids [B, depth+1], num_emitted [B])`. `numpy_verifier` is one (right or
deliberately wrong); the suites put the op in its place. A drafter is `draw(state, node, k) -> [B, k]` ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.sampling_helpers import softmax


class Markov:
    """Target and draft logits by the last token, `[V, V]` float32, far enough apart that rejections are common."""

    def __init__(self, vocab: int = 16, seed: int = 0, distance: float = 1.0):
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.target_logits = rng.normal(0, 1.0, (vocab, vocab)).astype(np.float32)
        noise = rng.normal(0, distance, (vocab, vocab))
        self.draft_logits = (self.target_logits + noise).astype(np.float32)

    def joint(self, length: int, start: int = 0, law: Callable[[np.ndarray], np.ndarray] = softmax) -> np.ndarray:
        """Law of `length` tokens behind `start`, `[V] * length`."""
        rows = law(self.target_logits)
        out = rows[start]
        for _ in range(length - 1):
            out = out[..., None] * rows
        return out


@dataclass
class State:
    """One step of B requests that share the shape `parents`; node 0 is the last emitted token."""

    model: Markov
    parents: Sequence[int]
    token_ids: np.ndarray  # [B, n]
    position: np.ndarray  # [B] output position of the first token to come
    step: int
    rng: np.random.Generator
    who: np.ndarray  # [B] numbers of the requests
    seeds: np.ndarray  # [B] their seeds

    def children(self, node: int) -> list[int]:
        return [n for n, parent in enumerate(self.parents) if parent == node]

    def rows(self, table: np.ndarray) -> np.ndarray:
        """[B, n, V]: the row of `table` each node conditions on (ids -1 read row 0; their rows are never visited)."""
        return table[np.maximum(self.token_ids, 0)]


def gumbel_draw(temperature: float = 1.0, table: Callable[[Markov], np.ndarray] | None = None) -> Callable:
    """Siblings without replacement, in draw order (Gumbel top-k), from the draft law at `temperature`, or from
    `table(model)` [V, V] of probabilities; -1 where that law has fewer than k tokens."""

    def draw(state: State, node: int, k: int) -> np.ndarray:
        with np.errstate(divide="ignore"):
            logits = state.model.draft_logits / temperature if table is None else np.log(table(state.model))
        scores = logits[state.token_ids[:, node]]
        scores = scores + state.rng.gumbel(size=scores.shape)
        ids = np.argsort(-scores, axis=1)[:, :k]
        return np.where(np.isneginf(np.take_along_axis(scores, ids, 1)), -1, ids)

    return draw


def top_draw(state: State, node: int, k: int) -> np.ndarray:
    """The k likeliest draft ids: deterministic siblings."""
    return np.argsort(-state.model.draft_logits[state.token_ids[:, node]], axis=1, kind="stable")[:, :k]


def simulate(
    model: Markov,
    parents: Sequence[int],
    draw: Callable[[State, int, int], np.ndarray],
    verify: Callable[[State], tuple[np.ndarray, np.ndarray]],
    *,
    requests: int,
    length: int,
    seed: int = 0,
    start: int = 0,
    edit: Callable[[State], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Speculate until every request has `length` tokens: ([B, length] ids, emitted tokens by request and step 0).

    A request that has them takes no further part."""
    rng = np.random.default_rng(seed)
    text = np.full((requests, length + len(parents) + 1), -1)
    written = np.zeros(requests, dtype=np.int64)
    last = np.full(requests, start)
    seeds = rng.integers(0, 2**62, requests)
    who, step, first_emitted = np.arange(requests), 0, None
    while len(who):
        ids = np.zeros((len(who), len(parents)), dtype=np.int64)
        ids[:, 0] = last[who]
        state = State(model, parents, ids, written[who], step, rng, who, seeds[who])
        for node in range(len(parents)):
            children = state.children(node)
            if children:
                ids[:, children] = draw(state, node, len(children))
        if edit is not None:
            edit(state)
        tokens, count = verify(state)
        first_emitted = count if first_emitted is None else first_emitted
        for column in range(tokens.shape[1]):
            at = written[who] + column
            use = (column < count) & (at < text.shape[1])
            text[who[use], at[use]] = tokens[use, column]
        last[who] = tokens[np.arange(len(who)), count - 1]
        written[who] += count
        who = who[written[who] < length]
        step += 1
    return text[:, :length], first_emitted


def joint_counts(text: np.ndarray, vocab: int, groups: int | None = None) -> np.ndarray:
    """Counts of the joint tokens; `groups` folds ids t into t % groups."""
    base = groups or vocab
    folded = text % base
    code = np.zeros(len(text), dtype=np.int64)
    for column in range(text.shape[1]):
        code = code * base + folded[:, column]
    return np.bincount(code, minlength=base ** text.shape[1])


def folded_law(law: np.ndarray, groups: int) -> np.ndarray:
    """The law that `joint_counts(..., groups)` has, from the full joint."""
    for axis in range(law.ndim):
        moved = np.moveaxis(law, axis, 0)
        moved = np.stack([moved[np.arange(len(moved)) % groups == g].sum(0) for g in range(groups)])
        law = np.moveaxis(moved, 0, axis)
    return law


def numpy_verifier(rule: str = "right", deterministic: bool = False, temperature: float = 1.0) -> Callable:
    """A batched verifier in NumPy. `rule`: "right", or a known wrong one: "same_laws", "zero_only",
    "not_renormalised", "w_stays_one" (the rule for draws with replacement), "target_residual" (recovers from p),
    "always" (coins fixed at 0)."""

    def verify(state: State) -> tuple[np.ndarray, np.ndarray]:
        p_all = softmax(state.rows(state.model.target_logits), temperature)
        q_all = softmax(state.rows(state.model.draft_logits))
        B, n = state.token_ids.shape
        out, count = np.full((B, n + 1), -1), np.zeros(B, dtype=np.int64)
        current, live = np.zeros(B, dtype=np.int64), np.ones(B, dtype=bool)
        for node in range(n):
            who = np.flatnonzero(live & (current == node))
            if not len(who):
                continue
            p, q = p_all[who, node], q_all[who, node]
            weights, c, Z, W = p.copy(), np.zeros(len(who)), np.ones(len(who)), np.ones(len(who))
            open_ = np.ones(len(who), dtype=bool)
            q_now, p_now = q.copy(), p.copy()
            for child in state.children(node):
                x = state.token_ids[who, child]
                index = np.arange(len(who))
                u = np.zeros(len(who)) if rule == "always" else state.rng.random(len(who))
                if deterministic:
                    ratio = weights[index, x] / weights.sum(1)
                elif rule in ("right", "target_residual", "always", "w_stays_one"):
                    ratio = weights[index, x] / Z * W / q[index, x]
                elif rule == "same_laws":
                    ratio = p[index, x] / q[index, x]
                else:
                    ratio = p_now[index, x] / q_now[index, x]
                hit = open_ & (u < ratio)
                current[who[hit]] = child
                out[who[hit], count[who[hit]]] = x[hit]
                count[who[hit]] += 1
                open_ &= ~hit
                if deterministic:
                    weights[index, x] = 0
                elif rule in ("right", "always", "w_stays_one"):
                    c += Z / W
                    weights = np.maximum(p - c[:, None] * q, 0)
                    Z, W = weights.sum(1), W - (rule != "w_stays_one") * q[index, x]
                elif rule == "same_laws":
                    weights = np.maximum(p - q, 0)
                elif rule == "not_renormalised":
                    p_now = np.maximum(p_now - q_now, 0)
                    p_now /= p_now.sum(1, keepdims=True)
                    q_now[index, x] = 0
                    weights = p_now
                elif rule == "zero_only":
                    p_now[index, x] = 0
                    q_now[index, x] = 0
                    p_now /= p_now.sum(1, keepdims=True)
                    q_now /= q_now.sum(1, keepdims=True)
                    weights = p_now
                Z, W = np.where(Z > 1e-15, Z, 1), np.where(W > 1e-15, W, 1e-300)
            ends = who[open_]
            cumulative = weights[open_].cumsum(1)
            u = state.rng.random(len(ends)) * cumulative[:, -1]
            out[ends, count[ends]] = (cumulative <= u[:, None]).sum(1)
            count[ends] += 1
            live[ends] = False
        return out, count

    return verify
