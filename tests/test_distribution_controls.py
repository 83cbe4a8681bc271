"""Negative controls of test_distributions.py: each misuse of the ops, and each wrong rule, must fail the same check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import specdec_kernels as sk
from tests.conftest import Backend
from tests.sampling_helpers import (
    SUITE_LIMIT,
    assert_biased,
    assert_law,
    floats,
    ints,
    p_value,
    results_alone,  # noqa: F401
    sampling_tensors,
    verify_is_built,  # noqa: F401
)
from tests.sampling_models import (
    Markov,
    State,
    folded_law,
    gumbel_draw,
    joint_counts,
    numpy_verifier,
    simulate,
    top_draw,
)
from tests.test_distributions import CHAIN, RAGGED_TREE, collect, joint_laws, op_verifier, requests

SIBLINGS = [-1, 0, 0, 0]


def op_draw(backend: Backend, *, coupled: bool = False, fixed_step: bool = False, paths: bool = True) -> Callable:
    """Drafts from `draft_sample`, keyed as the design says: request, output position, path, step."""

    def draw(state: State, node: int, k: int) -> np.ndarray:
        backend.require("draft_sample")
        B = len(state.token_ids)
        depth = 0
        ancestor = node
        while ancestor > 0:
            ancestor, depth = state.parents[ancestor], depth + 1
        step = 0 if fixed_step else state.step
        sampling = sampling_tensors(B, backend.device, seed=state.seeds, position=state.position, step=step)
        positions = sampling.position + depth
        out = sk.draft_sample(
            floats(state.model.draft_logits[state.token_ids[:, node]], backend.device), k, sampling, coupled=coupled,
            row_requests=ints(np.arange(B), backend.device), row_positions=positions,
            row_paths=ints(np.full(B, node), backend.device) if paths else None, **backend.kwargs,
        )  # fmt: skip
        return out.token_ids.cpu().numpy().astype(np.int64)

    return draw


def laws_hold(counts: tuple, model: Markov) -> None:
    for found, law in zip(counts[:2], joint_laws(model)):
        assert_law(found, law, SUITE_LIMIT)


def some_law_fails(model: Markov, parents, draw: Callable, run: Callable, total: int) -> None:
    """Within `total` requests; a bias of which half of them are sure takes no more."""
    found, done = [0, 0], 0
    while done < total:
        size = min(max(done, total // 8), total - done)
        two, four, _ = collect(model, parents, draw, run, size, done)
        found, done = [found[0] + two, found[1] + four], done + size
        least = min(p_value(counts, law) for counts, law in zip(found, joint_laws(model)))
        if least < SUITE_LIMIT:
            return
    raise AssertionError(f"control passes: p {least:.1e} after {total} requests")


# ---- randomness


CHAIN_TOO = pytest.param("rejection", CHAIN, marks=pytest.mark.long)


@pytest.mark.parametrize(("method", "parents"), [CHAIN_TOO, ("rejection", RAGGED_TREE), ("block", CHAIN)])
def test_drafts_and_verification_share_seeds_but_no_noise(method, parents, backend: Backend, pytestconfig):
    """The whole loop on the ops' own keys, the same request seeds in both: the text has the target's law."""
    model, total = Markov(seed=21), requests(backend, pytestconfig)
    laws_hold(collect(model, parents, op_draw(backend), op_verifier(backend, method), total), model)


def test_coupled_drafts_with_coupled_verification(backend: Backend, pytestconfig):
    """Drafts on the emission noise are accepted far more often, and the law holds, if verified by `coupled`."""
    model, total = Markov(seed=21), requests(backend, pytestconfig, 0.5)
    counts = collect(model, CHAIN, op_draw(backend, coupled=True), op_verifier(backend, "coupled"), total)
    laws_hold(counts, model)
    independent = collect(model, CHAIN, op_draw(backend), op_verifier(backend, "coupled"), total // 5)
    assert counts[2] > independent[2] + 0.3


def test_coupled_drafts_verified_by_rejection(backend: Backend, pytestconfig):
    """Case 11: drafts on the emission noise. Recovered tokens are raced for on a noise of their own: no bias."""
    model, total = Markov(4, seed=5, distance=3.0), requests(backend, pytestconfig)
    laws_hold(collect(model, CHAIN, op_draw(backend, coupled=True), op_verifier(backend, "rejection"), total), model)


def test_control_draft_noise_reused_in_the_residual():
    """Case 11, the rule itself: the recovered token scored with the Gumbel noise that chose the draft."""
    draws = np.random.default_rng(3)
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    for shared in (False, True):
        noise = draws.gumbel(size=(100_000, 4))
        drafted = np.argmax(np.log(q) + noise, axis=1)
        accepted = draws.random(len(noise)) < (p / q)[drafted]
        with np.errstate(divide="ignore"):
            left = np.log(np.maximum(p - q, 0))
        recovered = np.argmax(left + (noise if shared else draws.gumbel(size=noise.shape)), axis=1)
        counts = np.bincount(np.where(accepted, drafted, recovered), minlength=4)
        (assert_biased if shared else assert_law)(counts, p, SUITE_LIMIT)


def test_control_block_verification_with_the_step_fixed(backend: Backend, pytestconfig):
    """5.4 (a): with keys of seed, position and purpose alone, noise that decided the last step is used again."""
    model, total = Markov(4, seed=21, distance=3.0), requests(backend, pytestconfig)
    laws_hold(collect(model, CHAIN, op_draw(backend, paths=False), op_verifier(backend, "block"), total), model)
    draw, run = op_draw(backend, fixed_step=True, paths=False), op_verifier(backend, "block", fixed_step=True)
    some_law_fails(model, CHAIN, draw, run, total)


# ---- drafts that were not drawn as claimed


def sorted_by_q(state: State, node: int, k: int) -> np.ndarray:
    """5.4 (c): siblings re-ranked by their own law after they were drawn."""
    ids = gumbel_draw()(state, node, k)
    q = np.take_along_axis(state.model.draft_logits[state.token_ids[:, node]], ids, 1)
    return np.take_along_axis(ids, np.argsort(-q, axis=1), 1)


def kept_by_q(state: State, node: int, k: int) -> np.ndarray:
    """Case 4: k + 1 are drawn, the k with the largest q survive."""
    ids = gumbel_draw()(state, node, k + 1)
    q = np.take_along_axis(state.model.draft_logits[state.token_ids[:, node]], ids, 1)
    best = np.sort(np.argsort(-q, axis=1)[:, :k], axis=1)  # in draw order
    return np.take_along_axis(ids, best, 1)


def with_replacement(state: State, node: int, k: int) -> np.ndarray:
    return np.concatenate([gumbel_draw()(state, node, 1) for _ in range(k)], axis=1)


def only_likely_ones(state: State, node: int, k: int) -> np.ndarray:
    """A drawn id that the target dislikes is blanked to -1, after looking at it."""
    ids = gumbel_draw()(state, node, k)
    logits = np.take_along_axis(state.model.target_logits[state.token_ids[:, node]], ids, 1)
    return np.where(logits < 0, -1, ids)


MISUSES: dict[str, tuple[Any, Callable, dict]] = {
    "re-ranked-siblings": (SIBLINGS, sorted_by_q, {}),
    "kept-by-their-q": (CHAIN[:2], kept_by_q, {}),
    "blanked-ids": (CHAIN, only_likely_ones, {}),
    "deterministic-drafts-called-drawn": (SIBLINGS, top_draw, {}),
    "draft-temperature-off-by-20-percent": (CHAIN, gumbel_draw(1.2), {}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_control_misused_drafts(name, backend: Backend, pytestconfig):
    parents, draw, options = MISUSES[name]
    model, total = Markov(seed=22), requests(backend, pytestconfig)
    some_law_fails(model, parents, draw, op_verifier(backend, "rejection", **options), total)


@pytest.mark.long
def test_control_draft_temperature_off_by_two_percent(backend: Backend, pytestconfig):
    model = Markov(seed=22, distance=2.0)
    total = requests(backend, pytestconfig)
    if total < 1_000_000:
        pytest.skip(f"outside the sizes of backend {backend.name}")
    run = op_verifier(backend, "rejection")
    laws_hold(collect(model, CHAIN, gumbel_draw(), run, total), model)
    some_law_fails(model, CHAIN, gumbel_draw(1.02), run, total)


def test_siblings_drawn_with_replacement_keep_the_law(backend: Backend, pytestconfig):
    """A repeated sibling is flagged and skipped; what is left is a prefix of draws without replacement, whose length
    does not look at the next draw: still lossless. Counting it again is the wrong rule `w_stays_one` below."""
    model, total = Markov(seed=22), requests(backend, pytestconfig)
    flags: list[int] = []
    run = op_verifier(backend, "rejection", flags=flags)
    laws_hold(collect(model, SIBLINGS, with_replacement, run, total), model)
    assert flags
    assert max(flags) == sk.Flag.SIBLINGS


# ---- other projects' rules, as NumPy verifiers in the same harness


WRONG_RULES = ["same_laws", "zero_only", "not_renormalised", "w_stays_one", "target_residual", "always"]


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_control_wrong_verifiers_fail_and_the_right_one_passes(rule):
    model, total = Markov(seed=23, distance=2.0), 40_000
    tree = [-1, 0, 0, 0, 1, 1]
    wrong, _ = simulate(model, tree, gumbel_draw(), numpy_verifier(rule), requests=total, length=4)
    assert_biased(joint_counts(wrong[:, :2], 16), model.joint(2), SUITE_LIMIT)
    right, _ = simulate(model, tree, gumbel_draw(), numpy_verifier(), requests=total, length=4)
    assert_law(joint_counts(right[:, :2], 16), model.joint(2), SUITE_LIMIT)
    assert_law(joint_counts(right, 16, 4), folded_law(model.joint(4), 4), SUITE_LIMIT)


def test_power_of_the_check():
    """A total variation of .02 spread over 256 cells fails at 200,000 draws; the law itself passes."""
    rng, law = np.random.default_rng(0), np.random.default_rng(1).dirichlet(np.ones(256) * 5)
    shifted = law * (1 + 0.04 * np.where(np.arange(256) % 2, 1, -1))
    shifted /= shifted.sum()
    assert 0.018 < np.abs(shifted - law).sum() / 2 < 0.022
    assert_biased(rng.multinomial(200_000, shifted), law, SUITE_LIMIT)
    assert_law(rng.multinomial(200_000, law), law, SUITE_LIMIT)
