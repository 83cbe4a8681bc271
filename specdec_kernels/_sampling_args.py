"""`Sampling` and the checks of the arguments that the sampling room's functions share."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._draft_tree import DraftTree

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
LOGPROBS = (None, "raw", "processed", "both")
Bias = tuple[Tensor, Tensor, Tensor]
# What `Sampling.of` takes of the host's numbers. Device tensors are not read: there the same faults set Flag.PARAMETER
# or, where a number merely switches a filter off or to its end, mean what docs/numerics.md says.
_HOST_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: 0 <= x <= torch.finfo(torch.float32).max, "a finite number >= 0"),
    "top_k": (lambda x: 0 <= x < 2**31, "an int >= 0 (0: off)"),
    "top_p": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "a number in [0, 1]"),
}


def _host_column(name: str, value: Any, dtype: torch.dtype, count: int, device: torch.device | str | None) -> Tensor:
    """[count] of Python numbers: one for all, which is filled in on the device, or a list."""
    op, one = "Sampling.of", isinstance(value, numbers.Real)
    values = [value] if one else value.tolist() if hasattr(value, "tolist") else value
    kind = numbers.Real if dtype.is_floating_point else numbers.Integral
    word = "a number" if dtype.is_floating_point else "an int"
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{op}: {name}: expected {word}, or one a request, got {value!r}")
    _ops.expect(op, name, one or len(values) == count, f"{count} values", len(values))
    within, wanted = _HOST_RANGES.get(name, (lambda x: True, ""))
    for x in values:
        if not isinstance(x, kind):
            raise TypeError(f"{op}: {name}: expected {word}, got {x!r}")
        if not within(x):
            raise ValueError(f"{op}: {name}: expected {wanted}, got {x}")
    if one:
        return torch.full((count,), value, dtype=dtype, device=device)
    return torch.tensor(list(values), dtype=dtype, device=device)


@dataclass(frozen=True)
class Sampling:
    """Per-request sampling parameters, device tensors of length B.

    temperature: float32, at most 1e-5 is greedy (lowest id among equal logits); top_k: int32, 0 is off; top_p, min_p:
    float32, 1 and 0 are off; seed, position, step: int64. Applied in the order temperature, min-p, top-k, top-p over
    what is kept; at least one token stays. `position` is the output position of the next token to emit: results depend
    on it, not on batch, row or padding. `step` counts the request's verification steps. None switches a filter off.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    seed: Tensor | None = None
    position: Tensor | None = None
    step: Tensor | None = None

    @classmethod
    def of(
        cls,
        num_requests: int,
        *,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] | None = None,
        min_p: float | Sequence[float] | None = None,
        seed: int | Sequence[int] = 0,
        position: int | Sequence[int] = 0,
        step: int | Sequence[int] = 0,
        device: torch.device | str | None = None,
    ) -> Sampling:
        """From Python numbers: one for all requests, or a list with one for each; tensors are taken as they are.

        ValueError for a number outside its range: temperature finite and >= 0, top_k >= 0, top_p in (0, 1], min_p in
        [0, 1]; TypeError for what is no number, or no integer where one is wanted. Tensors are not read.
        """

        def column(name: str, value: Any, dtype: torch.dtype) -> Any:
            if value is None:
                return None
            if not isinstance(value, Tensor):
                return _host_column(name, value, dtype, num_requests, device)
            got = len(value) if value.dim() == 1 else f"shape {list(value.shape)}"
            _ops.expect("Sampling.of", name, value.shape == (num_requests,), f"{num_requests} values", got)
            return value.to(dtype=dtype, device=device)

        return cls(
            temperature=column("temperature", temperature, torch.float32),
            top_k=column("top_k", top_k, torch.int32),
            top_p=column("top_p", top_p, torch.float32),
            min_p=column("min_p", min_p, torch.float32),
            seed=column("seed", seed, torch.int64),
            position=column("position", position, torch.int64),
            step=column("step", step, torch.int64),
        )


_REQUEST_COLUMNS = [
    *(("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32)),
    *(("seed", torch.int64), ("position", torch.int64), ("step", torch.int64)),
]


def request_args(op: str, sampling: Sampling) -> list[Tensor | None]:
    if not isinstance(sampling, Sampling):
        raise TypeError(f"{op}: sampling: expected a Sampling, got {type(sampling).__name__}")
    _ops.expect_tensor(op, "temperature", sampling.temperature, torch.float32, 1)
    s, shape = sampling, sampling.temperature.shape
    columns = [s.top_k, s.top_p, s.min_p, s.seed, s.position, s.step]
    for (name, dtype), value in zip(_REQUEST_COLUMNS, columns, strict=True):
        if value is not None or name in ("seed", "position"):
            found = _ops.expect_tensor(op, name, value, dtype, 1).shape
            if found != shape:  # messages are formatted when they are needed: this runs on every step
                _ops.expect(op, name, False, f"shape {list(shape)}", list(found))
    return [s.temperature, *columns]


def draft_sampling_args(op: str, sampling: Sampling | None, requests: int) -> list[Tensor | None]:
    """Temperature and filters that shaped the laws drafts were drawn from: seeds and positions may be missing."""
    if sampling is None:
        return [None] * 4
    if not isinstance(sampling, Sampling):
        raise TypeError(f"{op}: draft_sampling: expected a Sampling, got {type(sampling).__name__}")
    index_arg(op, "draft_sampling temperature", sampling.temperature, requests, torch.float32)
    columns = [sampling.top_k, sampling.top_p, sampling.min_p]
    for (name, dtype), value in zip(_REQUEST_COLUMNS, columns, strict=False):
        index_arg(op, f"draft_sampling {name}", value, requests, dtype)
    return [sampling.temperature, *columns]


def tree_arg(op: str, tree: DraftTree, nodes: int, requests: int | None = None) -> None:
    """`tree` is one, of so many nodes, and of the requests that `sampling` has."""
    if not hasattr(tree, "cu_nodes"):
        raise TypeError(f"{op}: tree: expected a DraftTree (build_tree, chain_tree), got {type(tree).__name__}")
    got = tree.cu_nodes.shape[0] - 1
    _ops.expect(op, "tree", got >= 0, "cu_nodes of shape [B + 1]", list(tree.cu_nodes.shape))
    if requests is not None and got != requests:
        _ops.expect(op, "tree", False, f"{requests} requests as in sampling", got)
    index_arg(op, "tree", tree.parents, nodes)


def edit_args(op: str, allowed: Tensor | None, bias: Bias | None) -> list[Tensor | None]:
    if allowed is not None:
        _ops.expect_tensor(op, "allowed", allowed, torch.int32, 2)
    if bias is None:
        return [allowed, None, None, None]
    _ops.expect(op, "bias", len(bias) == 3, "(cu_entries, ids, values)", f"{len(bias)} entries")
    for name, tensor, dtype in zip(
        ("cu_entries", "ids", "values"), bias, (torch.int32, torch.int32, torch.float32), strict=True
    ):
        _ops.expect_tensor(op, f"bias {name}", tensor, dtype, 1)
    return [allowed, *bias]


def index_arg(op: str, name: str, value: Tensor | None, length: int, dtype: torch.dtype = torch.int32) -> Tensor | None:
    if value is None:
        return None
    _ops.expect_tensor(op, name, value, dtype, 1)
    if value.shape[0] != length:
        _ops.expect(op, name, False, f"{length} entries", value.shape[0])
    return value


def logits_arg(op: str, name: str, logits: Tensor) -> Tensor:
    _ops.expect_tensor(op, name, logits, LOGITS, 2)
    if not logits.shape[1]:
        _ops.expect(op, name, False, "at least one column", list(logits.shape))
    return logits


def vocab_arg(op: str, vocab_size: int | None, columns: int, *, shard: bool = False) -> int:
    """Ids that exist, of `columns`; on a vocabulary's shard the whole vocabulary's, which may be more."""
    if vocab_size is None:
        return columns
    wanted, most = ("at least 1 id", None) if shard else (f"1 to {columns} ids, the logits' columns", columns)
    _ops.expect_int(op, "vocab_size", vocab_size, 1, wanted, most)
    return vocab_size
