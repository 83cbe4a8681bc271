"""Draft policies: the estimator against the truth, the plan against brute force, and no flapping."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from python_ref.decoder import ToyTarget
from specdec_kernels.batching import BatchCostModel
from specdec_kernels.engine import Draft, Engine, EngineConfig, decoder
from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.estimates import AcceptanceTable, CostCorrection, ForwardCorrection
from specdec_kernels.engine.policy import (
    DraftCosts,
    DraftOutcome,
    FixedDrafts,
    GoodputPolicy,
    PrefillLoad,
    RequestView,
    StepTiming,
    group_by_cost,
)
from tests.toy_model import ToyModel

COSTS = BatchCostModel(3.7e-3, 1e-5, 3e-8, 2e-5, 184, 0.0)
DRAFT = DraftCosts(per_level=2e-4)
WIDE = Limit(64, 64)


def judged(rng, alphas, drafted):
    """(accepted, rejected) of one chain of `drafted` drafts."""
    for i in range(drafted):
        if rng.random() >= alphas[i]:
            return i, True
    return drafted, False


def views(count, context=200, cap=WIDE, first=0):
    return [RequestView(first + i, context, cap) for i in range(count)]


# ---- the estimator


def test_estimates_are_conditional_and_censored():
    """Random draft lengths: accepted over drafted is far from the truth, the censored estimate is not."""
    truth = [0.9, 0.7, 0.8, 0.5]
    table, rng = AcceptanceTable(4, memory=1e9), np.random.default_rng(0)
    taken, drafted = np.zeros(4), np.zeros(4)
    for _ in range(3000):
        table.estimate([7])
        length = int(rng.integers(0, 5))
        accepted, rejected = judged(rng, truth, length)
        table.record([7], np.array([accepted]), np.array([int(rejected)]))
        taken[:accepted] += 1
        drafted[:length] += 1
    assert table.raw([7])[0] == pytest.approx(truth, abs=0.06)
    assert np.abs(taken / drafted - truth).max() > 0.25  # control: dividing by drafted positions


def test_a_new_request_leans_on_all_and_an_easy_one_is_told_apart():
    table, rng = AcceptanceTable(4), np.random.default_rng(1)
    for _ in range(400):
        ids = [1, 2, 3, 4]
        outcomes = [judged(rng, [level] * 4, 3) for level in (0.3, 0.3, 0.9, 0.9)]
        table.estimate(ids)
        table.record(ids, np.array([a for a, _ in outcomes]), np.array([int(r) for _, r in outcomes]))
    hard, easy, new = table.estimate([1, 3, 99])
    assert hard[0] < 0.5 < new[0] < 0.8 < easy[0]
    assert easy[3] > 0.7 > hard[3]  # depth 4 was never drafted: by analogy
    assert new[3] == pytest.approx(table.pooled()[3])


def test_estimates_follow_a_change():
    table, rng = AcceptanceTable(3), np.random.default_rng(2)
    for level in (0.9, 0.2):
        for _ in range(200):
            table.estimate([1])
            accepted, rejected = judged(rng, [level] * 3, 3)
            table.record([1], np.array([accepted]), np.array([int(rejected)]))
        assert table.estimate([1])[0, 0] == pytest.approx(level, abs=0.15)


def test_forgotten_rows_are_reused_and_empty():
    table = AcceptanceTable(2)
    for turn in range(50):
        ids = list(range(100 * turn, 100 * turn + 20))
        table.estimate(ids)
        table.record(ids, np.full(20, 2), np.zeros(20, np.int64))
        for key in ids:
            table.forget(key)
        table.record(ids, np.full(20, 1), np.ones(20, np.int64))  # over by now: no row comes back
    assert len(table) == 0
    assert table.pool_reached[1] > table.pool_accepted[1] > 0
    table.forget(12345)
    fresh = AcceptanceTable(2)
    fresh.pool_reached, fresh.pool_accepted = table.pool_reached, table.pool_accepted
    assert table.raw([1]) == pytest.approx(fresh.raw([1]))


def test_a_biased_estimator_is_corrected_by_outcomes():
    class Biased(AcceptanceTable):
        def raw(self, ids):
            return super().raw(ids) * 1.2

    rng, correct, biased = np.random.default_rng(3), AcceptanceTable(3), Biased(3)
    for _ in range(300):
        outcomes = [judged(rng, [0.6] * 3, 3) for _ in range(8)]
        for table in (correct, biased):
            table.estimate(range(8))
            table.record(range(8), np.array([a for a, _ in outcomes]), np.array([int(r) for _, r in outcomes]))
    assert biased.raw(range(8))[:, 0].mean() > 0.68
    assert biased.estimate(range(8))[:, 0].mean() == pytest.approx(0.6, abs=0.04)
    assert correct.estimate(range(8))[:, 0].mean() == pytest.approx(0.6, abs=0.04)


def test_cost_correction_learns_scale_and_shape():
    rng, correction = np.random.default_rng(4), CostCorrection()
    for _ in range(600):
        nodes = int(rng.choice([32, 64, 256]))
        truth = 1.3 * (1.2 if nodes == 256 else 1.0)
        correction.observe(nodes, 1.0, truth * rng.uniform(0.95, 1.05))
    assert correction.factor(np.array([32, 64, 256])) == pytest.approx([1.3, 1.3, 1.56], rel=0.02)
    assert 1.3 < float(correction.factor(np.array(128.0))) < 1.56
    for _ in range(200):  # everything slows: counts not seen meanwhile follow
        correction.observe(64, 1.0, 2.0)
    assert correction.factor(np.array(64.0)) == pytest.approx(2.0, rel=0.02)
    assert (correction.factor(np.array([32, 256])) > [1.65, 1.95]).all()


def test_the_two_sides_of_the_knee_are_learned_apart():
    """Memory a fifth slower, arithmetic a fifth faster: steps of 100 and 500 nodes say what 150 to 700 take."""
    rng, ours, by_count = np.random.default_rng(5), ForwardCorrection(COSTS), CostCorrection(rate=0.1)
    truth = COSTS._replace(base=COSTS.base * 1.2, per_node=COSTS.per_node * 0.8, free_nodes=round(184 * 1.5))
    fixed = COSTS.predict(0, 8, 1600)
    for _ in range(300):
        nodes = int(rng.choice([100, 500]))
        measured = truth.predict(nodes, 8, 1600) * rng.uniform(0.97, 1.03)
        ours.observe(nodes, fixed, measured)
        by_count.observe(nodes, COSTS.predict(nodes, 8, 1600), measured)
    asked = np.array([100, 150, 240, 320, 500, 700])
    right = np.array([truth.predict(n, 8, 1600) for n in asked])
    assert np.abs(ours.seconds(asked, fixed) / right - 1).max() < 0.08
    shape = np.array([COSTS.predict(n, 8, 1600) for n in asked]) * by_count.factor(asked)
    assert np.abs(shape / right - 1).max() > 0.12, np.abs(
        shape / right - 1
    )  # control: a factor by node count alone does not know the knee


def test_a_model_without_a_knee_is_corrected_as_a_whole():
    flat, correction = COSTS._replace(per_node=0.0), ForwardCorrection(COSTS._replace(per_node=0.0))
    for _ in range(200):
        correction.observe(64, flat.predict(0, 8, 0), 0.7 * flat.predict(64, 8, 0))
    assert correction.seconds(np.array([8, 64, 900]), flat.predict(0, 8, 0)) == pytest.approx(
        0.7 * flat.predict(8, 8, 0), rel=0.03
    )
    before = correction.seconds(np.array([64]), 1e-3)
    for bad in (0.0, -1.0, float("nan")):
        correction.observe(64, 1e-3, bad)
    assert (correction.seconds(np.array([64]), 1e-3) == before).all()


def test_one_number_is_priced_as_in_an_array():
    """Within, between and beyond the node counts that were seen, below the knee and above, and before any step."""
    asked = np.array([1, 8, 9, 40, 100, 256, 1000])
    correction = ForwardCorrection(COSTS)
    for nodes, factor in ((0, 0.0), (8, 1.2), (40, 0.8), (256, 1.5), (300, 1.4), (8, 1.3)):
        fixed = COSTS.predict(0, 4, 400)
        if nodes:
            correction.observe(nodes, fixed, factor * COSTS.predict(nodes, 4, 400))
        one = [correction.seconds_of(n, fixed) for n in asked.tolist()]
        assert one == pytest.approx(correction.seconds(asked, fixed).tolist(), rel=1e-12)
        shape = [correction.shape.factor_of(n) for n in asked.tolist()]
        assert shape == pytest.approx(correction.shape.factor(asked).tolist(), rel=1e-12)


# ---- the plan


def informed(alphas, **options):
    """A policy that believes `alphas[b][i]`; it is told nothing else."""

    class Known(AcceptanceTable):
        def raw(self, ids):
            return np.array([alphas[key] for key in ids], dtype=np.float64)

    depth = len(alphas[0])
    return GoodputPolicy(COSTS, DRAFT, max_depth=depth, table=Known(depth), probe_share=0.0, **options)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_plan_is_the_best_of_all_plans(count):
    rng = np.random.default_rng(count)
    for _ in range(40):
        widths = [1, 1, 1] if rng.random() < 0.5 else sorted(rng.integers(1, 60, 3).tolist())
        alphas = rng.uniform(0.05, 0.95, (count, 3))
        prefill = PrefillLoad(int(rng.choice([0, 150, 400])))
        caps = [Limit(int(rng.integers(0, 80)), int(rng.integers(0, 4))) for _ in range(count)]
        asked = [RequestView(i, 100, cap) for i, cap in enumerate(caps)]
        policy = informed(alphas, widths=widths)
        limits = policy.choose_budgets(asked, prefill)
        cum = np.concatenate([[0], np.cumsum(widths)])

        def goodput(depths, alphas=alphas, cum=cum, prefill=prefill):
            tokens = sum(1 + sum(np.prod(alphas[b, : i + 1]) for i in range(d)) for b, d in enumerate(depths))
            drafts = sum(cum[d] for d in depths)
            with_drafts = COSTS.predict(count + prefill.nodes + drafts, count, 100 * count)
            without = COSTS.predict(count + prefill.nodes, count, 100 * count)
            prefill_alone = without - COSTS.predict(count, count, 100 * count)  # to be done sooner or later
            return tokens / (with_drafts - prefill_alone + DRAFT.per_level * max(depths))

        possible = [[d for d in range(4) if d <= cap.depth and cum[d] <= cap.nodes] for cap in caps]
        best = max(map(goodput, itertools.product(*possible)))
        assert goodput([limit.depth for limit in limits]) == pytest.approx(best, rel=1e-9)
        assert all(limit.nodes == cum[limit.depth] for limit in limits)
        assert policy.last_goodput == pytest.approx(best, rel=1e-9)


def test_zero_drafts_where_nothing_pays():
    """256 requests: every node costs its full price, and acceptance .3 does not earn it; at one request it does."""
    hard = informed([[0.3] * 4] * 256)
    assert all(limit == Limit(0, 0) for limit in hard.choose_budgets(views(256)))
    assert hard.choose_budgets(views(1))[0].depth >= 1


def test_prefill_beside_decoding_takes_the_free_nodes():
    alone, beside = informed([[0.48] * 4] * 8), informed([[0.48] * 4] * 8)
    assert alone.choose_budgets(views(8))[0].depth == 3
    assert beside.choose_budgets(views(8), PrefillLoad(200))[0].depth == 2


def test_no_flapping_when_estimates_wobble():
    """PF-04: all estimates and times wobble by 2 %, and the plan stands. Control: without hysteresis it moves."""

    def changes(hysteresis):
        rng = np.random.default_rng(5)
        truth = np.array([[0.55, 0.6, 0.6, 0.6, 0.6, 0.6]] * 48)
        alphas = truth.copy()
        policy = informed(alphas, hysteresis=hysteresis)
        seen = []
        for _ in range(100):
            alphas[:] = truth * rng.uniform(0.98, 1.02, truth.shape)
            limits = policy.choose_budgets(views(48))
            seen.append(tuple(limit.depth for limit in limits))
            drafts, levels = sum(seen[-1]), max(seen[-1])
            seconds = COSTS.predict(48 + drafts, 48, 48 * 200)
            policy.record([], StepTiming(48 + drafts, 48, 9600, levels, drafts, seconds * rng.uniform(0.98, 1.02), 0.0))
        return sum(a != b for a, b in itertools.pairwise(seen[10:]))

    assert changes(0.01) == 0  # the default
    assert changes(0.0) > 10


def test_a_plan_slower_than_plain_is_left_at_once():
    alphas = [[0.8] * 4] * 200
    policy = informed(alphas)
    assert policy.choose_budgets(views(200))[0].depth > 0
    for row in range(200):
        alphas[row] = [0.05] * 4
    assert all(limit.depth == 0 for limit in policy.choose_budgets(views(200)))


def test_fixed_drafts_respect_caps():
    policy = FixedDrafts(4)
    asked = [RequestView(i, 10, cap) for i, cap in enumerate([Limit(9, 9), Limit(3, 2), Limit(0, 0)])]
    assert policy.choose_budgets(asked) == [Limit(4, 4), Limit(3, 2), Limit(0, 0)]
    assert policy.choose_budgets([]) == []


def test_bad_parameters_are_named():
    with pytest.raises(ValueError, match=r"^GoodputPolicy: widths: expected 8 node counts"):
        GoodputPolicy(COSTS, widths=[1, 2])
    with pytest.raises(ValueError, match=r"^GoodputPolicy: hysteresis: expected a share in \[0, 1\), got 1"):
        GoodputPolicy(COSTS, hysteresis=1.0)


def test_probing_is_bounded_and_finds_a_change():
    """Acceptance was low, drafting stopped; it rises. Probes notice, and cost no more than they may."""

    def run(probe_share, alpha, steps=1500):
        rng = np.random.default_rng(6)
        policy = GoodputPolicy(COSTS, DRAFT, max_depth=4, probe_share=probe_share)
        policy.acceptance.pool_reached[:], policy.acceptance.pool_accepted[:] = 1000.0, 20.0
        seconds = tokens = 0.0
        for _ in range(steps):
            limits = policy.choose_budgets(views(64))
            outcomes = [DraftOutcome(i, *judged(rng, [alpha] * 4, limit.depth)) for i, limit in enumerate(limits)]
            drafts, levels = sum(x.nodes for x in limits), max(x.depth for x in limits)
            forward, draft = COSTS.predict(64 + drafts, 64, 12800), DRAFT.per_level * levels
            policy.record(
                [o for o, x in zip(outcomes, limits) if x.depth],
                StepTiming(64 + drafts, 64, 12800, levels, drafts, forward, draft),
            )
            seconds += forward + draft
            tokens += 64 + sum(o.accepted for o in outcomes)
        return tokens / seconds * COSTS.predict(64, 64, 12800) / 64

    assert 0.99 < run(0.005, 0.02) <= 1.0
    assert run(0.005, 0.9) > 1.4
    assert run(0.0, 0.9) == pytest.approx(1.0)  # control: a belief that is never tried confirms itself


# ---- grouping


def test_groups_only_where_splitting_is_faster():
    small, large = [2] * 3 + [60], [2] * 56 + [60] * 8
    assert group_by_cost(COSTS, small, [100] * 4, [4, 64], padded=True) == [[0, 1, 2, 3]]
    assert group_by_cost(COSTS, large, [100] * 64, [4, 64], padded=True) == [list(range(56)), list(range(56, 64))]
    assert group_by_cost(COSTS, large, [100] * 64, [4, 64], padded=False) == [list(range(64))]
    assert group_by_cost(COSTS, [], [], [4], padded=True) == []


class Truth:
    """A chain of the target's own next tokens."""

    name = "truth"

    def __init__(self, target):
        self.target = target

    def propose(self, states, limits, context):
        return [Draft.chain(self.chain(state.tokens, limit.depth)) for state, limit in zip(states, limits)]

    def chain(self, tokens, depth):
        text = list(tokens)
        for _ in range(depth):
            text.append(self.target.greedy(text))
        return text[len(tokens) :]


def test_realised_speed_up_is_what_plain_decoding_would_have_taken(monkeypatch):
    """A clock that only forward passes move, by 1 + .25 a draft: four right drafts a step emit 5 tokens in 2 seconds,
    where plain decoding takes 5. Told costs that are 30 % off, the policy finds the true ones from its own steps."""
    clock = [0.0]
    monkeypatch.setattr(decoder.time, "perf_counter", lambda: clock[0])
    target = ToyTarget()
    for factor, tolerance in ((1.0, 1e-9), (1.3, 0.05)):
        toy = ToyModel(target)
        forward = toy.forward

        def slow(batch, cache, forward=forward, **more):
            clock[0] += 0.75 + 0.25 * len(batch.token_ids)
            return forward(batch, cache, **more)

        toy.forward = slow
        costs = BatchCostModel(factor, 0.0, 0.0, 0.25 * factor, 1, 0.0)
        policy = GoodputPolicy(costs, max_depth=4, probe_share=0.0)
        engine = Engine(toy, Truth(target), EngineConfig(num_pages=256, num_drafts=4), policy=policy)
        engine.generate([[1, 2, 3]], max_tokens=401, ignore_eos=True)
        steps = engine.metrics.steps - 1  # the first came with the prefill, and is not priced
        truth = 400 / (steps + 0.25 * engine.metrics.drafted)
        assert truth == pytest.approx(2.5, rel=0.02)
        assert engine.metrics.realised_speedup == pytest.approx(truth, rel=tolerance)
        assert set(engine.metrics.priced_time_s) == {0}
    assert Engine(ToyModel(), "none").metrics.realised_speedup == 0.0
