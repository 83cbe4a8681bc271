"""From CUDA files (nvcc -ptx) or PTX text to object files and libraries of the runtime."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.ptx.translate import translate

FLAGS = ["-Og", "-g0", "-Wno-unused-but-set-variable", "-Wno-unused-label", "-Wno-sign-compare"]


def ptx_from_cuda(source: Path, arch: str, defines: tuple[str, ...] = ()) -> Path:
    """`nvcc -ptx` of a CUDA file for `compute_<arch>`, with the template instances that CI compiles."""
    compiler = build.nvcc()
    if compiler is None:
        raise build.BuildError("path B needs nvcc")
    target = build.BUILD / "ptx" / f"sm_{arch}" / build.key_of(defines) / f"{source.stem}.ptx"
    includes = [f"-I{build.ROOT / 'csrc'}", *(f.replace("-isystem", "-I") for f in build.torch_flags()[0])]
    command = [
        compiler,
        "-std=c++20",
        "-O3",
        "-lineinfo",
        "-ptx",
        f"-arch=compute_{arch}",
        "-DUSE_CUDA=1",
        "-diag-suppress=20012",
    ]
    return build.make(
        target,
        [*command, *includes, *(f"-D{d}" for d in (*defines, build.FEW)), "-o", str(target), str(source)],
        depfile=True,
    )


@functools.cache
def translator() -> str:
    """The sources of this package."""
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))


def object_from_ptx(text: str, target: Path, origin: str, entries: str = "") -> Path:
    """Translate PTX and compile the C++; each is done again only if what it is made from differs."""
    generated = target.with_suffix(".cpp")
    note, key = target.with_suffix(".from"), hashlib.sha256("\0".join([text, origin, entries, translator()]).encode())
    with build.locked(generated):
        if not (generated.exists() and note.exists() and note.read_text() == key.hexdigest()):
            note.unlink(missing_ok=True)
            cpp = translate(text, origin, entries)
            if not generated.exists() or generated.read_text() != cpp:
                generated.write_text(cpp)
            note.write_text(key.hexdigest())
    return build.compile_cpp(generated, target, FLAGS)


def object_from_cuda(one: build.Ptx) -> Path:
    """Path B of one CUDA file as an object."""
    ptx = ptx_from_cuda(one.source, one.arch, one.defines)
    suffix = "." + re.sub(r"\W+", "_", one.entries) + ".o" if one.entries else ".o"
    return object_from_ptx(
        ptx.read_text(), ptx.with_suffix(suffix), f"{one.source.name} for sm_{one.arch}", one.entries
    )


def library_from_ptx(text: str, name: str) -> Path:
    """A library that holds the entries of one PTX text and the runtime (Triton kernels)."""
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = build.BUILD / "triton"
    tasks = [functools.partial(object_from_ptx, text, folder / f"{name}_{key}.o", name)]
    objects = [str(path) for path in build.parallel([*tasks, *build.runtime_objects("plain")])]
    target = folder / f"lib{name}_{key}.so"
    return build.make(target, ["g++", "-shared", "-Wl,-Bsymbolic", "-o", str(target), *objects, "-ldl"])
