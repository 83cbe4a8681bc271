"""One request of `verify` from raw logits, in float64 with the ops' keys: tokens, path, flags and a safety margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from python_ref import sampling_rules
from python_ref.sampling import DEAD_ROW, Parameters, draft_law, edited_logits, target_law
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
        out = sampling_rules.verify_block(tree, dice)
    elif method == "typical":
        out = _verify_typical(tree, dice, epsilon, delta)
    else:
        out = sampling_rules.verify_tree(tree, dice)
    out.flags |= flags
    return out, dice.margin


def _verify_typical(tree: Tree, dice: PhiloxDice, epsilon: float, delta: float) -> Outcome:
    """The first child that passes the bar, in order, depth after depth; then the law of the last row."""
    out, node, depth = Outcome(), 0, 0
    while True:
        target = tree.target_law(node)
        bar = sampling_rules.typical_threshold(target, epsilon, delta)
        passed = [c for c in tree.children(node) if sampling_rules.mass(target, tree.token_ids[c]) > bar]
        if not passed:
            out.tokens.append(dice.pick(target, depth=depth))
            return out
        node, depth = passed[0], depth + 1
        out.nodes.append(node)
        out.tokens.append(tree.token_ids[node])


def logprobs(logits: np.ndarray, outcome: Outcome, parameters: Parameters, **edits) -> tuple[list[float], list[float]]:
    """(raw, processed) natural logs of the emitted tokens: raw at temperature 1 without filters and edits."""
    raw, processed = [], []
    for node, token in zip(outcome.nodes, outcome.tokens):
        row, flags = edited_logits(logits[node])
        finite = np.exp(row - row.max()) if not flags & DEAD_ROW else np.ones_like(row)
        raw.append(float(np.log(finite[token] / finite.sum())))
        allowed = edits.get("allowed")
        law, _ = target_law(
            logits[node],
            parameters,
            allowed=None if allowed is None else allowed[node],
            vocab_size=edits.get("vocab_size"),
        )
        processed.append(float(np.log(law[token])))
    return raw, processed
