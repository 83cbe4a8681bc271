"""Statistics off the CPU that CI has the time for: one law of 10^4 requests by the CUDA sources, and a misuse that must
fail the same check. The other paths, and all suites on every path (test_distributions.py): `--long`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests import cuda_on_cpu
from tests.conftest import Backend, backends
from tests.sampling_helpers import SUITE_LIMIT, assert_biased, assert_law
from tests.sampling_models import Markov, gumbel_draw, joint_counts, simulate
from tests.test_distributions import op_verifier

TREE = [-1, 0, 0]
REQUESTS = 10_000
PATHS = [
    pytest.param(path, id=path.name, marks=[pytest.mark.long] if path.name in ("ptx", "triton_ptx") else [])
    for path in backends()
    if path.name in ("cuda", "emulated", "ptx", "triton_ptx")
]


def drawn(path: Backend, **misuse) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the first token and its law."""
    model = Markov(seed=41)
    path.require("verify")
    with cuda_on_cpu.unchecked() if path.name in cuda_on_cpu.BACKENDS else contextlib.nullcontext():
        run = op_verifier(path, "rejection", **misuse)
        text, emitted = simulate(model, TREE, gumbel_draw(), run, requests=REQUESTS, length=1, seed=7)
    assert emitted.mean() > 1.2, "hardly a draft is accepted: the law would not see the acceptance rule"
    return joint_counts(text[:, :1], model.vocab), model.joint(1)


@pytest.mark.parametrize("path", PATHS)
def test_law_of_ten_thousand_requests(path: Backend):
    assert_law(*drawn(path), SUITE_LIMIT)


@pytest.mark.parametrize("path", PATHS)
def test_control_draft_law_of_another_temperature(path: Backend):
    assert_biased(*drawn(path, draft_temperature=0.5), SUITE_LIMIT)
