"""Exact mode: the op against the float64 reference (itself proved by enumeration), decision by decision.

Coins are swept 1e-5 beside every threshold a request meets, over all draft tokens of small vocabularies; emitted tokens
are compared with the reference's under the same Philox keys; residual weights with float64.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import specdec_kernels as sk
from python_ref import rng as rng_of_the_ops
from python_ref import sampling as ref
from python_ref.sampling import Parameters
from tests.conftest import Backend
from tests.fuzz import fuzz
from tests.sampling_helpers import (
    chain,
    emitted,
    floats,
    ints,
    log,
    one,
    path,
    verify_is_built,  # noqa: F401
)
from tests.sampling_requests import Request, compare, compare_all, random_request, share, sweep

FORMS = ["eager", "lazy"]


def dyadic(rng: random.Random, vocab: int) -> np.ndarray:
    """A law of sixteenths with zeros: exact in float32 up to its logarithm."""
    cuts = sorted(rng.randint(0, 16) for _ in range(vocab - 1))
    return np.diff([0, *cuts, 16]) / 16


def chains(rng: random.Random, vocab: int, gamma: int, sets: int, one_hot: bool = False):
    """Every draft of gamma tokens over `sets` random law sets."""
    for number in range(sets):
        target = log([dyadic(rng, vocab) for _ in range(gamma + 1)])
        draft = log([dyadic(rng, vocab) for _ in range(gamma)])
        for tokens in itertools.product(range(vocab), repeat=gamma):
            rows = [-1] * (gamma + 1) if one_hot else [-1, *range(gamma)]
            yield Request(target, [0, *tokens], chain(gamma), draft, rows, seed=number, position=number)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("method", "vocab", "gamma", "one_hot"),
    [
        ("rejection", 5, 1, False),
        ("rejection", 4, 2, False),
        ("rejection", 3, 3, False),
        ("rejection", 4, 2, True),
        ("target_only", 4, 2, True),
        ("block", 4, 2, False),
        ("block", 3, 3, False),
        ("block", 3, 2, True),
    ],
)
def test_chains_by_enumeration(method, vocab, gamma, one_hot, form, backend: Backend):
    rng = random.Random(vocab * 10 + gamma)
    requests = [
        sweep(request, method, rng) for request in chains(rng, vocab, gamma, sets=6, one_hot=one_hot) for _ in range(4)
    ]
    compare_all(backend, requests, method, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("vocab", "k"), [(3, 2), (4, 2), (4, 3), (5, 3)])
@pytest.mark.parametrize("method", ["rejection", "target_only"])
def test_siblings_by_enumeration(method, vocab, k, form, backend: Backend):
    """Every ordered choice of k distinct siblings, below the root."""
    rng, requests = random.Random(vocab + k), []
    for number in range(4):
        target, draft = dyadic(rng, vocab), dyadic(rng, vocab)
        rows = log([target] * (k + 1))
        for tokens in itertools.permutations(range(vocab), k):
            if method == "rejection" and not all(draft[t] > 0 for t in tokens):
                continue
            drawn = [-1, *[0] * k] if method == "rejection" else [-1] * (k + 1)
            for _ in range(4):
                request = Request(rows, [0, *tokens], [-1] + [0] * k, log([draft]), drawn, seed=number)
                requests.append(sweep(request, method, rng))
    compare_all(backend, requests, method, form=form)


@pytest.mark.parametrize("vocab", [5, 37])
@pytest.mark.parametrize("method", ["rejection", "target_only", "coupled", "greedy", "typical"])
def test_random_trees_with_all_parameters(method, vocab, backend: Backend):
    """Ragged batches of kinds, temperatures, filters, masks, biases, seeds: tokens, paths, flags as in float64."""
    rng = random.Random(len(method) * 100 + vocab)
    for edits in (False, True):
        requests = [random_request(rng, vocab, rng.randint(1, 9), edits=edits) for _ in range(150)]
        compare_all(backend, requests, method, some=share, margin=2e-5)


def check_any_batch(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    method = rng.choice(["rejection", "target_only", "coupled", "greedy", "typical", "block"])
    requests = []
    for _ in range(6):
        request = random_request(rng, rng.choice([7, 70]) if not requests else requests[0].logits.shape[1],
                                 rng.randint(1, 12), edits=seed % 2 == 0)  # fmt: skip
        if method == "block":
            last = len(request.parents) - 1
            request.parents, request.draft_of = chain(last), [-1, *range(last)]
        requests.append(request)
    form = rng.choice(["auto", "eager", "lazy"])
    compare(backend, requests, method, margin=2e-5, clear=0.5, form=form)


test_any_batch, test_any_batch_long = fuzz(st.integers(0, 2**40), check_any_batch)


@pytest.mark.parametrize("form", FORMS)
def test_swept_coins_on_random_trees(form, backend: Backend):
    rng, requests = random.Random(4), []
    while len(requests) < 200:
        request = random_request(rng, 5, rng.randint(2, 9), edits=False)
        if not request.parameters.greedy:
            requests.append(sweep(request, "rejection", rng))
    compare_all(backend, requests, "rejection", some=share, form=form)


def test_random_chains_by_block_verification(backend: Backend):
    rng, requests = random.Random(6), []
    for _ in range(200):
        request = random_request(rng, 37, gamma := rng.randint(1, 6), mixed=False, edits=False)
        request.parents, request.draft_of = chain(gamma - 1), [-1, *range(gamma - 1)]
        requests.append(request)
    compare_all(backend, requests, "block", some=share, margin=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vocabulary_sizes_and_dtypes(dtype, backend: Backend):
    """The law of half-precision logits is the float32 law of the upcast values; widths fit no vector or tile."""
    rng = random.Random(8)
    for vocab, count in [(5, 30), (1025, 12), (4097, 6)]:
        requests = []
        for _ in range(count):
            request = random_request(rng, vocab, rng.randint(1, 6), edits=False)
            request.logits = torch.tensor(request.logits).to(dtype).float().numpy()
            request.draft_logits = torch.tensor(request.draft_logits).to(dtype).float().numpy()
            requests.append(request)
        # every group of 32 ids has a bound, rounded to a byte: in a wide row one lies near a step now and then
        compare_all(backend, requests, "rejection", some=share, dtype=dtype, margin=3e-5, clear=0.6)


@pytest.mark.parametrize("vocab", [50257, 151936])
def test_real_vocabularies(vocab, backend: Backend):
    if backend.selector is not None and backend.device == "cpu":
        pytest.skip("wide rows are too slow on emulated backends")
    rng = random.Random(vocab)
    requests = [random_request(rng, vocab, 4, edits=False) for _ in range(3)]
    for request in requests:
        likely = np.argsort(-request.draft_logits, axis=1)
        request.token_ids = [0, *(int(likely[request.parents[n], n]) for n in range(1, 4))]
    compare(backend, requests, "rejection", margin=1e-4)


@pytest.mark.parametrize(("ratio", "right"), [(4.9e-8, [0]), (5.4e-8, [0, 1])])
def test_a_coin_below_two_to_the_minus_24(ratio, right, backend: Backend):
    """At this position the coin of seed 0 is 220.4 * 2^-32 = 5.13e-8: 0 if a coin had 24 bits."""
    high, *_ = rng_of_the_ops.draw(0, 57949922, rng_of_the_ops.ACCEPT, 0)
    assert high == 220
    out = one(
        backend, log([[ratio, 1 - ratio]] * 2), [0, 0], chain(1), method="rejection", position=57949922,
        draft_logits=floats(log([[1, 0]])), draft_rows=ints([-1, 0]),
    )  # fmt: skip
    assert path(out) == right


# ---- the canonical vector of the survey: V = 8, temperature .8

INF = float("inf")
TARGET = [[2, 1, 0, -1, 0.5, -2, -INF, 1.5], [0, 3, -1, 2, 0.25, -4, 1, -INF], [1] * 8]
DRAFT = [[1, 2, 0, -1, 0.5, -2, 0, -INF], [0, 1, -1, 3, 0.25, -4, -INF, 1]]
H = [0.116901006, 0.055085463]


def canonical(backend: Backend, tokens, uniforms, method="rejection", **options):
    return one(
        backend, TARGET, [0, *tokens], chain(2), temperature=0.8, method=method, draft_logits=floats(DRAFT),
        draft_rows=ints([-1, 0, 1]), uniforms=floats([0.5, *uniforms]), **options,
    )  # fmt: skip


@pytest.mark.parametrize("side", [-1e-5, 1e-5])
def test_canonical_vector_token_rule(side, backend: Backend):
    accepted = canonical(backend, [1, 3], [0.224306190 + side, 0.0])
    assert (len(path(accepted)) > 1) == (side < 0)
    accepted = canonical(backend, [1, 3], [0.0, 0.245581555 + side])
    assert (len(path(accepted)) > 2) == (side < 0)


@pytest.mark.parametrize("side", [-1e-5, 1e-5])
def test_canonical_vector_block_rule(side, backend: Backend):
    assert path(canonical(backend, [1, 3], [H[0] + side, 1.0], "block")) == ([0, 1] if side < 0 else [0])
    # the last coin decides alone, also when the first would have cut the chain
    assert path(canonical(backend, [1, 3], [1.0, H[1] + side], "block")) == ([0, 1, 2] if side < 0 else [0])


def test_canonical_vector_residuals(backend: Backend):
    backend.require("residual_log_weights")
    for row, (token, right, mass) in enumerate([(1, {0: 0.542241943, 7: 0.457758057}, 0.560159099),
                                                (3, {1: 0.916776632, 6: 0.083223368}, 0.689181618)]):  # fmt: skip
        p = ref.target_law(TARGET[row], Parameters(0.8))[0]
        q = ref.target_law(DRAFT[row], Parameters(0.8))[0]
        log_p, log_q = log(p), log(q)
        scale = torch.zeros(1, device=backend.device)
        found = sk.residual_log_weights(
            floats([log_p], backend.device), floats([log_q], backend.device), scale, **backend.kwargs
        )
        weights = found.double().exp().cpu().numpy()[0]
        assert weights.sum() == pytest.approx(mass, abs=1e-6)
        assert weights[token] == 0
        for other in range(8):
            assert weights[other] / weights.sum() == pytest.approx(right.get(other, 0), abs=1e-6)


def test_canonical_vector_forbidden_and_undrawn_tokens(backend: Backend):
    out = canonical(backend, [6, 3], [0.0, 0.0])  # p = 0
    assert path(out) == [0]
    assert emitted(out)[0] in (0, 7)
    assert not out.flags.any()
    out = canonical(backend, [7, 3], [0.0, 0.0])  # q = 0: never drawn from q
    assert path(out) == [0]
    assert int(out.flags) == sk.Flag.DRAFT_MASS


def test_residual_log_weights_against_float64(backend: Backend):
    """Two thirds of the weights far apart, one third within 1e-7 .. 1e-2 of each other, some massless."""
    backend.require("residual_log_weights")
    rng = np.random.default_rng(0)
    log_p = np.log(rng.dirichlet(np.ones(300), 6)).astype(np.float32)
    log_q = np.log(rng.dirichlet(np.ones(300), 6)).astype(np.float32)
    near = rng.random((6, 300)) < 0.33
    log_q[near] = (log_p[near] - 10 ** rng.uniform(-6, -2, near.sum())).astype(np.float32)
    log_p[:, 3], log_q[:, 5], log_p[:, 9], log_q[:, 9] = -INF, -INF, -INF, -INF
    scale = np.array([0, 0.5, -0.5, 2, -INF, 1e-4], dtype=np.float32)
    found = sk.residual_log_weights(
        floats(log_p, backend.device), floats(log_q, backend.device), floats(scale, backend.device), **backend.kwargs
    ).cpu().numpy()  # fmt: skip
    for row in range(6):
        right = ref.residual_log_weights(log_p[row], log_q[row], float(scale[row]))
        assert (np.isneginf(found[row]) == np.isneginf(right)).all()
        live = np.isfinite(right)
        np.testing.assert_allclose(found[row][live], right[live], rtol=2e-6, atol=2e-6)
    assert not np.isnan(found).any()
