"""The suite must fail on faulty kernels: mutants of the shipped ones, and known bugs of their callers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests import cuda_on_cpu
from tests import test_attention as against_float64
from tests import test_attention_mask as mask
from tests import test_cases_attention as cases
from tests import test_cases_attention_kv as kv_cases
from tests.attention_faults import FEEDS, MUTANTS, build_mutants, emulated_mutant, feed
from tests.conftest import Backend
from tests.test_cuda_on_cpu_bugs import planted_library

F32, BF16 = torch.float32, torch.bfloat16
Check = Callable[[Backend], None]
TREES: list[Check] = [
    lambda b: against_float64.test_against_float64(b, "tree", "random77"),
    lambda b: against_float64.test_against_float64(b, "tree", "eagle26"),
    lambda b: mask.test_probe_every_width(b, F32, 40),
    lambda b: mask.test_probe_every_width(b, BF16, 65),
    lambda b: mask.test_probe_every_variant(b, "any", mask.VARIANTS[3]),
    lambda b: mask.test_strangers_change_no_bit(b, "any", BF16),
    lambda b: cases.test_TM_02_holes_below_the_diagonal(b, 40),
    lambda b: cases.test_TM_02_node_39_sees_45_keys(b),
]
WINDOWS: list[Check] = [
    lambda b: against_float64.test_against_float64(b, "window", 63),
    lambda b: mask.test_probe_window_counts_depth_not_slots(b, F32, 3),
    lambda b: mask.test_probe_window_counts_depth_not_slots(b, BF16, 3),
]
CATCHES: dict[str, list[Check]] = {
    "MASK_IGNORED": TREES,
    "WORD_OFF_BY_ONE": TREES,
    "BIT_ORDER": TREES,
    "WINDOW_BY_SLOT": WINDOWS[1:],
    "TILE_BELOW": [TREES[6], TREES[7], TREES[0], TREES[2]],
    "ROW_STRIDE": [cases.test_TM_03_worked_rows_in_a_wide_buffer],
    "CAUSAL_TILES": [lambda b: cases.test_TM_08_later_slots_count_and_empty_rows_are_zero(b, F32), TREES[2]],
    "HEADS_MODULO": [lambda b: cases.test_TM_07_heads_of_a_group_share_their_kv_head(b, F32, 6, 2)],
    "FIRST_TABLE": [cases.test_BT_05_each_request_equals_its_solo_run],
    "STALE_LENGTHS": [kv_cases.test_PF_02_in_place_changes_are_seen],
}


@pytest.fixture(scope="module")
def mutants(tmp_path_factory) -> dict[str, Backend]:
    return build_mutants(("NONE", *MUTANTS), tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("name", MUTANTS)
def test_suite_fails_on_mutant(mutants, name):
    """Each of these checks alone refuses the mutant, and accepts the kernel built the same way without a flag."""
    for check in CATCHES[name]:
        check(mutants["NONE"])
        with pytest.raises(AssertionError):
            check(mutants[name])


# What the CUDA kernel's mutants must not pass. CI: the first of each list.
TREES_ON_EMULATED: list[Check] = [
    lambda b: mask.test_probe_every_width(b, BF16, 33), TREES[1], TREES[3], lambda b: mask.test_probe_splits(b, 5),
]  # fmt: skip
ON_EMULATED: dict[str, list[Check]] = {
    **dict.fromkeys(("MASK_IGNORED", "WORD_OFF_BY_ONE", "BIT_ORDER"), TREES_ON_EMULATED),
    "WINDOW_BY_SLOT": [WINDOWS[2], WINDOWS[1]],
}


@functools.cache
def accepts_sound_kernel(check: Check) -> None:
    check(emulated_mutant(planted_library(), "NONE"))


@pytest.mark.skipif(cuda_on_cpu.missing("emulated") is not None, reason="no g++ or CUDA headers")
@pytest.mark.parametrize("name", MUTANTS)
def test_suite_fails_on_mutant_of_the_cuda_kernel(name, request):
    """As above for the GPU's source on the CPU runtime."""
    mutant, checks = emulated_mutant(planted_library(), name), ON_EMULATED[name]
    for check in checks if request.config.getoption("--long") else checks[:1]:
        accepts_sound_kernel(check)
        with pytest.raises(AssertionError):
            check(mutant)


@pytest.mark.parametrize("name", FEEDS)
def test_cases_fail_on_known_bug(name):
    faulty = feed(name)
    for check in CATCHES[name]:
        with pytest.raises(AssertionError):
            check(faulty)
