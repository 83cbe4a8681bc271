"""Linear and norm layers as a step wants them, used where a measurement says that they pay: weights packed once for
torch's oneDNN matmul, RMS norms in one call.

Layers that read the same input (query, key and value; gate and up) become one product: on a small model a step is
hundreds of short products, and starting one costs about as much as a tenth of a megabyte of weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

_mkldnn = torch.ops.mkldnn
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_WORTH = 0.97  # packed layers must take less than this share of the plain ones' time
_ROWS_HINT = 16  # oneDNN lays weights out for this many rows; measured best for 1 to 16 rows


class PackedLinear(nn.Module):
    """One or several `nn.Linear` of the same input, weights stacked in the block layout oneDNN wants."""

    def __init__(self, linears: Sequence[nn.Linear]):
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.in_features, self.out_features = linears[0].in_features, sum(self.sizes)
        self.bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        weight = linears[0].weight.detach() if len(linears) == 1 else torch.cat([x.weight.detach() for x in linears])
        # A plain attribute: the packed layout is opaque to state_dict and to dtype conversions.
        self.packed = _mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total + self(x), rounded once."""
        return _mkldnn._linear_pointwise.binary(x, total, self.packed, self.bias, "add")

    __call__ = forward  # without the hooks of nn.Module, which cost about as much as the rest of the call


class SharedLinear(nn.Module):
    """Member `index` of a stacked product: whoever is called first with an input computes it for all, whoever is last
    forgets it. Inputs are told apart by identity, so they must not be changed in place between the calls."""

    class State:
        """What the members share: the input of the product at hand, and the parts not yet fetched."""

        def __init__(self, packed: PackedLinear):
            self.packed = packed
            self.x: torch.Tensor | None = None
            self.parts: dict[int, torch.Tensor] = {}

    def __init__(self, state: State, index: int):
        super().__init__()
        self.state, self.index = state, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.state
        if state.x is not x or self.index not in state.parts:
            state.x = x
            state.parts = dict(enumerate(state.packed(x).split(state.packed.sizes, dim=-1)))
        part = state.parts.pop(self.index)
        if not state.parts:
            state.x = None
        return part

    __call__ = forward


class FusedNorm(nn.Module):
    """An RMS norm as one call of torch: x / rms(x) * weight over the last dimension, in float32 inside."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight = weight  # stays a parameter of the model
        self.scale, self.shape, self.eps = weight.detach(), tuple(weight.shape), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.shape, self.scale, self.eps)

    __call__ = forward


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's oneDNN path serves this dtype on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, dtype: torch.dtype, device: torch.device, rows: Sequence[int] = (1, 8)) -> int:
    """Replace the linear layers of `model` by packed ones, kind by kind, where their time over `rows` tokens is lower;
    returns how many were replaced. All layers of a kind are timed in a row, so that their weights come from memory as
    they do in a step."""
    if not can_pack(dtype, device):
        return 0
    kinds: dict[tuple, list[tuple[nn.Module, list[str]]]] = {}
    for parent in model.modules():
        for names in _groups(parent, dtype):
            shapes = tuple(tuple(getattr(parent, name).weight.shape) for name in names)
            kinds.setdefault(shapes, []).append((parent, names))
    replaced = 0
    for members in kinds.values():
        plain = [[getattr(parent, name) for name in names] for parent, names in members]
        packed = [PackedLinear(linears) for linears in plain]
        before = sum(_time([linear for linears in plain for linear in linears], n, dtype) for n in rows)
        if sum(_time(packed, n, dtype) for n in rows) > _WORTH * before:
            continue
        for (parent, names), module in zip(members, packed):
            state = SharedLinear.State(module)
            for index, name in enumerate(names):
                setattr(parent, name, module if len(names) == 1 else SharedLinear(state, index))
            replaced += len(names)
    return replaced


def fuse_norms(model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Replace RMS norms by `FusedNorm` where that gives the same values (up to rounding: there are norms that scale by
    1 + weight) in less time; returns how many were replaced."""
    if device.type != "cpu":
        return 0
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", None)
            if not type(child).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or eps is None:
                continue
            fused = FusedNorm(weight, eps)
            x = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)).to(dtype)
            with torch.inference_mode():
                same = torch.allclose(fused(x).float(), child(x).float(), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
            if same and weight.dtype == dtype and _norm_time(fused, x) < _WORTH * _norm_time(child, x):
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _norm_time(layer: nn.Module, x: torch.Tensor) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            for _ in range(8):
                layer(x[:1])
            best = min(best, time.perf_counter() - start)
    return best


def _groups(parent: nn.Module, dtype: torch.dtype) -> list[list[str]]:
    """The linear children of `parent`: those known to share their input together, each other one alone."""
    linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    linears = {name: child for name, child in linears.items() if child.weight.dtype == dtype}
    groups = []
    for names in _SAME_INPUT:
        found = [linears.get(name) for name in names]
        known = [linear for linear in found if linear is not None]
        if len(known) == len(names) and len({(k.in_features, k.bias is None) for k in known}) == 1:
            groups.append(list(names))
    stacked = {name for names in groups for name in names}
    return groups + [[name] for name in linears if name not in stacked]


def _time(layers: Sequence[nn.Module], rows: int, dtype: torch.dtype) -> float:
    x = {layer.in_features: torch.zeros(rows, layer.in_features, dtype=dtype) for layer in layers}
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            for layer in layers:
                layer(x[layer.in_features])
            best = min(best, time.perf_counter() - start)
    return best
