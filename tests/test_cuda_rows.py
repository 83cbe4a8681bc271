"""sample, row_stats and filter_rows of the CUDA paths against the CPU ops: equal bits, flags and log-probabilities."""

from __future__ import annotations

import itertools

import pytest
import torch

import specdec_kernels as sk
from tests.conftest import Backend
from tests.cuda_paths import same
from tests.sampling_helpers import bit_rows, sampling_tensors

INF, NAN = float("inf"), float("nan")
FILTERS = [
    dict(top_k=k, top_p=p, min_p=m, temperature=t)
    for k, p, m, t in itertools.product((0, 3, 40), (1.0, 0.8, 0.0), (0.0, 0.05), (0.7, 2.0))
]


def rows_of(kind: str, R: int, V: int) -> torch.Tensor:
    logits = torch.randn(R, V) * 3
    if kind == "ties":
        return logits.round()
    if kind == "masked":
        return torch.where(torch.rand(R, V) < 0.7, -INF, logits)
    if kind == "faulty":
        logits[0, V // 2], logits[1] = NAN, NAN
        logits[2, ::3], logits[3] = INF, -INF
        logits[4:, 0] = INF
    return logits


@pytest.mark.parametrize(
    ("kind", "V", "dtype"),
    [
        ("spread", 5, torch.float32),
        ("ties", 131, torch.float32),
        ("spread", 1029, torch.float32),
        ("masked", 1029, torch.bfloat16),
        ("ties", 1160, torch.float16),
        ("faulty", 131, torch.bfloat16),
        ("faulty", 5, torch.float16),
    ],
)
def test_filtered_rows(kind: str, V: int, dtype: torch.dtype, gpu: Backend):
    """A filter a row: kept sets, masses and tokens."""
    filters = FILTERS if V < 1000 else FILTERS[1::4]
    logits = rows_of(kind, len(filters), V).to(dtype)
    columns = {name: [f[name] for f in filters] for name in filters[0]}
    sampling = sampling_tensors(len(filters), position=7, **columns)
    same(gpu, "filter_rows", logits, sampling)
    same(gpu, "sample", logits, sampling, return_logprobs="both")


@pytest.mark.long
def test_filtered_wide_rows(gpu: Backend):
    for kind, V, dtype in [("spread", 9001, torch.bfloat16), ("ties", 9001, torch.float16), ("masked", 9008, None)]:
        test_filtered_rows(kind, V, dtype or torch.float32, gpu)


@pytest.mark.parametrize("kind", ["spread", "faulty"])
def test_stats_of_rows(kind: str, gpu: Backend):
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, -1.0, 1e-3])
    for V in (1, 257, 2100):
        same(gpu, "row_stats", rows_of(kind, 6, max(V, 4))[:, :V], temperature=temperature)
    logits = rows_of(kind, 6, 700)
    same(gpu, "row_stats", logits, temperature=torch.ones(2), row_requests=torch.tensor([0, 1, 2, -1, 0, 1]).int())
    same(gpu, "row_stats", logits, vocab_start=320, vocab_size=320 + 600)


def test_edits_positions_and_requests(gpu: Backend):
    R, V = 9, 300
    logits = torch.randn(R, V)
    allowed = bit_rows([range(r, V, 3) for r in range(R)], V)
    counts = torch.arange(R + 1).int()
    bias = (counts, torch.randint(0, V, (R,)).int(), torch.randn(R) * 5)
    sampling = sk.Sampling.of(3, seed=[1, 2, 2**62], position=[0, 2**40, 5], top_p=[1.0, 0.7, 1.0], temperature=0.8)
    owners = torch.tensor([0, 1, 2, 0, 1, 2, 3, -1, 0], dtype=torch.int32)
    same(
        gpu, "sample", logits, sampling, row_requests=owners, row_positions=torch.arange(R) * 1000, allowed=allowed,
        bias=bias, vocab_size=290, return_logprobs="both",
    )  # fmt: skip
    same(gpu, "filter_rows", logits, sampling, row_requests=owners, allowed=allowed, bias=bias, vocab_size=290)
    greedy = sk.Sampling.of(R, temperature=[0.0, 1.0, 0.0] * 3)
    same(gpu, "sample", logits, greedy, allowed=allowed, bias=bias, return_logprobs="processed")


def test_rows_that_begin_anywhere(gpu: Backend):
    """Views with a row stride, off 16 bytes, of an odd width."""
    logits = torch.randn(4, 800).bfloat16()
    for view in (logits[:, 3:], logits[1:3, 8:507], logits[::2, :]):
        same(gpu, "sample", view, sk.Sampling.of(len(view), top_p=0.9, seed=3), return_logprobs="raw")


def test_a_row_in_the_far_tail(gpu: Backend):
    """Weights down to exp(-20): the words that need their second half come up, and the same ids win."""
    logits = torch.full((25, 500), -20.0)
    logits[:, 0] = 0.0
    same(gpu, "sample", logits, sk.Sampling.of(25, seed=list(range(25)), temperature=3.0))


@pytest.mark.parametrize("kept", [1, 2, 700, 1023, 1024])
def test_ties_in_order_of_ids(kept: int, gpu: Backend):
    """One value everywhere, two values, and a prefix that ends on either side of them."""
    rows = torch.zeros(3, 1100)
    rows[1, 500:] = 1.0
    rows[2, ::2] = -1.0
    same(gpu, "filter_rows", rows, sk.Sampling.of(3, top_k=kept))
    same(gpu, "sample", rows, sk.Sampling.of(3, top_k=kept, top_p=0.6, seed=kept), return_logprobs="processed")


def test_residual_weights(gpu: Backend):
    p, q = (torch.randn(3, 300).log_softmax(-1) for _ in range(2))
    p[:, 7], q[:, 9] = -INF, -INF
    gpu.require("residual_log_weights")
    scale = torch.tensor([0.0, 0.7, -INF])
    right = sk.residual_log_weights(p, q, scale, backend="native")
    found = sk.residual_log_weights(*(x.to(gpu.device) for x in (p, q, scale)), **gpu.kwargs)
    torch.testing.assert_close(found.cpu(), right, rtol=1e-6, atol=1e-6)
