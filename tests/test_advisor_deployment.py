"""`select_draft_model` on the toy target, and `advise` on figures made by hand."""

from __future__ import annotations

import json
import math
import re
import shlex

import pytest

from benchmarks import bench_advisor
from specdec_kernels import __main__
from specdec_kernels.advisor import draft_selection, select_cli
from specdec_kernels.advisor.acceptance import Interval
from specdec_kernels.advisor.deployment import Workload, advise, speedup_at
from specdec_kernels.advisor.draft_selection import Candidate, DraftSelection, Measurement, select_draft_model
from specdec_kernels.engine import Draft
from tests.toy_model import OracleDrafter, ToyModel

PROMPTS = [[i, i + 1, i + 2, i + 3] for i in range(6)]


class Oracle:
    """The true continuation, as a chain of four; every third request's text is unknown to it."""

    name = "oracle"

    def __init__(self, target):
        self.target = target

    def propose(self, states, limits, context):
        return [Draft.chain(self.truth(s.tokens, min(4, limit.depth))) for s, limit in zip(states, limits)]

    def truth(self, tokens, depth):
        if tokens[0] % 3 == 0:
            return [(self.target.greedy(tokens) + 1) % self.target.vocab] * depth
        found = list(tokens)
        for _ in range(depth):
            found.append(self.target.greedy(found))
        return found[len(tokens) :]


def selected(**options):
    toy = ToyModel()
    candidates = {"right": Candidate(lambda: Oracle(toy.target), 4), "random": Candidate(lambda: OracleDrafter(toy.target, 0.0), 4)}  # fmt: skip  # noqa: E501
    settings = {"max_tokens": 31, "turns": 3, "steps_per_turn": 2} | options
    return select_draft_model(toy, candidates, PROMPTS, (1, 3), **settings)


def test_what_is_measured_is_what_happened():
    """Behind the prefill's token, four of six texts take 6 steps of five tokens, two take 30 steps. Tokens a step weigh
    all steps, and the interval is wide because it draws requests."""
    found = selected()
    for batch in (1, 3):
        right = found.at("right", batch)
        assert right.tokens_per_step.value == pytest.approx(6 * 30 / (4 * 6 + 2 * 30))
        assert right.tokens_per_step.low < 1.5 < 4 < right.tokens_per_step.high
        assert right.conditional_acceptance.value == pytest.approx(4 * 24 / (4 * 24 + 2 * 30), rel=0.05)
        expected = right.tokens_per_step.value / (right.step_seconds / right.plain_seconds)
        assert right.speedup.value == pytest.approx(expected)
        assert right.memory == right.memory_per_token == 0
    assert found.at("random", 1).tokens_per_step.value < 1.2
    assert DraftSelection.from_json(found.to_json()) == found


def timed(monkeypatch) -> ToyModel:
    """A toy whose forward passes alone move the clock: by 1, and by a quarter for each draft."""
    clock = [0.0]
    monkeypatch.setattr(draft_selection.time, "perf_counter", lambda: clock[0])
    toy = ToyModel()
    forward = toy.forward

    def slow(batch, cache, **more):
        clock[0] += 1.0 + 0.25 * (len(batch.token_ids) - len(batch.context_lens))
        return forward(batch, cache, **more)

    toy.forward = slow
    return toy


def test_costs_are_what_the_steps_took(monkeypatch):
    """A clock that only the forward passes move: a step with four drafts is twice a plain one; a text's last steps have
    room for fewer, so that 84 steps draft 316."""
    toy = timed(monkeypatch)
    found = select_draft_model(
        toy, {"right": Candidate(lambda: Oracle(toy.target), 4)}, PROMPTS, (1, 2), max_tokens=31, turns=3,
        steps_per_turn=2,
    )  # fmt: skip
    assert found.at("right", 1).step_cost == pytest.approx(1 + 316 / 84 / 4)
    assert found.at("right", 2).step_cost == pytest.approx(1 + 316 / 84 / 2)
    assert found.at("right", 1).speedup.value == pytest.approx(180 / (84 + 316 / 4))
    assert found.best(1) == "right"
    assert found.best(2) == "none"
    assert found.at("right", 2).verdict in ("does not pay", "undecided")


class Choosy(Oracle):
    """Drafts four tokens where it knows the text, nothing elsewhere: its steps cost 2 or 1 plain steps."""

    def propose(self, states, limits, context):
        return [
            Draft.chain(self.truth(s.tokens, min(4, limit.depth) if s.tokens[0] % 3 else 0))
            for s, limit in zip(states, limits)
        ]


@pytest.mark.parametrize("turns", [6, 8, 15])
def test_costs_are_those_of_the_drafts_of_whole_texts(monkeypatch, turns):
    """At batch 1 a turn sees one request: four of six turns at cost 2, two at 1 (their median says 2). Whole texts take
    6 * 4 steps with drafts and 30 * 2 without, so a step costs 1 + 24 / 84 on the mean."""
    toy = timed(monkeypatch)
    found = select_draft_model(
        toy, {"choosy": Candidate(lambda: Choosy(toy.target), 4)}, PROMPTS, (1,), max_tokens=31, turns=turns,
        steps_per_turn=2,
    )  # fmt: skip
    assert found.at("choosy", 1).step_cost == pytest.approx(1 + 24 / 84, rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": {"none": "none"}}, "candidates: expected at least one"),
        ({"candidates": {"a": Candidate("ngram", 0)}}, "candidates: expected at least one draft"),
        ({"prompts": [[1, 2]]}, "prompts: expected a list of at least 2"),
        ({"prompts": "one text"}, "prompts: expected a list"),
        ({"batch_sizes": (0,)}, "batch_sizes: expected different integers >= 1"),
        ({"batch_sizes": (2, 2)}, "batch_sizes: expected different integers >= 1"),
        ({"turns": 1}, "turns: expected at least 2"),
        ({"max_tokens": 10}, "max_tokens: expected at least"),
        ({"num_pages": 2}, "to fit the context and num_pages"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"candidates": {"ngram": "ngram"}, "prompts": PROMPTS, "batch_sizes": (2,), "max_tokens": 96} | change
    with pytest.raises(ValueError, match=f"select_draft_model: .*{message}"):
        select_draft_model(ToyModel(), **arguments)


# ---- advice


def row(name, batch, speedup, *, acceptance=0.7, spread=0.05, kv=0):
    def span(value):
        return Interval(value, value - spread, value + spread)

    return Measurement(
        name, batch, span(2.0), span(acceptance), span(0.4), 0.02, 0.002, 0.01 * batch, span(speedup), 10**6, kv,
        "pays" if speedup - spread > 1 else "does not pay" if speedup + spread < 1 else "undecided",
    )  # fmt: skip


def selection():
    return DraftSelection("toy", 20, 0.0, [
        row("eagle3/24", 1, 2.0, kv=100), row("eagle3/24", 4, 1.5, kv=100), row("eagle3/24", 16, 0.8, kv=100),
        row("ngram", 1, 1.2, acceptance=0.5), row("ngram", 4, 1.1, acceptance=0.5),
        row("ngram", 16, 1.05, acceptance=0.5),
    ])  # fmt: skip


def load(**change):
    given = {"prompt_tokens": [100, 600, 3000], "output_tokens": [50, 50, 50], "batch_share": {1: 0.5, 4: 0.5}}
    return Workload(**given | change)


def test_the_choice_follows_the_loads_batches():
    few = advise(selection(), load(), target_kv_bytes=1000)
    assert few["drafter"].choice == "eagle3/24"
    assert few["drafter"].figures["speedup"]["eagle3/24"] == pytest.approx(1 / (0.5 / 2 + 0.5 / 1.5))
    assert few["switch off"].choice == "from batch 16 on"
    many = advise(selection(), load(batch_share={16: 1.0}), target_kv_bytes=1000)
    assert many["drafter"].choice == "ngram"
    assert many["target updates"].choice == "nothing to do"
    none = DraftSelection("toy", 20, 0.0, [row("ngram", 1, 0.9)])
    plain = advise(none, load(), target_kv_bytes=1000)
    assert plain["drafter"].choice == "none"
    assert plain["switch off"].choice == "always"
    assert plain["drafter"].figures["unmeasured_batches"] == [4]


def test_speedups_between_measured_batches():
    assert speedup_at(selection(), "eagle3/24", 2) == (pytest.approx(1.75), True)
    assert speedup_at(selection(), "eagle3/24", 64) == (0.8, False)
    assert speedup_at(selection(), "none", 64) == (1.0, True)


def test_memory_prefix_and_updates():
    asked = load(shared_tokens=[50, 300, 1500], sampled_share=0.5, updates_per_day=1)
    found = advise(selection(), asked, target_kv_bytes=1000)
    assert found["pool floors"].figures["target_floor"] == math.ceil(3050 / 16)
    assert found["pool floors"].figures["draft_floor"] == math.ceil(math.ceil(3050 / 16) / 10)
    assert found["pool floors"].figures["draft_share"] == pytest.approx(100 / 1100)
    assert found["prefix cache"].choice == "on, soft pages on"
    assert found["prefix cache"].figures["shared_share"] == 0.5
    assert "retrain" in found["target updates"].choice
    measured = advise(selection(), asked, target_kv_bytes=1000, soft_hits=0.0)
    assert measured["prefix cache"].choice == "on, soft pages off"
    greedy = advise(selection(), load(shared_tokens=[50, 300, 1500]), target_kv_bytes=1000)
    assert greedy["prefix cache"].choice == "on, soft pages off"
    assert advise(selection(), load(shared_tokens=[0, 0, 0]), target_kv_bytes=1000)["prefix cache"].choice == "off"


def test_whole_requests_and_the_quoted_rules():
    """Prefill takes no part in the gain, so long prompts gain least at equal outputs: the quoted rule is refuted."""
    found = advise(selection(), load(), target_kv_bytes=1000, prefill_seconds={100: 0.1, 3000: 3.0})
    classes = found["whole requests"].figures
    step = (0.5 * 1 * 0.01 + 0.5 * 4 * 0.04) / (0.5 * 1 + 0.5 * 4)  # four tokens of five are drawn at batch 4
    gain = 1 / (0.5 / 2 + 0.5 / 1.5)
    assert classes["under 500"] == pytest.approx((0.1 + 50 * step) / (0.1 + 50 * step / gain))
    assert classes["under 500"] > classes["500 to 2000"] > classes["over 2000"]
    by_rule = {rule.rule: rule for rule in found.rules}
    assert by_rule["prompts under 500 tokens gain nothing, over 2000 most"].borne_out == "no"
    assert by_rule["speculation stops paying beyond batch 8"].borne_out == "no"  # ngram still does
    assert by_rule["an acceptance under 65 % gives less than 1.3x"].borne_out == "yes"
    unknown = advise(selection(), load(), target_kv_bytes=1000)
    assert [rule.borne_out for rule in unknown.rules][-1] == "not measured"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": [1]}, "output_tokens: expected one for each of 3 requests, got 1"),
        ({"prompt_tokens": [0, 1, 2]}, "prompt_tokens: expected integers >= 1, got 0"),
        ({"batch_share": {1: 0.5}}, "batch_share: expected shares that sum to 1"),
        ({"batch_share": {}}, "batch_share: expected shares that sum to 1"),
    ],
)
def test_bad_workloads_are_named(change, message):
    with pytest.raises(ValueError, match=f"Workload: {message}"):
        load(**change)


def test_a_traces_batches_weigh_by_their_steps(tmp_path):
    """300 tokens at batch 1 are 300 steps; 400 tokens at batch 4 are 100."""
    rows = [{"prompt_tokens": 9, "output_tokens": 300, "batch": 1}] + [{"prompt_tokens": 9, "output_tokens": 100, "batch": 4, "temperature": 1}] * 4  # fmt: skip  # noqa: E501
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = Workload.from_jsonl(tmp_path / "trace.jsonl")
    assert read.batch_share == {1: 0.75, 4: 0.25}
    assert read.sampled_share == 0.8
    assert read.shared_tokens == ()


@pytest.mark.parametrize("batch", [0, -1, None, 2.5])
def test_a_traces_wrong_batch_is_named(batch, tmp_path):
    rows = [{"prompt_tokens": 9, "output_tokens": 30, "batch": 1}, {"prompt_tokens": 9, "output_tokens": 30, "batch": batch}]  # fmt: skip  # noqa: E501
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=f"Workload: batch: expected an integer >= 1 a request, got {batch} in line 2"):
        Workload.from_jsonl(tmp_path / "trace.jsonl")


# ---- the command line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setattr(select_cli, "load_model", lambda name, dtype=None, device=None: ToyModel(max_context=4096))
    monkeypatch.setattr(select_cli, "read_prompts", lambda path: PROMPTS)
    (tmp_path / "selection.json").write_text(selection().to_json())
    lines = [{"prompt_tokens": n, "output_tokens": 50, "batch": 4, "shared_tokens": 10} for n in (60, 90)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_select_writes_what_advise_reads(folder, capsys):
    words = "select --candidate ngram/4 --batch-sizes 1,2 --max-tokens 40 --turns 2 --out new.json --plot new.svg"
    code = __main__.main(words.split())
    captured = capsys.readouterr()
    assert "ngram/4" in captured.out
    assert "turn 2 of 2" in captured.err
    found = DraftSelection.from_json((folder / "new.json").read_text())
    assert code == (0 if {found.best(1), found.best(2)} != {"none"} else 1)
    assert (folder / "new.svg").read_text().count("<svg") == 1
    assert __main__.main(["advise", "new.json", "trace.jsonl", "--target", "toy", "--json"]) in (0, 1)
    advice = json.loads(capsys.readouterr().out)
    assert {r["topic"] for r in advice["recommendations"]} >= {"drafter", "switch off", "pool floors", "whole requests"}
    assert __main__.main(["advise", "selection.json", "trace.jsonl", "--kv-bytes", "1000"]) == 0
    assert "eagle3/24" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["select", "advise"])
def test_the_examples_run(word, folder, capsys):
    """With the toy model, the toy prompts and the files made above in the place of what the examples name."""
    with pytest.raises(SystemExit):
        __main__.main([word, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert __main__.main(shlex.split(re.search(r"Example: (.*?)$", text).group(1))) in (0, 1)
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select", "--candidate", "ngram/x"], "--candidate: expected NAME"),
        (["select", "--candidate", "ngram@head"], "--candidate: expected a folder with"),
        (["select", "--candidate", "ngram", "--batch-sizes", "a"], "--batch-sizes: expected N,N"),
        (["select", "--candidate", "nonesuch"], "drafter: expected one of"),
        (["advise", "nowhere.json", "trace.jsonl", "--kv-bytes", "1"], "nowhere.json"),
        (["advise", "trace.jsonl", "trace.jsonl", "--kv-bytes", "1"], "expected what `select --out` writes"),
        (["advise", "selection.json", "selection.json", "--kv-bytes", "1"], "advise: "),
        (["advise", "selection.json", "trace.jsonl", "--kv-bytes", "0"], "target_kv_bytes: expected at least 1"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(arguments, message, folder, capsys):
    assert __main__.main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"{arguments[0]}: ")
    assert message in error


def test_the_benchmark_compares_choice_and_best():
    rows = bench_advisor.rows_of(selection(), {"eagle3/24": [1.1, 1.0, 1.2], "ngram": [1.3, 1.2, 1.25]}, 4)
    assert [row["predicted_over_measured"] for row in rows] == [pytest.approx(1.5 / 1.1, abs=1e-3), 0.88]
    assert {(row["chosen"], row["best"]) for row in rows} == {("eagle3/24", "ngram")}
    assert rows[0]["chosen_over_best"] == pytest.approx(1.1 / 1.25, abs=1e-3)
    plain = bench_advisor.rows_of(selection(), {"eagle3/24": [0.7], "ngram": [0.9]}, 16)
    assert {(row["chosen"], row["best"], row["chosen_over_best"]) for row in plain} == {("ngram", "none", 0.9)}
