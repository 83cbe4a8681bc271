"""Runs the package's CUDA and Triton kernels on the CPU (docs/cuda_on_cpu.md).

    backend            what runs                                         checks
    emulated           csrc/**/*_cuda.cu compiled by g++ (path A)        races, bounds, initialisation, divergence
    ptx                nvcc's PTX of the same files, translated (path B) the same, on the code that nvcc emitted
    triton_interpret   the Triton twins in Triton's interpreter          NumPy semantics
    triton_ptx         the Triton twins' PTX, translated                 as ptx

`register()` makes them values of `backend=`; `supports(op, backend)` says which ops each can run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specdec_kernels import _ops
from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.library import Config, EmulationError, Library

__all__ = [
    "BACKENDS",
    "Config",
    "EmulationError",
    "choose",
    "library",
    "missing",
    "register",
    "run_op",
    "suite_library",
    "supports",
    "unchecked",
]

BACKENDS = ("emulated", "ptx", "triton_interpret", "triton_ptx")
_chosen = ["race", "80", ""]  # variant of `emulated`, architecture of `ptx`, part of the paths of the CUDA files


def choose(variant: str, ptx_arch: str, kernels: str = "") -> None:
    """What `register` builds (pytest's --emulated-variant, --ptx-arch, --kernels). With asan there is path A alone: the
    other backends are judged by the runtime's own checks, which that build leaves out."""
    if variant not in ("race", "asan") or ptx_arch not in ("80", "90a"):
        raise ValueError(f"choose: expected race or asan, and 80 or 90a, got {variant!r} and {ptx_arch!r}")
    paths = [path.relative_to(build.ROOT).as_posix() for path in build.cuda_sources()]
    if not any(kernels in path for path in paths):
        raise ValueError(f"choose: kernels: expected a part of one of {paths}, got {kernels!r}")
    _chosen[:] = variant, ptx_arch, kernels


@functools.cache
def library(
    variant: str = "race",
    ptx_arch: str | None = None,
    defines: tuple[str, ...] = (),
    ptx: tuple[build.Ptx, ...] = (),
    ops: frozenset[str] = frozenset(),
) -> Library:
    """Build and load the CUDA files of the package.

    variant: "race", "plain", "planted" or "asan" (tests/cuda_on_cpu/build.py). ptx_arch: also carry the translated PTX
    of every file for this architecture ("80", "90a"); `ptx` says so file by file. defines: macros for path A. ops: only
    the files that implement one of them, and the files beside those that implement none (parts of an op's kernel).
    """
    name = "_".join(["specdec_emulated", variant, *([f"sm{ptx_arch}"] if ptx_arch else [])])
    name += "".join("_" + re.sub(r"\W", "_", define) for define in defines)
    sources = build.cuda_sources()
    rooms = {path.parent for path in sources if not ops or ops & ops_in(path)}
    sources = [path for path in sources if path.parent in rooms and (not ops or not ops_in(path) or ops & ops_in(path))]
    if ptx_arch:
        ptx = tuple(build.Ptx(source, build.arch_of(source, ptx_arch), defines) for source in sources)
    path = build.emulated_library(sources, name, variant, ptx, defines)
    _ops.define_namespace(name)
    torch.ops.load_library(str(path))
    loaded = Library(path)
    loaded.namespace = name
    if ptx_arch:
        loaded.emulated_ptx_architecture(int(ptx_arch.removesuffix("a")))
    # Other builds do not report ordinary stores: what reads behind them would look uninitialised.
    loaded.config = dataclasses.replace(loaded.config, checks=variant in ("race", "planted"))
    return loaded


def run_op(loaded: Library, op: str, *args: Any) -> None:
    """Run one op of a loaded library with its tensors as the only global memory; raises EmulationError on any fault."""
    overload = getattr(getattr(torch.ops, loaded.namespace), op).default
    named = []
    for argument, value in zip(overload._schema.arguments, args):
        writable = argument.alias_info is not None and argument.alias_info.is_write
        for i, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(one, torch.Tensor):
                named.append((argument.name + (f"[{i}]" if isinstance(value, (list, tuple)) else ""), one, writable))
    with loaded.tensors(named):
        overload(*args)


def _has_kernel(namespace: str, op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{op}", "CPU")


@functools.cache
def missing(backend: str) -> str | None:
    """Why `backend` cannot run here at all; None if it can."""
    if backend != "emulated" and _chosen[0] == "asan":
        return "asan builds are of path A"
    if backend in ("emulated", "ptx"):
        if reason := build.missing():
            return reason
        return "no nvcc" if backend == "ptx" and build.nvcc() is None else None
    from tests.cuda_on_cpu import triton_backends

    return triton_backends.missing()


_front: list[torch.library.Library] = []


@functools.cache
def register() -> tuple[str, ...]:
    """Build what can be built and register it with the package; returns the backends that exist now."""
    found = tuple(backend for backend in BACKENDS if missing(backend) is None)
    for backend in found:
        namespace = f"specdec_{backend}"
        front = _ops.define_namespace(namespace)
        _front.append(front)
        for op in _ops.SCHEMAS:
            if function := _implementation(backend, op):
                front.impl(op, function, "CPU")
        _ops.register_backend(backend, namespace)
    return found


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Kernels run without the checks of races and bounds: for many requests that differ in nothing the checks see, of
    which some have run with them. Several times as fast; results alone are judged."""
    from tests.cuda_on_cpu import triton_backends

    before = triton_backends.config
    triton_backends.config = dataclasses.replace(before, checks=False)
    try:
        with suite_library().configured(checks=False) if missing("emulated") is None else contextlib.nullcontext():
            yield
    finally:
        triton_backends.config = before


def suite_library() -> Library:
    """What backends `emulated` and `ptx` run."""
    variant, ptx_arch, kernels = _chosen
    wanted = [path for path in build.cuda_sources() if kernels in path.relative_to(build.ROOT).as_posix()]
    ops = frozenset().union(*map(ops_in, wanted)) if kernels else frozenset()
    return library(variant, ptx_arch if missing("ptx") is None else None, ops=ops)


def _implementation(backend: str, op: str) -> Any:
    if backend in ("emulated", "ptx"):
        loaded = suite_library()
        if not _has_kernel(loaded.namespace, op):
            return None

        def run(*args: Any) -> None:
            with loaded.configured(path="ptx" if backend == "ptx" else "source"):
                run_op(loaded, op, *args)

        return run
    from tests.cuda_on_cpu import triton_backends

    return triton_backends.implementation(backend, op)


@functools.cache
def ops_with_source(backend: str) -> frozenset[str]:
    """Ops that have a CUDA (or Triton) implementation in the tree; told from the sources, without building."""
    if backend.startswith("triton"):
        return frozenset(importlib.import_module("specdec_kernels._triton").OPS)
    return frozenset().union(*(ops_in(path) for path in build.cuda_sources()))


def ops_in(source: Path) -> frozenset[str]:
    """Ops that a CUDA file registers."""
    return frozenset(re.findall(r'm\.impl\("(\w+)"', source.read_text()))


def supports(op: str, backend: str) -> bool:
    """Whether `op` has a kernel that `backend` can run; builds at the first op that has one."""
    return op in ops_with_source(backend) and backend in register() and _has_kernel(f"specdec_{backend}", op)
