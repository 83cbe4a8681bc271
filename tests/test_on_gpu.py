"""The GPU script runs to its end on any machine, and says what it could not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_timings, on_gpu, verify_model
from specdec_kernels import _ops

ROOT = Path(__file__).resolve().parents[1]
# The machine is bare: torch with NumPy and Triton, nothing else.
BARE = """
import runpy, sys
sys.modules["specdec_kernels._C"] = None  # built for one Python; the op libraries serve any
NAMES = "transformers pytest hypothesis scipy matplotlib rich gguf accelerate safetensors prometheus_client"
for name in NAMES.split():
    sys.modules[name] = None
sys.argv[0] = "on_gpu"
runpy.run_module("benchmarks.on_gpu", run_name="__main__")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run the script itself")
@pytest.mark.parametrize(
    "stage",
    ["environment", "correctness", "placement", "timings", "sanitizer", pytest.param("engine", marks=pytest.mark.long)],
)
def test_runs_to_the_end_without_a_gpu(stage: str, tmp_path: Path):
    command = [sys.executable, "-c", BARE, "--out", str(tmp_path), "--only", stage]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "on_gpu.jsonl").read_text().splitlines()]
    assert rows[-1]["status"] == ("done" if stage in ("environment", "engine") else "skipped"), rows[-1]
    if stage == "engine":
        plain, drafted = rows[:2]
        assert plain["same_text"] is drafted["same_text"] is True
        assert plain["forwards"] == 48 > drafted["forwards"]
    elif stage != "environment":
        assert "no CUDA device" in rows[-1]["reason"]


@pytest.mark.parametrize(
    ("measure", "shape", "providers"),
    [
        (gpu_timings.attention, (2, 40, 7), ["ours", "ours, a chain", "torch sdpa, gathered"]),
        (gpu_timings.hopper, (2, 70, 20), ["pages of 64 (TMA)", "pages of 16 (gather)", "mma.sync, row tiles of 64"]),
        (gpu_timings.verification, (3, 2, 500), ["ours", "torch"]),
    ],
)
def test_timings_run_on_this_device_too(measure, shape: tuple[int, int, int], providers: list[str]):
    more = {} if measure is gpu_timings.verification else {"bandwidth": gpu_timings.copy_bandwidth("cpu", 1)}
    rows = list(measure("cpu", shape, dtype=torch.float32, **more))
    assert [row["provider"] for row in rows] == providers
    assert all(row["median_s"] > 0 for row in rows)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    right = gpu_timings.sk.tree_attention
    monkeypatch.setattr(gpu_timings.sk, "tree_attention", lambda *a, **k: right(*a, **k) + 1)
    with pytest.raises(AssertionError, match="differs from torch"):
        list(gpu_timings.attention("cpu", (1, 20, 3), torch.float32, 1e9))


def test_pages_that_change_a_bit_are_not_timed(monkeypatch: pytest.MonkeyPatch):
    right = gpu_timings.Paged.run
    monkeypatch.setattr(gpu_timings.Paged, "run", lambda self, *a, **k: right(self, *a, **k) + (len(a) < 3 and not k))
    with pytest.raises(AssertionError, match="TMA and gather differ"):
        list(gpu_timings.hopper("cpu", (1, 70, 20), torch.float32, 1e9))


def test_comparison_sees_a_wrong_value():
    """Negative control of the correctness stage, on the CPU's own results."""
    right = torch.tensor([1.0, 2.0, float("nan")])
    assert on_gpu._close(right, right.clone())[0]
    assert not on_gpu._close(right, right + 0.01)[0]
    assert not on_gpu._close(torch.tensor([1, 2]), torch.tensor([1, 3]))[0]


@pytest.mark.parametrize("stage", ["correctness", "placement"])
def test_a_wrong_result_fails_its_stage(stage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One op that differs fails the stage by name, at its end and when its time is over; without one it passes."""
    wrong, log, run = "advance", on_gpu.Log(tmp_path / "rows.jsonl"), getattr(on_gpu, stage)
    monkeypatch.setattr(on_gpu, "need_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(_ops, "SCHEMAS", {op: _ops.SCHEMAS[op] for op in ("advance", "build_tree")})
    monkeypatch.setattr(_ops, "supports", lambda op, backend, device: True)
    monkeypatch.setattr(on_gpu, "compare", lambda op, backend, arguments, **k: {"ok": op != wrong})
    with pytest.raises(AssertionError, match=r"of \d+ calls differ: advance \(native\), advance \(triton\)$"):
        run(log, float("inf"))
    wrong = "none"
    run(log, float("inf"))
    with pytest.raises(on_gpu.Skip):
        run(log, 0.0)


def test_a_call_that_leaves_its_workspace_dirty_differs(monkeypatch: pytest.MonkeyPatch):
    arguments, plain = on_gpu.sample_calls("rerank_tree")[0], _ops.call
    names = [argument.name for argument in torch.ops.specdec.rerank_tree.default._schema.arguments]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    assert on_gpu.compare("rerank_tree", "native", arguments, device="cpu")["ok"]

    def dirty(op: str, backend: str, device: torch.device, *given: object) -> None:
        plain(op, backend, device, *given)
        workspace = given[names.index("workspace")]
        if isinstance(workspace, torch.Tensor):
            workspace[-1] = 1

    monkeypatch.setattr(_ops, "call", dirty)
    found = on_gpu.compare("rerank_tree", "native", arguments, device="cpu")
    assert found["wrong"] == ["workspace, which a call leaves zero"], found


def test_sample_calls_are_the_out_variants_arguments():
    calls = on_gpu.sample_calls("build_tree")
    schema = torch.ops.specdec.build_tree.default._schema
    assert len(calls) == 2
    assert all(len(call) == len(schema.arguments) for call in calls)


def test_predictions_are_those_of_the_model():
    """The page is fresh; by hand: 48 rows of 32000 bfloat16 in one wave of blocks, 5.2 rounds of 12 KiB a row."""
    assert verify_model.PAGE.read_text() == verify_model.page(), "python -m benchmarks.verify_model"
    found = verify_model.predict(8, 6, 32_000, drawn=False)
    rounds = 64_000 / 12_288
    assert found.form == "eager"
    assert found.bytes == found.floor_bytes == 48 * 64_000
    assert found.seconds == pytest.approx(rounds * 1.15e-6 + 3 * rounds * 0.35e-6 / 16 + 8 * 0.35e-6 + 8e-6)
