"""PF-01 and the op contract for every method of `verify`, with all optional inputs: no host reads, fakes, compile.

test_op_contract.py checks one plain call of every op; here are the combinations only this room has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels as sk
from specdec_kernels import _ops
from tests.sampling_helpers import bit_rows, floats, ints, tree_tensors
from tests.test_op_contract import flat

METHODS = ["greedy", "rejection", "target_only", "block", "coupled", "typical"]
V, VD = 40, 24


def call(method: str, B: int, seed: int = 0) -> tuple[Any, list[torch.Tensor]]:
    """(verify over tensors only, tensors) with every optional input that the method takes."""
    torch.manual_seed(seed)
    parents = [-1, 0, 1] if method == "block" else [-1, 0, 0, 1, 1]
    n = len(parents)
    tree = tree_tensors([parents] * B)
    tensors = [
        torch.randn(B * n, V), torch.randint(0, V, (B * n,), dtype=torch.int32), *tree[:8],
        torch.full((B,), 0.8), ints([9] * B), torch.full((B,), 0.9), torch.full((B,), 0.01),
        torch.arange(B), torch.arange(B) + 3, torch.arange(B),
        bit_rows([range(0, V, 2)] * (B * n), V), ints([0] * (B * n) + [1]), ints([4]), floats([0.5]),
    ]  # fmt: skip
    drafted = method in ("rejection", "block")
    if drafted:
        rows = [b * n + p if p >= 0 else -1 for b in range(B) for p in parents]
        tensors += [torch.randn(max(B * n, 1), VD), ints(rows), ints([0] * VD), torch.rand(B * n)]

    def run(*t: torch.Tensor) -> Any:
        logits, ids, *rest = t
        draft_tree = sk.DraftTree(*rest[:8], tree.max_nodes, tree.max_depth)
        sampling = sk.Sampling(*rest[8:15])
        options: dict[str, Any] = {"allowed": rest[15], "bias": tuple(rest[16:19]), "return_logprobs": "both"}
        if drafted:
            options |= {"draft_logits": rest[19], "draft_rows": rest[20], "d2t": rest[21], "uniforms": rest[22]}
            options["draft_sampling"] = sampling
        return sk.verify(logits, ids, draft_tree, sampling, method=method, **options)

    return run, tensors


@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_PF_01_no_data_dependent_step_under_fake_tensors(method, B):
    """The whole step runs without a value: whoever reads one on the host (.item, boolean index) raises here."""
    run, tensors = call(method, B)
    real = flat(run(*tensors))
    with FakeTensorMode() as mode:
        fake = flat(run(*[mode.from_tensor(t) for t in tensors]))
    assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]


def test_PF_01_control_a_host_read_raises_under_fake_tensors():
    run, tensors = call("greedy", 2)
    with FakeTensorMode() as mode, pytest.raises(Exception, match=r"(?i)data.dependent|_local_scalar_dense"):
        run(*[mode.from_tensor(t) for t in tensors]).num_emitted.max().item()


@pytest.mark.parametrize("method", METHODS)
def test_fullgraph_compile(method):
    torch._dynamo.reset()
    run, tensors = call(method, 3)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, right in zip(flat(compiled(*tensors)), flat(run(*tensors))):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_opcheck_with_every_argument(method, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[Any, ...]] = []
    original = _ops.call
    monkeypatch.setattr(_ops, "call", lambda o, b, d, *a: (seen.append(a), original(o, b, d, *a))[1])
    run, tensors = call(method, 2)
    run(*tensors)
    monkeypatch.undo()
    assert sum(isinstance(a, torch.Tensor) for a in seen[0]) > 25
    torch.library.opcheck(torch.ops.specdec.verify.default, seen[0])


@pytest.mark.parametrize("method", METHODS)
def test_every_output_element_is_written(method, monkeypatch: pytest.MonkeyPatch):
    """Outputs poisoned beforehand come back fully defined: ids and nodes -1 behind the last token, logprobs 0."""
    allocate = torch.empty

    def dirty(*size: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        out = allocate(*size, dtype=dtype, device=device)
        return out.fill_(float("nan") if dtype.is_floating_point else 0x7F7F7F7F)

    monkeypatch.setattr(torch, "empty", dirty)
    monkeypatch.setattr(torch, "empty_like", lambda t: dirty(t.shape, dtype=t.dtype, device=t.device))
    run, tensors = call(method, 3)
    out = run(*tensors)
    monkeypatch.undo()
    for b in range(3):
        count = int(out.num_emitted[b])
        assert 1 <= count <= out.output_token_ids.shape[1]
        assert (out.output_token_ids[b, count:] == -1).all()
        assert (out.accepted_nodes[b, count:] == -1).all()
        assert (out.logprobs[b, count:] == 0).all()
        assert torch.isfinite(out.logprobs[b, :count, 0]).all()
        assert 0 <= int(out.flags[b]) < 1024
