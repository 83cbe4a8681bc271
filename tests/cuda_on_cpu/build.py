"""Compiles the emulated libraries into build/cuda_on_cpu, redoing only what changed.

    variant   kernel files                       runtime            for
    race      -fsanitize=thread, own callbacks   plain              every test (path A with all checks), and path B
    plain     as they are                        plain              schedule sweeps
    planted   as race, with the planted bugs     plain              showing that each bug is caught
    asan      -fsanitize=address,undefined       the same           the long suite

The race variant is not linked with libtsan: runtime/hooks.cpp defines the callbacks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "cuda_on_cpu"

COMMON = ["-std=c++20", "-g", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable", "-fPIC", "-fno-strict-aliasing",
          "-ffp-contract=off", "-fno-gnu-unique", "-march=native", "-fno-var-tracking"]  # fmt: skip
FEW = "SPECDEC_FEW_INSTANCES"  # a few template instances of each kernel: what CI compiles
VARIANTS = {
    "race": (["-O1", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1"], ["-O2"]),
    "planted": (
        ["-O1", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "-DSPECDEC_PLANTED_AT_RUN_TIME"],
        ["-O2"],
    ),
    "plain": (["-O2"], ["-O2"]),
    "asan": (["-O1", "-fsanitize=address,undefined", "-fno-sanitize=vptr"],) * 2,
}


class BuildError(RuntimeError):
    """A compiler refused a file; the text is its first errors."""


def cuda_include() -> Path | None:
    """Headers of the CUDA toolkit (vector_types.h), or None."""
    homes = [os.environ.get("CUDA_HOME", "").strip(":"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.insert(1, str(Path(nvcc).resolve().parents[1]))
    for home in homes:
        if home and Path(home, "include", "vector_types.h").exists():
            return Path(home, "include")
    return None


def nvcc() -> str | None:
    """The CUDA compiler, or None."""
    include = cuda_include()
    return str(include.parent / "bin" / "nvcc") if include and (include.parent / "bin" / "nvcc").exists() else None


def missing() -> str | None:
    """Why nothing can be emulated on this machine; None if all is there."""
    if os.uname().machine != "x86_64":
        return f"the fiber switch is written for x86_64, this is {os.uname().machine}"
    if shutil.which("g++") is None:
        return "no g++"
    return None if cuda_include() else "no CUDA headers (vector_types.h)"


@functools.cache
def torch_flags() -> tuple[list[str], list[str]]:
    """Include flags and link flags of the running torch's stable ABI."""
    import torch
    from torch.utils import cpp_extension

    library = Path(torch.__file__).parent / "lib"
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    return includes + ["-DTORCH_TARGET_VERSION=0x020b000000000000"], [f"-L{library}", "-ltorch_cpu", "-lc10"]


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """One maker of `target` at a time: test processes that start together share the work file by file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(target.suffix + ".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: list[str]) -> str:
    """Run a compiler; its output, or BuildError with its first errors."""
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no sanitizer in the compiler
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise BuildError(
            f"{Path(command[-1]).name if command else ''}: " + "\n".join(errors[:8]) + "\n" + " ".join(command)
        )
    return done.stdout


def _fresh(target: Path, command: list[str]) -> bool:
    """Whether `target` was made by this very command and is newer than every file it was made from."""
    note, depfile = target.with_suffix(target.suffix + ".cmd"), target.with_suffix(target.suffix + ".d")
    if not (target.exists() and note.exists() and note.read_text() == " ".join(command)):
        return False
    made = target.stat().st_mtime
    # g++ writes "target: files", nvcc "target : files"
    names = depfile.read_text().replace("\\\n", " ").partition(": ")[2].split() if depfile.exists() else command
    paths = [Path(name) for name in names if not name.startswith("-")]
    return all(path.exists() and path.stat().st_mtime <= made for path in paths if depfile.exists() or path.is_file())


def make(target: Path, command: list[str], depfile: bool = False) -> Path:
    """Run `command` (which writes `target`) unless it is up to date."""
    if depfile:
        command = [*command, "-MMD", "-MF", str(target.with_suffix(target.suffix + ".d"))]
    with locked(target):
        if not _fresh(target, command):
            note = target.with_suffix(target.suffix + ".cmd")
            note.unlink(missing_ok=True)  # a compiler that is stopped leaves half a file
            start = time.monotonic()
            run(command)
            with open(BUILD / "seconds.txt", "a") as log:  # what a cold build spends its time on
                log.write(f"{time.monotonic() - start:.1f} {os.path.relpath(target, BUILD)}\n")
            note.write_text(" ".join(command))
    return target


def compile_cpp(source: Path, target: Path, flags: list[str]) -> Path:
    """One translation unit to an object file; .cu files are read as C++."""
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}", f"-isystem{cuda_include()}"]
    return make(
        target, ["g++", *COMMON, *flags, *include, "-c", "-o", str(target), "-x", "c++", str(source)], depfile=True
    )


def torch_header(folder: Path, flags: list[str]) -> list[str]:
    """Flags that include torch's stable ABI precompiled with `flags`: a third of the time of a small CUDA file. With
    another compiler or flag g++ would read the text; another torch has another name, as g++ does not look at it."""
    import torch

    header = folder / f"torch_{torch.__version__}.h"
    with locked(header):
        if not header.exists():
            header.write_text("#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>\n")
    target = folder / f"{header.name}.gch"
    make(target, ["g++", *COMMON, *flags, "-x", "c++-header", str(header), "-o", str(target)], depfile=True)
    return ["-include", str(header)]


def parallel(tasks: list) -> list:
    """Run thunks on all CPUs (the work is in compiler processes)."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


def runtime_objects(variant: str) -> list:
    """Thunks that compile the runtime; race and plain share one build of it."""
    kind = "asan" if variant == "asan" else "plain"
    flags = [*VARIANTS[variant][1], "-fvisibility=hidden"]
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    return [functools.partial(compile_cpp, s, BUILD / "runtime" / kind / f"{s.stem}.o", flags) for s in sources]


@dataclass(frozen=True)
class Ptx:
    """Path B of one CUDA file: nvcc's PTX for `arch` ("80", "90a"), translated.

    `defines` are macros for nvcc (planted bugs); `entries`, a pattern of mangled names, keeps the other kernels out.
    """

    source: Path
    arch: str
    defines: tuple[str, ...] = ()
    entries: str = ""


def emulated_library(
    sources: list[Path], name: str, variant: str = "race", ptx: Sequence[Ptx] = (), defines: tuple[str, ...] = ()
) -> Path:
    """Build `sources` (CUDA files) with the runtime into one library.

    `name` is also the torch namespace its ops are registered in. What `ptx` names is linked in as well, so that the
    library runs either path. `defines` are macros for the kernel files (planted bugs).
    """
    from tests.cuda_on_cpu.ptx import compile as ptx_compile

    folder = BUILD / name / key_of(defines)
    flags = [*VARIANTS[variant][0], "-DSPECDEC_EMULATED", f"-DSPECDEC_EMULATED_LIBRARY={name}", *torch_flags()[0]]
    flags += [f"-D{define}" for define in (*defines, FEW)]
    flags += torch_header(folder, flags)
    tasks = [functools.partial(compile_cpp, s, folder / f"{s.stem}.o", flags) for s in sources]
    tasks += [functools.partial(ptx_compile.object_from_cuda, one) for one in ptx]
    runtime = runtime_objects(variant)
    # Compile the long ones first, but link the runtime first: of an inline function that both have, the linker keeps
    # the first copy, and the runtime must not call an instrumented one.
    done = parallel(tasks + runtime)
    objects = [str(path) for path in done[len(tasks) :] + done[: len(tasks)]]
    sanitize = ["-fsanitize=address,undefined"] if variant == "asan" else []
    target = folder / f"lib{name}.so"
    link = ["g++", "-shared", "-Wl,-Bsymbolic", *sanitize, "-o", str(target), *objects, *torch_flags()[1], "-ldl"]
    return make(target, link)


def key_of(defines: tuple[str, ...]) -> str:
    """Folder of a set of macros."""
    return hashlib.sha256(" ".join(defines).encode()).hexdigest()[:8] if defines else "sound"


def cuda_sources() -> list[Path]:
    """Every CUDA file of the package, by the patterns of setup.py."""
    return sorted(path for pattern in ("*_cuda.cu", "*_sm90.cu") for path in (ROOT / "csrc").rglob(pattern))


def arch_of(source: Path, arch: str) -> str:
    """The architecture to compile `source` for: `arch`, but wgmma exists on sm_90a alone."""
    return "90a" if source.stem.endswith("_sm90") else arch
