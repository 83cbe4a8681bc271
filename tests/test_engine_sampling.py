"""Sampled text has the target's law with every drafter; seeds belong to requests, not to batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from python_ref.decoder import ToyTarget, joint_law, plain_greedy
from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.drafters.draft_model import DraftModelDrafter
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from tests.engine_law import LIMIT, PROMPT, p_value
from tests.toy_model import OracleDrafter, ToyModel

SMALL = ToyTarget(vocab=5, surprise=3)
CONFIG = EngineConfig(page_size=4, num_pages=256, max_batch=16, max_step_tokens=128, check=True)


def drafters(target: ToyTarget) -> dict:
    other = ToyTarget(vocab=target.vocab, surprise=2)
    return {
        "none": "none",
        "ngram": "ngram",
        "fixed trees": OracleDrafter(target),
        "drawn chains": SelfDrafter(layers=(1,), num_drafts=3, min_prob=0.0),
        "drawn by the target": SelfDrafter(layers=(0, 1), num_drafts=2, min_prob=0.0),
        "draft model": DraftModelDrafter(ToyModel(other), 2),
        "mixed": None,  # every request another one of the above that can be mixed
    }


def chi_square_p(
    model: ToyModel, drafter, temperature: float, count: int, max_batch: int = 8, warm: bool = False
) -> tuple[float, Engine]:
    """p-value of `count` three-token texts against the exact joint law at temperature 1. Warm: the prompt's KV and
    that of earlier texts, drafts included, is in the prefix cache, and samples share prompts."""
    config = replace(CONFIG, max_batch=max_batch, page_size=1 if warm else 4, prefix_cache=warm, check=False)
    choices = [drafter]
    if drafter is None:
        choices = [d for name, d in drafters(SMALL).items() if name not in ("mixed", "draft model")]
    engine = Engine(model, choices[0], config)
    if warm:
        engine.generate([[*PROMPT, t] for t in range(SMALL.vocab)], max_tokens=3)
    law = dict(joint_law(SMALL, PROMPT, 3, 1.0))
    seen = dict.fromkeys(law, 0)
    samples = 4 if warm else 1
    for seed in range(0, count, samples):
        choice = choices[seed // samples % len(choices)]
        engine.add(Request(PROMPT, max_tokens=3, temperature=temperature, seed=seed, n=samples, drafter=choice))
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                seen[tuple(event.result.token_ids)] += 1
                assert event.result.num_cached == (3 if warm else 0)
    assert sum(seen.values()) == count
    return p_value(law, seen), engine


def check_law(name: str, max_batch: int, warm: bool, count: int) -> None:
    p, engine = chi_square_p(ToyModel(SMALL), drafters(SMALL)[name], 1.0, count, max_batch, warm)
    assert p > LIMIT
    assert engine.metrics.drafter_failures == 0
    if name not in ("none", "ngram"):
        assert engine.metrics.accepted > count // 8
    if name.startswith("drawn") or name == "draft model":
        assert engine.metrics.rejected > 0 or name == "drawn by the target"


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", list(drafters(SMALL)))
def test_three_sampled_tokens_have_the_targets_joint_law(name: str, warm: bool):
    check_law(name, 8, warm, 1200)


@pytest.mark.long
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("name", list(drafters(SMALL)))
def test_the_joint_law_in_full(name: str, max_batch: int, warm: bool):
    check_law(name, max_batch, warm, 6000)


class Misreporting(SelfDrafter):
    """Says that its drafts come from a flatter law than they do."""

    def propose(self, states, limits, context):
        drafts = super().propose(states, limits, context)
        return [type(d)(d.token_ids, d.parents, None if d.logits is None else d.logits * 0.2) for d in drafts]


@pytest.mark.parametrize("warm", [True, False])
def test_the_law_test_can_fail(warm: bool):
    """A target sharpened by a quarter, or drafts whose law is misreported, must be found out."""
    assert chi_square_p(ToyModel(SMALL), "none", 0.75, 1200, warm=warm)[0] < LIMIT
    liar = Misreporting(layers=(1,), num_drafts=2, min_prob=0.0)
    assert chi_square_p(ToyModel(SMALL), liar, 1.0, 3000, warm=warm)[0] < LIMIT


@pytest.mark.parametrize("name", ["none", "ngram", "drawn chains"])
def test_ST_06_a_seed_gives_the_same_text_in_any_company(name: str):
    target = ToyTarget()

    def run(engine: Engine, company: int) -> list[int]:
        rng = random.Random(company)
        others = [Request([rng.randrange(32)] * 3, max_tokens=25, temperature=1.0) for _ in range(company)]
        ids = [engine.add(r) for r in [*others[: company // 2], mine, *others[company // 2 :]]]
        found = {}
        while engine.has_work:
            found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result})
        return found[ids[company // 2]]

    mine = Request([4, 5, 6, 4, 5, 6], max_tokens=25, temperature=1.0, seed=7, top_k=8, top_p=0.95, min_p=0.01)
    alone = run(Engine(ToyModel(target), drafters(target)[name], CONFIG), 0)
    engine = Engine(ToyModel(target), drafters(target)[name], CONFIG)
    assert run(engine, 3) == alone
    for _ in range(5):
        run(engine, 1)
    assert run(engine, 8) == alone
    different = Request(mine.prompt, max_tokens=25, temperature=1.0, seed=8)
    assert engine.generate([different.prompt], max_tokens=25, temperature=1.0, seed=8)[0].token_ids != alone


def test_ST_06_unseeded_requests_differ():
    engine = Engine(ToyModel(), "none", CONFIG)
    texts = [engine.generate([[1, 2]], max_tokens=30, temperature=2.0)[0].token_ids for _ in range(2)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("pattern", range(16))
def test_BT_04_greedy_requests_are_unmoved_by_sampled_neighbours(pattern: int):
    target = ToyTarget()
    engine = Engine(ToyModel(target), SelfDrafter(layers=(1,), num_drafts=2, min_prob=0.0), CONFIG)
    sampled = [bool(pattern >> i & 1) for i in range(4)]
    ids = [engine.add(Request([i + 1, 2], max_tokens=12, temperature=float(s))) for i, s in enumerate(sampled)]
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result})
    for i, (request_id, is_sampled) in enumerate(zip(ids, sampled)):
        if not is_sampled:
            assert found[request_id] == plain_greedy(target, [i + 1, 2], 12)
        assert all(0 <= t < 32 for t in found[request_id])
        assert len(found[request_id]) == 12


def test_filters_bind_at_every_position():
    """top_k 1 is greedy, whatever the temperature, also behind accepted drafts."""
    target = ToyTarget()
    engine = Engine(ToyModel(target), OracleDrafter(target), CONFIG)
    results = engine.generate([[3, 4], [9]], max_tokens=40, temperature=1.5, top_k=1)
    assert [r.token_ids for r in results] == [plain_greedy(target, p, 40) for p in ([3, 4], [9])]
    assert engine.metrics.accepted > 0
