"""A built library of the runtime as Python sees it: configuration, tensors, errors, launches."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SCHEDULES = ("sequential", "reverse", "random", "priority")
LANDINGS = ("late", "early", "random")
PATHS = ("source", "ptx")


class EmulationError(RuntimeError):
    """What the checks found while a kernel ran; one line a fault, each with its kernel line."""


@dataclass(frozen=True)
class Config:
    """How kernels run. `schedule` and `landing` are exercised by seeds; `resident_blocks` blocks interleave."""

    schedule: str = "sequential"
    landing: str = "late"
    path: str = "source"
    seed: int = 1
    resident_blocks: int = 1
    preempt: int = 0
    checks: bool = True
    hopper: bool = False  # whether ops take their kernels for sm_90a


class Library:
    """Wraps the C interface of one shared library."""

    def __init__(self, path: Path):
        self.path = path
        self._c = ctypes.CDLL(str(path))
        self._c.emulated_error.restype = ctypes.c_char_p
        self._c.emulated_error_count.restype = ctypes.c_size_t
        self._c.emulated_launch_count.restype = ctypes.c_uint64
        self._c.emulated_tensor_copies.restype = ctypes.c_uint64
        self._c.emulated_last_kernel.restype = ctypes.c_char_p
        self.config = Config()
        self.namespace = ""  # of the torch ops it carries

    def __getattr__(self, name: str) -> object:
        return getattr(self._c, name)

    @contextlib.contextmanager
    def configured(self, **changes: object) -> Iterator[None]:
        """Run with other settings: `with library.configured(schedule="random", seed=3): ...`."""
        before = self.config
        self.config = replace(before, **changes)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.config = before

    @contextlib.contextmanager
    def refusing(self, part: str) -> Iterator[None]:
        """Launches of kernels with `part` in their name fail, as where the device has no code of them."""
        self._c.emulated_refuse_kernels(part.encode())
        try:
            yield
        finally:
            self._c.emulated_refuse_kernels(b"")

    def apply(self) -> None:
        c = self.config
        self._c.emulated_configure(
            SCHEDULES.index(c.schedule), LANDINGS.index(c.landing), PATHS.index(c.path), ctypes.c_uint64(c.seed),
            ctypes.c_uint32(c.resident_blocks), ctypes.c_uint32(c.preempt), int(c.checks),
        )  # fmt: skip
        self._c.emulated_hopper(int(c.hopper))

    @contextlib.contextmanager
    def tensors(self, named: Sequence[tuple[str, torch.Tensor, bool]]) -> Iterator[None]:
        """Register (name, tensor, writable) as the only global memory, run, and raise EmulationError on faults."""
        self.apply()
        self._c.emulated_clear_errors()
        self._c.emulated_clear_tensors()
        for name, tensor, writable in named:
            low, size = extent(tensor)
            self._c.emulated_register_tensor(ctypes.c_void_p(low), ctypes.c_size_t(size), int(writable), name.encode())
        try:
            yield
        finally:
            self._c.emulated_clear_tensors()
        if errors := self.errors():
            raise EmulationError("\n".join(errors))

    def errors(self) -> list[str]:
        return [self._c.emulated_error(ctypes.c_size_t(i)).decode() for i in range(self._c.emulated_error_count())]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte a (possibly strided) tensor may touch, and the bytes to its last element's end."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), (span + 1) * tensor.element_size()
