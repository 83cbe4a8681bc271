"""What every op owes its callers: opcheck, right fakes, torch.compile, no hidden mutation (samples: op_samples.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
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


NODE = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: sk.build_tree(NODE, NODE, NODE[:1], max_nodes="4"), "build_tree: max_nodes: expected an int, got '4'"),
        (lambda: sk.build_tree(NODE, NODE, NODE[:1], max_nodes=4, max_depth=2.0),
         "build_tree: max_depth: expected an int, got 2.0"),
        (lambda: sk.build_tree(NODE, NODE, NODE[:1], max_nodes=torch.tensor(4)),
         "build_tree: max_nodes: expected an int, got a tensor"),
        (lambda: sk.chain_tree(NODE, NODE, total_nodes=None, max_nodes=2),
         "chain_tree: total_nodes: expected an int, got None"),
        (lambda: sk.unpack_mask(NODE[None], "3"), "unpack_mask: num_columns: expected an int, got '3'"),
        (lambda: sk.slot_mapping(NODE[None], NODE[:1], NODE, "16", total_nodes=2),
         "slot_mapping: page_size: expected an int, got '16'"),
        (lambda: sk.sequoia_tree([0.5], "8", 3), "sequoia_tree: num_nodes: expected an int, got '8'"),
        (lambda: sk.pack_rows(torch.zeros(1, 2), NODE, total="2"), "pack_rows: total: expected an int, got '2'"),
        (lambda: sk.draft_topk(torch.zeros(1, 9), "3"), "draft_topk: k: expected an int, got '3'"),
        (lambda: sk.expand_tree(torch.zeros(1, 1), torch.zeros(1, 1, 2), "3"),
         "expand_tree: k: expected an int, got '3'"),
        (lambda: sk.sample(torch.zeros(1, 9), sk.Sampling.of(1), vocab_size="9"),
         "sample: vocab_size: expected an int, got '9'"),
        (lambda: sk.sample_sharded(torch.zeros(1, 9), sk.Sampling.of(1), vocab_start="0", group=None),
         "sample_sharded: vocab_start: expected an int, got '0'"),
        (lambda: sk.plan_tree_attention(NODE[:1], NODE, num_q_heads="4", num_kv_heads=2, head_dim=64, max_nodes=2),
         "plan_tree_attention: num_q_heads: expected an int, got '4'"),
    ],
)  # fmt: skip
def test_host_integers_of_another_type_are_named(run, message: str):
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        run()


@pytest.mark.parametrize("op", BUILT)
def test_triton_ops_say_that_cpu_tensors_are_not_theirs(op: str, monkeypatch: pytest.MonkeyPatch):
    arguments = out_variant_arguments(op, monkeypatch)
    with pytest.raises(NotImplementedError, match=f"^{op}: backend: Triton kernels take CUDA tensors, got cpu"):
        getattr(torch.ops.specdec_triton, op).default(*arguments)
    assert not _ops.supports(op, "triton", "cpu")


FIRST_CALL = """
import types, torch
from specdec_kernels import _ops, _triton
op, served = "{op}", []
has = lambda kind: getattr(torch._C, f"_dispatch_has_{{kind}}_for_dispatch_key")("specdec_triton::" + op, "CUDA")
assert has("computed_kernel") and not has("kernel") and not _triton._loaded
class OnCuda(torch.Tensor):
    device = torch.device("cuda", 0)
arguments = (torch.empty(0).as_subclass(OnCuda), 3)
setattr(torch.ops.specdec_triton, op, types.SimpleNamespace(default=lambda *given: served.append(given)))
_ops._first_call(op)(*arguments)
assert has("kernel") and op in _triton._loaded and served == [arguments]
"""


@pytest.mark.parametrize("op", ["build_tree", "verify"])
def test_the_first_direct_call_loads_the_triton_room(op: str):
    done = subprocess.run([sys.executable, "-c", FIRST_CALL.format(op=op)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_workspaces_name_their_bounds():
    bounds = dict(batch=2, max_nodes=8, num_q_heads=4, num_kv_heads=2, head_dim=64)
    assert sk.workspace_size("tree_attention", **bounds) > 0
    assert sk.workspace_size("advance") == 0
    words = "batch, max_nodes, num_q_heads, num_kv_heads, head_dim, [v_dim], [num_splits], [num_workers]"
    for wrong in ({"batch": 2}, bounds | {"total_nodes": 9}):  # one forgotten: too small a workspace
        with pytest.raises(ValueError, match=re.escape(f"workspace_size: bounds: expected {words} for tree_attention")):
            sk.workspace_size("tree_attention", **wrong)


RUNS = "import torch, os, specdec_kernels as sk; x = torch.ones(1, dtype=torch.int32); "


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUNS + code], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")} | environment,
    )  # fmt: skip


@pytest.mark.parametrize(("value", "on"), [("true", True), ("off", False)])
def test_switches_in_the_environment_are_words_or_numbers(value: str, on: bool):
    code = "sk.build_tree(-x - x, torch.tensor([0, 1]).int(), x, max_nodes=1)"
    done = python(code, SPECDEC_LOG=value, SPECDEC_NVTX=value, SPECDEC_CHECK=value)
    assert ("build_tree(" in done.stderr) == on
    assert ("ValueError: build_tree: parents: expected well-formed trees" in done.stderr) == on
    assert done.returncode == on


def test_what_switches_a_variable_off(monkeypatch: pytest.MonkeyPatch):
    words = {"1": True, "2": True, "yes": True, "True": True} | dict.fromkeys(
        ("", "0", " 0", "False", "no", "OFF"), False
    )
    for word, on in words.items():
        monkeypatch.setenv("SPECDEC_CHECK", word)
        assert _ops.checking() == on, word


def test_the_backend_in_the_environment_is_read_at_the_import():
    """Before an op's first call and after it the same: it is not looked at again."""
    done = python("sk.advance(x, x.clone())", SPECDEC_BACKEND="triton")
    assert "NotImplementedError: advance: backend: triton on cpu is not built" in done.stderr
    done = python("sk.advance(x, x.clone())", SPECDEC_BACKEND="cuda")
    assert re.search(r"ValueError: advance: SPECDEC_BACKEND: expected one of \[.*\], got 'cuda'", done.stderr)
    done = python("sk.advance(x, x.clone()); os.environ['SPECDEC_BACKEND'] = 'triton'; sk.advance(x, x.clone()); "
                  "sk.copy_pages(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), x, x)")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_import_leaves_dynamo_alone():
    """It takes as long as the rest of torch; torch.compile imports it when it is used."""
    done = python("import sys; assert 'torch._dynamo' not in sys.modules")
    assert done.returncode == 0, done.stderr
