"""Linear layers with weights packed once for torch's oneDNN matmul, used where a measurement says that they pay."""

from __future__ import annotations

import time

import torch
from torch import nn

_mkldnn = torch.ops.mkldnn


class PackedLinear(nn.Module):
    """`nn.Linear` whose weight lies in the block layout oneDNN wants, so that no call has to reorder it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # A plain attribute: the packed layout is opaque to state_dict and to dtype conversions.
        self.packed = _mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's oneDNN path serves this dtype on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, dtype: torch.dtype, device: torch.device, rows: tuple[int, ...] = (1, 8)) -> int:
    """Replace the linear layers of `model` by packed ones, shape by shape, where the sum of their times over `rows`
    tokens is lower; returns how many were replaced. All layers of a shape are timed in a row, so that their weights
    come from memory as they do in a step."""
    if not can_pack(dtype, device):
        return 0
    by_shape: dict[tuple[int, int], list[tuple[nn.Module, str, nn.Linear]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.dtype == dtype:
                by_shape.setdefault(tuple(child.weight.shape), []).append((parent, name, child))
    replaced = 0
    for group in by_shape.values():
        packed = [PackedLinear(linear) for _, _, linear in group]
        if sum(_time(packed, n, dtype) for n in rows) < sum(_time([g[2] for g in group], n, dtype) for n in rows):
            for (parent, name, _), module in zip(group, packed):
                setattr(parent, name, module)
            replaced += len(group)
    return replaced


def _time(layers: list, rows: int, dtype: torch.dtype) -> float:
    x = torch.zeros(rows, layers[0].in_features, dtype=dtype)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            for layer in layers:
                layer(x)
            best = min(best, time.perf_counter() - start)
    return best
