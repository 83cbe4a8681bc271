"""Online distillation: nothing that is learnt, published or undone changes a text; what is worse is not kept."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Engine, EngineConfig, Request, TransformersModel
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.metrics import KEPT_VERSIONS
from specdec_kernels.training import OnlineDrafter, OnlineOptions
from specdec_kernels.training import online as module
from tests.engine_law import LIMIT, module_law, p_value, sample_texts
from tests.head_models import random_head
from tests.test_engine_transformers import SMALL, build
from tests.toy_model import ToyModel

transformers = pytest.importorskip("transformers")

CONFIG = EngineConfig(page_size=4, num_pages=256, check=True)
EAGER = OnlineOptions(share=0.9, length=12, depths=2, window=4, margin=0.0, lr=0.02)
PROMPTS = [[7, i, 3 * i + 1, 5] for i in range(6)]


def tiny(vocab: int = 5) -> tuple[TransformersModel, torch.nn.Module]:
    """(a target of few tokens, its module before it became one)."""
    torch.manual_seed(1)
    shape = SMALL | dict(vocab_size=vocab, hidden_size=64, num_hidden_layers=2, intermediate_size=64, eos_token_id=None)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, bos_token_id=None)).eval()
    for parameter in own.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    served = copy.deepcopy(own)
    own.set_attn_implementation("eager")
    return TransformersModel(served, pack=False), own


def markov() -> TransformersModel:
    """A target whose layers add nothing: the next token depends on the last one alone, and greedy text runs in
    circles. There is something to learn, in little time."""
    module = build("llama")
    for name, parameter in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    return TransformersModel(module, pack=False)


def drafter(kind: str, model, *, seed: int = 3, shape: str = "tree"):
    head = random_head(kind, model, seed=seed)
    chain = shape == "chain"
    if head.output is not None:
        head.output = head.output * 0.3 / head.output.std()  # lively laws, whatever the target's are
    if kind == "medusa":
        return MedusaDrafter(head, paths=[(0,), (0, 0)] if chain else [(0,), (1,), (0, 0), (1, 0)])
    return EagleDrafter(head, top_k=1 if chain else 2, depth=2, num_nodes=2 if chain else 5)


def scramble(online: OnlineDrafter, seed: int) -> None:
    """Give the candidate random weights."""
    torch.manual_seed(seed)
    for name, parameter in online.candidate.named_parameters():
        if parameter.dim() > 1:
            online.masters[name].normal_(0.0, 2.5 * parameter.shape[1] ** -0.5)
            parameter.data.copy_(online.masters[name])


class Swapping:
    """Publishes another random head behind every step."""

    def __init__(self, online: OnlineDrafter):
        self.online, self.seed = online, 0

    def __call__(self) -> None:
        self.seed += 1
        scramble(self.online, self.seed)
        self.online.publish()


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    [
        ("medusa", "tree", 800),
        ("eagle3", "chain", 600),
        *(pytest.param(k, s, 20_000, marks=pytest.mark.long) for k in ("medusa", "eagle3") for s in ("chain", "tree")),
    ],
)
def test_the_law_is_the_targets_while_heads_are_swapped(kind: str, shape: str, count: int):
    model, own = tiny()
    online = OnlineDrafter(drafter(kind, model, shape=shape), EAGER)
    engine = Engine(model, online, EngineConfig(page_size=4, num_pages=512, max_batch=64))
    swap = Swapping(online)
    seen = sample_texts(engine, count, 3, between=swap)
    assert p_value(module_law(own, [1, 3, 0, 2], 3), seen) > LIMIT
    m = engine.metrics
    assert m.drafter_failures == m.flagged == online.counters.failures == 0
    assert min(m.accepted, m.rejected) > count // 40
    assert online.version == swap.seed > 10
    assert {version for _, _, version in m.by_class} == set(range(swap.seed)[-KEPT_VERSIONS:])


class SwapsInAStep(OnlineDrafter):
    """Draws with one head and reports the law of the next: what publishing in the middle of a step would do."""

    def propose(self, states, limits, context):
        scramble(self, 1)
        self.publish()
        drafts = self.drafter.propose(states, limits, context)
        scramble(self, 2)
        self.publish()
        laws = self.drafter.propose(states, limits, context)
        return [dataclasses.replace(d, logits=new.logits) if len(d) else d for d, new in zip(drafts, laws)]


def test_a_swap_within_a_step_would_be_noticed():
    model, own = tiny()
    engine = Engine(
        model, SwapsInAStep(drafter("medusa", model, shape="chain"), EAGER), dataclasses.replace(CONFIG, max_batch=64)
    )
    seen = sample_texts(engine, 800, 3)
    assert engine.metrics.drafter_failures == 0
    assert p_value(module_law(own, [1, 3, 0, 2], 3), seen) < LIMIT


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_served_head_learns_and_the_text_stays(kind: str):
    """From random weights, in the engine: acceptance rises, heads are published, greedy text is that of the target."""
    model = markov()
    online = OnlineDrafter(drafter(kind, model, shape="chain"), EAGER)
    first = {name: value.clone() for name, value in online.drafter._given.named_parameters()}
    engine = Engine(model, online, CONFIG)
    plain = Engine(model, "none", CONFIG).generate(PROMPTS, max_tokens=40)
    for prompt, a, b in zip(PROMPTS, plain, engine.generate(PROMPTS, max_tokens=40)):
        difference = compare_greedy(model, prompt, a.token_ids, b.token_ids)
        assert difference is None or difference.excused, difference
    c, m = online.counters, engine.metrics
    assert c.published >= 1
    assert c.failures == m.drafter_failures == m.flagged == 0
    assert online.version == c.published + c.rolled_back
    assert c.chunks <= c.updates
    assert online.capture.tokens > 100
    early, late = list(online.history)[:4], list(online.history)[-4:]
    assert sum(s.served for s in late) > sum(s.served for s in early) + 0.08, (early, late)
    served = dict(online.served.named_parameters())
    assert any(not torch.equal(served[name], value) for name, value in first.items())
    assert all(served[name] is value for name, value in online.drafter._given.named_parameters())  # in place


def serve(engine: Engine, count: int, first: int = 0) -> None:
    engine.generate([[7, first + i, 5] for i in range(count)], max_tokens=48)


def test_what_is_worse_is_undone_and_what_is_not_better_is_not_served():
    model = markov()
    online = OnlineDrafter(drafter("medusa", model, shape="chain"), dataclasses.replace(EAGER, margin=0.01))
    engine = Engine(model, online, CONFIG)
    serve(engine, 6)
    assert online.counters.published >= 1
    good = {name: value.clone() for name, value in online.served.named_parameters()}
    undone, version, published = online.counters.rolled_back, online.version, online.counters.published
    scramble(online, 5)
    online.publish()
    assert not all(torch.equal(value, good[name]) for name, value in online.served.named_parameters())
    serve(engine, 2, 20)
    assert online.counters.rolled_back == undone + 1
    assert online.version >= version + 2
    if online.counters.published == published + 1:  # nothing newer has been published since
        assert all(torch.equal(value, good[name]) for name, value in online.served.named_parameters())
    with pytest.raises(ValueError, match="roll_back: expected a head on trial"):
        OnlineDrafter.roll_back(attached(model))
    never = OnlineDrafter(drafter("medusa", model), dataclasses.replace(EAGER, margin=1.0))
    engine = Engine(model, never, CONFIG)
    serve(engine, 6)
    assert (never.counters.published, never.version) == (0, 0)
    assert never.counters.chunks > 4


def attached(model, **changes) -> OnlineDrafter:
    online = OnlineDrafter(drafter("eagle3", model), dataclasses.replace(EAGER, **changes))
    online.attach(model)
    return online


def test_a_candidate_that_is_worse_begins_again():
    model = ToyModel()
    model_head = random_head("medusa", model)
    online = OnlineDrafter(MedusaDrafter(model_head), EAGER)
    online.served = model_head
    online._restart()
    scramble(online, 1)
    for served, candidate in ((0.6, 0.5), (0.5, 0.5), (0.6, 0.5), (0.6, 0.7)):
        online._scores.append(module.Scored(0, served, candidate, None))
    online._decide()
    assert online.counters.restarted == 1
    assert all(torch.equal(a, b) for a, b in zip(online.candidate.parameters(), online.served.parameters()))
    assert not online._scores


@pytest.mark.parametrize("times", [1, 1000])
def test_training_that_raises_costs_no_draft(times: int, monkeypatch):
    """One error: the candidate begins again; three in a row: the head stays as it is. Drafts go on, and all is
    counted."""
    real, calls = module.batch_loss, 0

    def raising(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls <= times:
            raise RuntimeError("no memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "batch_loss", raising)
    model = TransformersModel(build("llama"), pack=False)
    online = OnlineDrafter(drafter("medusa", model, shape="chain"), EAGER)
    engine = Engine(model, online, CONFIG)
    plain = Engine(model, "none", CONFIG).generate(PROMPTS, max_tokens=40)
    texts = engine.generate(PROMPTS, max_tokens=40)
    assert [r.token_ids for r in texts] == [r.token_ids for r in plain]
    assert engine.metrics.drafter_failures == 0
    assert engine.metrics.drafted > 100
    assert online.counters.failures == (1 if times == 1 else 3)
    assert online.stopped == (times > 1)
    assert (online.counters.updates > 0) == (times == 1)


def test_the_engine_survives_a_drafter_that_raises_between_steps():
    class Raising(MedusaDrafter):
        def between_steps(self, seconds):
            assert seconds > 0
            assert not torch.is_inference_mode_enabled()
            raise KeyError

    target = ToyTarget()
    model = ToyModel(target)
    engine = Engine(model, Raising(random_head("medusa", model)), CONFIG)
    texts = engine.generate(PROMPTS, max_tokens=12)
    assert [r.token_ids for r in texts] == [plain_greedy(target, p, 12) for p in PROMPTS]
    assert engine.metrics.drafter_failures == len(PROMPTS)


def test_training_stays_within_its_share(monkeypatch):
    """On a clock of its own: a turn takes 3 s, a step 1 s."""
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    model = TransformersModel(build("llama"), pack=False)
    online = attached(model, share=0.2, waiting=4)
    done = []

    def learn(chunk):
        nonlocal now
        now += 3.0
        done.append(chunk)

    monkeypatch.setattr(online, "_learn", learn)
    for step in range(400):
        online.capture.fresh.append({})
        if len(online.capture.fresh) > 4:
            online.capture.fresh.popleft()
        online.between_steps(1.0)
        assert online.counters.train_time_s <= 0.2 * (step + 1 + online.counters.train_time_s) + 3.0  # the first one
    assert online.counters.cost_share == pytest.approx(0.2, abs=0.01)
    assert len(done) == pytest.approx(400 * 0.25 / 3, abs=1)


def test_only_what_may_be_learnt_is_captured():
    """No prompt, no request that is not allowed; text that is computed again counts once."""
    model = TransformersModel(build("llama"), pack=False)
    online = OnlineDrafter(
        drafter("eagle3", model),
        dataclasses.replace(EAGER, share=1e-6, waiting=1000, allow=lambda request: request.cache_salt != "private"),
    )
    engine = Engine(model, online, CONFIG)
    engine.generate([[1, 2, 3]], max_tokens=30, cache_salt="private")
    assert online.capture.tokens == 0
    request = engine.add(Request([4, 5, 6, 7] * 3, max_tokens=40))
    for turn in range(100):
        engine.step()
        if turn == 6:
            engine.scheduler.preempt_all()
        if not engine.has_work:
            break
    assert request not in engine._states
    chunks = list(online.capture.fresh)
    text = engine.generate([[4, 5, 6, 7] * 3], max_tokens=40)[0].token_ids
    assert torch.cat([chunk["tokens"] for chunk in chunks])[:24].tolist() == [7, *text[:23]]
    assert len(online.capture._runs) <= 1
    states, tokens = chunks[1]["state.3"], [*[4, 5, 6, 7] * 3, *text]
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted = model.module(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states[3][0]
    model.module.set_attn_implementation("specdec_kernels")
    assert torch.allclose(states, wanted[11 + 12 : 11 + 24], atol=1e-3)


def test_what_cannot_learn_is_refused(tmp_path):
    model = TransformersModel(build("llama"), pack=False)
    with pytest.raises(ValueError, match=r"OnlineOptions: share: expected a part in \(0, 1\), got 0"):
        OnlineDrafter(drafter("medusa", model), OnlineOptions(share=0))
    with pytest.raises(ValueError, match=r"depths: expected at most 3 \(the set's heads\), got 4"):
        Engine(model, OnlineDrafter(drafter("medusa", model), OnlineOptions(depths=4)))
    with pytest.raises(ValueError, match="OnlineOptions: length: expected more than depths"):
        OnlineDrafter(drafter("medusa", model), OnlineOptions(length=3))
    capped = TransformersModel(build("gemma2 (softcap, window)"), pack=False)
    capped.module.config.final_logit_softcapping = 1.0
    capped.output_matrix().mul_(30.0)
    with pytest.raises(NotImplementedError, match="expected logits that are the output matrix times the last state"):
        Engine(capped, OnlineDrafter(drafter("medusa", capped)))
