"""The simulator against closed forms, and the goodput policy against plain decoding and the best fixed depth."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.claims.simulated import ERRORS, load, sweep
from specdec_kernels.advisor.speedup import expected_emitted
from specdec_kernels.batching import BatchCostModel
from specdec_kernels.engine.policy import DraftCosts, FixedDrafts, GoodputPolicy
from specdec_kernels.engine.simulate import EXECUTIONS, Machine, TraceRequest, h200, simulate

FLAT = Machine(BatchCostModel(1.0, 0.0, 0.0, 0.0, 0, 0.0), DraftCosts(0.0, 0.1, 0.0))


def test_plain_decoding_takes_a_step_a_token():
    """Three requests at once, a second a step: prefill emits the first token."""
    trace = [TraceRequest(0.0, 10, n, [0.5]) for n in (4, 7, 2)]
    run = simulate(trace, FixedDrafts(0), FLAT, max_batch=3)
    assert run.finished.tolist() == [4.0, 7.0, 2.0]
    assert run.first.tolist() == [1.0, 1.0, 1.0]
    assert (run.tokens, run.steps, run.drafted, run.prefill_tokens) == (13, 7, 0, 30)
    assert run.slot_utilisation == run.useful_token_ratio * run.nodes / (run.tokens) == 1.0


def test_first_come_first_served_with_one_slot():
    trace = [TraceRequest(at, 5, 4, [0.5]) for at in (0.0, 1.0, 9.5)]
    run = simulate(trace, FixedDrafts(0), FLAT, max_batch=1)
    assert run.finished.tolist() == [4.0, 8.0, 13.5]  # waits for the slot; idle until 9.5
    assert run.latencies.tolist() == [4.0, 7.0, 4.0]


@pytest.mark.parametrize(("alpha", "depth"), [(0.7, 5), (0.4, 2), (0.95, 8)])
def test_tokens_a_step_follow_the_formula(alpha, depth):
    trace = [TraceRequest(0.0, 4, 600, [alpha]) for _ in range(60)]
    run = simulate(trace, FixedDrafts(depth), FLAT, max_batch=60, max_tokens=30_000)
    emitted = (run.tokens - 60) / run.nodes * (depth + 1)
    assert emitted == pytest.approx(expected_emitted(alpha, depth), rel=0.02)
    assert abs(emitted - expected_emitted(alpha * 0.95, depth)) > 0.02  # control: an acceptance 5 % lower


def test_acceptance_by_depth_and_swing():
    shaped = simulate(
        [TraceRequest(0.0, 4, 600, [0.9, 0.5])] * 40, FixedDrafts(3), FLAT, max_batch=40, max_tokens=20_000
    )
    assert (shaped.tokens - 40) / shaped.nodes * 4 == pytest.approx(1 + 0.9 + 0.45 + 0.225, rel=0.02)
    still, moving = (
        simulate([TraceRequest(0.0, 4, 600, [0.6], swing, 50.0)] * 40, FixedDrafts(4), FLAT, max_batch=40)
        for swing in (0.0, 0.4)
    )
    assert moving.tokens == still.tokens
    assert moving.steps != still.steps


def test_every_execution_emits_the_same_text_and_counts_its_padding():
    trace = [TraceRequest(0.0, 4, 40, [alpha]) for alpha in (0.2, 0.9, 0.9, 0.5)]

    class Uneven(FixedDrafts):
        def choose_budgets(self, requests, prefill=None):
            limits = super().choose_budgets(requests)
            return [limit._replace(nodes=0, depth=0) if view.id % 2 else limit for view, limit in zip(requests, limits)]

    runs = {
        how: simulate(trace, Uneven(4), h200(jitter=0), max_batch=4, execution=how, bucket_sizes=[1, 5])
        for how in EXECUTIONS
    }
    assert {run.tokens for run in runs.values()} == {160}
    assert runs["ragged"].slot_utilisation == 1.0
    assert runs["padded"].slots > runs["ragged"].slots
    assert runs["padded"].launches == runs["padded"].steps
    assert runs["grouped"].launches > runs["grouped"].steps
    # Two launches read the weights twice: four requests are far from paying for that, so look-ahead does not group.
    assert runs["look_ahead"].seconds == runs["padded"].seconds < runs["grouped"].seconds


def test_a_tiny_arena_preempts_and_still_finishes():
    trace = [TraceRequest(0.0, 20, 60, [0.7]) for _ in range(6)]
    run = simulate(trace, FixedDrafts(3), FLAT, max_batch=6, num_pages=12, page_size=8)
    assert run.preemptions > 0
    assert run.tokens == 360
    assert not np.isnan(run.finished).any()
    with pytest.raises(ValueError, match="num_pages"):
        simulate(trace, FixedDrafts(3), FLAT, max_batch=6, num_pages=5, page_size=8)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"^simulate: execution: expected one of .*, got 'square'"):
        simulate([], FixedDrafts(0), FLAT, max_batch=1, execution="square")
    late = [TraceRequest(1.0, 1, 1, [0.5]), TraceRequest(0.0, 1, 1, [0.5])]
    with pytest.raises(ValueError, match="sorted by arrival"):
        simulate(late, FixedDrafts(0), FLAT, max_batch=1)
    assert simulate([], FixedDrafts(0), FLAT, max_batch=1).tokens == 0


def test_easy_requests_get_more_drafts_than_hard_ones():
    seen: dict[float, list[int]] = {0.3: [], 0.9: []}

    class Watched(GoodputPolicy):
        def choose_budgets(self, requests, *rest):
            limits = super().choose_budgets(requests, *rest)
            for view, limit in zip(requests, limits):
                seen[0.3 if (view.id - first) % 2 else 0.9].append(limit.depth)
            return limits

    trace = [TraceRequest(0.0, 10, 300, [0.3 if i % 2 else 0.9]) for i in range(32)]
    machine = h200()
    from specdec_kernels.engine import request

    first = next(request._ids) + 1
    policy = Watched(machine.forward, machine.draft)
    simulate(trace, policy, machine, max_batch=32)
    assert np.mean(seen[0.9]) > np.mean(seen[0.3]) + 1.5


def check(batch: int, tokens: int, depths, errors) -> None:
    fixed, ours, _ = sweep(batch, tokens=tokens, depths=depths, errors=errors, seed=1)  # tuned on seed 0
    for name, found in ours.items():
        assert found >= 0.98 * fixed[0], (batch, name, found / fixed[0])
        assert found >= 0.95 * max(fixed.values()), (batch, name, found / max(fixed.values()))


@pytest.mark.parametrize(
    ("batch", "tokens", "depths"),
    [(1, 4000, (0, 3, 4, 5)), (8, 8000, (0, 3, 4, 5)), (64, 40_000, (0, 1, 2)), (256, 100_000, (0, 1))],
)
def test_goodput_with_wrong_and_drifting_beliefs(batch, tokens, depths):
    """Costs and acceptance a fifth off and drifting: at most 2 % under plain, within 5 % of the best fixed depth."""
    check(batch, tokens, depths, ["drafts look cheap and good", "drafts look dear and bad"])


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256])
def test_goodput_with_wrong_and_drifting_beliefs_everywhere(batch):
    check(batch, max(600 * batch, 6000), range(9), list(ERRORS))


def test_the_bounds_can_fail():
    """Control: a policy that believes without ever correcting or probing loses more than 2 % to plain decoding."""
    fixed, _, _ = sweep(256, tokens=40_000, depths=(0,), errors=[])
    machine = h200()

    class Stubborn(GoodputPolicy):
        def record(self, outcomes, timing):
            pass

    policy = Stubborn(machine.forward, machine.draft, probe_share=0.0)
    policy.acceptance.pool_reached[:], policy.acceptance.pool_accepted[:] = 1000.0, 950.0
    found = simulate(load(256 + 400), policy, machine, max_batch=256, max_tokens=40_000)
    assert found.throughput < 0.98 * fixed[0]
