"""What the tests of CUDA kernels share: a comparison with the CPU op, bit for bit (their axis: the `gpu` fixture)."""

from __future__ import annotations

from typing import Any

import torch

import specdec_kernels as sk
from tests.conftest import Backend


def place(value: Any, device: str) -> Any:
    """Tensors of a value, of a tuple or of a `Sampling`, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, sk.Sampling):
        return sk.Sampling(**{name: place(column, device) for name, column in vars(value).items()})
    if isinstance(value, tuple):
        moved = [place(one, device) for one in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


def same(gpu: Backend, op: str, *arguments: Any, native: dict[str, Any] | None = None, **options: Any) -> Any:
    """The op on the GPU path writes what the CPU op writes, bit for bit (+0 and -0 are one logit); returns it.

    native: options that the CPU op gets instead.
    """
    gpu.require(op)
    right = getattr(sk, op)(*arguments, **(options | (native or {})), backend="native")
    moved = {name: place(value, gpu.device) for name, value in options.items()}
    found = getattr(sk, op)(*(place(value, gpu.device) for value in arguments), **moved, **gpu.kwargs)
    for name, a, b in zip(right._fields, found, right, strict=True):
        if b is None:
            assert a is None
        else:
            wrong = (a.cpu() != b).nonzero().tolist()
            assert not wrong, (name, wrong, a, b)
    return found
