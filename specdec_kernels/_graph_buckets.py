"""Fixed-size steps for CUDA graphs: one capture a token bucket. Re-exported by `specdec_kernels.batching`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import _ops

WARMUP_RUNS = 2  # before capture: lazy initialisation must not be recorded


class GraphBuckets:
    """Runs a step at a few fixed token counts: captured once a bucket, then replayed with the lengths on the device.

    step(**inputs) -> outputs: a function of tensors only that reads no value on the host and writes none of its
    inputs but caches it closes over. buffers(size) -> {name: tensor}: the static inputs of a bucket of `size` tokens;
    tensors whose first dimension counts tokens, requests or offsets may be larger than what a call passes. fillers:
    what fills the rest of a buffer (default 0; use -1 for slots and ids, so that padding writes nothing). A name in
    `repeat_last` is filled with its last value instead: offsets (cu_*) stay constant behind the batch.

    Warm-up and capture run on an empty batch, every buffer full of its filler (offsets 0), so a step may change caches
    in place. On the CPU, which has no graphs, the step is called on the same static buffers.
    Outputs belong to the bucket: they are overwritten by its next call, and are of the bucket's size.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        sizes: Sequence[int],
        buffers: Callable[[int], Mapping[str, Tensor]],
        *,
        fillers: Mapping[str, int | float] | None = None,
        repeat_last: Sequence[str] = (),
    ):
        self.sizes = [int(size) for size in sizes]
        rising = len(self.sizes) > 0 and self.sizes[0] >= 1 and self.sizes == sorted(set(self.sizes))
        _ops.expect("GraphBuckets", "sizes", rising, "rising sizes of at least 1", list(sizes))
        self._step, self._buffers = step, buffers
        self._fillers, self._repeat_last = dict(fillers or {}), frozenset(repeat_last)
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._graphs: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        self._pool: Any = None
        self.captures = self.replays = self.eager_calls = 0

    def size_for(self, total: int) -> int:
        """The smallest bucket that holds `total` tokens; ValueError if none does."""
        for size in self.sizes:
            if total <= size:
                return size
        raise ValueError(f"GraphBuckets: total: expected at most {self.sizes[-1]} tokens, got {total}")

    def __call__(self, total: int, **inputs: Tensor) -> Any:
        """Run the step for `total` tokens (a host bound) on `inputs`, which are copied into the bucket's buffers."""
        size = self.size_for(total)
        static = self._inputs[size] if size in self._inputs else self._prepare(size)
        same = static.keys() == inputs.keys()
        _ops.expect("GraphBuckets", "inputs", same, f"{sorted(static)}", f"{sorted(inputs)}")
        for name, value in inputs.items():
            self._load(name, static[name], value)
        if size in self._graphs:
            self._graphs[size].replay()
            self.replays += 1
        else:
            self._outputs[size] = self._step(**static)
            self.eager_calls += 1
        return self._outputs[size]

    def _prepare(self, size: int) -> dict[str, Tensor]:
        static = dict(self._buffers(size))
        for name, buffer in static.items():
            buffer.fill_(0 if name in self._repeat_last else self._fillers.get(name, 0))
        if any(buffer.device.type == "cuda" for buffer in static.values()):
            self._capture(size, static)
        self._inputs[size] = static
        return static

    def _load(self, name: str, buffer: Tensor, value: Tensor) -> None:
        count = value.shape[0] if value.dim() else 0
        fits = value.dtype == buffer.dtype and value.dim() == buffer.dim() and value.shape[1:] == buffer.shape[1:]
        fits = fits and (value.dim() == 0 or count <= buffer.shape[0])
        wanted = f"{buffer.dtype} within {list(buffer.shape)}"
        _ops.expect("GraphBuckets", name, fits, wanted, f"{value.dtype} {list(value.shape)}")
        if not buffer.dim() or count == buffer.shape[0]:
            buffer.copy_(value)
            return
        buffer[:count].copy_(value)
        if name in self._repeat_last and count:
            buffer[count:].copy_(value[-1:].expand_as(buffer[count:]))
        else:
            buffer[count:].fill_(self._fillers.get(name, 0))

    def _capture(self, size: int, static: dict[str, Tensor]) -> None:
        """Warm up on a side stream, then record."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                self._step(**static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._outputs[size] = self._step(**static)
        self._pool = graph.pool()  # buckets never run at once: they share their intermediates
        self._graphs[size] = graph
        self.captures += 1
