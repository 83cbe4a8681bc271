"""The claim scripts about the engine run, and their figures say what is so."""

from __future__ import annotations

import json

import pytest

from tests.test_advisor_claims import run


def test_grouping(tmp_path, capsys):
    figures = run("grouping", tmp_path, capsys)
    used = figures["utilisation_64"]
    padded, ahead = used["sized trees, padded"], used["sized trees, look-ahead groups"]
    packed, grouped = used["sized trees, packed"], used["sized trees, a launch a group"]
    assert packed["slot util."] == 1.0
    assert padded["slot util."] < ahead["slot util."] <= grouped["slot util."] + 1e-9
    assert padded["tokens a node"] == pytest.approx(packed["tokens a node"], rel=0.1)  # rejection is not padding
    assert packed["x plain"] > ahead["x plain"] >= padded["x plain"]
    assert used["goodput trees, packed"]["x plain"] > max(1.0, packed["x plain"])
    few = figures["utilisation_4"]  # memory-bound: a launch a group reads the weights once a group
    assert few["sized trees, a launch a group"]["x plain"] < few["sized trees, padded"]["x plain"]
    queue = figures["queueing"]
    assert queue["goodput"]["P99 s"] < queue["plain, first come first served"]["P99 s"]


def test_memory_pool(tmp_path, capsys):
    figures = run("memory_pool", tmp_path, capsys)
    for drafter, arms in figures.items():
        fixed, arena = arms["fixed 10 %"], arms["arena"]
        assert fixed["by drafts"] <= 0.1 + 1e-9, drafter
        assert 0 < arena["memory in use"] <= 1, drafter
        assert arena["tokens a node"] > 0, drafter
    assert figures["head, KV 1/32"]["fixed 10 %"]["by drafts"] < 0.05  # most of the reserve lies idle


def trace_by_hand(path):
    """Six chats of three turns behind one system prompt, and four samples of one prompt: small ids, no model."""
    system, rounds = list(range(1, 41)), []
    texts = {chat: system + [50 + chat, 60, 61] for chat in range(6)}
    for turn in range(3):
        jobs = []
        for chat, prompt in texts.items():
            output = [100 + chat, 71, 72, 73, 74, 75, 76 + turn, 71, 72, 73, 74, 75, 80, 81, 82, 83, 84]
            jobs.append({"prompt": prompt, "output": output, "temperature": 0.0})
            texts[chat] = prompt + output + [90 + turn, 60, 61]
        rounds.append(jobs)
    once = [71, 72, 73, 74, 75]
    samples = [(once * 4)[:i] + [85 + i] + once * 3 for i in (3, 6, 9, 12)]
    rounds.append([{"prompt": [*system, 44, 45], "output": output, "temperature": 0.8} for output in samples])
    path.write_text(json.dumps({"rounds": rounds}))


def test_prefix_cache(tmp_path, capsys):
    trace_by_hand(tmp_path / "trace.json")
    figures = run("prefix_cache", tmp_path, capsys, "--trace", str(tmp_path / "trace.json"))
    ample = figures["ample"]
    none, discard, soft, dropped, keyed = ample.values()
    assert none["hit rate"] > 0.6
    assert discard["committed"] == none["committed"] == soft["committed"]  # speculation alone loses nothing
    assert discard["tokens a step"] > 1.2 > none["tokens a step"] == 1.0
    assert dropped["dropped"] > 0
    assert dropped["committed"] == none["committed"] - dropped["dropped"]  # a page a hit, no more
    assert none["committed"] - 8 * 22 <= keyed["committed"] <= none["committed"]  # at most a page a request
    assert keyed["committed"] > dropped["committed"]
    assert all(values["evicted committed"] == 0 for values in ample.values())
    assert figures["heavy"]["discard"]["evicted committed"] > 0
    assert figures["heavy"]["discard"]["hit rate"] < discard["hit rate"]


def test_distillation(tmp_path, capsys):
    figures = run("distillation", tmp_path, capsys, "--shares", "0.5")
    arms = figures["arms"]
    online = arms["online, at most 50%"]
    assert online["updates"] >= online["chunks"] >= 1
    assert 0 < online["cost_share"] < 0.7  # the first turn is not known beforehand
    assert 0 < arms["frozen"]["end"] < 1
    assert arms["frozen"]["above_frozen"] == 0
    before, after = arms["nats_before"], arms["nats_after"]
    assert after[1] < before[1]  # it has moved towards the other text
    rows = [json.loads(line) for line in (tmp_path / "distillation.jsonl").read_text().splitlines()]
    assert [row["moving"] for row in rows] == [False] + [True] * (len(rows) - 1)


def test_moe(tmp_path, capsys):
    figures = run("moe", tmp_path, capsys)
    assert all(0 < rate <= 1 for rate in figures["acceptance"].values())
    low, high = figures["difference_interval"]
    assert low <= figures["difference"] <= high
    assert min(figures[name] for name in ("base_ms", "per_expert_ms", "per_token_ms")) >= 0
    rows = [json.loads(line) for line in (tmp_path / "moe.jsonl").read_text().splitlines()]
    one = [row["experts"] for row in rows if row["batch"] * row["tokens"] == 1]
    assert one == [2]  # one layer, two experts a token
    assert max(row["experts"] for row in rows) <= 4
