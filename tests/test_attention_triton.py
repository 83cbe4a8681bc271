"""The attention suite on the Triton twin in a size for CI: the interpreter runs a check of every kind, PTX one.

A compiled variant costs ten seconds (Triton, then the translation of its PTX), so the PTX path takes a split call here.
`pytest --long` runs whole suite files on both (conftest lets them in).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import cuda_on_cpu
from tests import test_attention as against_float64
from tests import test_attention_contract as contract
from tests import test_attention_mask as mask
from tests.attention_suite import build, rng_of
from tests.attention_trees import KINDS, bernoulli, chain, eagle26
from tests.conftest import Backend

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(cuda_on_cpu.missing("triton_ptx") is not None, reason="no triton, g++ or CUDA headers")
Check = Callable[[Backend], None]


def probe_widths(backend: Backend) -> None:
    for nodes in (33, 65):
        mask.test_probe_every_width(backend, BF16, nodes)


def splits(backend: Backend, counts: tuple[int, ...] = (3, 0)) -> None:
    problem = build([eagle26(), chain(4), chain(1)], [300, 0, 129], rng_of("triton splits"), dtype=BF16)
    for count in counts:
        out, lse = problem.run(backend, num_splits=count)
        problem.check(out, lse)
        again, again_lse = problem.run(backend, num_splits=count)
        assert torch.equal(out, again)
        assert torch.equal(lse, again_lse)


def wide_heads(backend: Backend) -> None:
    for dims in ((80, 80), (192, 128), (256, 256)):
        rng = rng_of("triton dims", dims)
        problem = build([eagle26(), bernoulli(9, rng)], [70, 0], rng, dims=dims, heads=(3, 1), dtype=F16)
        problem.check(*problem.run(backend))


EVERYTHING: dict[str, Check] = {"everything": contract.test_all_options_together, "splits": splits}
CHECKS: dict[str, Check] = EVERYTHING | {
    "float32": lambda b: against_float64.test_against_float64(b, "tree", "random77"),
    "softcap": lambda b: against_float64.test_softcap_keeps_float32_accuracy(b, 1e4),
    "extreme logits": lambda b: against_float64.test_extreme_logits(b, F32),
    "hidden chunks": against_float64.test_every_key_hidden_in_a_chunk,
    "query_start": lambda b: against_float64.test_few_queries_over_earlier_slots(b, BF16),
    "causal beside trees": lambda b: against_float64.test_causal_rows_beside_trees(b, 5),
    "prefill": against_float64.test_causal_prefill_chunk_after_earlier_slots,
    "widths": probe_widths,
    "window by depth": lambda b: mask.test_probe_window_counts_depth_not_slots(b, F32, 3),
    "heads": wide_heads,
    "batch invariance": lambda b: mask.test_batch_invariant_rows_do_not_depend_on_the_batch(b, F32),
    "decoding": lambda b: mask.test_batch_invariant_chain_equals_decoding_one_by_one(b, BF16, 63),
    "no requests": lambda b: contract.test_no_requests(b, 5),
    "order": contract.test_request_order_splits_a_batch_into_buckets,
    "garbage": lambda b: contract.test_garbage_in_one_request_leaves_the_others_alone(b, "page_table", 2147480000),
    "bad offsets": lambda b: contract.test_garbage_in_one_request_leaves_the_others_alone(b, "cu_nodes", -1),
    "inputs": contract.test_inputs_stay_bitwise_unchanged,
    "catches": lambda b: mask.test_the_suite_catches(b, "off by one word"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name):
    CHECKS[name](Backend("triton_interpret", "cpu", "triton_interpret"))


def test_compiled():
    splits(Backend("triton_ptx", "cpu", "triton_ptx"), (3,))


@pytest.mark.long
@pytest.mark.parametrize("name", EVERYTHING)
def test_compiled_in_full(name):
    EVERYTHING[name](Backend("triton_ptx", "cpu", "triton_ptx"))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_interpreted_nan_reaches_only_those_who_see_it(poison):
    backend = Backend("triton_interpret", "cpu", "triton_interpret")
    contract.test_a_nan_reaches_only_those_who_see_it(backend, BF16, poison)


def test_tuned_choices_cover_every_shape_and_fit():
    """Every (rows, head dim, dtype) finds an entry, and its tiles fit the shared memory of sm_86 (99 KB)."""
    from specdec_kernels._triton.attention import choose

    table = json.loads(
        (Path(contract.__file__).parents[1] / "specdec_kernels/_tuned/attention_triton.json").read_text()
    )
    assert {"what", "source", "choices"} == set(table)
    for rows in (1, 16, 17, 32, 33, 64, 65, 104, 256, 10**6):
        for dim in (64, 80, 96, 128, 192, 256):
            for element in (2, 4):
                entry, width = choose(rows, dim, element), 1 << (dim - 1).bit_length()
                tile = entry["num_stages"] * entry["BLOCK_N"] * 2 * width * element
                assert tile + entry["BLOCK_M"] * entry["BLOCK_N"] * element <= 99 << 10
                assert entry["BLOCK_M"] >= 16


def test_all_rows_empty_and_nothing_to_do():
    backend = Backend("triton_interpret", "cpu", "triton_interpret")
    rng = rng_of("triton empty")
    problem = build([KINDS["all_rows_empty"](rng), KINDS["nothing"](rng)], [0, 0], rng)
    out, lse = problem.run(backend)
    assert not out.any()
    assert torch.isneginf(lse).all()
