"""row_stats, filter_rows and verify_probs: building blocks and the form for engines that hold probabilities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_ref.sampling import Parameters, edited_logits, kept_ids, unpack_allowed
from specdec_kernels import _ops
from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_biased,
    assert_law,
    bit_rows,
    chain,
    emitted,
    floats,
    ints,
    path,
    sampling_tensors,
    tree_tensors,
)
from tests.sampling_trials import draws, first_counts, trials_of

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def skip_wide(backend: Backend, vocab: int) -> None:
    if vocab > 5000 and backend.device == "cpu" and backend.selector is not None:
        pytest.skip("wide rows are too slow on emulated backends")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 1025, 4096, 4097, 50257])
def test_row_stats_against_float64(vocab, dtype, backend: Backend):
    backend.require("row_stats")
    skip_wide(backend, vocab)
    logits = (torch.randn(7, vocab) * 4).to(dtype)
    logits[2] = logits[2].round()  # ties
    for temperature in (None, 0.1, 0.7, 2.0):
        t = None if temperature is None else torch.full((7,), temperature, device=backend.device)
        out = sk.row_stats(logits.to(backend.device), temperature=t, **backend.kwargs)
        wide = logits.double().numpy()
        scaled = (wide - wide.max(1, keepdims=True)) / np.float64(np.float32(temperature or 1))
        assert out.max.cpu().tolist() == wide.max(1).tolist()
        np.testing.assert_allclose(out.log_sum.cpu().numpy(), np.log(np.exp(scaled).sum(1)), atol=1.5e-6)
        assert out.argmax.cpu().tolist() == wide.argmax(1).tolist()
        assert not out.flags.any()


def test_row_stats_of_shards_and_masks(backend: Backend):
    """Shards that start at multiples of 32 ids give global ids and combine to the whole row; masks follow the shard."""
    backend.require("row_stats")
    logits, vocab = torch.randn(5, 1000), 1000
    whole = sk.row_stats(logits.to(backend.device), vocab_size=990, **backend.kwargs)
    allowed = bit_rows([range(3, 1000, 7)] * 5, vocab)
    masked = sk.row_stats(logits.to(backend.device), allowed=allowed.to(backend.device), **backend.kwargs)
    assert (masked.argmax.cpu() % 7 == 3).all()
    parts = [
        sk.row_stats(logits[:, a:b].contiguous().to(backend.device), vocab_start=a, vocab_size=990, **backend.kwargs)
        for a, b in [(0, 320), (320, 672), (672, 1000)]
    ]
    top = torch.stack([p.max for p in parts]).max(0)
    assert torch.equal(top.values, whole.max)
    winner = torch.stack([p.argmax for p in parts]).gather(0, top.indices[None])[0]
    assert torch.equal(winner, whole.argmax)
    total = torch.logsumexp(torch.stack([p.max + p.log_sum for p in parts]), 0)
    torch.testing.assert_close(total, whole.max + whole.log_sum, atol=1e-6, rtol=0)


def test_row_stats_flags(backend: Backend):
    backend.require("row_stats")
    rows = floats([[np.nan, 1], [np.nan] * 2, [-INF] * 2, [INF, INF], [0, 0]], backend.device)
    out = sk.row_stats(rows, **backend.kwargs)
    F = sk.Flag
    assert out.flags.tolist() == [F.NAN_LOGIT, F.NAN_LOGIT | F.DEAD_ROW, F.DEAD_ROW, F.INF_LOGIT, 0]
    assert out.argmax[0] == 1
    assert torch.isneginf(out.max[1:3]).all()
    np.testing.assert_allclose(out.log_sum.cpu()[[0, 3, 4]], [0, np.log(2), np.log(2)], atol=1e-6)


def kept_by(row: np.ndarray, threshold: float, budget: int) -> list[int]:
    ties = np.flatnonzero(row == threshold)[:budget].tolist()
    return sorted(np.flatnonzero(row > threshold).tolist() + ties)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 1025, 32003])
def test_filter_rows_keeps_the_reference_set(vocab, dtype, backend: Backend):
    """Every combination of filters, with heavy ties, masks and biases: three scalars describe the exact kept set."""
    backend.require("filter_rows")
    skip_wide(backend, vocab)
    rng = np.random.default_rng(vocab)
    grid = list(itertools.product([0, 1, 3, 50, 2000], [1.0, 0.9, 0.3], [0.0, 0.02, 1.0], [1.0, 0.6, 1.7]))
    if vocab > 5000:
        grid = grid[::7]
    R = len(grid)
    logits = torch.tensor(rng.normal(0, 2, (R, vocab)).astype(np.float32))
    logits[::2] = logits[::2].round()
    logits = logits.to(dtype)
    allowed = rng.integers(-(2**31), 2**31, (R, (vocab + 31) // 32)).astype(np.int32) | 1
    bias = (ints(np.arange(R + 1)), ints(rng.integers(0, vocab, R)), floats(rng.choice([-2.0, 1.5], R)))
    k, p, m, t = (np.array(column, dtype=np.float32) for column in zip(*grid))
    sampling = sampling_tensors(R, backend.device, top_k=k.astype(int), top_p=p, min_p=m, temperature=t)
    out = sk.filter_rows(
        logits.to(backend.device), sampling, allowed=torch.tensor(allowed, device=backend.device),
        bias=tuple(x.to(backend.device) for x in bias), **backend.kwargs,
    )  # fmt: skip
    near = 0
    for r in range(R):
        edits = {int(bias[1][r]): float(bias[2][r])}
        row, _ = edited_logits(logits[r].float().numpy(), allowed[r], edits)
        parameters = Parameters(float(t[r]), int(k[r]), float(p[r]), float(m[r]))
        right = sorted(kept_ids(row, parameters).tolist())
        found = kept_by(row, float(out.threshold[r]), int(out.tie_budget[r]))
        found = [token for token in found if np.isfinite(row[token])]
        if found != right:  # a cumulative mass within rounding of top_p
            near += 1
            assert len(set(found) ^ set(right)) == 1, grid[r]
            assert parameters.top_p < 1
            continue
        scaled = (row[right] - row[right].max()) / t[r]
        assert float(out.max[r]) == row[right].max()
        assert float(out.log_sum[r]) == pytest.approx(np.log(np.exp(scaled).sum()), abs=2e-6)
        assert unpack_allowed(allowed[r], vocab)[right].all()
    assert near <= 1


# ---- verify_probs


def probs(backend: Backend, target, ids, parents, uniforms, final, *, copies=1, draft=None, method="rejection"):
    backend.require("verify_probs")
    tree = tree_tensors([list(parents)], backend.device, copies=copies)

    def place(x):
        return None if x is None else floats(x, backend.device)

    return sk.verify_probs(
        place(target), ints(ids, backend.device), tree, place(uniforms), place(final), method=method,
        draft_probs=place(draft), **backend.kwargs,
    )  # fmt: skip


def many(backend: Backend, p, ids, parents, *, q=None, method="rejection"):
    """trials with uniform coins; `p` [V] at every node, `q` the law every node was drawn from."""
    B, n, rng = len(ids), len(parents), np.random.default_rng(0)
    target = np.tile(np.asarray(p, dtype=np.float32), (B * n, 1))
    draft = None if q is None else np.tile(np.asarray(q, dtype=np.float32), (B * n, 1))
    return probs(backend, target, np.asarray(ids).ravel(), parents, rng.random(B * n), rng.random(B), copies=B,
                 draft=draft, method=method)  # fmt: skip


def test_verify_probs_without_offsets(backend: Backend):
    """cu_nodes has B + 1 elements: none are too few, for the public function and for the op under it."""
    backend.require("verify_probs")
    none = ints([], backend.device)
    tree = tree_tensors([[-1]], backend.device)._replace(cu_nodes=none)
    probs, coins = floats([[0.5, 0.5]], backend.device), floats([0.5], backend.device)
    with pytest.raises(ValueError, match=r"^verify_probs: tree: expected cu_nodes of shape \[B \+ 1\], got \[0\]"):
        sk.verify_probs(probs, ints([0], backend.device), tree, coins, coins, method="target_only", **backend.kwargs)
    outputs = [ints(values, backend.device) for values in ([[7] * 2], [7], [[7] * 2], [7])]
    arguments = [probs, None, ints([0], backend.device), none, tree.first_child, tree.next_sibling, coins, coins]
    with pytest.raises(ValueError, match=r"^verify_probs: cu_nodes: expected shape \[B \+ 1\], got \[0\]"):
        _ops.call(
            "verify_probs", backend.selector, torch.device(backend.device), *arguments, "target_only", 1, *outputs
        )
    assert all((x == 7).all() for x in outputs)


def test_verify_probs_laws(backend: Backend):
    p, q, B = [0.2, 0.5, 0.3], [0.6, 0.3, 0.1], trials_of(backend)
    ids = draws(q, B)
    assert_law(first_counts(many(backend, p, ids, chain(1), q=q), 3), p)
    assert_law(first_counts(many(backend, p, ids, chain(1)), 3), p)  # one-hot is lossless however the id came about
    wrong = [0.1, 0.3, 0.6]
    assert_biased(first_counts(many(backend, p, ids, chain(1), q=wrong), 3), p)  # not the law they were drawn from
    siblings = np.tile([0, 0, 1], (B, 1))
    for tokens in (siblings, np.tile([0, 0, 0], (B, 1))):  # the second is a duplicate: it adds nothing
        assert_law(first_counts(many(backend, p, tokens, [-1, 0, 0], method="target_only"), 3), p)


@pytest.mark.parametrize(("u", "right"), [(0.0, 1), (0.25, 3), (0.2499, 1), (0.9999, 3)])
def test_verify_probs_boundaries_are_half_open(u, right, backend: Backend):
    p = [[0, 0.25, 0, 0.75]] * 4
    out = probs(backend, p, [0, 1, 2, 3], [-1, 0, 0, 0], [u] * 4, [0.5], method="target_only")
    assert emitted(out)[0] == right
    # the last token by inverse CDF, strictly too; a coin of 1 gives the last id with mass
    out = probs(backend, p[:1], [0], [-1], [0.5], [u])
    assert emitted(out) == [right]
    assert emitted(probs(backend, [[0.25, 0.75, 0, 0]], [0], [-1], [0.5], [1.0])) == [1]


def test_verify_probs_massless_forbidden_and_unreadable(backend: Backend):
    F = sk.Flag
    p, q = [[0.5, 0.5, 0]] * 2, [[0.2, 0.3, 0.5]] * 2
    out = probs(backend, p, [0, 2], chain(1), [0.0, 0.0], [0.0], draft=q)  # p(x) = 0, coin 0
    assert path(out) == [0]
    assert emitted(out)[0] == 0
    out = probs(backend, p, [0, 0], chain(1), [0.0, 0.0], [0.9], draft=[[np.nan] * 3] * 2)
    assert (emitted(out), int(out.flags)) == ([1], F.DRAFT_MASS)
    out = probs(backend, p, [0, 7], chain(1), [0.0, 0.0], [0.9], draft=q)
    assert (emitted(out), int(out.flags)) == ([1], F.TOKEN_RANGE)
    out = probs(backend, p, [0, -1], chain(1), [0.0, 0.0], [0.9], draft=q)
    assert (emitted(out), int(out.flags)) == ([1], 0)
    out = probs(backend, [[np.nan] * 3] * 2, [0, 1], chain(1), [0.0, 0.0], [0.9], draft=q)
    assert (emitted(out), int(out.flags) & F.DEAD_ROW) == ([0], F.DEAD_ROW)


def test_verify_probs_agrees_with_verify_on_the_same_coins(backend: Backend):
    """Acceptance of the two forms is one decision; only the last token is drawn otherwise."""
    backend.require("verify_probs")
    backend.require("verify")
    torch.manual_seed(0)
    B, gamma, vocab = 300, 3, 6
    n = gamma + 1
    logits, draft = torch.randn(B * n, vocab), torch.randn(B * n, vocab)
    ids, coins = torch.randint(0, vocab, (B * n,), dtype=torch.int32), torch.rand(B * n)
    tree = tree_tensors([chain(gamma)], backend.device, copies=B)
    rows = ints([node if node % n else -1 for node in range(B * n)])  # row n: the law node n was drawn from
    on = backend.device
    for method in ("rejection", "target_only"):
        drafted = {"draft_logits": draft.to(on), "draft_rows": rows.to(on)} if method == "rejection" else {}
        left = sk.verify(logits.to(on), ids.to(on), tree, sampling_tensors(B, on), method=method,
                         uniforms=coins.to(on), **drafted, **backend.kwargs)  # fmt: skip
        right = sk.verify_probs(
            logits.softmax(1).to(on), ids.to(on), tree, coins.to(on), torch.rand(B).to(on), method=method,
            draft_probs=draft.softmax(1).to(on) if drafted else None, **backend.kwargs,
        )  # fmt: skip
        assert torch.equal(left.accepted_nodes, right.accepted_nodes)
        assert float(left.num_emitted.float().mean()) > 1.1
