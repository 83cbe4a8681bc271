"""Fixtures every suite shares: the `backend` axis, seeds, poisoned memory, the long marker."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import shutil
import zlib
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch

from specdec_kernels import _ops
from tests import cuda_on_cpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full-size suites as well")
    under_ci = os.environ.get("CI") == "true"
    parser.addoption("--check-skips", action="store_true", default=under_ci, help="hold skips to tests/skips.json")
    parser.addoption("--emulated-variant", default="race", help="build of the emulated backend: race or asan")
    parser.addoption("--ptx-arch", default="80", help="architecture of the ptx backend: 80 or 90a")
    parser.addoption("--kernels", default="", help="emulate only CUDA files with this in their path, as csrc/tree/")


def pytest_configure(config: pytest.Config) -> None:
    cuda_on_cpu.choose(*(config.getoption(name) for name in ("--emulated-variant", "--ptx-arch", "--kernels")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if "long" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long suite: pytest --long"))


_skipped: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Skips by reason against tests/skips.json: {pattern: [most, why, tool]}; a reason that no pattern covers counts as
    0, and so does one whose tool (a program or a module; may be left out) is here."""
    if not session.config.getoption("--check-skips") or hasattr(session.config, "workerinput"):
        return  # with pytest-xdist the controller counts: every report passes through it
    allowed = json.loads(Path(__file__).with_name("skips.json").read_text())
    totals: collections.Counter[str] = collections.Counter()
    for reason, count in _skipped.items():
        totals[next((p for p in allowed if re.fullmatch(p, reason)), reason)] += count
    here = lambda tool: shutil.which(tool) or importlib.util.find_spec(tool)  # noqa: E731
    most = {r: 0 if any(map(here, tools)) else count for r, (count, _, *tools) in allowed.items()}
    grown = {r: n for r, n in totals.items() if n > most.get(r, 0)}
    session.config.stash[_GROWN] = (totals, grown)
    if grown and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals, grown = terminalreporter.config.stash.get(_GROWN, ({}, {}))
    for reason, count in totals.items():
        terminalreporter.write_line(
            f"skipped {count}: {reason}" + ("  <- more than tests/skips.json allows" * (reason in grown))
        )


_GROWN = pytest.StashKey[tuple[collections.Counter[str], dict[str, int]]]()


class Backend:
    """One way of running the ops: `call(op, *args)` runs the out-variant, `kwargs` goes to public functions."""

    def __init__(self, name: str, device: str, selector: str | None):
        self.name, self.device, self.selector = name, device, selector

    @property
    def kwargs(self) -> dict[str, str | None]:
        return {"backend": self.selector}

    def require(self, op: str) -> None:
        if self.name in cuda_on_cpu.BACKENDS:
            if not cuda_on_cpu.supports(op, self.name):
                pytest.skip(f"{op}: no kernel for backend {self.name}")
        elif not _ops.supports(op, self.selector or "native", self.device):
            pytest.skip(f"{op}: not built for backend {self.name}")

    def __repr__(self) -> str:
        return self.name


def backends() -> list[Backend]:
    found = [Backend("cpu", "cpu", None)]
    if torch.cuda.is_available():
        found.append(Backend("cuda", "cuda", "native"))
    return found + [Backend(name, "cpu", name) for name in cuda_on_cpu.BACKENDS if cuda_on_cpu.missing(name) is None]


# The op that stands for a suite: an emulated backend without a kernel for it takes no part (no skip for each test).
_SUITES = (
    ("attention", "tree_attention"),
    ("sampl|distribution|row_blocks", "verify"),
    ("test_kv", "commit_kv"),
    ("batching", "plan_buckets"),
    ("", "build_tree"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    op = next(op for pattern, op in _SUITES if re.search(pattern, metafunc.module.__name__))
    emulated = cuda_on_cpu.BACKENDS
    takes_part = [b for b in backends() if b.name not in emulated or cuda_on_cpu.supports(op, b.name)]
    if not metafunc.config.getoption("--long"):  # CI: test_attention_triton.py; test_cuda_*.py against the CPU op
        bounded = {"tree_attention": ("triton_interpret", "triton_ptx"), "verify": emulated}.get(op, ())
        takes_part = [b for b in takes_part if b.name not in bounded]
    metafunc.parametrize("backend", takes_part, ids=repr, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=[b for b in backends() if b.name in ("cuda", "emulated", "ptx")], ids=repr)
def gpu(request: pytest.FixtureRequest) -> Backend:
    """The paths that run CUDA sources, for tests that hold them to the CPU op."""
    return request.param


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test starts from the same seeds, and with one or two threads by its name: results may depend on neither."""
    torch.manual_seed(0)
    np.random.seed(0)
    torch.set_num_threads(1 + zlib.crc32(request.node.nodeid.encode()) % 2)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """An output buffer full of NaN (floats) or of 0x7f7f7f7f (integers), so that unwritten elements show."""
    out = torch.empty(*shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return out.fill_(float("nan"))
    if dtype == torch.bool:
        return out.fill_(True)
    return out.fill_(0x7F7F7F7F if dtype != torch.uint8 else 0x7F)
