"""The Triton twins on the CPU: their compiled PTX on the runtime, and Triton's interpreter in a process of its own.

triton_ptx installs a driver for a GPU that is not there (sm_80): Triton specialises, compiles and caches as it would,
and our launcher runs the PTX of the result. Host code and kernels are untouched.

triton_interpret needs TRITON_INTERPRET=1 before Triton is imported, hence the second process (interpret_worker.py).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from specdec_kernels import _ops
from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.library import Config, EmulationError, Library

CAPABILITY = 80
MAX_SHARED = 163 << 10  # bytes a block may have on sm_80
_FORMATS = {"i1": "?", "u1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I",
            "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d"}  # fmt: skip

config = Config()  # of the next triton_ptx launches
_declared: list[tuple[str, torch.Tensor, bool]] = []  # arguments of the op that is running


def missing() -> str | None:
    """Why the Triton backends cannot run here; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "no triton"
    return build.missing()


# ------------------------------------------------------------------ compiled PTX
class _Kernel:
    """What the driver hands to Triton as a loaded function: the library that holds the translated PTX."""

    def __init__(self, name: str, ptx: str, shared: int):
        self.name, self.shared, self.library = name, shared, Library(build_ptx(ptx, name))


def build_ptx(ptx: str, name: str) -> Path:
    from tests.cuda_on_cpu.ptx.compile import library_from_ptx

    return library_from_ptx(ptx, name)


class _Launcher:
    """Replaces the launcher that Triton compiles: packs the parameters and runs the grid."""

    def __init__(self, src: Any, metadata: Any):
        self.types = list(src.signature.values())
        self.threads = metadata.num_warps * 32
        if getattr(metadata, "global_scratch_size", 0):
            raise NotImplementedError("Triton global scratch memory is not emulated")

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, kernel: _Kernel, *rest: Any) -> None:
        arguments = rest[-len(self.types) :] if self.types else ()
        packed, tensors = b"", []
        for kind, value in zip(self.types, arguments):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                code, number = "Q", value.data_ptr() if isinstance(value, torch.Tensor) else int(value or 0)
                tensors += [("temporary", value, True)] if isinstance(value, torch.Tensor) else []
            else:
                code, number = _FORMATS[kind], value
            size = struct.calcsize(code)
            packed += b"\0" * (-len(packed) % size) + struct.pack(code, number)
        packed += b"\0" * (-len(packed) % 8) + b"\0" * 16  # global and profile scratch pointers
        kernel.library.config = config
        declared = {t.data_ptr() for _, t, _ in _declared}
        named = _declared + [one for one in tensors if one[1].data_ptr() not in declared]
        three = build_uint3
        with kernel.library.tensors(named):
            done = kernel.library.emulated_launch_entry(
                kernel.name.encode(), three(grid_x, grid_y, grid_z), three(self.threads, 1, 1), kernel.shared, packed,
                len(packed),
            )  # fmt: skip
            assert done == 0, f"{kernel.name}: no such PTX entry"


def build_uint3(x: int, y: int, z: int) -> Any:
    import ctypes

    return (ctypes.c_uint32 * 3)(x, y, z)


class _Utils:
    """The part of Triton's driver utilities that a launch needs."""

    def __init__(self) -> None:
        self.ptx_path: Path | None = None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED, "multiprocessor_count": 4, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, _Kernel, int, int, int]:
        assert self.ptx_path is not None
        return None, _Kernel(name, self.ptx_path.read_text(), shared), 0, 0, 1024

    def unload_module(self, module: None) -> None:
        return None


class _Driver:
    """A driver for an sm_80 that is this CPU."""

    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils = _Utils()
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device=0: (CAPABILITY // 10, CAPABILITY % 10)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return SimpleNamespace(current_device=lambda: 0, synchronize=lambda: None)

    def on_load(self, module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
        """Triton's load hook: remembers where the PTX of the kernel about to be loaded lies."""
        self.utils.ptx_path = Path(metadata_group[f"{name}.ptx"])


@functools.cache
def driver() -> _Driver:
    """Install the driver (once a process)."""
    import triton
    from triton.runtime.driver import driver as active

    os.environ.setdefault("TRITON_CACHE_DIR", str(build.BUILD / "triton_cache"))
    installed = _Driver()
    active.set_active(installed)
    triton.knobs.runtime.kernel_load_start_hook.add(installed.on_load)
    return installed


def _run_ptx(op: str, *args: Any) -> None:
    driver()
    room = importlib.import_module("specdec_kernels._triton")
    module = importlib.import_module(f"specdec_kernels._triton.{room.OPS[op]}")
    _declared[:] = named_tensors(op, args)
    try:
        getattr(module, f"impl_{op}")(*args)
    finally:
        _declared.clear()


def named_tensors(op: str, args: Sequence[Any]) -> list[tuple[str, torch.Tensor, bool]]:
    """(argument name, tensor, mutated) of a call, lists flattened."""
    schema = getattr(torch.ops.specdec_triton, op).default._schema
    found = []
    for argument, value in zip(schema.arguments, args):
        writable = argument.alias_info is not None and argument.alias_info.is_write
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, torch.Tensor):
                found.append((argument.name, one, writable))
    return found


# ------------------------------------------------------------------ interpreter
@functools.cache
def _worker() -> subprocess.Popen:
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "tests.cuda_on_cpu.interpret_worker"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=build.ROOT, env=environment
    )  # fmt: skip
    atexit.register(process.kill)
    return process


class Float8(NamedTuple):
    """A float8 tensor on its way to another process: torch does not pickle its storage."""

    bits: torch.Tensor
    dtype: torch.dtype


def portable(value: Any) -> Any:
    """`value` (tensors and lists of them) so that it can be pickled; `restored` undoes it."""
    if isinstance(value, torch.Tensor) and "float8" in str(value.dtype):
        return Float8(value.view(torch.uint8), value.dtype)
    return [portable(one) for one in value] if isinstance(value, (list, tuple)) else value


def restored(value: Any) -> Any:
    if isinstance(value, Float8):
        return value.bits.view(value.dtype)
    return [restored(one) for one in value] if isinstance(value, (list, tuple)) else value


def _run_interpreted(op: str, *args: Any) -> None:
    """Send the call to the worker and copy what it mutated back."""
    worker = _worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    pickle.dump((op, portable(args)), worker.stdin)
    worker.stdin.flush()
    try:
        failure, mutated = pickle.load(worker.stdout)
        mutated = restored(mutated)
    except EOFError:
        raise EmulationError(f"{op}: the interpreter process ended") from None
    if failure is not None:
        raise failure
    for (_, tensor, writable), result in zip(named_tensors(op, args), mutated):
        if writable:
            tensor.copy_(result)


def implementation(backend: str, op: str) -> Callable[..., None] | None:
    """The function to register for `op`, or None if it has no Triton twin."""
    room = importlib.import_module("specdec_kernels._triton")
    if op not in room.OPS or op not in _ops.SCHEMAS:
        return None
    return functools.partial(_run_ptx if backend == "triton_ptx" else _run_interpreted, op)
