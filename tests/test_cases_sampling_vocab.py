"""Cases VT and PF of the survey at the level of the sampling ops: draft vocabularies, padding, memory."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_biased,
    assert_law,
    chain,
    count_accepted,
    ints,
    log,
    sampling_tensors,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_trials import draws, first_counts, trials, trials_of

METHODS = ["greedy", "rejection", "target_only", "coupled"]
INF = float("inf")


# ---- VT-02


def test_VT_02_reduced_draft_vocabulary(backend: Backend):
    """d2t holds offsets: draft ids 0, 1, 2 are target ids 0, 2, 5."""
    p, q = [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], [0.5, 0.3, 0.2]
    count, d2t = trials_of(backend), ints([0, 1, 3])
    ids = np.array([0, 2, 5])[draws(q, count)]
    out = trials(backend, log([p] * 2), ids, chain(1), method="rejection", draft=log([q]), d2t=d2t)
    assert_law(first_counts(out, 6), p)
    wide = np.zeros(6)
    wide[[0, 2, 5]] = q
    assert binomtest(count_accepted(out), count, np.minimum(p, wide).sum()).pvalue > 1e-6
    # draft id 1 = target id 2: ratio 1, always accepted; draft id 0 rejected: the residual is (0, .5, 0, .25, .25, 0)
    out = trials(backend, log([p] * 2), [0, 2], chain(1), method="rejection", draft=log([q]), d2t=d2t)
    assert count_accepted(out) == count
    out = trials(
        backend, log([p] * 2), [0, 0], chain(1), method="rejection", draft=log([q]), d2t=d2t,
        uniforms=torch.full((2,), 0.99),
    )  # fmt: skip
    assert_law(first_counts(out, 6), [0, 0.5, 0, 0.25, 0.25, 0])
    # siblings and block verification read the same map
    ids = np.concatenate([ids[:, :1], np.array([0, 2, 5])[draws(q, count, 2)[:, 1:]]], axis=1)
    out = trials(backend, log([p] * 3), ids, [-1, 0, 0], method="rejection", draft=log([q]), d2t=d2t)
    assert_law(first_counts(out, 6), p)
    out = trials(backend, log([p] * 2), ids[:, :2], chain(1), method="block", draft=log([q]), d2t=d2t)
    assert_law(first_counts(out, 6), p)
    # control: the map read as absolute ids
    wrong = trials(backend, log([p] * 2), ids[:, :2], chain(1), method="rejection", draft=log([q]), d2t=ints([0, 0, 0]))
    assert_biased(first_counts(wrong, 6), p)


# ---- VT-03


@pytest.mark.parametrize("parents", [chain(1), [-1, 0, 0]])
def test_VT_03_draft_head_of_another_width(parents, backend: Backend):
    count, k = trials_of(backend), len(parents) - 1
    # narrower: ids 5..7 are reachable only through recovery
    p, q = [0.1, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1], [0.4, 0.3, 0.1, 0.1, 0.1]
    out = trials(backend, log([p] * (k + 1)), draws(q, count, k), parents, method="rejection", draft=log([q]))
    assert_law(first_counts(out, 8), p)
    # wider, with mass on id 6: its mass is removed at draft time and in verify
    p, q = [0.1, 0.3, 0.2, 0.2, 0.2], np.array([0.3, 0.1, 0.1, 0.1, 0.1, 0, 0.3, 0])
    clean = q[:5] / q[:5].sum()
    out = trials(backend, log([p] * (k + 1)), draws(clean, count, k), parents, method="rejection", draft=log([q]))
    assert_law(first_counts(out, 5), p)
    # "valid vocabulary" below both widths
    p8 = np.array([*p, 0.3, 0.2, 0.1]) / 1.6
    out = trials(
        backend, log([p8] * (k + 1)), draws(clean, count, k), parents, method="rejection", draft=log([q]), vocab_size=5
    )
    assert_law(first_counts(out, 5), p)
    # a drafted id behind the valid vocabulary is rejected, whatever the coin
    out = trials(
        backend, log([p8] * 2), [0, 6], chain(1), method="rejection", draft=log([q]), vocab_size=5,
        uniforms=torch.zeros(2),
    )  # fmt: skip
    assert count_accepted(out) == 0
    assert first_counts(out, 5).sum() == count


# ---- VT-04


@pytest.mark.parametrize("method", [*METHODS, "block", "typical"])
def test_VT_04_padded_ids_are_never_emitted(method, backend: Backend):
    rows = np.concatenate([log([[0.1, 0.2, 0.4, 0.2, 0.1]] * 3), np.full((3, 3), 50.0)], axis=1)
    out = trials(backend, rows, [0, 1, 6], chain(2), method=method, vocab_size=5)
    tokens = out.output_token_ids
    assert int(tokens.max()) < 5
    if method == "greedy":
        assert (tokens[:, 0] == 2).all()
    elif method != "typical":
        assert_law(first_counts(out, 5), [0.1, 0.2, 0.4, 0.2, 0.1])


@pytest.mark.parametrize("vocab", [5, 13, 1025, 4099])
def test_VT_04_no_id_of_a_padding_lane(vocab, backend: Backend):
    """V = 5 with lane padding to 8 must not give 5 .. 7, whatever the row: all-equal, all -inf, decreasing."""
    for rows in (
        torch.zeros(64, vocab),
        torch.full((64, vocab), -INF),
        -torch.arange(64 * vocab).view(64, vocab).float(),
    ):
        tree = tree_tensors([[-1]], backend.device, copies=64)
        for method in METHODS:
            out = verify(backend, rows, ints(np.zeros(64)), tree, sampling_tensors(64, backend.device), method=method)
            assert int(out.output_token_ids.max()) < vocab
            assert int(out.output_token_ids.min()) >= 0


# ---- PF-03


def resident(name: str) -> int:
    """Bytes of VmRSS or VmHWM (its highest value) of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status).group(1)) * 1024


def peak_of(call) -> int:
    """Highest resident memory during `call()` above what was resident before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide what `call` takes
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident peaks are read from Linux's /proc")
@pytest.mark.parametrize("form", ["eager", "lazy"])
@pytest.mark.parametrize("counts", [[8] * 16, [8] + [0] * 15], ids=["even", "ragged"])
def test_PF_03_peak_memory_of_verification(counts, form, backend: Backend):
    """Extra memory is at most 1 % of the logits plus 1 MiB: nothing of size N x V, nothing padded to the longest K."""
    if backend.name != "cpu":
        pytest.skip("resident memory is the measure on the CPU; on_gpu reads the allocator's counter")

    def prepare(counts, vocab):
        parents = [chain(k) for k in counts]
        N = sum(len(p) for p in parents)
        logits, draft = torch.randn(N, vocab), torch.randn(N, vocab)
        rows = ints([-1 if i == 0 else i - 1 for p in parents for i in range(len(p))])
        tree, sampling = tree_tensors(parents), sampling_tensors(len(counts), top_k=50, top_p=0.9)
        ids = torch.randint(0, vocab, (N,), dtype=torch.int32)
        options = {"method": "rejection", "draft_logits": draft, "draft_rows": rows, "form": form}
        return logits, lambda: verify(backend, logits, ids, tree, sampling, **options)

    prepare([2, 2], 1000)[1]()  # code pages and thread pools are not memory of the op
    logits, call = prepare(counts, 32_000)
    grown = peak_of(call)
    assert grown <= 0.01 * logits.nbytes + 2**20, f"{grown} bytes for logits of {logits.nbytes}"
    # the probe sees what the rule forbids: one float32 copy of the logits
    assert peak_of(lambda: (logits * 2).sum()) > 0.5 * logits.nbytes
