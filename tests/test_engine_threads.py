"""One thread steps; others add, abort and scrape meanwhile. Nothing is lost, changed twice, or seen half done."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace

import pytest

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.metrics import EngineCounters, SpecCounters
from tests.toy_model import OracleDrafter, ToyModel

TARGET = ToyTarget()
CONFIG = EngineConfig(page_size=4, num_pages=64, max_batch=6, max_step_tokens=24, check=True, poison=True)


@pytest.fixture
def eager_switches():
    """Threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("moment", ["begins", "ends"])
def test_an_abort_waits_while_a_step_begins_or_ends(moment: str):
    """Between a step's last bookkeeping and its return, and between an abort's look at the step and what it frees, the
    other side is not let in."""
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    ids = [engine.add(Request([i, 5, 6], max_tokens=20)) for i in range(3)]
    for _ in range(3):
        engine.step()
    scheduler, found, waited = engine.scheduler, {}, []

    def in_another_thread(work) -> threading.Thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.3)
        waited.append(thread.is_alive())
        return thread

    threads = []
    if moment == "ends":
        settle = scheduler.settle

        def settling(states):
            if not threads:
                threads.append(in_another_thread(lambda: found.update({ids[1]: engine.abort(ids[1])})))
            settle(states)

        scheduler.settle = settling
        found.update({e.request_id: e.result for e in engine.step() if e.result})
    else:
        remove = scheduler.remove

        def removing(state):
            if not threads:
                events = lambda: found.update({e.request_id: e.result for e in engine.step() if e.result})  # noqa: E731
                threads.append(in_another_thread(events))
            remove(state)

        scheduler.remove = removing
        found[ids[1]] = engine.abort(ids[1])
    threads[0].join()
    assert waited == [True]
    while engine.has_work:
        found.update({e.request_id: e.result for e in engine.step() if e.result})
    assert [found[i].finish_reason for i in ids] == ["length", "abort", "length"]
    for i in ids:
        text = plain_greedy(TARGET, [ids.index(i), 5, 6], 20)
        assert found[i].token_ids == text[: len(found[i].token_ids)]
    assert engine.arena.num_unowned == 64


def test_adding_and_aborting_from_threads_while_the_engine_steps(eager_switches):
    """Every request ends once, as an event or as what its abort returned; its text is a prefix of plain decoding."""
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    prompts: dict[int, list[int]] = {}
    returned: list = []
    errors: list = []
    done = threading.Event()

    def client(seed: int) -> None:
        rng, mine = random.Random(seed), []
        try:
            for _ in range(40):
                prompt = [rng.randrange(32) for _ in range(rng.randint(1, 12))]
                request_id = engine.add(Request(prompt, max_tokens=rng.randint(1, 12)))
                prompts[request_id] = prompt
                mine.append(request_id)
                if rng.random() < 0.6:
                    result = engine.abort(rng.choice(mine))
                    if result is not None:
                        returned.append(result)
        except Exception as error:
            errors.append(error)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(3)]
    events: list = []

    def scrape() -> None:
        try:
            while not done.is_set():
                EngineCounters().merge(engine.metrics)
        except Exception as error:
            errors.append(error)

    scraper = threading.Thread(target=scrape)
    for thread in [*clients, scraper]:
        thread.start()
    while engine.has_work or any(thread.is_alive() for thread in clients):
        events += [event.result for event in engine.step() if event.result]
    done.set()
    scraper.join()
    assert not errors
    ended = [result.request_id for result in events + returned]
    assert sorted(ended) == sorted(prompts)
    assert len(set(ended)) == 120 == engine.metrics.finished
    for result in events + returned:
        text = plain_greedy(TARGET, prompts[result.request_id], 12)
        assert result.token_ids == text[: len(result.token_ids)]
        assert result.finish_reason in ("length", "abort")
    assert sum(result.finish_reason == "abort" for result in events + returned) > 10
    assert engine.arena.active == [0, 0]
    engine.memory.check([])


def test_counters_that_grow_while_they_are_added_up():
    """What another thread does in the middle of a scrape, done by the values that are read."""

    class Growing(int):
        def __radd__(self, other):
            live.emitted_per_step.append(1)
            live.finished_by[str(len(live.finished_by))] = Growing(1)
            live.of_class("m", 0.0, len(live.by_class))
            return other + int(self)

    live = EngineCounters()
    live.emitted_per_step = [Growing(3), 2]
    live.finished_by = {"length": Growing(5), "stop": 1}
    live.by_class[("m", "greedy", 0)] = SpecCounters(steps=Growing(2))
    total = EngineCounters()
    total.merge(live)
    assert total.emitted_per_step[:2] == [3, 2]
    assert (total.finished_by["length"], total.finished_by["stop"]) == (5, 1)
    assert total.by_class[("m", "greedy", 0)].steps == 2
    assert len(live.emitted_per_step) > 2
    again = EngineCounters()
    again.merge(replace(live, emitted_per_step=[4]))
    assert again.emitted_per_step == [4]
