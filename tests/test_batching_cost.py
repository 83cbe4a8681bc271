"""BatchCostModel: recovers a known machine, and decides about splitting as brute force does."""

from __future__ import annotations

import random

import pytest

from specdec_kernels.batching import BatchCostModel, StepSample

TRUTH = BatchCostModel(base=2e-3, per_request=1e-5, per_context=2e-8, per_node=8e-6, free_nodes=256, relative_error=0.0)


def measured(noise: float, seed: int = 0) -> list[StepSample]:
    rng = random.Random(seed)
    samples = []
    for nodes in (1, 16, 64, 128, 256, 512, 1024, 2048):
        for requests in (1, 4, 16, 64):
            context = requests * rng.choice([128, 1024, 8192])
            seconds = TRUTH.predict(nodes, requests, context) * (1 + noise * rng.uniform(-1, 1))
            samples.append(StepSample(nodes, requests, context, seconds))
    return samples


def test_fit_recovers_the_machine():
    model = BatchCostModel.fit(measured(0.0))
    assert model.free_nodes == 256
    assert model[:4] == pytest.approx(TRUTH[:4], rel=1e-6)
    assert model.relative_error < 1e-9


def test_fit_with_noise_predicts_within_the_noise():
    model = BatchCostModel.fit(measured(0.05, 1))
    assert model.relative_error < 0.05
    for sample in measured(0.0, 2):
        assert model.predict(*sample[:3]) == pytest.approx(sample.seconds, rel=0.06)
    assert all(value >= 0 for value in model)


def test_coefficients_are_never_negative():
    """Times that fall with context (nonsense) do not buy a negative price."""
    samples = [StepSample(n, 1, c, 1e-3 + 1e-6 * n - 1e-9 * c) for n in (1, 64, 256) for c in (0, 1000, 100000)]
    model = BatchCostModel.fit(samples)
    assert model.per_context == 0.0
    assert model.relative_error > 0.0


def test_fit_refuses_too_little():
    with pytest.raises(ValueError, match=r"^BatchCostModel.fit: samples: expected at least 5 samples, got 2"):
        BatchCostModel.fit(measured(0)[:2])
    with pytest.raises(ValueError, match=r"^BatchCostModel.fit: samples: expected at least two node counts"):
        BatchCostModel.fit([StepSample(8, b, b * 10, 1e-3) for b in range(1, 8)])
    with pytest.raises(ValueError, match=r"^BatchCostModel.fit: samples: expected positive seconds"):
        BatchCostModel.fit([StepSample(n, 1, 1, 0.0) for n in range(6)])


def test_padding_is_free_while_memory_bound_and_dear_when_compute_bound():
    few = ([2, 60, 3, 2], [500] * 4)  # 4 * 64 slots: below the knee, a second launch re-reads the weights
    assert not TRUTH.should_split(*few, [4, 64]).split
    many = ([2] * 56 + [60] * 8, [500] * 64)  # 64 * 64 slots against 56 * 4 + 8 * 64
    decision = TRUTH.should_split(*many, [4, 64])
    assert decision.split
    assert decision.together == pytest.approx(TRUTH.predict(64 * 64, 64, 64 * 500))
    assert decision.apart == pytest.approx(TRUTH.predict(56 * 4, 56, 56 * 500) + TRUTH.predict(8 * 64, 8, 8 * 500))
    assert not TRUTH.should_split(*many, [4, 64], padded=False).split  # ragged execution has nothing to save


def test_one_bucket_and_no_request_never_split():
    assert TRUTH.should_split([], [], [4]) == (False, 0, 0)
    assert not TRUTH.should_split([3, 4], [1, 1], [4, 64]).split
    with pytest.raises(ValueError, match=r"^BatchCostModel.should_split: context_lens: expected 2 entries, got 1"):
        TRUTH.should_split([3, 4], [1], [4])


def test_the_decision_agrees_with_the_predictions():
    rng = random.Random(3)
    seen = set()
    for _ in range(200):
        count = rng.choice([2, 8, 64])
        nodes = [rng.choice([1, 4, 8, 32, 64]) for _ in range(count)]
        lens = [rng.randrange(4000) for _ in range(count)]
        decision = TRUTH.should_split(nodes, lens, [8, 64])
        assert decision.split == (decision.apart < decision.together)
        seen.add(decision.split)
    assert seen == {True, False}
