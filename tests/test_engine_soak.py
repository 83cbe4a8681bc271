"""Random requests of every kind in tiny arenas, with aborts and pre-emptions: nothing lost, every greedy text exact."""

from __future__ import annotations

import random

import pytest

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Engine, EngineConfig, Request, Result
from specdec_kernels.engine.drafters.draft_model import DraftModelDrafter
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from tests.toy_model import OracleDrafter, ToyModel

TARGET = ToyTarget()


def soak(count: int, seed: int) -> Engine:
    """`count` requests through one engine of random shape; asserts all along, returns the engine for its counters."""
    rng = random.Random(seed)
    own_kv = rng.random() < 0.5
    main = DraftModelDrafter(ToyModel(ToyTarget(surprise=7)), rng.randint(1, 5)) if own_kv else "ngram"
    pages = rng.choice([40, 64, 120])
    config = EngineConfig(
        page_size=rng.choice([1, 2, 4]) if pages > 100 else 4,
        num_pages=pages,
        max_batch=rng.randint(2, 8),
        max_step_tokens=rng.choice([8, 24, 64]),
        num_drafts=rng.randint(0, 12),
        check=True,
        poison=rng.random() < 0.5,
        draft_floor=rng.choice([0, 4]) if own_kv else 0,
        prefix_cache=rng.random() < 0.8,
    )
    engine = Engine(ToyModel(max_context=150), main, config)
    drafters = [None, None, "none", "ngram", OracleDrafter(TARGET), SelfDrafter(layers=(1,), num_drafts=2, min_prob=0)]
    stems = [[rng.randrange(32) for _ in range(rng.randint(4, 30))] for _ in range(4)]
    longest = (pages - config.draft_floor) * config.page_size // 2
    alive: dict[int, Request] = {}
    ended: dict[int, Result] = {}
    greedy: dict[int, Request] = {}
    sent = 0
    while sent < count or engine.has_work:
        while sent < count and len(alive) < 12:
            prompt = rng.choice(stems)[: rng.randint(1, 30)] if rng.random() < 0.7 else []
            prompt = (prompt + [rng.randrange(32) for _ in range(rng.randint(1, 12))])[: max(1, longest - 2)]
            room = max(1, min(30, longest - len(prompt)))
            request = Request(
                prompt,
                max_tokens=rng.randint(1, room),
                temperature=rng.choice([0.0, 0.0, 0.0, 0.8]),
                seed=sent,
                drafter=rng.choice(drafters),
                num_drafts=rng.choice([None, None, 0, 3]),
                stop_token_ids=(rng.randrange(32),) if rng.random() < 0.3 else (),
                n=rng.choice([1, 1, 1, 2, 3]),
                cache_salt=rng.choice(["", "", "other"]),
                presence_penalty=1e-4 * rng.choice([0, 0, 1]),  # too small to change a greedy choice
                logprobs=rng.choice([None, None, "raw", "both"]),
            )
            first = engine.add(request)
            for i in range(request.n):
                alive[first + i] = request
                if request.temperature == 0:
                    greedy[first + i] = request
            sent += request.n
        if alive and rng.random() < 0.05:
            victim = rng.choice(sorted(alive))
            result = engine.abort(victim)
            if result is not None:
                ended[victim] = result
                del alive[victim]
        if rng.random() < 0.03 and engine.scheduler.running:
            engine.scheduler._preempt(rng.choice(engine.scheduler.running))
        if rng.random() < 0.002:
            engine.weights_changed()  # to equal ones
        for event in engine.step():
            if event.result is not None:
                ended[event.request_id] = event.result
                del alive[event.request_id]
    for request_id, request in greedy.items():
        result = ended[request_id]
        wanted = plain_greedy(TARGET, request.prompt, request.max_tokens, request.stop_token_ids)
        assert result.finish_reason in ("stop", "length", "abort")
        if result.finish_reason == "abort":
            wanted = wanted[: len(result.token_ids)]
        assert result.token_ids == wanted, (seed, request)
    assert all(r.logprobs is None or len(r.logprobs) == len(r.token_ids) for r in ended.values())
    assert engine.arena.active == [0, 0]
    assert engine.arena.num_unowned == pages
    if engine.prefixes is not None:
        engine.prefixes.flush()
    assert engine.arena.num_free == pages
    assert engine.metrics.drafter_failures == 0
    return engine


@pytest.mark.parametrize("seed", range(3))
def test_soak(seed: int):
    soak(60, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_soak_of_two_thousand_requests():
    engines = [soak(100, 100 + seed) for seed in range(20)]
    total = {name: sum(getattr(e.metrics, name) for e in engines) for name in ("requests", "preemptions", "accepted")}
    print(total, {"hits": sum(e.metrics.prefix_hits for e in engines), "evicted": sum(map(evictions, engines))})
    assert total["requests"] >= 2000
    assert total["preemptions"] > 100
    assert total["accepted"] > 1000
    assert sum(e.metrics.prefix_hits for e in engines) > 1000
    assert sum(map(evictions, engines)) > 100


def evictions(engine: Engine) -> int:
    return sum(engine.arena.evicted.values())
