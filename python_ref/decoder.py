"""Decoding without caches, batches or trees in memory: what the engine must equal, token for token.

`ToyTarget` is a language model with exact, well separated logits: integer sums over the visible text, so no rounding
can change a token, yet every cached row of every layer matters to every later token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

Drafter = Callable[[list[int]], tuple[list[int], list[int]]]


class ToyTarget:
    """Two layers of "attention" that sum one integer per visible token; the sums and the last token give the next.

    Mostly the next token follows from the last one by a fixed rule, so text repeats and can be drafted; every
    `surprise`-th value of the upper sum breaks the rule.
    """

    num_layers = 2

    def __init__(self, vocab: int = 32, surprise: int = 5):
        self.vocab, self.surprise = vocab, surprise

    def lower_value(self, token: int, position: int) -> int:
        """What a token puts into the lower sum."""
        return (3 * token + 5 * position + 1) % 16

    def upper_value(self, lower_sum: int, token: int, position: int) -> int:
        """What a token puts into the upper sum."""
        return (lower_sum + 7 * token + 3 * position) % 16

    def next_token(self, upper_sum: int, token: int) -> int:
        if upper_sum % self.surprise == 0:
            return (token + upper_sum) % self.vocab
        return (5 * token + 7) % self.vocab

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Logits behind `tokens`: 3 for the next token, 2 and 1 for its neighbours, 0 elsewhere."""
        lower = upper = 0
        for position, token in enumerate(tokens):
            lower += self.lower_value(token, position)
            upper += self.upper_value(lower, token, position)
        best = self.next_token(upper, tokens[-1])
        row = [0.0] * self.vocab
        for offset, value in ((2, 1.0), (1, 2.0), (0, 3.0)):
            row[(best + offset) % self.vocab] = value
        return row

    def greedy(self, tokens: Sequence[int]) -> int:
        row = self.logits(tokens)
        return row.index(max(row))


def plain_greedy(target: ToyTarget, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """One token after the other."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(target.greedy(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def verify_greedy(target: ToyTarget, tokens: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Tokens that one step emits. Draft i is tree node i + 1, `parents[i]` its parent's node (0: the root)."""
    emitted: list[int] = []
    node = 0
    while True:
        token = target.greedy([*tokens, *emitted])
        emitted.append(token)
        match = [i + 1 for i, parent in enumerate(parents) if parent == node and draft[i] == token]
        if not match:
            return emitted
        node = match[0]


def speculative_greedy(
    target: ToyTarget, prompt: Sequence[int], max_tokens: int, drafter: Drafter, stop_ids: Sequence[int] = ()
) -> tuple[list[int], int]:
    """Draft, verify, keep; returns the output and the number of verification steps."""
    tokens, steps = list(prompt), 0
    limit = len(prompt) + max_tokens
    while len(tokens) < limit:
        steps += 1
        for token in verify_greedy(target, tokens, *drafter(tokens)):
            tokens.append(token)
            if token in stop_ids or len(tokens) == limit:
                return tokens[len(prompt) :], steps
    return tokens[len(prompt) :], steps


def joint_law(
    target: ToyTarget, prompt: Sequence[int], length: int, temperature: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every continuation of `length` tokens with its probability under plain sampling."""
    for path in itertools.product(range(target.vocab), repeat=length):
        probability = 1.0
        for i, token in enumerate(path):
            weights = [math.exp(x / temperature) for x in target.logits([*prompt, *path[:i]])]
            probability *= weights[token] / sum(weights)
        yield path, probability
