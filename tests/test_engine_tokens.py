"""Prompts to ids, and ids to text piece by piece, with a tokenizer small enough to read."""

from __future__ import annotations

import pytest

from specdec_kernels.engine.tokens import TextStream, encode_prompt
from tests.toy_text import Bytes


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_never_split_a_character(size: int):
    text = "naïve café 🙂🙃 — fin"
    ids = Bytes()(text)["input_ids"]
    stream = TextStream(Bytes())
    pieces = [stream.push(ids[i : i + size], last=i + size >= len(ids)) for i in range(0, len(ids), size)]
    assert "".join(pieces) == stream.all == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_unfinished_character_comes_out_at_the_end():
    stream = TextStream(Bytes())
    assert stream.push([104, 0xC3]) == ""
    assert stream.push([], last=True) == "h\N{REPLACEMENT CHARACTER}"
    assert TextStream(None).push([1, 2]) == ""


def test_prompts():
    assert encode_prompt(Bytes(), "ab") == [97, 98]
    assert encode_prompt(None, (1, 2)) == [1, 2]
    for bad, error in (("", ValueError), ([], ValueError), ([{"role": "user"}], ValueError), (["a"], TypeError)):
        with pytest.raises(error, match="Request: prompt"):
            encode_prompt(Bytes(), bad)
