"""Install and build: what users complain about first (cases IN-01 to IN-03; IN-04 is test_op_contract.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest

import specdec_kernels
from specdec_kernels import _ops

ROOT = Path(__file__).parents[1]


def run(code: str, env: dict[str, str] | None = None, **kwargs) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**base, **(env or {})}, **kwargs
    )


def metadata() -> str:
    return (ROOT / "pyproject.toml").read_text()


def test_IN_01_metadata_pins_the_torch_range():
    assert f'version = "{specdec_kernels.__version__}"' in metadata()
    assert re.search(r'dependencies = \["torch>=2\.11"', metadata())
    assert "TORCH_TARGET_VERSION" in (ROOT / "setup.py").read_text()


def test_IN_01_an_unloadable_library_names_both_versions():
    """A library that torch refuses: the import goes on, and the message names built-for and found versions."""
    code = """
import logging, torch
logging.basicConfig(level=logging.WARNING)
def refuse(path): raise OSError("undefined symbol: aoti_torch_something")
torch.ops.load_library = refuse
import specdec_kernels as sk
from specdec_kernels import _ops
print(_ops.NATIVE["cpu"])
try:
    _ops.call("build_tree", None, torch.device("cpu"))
except NotImplementedError as error:
    print(error)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    import torch

    assert "undefined symbol" in result.stdout
    assert f"torch {torch.__version__}" in result.stdout
    assert "stable ABI of torch >= 2.11" in result.stdout
    assert "build_tree: backend: auto on cpu is not built" in result.stdout


@pytest.mark.parametrize(
    ("archs", "gpu", "runs"),
    [
        ("8.0;9.0a", (8, 0), True), ("8.0;9.0a", (8, 9), True), ("8.0;9.0a", (9, 0), True), ("8.0", (9, 0), False),
        ("8.6", (8, 0), False), ("9.0a", (9, 1), False), ("8.0;9.0a", (12, 0), False), ("8.0;12.0+PTX", (13, 0), True),
        ("12.0+PTX", (9, 0), False), ("8.0 9.0", (9, 0), True), ("Hopper", (9, 0), True),
    ],
)  # fmt: skip
def test_IN_01_which_gpus_a_build_runs_on(archs: str, gpu: tuple[int, int], runs: bool):
    assert _ops.covers(archs, *gpu) == runs


def test_IN_01_another_gpu_architecture_is_named(monkeypatch: pytest.MonkeyPatch):
    """Built for some GPUs, called on another one: what it has code for, what this GPU is, and what to do."""
    import torch

    build = types.SimpleNamespace(build_info=lambda: {"cuda_archs": "8.0;9.0a"})
    monkeypatch.setitem(sys.modules, "specdec_kernels._C", build)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(_ops, "supports", lambda op, backend, device: backend == "native")
    with pytest.raises(
        NotImplementedError, match=r"^advance: backend: native on cuda has code for 8.0;9.0a, .* sm_120 "
    ):
        _ops._resolve("advance", None, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert _ops._resolve("advance", None, "cuda") is not None
    _ops._resolve.cache_clear()


BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "rich", "gguf", "accelerate", "prometheus_client", "scipy"}:
            raise ModuleNotFoundError(f"blocked: {name}")
sys.meta_path.insert(0, Block())
"""


def test_IN_02_import_and_cpu_ops_without_gpu_nvcc_triton_transformers():
    code = (
        BLOCKER
        + """
import torch, time
start = time.time()
import specdec_kernels as sk
assert time.time() - start < 5
tree = sk.build_tree(torch.tensor([-1, 0, 0, 1], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32),
                     torch.tensor([7], dtype=torch.int32), max_nodes=4)
print(tree.positions.tolist())
try:
    sk.build_tree(torch.tensor([-1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32),
                  torch.tensor([7], dtype=torch.int32), max_nodes=1, backend="triton")
except NotImplementedError as error:
    print(error)
"""
    )
    result = run(code, env={"PATH": "", "CUDA_HOME": ""})
    assert result.returncode == 0, result.stderr
    assert "[7, 8, 8, 9]" in result.stdout
    assert "build_tree: backend: triton on cpu is not built" in result.stdout


def _fake_toolkit(folder: Path, body: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\n" + body)
    nvcc.chmod(0o755)
    return folder


def test_IN_03_stray_colon_is_named_and_survived(tmp_path: Path):
    toolkit = _fake_toolkit(tmp_path / "cuda", "echo 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    result = subprocess.run(
        [sys.executable, "setup.py", "--name"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_HOME": f":{toolkit}", "TORCH_CUDA_ARCH_LIST": "8.0"},
    )
    assert result.returncode == 0, result.stderr
    assert f"CUDA_HOME: expected one directory, got ':{toolkit}'; using '{toolkit}'" in result.stdout
    assert f"with {toolkit}" in result.stdout


def test_IN_03_missing_toolkit_is_one_line(tmp_path: Path):
    env = {**os.environ, "SPECDEC_BUILD_CUDA": "1", "CUDA_HOME": str(tmp_path / "nothing")}
    result = subprocess.run([sys.executable, "setup.py", "--name"], capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.returncode != 0
    assert "setup: CUDA_HOME: expected a CUDA toolkit with bin/nvcc" in result.stderr
    bad = subprocess.run(
        [sys.executable, "setup.py", "--name"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SPECDEC_BUILD_CUDA": "maybe"},
    )
    assert "SPECDEC_BUILD_CUDA: expected auto, 0 or 1, got 'maybe'" in bad.stderr


def test_IN_03_first_compiler_error_is_quoted(tmp_path: Path):
    """`make build` with a compiler that fails: the first error is shown, with the place of the whole log."""
    copy = tmp_path / "copy"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and name.startswith(
            ("csrc", "setup", "pyproject", "Makefile", "specdec", "requ", "READ", "LIC")
        ):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    source = min((copy / "csrc").glob("*/*_cpu.cpp"))  # the first that is compiled, one at a time: others would go on
    source.write_text('#include "a_header_that_is_missing.h"\n' + source.read_text())
    (copy / ".venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (copy / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    (copy / ".venv" / ".installed").touch()
    result = subprocess.run(
        ["make", "build"],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "SPECDEC_BUILD_CUDA": "0", "MAX_JOBS": "1"},
    )
    assert result.returncode != 0
    assert "a_header_that_is_missing.h: No such file" in result.stdout, result.stdout[-2000:]
    assert "whole log: .venv/build.log" in result.stdout


def test_the_sdist_holds_all_that_a_build_needs(tmp_path: Path):
    """Headers and kernels too, also where no nvcc makes setup.py name the kernels; made without network or compiler."""
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
         "sdist", "--formats=tar", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "SPECDEC_BUILD_CUDA": "0", "PATH": ""},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "csrc", "specdec_kernels"], cwd=ROOT, capture_output=True, text=True)
    wanted = {*listed.stdout.split(), "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert not wanted - names, sorted(wanted - names)[:5]
    assert not [name for name in names if name.startswith(("tests/", "python_ref/")) or name.endswith(".so")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, CPU ops only."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "SPECDEC_BUILD_CUDA": "0"},
    )
    assert built.returncode == 0, built.stderr[-2000:]
    return next(folder.glob("*.whl"))


@pytest.mark.long
def test_wheel_holds_the_package_alone(wheel: Path, tmp_path: Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specdec_kernels"}, tops
    assert any("_cpu.abi3.so" in name for name in names)

    def read(name: str) -> str:
        return zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith(name))).decode()

    assert "Requires-Dist: torch>=2.11" in read("METADATA")
    assert f"Version: {specdec_kernels.__version__}" in read("METADATA")
    for group in ("console_scripts", "vllm.general_plugins", "vllm.stat_logger_plugins", "sglang.srt.plugins"):
        assert f"[{group}]" in read("entry_points.txt")
    listed = subprocess.run(["git", "ls-files", "specdec_kernels"], cwd=ROOT, capture_output=True, text=True)
    assert not set(listed.stdout.split()) - set(names)  # py.typed, rules, dashboards, prompts and heads among them
    assert "cp310-abi3" in wheel.name
    tools = ROOT / ".venv" / "tools"
    if not (tools / "auditwheel").exists():
        pytest.skip("no auditwheel here (make dist)")
    repaired = subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*", "--exclude", "libc10*",
         "-w", str(tmp_path), str(wheel)],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert repaired.returncode == 0, repaired.stderr
    assert "manylinux" in next(tmp_path.glob("*.whl")).name


@pytest.mark.long
def test_IN_01_IN_04_the_contract_holds_for_the_wheel(wheel: Path, tmp_path: Path):
    """The op contract against the installed wheel: the tests stand in a folder that holds no package of this tree."""
    site, copy = tmp_path / "site", tmp_path / "copy"
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    copy.mkdir()
    for name in ("tests", "python_ref", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    where = f"import specdec_kernels\n\ndef test_where(): assert specdec_kernels.__file__.startswith({str(site)!r})\n"
    (copy / "tests" / "test_where.py").write_text(where)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_where.py", "tests/test_op_contract.py",
         "tests/test_build.py", "-k", "test_where or test_op_contract or IN_01_ and not wheel"],
        cwd=copy, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site), "CI": ""},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:]
    closing = ran.stdout.splitlines()[-1]
    assert int(re.search(r"(\d+) passed", closing)[1]) > 100, closing
    assert "skipped" not in closing, closing


@pytest.mark.long
def test_IN_02_wheel_in_an_environment_with_torch_alone(wheel: Path, tmp_path: Path):
    """A real environment: no triton, transformers, compiler or toolkit; import, one op, `info`, one clear refusal."""
    import torch

    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    version = torch.__version__.split("+")[0]
    for packages in ([f"torch=={version}", "numpy"], ["--no-deps", str(wheel)]):
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, cwd=tmp_path)
    code = """
import time; start = time.time()
import specdec_kernels as sk, torch
two, seven = (torch.tensor([x], dtype=torch.int32) for x in (2, 7))
tree = sk.chain_tree(two, seven, total_nodes=3, max_nodes=3)
print(tree.positions.tolist(), sk.__file__)
"""
    env = {"PATH": "", "HOME": str(tmp_path)}
    ran = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert ran.returncode == 0, ran.stderr
    assert "[7, 8, 9]" in ran.stdout
    assert str(tmp_path) in ran.stdout
    script = str(ROOT / "docs" / "embed_in_your_engine.py")
    tutorial = subprocess.run([str(python), script], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert tutorial.returncode == 0, tutorial.stderr
    assert "the same 2 texts" in tutorial.stdout
    info = subprocess.run(
        [str(python), "-m", "specdec_kernels", "info"], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert info.returncode == 0, info.stderr
    assert "transformers" in info.stdout
