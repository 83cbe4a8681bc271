"""What goes wrong stays with its request: drafters that fail, lie or dawdle, a model that raises, a full arena."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Draft, Engine, EngineConfig, Request
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from tests.toy_model import OracleDrafter, ToyModel
from tests.toy_text import finish

TARGET = ToyTarget()
CONFIG = EngineConfig(page_size=4, num_pages=256, max_batch=8, max_step_tokens=64, check=True)
PROMPTS = [[1, 2, 3], [9, 8], [4] * 7]


class Answers:
    name = "answers"

    def __init__(self, answer):
        self.answer = answer

    def propose(self, states, limits, context):
        return [self.answer(state, limit) for state, limit in zip(states, limits)]


def two(limit, first: int = 1, **parts) -> Draft:
    return Draft.chain([first] * min(2, limit.depth), **parts)


def law(limit, value: float, rows: int | None = None) -> torch.Tensor:
    return torch.full((min(2, limit.depth) if rows is None else rows, 32), value)


@pytest.mark.parametrize(
    ("answer", "strikes"),
    [
        (lambda s, limit: two(limit, 10**6), 3),
        (lambda s, limit: two(limit, -5), 3),
        (lambda s, limit: two(limit, 2**40), 1),
        (lambda s, limit: two(limit, 1.5), 1),
        (lambda s, limit: two(limit, None), 1),
        (lambda s, limit: two(limit, logits=law(limit, 0.0, rows=7)), 1),
        (lambda s, limit: two(limit, logits=law(limit, float("nan"))), 3),
        (lambda s, limit: two(limit, logits=law(limit, float("-inf"))), 3),
        (lambda s, limit: Draft((1, 1), (0, 0)) if limit.nodes > 1 else Draft(), 3),
    ],
    ids=["huge id", "negative", "64 bits", "float", "none", "ragged law", "NaN law", "empty law", "twins"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lying_drafter_is_given_up_for_its_requests_only(answer, strikes: int, temperature: float):
    engine = Engine(ToyModel(), "ngram", CONFIG)
    healthy = [Request(p, max_tokens=30) for p in PROMPTS]
    faulty = Request([7, 7], max_tokens=30, temperature=temperature, seed=1, drafter=Answers(answer))
    *good, bad = finish(engine, *healthy, faulty)
    assert [r.token_ids for r in good] == [plain_greedy(TARGET, p, 30) for p in PROMPTS]
    assert [r.stats.drafter_failures for r in good] == [0, 0, 0]
    assert (len(bad.token_ids), bad.finish_reason) == (30, "length")
    if temperature == 0:
        assert bad.token_ids == plain_greedy(TARGET, [7, 7], 30)
    seen = bad.stats.flagged > 0 or strikes == 1  # a greedy walk does not look at laws
    assert bad.stats.drafter_failures == engine.metrics.drafter_failures == seen
    assert engine.arena.num_unowned == 256


def test_a_slow_drafter_is_given_up_after_three_late_steps():
    calls = []

    def slow(state, limit):
        calls.append(state.id)
        time.sleep(0.02)
        return two(limit)

    engine = Engine(ToyModel(), Answers(slow), replace(CONFIG, draft_timeout_s=0.005))
    (result,) = engine.generate(PROMPTS[:1], max_tokens=20)
    assert result.token_ids == plain_greedy(TARGET, PROMPTS[0], 20)
    assert (len(calls), result.stats.drafter_failures) == (3, 1)
    patient = Engine(ToyModel(), Answers(slow), CONFIG)
    assert patient.generate(PROMPTS[:1], max_tokens=8)[0].stats.drafter_failures == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_model_that_raises_leaves_the_engine_as_it_was(prefix_cache: bool):
    model = ToyModel()
    engine = Engine(model, OracleDrafter(TARGET), replace(CONFIG, prefix_cache=prefix_cache))
    ids = [engine.add(Request(p, max_tokens=30)) for p in PROMPTS]
    found: dict = {}
    forward, calls = model.forward, {"count": 0}

    def failing(*arguments):
        calls["count"] += 1
        if calls["count"] % 4 == 3:
            raise MemoryError("the device has had enough")
        return forward(*arguments)

    model.forward = failing
    failures = 0
    while engine.has_work:
        try:
            found.update({e.request_id: e.result for e in engine.step() if e.result})
        except MemoryError:
            failures += 1
            engine.memory.check(engine._states.values())
            for state in engine._states.values():
                assert len(state.pages) == -(-state.context_len // 4)
    assert failures > 1
    assert [found[i].token_ids for i in ids] == [plain_greedy(TARGET, p, 30) for p in PROMPTS]
    assert engine.arena.num_unowned == 256


def test_an_abort_inside_a_callback_ends_that_request_only():
    engine = Engine(ToyModel(), "ngram", CONFIG)
    first: list[int] = []
    stopped: list = []

    def stop(event):
        if len(stopped) < 1 and event.result is None:
            stopped.append(engine.abort(first[0]))

    first.append(engine.add(Request(PROMPTS[0], max_tokens=30, on_event=stop)))
    second = engine.add(Request(PROMPTS[1], max_tokens=30))
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result for e in engine.step() if e.result})
    assert stopped[0].finish_reason == "abort"
    assert found[second].token_ids == plain_greedy(TARGET, PROMPTS[1], 30)


def test_a_full_arena_ends_one_request_and_the_others_go_on():
    engine = Engine(ToyModel(), OracleDrafter(TARGET), replace(CONFIG, num_pages=8, max_batch=2))
    long, short = finish(engine, Request([1] * 20, max_tokens=60), Request([2] * 5, max_tokens=8))
    assert long.finish_reason == "memory"
    assert long.token_ids == plain_greedy(TARGET, [1] * 20, 60)[: len(long.token_ids)]
    assert (short.finish_reason, short.token_ids) == ("length", plain_greedy(TARGET, [2] * 5, 8))
    assert engine.arena.num_unowned == 8


def test_BT_02_a_drafter_that_reads_less_stops_for_long_texts_only():
    """Drafter limit 8: a text of 9 tokens gets no drafts, one of 3 keeps them until it is too long."""
    drafter = OracleDrafter(TARGET, hit_rate=1.0, width=0)
    drafter.max_context = 8
    engine = Engine(ToyModel(), drafter, CONFIG)
    long, short = engine.generate([[5] * 9, [5, 6, 7]], max_tokens=20)
    assert long.stats.drafted == 0
    assert 0 < short.stats.drafted <= 4
    assert [r.token_ids for r in (long, short)] == [plain_greedy(TARGET, p, 20) for p in ([5] * 9, [5, 6, 7])]


def test_PF_05_nothing_grows_with_the_number_of_steps():
    """500 steps with the batch jumping between 1 and 32: what the engine holds after them is what it held after 50."""
    engine = Engine(ToyModel(), SelfDrafter(layers=(1,), num_drafts=2, min_prob=0.0), replace(CONFIG, max_batch=32))
    sizes = []
    for step in range(500):
        if not engine.has_work:
            for i in range(32 if (step // 7) % 2 else 1):
                engine.add(Request([i, step % 32], max_tokens=6))
        engine.step()
        if step in (49, 499):
            engine.memory.check(engine._states.values())
            sizes.append((len(engine._states), len(engine.scheduler.running), len(engine.scheduler.waiting)))
            assert len(engine.prefixes) <= 256
            assert len(engine.prefixes._queue) <= 4 * 256 + 64
            assert len(engine._late) <= 1
    assert max(sizes[1]) <= 32
