"""A user's mistake is `op: argument: expected X, got Y`, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.attention_suite import POSITIONAL, build, rng_of
from tests.attention_trees import chain, eagle26
from tests.conftest import poisoned

Arguments = dict[str, Any]
INT = torch.int32


def attention_arguments() -> Arguments:
    problem = build([eagle26(), chain(5)], [20, 3], rng_of("errors"), max_nodes=40, tail_rows=1)
    return {**{k: v for k, v in problem.tensors.items() if v is not None}, "max_nodes": 40, "kv_layout": "NHD"}


def write_arguments() -> Arguments:
    cache = lambda: torch.zeros(4, 8, 2, 64)  # noqa: E731
    return {"k": torch.zeros(3, 2, 64), "v": torch.zeros(3, 2, 64), "k_cache": cache(), "v_cache": cache(),
            "slot_mapping": torch.tensor([1, 2, 3], dtype=INT), "kv_layout": "NHD"}  # fmt: skip


def slot_arguments() -> Arguments:
    return {"page_table": torch.zeros(2, 3, dtype=INT), "context_lens": torch.zeros(2, dtype=INT),
            "cu_nodes": torch.tensor([0, 1, 2], dtype=INT), "page_size": 4, "total_nodes": 2}  # fmt: skip


def merge_arguments() -> Arguments:
    return {"out_a": torch.zeros(3, 2, 64), "lse_a": torch.zeros(3, 2), "out_b": torch.zeros(3, 2, 64),
            "lse_b": torch.zeros(3, 2)}  # fmt: skip


def wrong(op: str, argument: str, value: Any, error: type[Exception] = ValueError, named: str | None = None) -> Any:
    """A case: `argument` replaced by `value` (or by value(old)); the error names `named` (default: the argument)."""
    label = getattr(value, "__name__", None) or str(value)[:30].replace("\n", " ")
    return pytest.param(op, argument, value, error, named or argument, id=f"{op}-{argument}-{label}")


def dtype(to: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    convert = lambda t: t.to(to)  # noqa: E731
    convert.__name__ = str(to)
    return convert


def flat(t: torch.Tensor) -> torch.Tensor:
    return t.flatten()


def one_short(t: torch.Tensor) -> torch.Tensor:
    return t[:-1].contiguous()


def transposed_last(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def not_contiguous(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1)[..., 0]


def meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def halves(t: torch.Tensor) -> torch.Tensor:
    return t[..., : t.shape[-1] // 2].contiguous()


def as_list(t: torch.Tensor) -> list[Any]:
    return t.tolist()


A, W, S, M = "tree_attention", "write_kv", "slot_mapping", "merge_attention"
INDEXES = [(A, k) for k in ("page_table", "context_lens", "cu_nodes", "tree_mask")]
INDEXES += [(W, "slot_mapping"), *((S, k) for k in ("page_table", "context_lens", "cu_nodes"))]
DATA = [(A, "q"), (A, "k_cache"), (A, "v_cache"), (W, "k"), (W, "v"), (W, "k_cache"), (W, "v_cache"), (M, "out_a"),
        (M, "out_b"), (M, "lse_a"), (M, "lse_b")]  # fmt: skip
CASES = [
    *(wrong(op, k, dtype(to), TypeError) for op, k in INDEXES for to in (torch.int64, torch.float32)),
    *(wrong(op, k, not_contiguous) for op, k in INDEXES),
    *(wrong(op, k, as_list, TypeError) for op, k in INDEXES + DATA),
    *(wrong(op, k, dtype(torch.float64), TypeError) for op, k in DATA),
    *(wrong(op, k, flat) for op, k in DATA),
    *(wrong(op, k, transposed_last) for op, k in DATA),
    *(wrong(op, k, meta) for op, k in (
        (A, "k_cache"), (A, "page_table"), (A, "tree_mask"), (W, "slot_mapping"), (W, "v_cache"), (S, "cu_nodes"),
        (M, "lse_b"))),
    wrong(A, "cu_nodes", one_short),
    wrong(A, "page_table", one_short),
    wrong(A, "context_lens", one_short, named="cu_nodes"),
    wrong(A, "tree_mask", one_short),
    wrong(A, "tree_mask", torch.zeros(32, 1, dtype=INT)),
    wrong(A, "tree_mask", torch.zeros(32, 40, dtype=torch.bool), TypeError),
    wrong(A, "q", torch.zeros(32, 5, 64)),
    wrong(A, "q", halves, named="k_cache"),
    wrong(A, "q", dtype(torch.bfloat16), TypeError, named="k_cache"),
    wrong(A, "k_cache", dtype(torch.float8_e4m3fn), TypeError, named="v_cache"),
    wrong(A, "v_cache", lambda t: t[:2]),
    wrong(A, "kv_layout", "BHSD"),
    wrong(A, "max_nodes", -1),
    wrong(A, "max_nodes", 65, named="tree_mask"),
    wrong(A, "softcap", -1.0),
    wrong(A, "softcap", float("nan")),
    wrong(A, "window", -2),
    wrong(A, "window", 5, named="positions"),
    wrong(A, "num_splits", -1),
    wrong(A, "sinks", torch.zeros(2)),
    wrong(A, "sinks", torch.zeros(4, dtype=torch.bfloat16), TypeError),
    wrong(A, "k_scale", torch.zeros(3)),
    wrong(A, "v_scale", 2.0, TypeError),
    wrong(A, "v_scale", torch.zeros(2, dtype=torch.float64), TypeError),
    wrong(A, "positions", torch.zeros(3, dtype=INT)),
    wrong(A, "query_start", torch.zeros(3, dtype=INT)),
    wrong(A, "causal", torch.zeros(2, dtype=INT), TypeError),
    wrong(A, "request_order", torch.zeros(2, dtype=torch.int64), TypeError),
    wrong(A, "out", torch.zeros(32, 4, 32)),
    wrong(A, "out", torch.zeros(32, 4, 64, dtype=torch.bfloat16), TypeError),
    wrong(A, "out", torch.zeros(32, 64, 4).transpose(1, 2)),
    wrong(A, "backend", "cutlass"),
    wrong(W, "k", lambda t: t[:2], named="v"),
    wrong(W, "v", lambda t: t[:, :1]),
    wrong(W, "k_cache", dtype(torch.float16), TypeError),
    wrong(W, "slot_mapping", one_short),
    wrong(W, "k_scale", torch.zeros(5)),
    wrong(W, "kv_layout", "NDH"),
    wrong(S, "page_size", 0),
    wrong(S, "total_nodes", -1),
    wrong(S, "page_table", one_short),
    wrong(M, "out_b", one_short),
    wrong(M, "lse_a", one_short),
    wrong(M, "sinks", torch.zeros(3)),
]  # fmt: skip
MAKE = {A: attention_arguments, W: write_arguments, S: slot_arguments, M: merge_arguments}
FIRST = {
    A: POSITIONAL,
    W: ("k", "v", "k_cache", "v_cache", "slot_mapping"),
    S: ("page_table", "context_lens", "cu_nodes", "page_size"),
    M: ("out_a", "lse_a", "out_b", "lse_b"),
}


@pytest.mark.parametrize(("op", "argument", "value", "error", "named"), CASES)
def test_bad_input_is_named_before_anything_is_written(backend, op, argument, value, error, named):
    from specdec_kernels import attention

    backend.require(op)
    arguments = {k: v.to(backend.device) if isinstance(v, torch.Tensor) else v for k, v in MAKE[op]().items()}
    if op == A:
        out = poisoned(32, 4, 64, device=backend.device)
        arguments["out"] = out
    written = [t for k, t in arguments.items() if k in ("out", "k_cache", "v_cache")]
    before = [t.clone() for t in written]
    arguments |= backend.kwargs
    arguments[argument] = value(arguments.get(argument)) if callable(value) else value
    with pytest.raises(error, match=rf"^{op}: {named}: expected .+, got .+"):
        getattr(attention, op)(*[arguments.pop(k) for k in FIRST[op]], **arguments)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(written, before))


@pytest.mark.parametrize("dims", [(576, 512), (512, 512), (272, 272), (1, 1), (72, 72)])
def test_unsupported_head_dims_name_the_supported_set(backend, dims):
    from specdec_kernels.attention import tree_attention

    backend.require(A)
    arguments = attention_arguments()
    arguments |= {"q": torch.zeros(32, 4, dims[0]), "k_cache": torch.zeros(3, 16, 2, dims[0]),
                  "v_cache": torch.zeros(3, 16, 2, dims[1])}  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"^tree_attention: q: expected .*\(192, 128\).* got "):
        tree_attention(*[arguments.pop(k).to(backend.device) for k in POSITIONAL], **arguments, **backend.kwargs)


@pytest.mark.parametrize(("position", "value", "named"), [
    (0, torch.zeros(32, 4, 64, dtype=torch.float64), "q"),
    (0, torch.zeros(32, 5, 64), "q"),
    (1, torch.zeros(3, 16, 2, 32), "k_cache"),
    (2, torch.zeros(3, 8, 2, 64), "v_cache"),
    (3, torch.zeros(2, 3, dtype=torch.int64), "page_table"),
    (4, torch.zeros(2, dtype=torch.float32), "context_lens"),
    (5, torch.zeros(2, dtype=INT), "cu_nodes"),
    (6, torch.zeros(31, 2, dtype=INT), "tree_mask"),
    (11, torch.zeros(3), "sinks"),
    (23, torch.zeros(32, 4, 32), "out"),
    (24, torch.zeros(32, 3), "lse"),
])  # fmt: skip
def test_the_op_below_checks_too(position, value, named):
    """torch.ops.specdec.tree_attention is called from other engines without our wrapper: ValueError, no crash."""
    from specdec_kernels import _ops

    if not _ops.supports(A):
        pytest.skip(f"{A}: not built for backend cpu")
    a = attention_arguments()
    arguments = [*[a[k] for k in POSITIONAL], *[None] * 8, 40, 0.125, 0.0, -1, "NHD", 0, False, None]
    arguments += [torch.zeros(32, 4, 64), torch.zeros(32, 4)]
    torch.ops.specdec.tree_attention.default(*arguments)
    assert arguments[-2].any()
    arguments[position] = value
    with pytest.raises(ValueError, match=rf"^tree_attention: {named}: expected .+, got .+"):
        torch.ops.specdec.tree_attention.default(*arguments)
