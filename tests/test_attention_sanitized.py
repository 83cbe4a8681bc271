"""The attention room's CPU suites once more on a library built with address and undefined-behaviour sanitizers (long).

Tensors come from torch's allocator, which the sanitizer intercepts, so a read or write beyond any tensor, arena or
stack buffer ends the run with the source line. The negative control plants such a write.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]
ROOM = ("", "_mask", "_kv", "_contract", "_errors", "_fuzz")
SUITES = [f"test_attention{part}.py" for part in ROOM] + [
    "test_kv_write.py",
    "test_cases_attention.py",
    "test_cases_attention_kv.py",
]
FLAGS = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
PLANTED = "kernels_.pack_k(k, p_.head_dim, packed_k_, ahead);"  # one call of a file every element type passes through


def asan_runtime() -> str:
    path = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else ""


pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("g++") is None or not asan_runtime(), reason="no g++ with libasan"),
]


def build(tree: Path, planted: bool) -> None:
    """A copy of the package, its tests and a sanitized CPU library in `tree`."""
    for part in ("specdec_kernels", "tests", "python_ref", "csrc", "benchmarks"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("*.so", "__pycache__", "results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    emulation = tree / "tests/cuda_on_cpu/__init__.py"  # compilers do not run under the sanitizer: the CPU op alone
    text = emulation.read_text()
    backends = 'BACKENDS = ("emulated", "ptx", "triton_interpret", "triton_ptx")'
    assert backends in text
    emulation.write_text(text.replace(backends, "BACKENDS = ()"))
    if planted:
        file = tree / "csrc/attention/item_cpu.h"
        text = file.read_text()
        assert text.count(PLANTED) == 1
        file.write_text(text.replace(PLANTED, PLANTED + " packed_v_[1 << 19] = 0;"))
    sources = [*(tree / "csrc").glob("*/*_cpu*.cpp"), *(tree / "csrc/common").glob("*.cpp")]
    include = [f"-I{path}" for path in (tree / "csrc", *cpp_extension.include_paths())]
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = ["g++", "-shared", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w", *FLAGS,
               "-DTORCH_TARGET_VERSION=0x020b000000000000", *include, *map(str, sorted(set(sources))), *folders,
               "-ltorch_cpu", "-ltorch", "-lc10", "-o", str(tree / "specdec_kernels/_cpu.abi3.so")]  # fmt: skip
    subprocess.run(command, check=True)


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = "detect_leaks=0:abort_on_error=0:exitcode=99"
    env = dict(os.environ, LD_PRELOAD=asan_runtime(), ASAN_OPTIONS=options, UBSAN_OPTIONS="print_stacktrace=1",
               PYTHONPATH=str(tree), PYTHONMALLOC="malloc")  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--capture=sys", "-k", "cpu", *arguments]
    # --capture=sys: the sanitizer writes to the descriptor itself, and ends the process before pytest could show it
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


def test_no_report_on_the_attention_suites(tmp_path):
    build(tmp_path, planted=False)
    done = run(tmp_path, *(f"tests/{name}" for name in SUITES))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_a_planted_overflow_is_reported(tmp_path):
    build(tmp_path, planted=True)
    done = run(tmp_path, "tests/test_attention.py")
    assert done.returncode == 99, (done.stdout + done.stderr)[-4000:]
    assert "ERROR: AddressSanitizer" in done.stderr, (done.stdout + done.stderr)[-4000:]
