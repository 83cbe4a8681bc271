"""The optimizer of head training: float32 masters, orthogonalised momentum for matrices, AdamW for the rest.

A state of a language model has a large mean, so the gradients of the matrices that read it are nearly of rank one, and
steps of AdamW, which are as large in every entry, go mostly along it. Muon steps along all singular directions alike
(Jordan et al., 2024), which is worth the Newton-Schulz products: they cost about as much as one pass of 1,000 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_VECTOR_RATE = 1 / 30  # AdamW's rate against Muon's: steps of norms' weights of about 1, not of unit-norm matrices
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the quintic that takes singular values to about 1 in five rounds


def orthogonal(x: Tensor, rounds: int = 5) -> Tensor:
    """The nearest matrix to x [rows, columns] with all singular values near 1 (0.7 to 1.2), in bfloat16 products."""
    y = (x / (x.norm() + 1e-7)).bfloat16()
    y = y.T if x.shape[0] > x.shape[1] else y
    a, b, c = _NEWTON_SCHULZ
    for _ in range(rounds):
        square = y @ y.T
        y = a * y + (b * square + c * (square @ square)) @ y
    return (y.T if x.shape[0] > x.shape[1] else y).float()


class Optimizer:
    """`masters`: float32, by name. `scales`: of the inputs of some matrices, [columns]; such a matrix is stepped in
    units of its inputs' sizes, because target states differ by orders of magnitude from one dimension to the next."""

    def __init__(
        self, masters: dict[str, Tensor], scales: Mapping[str, Tensor], *, weight_decay: float = 0.01, clip: float = 1.0
    ):
        self.masters, self.scales = masters, scales
        self.weight_decay, self.clip = weight_decay, clip
        self.moments = {
            name: [torch.zeros_like(p)] if p.dim() == 2 else [torch.zeros_like(p), torch.zeros_like(p)]
            for name, p in masters.items()
        }

    @torch.no_grad()
    def update(self, grads: dict[str, Tensor], rate: float, step: int) -> None:
        """One step, `step` counted from 0; ValueError if a gradient is not finite."""
        grads = {name: g / self.scales[name] if name in self.scales else g for name, g in grads.items()}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        if not torch.isfinite(norm):
            raise ValueError(f"HeadTrainer: gradient: expected finite values at step {step}, got {norm.item()}")
        shrink = (self.clip / norm).clamp(max=1.0)
        for name, grad in grads.items():
            master, moments = self.masters[name], self.moments[name]
            if len(moments) == 1:
                (m,) = moments
                m.mul_(_MOMENTUM).add_(grad)
                rows, columns = master.shape
                step_ = orthogonal(grad + _MOMENTUM * m) * max(1.0, rows / columns) ** 0.5
                master.mul_(1 - rate * self.weight_decay)
                master.sub_(rate * (step_ / self.scales[name] if name in self.scales else step_))
            else:
                (m, v), (b1, b2), grad = moments, _BETAS, grad * shrink
                m.lerp_(grad, 1 - b1)
                v.lerp_(grad * grad, 1 - b2)
                size = (v / (1 - b2 ** (step + 1))).sqrt_().add_(1e-8)
                master.addcdiv_(m / (1 - b1 ** (step + 1)), size, value=-rate * _VECTOR_RATE)
