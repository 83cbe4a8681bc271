"""What the drafters propose, looked at without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from specdec_kernels.engine.drafters import Draft, DrafterTable, Limit, layer_search
from specdec_kernels.engine.drafters.layer_search import LayerChoice, choose_layers, expected_speedup
from specdec_kernels.engine.drafters.ngram import NgramDrafter
from tests.toy_model import ToyModel

WIDE = Limit(15, 15)


def propose(drafter: NgramDrafter, state: SimpleNamespace, limit: Limit = WIDE) -> Draft:
    (draft,) = drafter.propose([state], [limit], None)
    return draft.checked(limit)


def request(tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(tokens=list(tokens), drafter_state=None)


def test_ngram_continues_the_longest_match():
    text = [1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 8, 1, 2, 3]  # "1 2 3" goes on with 40, "2 3" lately with 50
    draft = propose(NgramDrafter(branches=1), request(text))
    assert list(draft.token_ids[:2]) == [40, 41]
    assert draft.is_chain
    assert len(propose(NgramDrafter(), request([1, 2, 3, 4, 5]))) == 0
    assert len(propose(NgramDrafter(), request([7]))) == 0


def test_ngram_makes_a_tree_of_two_continuations():
    text = [1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 8, 1, 2, 3]
    draft = propose(NgramDrafter(branches=2, slot_cost=0.01), request(text))
    first = [token for token, parent in zip(draft.token_ids, draft.parents) if parent == 0]
    assert first == [40, 50]  # the longer match is tried first


def test_ngram_merges_what_branches_share():
    text = [1, 2, 3, 4, 40, 9, 9, 1, 2, 3, 5, 50, 8, 8, 1, 2]
    draft = propose(NgramDrafter(branches=2, slot_cost=0.001), request(text))
    assert sorted(draft.token_ids[:1]) == [3]
    assert draft.depth_counts()[0] == 1


@pytest.mark.parametrize("replaced", [1, 2, 3])
def test_ngram_goes_on_behind_replaced_tokens(replaced: int):
    """A copy in which some tokens were renamed just now: the copy goes on behind them."""
    source = list(range(100, 140))
    text = [*source, 1, *source[:10], *range(70, 70 + replaced)]
    draft = propose(NgramDrafter(branches=1), request(text))
    assert list(draft.token_ids[:2]) == source[10 + replaced : 12 + replaced]


def test_ngram_learns_how_deep_to_draft():
    """Depth follows the acceptance of matches of that length, both ways, per request."""
    source = list(range(100, 140))
    good, bad = request([*source, 1, *source[:3]]), request([*source, 1, *source[:3]])
    drafter = NgramDrafter(branches=1)
    for turn in range(6):
        propose(drafter, good)
        propose(drafter, bad)
        good.tokens.append(source[3 + turn])
        bad.tokens += [500 + turn, *source[:3]]
    assert len(propose(drafter, good)) > 8
    assert len(propose(drafter, bad)) < 3


@pytest.mark.parametrize("limit", [Limit(0, 0), Limit(1, 1), Limit(4, 2), Limit(3, 15)])
def test_ngram_keeps_its_limits(limit: Limit):
    text = [*range(20), *range(10), 90, 91, *range(10)]
    draft = propose(NgramDrafter(slot_cost=0.001), request(text), limit)
    assert len(draft) <= limit.nodes
    assert draft.depth <= limit.depth


def test_draft_shapes():
    tree = Draft((5, 6, 7, 8), (0, 0, 1, 3))
    assert not tree.is_chain
    assert tree.depth_counts() == [2, 1, 1]
    assert Draft.chain([1, 2, 3]).is_chain
    assert (Draft().depth, len(Draft())) == (0, 0)
    for bad in (Draft((1,), (1,)), Draft((1, 2), (0,)), Draft((1, 2), (0, -1)), Draft.chain(range(5))):
        with pytest.raises(ValueError, match="Draft"):
            bad.checked(Limit(4, 4))


def test_drafters_by_name():
    table = DrafterTable()
    assert table.get("ngram") is table.get("ngram")
    assert table.get(None) is table.get("none")
    names = r"\['eagle', 'eagle3', 'medusa', 'mtp', 'ngram', 'none', 'self'\]"
    with pytest.raises(ValueError, match=rf"expected one of {names}, got 'oracle'"):
        table.get("oracle")


def test_a_drafter_without_a_name_is_refused():
    """Steps count by it: without one, every step would have failed behind its verification."""

    class Nameless:
        def propose(self, states, limits, context):
            return [Draft() for _ in states]

    with pytest.raises(TypeError, match=r"^Engine: drafter: expected an attribute name \(str\), got Nameless without"):
        DrafterTable().get(Nameless())


def test_expected_speedup():
    assert expected_speedup(0.0, 3, 0.5, 0.0) == pytest.approx(1 / 2.5)
    assert expected_speedup(1.0, 4, 0.0, 0.0) == pytest.approx(5.0)
    assert expected_speedup(0.7, 5, 0.1, 0.0) == pytest.approx(1.9608, abs=1e-4)


def test_layer_choice_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Named(ToyModel):
        passes = 0
        num_layers = 2

        def fingerprint(self):
            return "toy"

        def forward(self, *arguments):
            self.passes += 1
            return super().forward(*arguments)

    model = Named()
    model.num_layers = 5  # the toy has two; more make the search run

    def forward(batch, cache, layers=None):
        model.passes += 1
        return ToyModel.forward(model, batch, cache, tuple(i for i in layers if i < 2) or (0,))

    model.forward = forward
    first = choose_layers(model)
    assert model.passes > 5
    assert 1 < len(first.layers) < 5
    assert {0, 4} <= set(first.layers)
    (stored,) = (tmp_path / "specdec_kernels").glob("self-draft-toy-*.json")
    assert json.loads(stored.read_text())["num_drafts"] == first.num_drafts
    before = model.passes
    assert choose_layers(model) == first
    assert model.passes == before
    monkeypatch.setattr(layer_search, "search", lambda model: LayerChoice((0, 1), 9))
    for name, other in (("dtype", torch.bfloat16), ("device", torch.device("meta"))):  # costs of another kind of run
        before = getattr(model, name)
        setattr(model, name, other)
        assert choose_layers(model).num_drafts == 9
        setattr(model, name, before)
    assert choose_layers(model) == first


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"layers": 3, "num_drafts": 2}', '{"layers": [0, 99], "num_drafts": 2}', '{"layers": [0]}',
     '{"layers": [0, 1], "num_drafts": "2"}', '{"layers": [0, 1], "num_drafts": 2, "other": 1}', b"\xff\xfe"],
)  # fmt: skip
def test_a_damaged_layer_choice_is_measured_again(content, tmp_path, monkeypatch):
    """And replaced, whole: what is written appears under its name only when it is complete."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layer_search, "search", lambda model: LayerChoice((0, 1), 2, 0.5))

    class Named(ToyModel):
        def fingerprint(self):
            return "toy"

    model = Named()
    assert choose_layers(model) == LayerChoice((0, 1), 2, 0.5)
    (path,) = (tmp_path / "specdec_kernels").iterdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert choose_layers(model) == LayerChoice((0, 1), 2, 0.5)
    assert json.loads(path.read_text())["agreement"] == 0.5
    assert list(path.parent.iterdir()) == [path]
    replace, seen = type(path).replace, []
    monkeypatch.setattr(type(path), "replace", lambda self, to: seen.append(self.read_text()) or replace(self, to))
    path.unlink()
    choose_layers(model)
    assert [json.loads(text)["num_drafts"] for text in seen] == [2]
    monkeypatch.setattr(type(path), "replace", lambda self, to: (_ for _ in ()).throw(OSError("no space")))
    path.unlink()
    assert choose_layers(model).num_drafts == 2  # nowhere to keep it: measured anew the next time
    assert not list(path.parent.iterdir())
