"""Decoding steps at fixed sizes (CUDA graphs on a GPU; on a CPU the same static buffers): same text, inert padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.pages import PageState
from tests.toy_model import OracleDrafter, ToyModel
from tests.toy_text import finish

TARGET = ToyTarget()
CONFIG = EngineConfig(
    page_size=4, num_pages=256, max_batch=8, max_step_tokens=64, num_drafts=7, check=True, graph_sizes=(4, 16, 64)
)
PROMPTS = [[i, 2 * i, 7] for i in range(10)]
PLAIN = [plain_greedy(TARGET, p, 30) for p in PROMPTS]


@pytest.mark.parametrize("drafter", ["none", "ngram", "trees"])
def test_text_is_the_same_and_padding_is_counted(drafter: str):
    made = {"trees": OracleDrafter(TARGET)}
    engine = Engine(ToyModel(), made.get(drafter, drafter), CONFIG)
    results = engine.generate(PROMPTS, max_tokens=30)
    assert [r.token_ids for r in results] == PLAIN
    buckets = engine._graphs._buckets
    assert buckets.eager_calls > 20
    assert set(buckets._inputs) <= {4, 16, 64}  # nothing grows with the shapes that steps have
    counted = engine.metrics
    assert counted.verify_slots_padded > 0
    assert 0.1 < counted.slot_utilisation < 1.0
    packed = Engine(ToyModel(), made.get(drafter, drafter), replace(CONFIG, graph_sizes=()))
    packed.generate(PROMPTS, max_tokens=30)
    assert (packed.metrics.slot_utilisation, packed.metrics.verify_slots_padded) == (1.0, 0)


def test_KV_05_padding_rows_read_and_write_nothing():
    """Rows behind the batch hold what the step before left there, ids of pages that are others' now. Pages that no
    request owned in a step are bitwise as before it."""
    model = ToyModel()
    engine = Engine(model, OracleDrafter(TARGET), CONFIG)
    forward, checked = model.forward, []

    def watched(batch, cache, layers=None):
        owned = {page for state in engine._states.values() for page in state.pages}
        others = [page for page in range(256) if page not in owned]
        before = [tensor[others].clone() for tensor in (*cache.k, *cache.v)]
        logits = forward(batch, cache, layers)
        for old, tensor in zip(before, (*cache.k, *cache.v)):
            assert torch.equal(old.view(torch.int32), tensor[others].view(torch.int32))
        checked.append(len(others))
        return logits

    model.forward = watched
    long, short = Request([1, 2, 3] * 6, max_tokens=40), Request([4], max_tokens=4)
    results = finish(engine, short, long, *[Request(p, max_tokens=30) for p in PROMPTS])
    assert [r.token_ids for r in results[2:]] == PLAIN
    assert len(checked) > 20
    assert engine.arena.pages_in(PageState.ACTIVE) == []


def test_steps_that_fit_no_graph_run_as_they_are():
    engine = Engine(ToyModel(), OracleDrafter(TARGET, hit_rate=1.0), replace(CONFIG, graph_sizes=(2,)))
    assert [r.token_ids for r in engine.generate(PROMPTS, max_tokens=30)] == PLAIN
    assert engine.metrics.forwards > engine._graphs._buckets.eager_calls
