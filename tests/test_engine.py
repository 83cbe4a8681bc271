"""The engine on the toy target, whose every token is exact: speculation, batching and paging must change nothing."""

from __future__ import annotations

import random

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy, speculative_greedy
from specdec_kernels.engine import Draft, Engine, EngineConfig, Request
from specdec_kernels.engine.drafters.ngram import NgramDrafter
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from tests.toy_model import OracleDrafter, ToyModel

TARGET = ToyTarget()
CONFIG = EngineConfig(page_size=4, num_pages=512, max_batch=8, max_step_tokens=64, check=True)


def prompts(count: int = 20, longest: int = 40, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(TARGET.vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def drafters() -> dict:
    return {
        "none": "none",
        "ngram": "ngram",
        "self": SelfDrafter(layers=(1,), num_drafts=3, min_prob=0.0),
        "whole self": SelfDrafter(layers=(0, 1), num_drafts=4, min_prob=0.0),
        "oracle trees": OracleDrafter(TARGET),
        "hopeless": OracleDrafter(TARGET, hit_rate=0.0),
    }


PROMPTS = prompts()
PLAIN = [plain_greedy(TARGET, prompt, 128) for prompt in PROMPTS]


def test_reference_loop_equals_plain_decoding():
    oracle = OracleDrafter(TARGET)
    for prompt, plain in zip(PROMPTS[:5], PLAIN):
        output, steps = speculative_greedy(TARGET, prompt, 128, lambda tokens: oracle.tree(tokens, 12, 5))
        assert output == plain
        assert steps < 100


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("name", list(drafters()))
def test_greedy_output_equals_plain_decoding(name: str, max_batch: int):
    engine = Engine(ToyModel(), drafters()[name], EngineConfig(4, 512, max_batch, 64, check=True))
    results = engine.generate(PROMPTS, max_tokens=128)
    assert [r.token_ids for r in results] == PLAIN
    assert all(r.finish_reason == "length" for r in results)
    assert engine.arena.num_unowned == 512
    assert engine.metrics.drafter_failures == 0
    if name in ("ngram", "oracle trees", "whole self"):
        assert engine.metrics.mean_accepted_length > 1.3
    if name == "whole self":  # the drafter is the target: it is never refused
        assert engine.metrics.rejected == 0


def test_the_comparison_can_fail():
    """A drafter whose tokens were taken unverified would change the text: the toy target tells."""

    class Unverified(ToyModel):
        def forward(self, batch, cache, layers=None):
            logits = super().forward(batch, cache, layers)
            if batch.logit_rows is None and len(logits) > 1:  # favour each row's successor row: "accept everything"
                logits[:-1].scatter_(1, batch.token_ids[1:, None], 9.0)
            return logits

    engine = Engine(Unverified(), OracleDrafter(TARGET, hit_rate=0.3), CONFIG)
    assert engine.generate(PROMPTS[:2], max_tokens=64)[0].token_ids != PLAIN[0][:64]


def test_stale_cache_rows_change_the_text():
    """Every cached row matters: without `commit_kv` the text of branched drafts goes wrong."""
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    engine._commit = lambda packed, verified: None
    assert [r.token_ids for r in engine.generate(PROMPTS, max_tokens=64)] != [p[:64] for p in PLAIN]


@pytest.mark.parametrize("name", ["none", "ngram", "oracle trees"])
def test_preemption_and_tiny_pool(name: str):
    """More text than pages: requests are sent back and resumed, nothing is lost, nothing changes."""
    config = EngineConfig(page_size=4, num_pages=60, max_batch=6, max_step_tokens=16, check=True)
    engine = Engine(ToyModel(), drafters()[name], config)
    results = engine.generate(PROMPTS, max_tokens=100)
    assert [r.token_ids for r in results] == [p[:100] for p in PLAIN]
    assert engine.metrics.preemptions > 0
    assert engine.arena.num_unowned == 60


def test_pool_too_small_for_one_request():
    engine = Engine(ToyModel(), "none", EngineConfig(page_size=4, num_pages=10, check=True))
    first, second = engine.generate([PROMPTS[0][:8], [1, 2]], max_tokens=100)
    assert first.finish_reason == second.finish_reason == "memory"
    assert first.token_ids == plain_greedy(TARGET, PROMPTS[0][:8], 100)[: len(first.token_ids)]
    assert len(first.token_ids) == 40 - 8 + 1  # all 40 slots used; the last token needs none
    with pytest.raises(ValueError, match=r"Request: prompt: expected at most 39 tokens .*, got 40"):
        engine.add(Request([1] * 40))
    assert engine.generate([[5, 6]], max_tokens=5)[0].token_ids == plain_greedy(TARGET, [5, 6], 5)


def test_nan_in_free_pages_changes_nothing():
    model = ToyModel()
    engine = Engine(model, OracleDrafter(TARGET), CONFIG)
    forward = model.forward

    def poisoning(batch, cache, layers=None):
        free = torch.tensor(engine.arena._free)
        for tensor in (*cache.k, *cache.v):
            tensor[free] = float("nan")
        return forward(batch, cache, layers)

    model.forward = poisoning
    assert [r.token_ids for r in engine.generate(PROMPTS[:10], max_tokens=64)] == [p[:64] for p in PLAIN[:10]]


def test_requests_come_and_go():
    """Requests added, aborted and finished between steps; the others are unmoved."""
    engine = Engine(ToyModel(), NgramDrafter(), CONFIG)
    rng = random.Random(3)
    wanted, got, alive = {}, {}, []
    for turn in range(300):
        if turn < 60 and rng.random() < 0.5:
            prompt, length = rng.choice(PROMPTS), rng.randint(1, 40)
            request_id = engine.add(Request(prompt, max_tokens=length))
            wanted[request_id] = plain_greedy(TARGET, prompt, length)
            alive.append(request_id)
        if alive and rng.random() < 0.1:
            request_id = alive.pop(rng.randrange(len(alive)))
            result = engine.abort(request_id)
            if result is not None:
                assert result.finish_reason == "abort"
                assert result.token_ids == wanted.pop(request_id)[: len(result.token_ids)]
        for event in engine.step():
            if event.result is not None:
                got[event.request_id] = event.result.token_ids
                alive = [a for a in alive if a != event.request_id]
    assert got == wanted
    assert not engine.has_work
    assert engine.arena.num_unowned == CONFIG.num_pages
    assert engine.abort(12345) is None


class Faulty:
    def __init__(self, answer):
        self.name, self.answer = "faulty", answer

    def propose(self, states, limits, context):
        return self.answer(states, limits)


def _raise(states, limits):
    raise RuntimeError("no drafts today")


@pytest.mark.parametrize(
    "answer",
    [
        _raise,
        lambda states, limits: [],
        lambda states, limits: [Draft.chain([1] * (limit.depth + 1)) for limit in limits],
        lambda states, limits: [Draft((1, 2), (0, 5))] * len(states),
        lambda states, limits: [Draft((1, 2), (0,))] * len(states),
        lambda states, limits: [None] * len(states),
    ],
    ids=["raises", "too few", "too deep", "bad parent", "ragged", "no draft"],
)
def test_faulty_drafter_degrades_to_plain_decoding(answer):
    engine = Engine(ToyModel(), "ngram", CONFIG)
    healthy = [engine.add(Request(p, max_tokens=30)) for p in PROMPTS[:2]]
    faulty = [engine.add(Request(p, max_tokens=30, drafter=Faulty(answer))) for p in PROMPTS[2:4]]
    results = {}
    while engine.has_work:
        results.update({e.request_id: e.result for e in engine.step() if e.result})
    assert [results[i].token_ids for i in healthy + faulty] == [p[:30] for p in PLAIN[:4]]
    assert [results[i].stats.drafter_failures for i in healthy + faulty] == [0, 0, 1, 1]
    assert engine.metrics.drafter_failures == 2


@pytest.mark.parametrize("token", [-1, -7, TARGET.vocab, 10**6])
def test_garbage_draft_ids_are_refused(token: int):
    engine = Engine(
        ToyModel(), Faulty(lambda s, limits: [Draft.chain([token] * min(2, k.depth)) for k in limits]), CONFIG
    )
    result = engine.generate(PROMPTS[:1], max_tokens=20)[0]
    assert result.token_ids == PLAIN[0][:20]
    assert result.stats.accepted == 0


def test_nan_logits_end_only_their_request():
    model = ToyModel()
    engine = Engine(model, "ngram", CONFIG)
    texts = [p + o for p, o in zip(PROMPTS[:4], PLAIN)]
    victim = texts[0][len(PROMPTS[0]) + 10]
    model.nan_token = victim
    results = engine.generate(PROMPTS[:4], max_tokens=60)
    for prompt, plain, result in zip(PROMPTS, PLAIN, results):
        clean = next((i for i, t in enumerate(plain[:60]) if t == victim), None)
        if prompt[-1] == victim:
            assert (result.finish_reason, result.token_ids) == ("error", [])
        elif clean is None or clean == 59:
            assert (result.finish_reason, result.token_ids) == ("length", plain[:60])
        else:
            assert (result.finish_reason, result.token_ids) == ("error", plain[: clean + 1])
            assert "flags" in (result.error or "")
    assert results[0].finish_reason == "error"
    assert engine.metrics.flagged == sum(r.finish_reason == "error" for r in results)
    model.nan_token = None
    assert engine.generate(PROMPTS[:1], max_tokens=20)[0].token_ids == PLAIN[0][:20]


def test_a_raising_callback_leaves_the_engine_usable():
    engine = Engine(ToyModel(), "ngram", CONFIG)

    def refuse(index, event):
        raise KeyError("the listener left")

    with pytest.raises(KeyError):
        engine.generate(PROMPTS[:3], max_tokens=20, on_event=refuse)
    assert not engine.has_work
    assert engine.arena.num_unowned == CONFIG.num_pages
    assert engine.generate(PROMPTS[:1], max_tokens=20)[0].token_ids == PLAIN[0][:20]


def test_events_add_up_to_the_result():
    seen: list = []
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    results = engine.generate(PROMPTS[:3], max_tokens=40, on_event=lambda i, event: seen.append((i, event)))
    for i, result in enumerate(results):
        events = [event for index, event in seen if index == i]
        assert [t for e in events for t in e.token_ids] == result.token_ids
        assert sum(e.num_accepted for e in events) == result.stats.accepted
        assert [e.result for e in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].result is result or events[-1].result == result


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": []}, ValueError, "Request: prompt: expected at least one token"),
        ({"prompt": "text"}, ValueError, "Request: prompt: expected token ids"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, ValueError, "chat template"),
        ({"prompt": 7}, TypeError, "Request: prompt"),
        ({"prompt": [1.5]}, TypeError, "Request: prompt"),
        ({"prompt": [1, 32]}, ValueError, r"Request: prompt: expected token ids in \[0, 32\), got 32"),
        ({"prompt": [1] * 512}, ValueError, "Request: prompt: expected fewer tokens than the model's context of 512"),
        ({"max_tokens": 0}, ValueError, "Request: max_tokens"),
        ({"temperature": -1.0}, ValueError, "Request: temperature"),
        ({"temperature": float("nan")}, ValueError, "Request: temperature"),
        ({"top_p": 0.0}, ValueError, "Request: top_p"),
        ({"top_k": -1}, ValueError, "Request: top_k"),
        ({"min_p": 1.5}, ValueError, "Request: min_p"),
        ({"seed": 2**63}, ValueError, "Request: seed"),
        ({"drafter": "oracle"}, ValueError, "Engine: drafter: expected one of"),
        ({"drafter": 5}, TypeError, "Engine: drafter"),
    ],
)
def test_bad_requests_are_named_and_leave_the_engine_usable(change, error, message):
    engine = Engine(ToyModel(), "ngram", CONFIG)
    with pytest.raises(error, match=message):
        engine.add(Request(**{"prompt": [1, 2, 3], **change}))
    assert not engine.has_work
    assert engine.generate(PROMPTS[:1], max_tokens=9)[0].token_ids == PLAIN[0][:9]


def test_one_bad_prompt_starts_none():
    engine = Engine(ToyModel(), "none", CONFIG)
    with pytest.raises(ValueError, match="at least one token"):
        engine.generate([[1, 2], []], max_tokens=4)
    assert not engine.has_work
    with pytest.raises(TypeError, match="expected a list of prompts"):
        engine.generate("one string")
    assert engine.generate([], max_tokens=4) == []


@pytest.mark.parametrize(
    "change", [{"page_size": 0}, {"num_pages": 0}, {"max_batch": 0}, {"max_step_tokens": 0}, {"num_drafts": -1}]
)
def test_bad_configurations_are_named(change):
    with pytest.raises(ValueError, match=f"EngineConfig: {next(iter(change))}: expected an int"):
        Engine(ToyModel(), "none", EngineConfig(**change))
