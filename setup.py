"""Builds the op libraries on torch's stable ABI (one file serves any Python and any torch >= 2.11) and the small `_C`.

SPECDEC_BUILD_CUDA=auto|0|1 (alias FORCE_CUDA=1) decides whether csrc/**/*.cu is compiled; auto means: if nvcc is found.
A CPU-only torch suffices: CUDA sources include no torch CUDA header and link only the static CUDA runtime.
"""

import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
TORCH_ABI = "0x020b000000000000"  # stable ABI of torch 2.11
ARCHS = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;8.6;8.9;9.0;10.0;12.0+PTX")


def cuda_home() -> str | None:
    """The CUDA toolkit to use, or None; a stray colon in CUDA_HOME is named rather than passed on to the compiler."""
    wanted = os.environ.get("SPECDEC_BUILD_CUDA") or ("1" if os.environ.get("FORCE_CUDA") == "1" else "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"setup: SPECDEC_BUILD_CUDA: expected auto, 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME", "")
    if home != home.strip(":"):
        print(f"setup: CUDA_HOME: expected one directory, got {home!r}; using {home.strip(':')!r}")
        home = home.strip(":")
    nvcc = shutil.which("nvcc")
    candidates = [home] if home else [str(Path(nvcc).resolve().parents[1]) if nvcc else "", "/usr/local/cuda"]
    for candidate in candidates:  # nvcc on the PATH may be a wrapper outside the toolkit: with no headers beside it
        if (
            candidate
            and Path(candidate, "bin", "nvcc").exists()
            and (home or Path(candidate, "include", "cuda_runtime.h").exists())
        ):
            return candidate
    if wanted == "1":
        sys.exit(f"setup: CUDA_HOME: expected a CUDA toolkit with bin/nvcc, got {candidates} (SPECDEC_BUILD_CUDA=1)")
    return None


def sources(pattern: str) -> list[str]:
    return sorted(os.path.relpath(p, ROOT) for p in glob(str(ROOT / "csrc" / pattern), recursive=True))


home = cuda_home()
includes = [str(ROOT / "csrc")]
cxx = ["-O3", "-std=c++20", "-fvisibility=hidden", "-fno-strict-aliasing", "-g0", "-Wall", "-Wno-unknown-pragmas",
       f"-DTORCH_TARGET_VERSION={TORCH_ABI}"]  # fmt: skip
nvcc = ["-O3", "-std=c++20", "-lineinfo", "--threads=2", "-Xcompiler=-fvisibility=hidden,-fno-strict-aliasing",
        f"-DTORCH_TARGET_VERSION={TORCH_ABI}", "-DUSE_CUDA=1"]  # fmt: skip
define_archs = f'-DSPECDEC_CUDA_ARCHS="{ARCHS if home else ""}"'
extensions = [
    cpp_extension.CppExtension("specdec_kernels._C", ["csrc/module.cpp"], include_dirs=includes,
                               extra_compile_args=["-O2", "-std=c++20", "-g0", define_archs, f"-DSPECDEC_TORCH_ABI={TORCH_ABI}"]),
    cpp_extension.CppExtension("specdec_kernels._cpu", sources("**/*_cpu*.cpp") + sources("common/*.cpp"), include_dirs=includes,
                               extra_compile_args=cxx, extra_link_args=["-s"], py_limited_api=True),
]  # fmt: skip

if home:
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = home
    if torch.version.cuda is None:  # let BuildExtension drive nvcc beside a CPU-only torch
        release = subprocess.run([home + "/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        torch.version.cuda = release.split("release ")[1].split(",")[0]
    # wgmma exists on sm_90a alone and BuildExtension takes one architecture list an extension: hence two libraries.
    for stem, pattern, archs in (("_cuda", "**/*_cuda.cu", None), ("_cuda_sm90", "**/*_sm90.cu", "90a")):
        found = sources(pattern)
        if not found:
            continue
        flags = nvcc + ([f"-gencode=arch=compute_{archs},code=sm_{archs}"] if archs else [])
        ext = cpp_extension.CUDAExtension(f"specdec_kernels.{stem}", found, include_dirs=includes, py_limited_api=True,
                                          extra_compile_args={"cxx": cxx, "nvcc": flags}, extra_link_args=["-s", "-Wl,--exclude-libs,ALL"])  # fmt: skip
        ext.libraries = ["cudart_static", "rt", "dl", "pthread"]  # torch's own CUDA libraries are resolved at run time
        extensions.append(ext)

print(f"setup: torch {torch.__version__}, stable ABI {TORCH_ABI}; CPU ops: {len(extensions[1].sources)} files; "
      + (f"CUDA ops for {ARCHS} with {home}" if home else "CUDA ops: not built (no nvcc found or switched off)"))  # fmt: skip
os.environ.setdefault(
    "MAX_JOBS", str(min(os.cpu_count() or 1, max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 31)))
)
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=True)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
