"""The tutorial of docs/embedding.md does what it says, by `torch.ops.specdec` alone."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

PATH = Path(__file__).parents[1] / "docs" / "embed_in_your_engine.py"
SOURCE = PATH.read_text()


def test_it_is_a_page_of_code_on_the_ops_alone():
    assert sum(bool(line.strip()) for line in SOURCE.splitlines()) <= 100
    assert re.findall(r"^(?:import|from) (\S+)", SOURCE, re.M) == ["torch", "specdec_kernels"]
    assert SOURCE.count("specdec_kernels") == 1
    called = set(re.findall(r"\bops\.(\w+)", SOURCE)) - {"specdec"}
    assert called == {"slot_mapping", "write_kv", "tree_attention", "build_tree", "verify", "commit_kv", "advance"}
    page = PATH.with_name("embedding.md").read_text()
    assert all(op in page for op in called)


def test_drafts_change_the_number_of_steps_and_not_the_text():
    script = runpy.run_path(str(PATH))
    prompts, temperature = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5], [9, 9]], [0.0, 0.7, 1.0]
    plain, plain_steps = script["generate"](lambda text: (text[-1:], [-1]), prompts, temperature, 48)
    drafted, steps = script["generate"](script["lookup"], prompts, temperature, 48)
    assert drafted == plain
    assert plain_steps == 48 > steps
    assert len({tuple(text) for text in plain}) == 3
    hot, _ = script["generate"](script["lookup"], prompts, [0.0, 0.0, 0.0], 48)
    assert hot[0] == plain[0]  # a request's text does not depend on the others
    assert hot[1:] != plain[1:]


def test_its_attention_sees_the_tree():
    """Control: with a mask that lets nodes see their siblings, the text does change."""
    script = runpy.run_path(str(PATH))
    engine = script["YourEngine"]
    whole = engine.forward

    def blurred(self, token_ids, positions, cu_nodes, tree_mask, max_nodes):
        return whole(self, token_ids, positions, cu_nodes, None if tree_mask is None else -torch.ones_like(tree_mask), max_nodes)  # fmt: skip  # noqa: E501

    prompts, temperature = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5]], [0.0, 0.7]
    plain, _ = script["generate"](lambda text: (text[-1:], [-1]), prompts, temperature, 48)
    engine.forward = blurred
    assert script["generate"](script["lookup"], prompts, temperature, 48)[0] != plain
