"""Targets with experts: drafts change no text, and the advisor knows what verification costs."""

from __future__ import annotations

import copy

import pytest
import torch

from specdec_kernels.advisor.experts import ExpertCosts, ExpertSample
from specdec_kernels.advisor.selection import choose_num_drafts
from specdec_kernels.advisor.speedup import StepCosts, optimal_depth
from specdec_kernels.engine import Engine, EngineConfig, TransformersModel
from specdec_kernels.engine.equality import compare_greedy
from tests.engine_law import LIMIT, PROMPT, module_law, p_value, sample_texts
from tests.test_engine_heads import Misreporting
from tests.test_engine_transformers import MODELS, SMALL, build
from tests.test_online import drafter

transformers = pytest.importorskip("transformers")

EXPERTS = [name for name in MODELS if "experts" in name]
CONFIG = EngineConfig(page_size=4, num_pages=512, max_batch=64)


def tiny(seed: int = 1) -> tuple[TransformersModel, torch.nn.Module]:
    """A Mixtral of five tokens: (as a target, by its own forward)."""
    torch.manual_seed(seed)
    shape = SMALL | dict(vocab_size=5, hidden_size=64, num_hidden_layers=2, intermediate_size=64, eos_token_id=None)
    config = transformers.MixtralConfig(
        **shape, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, bos_token_id=None
    )
    own = transformers.MixtralForCausalLM(config).eval()
    for parameter in own.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    served = copy.deepcopy(own)
    own.set_attn_implementation("eager")
    return TransformersModel(served), own


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", EXPERTS)
def test_greedy_text_is_the_same(name: str, shape: str):
    model = TransformersModel(build(name))
    prompts = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 14)]
    plain = Engine(model, "none", CONFIG).generate(prompts, max_tokens=24)
    for drafts in (drafter("eagle3", model, shape=shape), "ngram"):
        engine = Engine(model, drafts, EngineConfig(page_size=4, num_pages=256, check=True))
        for prompt, a, b in zip(prompts, plain, engine.generate(prompts, max_tokens=24)):
            difference = compare_greedy(model, prompt, a.token_ids, b.token_ids)
            assert difference is None or difference.excused, difference
        assert engine.metrics.drafter_failures == 0
        assert engine.metrics.drafted > (50 if shape == "tree" and drafts != "ngram" else 10)


@pytest.mark.parametrize("count", [700, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_text_has_the_targets_law(shape: str, count: int):
    model, own = tiny()
    engine = Engine(model, drafter("medusa", model, shape=shape), CONFIG)
    seen = sample_texts(engine, count, 3)
    assert p_value(module_law(own, PROMPT, 3), seen) > LIMIT
    m = engine.metrics
    assert m.drafter_failures == m.flagged == 0
    assert min(m.accepted, m.rejected) > count // 40


def test_the_law_test_finds_wrong_laws():
    model, own = tiny()
    seen = sample_texts(Engine(model, Misreporting(drafter("medusa", model)), CONFIG), 700, 3)
    law = module_law(own, PROMPT, 3)
    assert p_value(law, seen) < LIMIT
    assert p_value(module_law(tiny(seed=2)[1], PROMPT, 3), seen) < LIMIT  # and another target's


UNIFORM = ((0.25,) * 8,) * 2  # two layers, 2 of 8 experts


def test_distinct_experts_by_hand():
    costs = ExpertCosts(UNIFORM, 1.0, 1.0, 0.0)
    assert costs.experts(1) == pytest.approx(4.0)
    assert costs.experts(4) == pytest.approx(2 * 8 * (1 - 0.75**4))
    assert costs.experts(1000) == pytest.approx(16.0)
    clumped = ExpertCosts(UNIFORM, 1.0, 1.0, 0.0, alike=0.5)
    assert clumped.experts(1) == pytest.approx(4.0)
    assert clumped.experts(16) == pytest.approx(costs.experts(4))


def test_the_cost_is_not_monotonic_in_the_batch():
    """A hill over the batch, and the number of drafts that pays follows it."""
    costs = ExpertCosts(UNIFORM, base=2.0, per_expert=1.0, per_token=0.002)
    relative = {b: costs.verify(b)(5) for b in (1, 2, 8, 16, 256, 1024)}
    assert relative[1] > relative[8] > relative[16]  # all are read by then
    assert relative[1024] > relative[256] > relative[16]  # arithmetic
    few = ExpertCosts(((0.02,) * 100,), base=2.0, per_expert=1.0, per_token=0.002)  # 2 of 100: one token reads little
    hill = [few.verify(b)(5) for b in (1, 2, 64, 256, 4096)]
    assert hill[0] < hill[1] > hill[2] > hill[3] < hill[4]
    table = costs.cost_table((1, 8, 16, 1024), 6, draft_time=0.1)
    chosen = {b: choose_num_drafts(table, 0.6, b).num_drafts for b in (1, 16, 1024)}
    assert chosen[16] > chosen[1]
    assert chosen[16] > chosen[1024]
    best = {b: optimal_depth(0.6, StepCosts(0.1 / costs.seconds(b), costs.verify(b)), max_drafts=6)[0] for b in chosen}
    assert best == chosen
    between = choose_num_drafts(costs.cost_table((1, 1024), 6, draft_time=0.1), 0.6, 16).num_drafts
    assert between != chosen[16]  # drawn between batches far apart it is another


def test_the_costs_are_found_again():
    loads = [[0.9, 0.5, 0.3, 0.2, 0.1], [0.6, 0.6, 0.4, 0.2, 0.2]]
    true = ExpertCosts(tuple(map(tuple, loads)), 3e-3, 4e-4, 2e-5, alike=0.8)
    samples = [ExpertSample(n, round(true.experts(n)), 0.0) for n in (1, 2, 3, 5, 8, 13, 40, 160)]
    samples = [s._replace(seconds=3e-3 + 4e-4 * s.experts + 2e-5 * s.tokens) for s in samples]
    found = ExpertCosts.fit(samples, loads)
    assert (found.base, found.per_expert, found.per_token) == pytest.approx((3e-3, 4e-4, 2e-5), rel=1e-3)
    assert found.alike == pytest.approx(0.8, abs=0.15)
    assert found.relative_error < 1e-6
    with pytest.raises(ValueError, match="samples: expected at least 5 samples"):
        ExpertCosts.fit(samples[:4], loads)
    with pytest.raises(ValueError, match="ExpertCosts: loads: expected shares"):
        ExpertCosts(((1.5,),), 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="ExpertCosts: batch: expected at least 1, got 0"):
        true.verify(0)
