"""Cases RS-07 to RS-14 of the survey: filters, temperature, formats, counting, typical acceptance, equal laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import specdec_kernels as sk
from python_ref.sampling import Parameters, target_law
from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_law,
    chain,
    count_accepted,
    emitted,
    floats,
    ints,
    log,
    one,
    path,
    sampling_tensors,
    softmax,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_trials import draws, first_counts, trials, trials_of

INF, NAN = float("inf"), float("nan")

# ---- RS-07

LAWS = [
    ([0.4, 0.3, 0.3, 0], {"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    ([0.40, 0.30, 0.15, 0.10, 0.05], {"top_k": 3, "top_p": 0.8}, [4 / 7, 3 / 7, 0, 0, 0]),
    ([0.5, 0.3, 0.2], {"top_k": 1, "top_p": 0.8}, [1, 0, 0]),
    ([0.35, 0.25, 0.2, 0.05, 0.03] + [0.01] * 12, {"top_k": 4, "top_p": 0.82}, [0.4375, 0.3125, 0.25] + [0] * 14),
]


@pytest.mark.parametrize(("p", "filters", "right"), LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_RS_07_one_filter_rule_in_every_path(p, filters, right, dtype, backend: Backend):
    """sample, bonus, recovered, one-hot and drawn drafts: one support and one law, also among equal bf16 logits."""
    backend.require("sample")
    B, rows = trials_of(backend), log([p, p])
    if dtype == torch.bfloat16:
        right = target_law(floats(rows[0], dtype=dtype).float().numpy(), Parameters(**filters))[0]
    q = np.asarray(right) * 0.5 + np.eye(len(p))[0] * 0.5
    q = q / q.sum()
    plain = sk.sample(
        floats(np.tile(rows[:1], (B, 1)), backend.device, dtype), sampling_tensors(B, backend.device, **filters),
        **backend.kwargs,
    ).token_ids  # fmt: skip
    assert_law(np.bincount(plain.cpu().numpy(), minlength=len(p)), right)
    for method, ids in [("rejection", [0, 0]), ("target_only", [0, 0]), ("coupled", [0, 0])]:
        out = trials(backend, rows, ids, chain(1), method=method, sampling=filters, dtype=dtype)
        assert_law(first_counts(out, len(p)), right)
        bonus = out.output_token_ids[:, 1][out.num_emitted == 2].cpu().numpy()
        assert_law(np.bincount(bonus, minlength=len(p)), right)
    for method in ("rejection", "block"):
        out = trials(
            backend, rows, draws(q, B), chain(1), method=method, sampling=filters, dtype=dtype, draft=log([q]),
            draft_sampling={},
        )  # fmt: skip
        if dtype == torch.float32:
            assert_law(first_counts(out, len(p)), right)
        assert not first_counts(out, len(p))[np.asarray(right) == 0].any()


# ---- RS-08


def test_RS_08_temperature_near_zero(backend: Backend):
    for temperature in (0.0, 1e-6, 1e-45):
        for draft, right in [(1, [1, 1]), (0, [1]), (2, [1])]:
            out = one(backend, [[1, 3, 2]] * 2, [0, draft], chain(1), method="rejection", temperature=temperature)
            assert emitted(out) == right
            assert int(out.flags) == 0
    out = verify(
        backend, floats([[1, 3, 2]] * 6), ints([0, 1] * 3), tree_tensors([chain(1)] * 3, backend.device),
        sampling_tensors(3, backend.device, temperature=[0, 1, 0]), method="rejection",
    )  # fmt: skip
    assert emitted(out, 0) == emitted(out, 2) == [1, 1]


def test_RS_08_ties_go_to_the_lowest_id(backend: Backend):
    assert emitted(one(backend, [[5, 5, 1]] * 2, [0, 1], chain(1), method="greedy")) == [0]
    wide = torch.zeros(1, 1030)
    wide[0, [3, 1029]] = 4.0
    assert emitted(one(backend, wide, [0], [-1], method="greedy")) == [3]
    # many ties: coarsely rounded bf16 logits
    rows = (torch.randn(1000, 300) * 2).round().bfloat16()
    first = rows.float().numpy().argmax(axis=1)
    tree = tree_tensors([[-1]], backend.device, copies=1000)
    for method, temperature in [("greedy", 1.0), ("rejection", 0.0), ("rejection", 1e-6), ("target_only", 1e-6)]:
        sampling = sampling_tensors(1000, backend.device, temperature=temperature)
        out = verify(backend, rows, ints(np.zeros(1000)), tree, sampling, method=method)
        assert (out.output_token_ids[:, 0].cpu().numpy() == first).all(), (method, temperature)


def test_RS_08_half_precision_extremes(backend: Backend):
    """fp16 logit 20 at temperature 1e-5 overflows fp16 when divided there; negative temperatures are flagged."""
    rows = torch.tensor([[20.0, -20.0, 19.0]], dtype=torch.float16)
    for temperature in (1e-5, 2e-5, 1e-4):
        out = one(backend, rows, [0], [-1], method="rejection", temperature=temperature)
        assert emitted(out) == [0]
        assert int(out.flags) == 0
    for temperature in (-1.0, NAN):
        out = one(backend, rows, [0], [-1], method="rejection", temperature=temperature)
        assert emitted(out) == [0]
        assert int(out.flags) == sk.Flag.PARAMETER


# ---- RS-09


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_RS_09_half_precision_logits_have_one_float32_law(dtype, backend: Backend):
    row, count = [100, 100.5, 99], trials_of(backend)
    p = softmax(np.array(row), 0.7)
    np.testing.assert_allclose(p, [0.3047, 0.6223, 0.0730], atol=1e-4)
    out = trials(
        backend, [row] * 2, draws(p, count), chain(1), method="rejection", draft=[row], dtype=dtype,
        sampling={"temperature": 0.7},
    )  # fmt: skip
    assert count_accepted(out) == count
    assert_law(first_counts(out, 3), p)
    out = trials(backend, [row] * 2, [0, 2], chain(1), method="rejection", dtype=dtype, sampling={"temperature": 0.7})
    assert_law(first_counts(out, 3), p)


# ---- RS-11


def test_RS_11_only_the_leading_run_counts(backend: Backend):
    rows = log([[1, 0], [1, 0], [1, 0], [0, 1], [1, 0]])
    out = one(backend, rows, [0, 0, 1, 0, 1], chain(4), method="rejection")
    assert emitted(out) == [0, 0]
    assert path(out) == [0, 1]
    rows = log([[0, 1], [1, 0], [0, 1], [0, 1], [0, 1], [0, 1]])
    for method in ("rejection", "target_only", "greedy", "block", "coupled"):
        out = one(backend, rows, [0, 1, 0, 1, -1, -1], chain(5), method=method)
        assert emitted(out) == [1, 0, 1, 1]
        assert path(out) == [0, 1, 2, 3]
        assert int(out.flags) == 0


# ---- RS-12


def test_RS_12_typical_acceptance(backend: Backend):
    options = {"method": "typical", "epsilon": 0.3, "delta": 0.6}
    p = [0.5, 0.25, 0.125, 0.125]
    for token, passes in enumerate([True, True, False, False]):
        out = one(backend, log([p, p]), [0, token], chain(1), **options)
        assert (len(path(out)) > 1) == passes
    # 0 log 0 = 0: the entropy of (.5, .5, 0, 0) is ln 2, the bar .3
    out = one(backend, log([[0.5, 0.5, 0, 0]] * 2), [0, 1], chain(1), **options)
    assert len(path(out)) == 2
    out = one(backend, log([[0.5, 0.5, 0, 0]] * 2), [0, 2], chain(1), **options)
    assert len(path(out)) == 1
    # the replacement comes from the row behind the last accepted draft
    rows = log([np.eye(4)[0], np.eye(4)[3], np.eye(4)[2], np.eye(4)[1]])
    out = one(backend, rows, [0, 0, 1, 2], chain(3), **options)
    assert emitted(out) == [0, 3]


def test_RS_12_typical_is_monotone(backend: Backend):
    rows, lengths = np.random.default_rng(0).normal(0, 1, (7, 6)), []
    for epsilon in (0.9, 0.3, 0.1, 0.01):
        out = one(backend, rows, [0, 1, 2, 3, 4, 5, 1], chain(6), method="typical", epsilon=epsilon, delta=0.9)
        lengths.append(len(path(out)))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1


# ---- RS-13


def test_RS_13_equal_laws_never_reject(backend: Backend):
    rng, vocab, count = np.random.default_rng(1), 1000, trials_of(backend) // 10
    rows = rng.normal(0, 2, (5, vocab)).astype(np.float32)
    rows[:, rng.random(vocab) < 0.3] = -INF
    ids = np.stack([rng.choice(vocab, size=count, p=softmax(row)) for row in rows[[4, 0, 1, 2, 3]]], axis=1)
    options = {"draft": rows[:4], "draft_rows": [-1, 0, 1, 2, 3], "count": count}
    for method in ("rejection", "block"):
        out = trials(backend, rows, ids, chain(4), method=method, **options)
        assert (out.num_emitted == 5).all(), method
    # also at the largest coin, where a sum of rounded logarithms would reject
    out = trials(backend, rows, ids, chain(4), method="rejection", uniforms=torch.full((5,), 1 - 2.0**-24), **options)
    assert (out.num_emitted == 5).all()
    # nearly equal laws: whatever is emitted has mass
    nearly = rows[:4] + rng.uniform(-1e-7, 1e-7, rows[:4].shape).astype(np.float32)
    out = trials(
        backend, rows, ids, chain(4), method="rejection", draft=nearly, draft_rows=[-1, 0, 1, 2, 3], count=count,
        uniforms=torch.full((5,), 1 - 2.0**-24),
    )  # fmt: skip
    last = out.output_token_ids.cpu().numpy()[np.arange(count), out.num_emitted.cpu().numpy() - 1]
    depth = out.num_emitted.cpu().numpy() - 1
    assert np.isfinite(rows[depth, last]).all()


# ---- RS-14


def test_RS_14_temperature_shapes_verified_rows(backend: Backend):
    count = trials_of(backend)
    out = trials(backend, [[0, np.log(3)]] * 2, [0, 0], chain(1), method="rejection", sampling={"temperature": 0.5})
    assert binomtest(count_accepted(out), count, 0.1).pvalue > 1e-6


def test_RS_14_min_p_at_every_position(backend: Backend):
    p, right = [0.6, 0.25, 0.1, 0.05], [12 / 17, 5 / 17, 0, 0]
    out = trials(backend, log([p] * 2), [0, 2], chain(1), method="rejection", sampling={"min_p": 0.2})
    assert count_accepted(out) == 0
    assert_law(first_counts(out, 4), right)
    out = trials(backend, log([p] * 4), [0, 0, 0, 0], chain(3), method="rejection", sampling={"min_p": 0.2})
    tokens, count = out.output_token_ids.cpu().numpy(), out.num_emitted.cpu().numpy()
    for position in range(4):
        assert_law(np.bincount(tokens[count > position, position], minlength=4), right)
