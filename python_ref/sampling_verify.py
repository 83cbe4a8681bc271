"""One request of `verify` from raw logits, in float64 with the ops' keys: tokens, path, flags and a safety margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from python_ref import sampling_rules
from python_ref.sampling import DEAD_ROW, TOKEN_RANGE, Parameters, draft_law, target_law
from python_ref.sampling_dice import PhiloxDice
from python_ref.sampling_rules import Outcome, Tree


def verify_request(
    logits: np.ndarray,
    token_ids: Sequence[int],
    parents: Sequence[int],
    parameters: Parameters | None = None,
    *,
    method: str,
    seed: int = 0,
    position: int = 0,
    step: int = 0,
    draft_logits: np.ndarray | None = None,
    draft_rows: Sequence[int] | None = None,
    draft_parameters: Parameters | None = None,
    d2t: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    bias: Sequence[dict[int, float]] | None = None,
    vocab_size: int | None = None,
    uniforms: Sequence[float] | None = None,
    dice: Any = None,
    epsilon: float = 0.3,
    delta: float = 0.09,
) -> tuple[Outcome, float]:
    """(outcome, margin of its closest decision). `logits` [N, V], `draft_rows[i]` the row node i was drawn from."""
    parameters = parameters or Parameters()
    vocab, flags = logits.shape[1], 0
    valid = vocab if vocab_size is None else min(vocab_size, vocab)

    def law(node: int) -> np.ndarray:
        nonlocal flags
        mask = None if allowed is None else allowed[node]
        edits = None if bias is None else bias[node]
        found, seen = target_law(logits[node], parameters, allowed=mask, bias=edits, vocab_size=vocab_size)
        flags |= seen
        if seen & DEAD_ROW:
            tree.dead.add(node)
        return found[:valid]

    def drafter(node: int) -> np.ndarray | None:
        if parameters.greedy or method in ("greedy", "target_only") or draft_logits is None or draft_rows is None:
            return None
        rows = [draft_rows[child] for child, parent in enumerate(parents) if parent == node]
        if not rows or rows[0] < 0:
            return None
        shape = draft_parameters or parameters
        return draft_law(draft_logits[rows[0]], vocab, shape, d2t=d2t, vocab_size=vocab_size)[:valid]

    if method == "greedy":
        parameters = Parameters(temperature=0.0)
    dice = dice or PhiloxDice(seed, position, step, uniforms)
    tree = Tree(parents, token_ids, law, drafter)
    if method == "coupled":
        out = sampling_rules.verify_coupled(tree, dice)
    elif method == "block":
        # on greedy rows block and chain rule agree
        out = (sampling_rules.verify_tree if parameters.greedy else sampling_rules.verify_block)(tree, dice)
    elif method == "typical":
        out = _verify_typical(tree, dice, epsilon, delta)
    else:
        out = sampling_rules.verify_tree(tree, dice)
    out.flags |= flags
    return out, dice.margin


def _verify_typical(tree: Tree, dice: PhiloxDice, epsilon: float, delta: float) -> Outcome:
    """The deepest node whose whole path passes the bar, the first one among equals; then the law of its row."""
    out, depth, best = Outcome(), {0: 0}, 0
    for node in range(1, len(tree.parents)):
        parent, token = tree.parents[node], tree.token_ids[node]
        if parent not in depth or token == -1:
            continue
        target = tree.target_law(parent)
        out.flags |= TOKEN_RANGE * (not -1 <= token < len(target))
        bar = sampling_rules.typical_threshold(target, epsilon, delta)
        dice.margin = min(dice.margin, abs(sampling_rules.mass(target, token) - bar))
        if parent not in tree.dead and sampling_rules.mass(target, token) > bar:
            depth[node] = depth[parent] + 1
            best = node if depth[node] > depth[best] else best
    out.nodes, node = [], best
    while node >= 0:
        out.nodes.insert(0, node)
        node = tree.parents[node]
    out.tokens = [tree.token_ids[node] for node in out.nodes[1:]]
    out.tokens.append(dice.pick(tree.target_law(best), depth=depth[best]))
    return out


def logprobs(
    logits: np.ndarray,
    outcome: Outcome,
    parameters: Parameters,
    allowed: np.ndarray | None = None,
    bias: Sequence[dict[int, float]] | None = None,
    vocab_size: int | None = None,
) -> tuple[list[float], list[float]]:
    """(raw, processed) natural logs of the emitted tokens.

    Raw: the untouched row at temperature 1. Processed: the law the token was drawn from; a greedy row reports its
    edited logits at temperature 1, since its own law would say 0 for every token."""
    shape = Parameters() if parameters.greedy else parameters
    raw, processed = [], []
    for node, token in zip(outcome.nodes, outcome.tokens):
        plain, _ = target_law(logits[node], vocab_size=vocab_size)
        law, _ = target_law(
            logits[node],
            shape,
            allowed=None if allowed is None else allowed[node],
            bias=None if bias is None else bias[node],
            vocab_size=vocab_size,
        )
        with np.errstate(divide="ignore"):
            raw.append(float(np.log(plain[token])))
            processed.append(float(np.log(law[token])))
    return raw, processed
