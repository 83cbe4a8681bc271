"""What goes wrong stays with its request: drafters that fail, lie or dawdle, a model that raises, a full arena."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Draft, Engine, EngineConfig, Request
from specdec_kernels.engine.drafters.draft_model import DraftModelDrafter
from specdec_kernels.engine.drafters.draft_model_tree import DraftModelTreeDrafter
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from tests.toy_model import OracleDrafter, ToyModel
from tests.toy_text import Follows, finish

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


@pytest.mark.parametrize("kind", [DraftModelDrafter, DraftModelTreeDrafter])
def test_ids_beyond_a_draft_models_vocabulary_are_clamped(kind: type):
    """One tokenizer, 32 ids for the target and 28 for the draft model (padding differs): an embedding would raise at
    such an id, and on a GPU end the process."""

    class Checked(ToyModel):
        def forward(self, batch, cache, layers=None, hidden=None):
            assert int(batch.token_ids.max()) < self.vocab_size
            return super().forward(batch, cache, layers, hidden)

    target, draft = ToyModel(), Checked(ToyTarget(vocab=28))
    target.tokenizer = draft.tokenizer = SimpleNamespace(get_vocab=dict, decode=lambda ids, **_: "x" * len(ids))
    (result,) = finish(Engine(target, kind(draft), CONFIG), Request([31, 30, 29, 1, 31], max_tokens=12))
    assert result.token_ids == plain_greedy(TARGET, [31, 30, 29, 1, 31], 12)
    assert (result.stats.drafter_failures, result.stats.drafted > 0) == (0, True)


def test_an_abort_in_a_step_that_raises_is_told_in_the_next():
    model = ToyModel()
    engine = Engine(model, "none", CONFIG)
    first, forward = engine.add(Request([1, 2, 3], max_tokens=9)), model.forward

    def aborting(*arguments):
        engine.abort(first)
        raise MemoryError

    model.forward = aborting
    with pytest.raises(MemoryError):
        engine.step()
    model.forward = forward
    assert engine.has_work
    (event,) = engine.step()
    assert (event.request_id, event.result.finish_reason) == (first, "abort")
    assert not engine.has_work


def test_a_callback_that_raises_costs_no_other_request_anything(caplog):
    """It is called once; everybody's events and results are returned as ever, and its own text goes on."""
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    calls: list[int] = []
    heard: list[int] = []

    def failing(event):
        calls.append(event.request_id)
        raise KeyError("no such client")

    requests = [Request(p, max_tokens=12, on_event=failing if i == 0 else None) for i, p in enumerate(PROMPTS)]
    ids = [engine.add(request) for request in requests[:2]]
    ids.append(engine.add(replace(requests[2], on_event=lambda event: heard.extend(event.token_ids))))
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result for e in engine.step() if e.result})
    assert [found[i].token_ids for i in ids] == [plain_greedy(TARGET, p, 12) for p in PROMPTS]
    assert calls == ids[:1]
    assert heard == found[ids[2]].token_ids
    assert f"on_event of request {ids[0]} failed" in caplog.text


class Trees:
    """A few children of the root and a chain below one of them: what a request's own code is asked about."""

    name = "trees"

    def __init__(self, ids=(5, 6, 7)):
        self.ids = ids

    def propose(self, states, limits, context):
        a, b, c = self.ids
        return [Draft((a, b, c), (0, 0, 1)) if m.depth >= 2 and m.nodes >= 3 else Draft() for m in limits]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_processor_that_raises_ends_its_request_only(temperature: float, at: int):
    calls = {"count": 0}

    def processor(text, row):
        calls["count"] += 1
        if calls["count"] == at:
            raise RuntimeError("no such table")
        return row

    engine = Engine(ToyModel(), Trees(), CONFIG)
    healthy = [Request(p, max_tokens=20) for p in PROMPTS]
    faulty = Request([7, 7], max_tokens=20, temperature=temperature, seed=1, logits_processor=processor)
    *good, bad = finish(engine, *healthy, faulty)
    assert [r.token_ids for r in good] == [plain_greedy(TARGET, p, 20) for p in PROMPTS]
    assert bad.finish_reason == "error"
    assert bad.error == "logits_processor: RuntimeError('no such table')"
    assert len(bad.token_ids) < 7
    if temperature == 0:
        assert bad.token_ids == plain_greedy(TARGET, [7, 7], 20)[: len(bad.token_ids)]
    assert calls["count"] == at
    assert engine.arena.num_unowned == 256


class Failing(Follows):
    """A grammar whose `where` raises at its `at`-th call."""

    def __init__(self, where: str, at: int):
        everything = set(range(32))
        super().__init__(everything, {t: everything for t in range(32)})
        self.where, self.left = where, at

    def _count(self, where: str) -> None:
        self.left -= where == self.where
        if self.left == 0 and where == self.where:
            raise OverflowError(where)

    def fill_allowed(self, row):
        self._count("fill_allowed")
        super().fill_allowed(row)

    def accept(self, token_id):
        self._count("accept")
        return super().accept(token_id)

    def rollback(self, count):
        super().rollback(count)
        self._count("rollback")

    @property
    def ended(self):
        self._count("ended")
        return False


@pytest.mark.parametrize("where", ["fill_allowed", "accept", "rollback", "ended"])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_grammar_that_raises_ends_its_request_only(where: str, at: int):
    matcher = Failing(where, at)
    engine = Engine(ToyModel(), Trees(), CONFIG)
    healthy = [Request(p, max_tokens=30) for p in PROMPTS]
    *good, bad = finish(engine, *healthy, Request([7, 7], max_tokens=30, grammar=lambda: matcher))
    assert [r.token_ids for r in good] == [plain_greedy(TARGET, p, 30) for p in PROMPTS]
    assert (bad.finish_reason, bad.error) == ("error", f"grammar: OverflowError('{where}')")
    assert bad.token_ids == plain_greedy(TARGET, [7, 7], 30)[: len(bad.token_ids)]
    assert matcher.read[: len(bad.token_ids)] == bad.token_ids
    assert len(matcher.read) <= len(bad.token_ids) + (where == "ended")  # no draft is left in it
    assert engine.arena.num_unowned == 256


@pytest.mark.parametrize("ids", [(-5, 6, 7), (40, 6, 7), (6, 7, 10**6)])
def test_a_grammar_is_not_asked_about_ids_outside_the_vocabulary(ids):
    """A matcher in another language takes unsigned numbers: such an id raised out of the step, for all requests."""

    class Unsigned(Follows):
        def accept(self, token_id):
            if not 0 <= token_id < 32:
                raise OverflowError(token_id)
            return super().accept(token_id)

    everything = set(range(32))
    grammar = lambda: Unsigned(everything, {t: everything for t in range(32)})  # noqa: E731
    engine = Engine(ToyModel(), Trees(ids), CONFIG)
    first, second = finish(engine, Request([7, 7], max_tokens=20, grammar=grammar), Request([1, 2], max_tokens=20))
    assert (first.finish_reason, first.token_ids) == ("length", plain_greedy(TARGET, [7, 7], 20))
    assert second.token_ids == plain_greedy(TARGET, [1, 2], 20)
    assert first.stats.drafter_failures == (ids[2] < 32)  # given up by the verifier's flags, as ever, where it looks


def test_nothing_is_found_again_of_a_text_that_ended_with_nan():
    """A passing fault writes NaN into the first chunk of a prompt; another request shares the chunk meanwhile. Both end
    with an error, and the third one computes the prompt anew."""
    model = ToyModel()
    engine = Engine(model, "none", replace(CONFIG, max_step_tokens=8))
    prompt, forward, faulty = [(5 * i + 1) % 32 for i in range(25)], model.forward, [True]

    def passing_fault(batch, cache, layers=None):
        logits = forward(batch, cache, layers)
        if faulty:
            faulty.clear()
            cache.v[0].flatten(0, 1)[batch.slots.long()] = float("nan")
        rows = 0
        last = batch.cu_nodes[1:] - 1 if batch.logit_rows is None else batch.logit_rows
        for b, (pages, known) in enumerate(zip(batch.page_table, batch.context_lens)):
            seen = cache.v[0][pages[pages >= 0].long()].flatten(0, 1)[:known]
            mine = (last >= batch.cu_nodes[b]) & (last < batch.cu_nodes[b + 1])
            if seen.isnan().any():
                logits[mine] = float("nan")
            rows += int(mine.sum())
        return logits

    model.forward = passing_fault
    first = engine.add(Request(prompt, max_tokens=6))
    engine.step()
    second = engine.add(Request([*prompt[:20], 9, 9, 9], max_tokens=6))
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result for e in engine.step() if e.result})
    assert [found[i].finish_reason for i in (first, second)] == ["error", "error"]
    assert found[second].num_cached > 0  # they shared
    third = engine.generate([prompt], max_tokens=6)[0]
    assert (third.num_cached, third.finish_reason) == (0, "length")
    assert third.token_ids == plain_greedy(TARGET, prompt, 6)
    assert engine.generate([prompt], max_tokens=6)[0].num_cached == 24  # what was sound is found
    assert engine.arena.num_unowned == 256


def test_drafters_that_requests_bring_go_with_them():
    class Attached(Answers):
        attached = 0

        def attach(self, model):
            self.attached += 1

        def between_steps(self, seconds):
            pass

    engine = Engine(ToyModel(), "ngram", replace(CONFIG, draft_timeout_s=0.0))  # always late
    kept = Attached(lambda s, limit: two(limit))
    for turn in range(20):
        drafter = kept if turn % 4 == 0 else Attached(lambda s, limit: two(limit))
        (result,) = finish(engine, Request(PROMPTS[0], max_tokens=6, drafter=drafter))
        assert result.token_ids == plain_greedy(TARGET, PROMPTS[0], 6)
    assert kept.attached == 1
    del drafter
    gc.collect()
    assert engine._drafters.attached == [kept]
    assert not engine._drafting._late


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
            assert len(engine._drafting._late) <= 1
    assert max(sizes[1]) <= 32
