"""Cases RS-01 to RS-06 of the survey: acceptance, siblings, rows that cannot be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import specdec_kernels as sk
from python_ref.sampling import Parameters, target_law
from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_biased,
    assert_law,
    chain,
    count_accepted,
    emitted,
    floats,
    ints,
    log,
    one,
    sampling_tensors,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_trials import draws, first_counts, trials, trials_of

INF, NAN = float("inf"), float("nan")
TWO = [-1, 0, 0]  # a root with two siblings


# ---- RS-01


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-24])
def test_RS_01_massless_token_is_never_count_accepted(u, backend: Backend):
    out = trials(
        backend, log([[0.5, 0.5, 0], [1 / 3] * 3]), [0, 2], chain(1), method="rejection", draft=log([[0.2, 0.3, 0.5]]),
        uniforms=torch.full((2,), u),
    )  # fmt: skip
    assert count_accepted(out) == 0
    assert_law(first_counts(out, 3), [0.6, 0.4, 0])


@pytest.mark.parametrize(("u", "right"), [(0.25, 1), (0.25 - 1e-5, 0), (0.5, 2), (0.0, 0)])
def test_RS_01_boundary_of_cumulative_buckets_is_half_open(u, right, backend: Backend):
    rows = log([[0.25, 0.25, 0.5]] * 4)
    out = one(backend, rows, [0, 0, 1, 2], [-1, 0, 0, 0], method="target_only", uniforms=torch.full((4,), u))
    assert emitted(out)[0] == right


def test_RS_01_boundary_with_massless_ids_between(backend: Backend):
    """p = (0, .25, 0, .75), siblings 1, 2, 3, coin .25: token 3, not 1 and not the massless 2."""
    rows = log([[0, 0.25, 0, 0.75]] * 4)
    out = one(backend, rows, [0, 1, 2, 3], [-1, 0, 0, 0], method="target_only", uniforms=torch.full((4,), 0.25))
    assert emitted(out)[0] == 3


@pytest.mark.parametrize("method", ["greedy", "rejection", "target_only", "block", "coupled", "typical"])
def test_RS_01_filtered_token_is_never_emitted(method, backend: Backend):
    """All of q on a token that top-k takes out of the target."""
    count = trials_of(backend)
    out = trials(
        backend, [[1.0, 2.0, -1.0, 0.5]] * 3, [0, 2, 2], chain(2), method=method, sampling={"top_k": 3},
        draft=[[-30.0, -30, 9, -30]] * 2, draft_rows=[-1, 0, 1], draft_sampling={}, count=count,
    )  # fmt: skip
    assert not (out.output_token_ids == 2).any()


# ---- RS-02


def test_RS_02_ratio_uses_the_filtered_draft_law(backend: Backend):
    target, draft = log([[0.35, 0.45, 0.15, 0.05]] * 2), log([[0.4, 0.3, 0.2, 0.1]])
    q = target_law(draft[0], Parameters(top_k=2))[0]
    count = trials_of(backend)
    ids = draws(q, count)
    out = trials(backend, target, ids, chain(1), method="rejection", draft=draft, sampling={"top_k": 2})
    assert_law(first_counts(out, 4), [0.4375, 0.5625, 0, 0])
    assert binomtest(count_accepted(out), count, 0.866071).pvalue > 1e-6
    # control: the unfiltered q in the ratio accepts everything and emits (.571, .429)
    wrong = trials(
        backend, target, ids, chain(1), method="rejection", draft=draft, sampling={"top_k": 2}, draft_sampling={}
    )
    assert_biased(first_counts(wrong, 4), [0.4375, 0.5625, 0, 0])


# ---- RS-03


@pytest.mark.parametrize("method", ["rejection", "target_only"])
def test_RS_03_deterministic_draft_is_one_hot(method, backend: Backend):
    count = trials_of(backend)
    out = trials(backend, log([[0.3, 0.7]] * 2), [0, 0], chain(1), method=method)
    assert_law(first_counts(out, 2), [0.3, 0.7])
    assert binomtest(count_accepted(out), count, 0.3).pvalue > 1e-6
    # control: judged as a draw from softmax (.6, .4)
    wrong = trials(backend, log([[0.3, 0.7]] * 2), [0, 0], chain(1), method="rejection", draft=log([[0.6, 0.4]]))
    assert_biased(first_counts(wrong, 2), [0.3, 0.7])


@pytest.mark.parametrize(("p", "q", "rate"), [([0.9, 0.1], [0.5, 0.5], 0.6), ([0.2, 0.5, 0.3], [0.7, 0.2, 0.1], 0.5)])
def test_RS_03_law_and_acceptance_rate(p, q, rate, backend: Backend):
    count = trials_of(backend)
    out = trials(backend, log([p, p]), draws(q, count), chain(1), method="rejection", draft=log([q]))
    assert_law(first_counts(out, len(p)), p)
    assert binomtest(count_accepted(out), count, rate).pvalue > 1e-6
    # control: coins fixed at 0
    wrong = trials(
        backend, log([p, p]), draws(q, count), chain(1), method="rejection", draft=log([q]), uniforms=torch.zeros(2)
    )
    assert_biased(first_counts(wrong, len(p)), p)


def test_RS_03_all_tokens_appear(backend: Backend):
    backend.require("sample")
    B = trials_of(backend)
    rows = floats(np.tile(log([0.5, 0.3, 0.2]), (B, 1)), backend.device)
    drawn = sk.sample(rows, sampling_tensors(B, backend.device), **backend.kwargs).token_ids
    assert_law(np.bincount(drawn.cpu().numpy(), minlength=3), [0.5, 0.3, 0.2])


# ---- RS-04


def test_RS_04_deterministic_siblings(backend: Backend):
    count, p = trials_of(backend), [0.2, 0.5, 0.3]
    rows = log([p] * 3)
    for method in ("rejection", "target_only"):
        out = trials(backend, rows, [0, 0, 1], TWO, method=method)
        assert_law(first_counts(out, 3), p)
        assert binomtest(count_accepted(out), count, 0.7).pvalue > 1e-6
        rejected = out.output_token_ids[:, 0].cpu().numpy()[(out.num_emitted == 1).cpu().numpy()]
        assert (rejected == 2).all()
    # control: deterministic siblings treated as draws from softmax (.5, .3, .2)
    wrong = trials(backend, rows, [0, 0, 1], TWO, method="rejection", draft=log([[0.5, 0.3, 0.2]]))
    assert_biased(first_counts(wrong, 3), p)


def test_RS_04_siblings_without_replacement(backend: Backend):
    count, p, q = trials_of(backend), [0.1, 0.2, 0.3, 0.4], [0.6, 0.2, 0.1, 0.1]
    out = trials(backend, log([p] * 3), draws(q, count, 2), TWO, method="rejection", draft=log([q]))
    assert_law(first_counts(out, 4), p)
    # control: siblings in another order than they were drawn in
    ids = draws(q, count, 2)
    ids[:, 1:] = np.sort(ids[:, 1:], axis=1)
    wrong = trials(backend, log([p] * 3), ids, TWO, method="rejection", draft=log([q]))
    assert_biased(first_counts(wrong, 4), p)


def test_RS_04_two_levels_joint_law(backend: Backend):
    """Depth 2, the same p at every node: 16 cells."""
    count, p, q = trials_of(backend), np.array([0.1, 0.2, 0.3, 0.4]), [0.6, 0.2, 0.1, 0.1]
    parents = [-1, 0, 0, 1, 1, 2, 2]
    ids = np.concatenate(
        [draws(q, count, 2), draws(q, count, 2, seed=1)[:, 1:], draws(q, count, 2, seed=2)[:, 1:]], axis=1
    )
    out = trials(backend, log([p] * 7), ids, parents, method="rejection", draft=log([q]))
    text = out.output_token_ids[:, :2].cpu().numpy().astype(np.int64)
    short = text[:, 1] < 0  # one token emitted: the next one comes from plain decoding
    text[short, 1] = np.random.default_rng(3).choice(4, size=short.sum(), p=p)
    assert_law(np.bincount(text[:, 0] * 4 + text[:, 1], minlength=16), np.outer(p, p))


# ---- RS-05


@pytest.mark.parametrize("vocab", [5, 1025, 151936])
@pytest.mark.parametrize("method", ["greedy", "rejection", "target_only", "block", "coupled", "typical"])
def test_RS_05_bad_row_is_flagged_and_leaves_the_others_alone(method, vocab, backend: Backend):
    if vocab > 5000 and backend.device == "cpu" and backend.selector is not None:
        pytest.skip("wide rows are too slow on emulated backends")
    torch.manual_seed(3)
    clean = torch.randn(9, vocab)
    draft, rows = torch.randn(9, vocab), ints([-1, 0, 1, -1, 3, 4, -1, 6, 7])
    ids = ints([0, 1, 2] * 3)

    def run(logits):
        tree = tree_tensors([chain(2)] * 3, backend.device)
        options = {"draft_logits": draft, "draft_rows": rows} if method in ("rejection", "block") else {}
        sampling = sampling_tensors(3, backend.device)
        return verify(backend, logits, ids, tree, sampling, method=method, return_logprobs="both", **options)

    good = run(clean)
    faults = {
        "all": (NAN, slice(None)),
        "one": (NAN, slice(2, 3)),
        "inf": (INF, slice(3, 4)),
        "dead": (-INF, slice(None)),
    }
    for name, (value, columns) in faults.items():
        logits = clean.clone()
        logits[3:6, columns] = value
        bad = run(logits)
        for b in (0, 2):
            assert torch.equal(bad.output_token_ids[b], good.output_token_ids[b]), name
            assert torch.equal(bad.accepted_nodes[b], good.accepted_nodes[b]), name
            assert torch.equal(bad.flags[b], good.flags[b]), name
            count = int(good.num_emitted[b])
            assert torch.equal(bad.logprobs[b, :count].view(torch.int32), good.logprobs[b, :count].view(torch.int32))
        tokens = emitted(bad, 1)
        assert tokens, name
        assert all(0 <= token < vocab for token in tokens), name
        flags = {"all": sk.Flag.NAN_LOGIT | sk.Flag.DEAD_ROW, "one": sk.Flag.NAN_LOGIT, "inf": sk.Flag.INF_LOGIT,
                 "dead": sk.Flag.DEAD_ROW}[name]  # fmt: skip
        assert int(bad.flags[1]) & flags == flags, name
        if name in ("all", "dead"):
            assert tokens == [0]
        if name == "inf":
            assert tokens[0] == 3


# ---- RS-06


@pytest.mark.parametrize("draft", [[NAN] * 3, [-INF] * 3])
def test_RS_06_unreadable_draft_row_does_not_re_emit(draft, backend: Backend):
    out = trials(backend, log([[1e-9, 0.97, 0.03]] * 2), [0, 0], chain(1), method="rejection", draft=[draft])
    assert count_accepted(out) == 0
    assert_law(first_counts(out, 3)[1:], [0.97, 0.03])
    assert first_counts(out, 3)[0] == 0
    assert (out.flags & sk.Flag.DRAFT_MASS).all()
