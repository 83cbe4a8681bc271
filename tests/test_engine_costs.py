"""Costs fitted to an engine's own steps, and engines that write recorded texts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recorded import Guided
from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.advisor.speedup import StepCosts, speedup_chain
from specdec_kernels.engine import Draft, EngineConfig, Request
from specdec_kernels.engine.costs import StepRecorder, fit_costs, measure_costs
from specdec_kernels.engine.policy import FixedDrafts, GoodputPolicy, StepTiming
from tests.toy_model import ToyModel

TARGET = ToyTarget()


def step(requests: int, depth: int, context: int, noise: float = 0.0) -> StepTiming:
    """A machine of 20 ms a step, 0.1 ms a request, 10 ns a KV row, 0.5 ms a node beyond 16; drafts 1, 2, 0.1 ms."""
    nodes = requests * (1 + depth)
    forward = (20e-3 + 1e-4 * requests + 1e-8 * context + 5e-4 * max(0, nodes - 16)) * (1 + noise)
    draft = (1e-3 + 2e-3 * depth + 1e-4 * requests * depth) * (1 + noise) if depth else 0.0
    return StepTiming(nodes, requests, context, depth, requests * depth, forward, draft)


def test_costs_are_those_of_the_machine():
    rng = np.random.default_rng(0)
    timings = [
        step(b, k, 1000 * b * c, 0.02 * rng.standard_normal())
        for b in (1, 2, 4, 8) for k in (0, 1, 3, 7, 15) for c in (1, 4, 8) for _ in range(5)
    ]  # fmt: skip
    timings += [t._replace(forward_seconds=2.0, draft_seconds=1.0) for t in timings[::5]]  # pauses: one in six
    timings += [t._replace(nodes=t.nodes + 64, forward_seconds=1.0) for t in timings]  # with prefill rows
    forward, draft = fit_costs(timings)
    for b, k in ((1, 0), (1, 15), (4, 5), (8, 15)):
        true = step(b, k, 4000 * b)
        assert forward.predict(true.nodes, b, 4000 * b) == pytest.approx(true.forward_seconds, rel=0.03)
        if k:
            drafting = draft.per_step + draft.per_level * k + draft.per_node * b * k
            assert drafting == pytest.approx(true.draft_seconds, rel=0.1)


def test_few_kinds_of_drafting_give_their_median():
    timings = [step(b, 0, 100) for b in (1, 2, 4, 8, 12, 16)] + [step(1, 3, 100)._replace(draft_seconds=4e-3)]
    assert fit_costs(timings)[1] == (4e-3, 0.0, 0.0)
    assert fit_costs(timings[:-1])[1] == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"^BatchCostModel.fit: samples: expected at least 5 samples, got 1"):
        fit_costs([step(1, 0, 100)] * 10)


def test_a_predicted_speedup_is_that_of_the_machine():
    """By the rows that a step verifies and the levels it drafts: a model that takes either for free is far off."""
    sizes = ((1, 0), (1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 24))
    costs = fit_costs([step(b, k, 200) for b, k in sizes for _ in range(3)])
    tokens, drafts = 2.5, 16
    true = step(1, drafts, 200)
    plain = step(1, 0, 200).forward_seconds
    wanted = tokens * plain / (true.forward_seconds + true.draft_seconds)
    assert costs.speedup(tokens, drafts, drafts, context=200) == pytest.approx(wanted, rel=0.03)
    assert tokens * plain / true.forward_seconds > 1.15 * wanted
    chain = StepCosts.fitted(costs, context=200)
    for acceptance in (0.4, 0.8):
        emitted = (1 - acceptance**9) / (1 - acceptance)
        assert speedup_chain(acceptance, 8, chain) == pytest.approx(costs.speedup(emitted, 8, 8, context=200))
    assert costs.speedup(1.0, 0, 0) == 1.0


def test_costs_are_measured_in_turns(monkeypatch):
    """Every size gets as many steps; a slow drafter is seen to be one."""
    import time

    model, seen = ToyModel(TARGET), []
    monkeypatch.setattr(
        "specdec_kernels.engine.costs.fit_costs", lambda timings: seen.extend(timings) or fit_costs(timings)
    )

    class Slow:
        name = "slow"

        def propose(self, states, limits, context):
            time.sleep(0.002 * limits[0].depth)
            return [Draft.chain([1] * limit.depth) for limit in limits]

    costs = measure_costs(model, Slow(), [[1, 2, 3]], sizes=(0, 1, 2, 3, 4, 5), rounds=4)
    counts = [sum(t.drafts == k and t.nodes == 1 + k for t in seen) for k in range(6)]
    assert min(counts) >= 3
    assert costs.draft.per_step + 4 * (costs.draft.per_level + costs.draft.per_node) == pytest.approx(8e-3, rel=0.5)


def test_a_guided_engine_writes_the_recorded_text_under_every_policy():
    """From the engine's own steps to a policy, and back: one text, a different number of steps."""
    prompts = [[1, 2, 3, 4] * 4, [5, 6, 7, 8] * 5]
    texts = [plain_greedy(TARGET, prompts[0], 24), [9, 10, 11, 9, 10, 11, 9, 10, 11, 9, 10, 11]]  # the second: forced
    recorder = StepRecorder()
    config = EngineConfig(page_size=4, num_pages=128, max_batch=2)
    engine = Guided(ToyModel(TARGET), "ngram", config, policy=recorder)
    engine.texts, steps = {}, {}
    for depth in (0, 1, 4, 9, None):
        recorder.policy = FixedDrafts(depth) if depth is not None else GoodputPolicy(*fit_costs(recorder.timings))
        before, engine.gaps = engine.metrics.forwards, []
        ids = [engine.add(Request(p, max_tokens=len(t), ignore_eos=True)) for p, t in zip(prompts, texts)]
        engine.texts.update({key: p + t for key, p, t in zip(ids, prompts, texts)})
        found = {}
        while engine.has_work:
            found |= {e.request_id: e.result.token_ids for e in engine.step() if e.result is not None}
        assert [found[key] for key in ids] == texts
        assert max(engine.gaps) > 0  # of the forced text: the model's own choice is seen to differ
        steps[depth] = engine.metrics.forwards - before
    assert steps[9] <= steps[4] <= steps[1] < steps[0] == 24
    assert steps[None] <= steps[0]
