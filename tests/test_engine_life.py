"""Ends, edits, samples and log-probabilities of requests, with drafts and without: the same text."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from scipy.stats import binomtest

from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.tokens import TextStream
from tests.toy_model import FixedDrafter, OracleDrafter, ToyModel
from tests.toy_text import Bytes, Follows, RowModel, ScriptModel, finish

CONFIG = EngineConfig(page_size=4, num_pages=256, max_batch=8, max_step_tokens=256, check=True)
TARGET = ToyTarget()


def text_model(text: str, **options) -> ScriptModel:
    """Writes `text` (without a repeated byte) behind its first byte."""
    ids = list(text.encode())
    assert len(set(ids)) == len(ids)
    model = ScriptModel(dict(itertools.pairwise(ids)), vocab=256, **options)
    model.tokenizer = Bytes()
    return model


# ---- ends


@pytest.mark.parametrize("drafts", [0, 3, 9])
@pytest.mark.parametrize(
    ("stop", "kept", "given"),
    [
        ("fgh", "bcdefgh", "bcde"),
        (("xyz", "e"), "bcde", "bcd"),
        ("hj", "bcdefghij", "bcdefghij"),
        ("ef", "bcdef", "bcd"),
    ],
)
def test_stop_strings_end_the_text_across_tokens(drafts: int, stop, kept: str, given: str):
    """The token that completes the string is the last one; its text is not given out, nor what led up to it."""
    chains = [list(f"{'bcdefghijk'[i : i + drafts]}".encode()) for i in range(1, 30, drafts + 1)]
    engine = Engine(text_model("abcdefghijk"), FixedDrafter(*chains), CONFIG)
    pieces: list[str] = []
    (result,) = engine.generate(["a"], max_tokens=9, stop=stop, on_event=lambda _, event: pieces.append(event.text))
    assert bytes(result.token_ids).decode() == kept
    assert result.text == "".join(pieces) == given
    assert result.finish_reason == ("length" if stop == "hj" else "stop")


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(Bytes(), ("end", "no"))
    assert [stream.push([ord(c)]) for c in "men en"] == ["m", "", "", "en ", "", ""]
    assert stream.push([ord("d")]) == ""
    assert (stream.stopped, stream.all) == (True, "men ")
    early = TextStream(Bytes(), ("end",))
    assert early.push(list(b"end en"), armed=False) == "end en"
    assert early.push([ord("d")]) == "d"  # it began before the stop strings counted
    assert not early.stopped
    assert early.push(list(b" en"), last=True) == " en"


@pytest.mark.parametrize("least", range(7))
@pytest.mark.parametrize("drafts", range(6))
def test_ST_05_min_tokens_counts_tokens(least: int, drafts: int):
    """Everywhere the end token has logit 3 and token 7 has 2; drafts say 7."""
    rows = torch.full((9,), -1.0)
    rows[1], rows[7] = 3.0, 2.0
    model = RowModel(rows, eos=(1,))
    engine = Engine(model, FixedDrafter(*[[7] * drafts] * 9), CONFIG)
    (result,) = engine.generate([[4]], max_tokens=8, min_tokens=least)
    assert result.token_ids == [7] * least + [1]
    assert result.finish_reason == "stop"


def test_limits_and_bad_requests():
    engine = Engine(ToyModel(), "none", CONFIG)
    for parameters, message in (
        (dict(n=0), "n: expected an int >= 1, got 0"),
        (dict(min_tokens=9, max_tokens=4), r"min_tokens: expected an int in \[0, max_tokens=4\], got 9"),
        (dict(stop=("a", "")), "stop: expected non-empty strings"),
        (dict(stop="a"), "stop: expected token ids"),
        (dict(stop_token_ids=(99,)), r"stop_token_ids: expected token ids in \[0, 32\), got 99"),
        (dict(logprobs="all"), "logprobs"),
        (dict(logit_bias={40: 1.0}), r"logit_bias: expected token ids in \[0, 32\), got 40"),
        (dict(logit_bias={4: math.nan}), "logit_bias"),
        (dict(repetition_penalty=0.0), "repetition_penalty: expected a number > 0"),
        (dict(grammar="json"), "grammar"),
    ):
        with pytest.raises(ValueError, match=f"Request: {message}"):
            engine.add(Request([1, 2], **parameters))
    assert not engine.has_work


@pytest.mark.parametrize("value", [[4, 5], "4", 4.5, (4,), {}, 4j], ids=repr)
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "n", "seed", "num_drafts"])
def test_integers_of_a_wrong_type_are_refused_by_name(name: str, value):
    engine = Engine(ToyModel(), "none", CONFIG)
    with pytest.raises(ValueError, match=rf"^Request: {name}: expected (None or )?an int .*, got ") as raised:
        engine.add(Request([1, 2], **{name: value}))
    assert str(raised.value).endswith(f"got {value!r}")
    assert not engine.has_work


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", 3), ("stop_token_ids", (1.5,)), ("stop_token_ids", ("a",)), ("logit_bias", {"a": 1.0}),
        ("logit_bias", {4: "x"}), ("logit_bias", [4]), ("temperature", "hot"), ("temperature", None), ("top_p", [0.5]),
        ("min_p", torch.zeros(2)), ("repetition_penalty", "1"), ("presence_penalty", None), ("stop", 3),
        ("frequency_penalty", {}), ("logprobs", torch.zeros(2)),
    ],
)  # fmt: skip
def test_other_fields_of_a_wrong_type_are_refused_by_name(name: str, value):
    engine = Engine(ToyModel(), "none", CONFIG)
    with pytest.raises(ValueError, match=rf"^Request: {name}: expected "):
        engine.add(Request([1, 2], **{name: value}))
    assert not engine.has_work


def test_integers_of_numpy_are_integers():
    four = torch.tensor([4]).numpy()[0]
    Request([1], max_tokens=four, seed=four, num_drafts=four, min_tokens=four, stop_token_ids=(four,)).validate()


# ---- samples that share a prompt


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 13, 70])
def test_samples_share_the_prompt_and_equal_solo_runs(prefix_cache: bool, length: int):
    config = replace(CONFIG, prefix_cache=prefix_cache)
    prompt = [(7 * i + 3) % 32 for i in range(length)]
    request = Request(prompt, max_tokens=20, temperature=1.0, seed=5, n=4)
    engine = Engine(ToyModel(), OracleDrafter(TARGET), config)
    results = finish(engine, request)
    assert [result.sample for result in results] == [0, 1, 2, 3]
    assert len({tuple(result.token_ids) for result in results}) == 4
    assert engine.metrics.prefill_tokens == length + 3  # the last prompt token of each other sample
    assert engine.metrics.copied_pages == (3 if (length - 1) % 4 else 0)
    assert engine.arena.num_unowned == 256
    greedy = finish(engine, Request(prompt, max_tokens=20, n=3))
    assert [result.token_ids for result in greedy] == [plain_greedy(TARGET, prompt, 20)] * 3
    again = engine.generate([prompt], max_tokens=20, temperature=1.0, seed=5, n=2)
    assert [r.sample for r in again] == [0, 1]


def test_samples_survive_when_the_first_is_aborted():
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    first = engine.add(Request([1, 2, 3, 4, 5, 6], max_tokens=10, n=3))
    engine.abort(first)
    results = []
    while engine.has_work:
        results += [event.result for event in engine.step() if event.result]
    assert [r.token_ids for r in results] == [plain_greedy(TARGET, [1, 2, 3, 4, 5, 6], 10)] * 2


# ---- edits


def reference_edits(logits: list[float], prompt: list[int], output: list[int], request: Request) -> list[float]:
    """One row, one token after the other, in plain Python."""
    row = [x + request.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    for token in set(prompt) | set(output):
        r = request.repetition_penalty
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
    for token in set(output):
        row[token] -= request.frequency_penalty * output.count(token) + request.presence_penalty
    return row


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafter", ["none", "trees"])
def test_penalties_count_what_was_accepted_in_the_same_step(seed: int, drafter: str):
    rng = random.Random(seed)
    # Thirds never tie with sums of halves: the greedy choice is clear.
    rows = [[rng.randint(-9, 9) / 3 + i / 1000 for i in range(12)] for _ in range(12)]
    parameters = dict(
        logit_bias={rng.randrange(12): rng.choice([-2.0, 1.5]) for _ in range(2)},
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.25, -0.1]),
    )
    prompt = [rng.randrange(12) for _ in range(3)]
    request = Request(prompt, max_tokens=30, **parameters)
    wanted: list[int] = []
    while len(wanted) < 30:
        last = (prompt + wanted)[-1]
        row = reference_edits(rows[last], prompt, wanted, request)
        wanted.append(row.index(max(row)))

    class Right(OracleDrafter):
        """Trees around the right continuation, so that much is accepted."""

        def tree(self, tokens, nodes, depth):
            at = len(tokens) - len(prompt)
            coming = wanted[at : at + min(depth, 4)]
            ids, parents = [], []
            for i, token in enumerate(coming):
                ids += [(token + 1) % 12, token]
                parents += [2 * i, 2 * i]
            return ids[:nodes], parents[:nodes]

    engine = Engine(RowModel(rows), "none" if drafter == "none" else Right(TARGET), CONFIG)
    (result,) = finish(engine, request)
    assert result.token_ids == wanted
    if drafter == "trees":
        assert engine.metrics.accepted > 10


def test_edits_of_one_request_do_not_touch_its_neighbours():
    engine = Engine(ToyModel(), OracleDrafter(TARGET), CONFIG)
    prompts = [[1, 2, 3], [9, 9], [4]]
    results = finish(
        engine,
        Request(prompts[0], max_tokens=30),
        Request(prompts[1], max_tokens=30, presence_penalty=5.0, logit_bias={3: 9.0}),
        Request(prompts[2], max_tokens=30),
    )
    for i in (0, 2):
        assert results[i].token_ids == plain_greedy(TARGET, prompts[i], 30)
    assert results[1].token_ids != plain_greedy(TARGET, prompts[1], 30)


# ---- log-probabilities


@pytest.mark.parametrize("drafts", [[], [0, 0, 1]])
def test_ST_04_logprobs_belong_to_the_emitted_tokens(drafts: list[int]):
    """Logits [2, 1, 0] everywhere, T = 0.5: raw log p(0) = -.4076, processed -.1429."""
    model = RowModel([2.0, 1.0, 0.0])
    raw = torch.tensor([2.0, 1.0, 0.0]).log_softmax(0)
    processed = torch.tensor([4.0, 2.0, 0.0]).log_softmax(0)
    engine = Engine(model, FixedDrafter(drafts, drafts), CONFIG)
    requests = [Request([1], max_tokens=6, temperature=0.5, seed=3, logprobs=k) for k in ("raw", "processed", "both")]
    for result, request in zip(finish(engine, *requests, Request([1], max_tokens=6)), requests):
        assert len(result.logprobs) == len(result.token_ids) == 6
        for token, value in zip(result.token_ids, result.logprobs):
            both = (raw[token].item(), processed[token].item())
            wanted = {"raw": both[0], "processed": both[1], "both": both}[request.logprobs]
            assert value == pytest.approx(wanted, abs=1e-4)
    assert (round(raw[0].item(), 4), round(processed[0].item(), 4)) == (-0.4076, -0.1429)


# ---- sampling parameters shape every verified row


@pytest.mark.parametrize("drafts", [[], [0], [0, 0]])
def test_RS_14_temperature_shapes_every_position(drafts: list[int]):
    """Logits [0, ln 3], T = 0.5: token 0 has mass 0.1 at every position, verified or bonus."""
    engine = Engine(RowModel([0.0, math.log(3)]), FixedDrafter(*[drafts] * 10**6), replace(CONFIG, check=False))
    results = engine.generate([[1]] * 500, max_tokens=4, temperature=0.5)
    for position in range(4):
        count = sum(r.token_ids[position] == 0 for r in results)
        assert binomtest(count, 500, 0.1).pvalue > 1e-6


def test_RS_14_min_p_shapes_every_position():
    """p = [.6, .25, .1, .05], min_p = .2: tokens 2 and 3 never, drafted or not."""
    model = RowModel([math.log(p) for p in (0.6, 0.25, 0.1, 0.05)])
    engine = Engine(model, FixedDrafter(*[[2], [0, 2], [0, 0, 3]] * 10**5), replace(CONFIG, check=False))
    results = engine.generate([[1]] * 400, max_tokens=5, temperature=1.0, min_p=0.2)
    everything = [t for r in results for t in r.token_ids]
    assert set(everything) == {0, 1}
    assert binomtest(everything.count(0), len(everything), 0.6 / 0.85).pvalue > 1e-6


# ---- grammars


def test_ST_01_the_mask_advances_with_the_drafts_and_is_dead_behind_the_end():
    """(a) allowed {1, 2} first, 3 behind 1; rows [0, 3, 1, 2], [0, 1, 4, 2]; drafts [1, 2]: [1, 3]."""
    rows = torch.zeros(5, 5)
    rows[0, 1:4], rows[1, 1:4] = torch.tensor([3.0, 1, 2]), torch.tensor([1.0, 4, 2])
    engine = Engine(RowModel(rows), FixedDrafter([], [1, 2]), CONFIG)
    grammar = lambda: Follows({0}, {0: {1, 2}, 1: {3}, 3: {3}})  # noqa: E731
    assert engine.generate([[4]], max_tokens=3, grammar=grammar)[0].token_ids == [0, 1, 3]


def test_ST_01_a_mask_that_starts_inside_the_drafts():
    """(b) everything goes until token 9; behind it only 5 and 6. Drafts [9, 4]."""
    rows = torch.zeros(12, 12)
    rows[3, 9], rows[9, 4], rows[9, 6] = 5.0, 5.0, 3.0
    engine = Engine(RowModel(rows), FixedDrafter([], [9, 4]), CONFIG)
    anything = set(range(12))
    table = {t: anything for t in range(12)} | {9: {5, 6}, 6: {5, 6}, 5: {5, 6}}
    (result,) = engine.generate([[3]], max_tokens=3, grammar=lambda: Follows(anything, table))
    assert result.token_ids == [9, 6, 5]


@pytest.mark.parametrize("at", range(4))
def test_ST_01_behind_an_accepted_end_nothing_is_asked(at: int):
    """(c) drafts go on behind the end token 2, and its matcher fails if it is asked there."""
    block = [11, 12, 13, 14]
    block[at] = 2
    model = ScriptModel(dict(zip([9, 10, *block], [10, *block, 15])), eos=(2,))
    engine = Engine(model, FixedDrafter(block), CONFIG)
    anything = set(range(32))
    grammar = lambda: Follows(anything, {t: anything for t in range(32)}, end=2)  # noqa: E731
    (result,) = engine.generate([[9]], max_tokens=20, grammar=grammar)
    assert (result.token_ids, result.finish_reason) == ([10, *block[: at + 1]], "stop")
    assert (result.stats.flagged, result.error) == (0, None)


def test_a_grammar_may_end_without_an_end_token():
    model = ScriptModel({})
    engine = Engine(model, FixedDrafter([], [7, 8, 9, 10]), CONFIG)
    anything = set(range(32))
    grammar = lambda: Follows(anything, {t: anything for t in range(32)}, end=8)  # noqa: E731
    (result,) = engine.generate([[5]], max_tokens=20, grammar=grammar)
    assert (result.token_ids, result.finish_reason) == ([6, 7, 8], "stop")
    nothing = engine.generate([[5]], max_tokens=20, grammar=lambda: Follows(set(), {}))[0]
    assert (nothing.token_ids, nothing.finish_reason) == ([], "error")


def test_ST_02_trims_and_company_do_not_move_the_masks():
    """Requests with grammars of their own, drafts trimmed to any length, in any order: each equals its solo run."""
    rng = random.Random(2)
    rows = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))

    def grammar(seed: int):
        r = random.Random(seed)
        table = {t: set(r.sample(range(32), 9)) for t in range(32)}
        return lambda: Follows(table[0], table)

    class Trimmed(FixedDrafter):
        def propose(self, states, limits, context):
            from specdec_kernels.engine import Draft

            drafts = []
            for state, limit in zip(states, limits):
                size = rng.randint(0, min(3, limit.depth))
                text = list(state.tokens)
                for _ in range(size):
                    matcher = state.edits.grammar if state.edits else None
                    options = sorted(matcher.table[text[-1]]) if matcher and rng.random() < 0.8 else range(32)
                    text.append(max(options, key=lambda t: rows[text[-1], t].item()))
                drafts.append(Draft.chain(text[len(state.tokens) :]))
            return drafts

    requests = [Request([i], max_tokens=12, grammar=grammar(i) if i % 3 else None) for i in range(6)]
    solo = [finish(Engine(RowModel(rows), "none", CONFIG), request)[0].token_ids for request in requests]
    for _ in range(8):
        order = rng.sample(range(6), 6)
        engine = Engine(RowModel(rows), Trimmed(), CONFIG)
        results = finish(engine, *[requests[i] for i in order])
        assert [r.token_ids for r in results] == [solo[i] for i in order]
        assert engine.metrics.accepted > 5


def test_ST_03_a_forbidden_branch_does_not_touch_its_siblings():
    """root -> a (forbidden) -> c, root -> b -> d; the target prefers a, then c."""
    from specdec_kernels.engine import Draft

    a, b, c, d = 1, 2, 3, 4
    rows = torch.zeros(8, 8)
    rows[5, [a, b]], rows[a, c], rows[b, [c, d]] = torch.tensor([5.0, 4.0]), 5.0, torch.tensor([5.0, 4.0])

    class Tree(FixedDrafter):
        def propose(self, states, limits, context):
            draft = self.chains.pop(0) if self.chains else Draft()
            return [draft] * len(states)

    grammar = lambda: Follows({5}, {5: {b, 6}, b: {d, 7}, d: {7}, 7: {7}})  # noqa: E731
    for draft in (Draft((a, b, c, d), (0, 0, 1, 2)), Draft((b, d), (0, 1)), Draft((a, c), (0, 1)), Draft()):
        engine = Engine(RowModel(rows), Tree(Draft(), draft), CONFIG)
        (result,) = engine.generate([[0]], max_tokens=4, grammar=grammar, logit_bias={5: 9.0, 7: 1.0})
        assert result.token_ids == [5, b, d, 7]
        assert result.stats.flagged == 0
