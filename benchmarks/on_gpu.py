"""The one script for a GPU machine that is bare and lent for minutes: `python -m benchmarks.on_gpu [--out DIR]`.

Needs nothing but Python, torch and the prebuilt ops library beside the package. Stages run in order of worth, each with
a share of the time; every result is a JSONL row written at once, so a machine that goes away takes nothing along.

    environment    torch, driver, device, which ops libraries loaded
    correctness    every op that has a CUDA or Triton kernel against the CPU op, on its sample calls    (2 min)
    placement      the same on a side stream, and on a second device while the first is current          (30 s)
    timings        attention and verify against torch on the same device, the Hopper kernel against the
                   mma.sync kernel, with and without tensor maps (gpu_timings.py)                        (3 min)
    sanitizer      compute-sanitizer memcheck and racecheck on small shapes, where the tool is           (2 min)
    engine         decoding by the engine, plain and with n-gram drafts, random weights in SmolLM2's shape

On a machine without a GPU every stage that needs one says so and the script runs to its end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
STAGE_SECONDS = {"environment": 20, "correctness": 120, "placement": 30, "timings": 180, "sanitizer": 120, "engine": 40}


class Skip(Exception):  # noqa: N818  (not an error: a stage that cannot run here, with its reason)
    pass


class Log:
    """Appends rows to one JSONL file and prints them."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.start = path, time.monotonic()

    def write(self, stage: str, **row: Any) -> None:
        text = json.dumps({"stage": stage, "at": round(time.monotonic() - self.start, 2), **row}, default=str)
        with self.path.open("a") as file:
            file.write(text + "\n")
        print(text[:240], flush=True)


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise Skip("no CUDA device: torch.cuda.is_available() is False")


def environment(log: Log, deadline: float) -> None:
    from specdec_kernels import _ops

    row: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "libraries": _ops.NATIVE}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        row |= {"device": properties.name, "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}  # fmt: skip
    log.write("environment", **row)


def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
    return [_to(one, device) for one in value] if isinstance(value, (list, tuple)) else value


def _close(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, float]:
    """Integers must agree exactly; floats to the resolution of the type they are stored in."""
    a, b = a.cpu(), b.cpu()
    if not a.dtype.is_floating_point:
        return torch.equal(a, b), 0.0
    tolerance = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(a.dtype, 1e-1)
    same = torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return same, float((a.double() - b.double()).abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0


def sample_calls(op: str) -> list[list[Any]]:
    """Arguments of the out-variant in the op's sample calls (tests/op_samples.py): batch 3 dense, batch 1 strided."""
    from specdec_kernels import _ops

    samples, plain, calls = importlib.import_module("tests.op_samples").SAMPLES, _ops.call, []

    def record(name: str, backend: str | None, device: torch.device, *arguments: Any) -> None:
        calls.extend([_to(list(arguments), "cpu")] if name == op else [])
        plain(name, backend, device, *arguments)

    _ops.call = record
    try:
        for batch, strided in ((3, False), (1, True)):
            run, tensors = samples[op](batch, strided)
            run(*tensors)
    finally:
        _ops.call = plain
    return calls


class Verdict:
    """Rows of one stage, and an error at its end if one of them was not right."""

    def __init__(self, log: Log, stage: str) -> None:
        self.log, self.stage, self.count = log, stage, 0
        self.wrong: list[str] = []

    def write(self, **row: Any) -> None:
        self.count += 1
        self.wrong += [] if row["ok"] else [f"{row['op']} ({row.get('backend', row.get('shape'))})"]
        self.log.write(self.stage, **row)

    def end(self, skip: str = "") -> None:
        if self.wrong:
            raise AssertionError(
                f"{len(self.wrong)} of {self.count} calls differ: {', '.join(sorted(set(self.wrong)))}"
            )
        if skip:
            raise Skip(skip)


def correctness(log: Log, deadline: float) -> None:
    need_gpu()
    from specdec_kernels import _ops

    verdict = Verdict(log, "correctness")
    for op in sorted(_ops.SCHEMAS):
        backends = [
            b for b in ("native", "triton") if _ops.supports(op, b, "cuda") and _ops.supports(op, "native", "cpu")
        ]
        for index, arguments in enumerate(sample_calls(op) if backends else []):
            for backend in backends:
                if time.monotonic() > deadline:
                    verdict.end("out of time; the ops above were compared")
                verdict.write(op=op, backend=backend, sample=index, **compare(op, backend, arguments))
    verdict.end()


def placement(log: Log, deadline: float) -> None:
    """Case IN-04: every op on a side stream behind a sleep, and on cuda:1 while cuda:0 is current if there are two."""
    need_gpu()
    from specdec_kernels import _ops

    verdict = Verdict(log, "placement")
    for op in sorted(_ops.SCHEMAS):
        for backend in ("native", "triton"):
            if not (_ops.supports(op, backend, "cuda") and _ops.supports(op, "native", "cpu")):
                continue
            if time.monotonic() > deadline:
                verdict.end("out of time; the ops above were compared")
            arguments = sample_calls(op)[0]
            row = compare(op, backend, arguments, stream=torch.cuda.Stream())
            verdict.write(op=op, backend=backend, where="side stream", **row)
            if torch.cuda.device_count() > 1:
                row = compare(op, backend, arguments, device="cuda:1")
                verdict.write(op=op, backend=backend, where="cuda:1", **row)
    verdict.end()


def compare(
    op: str, backend: str, arguments: list[Any], device: str = "cuda", stream: torch.cuda.Stream | None = None
) -> dict[str, Any]:
    """Run one call on the GPU and on the CPU and compare what it mutates.

    With `stream` the inputs are filled there behind a sleep: a kernel launched elsewhere reads them too early.
    """
    from specdec_kernels import _ops

    schema = getattr(torch.ops.specdec, op).default._schema
    on_gpu, on_cpu = _to(arguments, device), _to(arguments, "cpu")
    for i, argument in enumerate(schema.arguments):  # the CPU op needs no workspace, so the sample call has none
        if argument.name == "workspace" and on_gpu[i] is None:
            on_gpu[i] = torch.zeros(1 << 22, dtype=torch.uint8, device=device)
    try:
        if stream is not None:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                on_gpu = _to(on_gpu, device)
                _ops.call(op, backend, torch.device(device), *on_gpu)
        else:
            _ops.call(op, backend, torch.device(device), *on_gpu)
        torch.cuda.synchronize(device)
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
    _ops.call(op, "native", torch.device("cpu"), *on_cpu)
    worst, wrong = 0.0, []
    for argument, gpu, cpu in zip(schema.arguments, on_gpu, on_cpu):
        if argument.name == "workspace":
            wrong += ["workspace, which a call leaves zero"] if gpu is not None and gpu.any() else []
            continue
        if argument.alias_info is None or not argument.alias_info.is_write or cpu is None:
            continue
        for one, other in zip(*((x if isinstance(x, list) else [x]) for x in (gpu, cpu))):
            same, error = _close(one, other)
            worst = max(worst, error)
            wrong += [] if same else [argument.name]
    return {"ok": not wrong, "wrong": wrong, "largest_difference": worst}


def _subprocess(log: Log, stage: str, command: list[str], seconds: float, **row: Any) -> int | str:
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(5.0, seconds))
        row |= {"rc": done.returncode, "tail": (done.stdout + done.stderr)[-1500:]}
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        row |= {"rc": "timeout", "tail": (output.decode() if isinstance(output, bytes) else output)[-1500:]}
    log.write(stage, seconds=round(time.monotonic() - begin, 1), **row)
    return row["rc"]


def missing_kernels(device: str, ops: Sequence[str]) -> list[str]:
    """Those of `ops` that nothing serves on this device."""
    from specdec_kernels import _ops

    return [op for op in ops if not any(_ops.supports(op, backend, device) for backend in ("native", "triton"))]


def timings(log: Log, deadline: float) -> None:
    need_gpu()
    from benchmarks import gpu_timings

    bandwidth, verdict = gpu_timings.copy_bandwidth("cuda"), Verdict(log, "timings")
    log.write("timings", copy_bandwidth_gb_s=round(bandwidth / 1e9))
    families: list[tuple[str, Any, Callable[..., Any]]] = [
        ("tree_attention", gpu_timings.ATTENTION, partial(gpu_timings.attention, bandwidth=bandwidth)),
        ("verify", gpu_timings.VERIFY, gpu_timings.verification),
    ]
    if torch.cuda.get_device_capability() == (9, 0):
        families.insert(1, ("tree_attention", gpu_timings.HOPPER, partial(gpu_timings.hopper, bandwidth=bandwidth)))
    else:
        log.write("timings", op="tree_attention", family="hopper", skipped="not an sm_90")
    for op, shapes, run in families:
        if missing_kernels("cuda", [op]):
            log.write("timings", op=op, skipped=f"no CUDA or Triton kernel of {op} in this build")
            continue
        for shape in shapes:
            if time.monotonic() > deadline:
                verdict.end("out of time; the shapes above were measured")
            try:
                for row in run("cuda", shape, dtype=torch.bfloat16):
                    verdict.write(op=op, ok=True, **row)
            except Exception as error:  # the other shapes may still be worth their time
                verdict.write(op=op, ok=False, shape=shape, error=f"{type(error).__name__}: {error}"[:400])
    verdict.end()


def sanitizer(log: Log, deadline: float) -> None:
    need_gpu()
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise Skip("no compute-sanitizer on the PATH")
    failed: list[str] = []
    for check in ("memcheck", "racecheck"):
        # without --error-exitcode it returns what the program returns, errors or not
        command = [tool, "--error-exitcode", "1", "--tool", check, sys.executable, "-m", "benchmarks.on_gpu"]
        command += ["--only", "correctness", "--out", str(log.path.parent / check)]
        failed += [check] * (_subprocess(log, "sanitizer", command, (deadline - time.monotonic()) / 2, tool=check) == 1)
    if failed:
        raise AssertionError(f"compute-sanitizer: {' and '.join(failed)} found errors, or a call differed")


ENGINE_OPS = ("build_tree", "chain_tree", "slot_mapping", "write_kv", "tree_attention", "verify", "commit_kv")
GRAPH_SIZES = (1, 8, 16, 32, 64, 128)  # of the engine's decoding steps, in tokens


def engine(log: Log, deadline: float) -> None:
    """Greedy decoding, plain and with n-gram drafts, steps as they are and as graphs, on random weights in
    SmolLM2-135M's shape.

    The real weights are larger than what can be carried. What such a model writes soon repeats itself, so the
    acceptance says nothing about models; the times per step do.
    """
    from benchmarks.random_llama import RandomLlama, Shape
    from specdec_kernels.engine import Engine, EngineConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if missing := missing_kernels(device, ENGINE_OPS):
        raise Skip(f"no kernel on {device} of: {', '.join(missing)}")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = RandomLlama(Shape(), device, dtype)
    generator = torch.Generator().manual_seed(1)
    texts: dict[str, list[list[int]]] = {}
    for requests in (1, 8) if device == "cuda" else (1,):
        prompts = torch.randint(0, model.vocab_size, (requests, 64), generator=generator).tolist()
        arms: list[tuple[str, tuple[int, ...]]] = [("none", ()), ("ngram", ())]
        if device == "cuda":
            arms += [("none", GRAPH_SIZES), ("ngram", GRAPH_SIZES)]
        for drafter, sizes in arms:
            for warm in (True, False):
                runner = Engine(model, drafter, EngineConfig(num_pages=256, num_drafts=15, graph_sizes=sizes))
                begin = time.monotonic()
                results = runner.generate(prompts, max_tokens=8 if warm else 48)
            seconds, metrics = time.monotonic() - begin, runner.metrics
            texts[drafter] = [list(result.token_ids) for result in results]
            tokens = sum(len(text) for text in texts[drafter])
            log.write(
                "engine", device=device, dtype=str(dtype), requests=requests, drafter=drafter, tokens=tokens,
                graphs=len(sizes),
                seconds=round(seconds, 4), tokens_per_s=round(tokens / seconds, 1), forwards=metrics.forwards,
                forward_s=round(metrics.forward_time_s, 4), step_s=round(metrics.step_time_s, 4),
                same_text=texts[drafter] == texts["none"],
            )  # fmt: skip
            if time.monotonic() > deadline:
                raise Skip("out of time; the arms above were run")


STAGES: dict[str, Callable[[Log, float], None]] = {
    "environment": environment,
    "correctness": correctness,
    "placement": placement,
    "timings": timings,
    "sanitizer": sanitizer,
    "engine": engine,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results/local")))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", choices=sorted(STAGES))
    options = parser.parse_args()
    log = Log(options.out / "on_gpu.jsonl")
    end = time.monotonic() + 60 * options.minutes
    failed = 0
    for name, stage in STAGES.items():
        if options.only not in (None, name):
            continue
        begin = time.monotonic()
        try:
            stage(log, min(end, begin + STAGE_SECONDS[name]))
            log.write(name, status="done", seconds=round(time.monotonic() - begin, 1))
        except Skip as reason:
            log.write(name, status="skipped", reason=str(reason))
        except Exception:
            failed += 1
            log.write(name, status="failed", error=traceback.format_exc()[-1500:])
    print(f"on_gpu: wrote {log.path}, {failed} stages failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
