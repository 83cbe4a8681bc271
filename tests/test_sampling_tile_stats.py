"""tile_stats: an output layer's statistics of 4096-logit tiles spare `verify` the reading of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_ref.sampling import tile_stats as reference
from tests.conftest import Backend
from tests.sampling_helpers import (
    chain,
    ints,
    sampling_tensors,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)

INF = float("inf")
PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def batch(vocab: int, copies: int = 40, seed: int = 0):
    torch.manual_seed(seed)
    n = len(PARENTS)
    logits = torch.randn(copies * n, vocab) * 2
    logits[:, ::97] += 6.0
    ids = logits.view(copies, n, vocab)[:, [max(p, 0) for p in PARENTS]].topk(2, -1).indices
    order = torch.tensor([0, 0, 1, 0, 1, 0, 0]).expand(copies, n)
    token_ids = ids.gather(-1, order[..., None])[..., 0].reshape(-1).int()
    return logits, token_ids, tree_tensors([PARENTS], copies=copies)


@pytest.mark.parametrize("vocab", [5, 4096, 10_007])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_against_float64(vocab: int, temperature: float):
    logits = torch.randn(3, vocab) * 4
    logits[1, ::2] = -INF
    found = sk.tile_stats(logits, temperature=torch.full((3,), temperature))
    for row, tiles in zip(logits.double().numpy(), found.tolist(), strict=True):
        np.testing.assert_allclose(tiles, reference(row, temperature), rtol=2e-6)


@pytest.mark.parametrize("method", ["greedy", "target_only", "coupled", "typical"])
@pytest.mark.parametrize("vocab", [17, 9001])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_same_outcome_as_without(method: str, vocab: int, temperature: float, backend: Backend):
    logits, ids, tree = batch(vocab)
    sampling = sampling_tensors(40, backend.device, temperature=temperature, seed=np.arange(40))
    stats = sk.tile_stats(logits, temperature=torch.full((len(logits),), max(temperature, 1e-3)))
    right = verify(backend, logits, ids, tree, sampling, method=method, return_logprobs="processed")
    found = verify(backend, logits, ids, tree, sampling, method=method, return_logprobs="processed", tile_stats=stats)
    for name in ("output_token_ids", "num_emitted", "accepted_nodes", "flags"):
        assert torch.equal(getattr(found, name), getattr(right, name)), name
    torch.testing.assert_close(found.logprobs, right.logprobs, atol=3e-6, rtol=0)
    assert right.num_emitted.float().mean() > 1.05


@pytest.mark.parametrize("filters", [dict(top_k=3), dict(top_p=0.8), dict(min_p=0.05)])
def test_filtered_rows_keep_their_bits(filters: dict, backend: Backend):
    """Filters sum kept masses from the row itself, so the law is the same to the last bit."""
    logits, ids, tree = batch(9001)
    sampling = sampling_tensors(40, backend.device, seed=np.arange(40), **filters)
    right = verify(backend, logits, ids, tree, sampling, method="target_only", return_logprobs="processed")
    found = verify(
        backend, logits, ids, tree, sampling, method="target_only", return_logprobs="processed",
        tile_stats=sk.tile_stats(logits),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_the_statistics_decide(backend: Backend):
    """Sums twice as large halve every acceptance: they are used, and the tests above would notice a wrong sum."""
    vocab, B = 64, 4000
    logits = torch.zeros(2 * B, vocab)
    logits[:, 3] = 5.0
    ids, tree = ints(np.tile([0, 3], B)), tree_tensors([chain(1)], copies=B)
    sampling = sampling_tensors(B, backend.device, seed=np.arange(B))
    stats = sk.tile_stats(logits)
    doubled = stats * torch.tensor([1.0, 2.0])
    rates = [
        float((verify(backend, logits, ids, tree, sampling, method="target_only", tile_stats=s).num_emitted - 1)
              .float().mean())
        for s in (stats, doubled)
    ]  # fmt: skip
    p = float(torch.softmax(logits[0], 0)[3])
    assert rates[0] == pytest.approx(p, abs=0.03)
    assert rates[1] == pytest.approx(p / 2, abs=0.03)


def test_unreadable_tiles_send_verify_to_the_row(backend: Backend):
    logits, ids, tree = batch(9001, copies=3)
    sampling = sampling_tensors(3, backend.device, seed=np.arange(3))
    right = verify(backend, logits, ids, tree, sampling, method="target_only")
    logits[:, 5000] = torch.nan
    stats = sk.tile_stats(logits)
    assert torch.isnan(stats[:, 1, 0]).all()
    found = verify(backend, logits, ids, tree, sampling, method="target_only", tile_stats=stats)
    plain = verify(backend, logits, ids, tree, sampling, method="target_only")
    assert all(torch.equal(a, b) for a, b in zip(found[:4], plain[:4], strict=True))
    assert (found.flags == sk.Flag.NAN_LOGIT).all()
    assert not right.flags.any()
    dead = torch.full_like(logits, -INF)
    found = verify(backend, dead, ids, tree, sampling, method="target_only", tile_stats=sk.tile_stats(dead))
    assert (found.flags == sk.Flag.DEAD_ROW).all()
    # a maximum that is not in its tile is no statistic of this row
    wrong = sk.tile_stats(logits.nan_to_num()) + 1
    found = verify(backend, logits, ids, tree, sampling, method="target_only", tile_stats=wrong)
    assert torch.equal(found.output_token_ids, plain.output_token_ids)


def test_bad_arguments(backend: Backend):
    logits, ids, tree = batch(9001, copies=2)
    sampling = sampling_tensors(2, backend.device)
    stats = sk.tile_stats(logits)
    with pytest.raises(TypeError, match="verify: tile_stats: expected float32"):
        verify(backend, logits, ids, tree, sampling, method="greedy", tile_stats=stats.double())
    with pytest.raises(ValueError, match="verify: tile_stats: expected"):
        verify(backend, logits, ids, tree, sampling, method="greedy", tile_stats=stats[:, :2].contiguous())
    mask = torch.full((len(logits), (9001 + 31) // 32), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="verify: tile_stats: expected none beside allowed or bias"):
        verify(backend, logits, ids, tree, sampling, method="greedy", tile_stats=stats, allowed=mask)
    with pytest.raises(ValueError, match="tile_stats: temperature: expected 14 rows"):
        sk.tile_stats(logits, temperature=torch.ones(2))
