"""Triton twins of the sampling room against the CPU ops: the same laws bit for bit as compiled, closely interpreted."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import specdec_kernels as sk
from tests import test_cuda_drafts, test_cuda_verify
from tests.conftest import Backend, backends
from tests.cuda_paths import place, same
from tests.sampling_helpers import bit_rows, ints, sampling_tensors
from tests.test_cuda_rows import FILTERS, INF, rows_of

TRITON = [b for b in backends() if b.name.startswith("triton")]


@pytest.fixture(params=TRITON, ids=repr)
def twin(request: pytest.FixtureRequest) -> Backend:
    return request.param


def agree(twin: Backend, op: str, *arguments, **options) -> None:
    """Equal outputs; the interpreter does not fuse, so its sums may differ by a part in 10^7."""
    twin.require(op)
    right = getattr(sk, op)(*arguments, **options, backend="native")
    found = getattr(sk, op)(*(place(a, twin.device) for a in arguments), **options, **twin.kwargs)
    for name, a, b in zip(right._fields, found, right, strict=True):
        slack = 1e-6 if twin.name == "triton_interpret" and name in ("log_sum", "log_probs", "lse", "logprobs") else 0.0
        torch.testing.assert_close(a, b, rtol=slack, atol=slack, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("kind", "V", "dtype"), [("ties", 131, torch.float32), ("faulty", 700, torch.bfloat16)])
def test_filtered_rows(kind: str, V: int, dtype: torch.dtype, twin: Backend):
    """A filter a row; rows with masks, biases and faults: the kept set and its sum."""
    filters = FILTERS[::3]
    R, edits = len(filters), {}
    logits = rows_of(kind, R, V).to(dtype)
    sampling = sampling_tensors(R, **{name: [f[name] for f in filters] for name in filters[0]})
    if kind == "faulty":
        edits["allowed"] = bit_rows([range(r % 2, V, 2) for r in range(R)], V)
        edits["bias"] = (torch.arange(R + 1).int(), torch.randint(0, V, (R,)).int(), torch.randn(R) * 5)
        edits["vocab_size"] = V - 3
    agree(twin, "filter_rows", logits, sampling, **edits)


def test_sample(twin: Backend):
    """Filters, greedy and dead rows, rows of nobody, far positions, masks and biases; both log-probabilities."""
    R, V = 12, 300
    logits = torch.randn(R, V) * 3
    logits[3], logits[4, :9] = -INF, float("nan")
    counts = torch.arange(R + 1).int()
    agree(
        twin, "sample", logits,
        sk.Sampling.of(3, seed=[1, 2, 2**62], position=[0, 2**40, 5], top_p=[1.0, 0.7, 1.0], temperature=[0.8, 1.5, 0]),
        row_requests=torch.tensor([0, 1, 2, 0, 1, 2, 3, -1, 0, 1, 1, 1], dtype=torch.int32),
        row_positions=torch.arange(R) * 1000, allowed=bit_rows([range(r % 3, V, 3) for r in range(R)], V),
        bias=(counts, torch.randint(0, V, (R,)).int(), torch.randn(R) * 5), vocab_size=290, return_logprobs="both",
    )  # fmt: skip


def test_stats_of_rows(twin: Backend):
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, -1.0, 1e-3])
    agree(twin, "row_stats", rows_of("faulty", 6, 700), temperature=temperature, vocab_start=320, vocab_size=900)


def test_residual_weights(twin: Backend):
    p, q = (torch.randn(3, 300).log_softmax(-1) for _ in range(2))
    p[:, 7], q[:, 9], q[0, :100] = -INF, -INF, p[0, :100] - 1e-5
    twin.require("residual_log_weights")
    scale = torch.tensor([0.0, 0.7, -INF])
    right = sk.residual_log_weights(p, q, scale, backend="native")
    found = sk.residual_log_weights(*(place(x, twin.device) for x in (p, q, scale)), **twin.kwargs)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["target_only", "rejection"])
def test_probabilities(method: str, twin: Backend):
    """The CUDA paths' cases: chains and trees, faults, coins on both sides; offsets outside the batch."""
    test_cuda_drafts.test_probabilities(method, twin)
    test_cuda_drafts.test_offsets_outside_the_batch(twin)


@pytest.mark.parametrize("coupled", [False, True])
def test_siblings_in_draw_order(coupled: bool, twin: Backend):
    """Filters, greedy and dead rows, rows of nobody, more siblings than tokens; coupled: behind d2t."""
    R, V = 8, 300
    logits = torch.randn(R, V) * 2
    logits[3], logits[4, 2:], logits[5, 7] = -INF, -INF, float("nan")
    sampling = sampling_tensors(
        4, temperature=[1.0, 0.0, 0.7, 3.0], top_k=[0, 0, 4, 0], top_p=[1.0, 1.0, 1.0, 0.6], seed=[5, 6, -7, 2**40],
        step=[0, 1, 2, 3],
    )  # fmt: skip
    options = dict(
        row_requests=ints([0, 1, 2, 0, 0, 3, 4, 2]), row_positions=torch.arange(R) * 2**33,
        row_paths=torch.arange(R).int() * 7, coupled=coupled, vocab_size=310 if coupled else 280,
    )  # fmt: skip
    if coupled:
        options["d2t"] = torch.randint(-3, 40, (V,), dtype=torch.int32)
    agree(twin, "draft_sample", logits, 5, sampling, **options)


IN_CI = {"triton_interpret": "rejection", "triton_ptx": "block"}  # the sampled siblings' walk, the chain's: one each


def test_verify(twin: Backend):
    """Ragged trees of every kind of law, filter and temperature."""
    method = IN_CI[twin.name]
    arguments, options = test_cuda_verify.call_of(test_cuda_verify.requests_for(method, 37, 9), method)
    same(twin, "verify", *arguments, **options)


@pytest.mark.long
@pytest.mark.parametrize("method", test_cuda_verify.METHODS)
def test_verify_by_every_method(method: str, twin: Backend):
    """Ragged trees (block: chains) of every kind of law, filter and temperature; then with masks and biases."""
    test_cuda_verify.test_mixed_requests(method, "eager", twin)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        test_cuda_verify.test_reduced_draft_vocabulary,
        test_cuda_verify.test_faults_in_data,
        test_cuda_verify.test_empty_batches,
        functools.partial(test_cuda_verify.test_coins_of_the_caller, torch.float32),
        functools.partial(test_cuda_verify.test_coins_of_the_caller, torch.float64),
    ],
    ids=["reduced", "faults", "empty", "coins", "wide coins"],
)
def test_verify_on_the_cases_of_cuda(case: Callable[[Backend], None], twin: Backend):
    case(twin)
