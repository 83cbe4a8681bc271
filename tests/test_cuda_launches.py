"""Launches as the host sees them: one that fails reaches the caller, grids keep the device's limits, devices stay whose
they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import _ops
from specdec_kernels.attention import tree_attention
from tests import cuda_on_cpu
from tests.attention_suite import POSITIONAL, build, rng_of
from tests.attention_trees import chain
from tests.conftest import Backend
from tests.op_samples import SAMPLES

ROOT = Path(__file__).resolve().parents[1]
INT = torch.int32
EMULATED = Backend("emulated", "cpu", "emulated")
needs_emulation = pytest.mark.skipif(cuda_on_cpu.missing("emulated") is not None, reason="no g++ or CUDA headers")


def arguments_of(op: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the public function hands to the op, and the workspace that the CPU does without."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    run, tensors = SAMPLES[op](3, False)
    original = _ops.call
    monkeypatch.setattr(_ops, "call", lambda o, b, d, *a: (seen.append((o, a)), original(o, b, d, *a))[1])
    run(*tensors)
    monkeypatch.undo()
    arguments = list(next(arguments for name, arguments in seen if name == op))
    if op == "rerank_tree":
        size = _ops.workspace_size(op, requests=3, candidates=len(arguments[0]))
        arguments = [torch.zeros(size, dtype=torch.uint8) if a is None else a for a in arguments]
    return arguments


@needs_emulation
@pytest.mark.parametrize("op", sorted(cuda_on_cpu.ops_with_source("emulated")))
def test_a_refused_launch_reaches_the_caller(op: str, monkeypatch: pytest.MonkeyPatch):
    """No code for this GPU, too many resources: an error that names the op, never an output that nobody wrote."""
    EMULATED.require(op)
    arguments, library = arguments_of(op, monkeypatch), cuda_on_cpu.suite_library()
    with library.refusing("kernel"), pytest.raises(RuntimeError, match=f"^{op}: CUDA: launch refused: no kernel image"):
        cuda_on_cpu.run_op(library, op, *arguments)
    cuda_on_cpu.run_op(library, op, *arguments)  # and it is over with the call


@needs_emulation
def test_a_refused_launch_of_the_hopper_kernel_reaches_the_caller():
    """Its library has a CUDA runtime, and a last error, of its own: the other library's check does not see it."""
    EMULATED.require("tree_attention")
    library = cuda_on_cpu.suite_library()
    problem = build([chain(33)], [70], rng_of("refused"), dtype=torch.bfloat16, heads=(2, 1), max_nodes=33)
    told = pytest.raises(RuntimeError, match=r"^tree_attention: CUDA: launch refused: no kernel image")
    with library.configured(hopper=True), library.refusing("hopper_kernel"), told:
        problem.run(EMULATED)
    with library.configured(hopper=True):
        problem.check(*problem.run(EMULATED))


def many_requests(gpu: Backend, dtype: torch.dtype, order: int, max_nodes: int | None = None) -> torch.Tensor:
    """out of the one request that a long request_order names, in its last place."""
    problem = build([chain(2)], [5], rng_of("grid"), dtype=dtype, heads=(2, 2), mask=False).to(gpu.device)
    request_order = torch.full((order,), -1, dtype=INT, device=gpu.device)
    request_order[-1] = 0
    arguments = {**problem.tensors, "request_order": request_order, **gpu.kwargs}
    gpu.require("tree_attention")
    with cuda_on_cpu.unchecked():
        return tree_attention(*[arguments.pop(k) for k in POSITIONAL], max_nodes=max_nodes or 2, **arguments)


def test_more_requests_than_a_grid_has_layers(gpu: Backend):
    """Grid dimensions y and z end at 65535: requests, row tiles and heads lie one behind the other in x."""
    assert torch.equal(many_requests(gpu, torch.float32, 65537), many_requests(gpu, torch.float32, 1))


@pytest.mark.skipif(cuda_on_cpu.missing("triton_interpret") is not None, reason="no triton, g++ or CUDA headers")
def test_the_triton_twin_names_its_limit():
    triton = Backend("triton_interpret", "cpu", "triton_interpret")
    with pytest.raises(
        ValueError, match=r"^tree_attention: request_order: expected at most 65535 requests .* got 65536"
    ):
        many_requests(triton, torch.float32, 65536)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_row_tiles_than_can_be_counted(gpu: Backend, dtype: torch.dtype):
    """2 heads x 2^24 tiles (of 128 rows; 2^29 of 4) x 200 requests."""
    with pytest.raises(ValueError, match=r"^tree_attention: max_nodes: expected at most \d+ tiles of (4|128) rows"):
        many_requests(gpu, dtype, 200, 2**31 - 1)


def test_devices_are_torchs_to_choose():
    """cudaSetDevice gives a context to a device that nobody has used yet, and hides torch's own choice from torch."""
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            assert not re.search(r"\bcudaSetDevice\s*\(", path.read_text()), path
