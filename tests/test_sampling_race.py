"""Recovered tokens by the race of groups (csrc/sampling/race.h): wide rows, thin residuals, filters, its law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from python_ref.sampling import Parameters
from python_ref.sampling_dice import BLOCK_TOKENS, GROUPS, PhiloxDice
from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_biased,
    assert_law,
    emitted,
    floats,
    ints,
    path,
    sampling_tensors,
    softmax,
    tree_tensors,
    verify,
)
from tests.sampling_requests import Request, run

ALMOST_ONE = 1 - 2.0**-24  # a coin that accepts nothing
INTERPRETED = ("triton_interpret", "triton_ptx")  # seconds a row: narrow rows, few of them


class WatchedDice(PhiloxDice):
    """Notes how many tokens were raced for, and how many of those races ended undecided."""

    races, picks = 0, 0

    def race(self, law: np.ndarray, weights: np.ndarray, *, depth: int) -> int:
        self.races += 1
        return super().race(law, weights, depth=depth)

    def pick(self, weights: np.ndarray, *, depth: int) -> int:
        self.picks += 1
        return super().pick(weights, depth=depth)


def rejected(draws: np.random.Generator, vocab: int, shift: float, seed: int, **parameters: Any) -> Request:
    """A chain of one draft that its coin rejects. `shift`: how far the draft law lies from the target."""
    logits = draws.normal(0, 3, (2, vocab)).astype(np.float32)
    draft = (logits[:1] + shift * draws.normal(0, 1, vocab)).astype(np.float32)
    kept = np.argsort(-logits[0])[:5]  # no filter removes them
    drafted = int(kept[np.argmax((draft[0] - logits[0])[kept])])
    draft[0, drafted] += 0.01
    return Request(
        logits, [0, drafted], [-1, 0], draft, [-1, 0], Parameters(**parameters), seed=seed, position=seed % 97,
        uniforms=[ALMOST_ONE] * 2,
    )  # fmt: skip


def compare_races(backend: Backend, requests: list[Request], method: str, margin: float) -> tuple[int, int]:
    """(compared, undecided races). Tokens equal the reference's where its margin allows."""
    found = run(backend, requests, method)
    compared = undecided = 0
    for index, request in enumerate(requests):
        dice = WatchedDice(request.seed, request.position, request.step, request.uniforms)
        right, distance = request.reference(method, dice=dice)
        assert dice.races == 1, "the draft was accepted"
        undecided += dice.picks
        if distance < margin:
            continue
        compared += 1
        assert path(found, index) == right.nodes, (index, distance)
        assert emitted(found, index) == right.tokens, (index, distance)
    return compared, undecided


@pytest.mark.parametrize("method", ["rejection", "target_only"])
@pytest.mark.parametrize("vocab", [37, 1023, 1025, 5000])
def test_recovered_tokens_equal_the_reference(vocab, method, backend: Backend):
    draws = np.random.default_rng(vocab)
    shapes = [{}, {"temperature": 0.4}, {"top_k": 20}, {"top_p": 0.8, "temperature": 1.6}, {"min_p": 0.02}]
    if backend.name in INTERPRETED and vocab > 1025:
        pytest.skip(f"outside the sizes of backend {backend.name}")
    count = 10 if backend.name in INTERPRETED else 40
    requests = [rejected(draws, vocab, 0.7, seed, **shapes[seed % len(shapes)]) for seed in range(count)]
    compared, _ = compare_races(backend, requests, method, 2e-5)
    assert compared > 0.7 * count


def test_thin_residuals_are_decided_token_by_token(backend: Backend):
    """Drafts near their target leave few per cent to few per ten thousand of the mass: many races end undecided."""
    draws = np.random.default_rng(1)
    count, vocab = (12, 1100) if backend.name in INTERPRETED else (48, 3000)
    requests = [rejected(draws, vocab, (0.1, 0.02, 0.004, 0.001)[seed % 4], seed) for seed in range(count)]
    compared, undecided = compare_races(backend, requests, "rejection", 2e-5)
    assert compared > 0.6 * count
    assert count / 6 < undecided < 5 * count / 6


def test_all_ids_equal(backend: Backend):
    """Ties everywhere, a top-k that cuts through them: every kept id but the rejected one is drawn evenly."""
    count, vocab, kept = 2000 if backend.selector is None else 200, 2100, 40
    if backend.name in INTERPRETED:
        count, vocab, kept = 60, 1100, 8
    counts = np.zeros(vocab)
    rows = np.zeros((2 * count, vocab), dtype=np.float32)
    out = verify(
        backend, floats(rows), ints([0, 7] * count), tree_tensors([[-1, 0]], backend.device, copies=count),
        sampling_tensors(count, backend.device, top_k=kept, seed=np.arange(count)), method="target_only",
        uniforms=floats([ALMOST_ONE] * 2 * count),
    )  # fmt: skip
    np.add.at(counts, out.output_token_ids[:, 0].cpu().numpy(), 1)
    law = np.where(np.arange(vocab) < kept, 1.0, 0.0)
    law[7] = 0
    assert_law(counts, law)


@pytest.mark.parametrize("shift", [1.0, 0.02], ids=["fat", "thin"])
def test_law_of_recovered_tokens(shift, backend: Backend):
    """Chi-square over the 30 likeliest ids and 20 classes of the rest, ids from all places of many groups."""
    if backend.name in INTERPRETED:
        pytest.skip(f"outside the sizes of backend {backend.name}")
    total, chunk, vocab = (20_000, 4000, 2500) if backend.selector is None else (600, 300, 2500)
    request = rejected(np.random.default_rng(5), vocab, shift, 0)
    p, q = softmax(request.logits[0]), softmax(request.draft_logits[0])
    residual = np.maximum(p - q, 0)
    cells = 30 + np.arange(vocab) // GROUPS % 20
    cells[np.argsort(-residual)[:30]] = np.arange(30)
    law = np.bincount(cells, residual)
    counts = np.zeros(50)
    for first in range(0, total, chunk):
        out = verify(
            backend, floats(np.tile(request.logits, (chunk, 1))), ints(request.token_ids * chunk),
            tree_tensors([request.parents], backend.device, copies=chunk),
            sampling_tensors(chunk, backend.device, seed=np.arange(first, first + chunk), position=11),
            method="rejection", draft_logits=floats(request.draft_logits), draft_rows=ints([-1, 0] * chunk),
            uniforms=floats([ALMOST_ONE] * 2 * chunk),
        )  # fmt: skip
        assert int(out.num_emitted.max()) == 1
        np.add.at(counts, cells[out.output_token_ids[:, 0].cpu().numpy()], 1)
    assert_law(counts, law)
    # control: rings that are always taken follow the groups' bounds, not what is left of their tokens
    bounds = np.pad(p, (0, -vocab % BLOCK_TOKENS)).reshape(-1, BLOCK_TOKENS // GROUPS, GROUPS).max(axis=1).ravel()
    group = np.arange(vocab) // BLOCK_TOKENS * GROUPS + np.arange(vocab) % GROUPS
    mass = np.bincount(group, residual, minlength=len(bounds))
    untaken = residual / np.maximum(mass[group], 1e-300) * np.where(mass > 0, bounds, 0)[group]
    wrong = np.random.default_rng(6).multinomial(total, untaken / untaken.sum())
    assert_biased(np.bincount(cells, wrong), law)
