"""Triton without a GPU: bfloat16 in the interpreter, random words of _triton/rng.py, what the launcher registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from python_ref import rng
from tests import cuda_on_cpu
from tests.cuda_on_cpu.library import EmulationError

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(cuda_on_cpu.missing("triton_ptx") is not None, reason="no triton, g++ or CUDA headers")

SCRIPT = """
import sys, torch, triton, triton.language as tl
GUARDED = sys.argv[1] == "guarded"
if GUARDED:
    from tests.cuda_on_cpu.interpret_worker import guard_bfloat16
    guard_bfloat16()

@triton.jit
def dot(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))

@triton.jit
def add(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, (tl.load(x + i) + tl.load(y + i)).to(tl.float32))

@triton.jit
def narrow(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))

torch.manual_seed(0)
x, y = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
out = torch.zeros(16, 16)
dot[(1,)](x, y, out, N=16)
print("dot", float((out - x.float() @ y.float()).abs().max()))
wide = torch.cat([torch.randn(252), torch.tensor([float("nan"), float("inf"), 1 + 2**-8, 3.4e38])])
short = torch.zeros(256, dtype=torch.bfloat16)
narrow[(1,)](wide, short, N=256)
print("rounding", torch.equal(short.nan_to_num(7.0), wide.bfloat16().nan_to_num(7.0)))
try:
    add[(1,)](x, y, out, N=16)
    print("add", float((out[0] - (x[0] + y[0]).float()).abs().max()))
except Exception as error:
    print("add refused", "convert to float32" in repr(error) or "convert to float32" in repr(error.__cause__))
"""


def interpret(tmp_path: Path, mode: str) -> str:
    script = tmp_path / "bfloat16_kernels.py"
    script.write_text(SCRIPT)
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, str(script), mode], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_bfloat16_dot_is_right_and_other_arithmetic_is_refused(tmp_path: Path):
    out = interpret(tmp_path, "guarded").splitlines()
    assert float(out[0].split()[1]) < 1e-4
    assert out[1] == "rounding True"
    assert out[2] == "add refused True"


def test_the_interpreter_alone_is_wrong_for_bfloat16(tmp_path: Path):
    """Negative control: the day this fails, Triton has learnt bfloat16 and the guard may go."""
    out = interpret(tmp_path, "bare").splitlines()
    assert float(out[0].split()[1]) > 1.0
    assert out[1] == "rounding False"


def test_random_words_equal_the_reference():
    import triton
    import triton.language as tl

    from specdec_kernels._triton import rng as triton_rng
    from tests.cuda_on_cpu import triton_backends

    @triton.jit
    def kernel(seeds, positions, out, purpose, salt, N: tl.constexpr):
        i = tl.arange(0, N)
        seed, position = tl.load(seeds + tl.program_id(0)), tl.load(positions + tl.program_id(0))
        words = triton_rng.draw(seed, position, purpose, i, salt + i * 0)
        for k in tl.static_range(4):
            tl.store(out + tl.program_id(0) * N * 4 + i * 4 + k, words[k].to(tl.int32, bitcast=True))

    triton_backends.driver()
    seeds, positions = torch.tensor([0, 7, -(2**63), 2**40 + 5]), torch.tensor([0, 3, 2**33 + 1, 12])
    out = torch.zeros(4, 32, 4, dtype=torch.int32)
    kernel[(4,)](seeds, positions, out, 2, 9, N=32, num_warps=1)
    for b in range(4):
        for block in (0, 1, 31):
            want = rng.draw(int(seeds[b]), int(positions[b]), 2, block, 9)
            assert [int(w) & 0xFFFFFFFF for w in out[b, block]] == [int(w) for w in want]


def test_a_triton_kernel_that_leaves_its_tensor_is_reported():
    import triton
    import triton.language as tl

    from tests.cuda_on_cpu import triton_backends

    @triton.jit
    def copy(x, out, n, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)

    triton_backends.driver()
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    copy[(1,)](x, out, 60, N=64, num_warps=1)
    assert torch.equal(out[:60], x[:60])
    with pytest.raises(EmulationError, match=r"outside every tensor \(0 bytes past the end of 'temporary'\)"):
        copy[(1,)](x[:32], out, 60, N=64, num_warps=1)


def test_tables_that_graphs_read_are_kept():
    """However many other groups of caches a process has."""
    from specdec_kernels._triton import kv as rooms

    cpu = torch.device("cpu")

    def group(address: int) -> torch.Tensor:
        return rooms._group_of("commit_kv", ((address, 4, (2, 4, 1, 8), (32, 8, 8, 1)),), 1, False, cpu).table

    first = group(4096)
    for address in range(8192, 8192 + 4096 * 80, 4096):
        group(address)
    assert group(4096) is first
