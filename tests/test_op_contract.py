"""What every op owes its callers: opcheck, right fakes, torch.compile, no hidden mutation (samples: op_samples.py)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels as sk
from specdec_kernels import _ops
from tests.op_samples import SAMPLES

BUILT = sorted(op for op in _ops.SCHEMAS if _ops.supports(op, "native", "cpu"))


def flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if hasattr(result, "__dataclass_fields__"):
        result = [getattr(result, name) for name in result.__dataclass_fields__]
    if isinstance(result, (tuple, list)):
        return [t for item in result for t in flat(item)]
    return []


def written(op: str) -> list[bool]:
    """Per argument of the out-variant: does the schema say that it is mutated?"""
    return [
        a.alias_info is not None and a.alias_info.is_write
        for a in getattr(torch.ops.specdec, op).default._schema.arguments
    ]


def out_variant_arguments(op: str, monkeypatch: pytest.MonkeyPatch, B: int = 3) -> list[Any]:
    """Arguments with which the public function calls the op."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    run, tensors = SAMPLES[op](B, False)
    original = _ops.call
    monkeypatch.setattr(_ops, "call", lambda o, b, d, *a: (seen.append((o, a)), original(o, b, d, *a))[1])
    run(*tensors)
    monkeypatch.undo()
    return list(next(arguments for name, arguments in seen if name == op))


def test_every_built_op_has_a_sample():
    assert BUILT, "no op is compiled: build first (make build)"
    assert set(BUILT) <= set(SAMPLES), f"add to tests/op_samples.py: {sorted(set(BUILT) - set(SAMPLES))}"


def test_schemas_are_out_variants():
    for name, schema in _ops.SCHEMAS.items():
        assert schema.endswith("-> ()"), name
        assert "!" in schema, name
        assert not re.search(r"Tensor!", schema), f"{name}: explicit alias letters"
        letters = re.findall(r"\((\w)!\)", schema)
        assert letters == sorted(set(letters)), name


@pytest.mark.parametrize("op", BUILT)
def test_IN_04_opcheck(op: str, monkeypatch: pytest.MonkeyPatch):
    arguments = out_variant_arguments(op, monkeypatch)
    torch.library.opcheck(getattr(torch.ops.specdec, op).default, tuple(arguments))


@pytest.mark.parametrize("op", BUILT)
def test_only_declared_arguments_change(op: str, monkeypatch: pytest.MonkeyPatch):
    arguments = out_variant_arguments(op, monkeypatch)

    def copies() -> list[Any]:
        return [[t.clone() for t in a] if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
                else a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]  # fmt: skip

    before, run = copies(), copies()
    getattr(torch.ops.specdec, op).default(*run)
    for is_written, old, new in zip(written(op), before, run):
        if isinstance(old, torch.Tensor) and not is_written:
            assert torch.equal(old.view(torch.uint8) if old.dtype.is_floating_point else old,
                               new.view(torch.uint8) if new.dtype.is_floating_point else new)  # fmt: skip


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("op", BUILT)
def test_IN_04_fakes_equal_real(op: str, B: int, strided: bool):
    run, tensors = SAMPLES[op](B, strided)
    with FakeTensorMode() as mode:
        fake = flat(run(*[mode.from_tensor(t) for t in tensors]))
    real = flat(run(*tensors))
    assert len(fake) == len(real)
    for f, r in zip(fake, real):
        assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


@pytest.mark.parametrize("op", BUILT)
def test_IN_04_fullgraph_compile_with_changing_batch(op: str):
    torch._dynamo.reset()
    compiled = None
    for B in (3, 2, 5):
        run, tensors = SAMPLES[op](B, False)
        expected = flat(run(*[t.clone() for t in tensors]))
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        got = flat(compiled(*[t.clone() for t in tensors]))
        for g, e in zip(got, expected):
            torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)


def test_unbuilt_ops_say_so_by_name():
    """The set is empty while every op is built; what an unbuilt backend says is held by the next test."""
    for op in sorted(set(_ops.SCHEMAS) - set(BUILT)):
        with pytest.raises(NotImplementedError, match=rf"^{op}: backend: auto on cpu is not built"):
            _ops.call(op, None, torch.device("cpu"))


def test_explicit_backend_never_falls_back():
    with pytest.raises(ValueError, match=r"^build_tree: backend: expected one of"):
        _ops.call("build_tree", "cutlass", torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"^build_tree: backend: triton on cpu is not built"):
        _ops.call("build_tree", "triton", torch.device("cpu"))


def test_a_tensor_on_another_device_is_named_by_functions_and_ops():
    """PyTorch calls an op's fake where any argument is meta: without a check such calls return memory as it was."""
    parents, cu, lens = (torch.tensor(x, dtype=torch.int32) for x in ([-1, 0], [0, 2], [7]))
    with pytest.raises(ValueError, match="build_tree: context_lens: expected device cpu, got meta"):
        sk.build_tree(parents, cu, lens.to("meta"), max_nodes=2)
    for arguments in ({"num_emitted": lens.to("meta"), "context_lens": lens}, {"num_emitted": lens, "context_lens": lens.to("meta")}):  # fmt: skip  # noqa: E501
        with pytest.raises(ValueError, match=r"advance: .*: expected device cpu, got meta"):
            torch.ops.specdec.advance(**arguments)
        with pytest.raises(ValueError, match=r"advance: .*: expected device cpu, got meta"):
            torch.ops.specdec.advance(*arguments.values())
    assert lens.tolist() == [7]
    torch.ops.specdec.advance(lens.to("meta"), lens.to("meta"))  # all of them: nothing to do


def test_none_for_a_tensor_is_named():
    ids = torch.zeros(2, dtype=torch.int32)
    tree = sk.chain_tree(torch.tensor([2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), total_nodes=2, max_nodes=2)  # fmt: skip  # noqa: E501
    logits, sampling = torch.randn(2, 9), sk.Sampling.of(1)
    with pytest.raises(TypeError, match="verify: draft_token_ids: expected a tensor, got None"):
        sk.verify(logits, None, tree, sampling, method="greedy")
    with pytest.raises(TypeError, match=r"verify: tree: expected a DraftTree .*, got NoneType"):
        sk.verify(logits, ids, None, sampling, method="greedy")
    with pytest.raises(ValueError, match="verify: vocab_size: expected 1 to 9 ids, the logits' columns, got 10"):
        sk.verify(logits, ids, tree, sampling, method="greedy", vocab_size=10)
