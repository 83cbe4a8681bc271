"""The sampling suites must fail on faulty ops: the checks named here refuse each mutant of the shipped sources."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import test_cases_sampling as cases
from tests import test_cases_sampling_laws as laws
from tests import test_cases_sampling_vocab as vocab
from tests import test_draft_sample as drafting
from tests import test_row_blocks as blocks
from tests import test_sample as sampling
from tests import test_sampling_edges as edges
from tests import test_sampling_exact as exact
from tests import test_sampling_race as race
from tests.conftest import Backend
from tests.sampling_faults import MUTANTS, Factory
from tests.sampling_helpers import floats, one

Check = Callable[[Backend], None]


def rs07(which: int) -> Check:
    return lambda b: laws.test_RS_07_one_filter_rule_in_every_path(*laws.LAWS[which], torch.float32, b)


def far_from_zero(backend: Backend) -> None:
    """Logits around 200: a weight without the maximum taken away overflows or vanishes."""
    out = one(backend, floats([[200.0, 201.0, 199.0]] * 2), [0, 1], [-1, 0], method="target_only",
              return_logprobs="processed")  # fmt: skip
    right = torch.log_softmax(torch.tensor([200.0, 201.0, 199.0]), 0)[out.output_token_ids[0, 0].item()]
    assert abs(float(out.logprobs[0, 0]) - float(right)) < 1e-5


def siblings(method: str) -> Check:
    return lambda b: exact.test_siblings_by_enumeration(method, 4, 3, "lazy", b)


CATCHES: dict[str, list[Check]] = {
    "residual not clamped": [cases.test_RS_04_siblings_without_replacement],
    "recovered from the target": [lambda b: cases.test_RS_03_law_and_acceptance_rate([0.9, 0.1], [0.5, 0.5], 0.6, b)],
    "wrong sibling weight": [siblings("rejection")],
    "sibling scale forgotten": [siblings("rejection")],
    "residual mass left as it was": [siblings("rejection"), cases.test_RS_04_siblings_without_replacement],
    "accepts at coin 0 without mass": [lambda b: cases.test_RS_01_massless_token_is_never_count_accepted(0.0, b)],
    "salt fixed": [drafting.test_branches_and_steps_have_noise_of_their_own],
    "step not in the draft key": [drafting.test_branches_and_steps_have_noise_of_their_own],
    "one word of 24 bits a coin": [lambda b: exact.test_a_coin_below_two_to_the_minus_24(4.9e-8, [0], b)],
    "no 64-bit tail": [sampling.test_far_tail_of_the_noise],
    "maximum not subtracted": [
        far_from_zero,
        lambda b: blocks.test_row_stats_against_float64(1025, torch.float32, b),
    ],
    "tie budget ignored": [rs07(0)],
    "top-p of all, not of what top-k kept": [rs07(-1)],
    "temperature ignored on verified rows": [laws.test_RS_14_temperature_shapes_verified_rows],
    "duplicates count twice": [lambda b: edges.test_duplicate_siblings_add_nothing_and_are_flagged("target_only", b)],
    "block coin ignores the residual": [lambda b: exact.test_canonical_vector_block_rule(1e-5, b)],
    "padded columns count in q": [lambda b: vocab.test_VT_03_draft_head_of_another_width([-1, 0, 0], b)],
    "every ring is taken": [
        lambda b: race.test_law_of_recovered_tokens(1.0, b),
        lambda b: race.test_recovered_tokens_equal_the_reference(37, "rejection", b),
    ],
    "race and second draw share their noise": [
        lambda b: race.test_recovered_tokens_equal_the_reference(37, "target_only", b)
    ],
    "race ends at another time": [race.test_thin_residuals_are_decided_token_by_token],
    "noise of the wrong position": [lambda b: exact.test_random_trees_with_all_parameters("target_only", 37, b)],
}


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    return Factory(tmp_path_factory.mktemp("mutants"))


@pytest.fixture(scope="module")
def sound(factory: Factory) -> Backend:
    return factory.backend("sound")


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_suite_fails_on_mutant(factory: Factory, sound: Backend, name: str):
    """Each of these checks alone refuses the mutant, and accepts the sources built the same way as they are."""
    mutant = factory.backend(name)
    for check in CATCHES[name]:
        check(sound)
        with pytest.raises(AssertionError):
            check(mutant)
