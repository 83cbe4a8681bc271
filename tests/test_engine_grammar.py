"""A real grammar library behind the `Grammar` protocol: what comes out parses, drafts or not."""

from __future__ import annotations

import json

import pytest
import torch

from specdec_kernels.engine import Draft, Engine, EngineConfig
from tests.toy_text import Bytes, RowModel

pytest.importorskip("llguidance", reason="needs llguidance")
CONFIG = EngineConfig(page_size=4, num_pages=256, max_batch=8, max_step_tokens=256, check=True)
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}


class ByteTokens(Bytes):
    """256 bytes, of which 0 ends the text: what llguidance wants to know of a tokenizer."""

    eos_token_id = bos_token_id = EOS
    special_token_ids = (EOS,)
    unk_token_id = None
    tokens = tuple(bytes([i]) for i in range(256))

    def __call__(self, text):  # llguidance asks with text or bytes
        ids = list(text if isinstance(text, bytes) else text.encode())
        return ids


def grammars():
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    from specdec_kernels.engine.grammar import LLGuidanceGrammar

    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokens()))
    text = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    return lambda: LLGuidanceGrammar(LLMatcher(tokenizer, text))


class Guesses:
    """Trees of what JSON often goes on with, right or wrong."""

    name = "guesses"

    def propose(self, states, limits, context):
        drafts = []
        for limit in limits:
            ids = list(b'"age": 1,t')[: limit.depth]
            tree = Draft((*ids, ord("{"), ord("}")), (*range(len(ids)), 0, 0))
            drafts.append(tree if len(tree) <= limit.nodes else Draft.chain(ids[: limit.nodes]))
        return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_comes_out_whatever_the_model_wants(temperature: float):
    rows = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    model = RowModel(rows, eos=(EOS,))
    model.tokenizer = Bytes()
    factory = grammars()
    texts = {}
    for drafter in ("none", Guesses()):
        engine = Engine(model, drafter, CONFIG)
        results = engine.generate([[65 + i] for i in range(8)], max_tokens=120, temperature=temperature, seed=3,
                                  grammar=factory, logit_bias={10: -20.0, 32: -20.0, 9: -20.0, 13: -20.0})  # fmt: skip
        for result in results:
            assert result.finish_reason == "stop", result
            value = json.loads(bytes(result.token_ids).rstrip(b"\0"))
            assert set(value) == {"age", "ok"}
            assert 0 <= value["age"] <= 99
        texts[str(drafter == "none")] = [r.token_ids for r in results]
    assert engine.metrics.accepted > 20
    if temperature == 0:
        assert texts["True"] == texts["False"]


def test_the_matcher_rolls_back_over_the_end():
    matcher = grammars()()
    text = b'{"age":7,"ok":true}'
    for token in text:
        assert not matcher.ended
        assert matcher.accept(token)
    assert matcher.ended  # nothing can follow: no end token is asked for
    matcher.rollback(1)
    assert not matcher.ended
    row = torch.zeros(8, dtype=torch.int32)
    matcher.fill_allowed(row)
    assert row[ord("}") // 32] >> ord("}") % 32 & 1
    matcher.rollback(len(text) - 1)
    assert not matcher.accept(ord("x"))
    assert matcher.accept(ord("{"))
