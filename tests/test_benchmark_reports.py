"""The harness around the benchmarks: resume, reports, regressions as ratios, and one page of all claims."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import torch

from benchmarks import attention_workload, page, plot, report, run
from benchmarks.claims import __main__ as claims
from benchmarks.harness import Bench, read_rows

EXTERNAL = re.compile(r"""(?:src|href)\s*=\s*(?!["']?(?:data:|#))|@import|url\(""")


def bench(path, resume: bool = False, rounds: int = 5) -> Bench:
    made = Bench("probe", path, rounds=rounds, quiet=True, resume=resume)
    Bench.best_bandwidth = 0.0
    return made


def providers(calls: list[str]):
    return {name: lambda name=name: calls.append(name) or sum(range(2000)) for name in ("ours", "theirs")}


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch):
    monkeypatch.setattr("benchmarks.machine.read_bandwidth", lambda repeats=3: 10.0)


def test_a_stopped_run_goes_on_behind_its_last_block(tmp_path):
    path, calls = tmp_path / "probe.jsonl", []
    first = bench(path).compare({"op": "x", "B": 1, "floor": 0.5}, providers(calls), lambda: True)
    text = path.read_text()
    path.write_text(text + text.splitlines()[0][:40])  # stopped while it wrote
    assert read_rows(path) == first
    calls.clear()
    again = bench(path, resume=True)
    kept = again.compare({"op": "x", "B": 1, "floor": 0.7}, providers(calls), lambda: False)
    assert kept == first
    assert calls == []
    for shape, rounds, options in (({"B": 2}, 5, {}), ({"B": 1}, 6, {}), ({"B": 1}, 5, {"more": sum})):
        bench(path, resume=True, rounds=rounds).compare({"op": "x", **shape}, providers(calls) | {
            name: lambda: None for name in options}, lambda: True)  # fmt: skip
        assert calls, (shape, rounds, options)
        calls.clear()


def test_a_damaged_line_before_the_last_is_no_stopped_run(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_rows(tmp_path / "x.jsonl")


def row(provider: str, seconds: float, base: float, wide: float = 0.02, **shape):
    return {
        "family": "probe", "op": "x", **shape, "provider": provider, "median_s": seconds, "p10_s": seconds * (1 - wide),
        "p90_s": seconds * (1 + wide), "samples": 5, "base_over_own": base / seconds, "gated": True, "noisy": False,
        "read_gb_s": 10.0, "times_one_read": 4.0, "machine": {"cpu": "a CPU", "isa": ["avx2"]},
    }  # fmt: skip


def stored(folder, ours: float, scale: float = 1.0, wide: float = 0.02):
    folder.mkdir()
    rows = [row("torch", 1.0 * scale, scale), row("ours", ours * scale, scale, wide)]
    (folder / "probe.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.mark.parametrize(
    ("ours", "scale", "wide", "regressed"),
    [
        (0.5, 1.0, 0.02, 0),
        (0.5, 3.0, 0.02, 0),  # a slower machine: everything took three times as long
        (0.52, 1.0, 0.02, 0),  # within tolerance
        (0.7, 1.0, 0.02, 1),
        (0.7, 0.3, 0.02, 1),  # faster than the stored run, and still a regression beside its base
        (0.7, 1.0, 0.4, 0),  # within the spread of the run
    ],
)
def test_regressions_are_ratios_beyond_the_spread(tmp_path, capsys, monkeypatch, ours, scale, wide, regressed):
    before, now = stored(tmp_path / "before", 0.5), stored(tmp_path / "now", ours, scale, wide)
    monkeypatch.setattr(report, "draw", lambda *arguments: None)  # pictures take a second each
    assert report.main([str(now), "--base", str(before), "--fail"]) == regressed
    out = capsys.readouterr().out
    assert f"1 ratios compared, {regressed} regressed" in out
    assert ("regressed: probe x ours: 2.00 -> 1.43 (x0.71)" in out) == bool(regressed)


def test_the_report_needs_nothing_else(tmp_path, capsys):
    folder = stored(tmp_path / "run", 0.5)
    (folder / "engine.jsonl").write_text(
        json.dumps({"family": "engine", "op": "plain <b>", "ratio_median": 1.5}) + "\n"
    )
    assert report.main([str(folder)]) == 0
    text = (folder / "report.html").read_text()
    assert not EXTERNAL.search(text)
    assert "prefers-color-scheme: dark" in text
    assert "data:image/svg+xml;base64," in text
    for part in ("a CPU", "500", "plain &lt;b&gt;", ">1.5<", "x roofline"):
        assert part in text, part
    assert report.main([str(tmp_path / "none")]) == 2
    assert "report: folder: expected FAMILY.jsonl files" in capsys.readouterr().err


def test_rooflines():
    assert plot.roofline(row("ours", 2.0, 1.0)) == 0.5  # 4 times one read
    assert plot.roofline({"read_s": 1.0, "gemm_s": 0.8, "exp_s": 0.4}) == pytest.approx(1.2)
    assert plot.roofline({"median_s": 1.0}) is None


def test_run_keeps_what_ended_well(tmp_path, monkeypatch, capsys):
    ran = []

    def fake(command, **options):
        ran.append((command[2].split("_")[-1], command[5:]))
        return type("Done", (), {"returncode": int(len(ran) == 2)})  # the second family fails

    monkeypatch.setattr(run.subprocess, "run", fake)
    assert run.main(["tree", "kv", "--quick", "--out", str(tmp_path)]) == 1
    assert "failed: kv" in capsys.readouterr().err
    assert run.main(["tree", "kv", "--quick", "--resume", "--out", str(tmp_path)]) == 0
    assert ran == [("tree", ["--quick"]), ("kv", ["--quick"]), ("kv", ["--quick", "--resume"])]
    assert run.main(["tree", "--resume", "--out", str(tmp_path)]) == 0  # the full size was never run
    assert ran[-1] == ("tree", ["--resume"])
    assert run.bar(1, 4, 8) == "[##------]"
    assert run.expected(["kv"], {"kv": {"seconds": 7.4}}) == ", about 7 s left"
    assert run.expected(["kv", "tree"], {"kv": {"seconds": 7.4}}) == ""


def test_the_claims_page_sets_text_beside_finding(tmp_path, capsys, monkeypatch):
    """One claim is run by the command, one is kept, the others stand there as not run or not measured."""

    def here(command, **options):  # in this process: another one would import torch and matplotlib once more
        found = importlib.import_module(command[2]).main(command[3:])
        return type("Done", (), {"returncode": found})

    monkeypatch.setattr(claims.subprocess, "run", here)
    kept = {"claim": "p99", "says": "a", "so": "it is <1.4", "quick": True, "tables": [], "figures": {}}
    (tmp_path / "p99.json").write_text(json.dumps(kept))
    assert claims.main(["depth", "p99", "--quick", "--resume", "--out", str(tmp_path)]) == 0
    assert "[2/2] p99: kept" in capsys.readouterr().out
    text = (tmp_path / "claims.html").read_text()
    found = json.loads((tmp_path / "depth.json").read_text())
    assert found["so"] in text.replace("&#x27;", "'").replace("&gt;", ">")
    assert "it is &lt;1.4" in text
    unmeasured = [claim for claim, names in claims.TEXT if not set(names) & set(claims.CLAIMS)]
    assert text.count("not measured yet") == len(unmeasured) <= 5
    assert text.count("not run into this folder") == len(claims.CLAIMS) - 2
    assert not EXTERNAL.search(text)


def test_every_claim_script_is_in_the_list():
    scripts = {path.stem for path in claims.HERE.glob("*.py")} - {
        "__init__",
        "__main__",
        "common",
        "heads",
        "simulated",
        "byte_models",
    }
    assert scripts == set(claims.CLAIMS), "a new claim gets its place in TEXT of benchmarks/claims/__main__.py"
    assert page.table(["a"], [[page.Cell("<x>", "bad")], [1.23456]]).count('class="') == 2


def test_peers_and_both_masks_are_checked_before_they_are_timed(monkeypatch):
    """Attention: a peer that sees other nodes is refused by name, and so is our own causal call."""
    monkeypatch.setattr(attention_workload, "COLD_BYTES", 1 << 16)
    work = attention_workload.Workload([40, 40], [5, 5], torch.float32, heads=(4, 2), head_dim=64)
    assert work.gate()
    assert work.gate(causal=True)
    tree, chain = (work.visible(0, causal).int().sum() for causal in (False, True))
    assert tree < chain == 5 * 40 + 15
    assert attention_workload.strong_torch(work)().shape == (10, 4, 64)
    right = attention_workload.Workload.visible
    monkeypatch.setattr(attention_workload.Workload, "visible", lambda self, b, causal=False: right(self, b, True))
    with pytest.raises(AssertionError, match="torch's attention differs from ours by"):
        attention_workload.strong_torch(work)
    assert not work.gate()
    monkeypatch.setattr(attention_workload.Workload, "visible", lambda self, b, causal=False: right(self, b))
    assert not work.gate(causal=True)
