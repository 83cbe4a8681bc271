"""Growing and pruning a dynamic tree in plain Python, and the law that a pruned tree emits, in exact arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

FLAG_TREE = 64


def present(score: float) -> bool:
    """NaN and -inf mean: no such candidate."""
    return not math.isnan(score) and score != -math.inf


def expand_tree(scores: list[float], child_log_probs: list[list[float]], k: int) -> tuple[list[float], list[int]]:
    """(cumulative scores of all children, indices of the k best); float32 sums, as the op's."""
    sums = [float(np.float32(s) + np.float32(c)) for s, row in zip(scores, child_log_probs) for c in row]
    sums = [s if present(s) else -math.inf for s in sums]
    best = sorted((i for i, s in enumerate(sums) if present(s)), key=lambda i: (-sums[i], i))[:k]
    return sums, best + [-1] * (k - len(best))


def sampled_scores(scores: list[float], parents: list[int]) -> list[float]:
    """Chance, in logs, that verification tries a drawn candidate: its parent's score and what its siblings left."""
    out = [0.0]
    for i in range(1, len(scores)):
        siblings = [j for j in range(1, i) if parents[j] == parents[i]]
        if not present(scores[i]) or any(not present(scores[j]) for j in siblings):
            out.append(-math.inf)
            continue
        above = scores[parents[i]] if parents[i] > 0 else 0.0
        mass = 1.0 - sum(math.exp(scores[j] - above) for j in siblings)
        out.append(float(np.float32(above + math.log(max(mass, 2.0**-24)))))
    return out


def rerank_tree(
    scores: list[float], parents: list[int], num_nodes: int, sampled: bool = False
) -> tuple[list[int], list[int]]:
    """(kept candidates in order, their parents among the kept): best by the least score on the path."""
    if not scores or num_nodes <= 0:
        return [], []
    own = sampled_scores(scores, parents) if sampled else scores
    ranked = []
    for i in range(1, len(scores)):
        path = [i]
        while path[-1] > 0 and 0 <= parents[path[-1]] < path[-1]:
            path.append(parents[path[-1]])
        if path[-1] == 0 and all(present(own[j]) for j in path[:-1]):
            ranked.append((-min(own[j] for j in path[:-1]), len(path), i))
    kept = [0, *sorted(i for _, _, i in sorted(ranked)[: num_nodes - 1])]
    return kept, [-1, *(kept.index(parents[i]) for i in kept[1:])]


# ---- the law of what verification emits when siblings were drawn without replacement (exact rationals)

Law = tuple[Fraction, ...]


def draws(law: Law, k: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every ordered draw of k tokens without replacement, with its probability."""
    for tokens in itertools.permutations(range(len(law)), k):
        left, probability = Fraction(1), Fraction(1)
        for token in tokens:
            probability *= law[token] / left if left else 0
            left -= law[token]
        if probability:
            yield tokens, probability


def walk(target: Law, draft: Law, siblings: list[int]) -> tuple[list[Fraction], Law]:
    """(chance that each sibling is accepted, residual law if none is), by the recursion of SpecInfer and Sequoia."""
    residual, remaining = list(target), list(draft)
    reached, accepted = Fraction(1), []
    for token in siblings:
        chance = min(Fraction(1), residual[token] / remaining[token])
        accepted.append(reached * chance)
        reached *= 1 - chance
        rest = [max(r - q, Fraction(0)) for r, q in zip(residual, remaining)]
        if sum(rest):
            residual = [x / sum(rest) for x in rest]
        remaining[token] = Fraction(0)
        if sum(remaining):
            remaining = [q / sum(remaining) for q in remaining]
    return accepted, tuple(residual)


def emitted_law(
    target: Callable[[tuple[int, ...]], Law], draft: Law, tokens: list[int], parents: list[int], length: int
) -> dict[tuple[int, ...], Fraction]:
    """Law of the first `length` tokens when the tree (token and parent of each node) is verified, then completed."""
    law: dict[tuple[int, ...], Fraction] = {}

    def complete(prefix: tuple[int, ...], weight: Fraction) -> None:
        if len(prefix) >= length:
            law[prefix[:length]] = law.get(prefix[:length], Fraction(0)) + weight
            return
        for token, p in enumerate(target(prefix)):
            if p:
                complete((*prefix, token), weight * p)

    def visit(node: int, prefix: tuple[int, ...], weight: Fraction) -> None:
        children = [i for i in range(1, len(parents)) if parents[i] == node]
        accepted, residual = walk(target(prefix), draft, [tokens[c] for c in children])
        for child, chance in zip(children, accepted):
            if chance:
                visit(child, (*prefix, tokens[child]), weight * chance)
        left = weight * (1 - sum(accepted, Fraction(0)))
        for token, p in enumerate(residual):
            if p and left:
                complete((*prefix, token), left * p)

    visit(0, (), Fraction(1))
    return law
