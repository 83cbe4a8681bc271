"""Chi-square of an engine's sampled texts against the toy target's exact joint law."""

from __future__ import annotations

from collections.abc import Mapping

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
