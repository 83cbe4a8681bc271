"""Each room's kernels under AddressSanitizer and UBSan (path A), and as sm_90a code (path B): slow, so long suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import cuda_on_cpu

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(cuda_on_cpu.missing("emulated") is not None, reason="no g++ or CUDA headers"),
]

# (an op of the room, a sample of its suite: files, and pytest's -k)
ROOMS = {
    "tree": ("build_tree", ["tests/test_tree.py", "tests/test_tree_dynamic.py"], ""),
    "attention": (
        "tree_attention",
        ["tests/test_attention.py", "tests/test_cases_attention.py", "tests/test_attention_plan.py"],
        "TM or float64 or plan",
    ),
    "sampling": ("verify", ["tests/test_cuda_rows.py", "tests/test_cuda_verify.py", "tests/test_cuda_drafts.py"], ""),
    "drafts": ("draft_topk", ["tests/test_draft_topk.py"], ""),
    "kv": ("commit_kv", ["tests/test_kv.py", "tests/test_kv_handover.py"], ""),
    "batching": ("pack_rows", ["tests/test_batching.py"], ""),
}


def sanitized(logs: Path) -> dict[str, str]:
    """Environment of a process that loads sanitized libraries: the runtimes come first. ASan reports into `logs`, UBSan
    (whose `log_path` does nothing beside ASan) on the standard error."""
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True) for n in names]
    options = {"ASAN_OPTIONS": f"detect_leaks=0:log_path={logs / 'asan'}", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return dict(os.environ, LD_PRELOAD=" ".join(one.stdout.strip() for one in found), **options)


def reports(logs: Path, stderr: str) -> str:
    """What the sanitizers said; empty if nothing."""
    said = [path.read_text() for path in sorted(logs.glob("asan.*"))]
    return "\n".join(said + ([stderr] if "runtime error:" in stderr else []))


def suite(room: str, backend: str, *options: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(tests passed, output, standard error, which --capture=sys leaves open) of the room's sample on one backend."""
    op, files, words = ROOMS[room]
    if op not in cuda_on_cpu.ops_with_source(backend):
        pytest.skip(f"{op}: no kernel for backend {backend}")
    chosen = backend + (f" and ({words})" if words else "")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--capture=sys",
        *options,
        "-k",
        chosen,
        *files,
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    output = done.stdout[-6000:] + done.stderr[-3000:]
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    return int(passed[1]) if passed else 0, output, done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_silent_under_asan_and_ubsan(room: str, tmp_path: Path):
    passed, output, stderr = suite(room, "emulated", "--emulated-variant", "asan", env=sanitized(tmp_path))
    assert passed >= 2, output  # the batching room has two tests for all backends, the others tens
    assert not reports(tmp_path, stderr), reports(tmp_path, stderr)[:6000]


PLANTED = """
import sys
from tests import test_cuda_on_cpu_bugs as bugs
from tests import cuda_on_cpu
bug = next((b for b in bugs.BUGS if b.name == sys.argv[1]), None)
library = cuda_on_cpu.library("asan", defines=("SPECDEC_PLANTED_AT_RUN_TIME",), ops=frozenset({"build_tree"}))
call = bug.call if bug else bugs.tree_call
if bug:
    library.emulated_plant(bug.number)
op, arguments = call()
cuda_on_cpu.run_op(library, op, *arguments)
"""
SAYS = {
    "shared_out_of_bounds": r"use-after-poison.*\n.*\n.*tree_cuda\.cu:\d+",
    "global_out_of_bounds": r"heap-buffer-overflow.*\n.*\n.*tree_cuda\.cu:\d+",
    "shift_past_word": r"tree_cuda\.cu:\d+:\d+: runtime error: shift exponent \d+ is too large",
}


@pytest.mark.parametrize("bug", SAYS)
def test_planted_bug_is_caught_by_a_sanitizer(bug: str, tmp_path: Path):
    command = [sys.executable, "-c", PLANTED, bug]
    done = subprocess.run(command, cwd=ROOT, env=sanitized(tmp_path), capture_output=True, text=True)
    said = reports(tmp_path, done.stderr)
    assert re.search(SAYS[bug], said), said[:6000] or "no report"


def test_the_same_call_without_a_bug_is_silent(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, "none"], cwd=ROOT, env=sanitized(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not reports(tmp_path, done.stderr)


@pytest.mark.skipif(cuda_on_cpu.missing("ptx") is not None, reason="no nvcc")
@pytest.mark.parametrize("room", ROOMS)
def test_room_as_sm_90a_code(room: str):
    passed, output, _ = suite(room, "ptx", "--ptx-arch", "90a")
    assert passed >= 2, output  # the batching room has two tests for all backends, the others tens
