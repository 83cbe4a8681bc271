"""The law a row of logits stands for: row edits, temperature, min-p, top-k, top-p, in float64 and by sorting.

Order of the filters: temperature, min-p, top-k, then top-p over what is still kept; among equal logits the lowest ids
count as larger (total order: logit descending, id ascending). At least one token is always kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GREEDY_TEMPERATURE = 1e-5
NAN_LOGIT, DEAD_ROW, INF_LOGIT, TOKEN_RANGE, DRAFT_MASS, ZERO_RESIDUAL, TREE, PARAMETER, SIBLINGS = (
    1 << bit for bit in range(9)
)


@dataclass(frozen=True)
class Parameters:
    """One request's sampling parameters; the defaults switch every filter off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return not self.temperature > GREEDY_TEMPERATURE

    @property
    def flags(self) -> int:
        return 0 if self.temperature >= 0 else PARAMETER


def unpack_allowed(words: np.ndarray, vocab: int) -> np.ndarray:
    """[ceil(vocab/32)] int32 words, least significant bit first -> [vocab] bool."""
    bits = np.asarray(words).astype(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)
    return (bits & 1).astype(bool).ravel()[:vocab]


def edited_logits(
    logits: np.ndarray,
    allowed: np.ndarray | None = None,
    bias: dict[int, float] | None = None,
    vocab_size: int | None = None,
) -> tuple[np.ndarray, int]:
    """Row after bias, grammar mask and valid vocabulary, as float64, and the flags seen in it."""
    row = np.array(logits, dtype=np.float32)
    valid = len(row) if vocab_size is None else min(vocab_size, len(row))
    for token, value in (bias or {}).items():
        if 0 <= token < valid:
            row[token] += np.float32(value)
    row[valid:] = -np.inf
    if allowed is not None:
        row[~unpack_allowed(allowed, len(row))] = -np.inf
    flags = 0
    if np.isnan(row).any():
        flags |= NAN_LOGIT
        row[np.isnan(row)] = -np.inf
    if np.isposinf(row).any():
        flags |= INF_LOGIT
    if np.isneginf(row).all():
        flags |= DEAD_ROW
    return row.astype(np.float64), flags


def kept_ids(row: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Ids that survive the filters, in the total order. `row`: edited float64 logits with a finite maximum."""
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[np.isfinite(row[order])]
    scaled = (row[order] - row[order[0]]) / parameters.temperature
    if parameters.min_p > 0:
        keep = scaled >= min(np.log(parameters.min_p), 0.0)
        order, scaled = order[keep], scaled[keep]
    if 0 < parameters.top_k < len(order):
        order, scaled = order[: parameters.top_k], scaled[: parameters.top_k]
    if parameters.top_p < 1:
        mass = np.exp(scaled) / np.exp(scaled).sum()
        before = np.cumsum(mass) - mass
        keep = before < parameters.top_p
        keep[0] = True
        order = order[keep]
    return order


def target_law(
    logits: np.ndarray,
    parameters: Parameters | None = None,
    *,
    allowed: np.ndarray | None = None,
    bias: dict[int, float] | None = None,
    vocab_size: int | None = None,
) -> tuple[np.ndarray, int]:
    """(probabilities [V] float64, flags) of one row: the law of every position, verified or bonus."""
    parameters = parameters or Parameters()
    row, flags = edited_logits(logits, allowed, bias, vocab_size)
    flags |= parameters.flags
    law = np.zeros(len(row))
    if flags & DEAD_ROW:
        law[0] = 1.0
    elif parameters.greedy:
        law[int(np.argmax(row))] = 1.0
    elif flags & INF_LOGIT:
        law[np.isposinf(row)] = 1.0 / np.isposinf(row).sum()
    else:
        kept = kept_ids(row, parameters)
        weights = np.exp((row[kept] - row[kept[0]]) / parameters.temperature)
        law[kept] = weights / weights.sum()
    return law, flags


def tile_stats(logits: np.ndarray, temperature: float = 1.0, tile: int = 4096) -> list[tuple[float, float]]:
    """(maximum, sum of exp((logit - maximum) / temperature)) of every tile of a row, in float64."""
    found = []
    for begin in range(0, len(logits), tile):
        values = [float(x) for x in logits[begin : begin + tile]]
        peak = max(values)
        base = 0.0 if peak == -np.inf else peak
        found.append((peak, float(sum(np.exp((x - base) / temperature) for x in values))))
    return found


def draft_law(
    logits: np.ndarray,
    vocab: int,
    parameters: Parameters | None = None,
    *,
    d2t: np.ndarray | None = None,
    vocab_size: int | None = None,
) -> np.ndarray:
    """[vocab] law of the drafter in target ids.

    `d2t[i]` is the offset of draft id i: target id = i + d2t[i]. Without it, draft columns at and behind the valid
    vocabulary are padding; with it, every draft column counts. NaN logits have no mass; a row without mass is all 0.
    """
    row = np.asarray(logits, dtype=np.float32)
    valid = None if d2t is not None else min(vocab if vocab_size is None else vocab_size, len(row))
    narrow, flags = target_law(row, parameters, vocab_size=valid)
    wide = np.zeros(vocab)
    if flags & DEAD_ROW:
        return wide
    if d2t is None:
        count = min(vocab, len(narrow))
        wide[:count] = narrow[:count]
        return wide
    ids = np.arange(len(narrow)) + np.asarray(d2t)
    wide[ids] = narrow
    return wide


def residual_log_weights(target_log_probs: np.ndarray, draft_log_probs: np.ndarray, log_scale: float) -> np.ndarray:
    """log max(p - c q, 0) from log p, log q and log c, in float64 without cancellation; -inf where it is 0."""
    log_p = np.asarray(target_log_probs, dtype=np.float64)
    log_q = np.asarray(draft_log_probs, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        d = log_scale + log_q - log_p
        shrink = np.where(d > -np.log(2), np.log(-np.expm1(np.minimum(d, 0))), np.log1p(-np.exp(np.minimum(d, 0))))
        shrink = np.where(np.isneginf(log_q), 0.0, shrink)
        return np.where(np.isneginf(log_p) | (d >= 0), -np.inf, log_p + shrink)
