"""The optimizer of head training: float32 masters, torch's Muon for matrices and its AdamW for vectors.

A state of a language model has a large mean, so the gradients of the matrices that read it are nearly of rank one, and
steps of AdamW, which are as large in every entry, go mostly along it. Muon steps along all singular directions alike
(Jordan et al., 2024), which is worth its products: they cost about as much as one pass of 1,000 tokens. What torch's
two do not have is here: units of a matrix's inputs, and one norm over all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_VECTOR_RATE = 1 / 30  # AdamW's rate against Muon's: steps of norms' weights of about 1, not of unit-norm matrices
_PREFIX = "optimizer."


class Optimizer:
    """`masters`: float32, by name. `scales`: of the inputs of some matrices, [columns]; such a matrix is stepped in
    units of its inputs' sizes, because target states differ by orders of magnitude from one dimension to the next.
    `clip`: largest norm of all gradients together, for vectors; a step of Muon has one size whatever the gradient's."""

    def __init__(
        self, masters: dict[str, Tensor], scales: Mapping[str, Tensor], *, weight_decay: float = 0.01, clip: float = 1.0
    ):
        self.masters, self.scales, self.clip = masters, scales, clip
        self._stepped = {name: torch.empty_like(p) if name in scales else p for name, p in masters.items()}
        matrices, vectors = ([p for p in self._stepped.values() if (p.dim() == 2) == kind] for kind in (True, False))
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if matrices:
            self._parts.append((torch.optim.Muon(matrices, weight_decay=weight_decay, momentum=0.95), 1.0))
        if vectors:
            self._parts.append((torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0), _VECTOR_RATE))

    @torch.no_grad()
    def update(self, grads: Mapping[str, Tensor], rate: float, step: int) -> None:
        """One step at `rate`; ValueError if a gradient is not finite (`step` is only for the message)."""
        grads = {name: g / self.scales[name] if name in self.scales else g for name, g in grads.items()}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        if not torch.isfinite(norm):
            raise ValueError(f"training: gradient: expected finite values at step {step}, got {norm.item()}")
        shrink = (self.clip / norm).clamp(max=1.0)
        for name, parameter in self._stepped.items():
            grad = grads.get(name)
            parameter.grad = grad if grad is None or grad.dim() == 2 else grad * shrink
        for name, scale in self.scales.items():
            torch.mul(self.masters[name], scale, out=self._stepped[name])
        for part, factor in self._parts:
            for group in part.param_groups:
                group["lr"] = rate * factor
            part.step()
        for name, scale in self.scales.items():
            torch.div(self._stepped[name], scale, out=self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beside the masters."""
        found = {}
        for name, parameter in self._stepped.items():
            for part, _ in self._parts:
                for key, value in part.state.get(parameter, {}).items():
                    found[f"{_PREFIX}{name}.{key}"] = value
        return found

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, from a checkpoint's tensors."""
        owner = {id(p): part for part, _ in self._parts for group in part.param_groups for p in group["params"]}
        for name, parameter in self._stepped.items():
            start = f"{_PREFIX}{name}."
            kept = {key[len(start) :]: value.clone() for key, value in stored.items() if key.startswith(start)}
            if kept:
                owner[id(parameter)].state[parameter] = kept
