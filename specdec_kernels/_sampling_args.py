"""`Sampling` and the checks of the arguments that the sampling room's functions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels import _ops

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
LOGPROBS = (None, "raw", "processed", "both")
Bias = tuple[Tensor, Tensor, Tensor]


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
        """From Python numbers: one for all requests, or a list with one for each."""

        def column(name, value, dtype):
            if value is None:
                return None
            if isinstance(value, (int, float)):
                return torch.full((num_requests,), value, dtype=dtype, device=device)
            tensor = torch.as_tensor(value).to(dtype=dtype, device=device)
            got = len(tensor) if tensor.dim() == 1 else f"shape {list(tensor.shape)}"
            _ops.expect("Sampling", name, tensor.shape == (num_requests,), f"{num_requests} values", got)
            return tensor

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
    wanted, most = ("at least 1 id", vocab_size) if shard else (f"1 to {columns} ids, the logits' columns", columns)
    _ops.expect(op, "vocab_size", 1 <= vocab_size <= most, wanted, vocab_size)
    return vocab_size
