"""The GPU script runs to its end on any machine, and says what it could not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import on_gpu

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run the script itself")
@pytest.mark.parametrize("stage", ["environment", "correctness", "placement", "timings", "sanitizer"])
def test_runs_to_the_end_without_a_gpu(stage: str, tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--out", str(tmp_path), "--only", stage]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "on_gpu.jsonl").read_text().splitlines()]
    expected = "done" if stage == "environment" else "skipped"
    assert rows[-1]["status"] == expected
    assert stage == "environment" or "no CUDA device" in rows[-1]["reason"]


def test_comparison_sees_a_wrong_value():
    """Negative control of the correctness stage, on the CPU's own results."""
    right = torch.tensor([1.0, 2.0, float("nan")])
    assert on_gpu._close(right, right.clone())[0]
    assert not on_gpu._close(right, right + 0.01)[0]
    assert not on_gpu._close(torch.tensor([1, 2]), torch.tensor([1, 3]))[0]


def test_sample_calls_are_the_out_variants_arguments():
    calls = on_gpu.sample_calls("build_tree")
    schema = torch.ops.specdec.build_tree.default._schema
    assert len(calls) == 2
    assert all(len(call) == len(schema.arguments) for call in calls)
