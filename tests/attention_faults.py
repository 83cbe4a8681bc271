"""Faulty backends: the shipped kernels with a planted bug of the mask, and the right kernel fed as known bugs feed it.

The CPU op is compiled once a bug (-DSPECDEC_PLANTED_BUG); the CUDA kernel on the CPU runtime plants at run time.

Each lives in a torch namespace of its own, so the suite runs on it in the same process like on any other backend.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from specdec_kernels import _ops
from tests import cuda_on_cpu
from tests.conftest import Backend
from tests.cuda_on_cpu.library import Library

CSRC = Path(__file__).parents[1] / "csrc"
KERNEL = CSRC / "attention" / "attention_cpu.cpp"  # the only file that reads the mask
# Enumerators of csrc/common/planted.h.
MUTANTS = {"MASK_IGNORED": 19, "WORD_OFF_BY_ONE": 20, "BIT_ORDER": 21, "WINDOW_BY_SLOT": 22}


REGISTRATION = """
#include <torch/csrc/stable/library.h>
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m) _STABLE_TORCH_LIBRARY_IMPL({namespace}, k, m, C10_UID)
#include "{source}"
"""


def _compile(source: Path, target: Path, flags: list[str]) -> Path:
    includes = [f"-I{path}" for path in (CSRC, KERNEL.parent, *cpp_extension.include_paths())]
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w",
               "-DTORCH_TARGET_VERSION=0x020b000000000000", *flags, *includes, "-c"]  # fmt: skip
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    return target


def build_mutants(names: tuple[str, ...], folder: Path, flags: tuple[str, ...] = ()) -> dict[str, Backend]:
    """A backend of the CPU op for each of MUTANTS (any other name: the kernel as shipped)."""
    shared = [*KERNEL.parent.glob("attention_cpu_*.cpp"), *(CSRC / "common").glob("*.cpp")]
    with ThreadPoolExecutor(2) as pool:
        objects = [pool.submit(_compile, p, folder / f"{p.stem}.o", list(flags)) for p in shared]
        kernels = {}
        namespaces = {name: _namespace(name) for name in names}
        for name in names:
            source = folder / f"{name}.cpp"
            source.write_text(REGISTRATION.format(namespace=namespaces[name], source=KERNEL))
            bug = f"-DSPECDEC_PLANTED_BUG={MUTANTS.get(name, 0)}"
            kernels[name] = pool.submit(_compile, source, folder / f"{name}.o", [*flags, bug])
    common = [str(job.result()) for job in objects]
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    backends = {}
    for name, kernel in kernels.items():
        library = folder / f"{name}.so"
        command = ["g++", "-shared", *flags, str(kernel.result()), *common, *folders, "-ltorch_cpu", "-ltorch", "-lc10"]
        subprocess.run([*command, "-o", str(library)], check=True)
        _ops.define_namespace(namespaces[name])
        torch.ops.load_library(str(library))
        backends[name] = _register(f"cpu with {name}", namespaces[name])
    return backends


def emulated_mutant(library: Library, name: str) -> Backend:
    """The CUDA kernel on the CPU runtime with one of MUTANTS ("NONE": as shipped); `library` plants at run time."""

    def call(*args: Any) -> None:
        library.emulated_plant(MUTANTS.get(name, 0))
        try:
            cuda_on_cpu.run_op(library, "tree_attention", *args)
        finally:
            library.emulated_plant(0)

    namespace = _namespace(name)
    _ops.define_namespace(namespace).impl("tree_attention", call, "CPU")
    return _register(f"emulated with {name}", namespace)


def _namespace(name: str) -> str:
    """A namespace of its own for every build: several suites build the same kernel in one session."""
    return f"specdec_fault{next(_builds)}_{name.lower()}"


_builds = itertools.count()


def _register(label: str, namespace: str) -> Backend:
    _ops.register_backend(namespace, namespace)
    return Backend(label, "cpu", namespace)


# ---- the right kernel with the arguments a known bug would give it


def _arguments(op: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.specdec, op).default._schema.arguments]


def _row_stride_of_own_size(a: dict[str, Any]) -> None:
    """TM-03: rows of request b are read at the stride its own node count would need, from the start of the buffer."""
    cu, mask = a["cu_nodes"].tolist(), a["tree_mask"]
    flat, wrong = mask.flatten(), mask.clone()
    for b in range(len(cu) - 1):
        words = -(-(cu[b + 1] - cu[b]) // 32)
        for n in range(cu[b], cu[b + 1]):
            wrong[n, :words] = flat[n * words : (n + 1) * words]
    a["tree_mask"] = wrong


def _causal_tiles_only(a: dict[str, Any]) -> None:
    """TM-08: slots behind the query's own are never reached."""
    a["tree_mask"] = _edit_bits(a, lambda bits, i: bits & ((2 << i) - 1))


def _unmasked_below_the_tile(a: dict[str, Any]) -> None:
    """TM-02: tiles of 16 slots that lie wholly below the diagonal skip the mask."""
    a["tree_mask"] = _edit_bits(a, lambda bits, i: bits | ((1 << i // 16 * 16) - 1))


def _edit_bits(a: dict[str, Any], edit: Callable[[int, int], int]) -> torch.Tensor:
    cu, mask = a["cu_nodes"].tolist(), a["tree_mask"].clone()
    width = mask.shape[1]
    for b in range(len(cu) - 1):
        for n in range(cu[b], cu[b + 1]):
            bits = sum((w & 0xFFFFFFFF) << 32 * k for k, w in enumerate(mask[n].tolist()))
            bits = edit(bits, n - cu[b])
            words = [bits >> 32 * k & 0xFFFFFFFF for k in range(width)]
            mask[n] = torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)
    return mask


def _heads_modulo(a: dict[str, Any]) -> None:
    """TM-07: query head h reads KV head h % Hkv; done by storing the KV heads in that order."""
    heads, axis = a["q"].shape[1], 2 if a["kv_layout"] == "NHD" else 1
    order = torch.arange(heads) % a["k_cache"].shape[axis]
    for name in ("k_cache", "v_cache"):
        cache = a[name]
        bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        a[name] = bits.index_select(axis, order).view(cache.dtype)
    for name in ("k_scale", "v_scale"):
        if a[name] is not None and len(a[name]) > 1:
            a[name] = a[name][order].contiguous()


def _first_table_for_all(a: dict[str, Any]) -> None:
    """BT-05: every request reads through the page table of request 0."""
    a["page_table"] = a["page_table"][:1].expand_as(a["page_table"]).contiguous()


def _lengths_of_the_first_call(a: dict[str, Any]) -> None:
    """PF-02: lengths are copied at the first call and never looked at again."""
    a["context_lens"] = _captured.setdefault(len(a["context_lens"]), a["context_lens"].clone())


_captured: dict[int, torch.Tensor] = {}
FEEDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "ROW_STRIDE": _row_stride_of_own_size,
    "CAUSAL_TILES": _causal_tiles_only,
    "TILE_BELOW": _unmasked_below_the_tile,
    "HEADS_MODULO": _heads_modulo,
    "FIRST_TABLE": _first_table_for_all,
    "STALE_LENGTHS": _lengths_of_the_first_call,
}


def feed(name: str) -> Backend:
    """The native kernel behind a faulty caller."""
    names = _arguments("tree_attention")

    def call(*args: Any) -> None:
        arguments = dict(zip(names, args))
        FEEDS[name](arguments)
        torch.ops.specdec.tree_attention.default(*arguments.values())

    namespace = _namespace(name)
    _ops.define_namespace(namespace).impl("tree_attention", call, "CPU")
    return _register(f"cpu with {name}", namespace)
