"""What machine a row was measured on, and whether it was quiet: CPU, threads, read bandwidth, NVML."""

from __future__ import annotations

import functools
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch


@functools.cache
def describe() -> dict[str, Any]:
    """Facts that do not change during a run."""
    model, flags = platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
            elif line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    facts = {
        "cpu": model,
        "cores": os.cpu_count(),
        "isa": [flag for flag in wanted if flag in flags],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


@functools.cache
def _probe_buffer() -> torch.Tensor:
    return torch.ones(1 << 26)  # 256 MiB: well beyond any last-level cache


def read_bandwidth(repeats: int = 3) -> float:
    """GB/s of one full read of 256 MiB with the threads in force (best of `repeats`)."""
    buffer = _probe_buffer()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.amax()
        best = min(best, time.perf_counter() - start)
    return buffer.numel() * 4 / best / 1e9


def _cpu_times() -> tuple[float, float]:
    """Seconds of CPU used by everyone, and by this process."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0, 0.0
    fields = [float(x) for x in stat.read_text().splitlines()[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:2])


class Quiet:
    """Context manager: `foreign` is the share of one core that other processes used inside the block."""

    foreign: float = 0.0

    def __enter__(self) -> Quiet:
        self._start, self._cpu = time.perf_counter(), _cpu_times()
        return self

    def __exit__(self, *exc: object) -> None:
        total, own = (b - a for a, b in zip(self._cpu, _cpu_times()))
        self.foreign = max(0.0, total - own) / max(time.perf_counter() - self._start, 1e-9)


def gpu_state() -> dict[str, Any]:
    """Clocks, power and throttling reasons from NVML; {} without a GPU or without the nvidia-ml-py package."""
    if not torch.cuda.is_available():
        return {}
    try:
        import pynvml
    except ImportError:
        return {"nvml": "nvidia-ml-py is not installed"}
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "mem_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "energy_mj": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "throttle": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
