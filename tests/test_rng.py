"""Philox4x32-10: known answers, the C++ header equal to the reference word for word, coins strictly inside (0, 1)."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from python_ref import rng
from python_ref.sampling_dice import gumbel, gumbel_row, noise_words

ROOT = Path(__file__).resolve().parents[1]

# Known answers published with Random123 (kat_vectors, philox4x32 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

SHIM = """
#include "sampling/noise.h"
extern "C" void words(const int64_t* key, const uint32_t* counter, uint32_t* out) {
  specdec::Philox p = specdec::draw(key[0], key[1], counter[0], counter[1], counter[2]);
  for (int i = 0; i < 4; i++) out[i] = p.word[i];
}
extern "C" void raw(const uint32_t* c, const uint32_t* k, uint32_t* out) {
  specdec::Philox p = specdec::philox4x32_10(c[0], c[1], c[2], c[3], k[0], k[1]);
  for (int i = 0; i < 4; i++) out[i] = p.word[i];
}
extern "C" double coin(uint32_t high, uint32_t low) { return specdec::coin_from_words(high, low).u; }
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: csrc/common/rng.h cannot be compiled on its own")
    folder = tmp_path_factory.mktemp("rng")
    (folder / "shim.cpp").write_text(SHIM)
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", "shim.cpp", "-o", "shim.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "shim.so"))
    library.coin.restype, library.coin.argtypes = ctypes.c_double, [ctypes.c_uint32] * 2
    return library


def cpp_words(header: ctypes.CDLL, seed: int, position: int, purpose: int, block: int, salt: int) -> tuple[int, ...]:
    out = (ctypes.c_uint32 * 4)()
    header.words((ctypes.c_int64 * 2)(seed, position), (ctypes.c_uint32 * 3)(purpose, block, salt), out)
    return tuple(out)


@pytest.mark.parametrize(("counter", "key", "right"), KNOWN)
def test_known_answers(counter, key, right, header):
    assert rng.philox4x32_10(counter, key) == right
    out = (ctypes.c_uint32 * 4)()
    header.raw((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    assert tuple(out) == right


def test_header_equals_reference_on_random_and_extreme_keys(header):
    draws = random.Random(5)
    extremes = [-(2**63), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
    for trial in range(500):
        seed = draws.choice(extremes) if trial % 3 else draws.randrange(-(2**63), 2**63)
        position = draws.choice([0, 1, 4095, 2**31, 2**32 - 1, 2**32, 2**40])
        key = (seed, position, draws.randrange(5), draws.randrange(2**32), draws.randrange(2**32))
        assert cpp_words(header, *key) == rng.draw(*key), key


def test_every_part_of_the_key_matters():
    base = (7, 3, rng.ACCEPT, 2, 1)
    changed = [(8, *base[1:]), (7, 4, *base[2:]), (7, 3, rng.EMIT, 2, 1), (7, 3, rng.ACCEPT, 3, 1), (7, 3, 1, 2, 0)]
    changed += [(7 + 2**32, *base[1:]), (7, 3 + 2**32, *base[2:])]
    words = {rng.draw(*key) for key in [base, *changed]}
    assert len(words) == 1 + len(changed)


def test_rows_of_words_equal_single_draws():
    for key in [(7, 3, rng.EMIT, 0), (-1, 2**40 + 5, rng.DRAFT, 2**32 - 1)]:
        seed, position, purpose, salt = key
        row = noise_words(11, seed, position, purpose, salt)
        assert [int(word) for word in row] == [
            rng.draw(seed, position, purpose, t // 4, salt)[t % 4] for t in range(11)
        ]


def test_coins_lie_strictly_inside_the_unit_interval(header):
    """u = 0 accepts what has no mass, u = 1 rejects what is certain: neither may exist, also at the top 128 words."""
    for word in [0, 1, *range(2**32 - 130, 2**32)]:
        assert 0 < rng.coin(word) < 1
        assert 0 < header.coin(word, word) < 1
        assert header.coin(word, word) == min((word + rng.coin(word)) * 2.0**-32, 1 - 2.0**-53)
    assert np.float32((2**32 - 1) * 2.0**-32) == 1.0  # the product in float32 that the rule avoids


def test_gumbel_noise_is_finite_and_reaches_far_into_the_tail():
    assert np.isfinite([gumbel(word) for word in (0, 2**31, 2**32 - 1)]).all()
    assert gumbel(0) > 22  # 24-bit uniforms stop at 16.6
    assert gumbel(0, 0) > 44
    assert gumbel(4095, 2**31) == pytest.approx(gumbel(4095), abs=1e-9)  # the two forms meet
    row = gumbel_row(10, seed=3, position=5, purpose=rng.EMIT)
    assert row[6] == gumbel(rng.draw(3, 5, rng.EMIT, 1)[2])
    assert len(row) == 10
