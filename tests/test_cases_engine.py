"""Faults reported by users of other engines, end to end: the cases BT, KV-03, KV-04 and ME of the case list."""

from __future__ import annotations

import itertools
import random

import pytest

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Draft, Engine, EngineConfig, EngineCounters, Request, SpecCounters
from tests.toy_model import FixedDrafter, OracleDrafter, ToyModel
from tests.toy_text import ScriptModel

CONFIG = EngineConfig(page_size=4, num_pages=256, max_batch=17, max_step_tokens=256, check=True)


def chain(*ids: int) -> dict[int, int]:
    return dict(itertools.pairwise(ids))


@pytest.mark.parametrize("place", range(5))
def test_BT_01_eos_inside_the_accepted_block_ends_the_output_there(place: int):
    block = [11, 12, 13, 14, 15]
    block[place] = 2
    model = ScriptModel(chain(9, 10, *block), eos=(2,))
    engine = Engine(model, FixedDrafter(block[:4]), CONFIG)
    result = engine.generate([[9]], max_tokens=20)[0]
    assert result.token_ids == [10, *block[: place + 1]]
    assert result.finish_reason == "stop"
    assert result.stats.emitted == place + 2
    assert result.stats.accepted == min(4, place + 1)
    assert engine.arena.num_unowned == CONFIG.num_pages
    plain = Engine(model, "none", CONFIG).generate([[9]], max_tokens=20)[0]
    assert plain.token_ids == result.token_ids


def test_BT_01_a_drafted_eos_that_is_refused_ends_nothing():
    model = ScriptModel(chain(9, 10, 7, 8, 5), eos=(2,))
    engine = Engine(model, FixedDrafter([2]), CONFIG)
    engine.add(Request([9], max_tokens=4))
    assert [e.token_ids for e in engine.step()] == [[10]]
    (event,) = engine.step()
    assert (event.token_ids, event.num_accepted, event.result) == ([7], 0, None)
    while engine.has_work:
        (event,) = engine.step()
    assert event.result.token_ids == [10, 7, 8, 5]
    ignoring = Engine(ScriptModel(chain(9, 2, 3)), FixedDrafter(), CONFIG)
    assert ignoring.generate([[9]], max_tokens=3, ignore_eos=True)[0].token_ids == [2, 3, 4]
    stopped = ignoring.generate([[9]], max_tokens=3, stop_token_ids=(3,))[0]
    assert (stopped.token_ids, stopped.finish_reason) == ([2, 3], "stop")


@pytest.mark.parametrize("length", range(11, 16))
def test_BT_02_the_context_limit_is_used_in_full_and_never_passed(length: int):
    target = ToyTarget()
    model = ToyModel(target, max_context=16)
    engine = Engine(model, OracleDrafter(target, hit_rate=1.0, width=2), EngineConfig(4, 8, 4, 64, 4, check=True))
    prompt = [(3 * i + 1) % 32 for i in range(length)]
    result = engine.generate([prompt], max_tokens=50)[0]
    assert result.token_ids == plain_greedy(target, prompt, 16 - length)
    assert result.finish_reason == "length"
    assert model.greatest_position <= 15


def test_BT_02_a_drafter_with_a_shorter_context_stops_drafting_for_long_requests_only():
    target = ToyTarget()

    class Short(OracleDrafter):
        def propose(self, states, limits, context):
            drafts = super().propose(states, limits, context)
            return [d if len(s.tokens) <= 8 else Draft() for s, d in zip(states, drafts)]

    engine = Engine(ToyModel(target), Short(target, hit_rate=1.0), CONFIG)
    long, short = engine.generate([[5] * 9, [5, 6, 7]], max_tokens=5)
    assert long.stats.drafted == 0
    assert short.stats.drafted > 0
    assert long.token_ids == plain_greedy(target, [5] * 9, 5)
    assert short.token_ids == plain_greedy(target, [5, 6, 7], 5)


def test_BT_03_placeholders_are_no_drafts():
    model = ScriptModel({1: 0, 0: 0}, vocab=3)
    engine = Engine(model, FixedDrafter([-1, -1], [], [0]), CONFIG)
    engine.add(Request([1], max_tokens=5))
    steps = [engine.step()[0] for _ in range(4)]
    assert [(e.token_ids, e.num_accepted) for e in steps] == [([0], 0), ([0], 0), ([0], 0), ([0, 0], 1)]
    assert engine.metrics.accepted == 1


@pytest.mark.parametrize("batch", [1, 4, 17])
def test_BT_05_any_mix_of_draft_counts_equals_the_solo_runs(batch: int):
    target, rng = ToyTarget(), random.Random(batch)

    class Counted(OracleDrafter):
        """Chains of a random length 0..5; each token is right with probability 0.7."""

        def propose(self, states, limits, context):
            drafts = []
            for state, limit in zip(states, limits):
                text, size = list(state.tokens), min(rng.randint(0, 5), limit.depth)
                for _ in range(size):
                    text.append(target.greedy(text) if rng.random() < 0.7 else rng.randrange(32))
                drafts.append(Draft.chain(text[len(state.tokens) :]))
            return drafts

    prompts = [[rng.randrange(32) for _ in range(rng.randint(1, 40))] for _ in range(batch)]
    engine = Engine(ToyModel(target), Counted(target), CONFIG)
    for prompt, result in zip(prompts, engine.generate(prompts, max_tokens=30)):
        assert result.token_ids == plain_greedy(target, prompt, 30)
    assert engine.metrics.drafted > 0
    assert engine.step() == []  # B = 0


def test_BT_05_the_case_itself_and_no_drafts_at_all():
    """K = [3, 0, 1, 2] in one step: rows [0, 4, 5, 7, 10]; then K = 0 for everyone."""
    target = ToyTarget()
    counts = [3, 0, 1, 2]
    sizes = []

    class Mixed(OracleDrafter):
        def propose(self, states, limits, context):
            wanted = counts if len(states) == 4 and not sizes else [0] * len(states)
            drafts = []
            for state, count in zip(states, wanted):
                text = list(state.tokens)
                for _ in range(count):
                    text.append(target.greedy(text))
                drafts.append(Draft.chain(text[len(state.tokens) :]))
            sizes.append([len(d) for d in drafts])
            return drafts

    engine = Engine(ToyModel(target), Mixed(target), CONFIG)
    prompts = [[1], [2, 3, 4, 5], [6] * 9, [7, 8]]
    ids = [engine.add(Request(p, max_tokens=8)) for p in prompts]
    engine.step()
    events = {e.request_id: e for e in engine.step()}
    assert sizes[0] == counts
    assert [len(events[i].token_ids) for i in ids] == [4, 1, 2, 3]
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result})
    assert [found[i] for i in ids] == [plain_greedy(target, p, 8) for p in prompts]


@pytest.mark.parametrize(
    ("drafts", "emitted"), [([1, 6, 7], [5]), ([5, 9, 7], [5, 6]), ([5, 6, 7], [5, 6, 7, 8]), ([5, 6, 9], [5, 6, 7])]
)
def test_BT_07_row_i_judges_draft_i(drafts: list[int], emitted: list[int]):
    """Target argmax behind 4, 5, 6, 7 is 5, 6, 7, 8."""
    engine = Engine(ScriptModel({3: 4}), FixedDrafter(drafts), CONFIG)
    request_id = engine.add(Request([3], max_tokens=9))
    engine.step()
    (event,) = engine.step()
    assert event.token_ids == emitted
    state = engine._states[request_id]
    assert state.tokens == [3, 4, *emitted]
    assert state.context_len == len(state.tokens) - 1


def test_KV_03_pages_come_back_when_the_window_shrinks():
    """Page 4, L = 5, five wrong drafts: three pages during the step, two after it."""
    during = []
    engine = Engine(ScriptModel({}), FixedDrafter([31, 31, 31, 31, 31]), CONFIG)
    forward = engine.model.forward
    request_id = engine.add(Request([1, 2, 3, 4, 5], max_tokens=9, num_drafts=5))
    engine.step()
    state = engine._states[request_id]
    assert (state.context_len, len(state.pages)) == (5, 2)
    engine.model.forward = lambda *a, **k: (during.append(len(state.pages)), forward(*a, **k))[1]
    engine.step()
    assert during == [3]
    assert (state.context_len, len(state.pages)) == (6, 2)


def test_KV_03_a_thousand_steps_leave_no_page_behind():
    target = ToyTarget()
    engine = Engine(ToyModel(target), OracleDrafter(target), EngineConfig(4, 100, 4, 64, check=True))
    rng = random.Random(0)
    for _ in range(1000):
        while len(engine._states) < 6:
            engine.add(Request([rng.randrange(32) for _ in range(rng.randint(1, 30))], max_tokens=rng.randint(1, 40)))
        engine.step()
        for state in engine._states.values():
            assert len(state.pages) == -(-state.context_len // 4)
        if rng.random() < 0.05:
            engine.abort(rng.choice(list(engine._states)))
    for request_id in list(engine._states):
        engine.abort(request_id)
    assert engine.arena.num_unowned == 100


def test_KV_04_drafts_end_where_the_pages_do():
    """Page 16, L = 13, one page left to the other request: of five wished drafts two are made, its rows stay."""
    target = ToyTarget()
    prompts = [[1 + i % 9 for i in range(13)], [5, 4, 3]]
    config = EngineConfig(page_size=16, num_pages=2, max_batch=2, check=True, prefix_cache=False)
    engine, offered = Engine(ToyModel(target), FixedDrafter([31] * 5), config), []
    propose = engine._default_drafter.propose
    engine._default_drafter.propose = lambda s, limits, c: (offered.append(list(limits)), propose(s, limits, c))[1]
    ids = [engine.add(Request(prompt, max_tokens=12, num_drafts=5)) for prompt in prompts]
    results = {event.request_id: event.result for event in engine.step()}
    other = engine._states[ids[1]]
    page, known = other.pages[0], other.context_len
    before = [tensor[page, :known].clone() for tensor in (*engine.cache.k, *engine.cache.v)]
    engine.step()
    assert [limit.nodes for limit in offered[-1]] == [2, 5]
    for rows, tensor in zip(before, (*engine.cache.k, *engine.cache.v)):
        assert (rows == tensor[page, :known]).all()
    while engine.has_work:
        results |= {event.request_id: event.result for event in engine.step()}
    assert [results[key].token_ids for key in ids] == [plain_greedy(target, prompt, 12) for prompt in prompts]


def test_ME_01_empty_and_failed_steps_count_nothing():
    counters = SpecCounters()
    counters.record([1, 1, 1], num_accepted=-1, num_emitted=0, exhausted=False)
    assert counters == SpecCounters()
    counters.record([1, 1, 1], num_accepted=1, num_emitted=2, exhausted=False)
    before = SpecCounters(**counters.__dict__)
    counters.record([1, 1, 1], num_accepted=2, num_emitted=0, exhausted=True)
    assert counters == before
    assert counters.conditional_acceptance == 0.5
    assert SpecCounters().conditional_acceptance == SpecCounters().acceptance_per_draft == 0.0
    assert SpecCounters().mean_accepted_length == 0.0


def test_ME_02_what_counts_as_drafted():
    tree = SpecCounters()
    tree.record(Draft((1, 2, 3, 4), (0, 0, 1, 2)).depth_counts(), num_accepted=1, num_emitted=2, exhausted=False)
    assert (tree.drafted, tree.steps, tree.drafts) == (4, 1, 1)  # the root is none
    empty = SpecCounters()
    empty.record([], num_accepted=0, num_emitted=1, exhausted=True)
    assert (empty.drafted, empty.steps, empty.drafts, empty.rejected, empty.bonus) == (0, 1, 0, 0, 0)
    cut = SpecCounters()  # four accepted, the text ends behind the second
    cut.record([1] * 4, num_accepted=4, num_emitted=2, exhausted=True)
    assert (cut.drafted, cut.accepted, cut.emitted, cut.rejected, cut.bonus) == (4, 2, 2, 0, 0)
    assert cut.accepted <= cut.emitted


def test_ME_03_rates_are_token_weighted_and_merge_in_any_order():
    both = SpecCounters()
    both.record([1, 1, 1, 1], num_accepted=4, num_emitted=5, exhausted=True)
    both.record([1], num_accepted=0, num_emitted=1, exhausted=False)
    assert both.acceptance_per_draft == 4 / 5
    assert both.conditional_acceptance == 4 / 5
    assert both.mean_accepted_length == 3.0
    assert both.acceptance_at == [0.5, 1.0, 1.0, 1.0]
    shards = [SpecCounters(drafted=100, accepted=90, drafted_per_pos=[100]), SpecCounters(drafted=10, accepted=1)]
    shards[0].accepted_per_pos = [90]
    for order in (shards, shards[::-1]):
        merged = EngineCounters()
        for shard in order:
            merged.merge(shard)
        assert merged.acceptance_per_draft == 91 / 110
        assert merged.acceptance_at == [0.9]


def test_ME_03_engine_totals_are_the_sum_of_the_requests():
    target = ToyTarget()
    engine = Engine(ToyModel(target), OracleDrafter(target), CONFIG)
    results = engine.generate([[1, 2], [3], [4, 5, 6]], max_tokens=50)
    merged = SpecCounters()
    for result in results:
        merged.merge(result.stats)
        assert result.stats.emitted == 50
        assert result.stats.accepted + result.stats.steps >= 50
    for name, value in merged.__dict__.items():
        assert getattr(engine.metrics, name) == value, name
