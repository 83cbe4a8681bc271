"""The acceptance rules, once, for exact rationals and float64 alike (laws are NumPy arrays of Fraction or float).

Sources: Leviathan et al. 2211.17192 and Chen et al. 2302.01318 (chain); Miao et al. 2305.09781 (siblings); Chen et al.
2402.12374 (siblings without replacement); Sun et al. 2403.10444 (block); Daliri et al. 2408.07978 (coupled); Cai et al.
2401.10774 (typical). The scalar form of the sibling recursion is ours; `siblings_recursive` is what it must equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from python_ref import rng
from python_ref.sampling import DRAFT_MASS, SIBLINGS, TOKEN_RANGE, ZERO_RESIDUAL


@dataclass
class Outcome:
    """What one request emits: `nodes` starts with the root; `tokens` has one more entry than there are drafts kept."""

    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=lambda: [0])
    flags: int = 0


@dataclass
class Tree:
    """`draft_law(node)` is the law of the drafter at `node`'s children, None where they are deterministic."""

    parents: Sequence[int]
    token_ids: Sequence[int]
    target_law: Callable[[int], np.ndarray]
    draft_law: Callable[[int], np.ndarray | None]
    dead: set[int] = field(default_factory=set)  # rows without a usable logit: nothing is tried behind them

    def children(self, node: int) -> list[int]:
        if node in self.dead:
            return []
        return [child for child, parent in enumerate(self.parents) if parent == node]


def mass(law: np.ndarray, token: int) -> Any:
    """Mass of an id; ids outside the row have none."""
    return law[token] if 0 <= token < len(law) else law[0] * 0


def positive_part(weights: np.ndarray) -> np.ndarray:
    return np.where(weights > 0, weights, weights * 0)


def _range_flags(tokens: Sequence[int], vocab: int) -> int:
    return TOKEN_RANGE if any(token < -1 or token >= vocab for token in tokens) else 0


def _duplicate_flags(tokens: Sequence[int]) -> int:
    drafted = [token for token in tokens if token >= 0]
    return SIBLINGS if len(set(drafted)) < len(drafted) else 0


def siblings_one_hot(target: np.ndarray, tokens: Sequence[int], **key: Any) -> tuple[int | None, np.ndarray, int]:
    """Deterministic siblings: one coin against their cumulative target mass, else the target without them.

    Returns (index of the accepted sibling or None, weights of the recovered token, flags)."""
    dice = key.pop("dice")
    seen: set[int] = set()
    masses, flags = [], _range_flags(tokens, len(target)) | _duplicate_flags(tokens)
    for token in tokens:
        masses.append(mass(target, token) * (token not in seen))
        seen.add(token)
    hit = dice.bucket(masses, **key)
    rest = np.array([weight * (token not in seen) for token, weight in enumerate(target)], dtype=target.dtype)
    return hit, rest, flags


def siblings_scalar(
    target: np.ndarray, draft: np.ndarray, tokens: Sequence[int], *, dice: Any, replacement: bool = False, **key: Any
) -> tuple[int | None, np.ndarray, int]:
    """Siblings drawn from `draft` in this order, without replacement by default: residual ~ max(p - c q, 0).

    State (c, Z, W): scale of q, mass of the residual, mass of q not yet drawn. A rejected sibling x makes
    c += Z / W, Z = sum max(p - c q, 0), W -= q(x)."""
    one = sum(target)
    c, Z, W = one * 0, one, one
    weights, flags = target, _range_flags(tokens, len(target))
    for trial, token in enumerate(tokens):
        if token == -1:
            continue
        q = mass(draft, token)
        if W <= 0:
            break
        if q > 0:
            ratio = mass(weights, token) / Z * W / q
            if dice.coin(ratio, node=key["nodes"][trial], depth=key["depth"], trial=trial):
                return trial, weights, flags
        elif 0 <= token < len(target):
            flags |= DRAFT_MASS
        c += Z / W
        rest = positive_part(target - c * draft)
        if not rest.sum() > 0:
            flags |= ZERO_RESIDUAL
            break
        weights, Z = rest, rest.sum()
        if not replacement:
            W -= q
    return None, weights, flags


def siblings_recursive(
    target: np.ndarray, draft: np.ndarray, tokens: Sequence[int], *, dice: Any, replacement: bool = False, **key: Any
) -> tuple[int | None, np.ndarray, int]:
    """The same rule written out: two V-sized laws, renormalised after every rejection."""
    r, d, scale = target / target.sum(), draft / draft.sum(), target.sum()
    for trial, token in enumerate(tokens):
        if dice.coin(r[token] / d[token], node=key["nodes"][trial], depth=key["depth"], trial=trial):
            return trial, r * scale, 0
        rest = positive_part(r - d)
        r, scale = rest / rest.sum(), rest.sum() * scale
        if not replacement:
            d = d * np.array([index != token for index in range(len(d))])
            if not d.sum() > 0:
                break
            d = d / d.sum()
    return None, r * scale, 0


def _last_token(target: np.ndarray, residual: np.ndarray | None, dice: Any, depth: int) -> tuple[int, int]:
    """(token, flags): drawn from the residual where a draft was rejected, from the target behind the last draft."""
    if residual is None:
        return dice.pick(target, depth=depth), 0
    if not sum(residual) > 0:
        return dice.pick(target, depth=depth), ZERO_RESIDUAL
    return dice.race(target, residual, depth=depth), 0


def verify_tree(tree: Tree, dice: Any, siblings: Callable[..., Any] = siblings_scalar, **options: Any) -> Outcome:
    """Lossless verification from the root: chain rule, multi-sibling rule and one-hot rule, node by node."""
    out, node, depth = Outcome(), 0, 0
    while True:
        target, children = tree.target_law(node), tree.children(node)
        tokens = [tree.token_ids[child] for child in children]
        draft = tree.draft_law(node) if children else None
        if not children:
            hit, weights = None, target
        elif draft is None:
            hit, weights, flags = siblings_one_hot(target, tokens, dice=dice, node=children[0], depth=depth + 1)
            out.flags |= flags
        else:
            hit, weights, flags = siblings(target, draft, tokens, dice=dice, nodes=children, depth=depth + 1, **options)
            out.flags |= flags
        if hit is None:
            tried = any(token != -1 for token in tokens)
            token, flags = _last_token(target, weights if tried else None, dice, depth)
            out.tokens.append(token)
            out.flags |= flags
            return out
        node, depth = children[hit], depth + 1
        out.tokens.append(tokens[hit])
        out.nodes.append(node)


def verify_coupled(tree: Tree, dice: Any) -> Outcome:
    """The token plain decoding would draw; a child that equals it carries the walk on."""
    out, node, depth = Outcome(), 0, 0
    while True:
        target, children = tree.target_law(node), tree.children(node)
        token = dice.pick(target, depth=depth)
        out.tokens.append(token)
        tokens = [tree.token_ids[child] for child in children]
        out.flags |= _range_flags(tokens, len(target)) | _duplicate_flags(tokens)
        matches = [child for child in children if tree.token_ids[child] == token]
        if not matches:
            return out
        node, depth = matches[0], depth + 1
        out.nodes.append(node)


def block_ratios(tree: Tree) -> tuple[list[Any], list[Any], list[np.ndarray], int]:
    """(rho_i, h_i, residual weights at i, flags), i from 0 to the chain's end: an id -1, or a draft with rho = 0."""
    one = sum(tree.target_law(0))
    rho, h, residuals, flags, node = [one], [one], [], 0, 0
    while True:
        target, children = tree.target_law(node), tree.children(node)
        token = tree.token_ids[children[0]] if children else -1
        draft = target * 0
        if token != -1:
            known = tree.draft_law(node)
            draft = draft + np.array([one * (v == token) for v in range(len(target))]) if known is None else known
        residuals.append(positive_part(rho[-1] * target - draft))
        if node > 0:
            Z = residuals[-1].sum()
            h.append(rho[-1] if token == -1 else one if Z == 0 and rho[-1] == one else Z / (Z + one - rho[-1]))
        if token == -1:
            return rho, h, residuals, flags
        flags |= _range_flags([token], len(target))
        q = mass(draft, token)
        flags |= DRAFT_MASS if 0 <= token < len(target) and not q > 0 else 0
        following = min(one, rho[-1] * mass(target, token) / q) if q > 0 else one * 0
        if not following > 0:  # no cut behind a draft without target mass
            return rho, h, residuals, flags
        rho.append(following)
        node = children[0]


def verify_block(tree: Tree, dice: Any) -> Outcome:
    """Block verification of a chain: tau is the last i whose own coin is at most h_i."""
    rho, h, residuals, flags = block_ratios(tree)
    tau = 0
    for i in range(1, len(h)):
        if dice.coin(h[i], node=i, depth=i, purpose=rng.BLOCK):
            tau = i
    drafted = any(tree.token_ids[child] != -1 for child in tree.children(tau)[:1])
    token, seen = _last_token(tree.target_law(tau), residuals[tau] / rho[tau] if drafted else None, dice, tau)
    return Outcome([*(tree.token_ids[i] for i in range(1, tau + 1)), token], list(range(tau + 1)), flags | seen)


def typical_threshold(target: np.ndarray, epsilon: float, delta: float) -> float:
    """Medusa's bar min(epsilon, delta exp(-H)), H the entropy in nats."""
    entropy = -sum(p * math.log(p) for p in target if p > 0)
    return min(epsilon, delta * math.exp(-entropy))


def draw_siblings(draft: np.ndarray, k: int, dice: Any, replacement: bool = False) -> list[int]:
    """k draws from `draft` in draw order (fewer if its support is smaller)."""
    left, tokens = np.array(draft), []
    for _ in range(k):
        if not sum(left) > 0:
            break
        token = dice.pick(left, depth=0)
        tokens.append(token)
        if not replacement:
            left[token] = left[token] * 0
    return tokens
