"""Path A (source model) against path B (compiled PTX) on everything device code may use, and path B's refusals."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.library import EmulationError, Library
from tests.cuda_on_cpu.ptx.translate import TranslationError, translate

ROWS, THREADS = 128, 128
needs_nvcc = pytest.mark.skipif(build.missing() is not None or build.nvcc() is None, reason="no CUDA toolkit")


@pytest.fixture(scope="module", params=["80", pytest.param("90a", marks=pytest.mark.long)])
def intrinsics(request: pytest.FixtureRequest) -> Library:
    arch = request.param
    source = build.HERE / "kernels" / "intrinsics.cu"
    return Library(build.emulated_library([source], f"specdec_intrinsics_sm{arch}", "race", [build.Ptx(source, arch)]))


def run(
    library: Library, words: torch.Tensor, registered: int = THREADS, out_writable: bool = True, **config: object
) -> tuple[torch.Tensor, int]:
    """Run the kernel with the first `registered` words of its input declared."""
    out = torch.full((ROWS, THREADS), 0x7F7F7F7F, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    named = [("in", words[:registered], False), ("out", out, out_writable), ("counter", counter, True)]
    with library.configured(**config), library.tensors(named):
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (words, out, counter)]
        assert library.run_intrinsics(*pointers, 9) == ROWS
    return out, int(counter)


def inputs(seed: int) -> torch.Tensor:
    """Small words, full words and sparse words in turn: shifts, matches and float rounding need different ones."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (2, THREADS), generator=generator).int()
    return [words[0] & 15, words[0], words[0] & (words[1] | 255)][seed % 3].contiguous()


@needs_nvcc
def test_source_model_equals_ptx_bit_for_bit(intrinsics: Library):
    for seed in range(30):
        words = inputs(seed)
        source, ptx = run(intrinsics, words, path="source"), run(intrinsics, words, path="ptx")
        differing = (source[0] != ptx[0]).any(1).nonzero().flatten().tolist()
        assert not differing, f"seed {seed}: rows {differing} of kernels/intrinsics.cu"
        assert source[1] == ptx[1] == 3
    used = int((source[0] != 0x7F7F7F7F).any(1).sum())
    assert used == 99, "the number of checks in kernels/intrinsics.cu"


@needs_nvcc
@pytest.mark.parametrize("schedule", ["reverse", "random", "priority"])
def test_result_does_not_depend_on_the_schedule(intrinsics: Library, schedule: str):
    words = inputs(1)
    expected = run(intrinsics, words)[0]
    for path in ("source", "ptx"):
        for seed in range(3):
            config = dict(path=path, schedule=schedule, seed=seed, landing="random", preempt=40)
            assert torch.equal(run(intrinsics, words, **config)[0], expected)


@needs_nvcc
@pytest.mark.parametrize("path", ["source", "ptx"])
def test_access_outside_a_tensor_names_kernel_line_and_tensor(intrinsics: Library, path: str):
    with pytest.raises(EmulationError, match=r"0 bytes past the end of 'in'\) at intrinsics\.cu:\d+.*thread 63 "):
        run(intrinsics, inputs(1), registered=100, path=path)


@needs_nvcc
@pytest.mark.parametrize("path", ["source", "ptx"])
def test_write_to_an_input_is_refused(intrinsics: Library, path: str):
    with pytest.raises(EmulationError, match=r"write to 'out', which the op's schema does not name as mutated"):
        run(intrinsics, inputs(1), out_writable=False, path=path)


ENTRY = """
.version 8.8
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_param_0)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  STATEMENT
  ret;
}
"""


def test_unknown_ptx_stops_with_the_statement():
    text = "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%rd1], %r1;"
    with pytest.raises(TranslationError, match=r"no translation for 'tensormap\.replace\.tile"):
        translate(ENTRY.replace("STATEMENT", text), "test")


def test_device_printf_is_ignored_and_other_calls_are_not():
    call = """{
  .param .b64 param0;
  st.param.b64 [param0+0], %rd1;
  .param .b32 retval0;
  call.uni (retval0), NAME, (param0);
  ld.param.b32 %r1, [retval0+0];
  }"""
    assert "body_k" in translate(ENTRY.replace("STATEMENT", call.replace("NAME", "vprintf")), "test")
    with pytest.raises(TranslationError, match=r"call\.uni"):
        translate(ENTRY.replace("STATEMENT", call.replace("NAME", "other")), "test")


@pytest.mark.parametrize(
    "notation", ["{target}: {first} \\\n {second}\n", "{target} : {first} \\\n {second}\n"], ids=["g++", "nvcc"]
)
def test_only_what_changed_is_made_again(notation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both compilers' dependency files are understood."""
    target, first, second = (tmp_path / name for name in ("out.o", "a.cu", "a.h"))
    made = []

    def compiler(command: list[str]) -> str:
        made.append(command)
        target.write_text("object")
        target.with_suffix(".o.d").write_text(notation.format(target=target, first=first, second=second))
        return ""

    monkeypatch.setattr(build, "run", compiler)
    for path in (first, second):
        path.write_text("source")
        os.utime(path, (1, 1))
    for expected in (1, 1):
        build.make(target, ["compiler", str(first)], depfile=True)
        assert len(made) == expected
    later = target.stat().st_mtime + 10
    os.utime(second, (later, later))
    build.make(target, ["compiler", str(first)], depfile=True)
    build.make(target, ["compiler", "-O2", str(first)], depfile=True)
    assert len(made) == 3
