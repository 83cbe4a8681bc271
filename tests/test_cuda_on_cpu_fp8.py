"""fp8 conversions of path B against torch: all 256 values decoded, every float16 value and every tie encoded.

They are PTX's `cvt` between f32, f16x2 and e4m3x2 / e5m2x2 (sm_89 and newer). Encoding saturates to the largest finite
value, which torch does not: values are clamped for torch beforehand.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.library import Library

pytestmark = pytest.mark.skipif(build.missing() is not None, reason="no g++ or CUDA headers")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAN = 0x7F  # what PTX makes of a NaN in either format

ENTRY = """
.visible .entry decode_FORMAT(.param .u64 in, .param .u64 out)
{
  .reg .b16 %rs<2>;
  .reg .b32 %r<6>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [in];
  ld.param.u64 %rd2, [out];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 2;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.u16 %rs1, [%rd4];
  cvt.rn.f16x2.FORMATx2 %r2, %rs1;
  mul.wide.u32 %rd5, %r1, 4;
  add.s64 %rd6, %rd2, %rd5;
  st.global.u32 [%rd6], %r2;
  ret;
}
.visible .entry encode_FORMAT(.param .u64 in, .param .u64 out)
{
  .reg .b16 %rs<2>;
  .reg .b32 %r<6>;
  .reg .f32 %f<3>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [in];
  ld.param.u64 %rd2, [out];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  mul.wide.u32 %rd3, %r4, 8;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.v2.f32 {%f1, %f2}, [%rd4];
  cvt.rn.satfinite.FORMATx2.f32 %rs1, %f2, %f1;
  mul.wide.u32 %rd5, %r4, 2;
  add.s64 %rd6, %rd2, %rd5;
  st.global.u16 [%rd6], %rs1;
  ret;
}
"""
HEAD = "\n.version 8.8\n.target sm_89\n.address_size 64\n"


@pytest.fixture(scope="module")
def library() -> Library:
    from tests.cuda_on_cpu.ptx.compile import library_from_ptx

    text = HEAD + "".join(ENTRY.replace("FORMAT", name) for name in FORMATS)
    return Library(library_from_ptx(text, "fp8"))


def launch(library: Library, entry: str, source: torch.Tensor, target: torch.Tensor, blocks: int, threads: int) -> None:
    packed = b"".join(t.data_ptr().to_bytes(8, "little") for t in (source, target))
    three = ctypes.c_uint32 * 3
    with library.tensors([("in", source, False), ("out", target, True)]):
        shape = three(blocks, 1, 1), three(threads, 1, 1)
        assert library.emulated_launch_entry(entry.encode(), *shape, ctypes.c_size_t(0), packed, len(packed)) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_is_decoded_as_in_torch(library: Library, name: str):
    values = torch.arange(256, dtype=torch.uint8)
    got = torch.full((256,), 7.0, dtype=torch.float16)
    launch(library, f"decode_{name}", values, got, 1, 128)
    want = values.view(FORMATS[name]).half()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~want.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


@pytest.mark.parametrize("name", FORMATS)
def test_every_float16_value_is_encoded_as_in_torch(library: Library, name: str):
    """The halves between neighbouring fp8 values are float16 values too: every tie is among them."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    near = torch.tensor([1 + 2**-20, 1 - 2**-20])
    values = torch.cat([values, *(values * factor for factor in near), torch.tensor([1e30, -1e30])])
    got = torch.full((len(values),), 0x55, dtype=torch.uint8)
    launch(library, f"encode_{name}", values, got, len(values) // 2, 1)
    largest = torch.finfo(FORMATS[name]).max
    want = values.clamp(-largest, largest).to(FORMATS[name]).view(torch.uint8)
    want = torch.where(values.isnan(), torch.tensor(NAN, dtype=torch.uint8), want)
    wrong = (got != want).nonzero().flatten()
    assert not len(wrong), [(values[i].item(), got[i].item(), want[i].item()) for i in wrong[:5]]
