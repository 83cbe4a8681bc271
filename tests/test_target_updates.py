"""When the target's weights change, nothing of the old ones is used: KV, notes, captured states, copies of matrices."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from python_ref.decoder import ToyTarget
from specdec_kernels.engine import Engine, Request, TransformersModel
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.head_files import load_head, save_head
from specdec_kernels.engine.heads import HeadConfig, make_head
from specdec_kernels.engine.metrics import KEPT_VERSIONS
from tests.head_models import random_head
from tests.test_engine_heads import reference_logits
from tests.test_engine_transformers import build
from tests.test_online import CONFIG, PROMPTS, attached, drafter
from tests.toy_model import ToyModel


def test_new_target_weights_void_all_that_was_captured():
    model = TransformersModel(build("llama"), pack=False)
    online = attached(model)
    head = online.served  # of a reduced vocabulary: its output rows are a copy
    head.lm_head = None
    head.bind(model.embedding(), model.output_matrix())
    online._restart()
    engine = Engine(model, online, CONFIG)
    ids = [engine.add(Request(prompt, max_tokens=40)) for prompt in PROMPTS]
    for _ in range(16):
        engine.step()
    assert online.counters.chunks > 0
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.0 + 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    before = {i: list(engine._states[i].tokens) for i in ids}
    engine.weights_changed()
    assert len(online.capture) == 0
    assert online.counters.flushed == 1
    assert all(state.drafter_state is None and not state.draft_pages for state in engine._states.values())
    rows = model.output_matrix()[head.draft_ids]
    assert torch.equal(head.output, rows)
    assert torch.equal(online.candidate.output, rows)
    found = {}
    while engine.has_work:
        found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result})
    for i, prompt in zip(ids, PROMPTS):  # from here on the new target's own text
        (plain,) = Engine(model, "none", CONFIG).generate([before[i]], max_tokens=40 - len(before[i]) + len(prompt))
        difference = compare_greedy(model, before[i], plain.token_ids, found[i][len(before[i]) - len(prompt) :])
        assert difference is None or difference.excused, difference
    assert online.counters.failures == engine.metrics.drafter_failures == 0


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_no_law_comes_from_the_old_targets_states(kind: str):
    """Requests that run while the target changes: every law is that of the new target's states, of the whole text."""

    class Moving(ToyModel):
        moved = 0.0

        def state(self, layer, token, total):
            return super().state(layer, token, total + self.moved)

    target = ToyTarget(vocab=5, surprise=3)
    model = Moving(target)
    engine = Engine(model, drafter(kind, model), dataclasses.replace(CONFIG, prefix_cache=False))
    inner, compared = engine._default_drafter, 0
    propose = inner.propose

    def spy(states, limits, context):
        nonlocal compared
        drafts = propose(states, limits, context)
        for state, draft in zip(states, drafts):
            if len(draft) and kind == "eagle3":
                wanted = reference_logits(inner.head, model, state.tokens, [])[0]
                assert torch.allclose(state.drafter_state.logits, wanted, atol=1e-4)
                compared += 1
            elif len(draft):
                sums, tokens = torch.zeros(len(state.tokens), dtype=torch.long), torch.tensor(state.tokens)
                place = torch.arange(len(tokens))
                sums = ((3 * tokens + 5 * place + 1) % 16).cumsum(0)
                sums = ((sums + 7 * tokens + 3 * place) % 16).cumsum(0)
                wanted = model.state(model.num_layers, tokens, sums)[-2]
                assert torch.allclose(state.drafter_state.state, wanted, atol=1e-5)
                compared += 1
        return drafts

    inner.propose = spy
    for i in range(3):
        engine.add(Request([1, 2, i, 3], max_tokens=30))
    for turn in range(60):
        engine.step()
        if turn in (4, 9):
            model.moved += 3.0
            engine.weights_changed()
    assert not engine.has_work
    assert engine.metrics.drafter_failures == 0
    assert compared > 10


def test_a_steps_counts_are_filed_under_the_weights_that_drafted():
    target = ToyTarget()
    model = ToyModel(target)

    class Versioned(MedusaDrafter):
        version = 0

        def between_steps(self, seconds):
            self.version += 1

    engine = Engine(model, Versioned(random_head("medusa", model)), CONFIG)
    engine.add(Request([1, 2, 3], max_tokens=12))
    engine.add(Request([1, 2, 3, 1, 2, 3], max_tokens=12, drafter="ngram"))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    classes = engine.metrics.by_class
    versions = [version for method, _, version in classes if method == "medusa"]
    assert versions == list(range(versions[0], versions[0] + KEPT_VERSIONS))
    assert versions[-1] > KEPT_VERSIONS
    assert all(classes["medusa", "greedy", v].steps == 1 for v in versions)
    assert classes["ngram", "greedy", 0].steps > 1  # its own version, not that of the engine's drafter
    assert engine.metrics.draft_version == steps - 1


def test_matrices_of_the_target_are_followed_and_a_heads_own_are_not(tmp_path):
    embedding, output = torch.randn(6, 8), torch.randn(6, 8)
    d2t = torch.tensor([0, 1, 1])  # ids 0, 2, 3
    config = HeadConfig("mtp", 8, 6, 3, (2,), intermediate_size=8)
    head = make_head(config, d2t)
    head.bind(embedding, output)
    stored = load_head(save_head(head, tmp_path / "head"))  # with copies of the target's
    stored.bind(embedding, output)
    own = make_head(config, d2t)
    own.output = torch.randn(3, 8)
    own.bind(embedding, output)
    kept = own.output.clone()
    new = embedding + 1, output + 1
    for each in (head, stored, own):
        each.rebind(*new)
        assert torch.equal(each.embedding, new[0])
        assert torch.equal(each.output, kept if each is own else new[1][[0, 2, 3]])
