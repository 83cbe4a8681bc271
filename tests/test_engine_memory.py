"""Cached prefixes, shared pages, a drafter's own pages in the running engine: they change no text (KV, PC, BT)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Draft, Engine, EngineConfig, KVShape, Request
from specdec_kernels.engine.batch import share_pages
from specdec_kernels.engine.drafters.draft_model import DraftModelDrafter
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from specdec_kernels.engine.pages import PageState
from tests.toy_model import FixedDrafter, OracleDrafter, ToyModel
from tests.toy_text import RowModel, finish

TARGET = ToyTarget()
CONFIG = EngineConfig(page_size=4, num_pages=256, max_batch=8, max_step_tokens=64, check=True)


def expected_rows(tokens: list[int]) -> list[tuple[int, int]]:
    """What the toy model writes for each token, in its two layers."""
    rows, lower = [], 0
    for position, token in enumerate(tokens):
        value = TARGET.lower_value(token, position)
        lower += value
        rows.append((value, TARGET.upper_value(lower, token, position)))
    return rows


def check_cached_pages(engine: Engine) -> int:
    """PC-01: the content of every cached page equals the KV recomputed from its key. Returns how many are SOFT."""
    size, soft = engine.config.page_size, 0
    for page, node in engine.prefixes._nodes.items():
        tokens: list[int] = []
        at = node
        while at.parent is not None:
            tokens = [*at.key, *tokens]
            at = at.parent
        wanted = expected_rows(tokens)[-size:]
        for layer in range(2):
            for cache in (engine.cache.k, engine.cache.v):
                assert cache[layer][page, :, 0, 0].tolist() == [row[layer] for row in wanted]
        soft += engine.arena.kept_as(page) == PageState.SOFT
    return soft


class Chains(OracleDrafter):
    """Chains, each token right with the drafter's hit rate."""

    def propose(self, states, limits, context):
        drafts = []
        for state, limit in zip(states, limits):
            text = list(state.tokens)
            for _ in range(self.random.randint(0, min(12, limit.depth))):
                right = self.random.random() < self.hit_rate
                text.append(self.target.greedy(text) if right else self.random.randrange(32))
            drafts.append(Draft.chain(text[len(state.tokens) :]))
        return drafts


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_PC_01_every_cached_page_is_what_its_key_says(page_size: int, kind: str):
    drafter = Chains(TARGET) if kind == "chains" else OracleDrafter(TARGET)
    engine = Engine(ToyModel(), drafter, replace(CONFIG, page_size=page_size, num_pages=160 // page_size))
    rng, soft = random.Random(page_size), 0
    stem = [rng.randrange(32) for _ in range(9)]
    for turn in range(12):
        prompt = stem[: rng.randint(1, 9)] + [rng.randrange(32) for _ in range(rng.randint(0, 6))]
        sampled = turn % 3 > 0
        engine.add(Request(prompt, max_tokens=12, temperature=0.7 * sampled, seed=turn, n=1 + turn % 2))
        while engine.has_work:
            engine.step()
            soft = max(soft, check_cached_pages(engine))
    assert soft > 0
    assert sum(engine.arena.evicted.values()) > 0
    assert engine.metrics.prefix_hits > 0


def test_a_rejected_path_is_reused_by_the_request_that_takes_it():
    """A sampling request drafts 20..27 and rejects them; one whose prompt goes that way finds their pages, and no other
    does. In a greedy text the rejected way is never taken: nothing is kept."""
    prompt, drafts = [1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25, 26, 27]
    for temperature, soft in ((0.8, 4), (0.0, 0)):
        model = ToyModel()
        engine = Engine(model, FixedDrafter(drafts), CONFIG)
        first = engine.add(Request(prompt, max_tokens=12, temperature=temperature, top_k=1))
        engine.step()
        (event,) = engine.step()
        assert event.num_accepted == 0
        token = plain_greedy(TARGET, prompt, 1)
        way = [*prompt, *token, *drafts]  # rows at 6: root, 7...14: drafts; full pages end at 8 and 12
        assert (
            engine.arena.pages_in(PageState.SOFT) == [] if not soft else len(engine.arena.pages_in(PageState.SOFT)) == 2
        )
        assert check_cached_pages(engine) == (2 if soft else 0)
        (other,) = finish(engine, Request([*way[:13], 9], max_tokens=5, drafter="none"))[-1:]
        assert other.token_ids == plain_greedy(TARGET, [*way[:13], 9], 5)
        assert engine.metrics.prefix_soft_hits == (8 if soft else 0)
        assert other.num_cached == (12 if soft else 4)
        assert engine.arena.num_unowned == 256
        assert first != other.request_id


@pytest.mark.parametrize("drafter", ["none", "ngram", "trees", "drawn"])
def test_PC_04_warm_equals_cold_and_speculation_costs_no_hits(drafter: str):
    made = {"trees": OracleDrafter(TARGET), "drawn": SelfDrafter(layers=(1,), num_drafts=3, min_prob=0.0)}
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    warm = Engine(ToyModel(), made.get(drafter, drafter), CONFIG)
    (turn,) = warm.generate([prompt], max_tokens=6)
    again = [*prompt, *turn.token_ids, 7, 8, 9]
    (second,) = warm.generate([again], max_tokens=20)
    assert second.num_cached == 12  # KV exists for 13 tokens
    cold = Engine(ToyModel(), made.get(drafter, drafter), replace(CONFIG, prefix_cache=False))
    (fresh,) = cold.generate([again], max_tokens=20)
    assert fresh.token_ids == second.token_ids == plain_greedy(TARGET, again, 20)
    assert (fresh.num_cached, cold.metrics.prefix_queries) == (0, 0)
    assert (warm.metrics.prefix_queries, warm.metrics.prefix_hits) == (8 + 17, 12)


def test_PC_04_acceptance_is_the_same_warm_and_cold():
    """The drafter is the target: not one draft is refused, cold or warm."""
    engine = Engine(ToyModel(), SelfDrafter(layers=(0, 1), num_drafts=3, min_prob=0.0), CONFIG)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    for turn in range(4):
        (result,) = engine.generate([text], max_tokens=6)
        text = [*text, *result.token_ids, turn]
        assert result.stats.rejected == 0
        assert (result.num_cached > 0) == (turn > 0)


def test_stop_overshoot_is_no_prefix():
    """BT-01: what was verified behind a stop is not committed text; it may be found only by its own tokens."""
    engine = Engine(ToyModel(), OracleDrafter(TARGET, hit_rate=1.0, width=0), CONFIG)
    plain = plain_greedy(TARGET, [1, 2, 3], 40)
    stop = plain[9]
    (result,) = engine.generate([[1, 2, 3]], max_tokens=40, stop_token_ids=(stop,))
    assert result.finish_reason == "stop"
    length = 3 + len(result.token_ids)
    assert engine.metrics.overshoot > 0
    cached = [*[1, 2, 3], *plain]
    assert engine.prefixes.match(cached).num_tokens == 0  # another namespace
    hit = engine.prefixes.match(cached, (*engine._namespace, ""))
    assert hit.num_tokens <= length
    assert engine.arena.pages_in(PageState.SOFT) == []
    engine.arena.shrink(list(hit.pages), 0)


@pytest.mark.parametrize("drafter", ["none", "trees", "drawn"])
def test_BT_06_preemption_at_any_step_changes_nothing(drafter: str):
    prompts = [[5, 6, 7, 5, 6], [9] * 6]
    for at in range(12):
        made = {"trees": OracleDrafter(TARGET), "drawn": SelfDrafter(layers=(1,), num_drafts=2, min_prob=0.0)}
        engine = Engine(ToyModel(), made.get(drafter, drafter), replace(CONFIG, prefix_cache=at % 2 == 0))
        ids = [engine.add(Request(p, max_tokens=16)) for p in prompts]
        found, step = {}, 0
        while engine.has_work:
            if step in (at, at + 2) and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[step % len(engine.scheduler.running)])
            found.update({e.request_id: e.result for e in engine.step() if e.result})
            step += 1
        assert [found[i].token_ids for i in ids] == [plain_greedy(TARGET, p, 16) for p in prompts]
        for result in found.values():
            assert all(value >= 0 for value in result.stats.__dict__.values() if isinstance(value, int))
        assert engine.metrics.preemptions > 0 or at > 8


@pytest.mark.parametrize("hook", ["forward", "drafter"])
def test_KV_07_an_abort_in_mid_step_frees_nothing_before_its_end(hook: str):
    """A is aborted while its step runs, B is queued at the same moment; freed pages are poisoned. B's text is B's."""
    model, drafter = ToyModel(), OracleDrafter(TARGET)
    engine = Engine(model, drafter, replace(CONFIG, num_pages=12, poison=True, prefix_cache=False))
    first = engine.add(Request([1] * 20, max_tokens=20))
    steps = {"count": 0}
    owner, name = (model, "forward") if hook == "forward" else (drafter, "propose")
    original = getattr(owner, name)

    def interrupted(*arguments):
        steps["count"] += 1
        if steps["count"] == 3:
            held = list(engine._states[first].pages)
            assert engine.abort(first) is None
            steps["second"] = engine.add(Request([2] * 20, max_tokens=20))
            assert engine._states[first].pages == held
        return original(*arguments)

    setattr(owner, name, interrupted)
    results = {}
    while engine.has_work:
        results.update({e.request_id: e.result for e in engine.step() if e.result})
    assert results[first].finish_reason == "abort"
    assert results[first].token_ids == plain_greedy(TARGET, [1] * 20, 20)[: len(results[first].token_ids)]
    assert results[steps["second"]].token_ids == plain_greedy(TARGET, [2] * 20, 20)
    assert engine.arena.num_free == 12


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_poisoned_pages_change_nothing(prefix_cache: bool):
    """NaN in every FREE and SOFT page before every forward pass."""
    model = ToyModel()
    engine = Engine(model, OracleDrafter(TARGET), replace(CONFIG, num_pages=40, prefix_cache=prefix_cache, poison=True))
    forward, poisoned = model.forward, set()

    def poisoning(batch, cache, layers=None):
        pages = engine.arena.pages_in(PageState.FREE) + engine.arena.pages_in(PageState.SOFT)
        poisoned.update(engine.arena.state(page) for page in pages)
        for tensor in (*cache.k, *cache.v):
            tensor[pages] = float("nan")
        return forward(batch, cache, layers)

    model.forward = poisoning
    rng = random.Random(0)
    for turn in range(6):
        prompts = [[turn, *[rng.randrange(32) for _ in range(rng.randint(1, 20))]] for _ in range(3)]
        sampled = [Request(p, max_tokens=12, temperature=1.0, seed=1) for p in prompts]
        greedy = [Request(p, max_tokens=12) for p in prompts]
        results = finish(engine, *sampled, *greedy)
        assert [r.token_ids for r in results[3:]] == [plain_greedy(TARGET, p, 12) for p in prompts]
        assert all(r.finish_reason == "length" for r in results)
        clean = Engine(ToyModel(), "none", replace(CONFIG, prefix_cache=False))
        assert [len(r.token_ids) for r in finish(clean, *sampled)] == [12] * 3
    assert (PageState.SOFT in poisoned) == prefix_cache
    assert engine.metrics.prefix_soft_hits == 0


def test_poisoned_committed_pages_would_be_noticed():
    engine = Engine(ToyModel(), "none", CONFIG)
    prompt = list(range(12))
    engine.generate([prompt], max_tokens=2)
    for tensor in (*engine.cache.k, *engine.cache.v):
        tensor[engine.arena.pages_in(PageState.COMMITTED)] = float("nan")
    assert engine.generate([prompt], max_tokens=8)[0].token_ids != plain_greedy(TARGET, prompt, 8)


def test_changed_weights_flush_everything():
    model = RowModel(torch.eye(8).roll(1, 1))
    engine = Engine(model, "ngram", CONFIG)
    engine.generate([[1, 2, 3, 4, 5, 6]], max_tokens=8)
    running = engine.add(Request([1, 2, 3, 4, 5, 6], max_tokens=8))
    for _ in range(3):
        engine.step()
    before = len(engine._states[running].output)
    model.rows = torch.eye(8).roll(2, 1)
    engine.weights_changed()
    assert len(engine.prefixes) == 0
    results = {}
    while engine.has_work:
        results.update({e.request_id: e.result for e in engine.step() if e.result})
    ids = results[running].token_ids
    assert [(b - a) % 8 for a, b in zip([6, *ids], ids)] == [1] * before + [2] * (8 - before)
    assert engine.generate([[1, 2, 3, 4, 5, 6]], max_tokens=2)[0].num_cached == 4  # of the new weights
    assert engine.metrics.preemptions == 1


def test_salts_keep_requests_apart():
    engine = Engine(ToyModel(), "none", CONFIG)
    prompt = list(range(12))
    cached = [
        finish(engine, Request(prompt, max_tokens=2, cache_salt=s))[0].num_cached for s in ("", "a", "a", "b", "")
    ]
    assert cached == [0, 0, 8, 0, 8]


# ---- a drafter with KV of its own


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_KV_06_a_draft_model_equal_to_the_target_is_never_refused(num_drafts: int):
    """Rewinding one entry too many starves the drafter, one too few leaves a stale row: acceptance would fall."""
    engine = Engine(ToyModel(), DraftModelDrafter(ToyModel(), num_drafts), CONFIG)
    prompt = [3, 1, 4, 1, 5]
    (result,) = engine.generate([prompt], max_tokens=200)
    assert result.token_ids == plain_greedy(TARGET, prompt, 200)
    assert (result.stats.rejected, result.stats.drafter_failures) == (0, 0)
    assert result.stats.mean_accepted_length > num_drafts
    assert engine.arena.active == [0, 0]


@pytest.mark.parametrize("accepted", range(5))
def test_KV_06_what_is_fed_next(accepted: int):
    """K = 4 drafts, a accepted: the target keeps a + 1 rows of 5; of the draft's 4 rows, root and 3 drafts, it keeps
    a + 1 for a <= 3, and for a = 4 all, and must be fed the last draft."""
    fed: list[list[int]] = []

    class Recorded(ToyModel):
        def forward(self, batch, cache, layers=None):
            fed.append(batch.token_ids.tolist())
            return super().forward(batch, cache, layers)

    target = ToyModel()
    engine = Engine(target, DraftModelDrafter(Recorded(), 4), CONFIG)
    engine.add(Request([1, 2, 3], max_tokens=12))
    engine.step()
    state = next(iter(engine._states.values()))
    plain, forward = plain_greedy(TARGET, [1, 2, 3], 12), target.forward

    def spoiled(batch, cache, layers=None):
        logits = forward(batch, cache, layers)
        if accepted < 4:
            logits[accepted, (plain[accepted + 1] + 5) % 32] = 9.0
        return logits

    target.forward = spoiled
    engine.step()
    notes = state.drafter_state
    assert (state.context_len, notes.length, len(notes.drafts)) == (3 + accepted + 1, 4, 3)
    target.forward = forward
    fed.clear()
    engine.step()
    text = state.tokens
    assert fed[0] == (text[7:9] if accepted == 4 else text[4 + accepted : 5 + accepted])


@pytest.mark.parametrize("other", [ToyTarget(surprise=3), ToyTarget(vocab=40)])
def test_a_poor_draft_model_changes_nothing(other: ToyTarget):
    """Chunked reading of long prompts, sampled neighbours, a vocabulary of its own, little memory."""
    rng = random.Random(1)
    prompts = [[rng.randrange(32) for _ in range(rng.randint(1, 40))] for _ in range(10)]
    drafter = DraftModelDrafter(ToyModel(other), 4, max_catch_up=16)
    engine = Engine(ToyModel(), drafter, replace(CONFIG, num_pages=48, max_batch=4, poison=True))
    requests = [Request(p, max_tokens=20) for p in prompts]
    noise = [Request([i], max_tokens=20, temperature=1.0) for i in range(4)]
    results = finish(engine, *requests, *noise)
    assert [r.token_ids for r in results[:10]] == [plain_greedy(TARGET, p, 20) for p in prompts]
    assert engine.metrics.drafted > 50
    assert engine.arena.num_unowned == 48


@pytest.mark.parametrize("draft_pages", [True, False])
def test_a_drafter_with_pages_of_its_own_drafts_to_the_end(draft_pages: bool):
    """Pages for exactly the target's text. Without its own, the drafter gives its pages back as the text grows."""
    drafter, sizes = DraftModelDrafter(ToyModel(), 3), []
    propose = drafter.propose

    def noting(states, limits, context):
        drafts = propose(states, limits, context)
        sizes.append(sum(map(len, drafts)))
        return drafts

    drafter.propose = noting
    config = replace(CONFIG, num_pages=3 * 16, max_batch=3, num_drafts=3, draft_pages=draft_pages, prefix_cache=False)
    engine = Engine(ToyModel(), drafter, config)
    results = finish(engine, *[Request([i, 2, 3], max_tokens=58) for i in range(3)])
    assert [r.token_ids for r in results] == [plain_greedy(TARGET, [i, 2, 3], 58) for i in range(3)]
    assert (min(sizes) > 0) == draft_pages
    assert (engine.arena.reclaimed == 0) == draft_pages


def test_borrowed_draft_pages_go_back_to_the_target():
    """20 pages, of which the drafter borrows; longer texts of the target take them back, and all go on."""
    engine = Engine(
        ToyModel(),
        DraftModelDrafter(ToyModel(), 3),
        EngineConfig(page_size=4, num_pages=20, max_batch=3, max_step_tokens=32, check=True, prefix_cache=False),
    )
    results = engine.generate([[1, 2, 3], [4, 5], [6]], max_tokens=20)
    assert [r.token_ids for r in results] == [plain_greedy(TARGET, p, 20) for p in ([1, 2, 3], [4, 5], [6])]
    assert engine.arena.reclaimed > 0
    assert engine.metrics.accepted > 0
    assert engine.arena.num_free == 20


def test_two_models_share_the_bytes_of_a_page():
    target, draft = KVShape(6, 2, 64, torch.float32), KVShape(1, 1, 64, torch.bfloat16)
    big, small = share_pages(target, draft, 3, 4, torch.device("cpu"))
    assert small.page_size == 4 * 6 * 2 * 2 * 4 // (1 * 2 * 2)
    for tensor in (*big.k, *big.v):
        tensor.zero_()
    for tensor in (*small.k, *small.v):
        tensor[1] = 1.0
    for tensor in (*big.k, *big.v):
        assert tensor[0].abs().sum() == tensor[2].abs().sum() == 0
    assert any(tensor[1].abs().sum() > 0 for tensor in big.k)
    with pytest.raises(ValueError, match="page_size: expected at least 24 with this drafter, got 1"):
        share_pages(draft, target, 3, 1, torch.device("cpu"))
    engine = Engine(ToyModel(), "none", CONFIG)
    with pytest.raises(ValueError, match="expected one without KV of its own"):
        engine.add(Request([1], drafter=DraftModelDrafter(ToyModel())))
