"""Choice of the number of drafts: never predicted slower than plain, no flapping (PF-04: test_cases_advisor.py)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels.advisor.selection import CostTable, choose_num_drafts

times = st.floats(1.0, 100.0)


@settings(max_examples=150, deadline=None)
@given(
    plain=times,
    extra=st.lists(times, min_size=1, max_size=4),
    draft=st.floats(0, 5),
    alpha=st.floats(0.05, 1),
    current=st.integers(0, 5),
)
def test_never_predicted_slower_than_plain(plain, extra, draft, alpha, current):
    table = CostTable({1: {0: plain} | {k + 1: time for k, time in enumerate(extra)}}, draft)
    for now in (None, current):
        choice = choose_num_drafts(table, alpha, 1, now)
        assert choice.time_per_token[choice.num_drafts] <= choice.time_per_token[0]


def wobbled(rng, plain, extra, draft, alpha, wobble):
    """The same truth seen through estimates off by up to `wobble`, each at an extreme or anywhere between."""

    def stray():
        return 1 + wobble * rng.choice([-1.0, 1.0, rng.uniform(-1, 1)])

    rows = {0: plain * stray()} | {k + 1: time * stray() for k, time in enumerate(extra)}
    return CostTable({1: rows}, draft * stray()), min(1.0, alpha * stray())


def changes_back(rng, plain, extra, draft, alpha, wobble_allowed) -> bool:
    """Whether a choice that was left is ever taken again over 60 looks."""
    current, left = None, set()
    for _ in range(60):
        table, seen = wobbled(rng, plain, extra, draft, alpha, 0.02)
        choice = choose_num_drafts(table, seen, 1, current, wobble=wobble_allowed).num_drafts
        if current is not None and choice != current:
            left.add(current)
            if choice in left:
                return True
        current = choice
    return False


@settings(max_examples=60, deadline=None)
@given(
    plain=st.floats(5, 20),
    extra=st.lists(st.floats(5, 40), min_size=1, max_size=4),
    draft=st.floats(0, 2),
    alpha=st.floats(0.05, 0.97),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_flapping_under_two_percent(plain, extra, draft, alpha, seed):
    assert not changes_back(np.random.default_rng(seed), plain, extra, draft, alpha, 0.02)


def test_control_without_margin_it_flaps():
    """A tie: 1 draft costs as much a token as plain. With wobble=0 the choice swings, so the test above can fail."""
    tie = dict(plain=10.0, extra=[15.0], draft=0.0, alpha=0.5)
    assert changes_back(np.random.default_rng(0), **tie, wobble_allowed=0.0)
    assert not changes_back(np.random.default_rng(0), **tie, wobble_allowed=0.02)


def test_leaves_a_choice_that_became_slower_than_plain_at_once():
    table = CostTable({8: {0: 20.0, 3: 20.2}}, 0.0)
    assert choose_num_drafts(table, 0.5, 8, current=3).num_drafts == 3
    assert choose_num_drafts(table, 0.005, 8, current=3).num_drafts == 0
    assert "slower than plain" in choose_num_drafts(table, 0.005, 8, current=3).reason


def test_batches_between_and_outside_measurements():
    table = CostTable({1: {0: 10.0, 3: 10.5}, 64: {0: 20.0, 3: 60.0}}, {1: 1.0, 64: 1.0})
    assert choose_num_drafts(table, 0.5, 32).time_per_token[0] == pytest.approx(10 + 10 * 31 / 63)
    outside = choose_num_drafts(table, 0.9, 65)
    assert (outside.num_drafts, outside.time_per_token) == (0, {})
    assert "outside the measured 1..64" in outside.reason


def test_acceptance_by_position_limits_the_choice():
    table = CostTable({1: {0: 10.0, 1: 10.0, 4: 10.0}}, 0.1)
    assert choose_num_drafts(table, [0.9, 0.9, 0.9, 0.9], 1).num_drafts == 4
    assert choose_num_drafts(table, [0.9, 0.0, 0.0, 0.0], 1).num_drafts == 1
    assert set(choose_num_drafts(table, [0.9], 1).time_per_token) == {0, 1}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CostTable({}, 1.0), "verify_time: expected at least one batch"),
        (lambda: CostTable({1: {1: 2.0}}, 1.0), r"expected 0 \(plain\)"),
        (lambda: CostTable({1: {0: 0.0}}, 1.0), "expected positive times"),
        (lambda: CostTable({1: {0: 1.0}}, -1.0), "draft_time: expected a time >= 0"),
        (lambda: choose_num_drafts(CostTable({1: {0: 1.0}}, 1.0), 0.5, 0), "batch: expected at least 1"),
        (lambda: choose_num_drafts(CostTable({1: {0: 1.0}}, 1.0), 0.5, 1, 0, wobble=1.0), "wobble: expected a share"),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_batch_without_a_draft_time_is_named():
    with pytest.raises(ValueError, match=r"draft_time: expected a time >= 0 at batch 4, got nan"):
        CostTable({1: {0: 1.0, 2: 1.1}, 4: {0: 1.0, 2: 1.2}}, {1: 0.1})
