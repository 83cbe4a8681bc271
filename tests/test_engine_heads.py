"""Draft heads and draft models inside the engine: nothing changes but the number of steps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.advisor.speedup import best_tree, expected_emitted_tree
from specdec_kernels.engine import Draft, Engine, EngineConfig, Request
from specdec_kernels.engine.drafters import Limit
from specdec_kernels.engine.drafters.draft_model_tree import DraftModelTreeDrafter
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.grow import Shape, grow_trees
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.training.rollout import rollout
from tests.engine_law import LIMIT, chi_square_p
from tests.head_models import KINDS, SHAPES, make_drafter, random_head
from tests.toy_model import ToyModel

TARGET = ToyTarget()
SMALL = ToyTarget(vocab=5, surprise=3)
PROMPTS = [[1, 2, 3], [4, 5], [9, 8, 7, 6, 5] * 5, [30, 31]] * 2  # the third comes in chunks
CONFIG = EngineConfig(page_size=4, num_pages=256, check=True)


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_same(kind: str, shape: str, max_batch: int):
    model = ToyModel(TARGET)
    config = dataclasses.replace(CONFIG, max_batch=max_batch, max_step_tokens=9 * max_batch)
    engine = Engine(model, make_drafter(kind, shape, model), config)
    prompts = PROMPTS if max_batch == 8 else PROMPTS[:3]
    results = engine.generate(prompts, max_tokens=40)
    assert [r.token_ids for r in results] == [plain_greedy(TARGET, p, 40) for p in prompts]
    m = engine.metrics
    assert m.drafter_failures == m.flagged == 0
    assert m.drafted > 100
    assert m.accepted > 0
    assert engine.arena.num_unowned == CONFIG.num_pages
    if shape == "tree":
        assert m.drafted > m.drafts * 3


LAWS = [
    pytest.param(kind, shape, sampled, marks=[pytest.mark.long] * ((k + s + sampled) % 2), id=f"{kind}-{shape}-{how}")
    for k, kind in enumerate(KINDS)
    for s, shape in enumerate(SHAPES)
    for sampled, how in ((True, "drawn"), (False, "fixed"))
]  # CI: every other one; each kind with both shapes and both ways to draft


@pytest.mark.parametrize(("kind", "shape", "sampled"), LAWS)
def test_sampled_text_has_the_targets_law(kind: str, shape: str, sampled: bool):
    """Three tokens against their exact joint law; siblings drawn without replacement, or fixed ones."""
    model = ToyModel(SMALL)
    p, engine = chi_square_p(SMALL, model, make_drafter(kind, shape, model, sampled=sampled), max_batch=64)
    m = engine.metrics
    assert p > LIMIT
    assert m.drafter_failures == m.flagged == 0
    assert m.accepted > 100
    assert m.rejected > 100


@pytest.mark.parametrize(("max_batch", "count"), [(1, 150), (8, 800)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_holds_at_small_batches(kind: str, shape: str, max_batch: int, count: int):
    model = ToyModel(SMALL)
    p, _ = chi_square_p(SMALL, model, make_drafter(kind, shape, model), max_batch=max_batch, count=count)
    assert p > LIMIT


@pytest.mark.parametrize("max_batch", [1, 8])
def test_a_static_tree_keeps_its_shape(max_batch: int):
    """Scored by rank: the best tree for those ranks at every step, the same greedy text and the same sampled law."""
    model, chances = ToyModel(TARGET), (0.5, 0.3, 0.1)
    options = {"top_k": 3, "depth": 3, "num_nodes": 7}
    shapes = []

    class Spy(EagleDrafter):
        def propose(self, states, limits, context):
            drafts = super().propose(states, limits, context)
            shapes.extend(tuple(draft.parents) for draft in drafts)
            return drafts

    config = dataclasses.replace(CONFIG, max_batch=max_batch)
    engine = Engine(model, Spy(random_head("eagle3", model), by_rank=chances, **options), config)
    results = engine.generate(PROMPTS[:3], max_tokens=40)
    assert [r.token_ids for r in results] == [plain_greedy(TARGET, p, 40) for p in PROMPTS[:3]]
    whole = [shape for shape in shapes if len(shape) == 7]
    assert len(whole) > 10
    best = best_tree(chances, 8, max_depth=3)
    for shape in set(whole):
        assert expected_emitted_tree([-1, *shape], by_order(shape, chances)) == pytest.approx(best.expected_emitted)
    assert len(set(whole)) == 1
    small = ToyModel(SMALL)
    drafter = EagleDrafter(random_head("eagle3", small), by_rank=chances, **options)
    assert chi_square_p(SMALL, small, drafter, max_batch=max_batch, count=800)[0] > LIMIT
    with pytest.raises(ValueError, match="eagle3 drafter: by_rank: expected 3 probabilities above 0"):
        EagleDrafter(random_head("eagle3", model), by_rank=(0.5, 0.3), **options)


def by_order(parents: tuple[int, ...], chances: tuple[float, ...]) -> list[float]:
    """Acceptance of a tree's nodes (the root first) whose siblings stand in the order of their ranks."""
    seen: dict[int, int] = {}
    found = [1.0]
    for parent in parents:
        found.append(chances[seen.get(parent, 0)])
        seen[parent] = seen.get(parent, 0) + 1
    return found


class Misreporting:
    """A drafter whose laws are not those its tokens were drawn from."""

    name = "misreporting"

    def __init__(self, drafter):
        self.drafter = drafter

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, states, limits, context):
        drafts = self.drafter.propose(states, limits, context)
        return [d if d.logits is None else dataclasses.replace(d, logits=-d.logits) for d in drafts]


class Choosy(Misreporting):
    """Drawn siblings kept for what they turned out to be: the likelier one of two, which is what re-ranking by score
    does to random drafts."""

    def propose(self, states, limits, context):
        drafts = []
        for draft in self.drafter.propose(states, limits, context):
            first = [i for i, parent in enumerate(draft.parents) if parent == 0]
            if draft.logits is not None and first:
                law = draft.logits[draft.rows[first[0]]]
                place = {t: c for c, t in enumerate(range(len(law)) if draft.d2t is None else
                                                    (draft.d2t + torch.arange(len(law))).tolist())}  # fmt: skip
                best = max(first, key=lambda i: float(law[place[draft.token_ids[i]]]))
                draft = Draft([draft.token_ids[best]], [0], draft.logits, [draft.rows[best]], draft.d2t)
            drafts.append(draft)
        return drafts


@pytest.mark.parametrize("wrong", [Misreporting, Choosy])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_law_test_finds_wrong_laws(kind: str, wrong: type):
    model = ToyModel(SMALL)
    drafter = wrong(make_drafter(kind, "tree", model))
    p, engine = chi_square_p(SMALL, model, drafter, max_batch=64)
    assert engine.metrics.drafter_failures == 0
    assert p < LIMIT


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_filters_and_mixed_batches(kind: str):
    """Greedy, filtered and plain requests share a step; top_k 1 is greedy at any temperature."""
    model = ToyModel(TARGET)
    engine = Engine(model, make_drafter(kind, "tree", model), CONFIG)
    kinds = [{}, {"temperature": 1.5, "top_k": 1}, {"temperature": 1.0, "top_p": 0.3}, {"temperature": 1.0, "top_k": 2}]
    ids = [engine.add(Request([7, i + 1], max_tokens=30, seed=3, **parameters)) for i, parameters in enumerate(kinds)]
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result})
    assert found[ids[0]] == plain_greedy(TARGET, [7, 1], 30)
    assert found[ids[1]] == plain_greedy(TARGET, [7, 2], 30)
    assert engine.metrics.drafter_failures == 0


def test_drafters_of_different_vocabularies_share_a_step():
    """Laws of a reduced and of the whole vocabulary in one verification."""
    model = ToyModel(SMALL)
    whole, reduced = (MedusaDrafter(random_head("medusa", model, draft_vocab=n)) for n in (5, 3))
    for drafter in (whole, reduced):
        assert chi_square_p(SMALL, model, drafter, max_batch=64, others=(whole, reduced))[0] > LIMIT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_the_head_sees_what_it_would_see_without_a_cache(kind: str, shape: str):
    """After every step the law behind the root equals that of the whole text run through the head at once, from the
    target's true states: pairs are shifted right, and accepted tokens' rows replaced those drafted."""
    model = ToyModel(SMALL)
    compared = 0

    class Spy(EagleDrafter):
        def propose(self, states, limits, context):
            nonlocal compared
            drafts = super().propose(states, limits, context)
            for state, draft in zip(states, drafts):
                wanted = reference_logits(
                    self.head, model, state.tokens, list(draft.token_ids) if shape == "chain" else []
                )
                assert torch.allclose(state.drafter_state.logits, wanted[0], atol=1e-4)
                if shape == "chain":
                    ids = [int(self.head.draft_ids[row.argmax()]) for row in wanted[: len(draft)]]
                    assert list(draft.token_ids) == ids
                compared += 1
            return drafts

    options = {"top_k": 1, "depth": 4, "num_nodes": 4} if shape == "chain" else {"top_k": 3, "depth": 3, "num_nodes": 8}
    config = dataclasses.replace(CONFIG, prefix_cache=False, max_step_tokens=16)
    engine = Engine(model, Spy(random_head(kind, model), **options), config)
    prompts = [[1, 2, 3, 0], [4] * 20, [2, 2]]
    results = engine.generate(prompts, max_tokens=24)
    assert [r.token_ids for r in results] == [plain_greedy(SMALL, p, 24) for p in prompts]
    assert engine.metrics.drafter_failures == 0
    assert engine.metrics.accepted > 10
    assert compared > 20


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "draft_model"])
def test_every_law_of_a_tree_is_that_of_its_own_path(kind: str):
    """Masks, positions and parents' outputs at every level: each law equals that of the node's path fed alone."""
    model = ToyModel(SMALL)
    drafter = make_drafter(kind, "tree", model)
    propose, deep = drafter.propose, set()

    def spy(states, limits, context):
        drafts = propose(states, limits, context)
        for state, draft in zip(states, drafts):
            paths: list[list[int]] = [[]]
            for token, parent, row in zip(draft.token_ids, draft.parents, draft.rows or ()):
                path = paths[parent]
                if kind == "draft_model":
                    wanted = torch.tensor(drafter.model.target.logits([*state.tokens, *path]))
                else:
                    wanted = reference_logits(drafter.head, model, state.tokens, path)[-1]
                assert torch.allclose(draft.logits[row], wanted, atol=1e-4)
                deep.add((len(path), parent))
                paths.append([*path, token])
        return drafts

    drafter.propose = spy
    engine = Engine(model, drafter, dataclasses.replace(CONFIG, prefix_cache=False))
    engine.generate([[1, 2, 3, 0], [4] * 9], max_tokens=16, temperature=1.0, seed=5)
    assert engine.metrics.drafter_failures == 0
    assert {depth for depth, _ in deep} == {0, 1, 2}
    assert len(deep) > 5


def reference_logits(head, model: ToyModel, text: list[int], chain: list[int]) -> list[torch.Tensor]:
    """Law behind the root, then behind each token of the chain, by the training code's rollout."""
    tokens = torch.tensor(text)
    total, layers = torch.zeros_like(tokens), {}
    for layer in range(model.num_layers):
        layers[layer] = model.state(layer, tokens, total)
        place = torch.arange(len(text))
        value = (3 * tokens + 5 * place + 1) % 16 if layer == 0 else (total + 7 * tokens + 3 * place) % 16
        total = value.cumsum(0)
    layers[model.num_layers] = model.state(model.num_layers, tokens, total)
    features = torch.cat([layers[layer] for layer in head.config.feature_layers], -1)
    last = len(text) - 2
    ids = torch.tensor([*text, *chain, 0])[None]
    padded = torch.nn.functional.pad(features[: last + 1], (0, 0, 0, len(ids[0]) - last - 1))
    outputs = rollout(head, ids, padded[None], 1 + len(chain))
    return [head.logits(out[0, last]) for out in outputs]


def test_a_head_recovers_after_its_pages_were_taken():
    """Lost draft pages, pre-emption and cached prefixes leave the head with part of the text; it goes on from there."""
    model = ToyModel(TARGET)
    drafter = make_drafter("eagle3", "tree", model)
    engine = Engine(model, drafter, CONFIG)
    engine.generate([[5, 6, 7] * 8], max_tokens=8)
    ids = [engine.add(Request([5, 6, 7] * 8 + [i], max_tokens=40)) for i in range(3)]
    found, turn = {}, 0
    while engine.has_work:
        found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result})
        turn += 1
        if turn % 5 == 0 and engine.scheduler.running:
            engine.scheduler.release_drafts(engine.scheduler.running[0])
        if turn == 7:
            engine.weights_changed()
    for i, request_id in enumerate(ids):
        assert found[request_id] == plain_greedy(TARGET, [5, 6, 7] * 8 + [i], 40)
    assert engine.metrics.drafter_failures == 0
    assert engine.metrics.drafts > 20


def test_a_tiny_arena_only_costs_drafts():
    model = ToyModel(TARGET)
    config = EngineConfig(page_size=4, num_pages=30, max_batch=4, check=True, prefix_cache=False)
    for kind in ("eagle3", "draft_model"):
        engine = Engine(model, make_drafter(kind, "tree", model), config)
        results = engine.generate(PROMPTS, max_tokens=30)
        assert [r.token_ids for r in results] == [plain_greedy(TARGET, p, 30) for p in PROMPTS]
        assert engine.metrics.drafter_failures == 0


def test_a_head_that_raises_or_gives_nan_is_survived():
    model = ToyModel(TARGET)

    class Raising(MedusaDrafter):
        def observe(self, seen, hidden, context):
            raise KeyError

    engine = Engine(model, Raising(random_head("medusa", model)), CONFIG)
    results = engine.generate(PROMPTS, max_tokens=12)
    assert [r.token_ids for r in results] == [plain_greedy(TARGET, p, 12) for p in PROMPTS]
    assert engine.metrics.drafter_failures == len(PROMPTS)
    for kind in ("eagle3", "medusa"):
        drafter = make_drafter(kind, "tree", model)
        for parameter in drafter._given.parameters():
            parameter.data.fill_(float("nan"))
        for temperature in (0.0, 1.0):
            engine = Engine(model, drafter, CONFIG)
            results = engine.generate(PROMPTS, max_tokens=12, temperature=temperature)
            assert all(r.finish_reason == "length" for r in results)
            if temperature == 0.0:
                assert [r.token_ids for r in results] == [plain_greedy(TARGET, p, 12) for p in PROMPTS]


def test_every_draw_of_a_tree_has_noise_of_its_own():
    """Equal laws everywhere, yet branches, depths and steps draw differently: shared noise would bias the text."""
    model = ToyModel(TARGET)
    request = Request([1], temperature=1.0)
    states = [SimpleNamespace(request=request, seed=s % 4, num_output=s // 4, num_steps=0) for s in range(8)]
    paths = [(0,), (1,), (2,), *((i, j) for i in range(3) for j in range(3))]
    medusa = MedusaDrafter(random_head("medusa", model), paths=paths)
    medusa.attach(model)
    limits = [Limit(12, 2)] * 8
    grown = grow_trees(
        torch.zeros(8, 32), lambda level: torch.zeros(level.token_ids.numel(), 32), states, limits, Shape(3, 2, 12),
        sampled=True, vocab_size=32,
    )  # fmt: skip
    drawn = medusa._draw(states, [medusa._shape(limit) for limit in limits], torch.zeros(8, 3, 32))
    for drafts in (grown, drawn):
        firsts, later = [], 0
        for draft in drafts:
            children: dict[int, list[int]] = {}
            for token, parent in zip(draft.token_ids, draft.parents):
                children.setdefault(parent, []).append(token)
            assert all(len(set(tokens)) == len(tokens) for tokens in children.values())
            firsts.append(tuple(children[0]))
            branches = [tuple(tokens) for parent, tokens in children.items() if parent > 0]
            assert len(branches) == 3
            assert len({branch[:1] for branch in branches}) > 1
            later += tuple(children[0]) in branches
        assert len(set(firsts)) == 8  # four seeds, each at two output positions
        assert later == 0


def test_wrong_targets_are_named_before_anything_runs():
    small, toy = ToyModel(SMALL), ToyModel(TARGET)
    head = random_head("eagle3", small)
    with pytest.raises(ValueError, match=r"eagle3 head: target: expected a vocabulary of 5, got 32"):
        Engine(toy, EagleDrafter(head))
    with pytest.raises(ValueError, match="expected an autoregressive one, got 'medusa'"):
        Engine(small, EagleDrafter(random_head("medusa", small)))
    with pytest.raises(ValueError, match="mtp drafter: head: expected one of this kind, got 'eagle3'"):
        Engine(small, EagleDrafter(head, kind="mtp"))
    with pytest.raises(ValueError, match="expected a Medusa set, got 'eagle3'"):
        Engine(small, MedusaDrafter(head))
    with pytest.raises(ValueError, match="expected a trained 'mtp' head for 'toy', got none"):
        Engine(small, "mtp")
    with pytest.raises(ValueError, match="draft_model drafter: model: expected a vocabulary of 32 ids"):
        Engine(toy, DraftModelTreeDrafter(small))
    with pytest.raises(ValueError, match="drafter: depth: expected an int >= 1, got 0"):
        EagleDrafter(head, depth=0)
    with pytest.raises(ValueError, match="medusa drafter: paths: expected at most 3 ranks"):
        Engine(small, MedusaDrafter(random_head("medusa", small), paths=[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]))
    other = random_head("eagle3", small)
    other.config = dataclasses.replace(other.config, target="other", fingerprint="abcd")
    with pytest.raises(ValueError, match=r"target: expected other \(abcd\), got toy"):
        Engine(small, EagleDrafter(other))
