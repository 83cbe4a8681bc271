"""The AMX kernels as shipped, on a C++ model of the tile instructions (amx_model.h), whatever machine this is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import test_attention_mask as mask
from tests import test_cases_attention as cases
from tests.attention_faults import build_mutants
from tests.attention_suite import draw, rng_of, size_of
from tests.conftest import Backend

MODEL = f'-DSPECDEC_AMX_MODEL="{Path(__file__).parent / "amx_model.h"}"'
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def amx(tmp_path_factory) -> Backend:
    flags = Path("/proc/cpuinfo").read_text()
    if "avx512_bf16" not in flags:
        pytest.skip("this CPU has no avx512_bf16")
    return build_mutants(("NONE",), tmp_path_factory.mktemp("amx"), (MODEL,))["NONE"]


def check(backend: Backend, **fixed) -> None:
    problem = draw(rng_of("amx", str(fixed)), size_of(backend), dtype=BF16, **fixed)
    problem.check(*problem.run(backend))


@pytest.mark.parametrize("fixed", [
    {"tree": "random77"}, {"tree": "eagle26"}, {"window": 63}, {"contexts": [129]}, {"page_size": 5},
    {"dims": (80, 80)}, {"dims": (192, 128)}, {"dims": (256, 256)}, {"heads": (8, 2)}, {"softcap": 30.0},
    {"kv_dtype": torch.float8_e4m3fn, "scales": "head"},
], ids=str)  # fmt: skip
def test_against_float64(amx, fixed):
    check(amx, **fixed)


@pytest.mark.parametrize("width", [1, 16, 17, 33, 64, 65])
def test_mask_probe(amx, width):
    mask.test_probe_every_width(amx, BF16, width)


def test_strangers_change_no_bit(amx):
    mask.test_strangers_change_no_bit(amx, "any", BF16)


def test_requests_equal_their_solo_runs(amx):
    cases.test_BT_05_each_request_equals_its_solo_run(amx)


@pytest.mark.long
def test_the_tiles_do_the_work(tmp_path_factory):
    """A model whose dot product forgets the odd halves of the pairs must be noticed."""
    folder = tmp_path_factory.mktemp("amx_broken")
    source = (Path(__file__).parent / "amx_model.h").read_text()
    line = "sum += widen(x[m * 32 + 2 * k + 1]) * widen(y[k * 32 + 2 * n + 1]);"
    assert line in source
    (folder / "broken.h").write_text(source.replace(line, ""))
    broken = build_mutants(("AMX_BROKEN",), folder, (f'-DSPECDEC_AMX_MODEL="{folder / "broken.h"}"',))["AMX_BROKEN"]
    with pytest.raises(AssertionError):
        check(broken, tree="eagle26")
