"""Chi-square of an engine's sampled texts against its target's exact joint law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.stats import chi2

from python_ref.decoder import ToyTarget, joint_law
from specdec_kernels.engine import Engine, EngineConfig, Request
from tests.toy_model import ToyModel

PROMPT = [1, 3, 0, 2]
LIMIT = 1e-9  # chance that a right engine fails


def p_value(law: Mapping[tuple[int, ...], float], seen: Mapping[tuple[int, ...], int]) -> float:
    """Chi-square p-value of the counts `seen` of texts whose probabilities are `law`."""
    count = sum(seen.values())
    pooled = [(0.0, 0)]  # cells of small expectation together
    terms = []
    for path, probability in law.items():
        if probability * count < 5:
            pooled.append((probability * count, seen[path]))
        else:
            terms.append((probability * count, seen[path]))
    terms.append((sum(e for e, _ in pooled), sum(o for _, o in pooled)))
    statistic = sum((o - e) ** 2 / e for e, o in terms if e > 0)
    return float(chi2.sf(statistic, len(terms) - 1))


def chi_square_p(
    target: ToyTarget, model: ToyModel, drafter, *, max_batch: int, count: int = 4000, others=()
) -> tuple[float, Engine]:
    """p-value of `count` three-token texts at temperature 1. others: drafters of every second request, in turns."""
    config = EngineConfig(
        page_size=4, num_pages=16 * max_batch + 64, max_batch=max_batch, max_step_tokens=32 * max_batch, check=True
    )
    engine = Engine(model, drafter, config)
    law = dict(joint_law(target, PROMPT, 3, 1.0))
    seen = dict.fromkeys(law, 0)
    for seed in range(count):
        own = others[seed // 2 % len(others)] if others and seed % 2 else None
        engine.add(Request(PROMPT, max_tokens=3, temperature=1.0, seed=seed, drafter=own))
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                seen[tuple(event.result.token_ids)] += 1
    assert sum(seen.values()) == count
    return p_value(law, seen), engine


@torch.inference_mode()
def module_law(module: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Joint law of `length` tokens behind the prompt, by a `transformers` module's own forward (eager attention)."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        texts = torch.tensor([[*prompt, *path] for path in law])
        probs = module(texts, use_cache=False).logits[:, -1].double().softmax(-1).tolist()
        law = {(*path, t): p * q for (path, p), row in zip(law.items(), probs) for t, q in enumerate(row)}
    return law


def sample_texts(
    engine: Engine, count: int, length: int, *, max_tokens: int | None = None, between: Callable[[], Any] | None = None
) -> Counter[tuple[int, ...]]:
    """First `length` tokens of `count` texts at temperature 1; `between` is called behind every step."""
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        engine.add(Request(PROMPT, max_tokens=max_tokens or length, temperature=1.0, seed=seed, ignore_eos=True))
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                seen[tuple(event.result.token_ids[:length])] += 1
        if between is not None:
            between()
    assert sum(seen.values()) == count
    return seen
