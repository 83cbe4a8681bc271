"""`draft_topk` where a kernel's tile or list ends: wide rows, all ties, rising rows, special values, one read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from tests.conftest import Backend

INF = math.inf


def expected(logits: torch.Tensor, k: int, temperature: float = 1.0) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Ids by a stable sort, log probabilities and lse in float64; NaN is -inf and no candidate."""
    logits = torch.nn.functional.pad(logits.float(), (0, max(0, k - logits.shape[1])), value=-INF)
    wide = logits.double().nan_to_num(nan=-INF, posinf=3.402823466e38, neginf=-INF)
    order = torch.argsort(wide, dim=1, descending=True, stable=True)[:, :k]
    logs = torch.log_softmax(wide / temperature, 1).gather(1, order)
    ids = torch.where(wide.gather(1, order) > -INF, order, -1)
    return ids.tolist(), logs.numpy(), torch.logsumexp(wide / temperature, 1).numpy()


def check(backend: Backend, logits: torch.Tensor, k: int, temperature: float = 1.0) -> None:
    backend.require("draft_topk")
    before = logits.clone()
    out = sk.draft_topk(logits.to(backend.device), k, temperature=temperature, **backend.kwargs)
    ids, logs, lse = expected(logits, k, temperature)
    assert out.token_ids.cpu().tolist() == ids
    kept = np.array(ids) >= 0
    np.testing.assert_allclose(out.log_probs.cpu().numpy()[kept], logs[kept], atol=6e-6, rtol=1e-6)
    assert (out.log_probs.cpu().numpy()[~kept] == -INF).all()
    np.testing.assert_allclose(out.lse.cpu().numpy(), lse, rtol=1e-6, atol=6e-6)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_two_tiles_and_a_rest(backend: Backend, dtype: torch.dtype):
    """A rest behind the tiles; rows that do not begin on 16 bytes."""
    columns = 2 * 8192 + 9 if backend.name in ("cpu", "cuda") else 8192 + 9
    logits = (torch.randn(2, columns) * 3).to(dtype)
    check(backend, logits, 8)
    check(backend, logits[:, 1:], 3, temperature=0.7)


def test_ties_go_to_the_lower_id(backend: Backend):
    """One value everywhere, so that the bound falls inside it; then two values of which the larger comes last."""
    check(backend, torch.full((1, 8300), 2.5), 8)
    rows = torch.zeros(1, 8300)
    rows[0, -5:] = 1
    check(backend, rows, 8)


def test_rising_rows_replace_everything(backend: Backend):
    """Every tile beats all before it: the list is filled and cut again and again."""
    check(backend, torch.arange(8300.0).view(1, -1) / 512, 20)
    check(backend, -torch.arange(8300.0).view(1, -1) / 512, 20)


def test_as_many_as_allowed(backend: Backend):
    logits = torch.randn(1, 2500)
    check(backend, logits, 1024 if backend.name in ("cpu", "cuda", "emulated", "ptx") else 200)
    check(backend, logits[:, :30], 40)


def test_special_values(backend: Backend):
    rows = torch.tensor([
        [0.0, math.nan, 2.0, -INF, 1.0, -0.0], [-INF] * 6, [math.nan] * 6, [INF, 0.0, INF, 3.0, 1.0, 2.0],
        [-1e38, 1e38, 0.0, 1.0, -1.0, 2.0],
    ])  # fmt: skip
    check(backend, rows[[0, 4]], 6)
    backend.require("draft_topk")
    dead = sk.draft_topk(rows[1:3].to(backend.device), 2, **backend.kwargs)
    assert dead.token_ids.tolist() == [[-1, -1]] * 2
    assert dead.log_probs.tolist() == [[-INF, -INF]] * 2
    assert dead.lse.tolist() == [-INF] * 2
    uniform = sk.draft_topk(rows[3:4].to(backend.device), 3, **backend.kwargs)
    assert uniform.token_ids.tolist() == [[0, 2, 3]]
    np.testing.assert_allclose(uniform.log_probs[0, :2].cpu(), math.log(0.5), atol=1e-6)
    assert uniform.log_probs[0, 2] == -INF or uniform.log_probs[0, 2] < -1e38


def test_reduced_vocabulary(backend: Backend):
    """Columns without a target id have no mass; ids are the target's."""
    backend.require("draft_topk")
    logits = torch.randn(2, 500)
    offsets = torch.randint(0, 900, (500,), dtype=torch.int32)
    out = sk.draft_topk(logits.to(backend.device), 7, d2t=offsets.to(backend.device), vocab_size=700, **backend.kwargs)
    targets = torch.arange(500) + offsets
    ids, logs, lse = expected(torch.where(targets < 700, logits, -INF), 7)
    assert out.token_ids.cpu().tolist() == targets[torch.tensor(ids)].tolist()
    np.testing.assert_allclose(out.log_probs.cpu().numpy(), logs, atol=6e-6)
    np.testing.assert_allclose(out.lse.cpu().numpy(), lse, atol=6e-6)


@pytest.mark.parametrize("temperature", [1e36, 1e37, 3e38, 1e39, INF])
def test_the_highest_temperature(backend: Backend, temperature: float):
    """Higher ones count as 1e36, as in `verify`: 1 / temperature stays a number, and what cannot be drawn stays so."""
    backend.require("draft_topk")
    logits = torch.tensor([[3.0, -INF, 1.0, math.nan, 2.0] * 300, [-3e38, 0.0, 1.0, 2.0, 3.0] * 300])
    out = sk.draft_topk(logits.to(backend.device), 3, temperature=temperature, **backend.kwargs)
    assert out.token_ids.cpu().tolist() == [[0, 5, 10], [4, 9, 14]]
    masses = [900.0, 1200.0 + 300 * math.exp(-3e2)]
    np.testing.assert_allclose(out.lse.cpu().numpy(), np.log(masses), rtol=1e-6)
    np.testing.assert_allclose(out.log_probs.cpu().numpy(), -np.log(masses)[:, None].repeat(3, 1), rtol=1e-6)
