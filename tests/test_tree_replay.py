"""The replay of recorded candidates decodes as the engine does: the same steps for every shape."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tree_replay import accepted, ngram, ratio, record, replay
from python_ref.decoder import ToyTarget
from specdec_kernels.engine import Engine, EngineConfig
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from tests.head_models import random_head
from tests.toy_model import ToyModel

PROMPT = [9, 8, 7, 6, 5] * 3


@pytest.fixture(scope="module")
def model():
    return ToyModel(ToyTarget())


@pytest.fixture(scope="module")
def recorded(model):
    return record(model, PROMPT, 48, random_head("eagle3", model), kind="eagle3", top_k=4, depth=4)


def steps(model, drafter) -> list[int]:
    engine = Engine(model, drafter, EngineConfig(num_pages=64, max_batch=1, num_drafts=20, prefix_cache=False))
    (result,) = engine.generate([PROMPT], max_tokens=48, ignore_eos=True)
    return [len(result.token_ids) - 1, result.stats.steps - 1]


STATIC = (0.5, 0.27, 0.13, 0.07)


@pytest.mark.parametrize(
    ("top_k", "depth", "nodes", "by_rank"),
    [(4, 4, 3, None), (4, 4, 9, None), (4, 3, 20, None), (4, 2, 5, None), (4, 4, 3, STATIC), (4, 2, 7, STATIC)],
)  # deeper static trees hold nodes that the head's own growth does not reach
def test_shapes_replayed_take_the_engines_steps(top_k: int, depth: int, nodes: int, by_rank, model, recorded):
    drafter = EagleDrafter(random_head("eagle3", model), top_k=top_k, depth=depth, num_nodes=nodes, by_rank=by_rank)
    wanted = steps(model, drafter)
    assert list(replay(recorded, accepted(recorded, nodes, top_k, depth, by_rank))) == wanted
    assert wanted[1] < 46


def test_ngram_drafts_replayed_take_the_engines_steps(model, recorded):
    assert list(ngram(recorded, 15)) == steps(model, "ngram")


def test_ratios_by_hand():
    a, b = np.array([[10.0, 5], [12, 4]]), np.array([[10.0, 10], [12, 12]])
    value, low, high = ratio(a, b)
    assert value == pytest.approx(22 / 9)
    assert low == pytest.approx(2.0)
    assert high == pytest.approx(3.0)
