"""Every formula of the speed-up model against a simulation of what it describes, each with a control that must fail."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from specdec_kernels.advisor import speedup as su

STEPS = 40_000
LIMIT = 4.9  # standard errors; two-sided chance 1e-6 a check


def disagree(samples: np.ndarray, value: float) -> bool:
    """Whether `value` lies outside what the samples' mean allows."""
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    return abs(samples.mean() - value) > LIMIT * error


def simulate_chain(rng: np.random.Generator, acceptance: np.ndarray) -> np.ndarray:
    """Emitted tokens, one step a row of `acceptance` [steps, num_drafts]: drafts to the first rejection, plus one."""
    accepted = rng.random(acceptance.shape) < acceptance
    return np.cumprod(accepted, axis=1).sum(axis=1) + 1


def simulate_tree(rng: np.random.Generator, parents: list[int], node_acceptance: list[float]) -> np.ndarray:
    """Walk down: at each node one uniform decides which child, if any, is the accepted one."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    emitted = np.empty(STEPS)
    for step in range(STEPS):
        node, count = 0, 1
        while node in children:
            coin = rng.random()
            for child in children[node]:
                coin -= node_acceptance[child]
                if coin < 0:
                    node, count = child, count + 1
                    break
            else:
                break
        emitted[step] = count
    return emitted


@pytest.mark.parametrize(("alpha", "num_drafts"), [(0.7, 5), (0.3, 4), (0.95, 8), (0.0, 3), (1.0, 3)])
def test_chain(alpha, num_drafts):
    samples = simulate_chain(np.random.default_rng(1), np.full((STEPS, num_drafts), alpha))
    assert not disagree(samples, su.expected_emitted(alpha, num_drafts))
    if 0 < alpha < 1:
        assert disagree(
            samples, 1 + su.printed_accepted_length(alpha, num_drafts)
        )  # g * alpha counts behind rejections
        assert disagree(samples, su.expected_emitted(1 - alpha, num_drafts))  # the rejection rate in the formula


def test_chain_by_position():
    """A bursty n-gram drafter: one mean acceptance does not describe it."""
    conditional = [0.72, 0.78, 0.61, 1.0, 1.0]
    samples = simulate_chain(np.random.default_rng(2), np.tile(conditional, (STEPS, 1)))
    assert not disagree(samples, su.expected_emitted(conditional))
    assert not disagree(np.minimum(samples, 4), su.expected_emitted(conditional, 3))  # a shorter chain stops earlier
    assert disagree(samples, su.expected_emitted(float(np.mean(conditional)), 5))


def test_alpha_is_one_minus_total_variation():
    """Real rejection sampling from two laws: accept iff u q(x) < p(x), x ~ q."""
    rng = np.random.default_rng(3)
    target, draft = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    alpha = float(np.minimum(target, draft).sum())
    assert alpha == pytest.approx(1 - np.abs(target - draft).sum() / 2)
    tokens = rng.choice(6, size=(STEPS, 5), p=draft)
    accepted = rng.random(tokens.shape) * draft[tokens] < target[tokens]
    samples = np.cumprod(accepted, axis=1).sum(axis=1) + 1
    assert not disagree(samples, su.expected_emitted(alpha, 5))
    top1 = float(target.argmax() == draft.argmax())  # "top-1 acceptance" is another thing when sampling
    assert disagree(samples, su.expected_emitted(top1, 5))


def test_beta_mixture_of_steps():
    rng = np.random.default_rng(4)
    alpha = rng.beta(7, 3, size=STEPS)
    samples = simulate_chain(rng, np.repeat(alpha[:, None], 5, axis=1))
    assert su.expected_emitted_beta(7, 3, 5) == pytest.approx(3.1154, abs=1e-4)
    assert not disagree(samples, su.expected_emitted_beta(7, 3, 5))
    assert disagree(samples, su.expected_emitted(0.7, 5))  # the mean alpha


def test_requests_of_different_acceptance():
    """90 requests of 20 tokens at .85, 10 of 2000 at .6, 5 drafts: total tokens over total steps."""
    rng = np.random.default_rng(5)
    alphas, tokens = [0.85] * 90 + [0.6] * 10, [20] * 90 + [2000] * 10
    right = su.emitted_over_requests(alphas, tokens, 5)
    rates = []
    for _ in range(60):
        steps = 0.0
        for alpha, wanted in zip(alphas, tokens):
            drawn = np.cumsum(simulate_chain(rng, np.full((wanted, 5), alpha)))
            last = int(np.searchsorted(drawn, wanted))  # the last step overshoots: count its share
            steps += last + (wanted - (drawn[last - 1] if last else 0)) / (
                drawn[last] - (drawn[last - 1] if last else 0)
            )
        rates.append(sum(tokens) / steps)
    samples = np.array(rates)
    assert right == pytest.approx(samples.mean(), rel=0.01)  # overshoot shares leave a bias under 1 %
    mean_alpha = su.expected_emitted(float(np.mean(alphas)), 5)
    mean_rate = float(np.mean([su.expected_emitted(a, 5) for a in alphas]))
    assert mean_alpha > 1.5 * right
    assert mean_rate > 1.5 * right
    assert right == pytest.approx(2.470, abs=1e-3)
    assert mean_alpha / 1.5 == pytest.approx(2.61, abs=0.01)
    assert right / 1.5 == pytest.approx(1.65, abs=0.01)


def test_requests_drawn_from_beta_emit_less_than_steps_drawn_from_beta():
    rng = np.random.default_rng(6)
    alphas = rng.beta(7, 3, size=4000)
    by_request = su.emitted_over_requests(alphas, np.ones(4000), 5)
    assert by_request < su.expected_emitted(0.7, 5) < su.expected_emitted_beta(7, 3, 5)


def test_tree():
    rng = np.random.default_rng(7)
    parents = [-1, 0, 0, 1, 1, 2, 3]
    acceptance = [1.0, 0.6, 0.2, 0.5, 0.3, 0.7, 0.9]
    samples = simulate_tree(rng, parents, acceptance)
    assert not disagree(samples, su.expected_emitted_tree(parents, acceptance))
    assert disagree(samples, 1 + sum(acceptance[1:]))  # nodes counted without their path
    tree = su.best_tree([0.7, 0.12, 0.05, 0.03], 25, max_depth=5)
    samples = simulate_tree(rng, tree.parents, tree.node_acceptance)
    assert tree.expected_emitted == pytest.approx(su.expected_emitted_tree(tree.parents, tree.node_acceptance))
    assert not disagree(samples, tree.expected_emitted)
    assert disagree(samples, su.expected_emitted(0.7, 5))  # the chain inside it


def test_a_chain_is_a_tree():
    chain = su.expected_emitted_tree([-1, 0, 1, 2], [1.0, 0.7, 0.7, 0.7])
    assert chain == pytest.approx(su.expected_emitted(0.7, 3))


@pytest.mark.parametrize("max_depth", [2, 3, None])
def test_best_tree_against_every_tree(max_depth):
    """All trees of up to 6 nodes over 3 ranks, by brute force."""
    ranks = [0.5, 0.3, 0.15]

    def grow(parents: list[int], taken: list[tuple[int, int]], depths: list[int]):
        yield parents, taken
        if len(parents) == 6:
            return
        for parent, rank in itertools.product(range(len(parents)), range(3)):
            if (parent, rank) <= (taken[-1] if len(taken) > 1 else (-1, -1)) or (parent, rank) in taken:
                continue  # canonical order: each tree once
            if max_depth is None or depths[parent] < max_depth:
                yield from grow([*parents, parent], [*taken, (parent, rank)], [*depths, depths[parent] + 1])

    best = max(
        su.expected_emitted_tree(parents, [1.0] + [ranks[rank] for _, rank in taken[1:]])
        for parents, taken in grow([-1], [(-1, 0)], [0])
        if len(parents) == 6
    )
    assert su.best_tree(ranks, 6, max_depth=max_depth).expected_emitted == pytest.approx(best)


def test_simulated_time_gives_the_speedup():
    """Steps with draft, verify and overhead cost against plain steps of 1."""
    costs = su.StepCosts(draft=0.1, verify=su.verify_curve({1: 2.0, 4: 2.2, 8: 2.8}), overhead=0.05)
    rng = np.random.default_rng(8)
    for alpha, num_drafts in ((0.7, 5), (0.5, 3)):
        emitted = simulate_chain(rng, np.full((STEPS, num_drafts), alpha))
        step = num_drafts * 0.1 + costs.verify(num_drafts + 1) + 0.05
        value = su.speedup_chain(alpha, num_drafts, costs)
        assert not disagree(emitted / step, value)
        free = su.speedup_chain(alpha, num_drafts, su.StepCosts(0.1))
        assert disagree(emitted / step, free)  # verification and overhead taken as free


def test_known_figures():
    """Values worked out independently for the text's examples."""
    tenth = su.StepCosts(0.1)
    assert su.expected_emitted(0.7, 5) == pytest.approx(2.94117)
    assert su.speedup_chain(0.7, 5, tenth) == pytest.approx(1.9608, abs=1e-4)
    assert su.printed_speedup(0.3, 5, 0.1) == pytest.approx(0.9517, abs=1e-4)
    assert su.printed_error(0.3, 5, 0.1) == pytest.approx(0.9517 / 1.9608 - 1, abs=1e-4)
    assert su.printed_accepted_length(0.7, 5) == pytest.approx(3.5)
    assert su.acceptance_for(2.4, 5, tenth) == pytest.approx(0.7895, abs=1e-4)
    assert su.acceptance_for(1.0, 5, tenth) == pytest.approx(0.334, abs=1e-3)
    assert su.acceptance_for(1.0, 5, su.StepCosts(0.15)) == pytest.approx(0.432, abs=1e-3)
    assert su.acceptance_for(3.2, 5, su.StepCosts(0.05)) == pytest.approx(0.834, abs=1e-3)
    assert [su.optimal_depth(a, tenth)[0] for a in (0.7, 0.75, 0.8, 0.85)] == [4, 5, 6, 7]
    assert su.optimal_depth(0.05, tenth) == (0, 1.0)
    assert su.acceptance_for(7.0, 5, tenth) is None


def test_optimal_tree_is_the_best_of_all_budgets_and_depths():
    ranks, costs = [0.7, 0.12, 0.05, 0.03], su.StepCosts(0.05, su.verify_curve({1: 1.0, 32: 1.3, 64: 2.4}))
    tree, value = su.optimal_tree(ranks, costs, max_nodes=64, max_depth=8)
    every = {
        (n, d): su.speedup_tree(t.parents, t.node_acceptance, costs)
        for n in range(2, 65)
        for d in range(1, 9)
        for t in [su.best_tree(ranks, n, max_depth=d)]
    }
    assert value == pytest.approx(max(every.values()))
    assert value == pytest.approx(su.speedup_tree(tree.parents, tree.node_acceptance, costs))
    assert value > su.optimal_depth(0.7, costs)[1]
    nothing, plain = su.optimal_tree([0.05], su.StepCosts(0.5), max_nodes=4, max_depth=3)
    assert (nothing.parents, plain) == ([-1], 1.0)


def test_verify_curve_steps_interpolates_and_never_extrapolates():
    times = {1: 10.0, 4: 11.0, 8: 14.0}
    assert su.verify_curve(times)(2) == pytest.approx(1.0 + 0.1 / 3)
    assert su.verify_curve(times, stepwise=True)(2) == pytest.approx(1.1)
    assert su.verify_curve(times)(8) == pytest.approx(1.4)
    with pytest.raises(ValueError, match=r"num_tokens: expected 1..8 \(measured\), got 9"):
        su.verify_curve(times)(9)
    with pytest.raises(ValueError, match="expected positive times from 1 token on"):
        su.verify_curve({2: 1.0})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: su.expected_emitted(1.2, 3), "acceptance: expected a probability"),
        (lambda: su.expected_emitted(float("nan"), 3), "acceptance: expected a probability"),
        (lambda: su.expected_emitted(0.5), "num_drafts: expected an integer"),
        (lambda: su.expected_emitted([0.5], 2), "acceptance: expected 2 positions, got 1"),
        (lambda: su.expected_emitted(0.5, -1), "num_drafts: expected an integer >= 0"),
        (lambda: su.expected_emitted_beta(0, 1, 2), "expected positive parameters"),
        (lambda: su.expected_emitted_tree([-1, 0, 0], [1, 0.6, 0.6]), "sum to at most 1"),
        (lambda: su.expected_emitted_tree([-1, 2, 0], [1, 0.6, 0.2]), "expected an earlier node for node 1, got 2"),
        (lambda: su.expected_emitted_tree([], []), "expected a root"),
        (lambda: su.best_tree([0.3, 0.4], 4), "non-increasing"),
        (lambda: su.best_tree([0.7, 0.4], 4), "sum at most 1"),
        (lambda: su.best_tree([0.7], 0), "num_nodes: expected at least 1"),
        (lambda: su.emitted_over_requests([0.5], [1, 2], 3), "num_tokens: expected 1 counts, got 2"),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
