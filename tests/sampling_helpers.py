"""What the sampling suites share: trees and parameters as tensors, one way to call the op, chi-square limits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import specdec_kernels as sk
from tests import cuda_on_cpu
from tests.conftest import Backend

CASE_LIMIT = 1e-6  # p-value below which a case fails
SUITE_LIMIT = 1e-11  # a statistical suite: fewer than 100 checks share 1e-9


@pytest.fixture(autouse=True)
def verify_is_built(request: pytest.FixtureRequest) -> None:
    """Import into a module: its tests skip before they prepare anything where the backend has no `verify`."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").require("verify")


@pytest.fixture(autouse=True)
def results_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Import into a module of many requests alike: emulated backends run its tests without their checks."""
    emulated = "backend" in request.fixturenames and request.getfixturevalue("backend").name in cuda_on_cpu.BACKENDS
    with cuda_on_cpu.unchecked() if emulated else contextlib.nullcontext():
        yield


def tree_tensors(parents: Sequence[Sequence[int]], device: str = "cpu", copies: int = 1) -> Any:
    """A DraftTree of ragged requests, derived here in plain loops; `copies` repeats the whole batch."""
    nodes = [len(p) for p in parents]
    widest = max([*nodes, 1])
    words = (widest + 31) // 32
    depths, first_child, next_sibling, masks = [], [], [], []
    for request in parents:
        depth = [0] * len(request)
        first, following = [-1] * len(request), [-1] * len(request)
        mask = np.zeros((len(request), words), dtype=np.uint32)
        for node, parent in enumerate(request):
            if parent >= 0:
                depth[node] = depth[parent] + 1
                mask[node] = mask[parent]
                siblings = [n for n in range(node) if request[n] == parent]
                if siblings:
                    following[siblings[-1]] = node
                else:
                    first[parent] = node
            mask[node, node // 32] |= np.uint32(1 << (node % 32))
        depths += depth
        first_child += first
        next_sibling += following
        masks.append(mask)
    flat = [p for request in parents for p in request]

    def ints(values: Any) -> torch.Tensor:
        one = torch.as_tensor(np.array(values, dtype=np.int32))
        return one.repeat(copies, *([1] * (one.dim() - 1))).to(device)

    counts = np.tile(nodes, copies)
    return sk.DraftTree(
        parents=ints(flat),
        cu_nodes=torch.as_tensor(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device),
        tree_mask=ints(np.concatenate(masks).view(np.int32) if masks else np.zeros((0, words), dtype=np.int32)),
        depths=ints(depths),
        positions=ints(depths),
        first_child=ints(first_child),
        next_sibling=ints(next_sibling),
        flags=torch.zeros(len(counts), dtype=torch.int32, device=device),
        max_nodes=widest,
        max_depth=max([*depths, 0]),
    )


def sampling_tensors(B: int, device: str = "cpu", **values: Any) -> Any:
    """`Sampling` from scalars, lists or arrays; seeds default to 0 .. B-1, positions to 0."""
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    full = {"temperature": 1.0, "seed": np.arange(B), "position": 0, **values}

    def tensor(name: str, value: Any) -> torch.Tensor:
        array = np.broadcast_to(np.asarray(value), (B,)).copy()
        return torch.as_tensor(array).to(dtypes.get(name, torch.int64)).to(device)

    return sk.Sampling(**{name: tensor(name, value) for name, value in full.items() if value is not None})


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int32)).to(device)


def floats(values: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float32)).to(dtype).to(device)


def log(probabilities: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probabilities, dtype=np.float64)).astype(np.float32)


def bit_rows(allowed: Sequence[Sequence[int]], vocab: int, device: str = "cpu") -> torch.Tensor:
    """One grammar mask row a node from lists of allowed ids."""
    words = np.zeros((len(allowed), (vocab + 31) // 32), dtype=np.uint32)
    for row, ids in enumerate(allowed):
        for token in ids:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return torch.tensor(words.view(np.int32).tolist(), dtype=torch.int32, device=device).view(words.shape)


def verify(backend: Backend, logits: Any, token_ids: Any, tree: Any, sampling: Any, **options: Any) -> Any:
    """`sk.verify` with every tensor on the backend's device; skips where the op is not built."""
    backend.require("verify")

    def place(value: Any) -> Any:
        return value.to(backend.device) if isinstance(value, torch.Tensor) else value

    options = {
        name: tuple(map(place, value)) if isinstance(value, tuple) else place(value) for name, value in options.items()
    }
    return sk.verify(place(logits), place(token_ids), tree, sampling, **options, **backend.kwargs)


def one(backend: Backend, logits: Any, token_ids: Sequence[int], parents: Sequence[int], **options: Any) -> Any:
    """verify on one request; parameters of `Sampling` and of `verify` both go into `options`."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "step")
    parameters = {name: options.pop(name) for name in names if name in options}
    tree = tree_tensors([parents], backend.device)
    rows = logits if isinstance(logits, torch.Tensor) else floats(logits)
    return verify(backend, rows, ints(token_ids), tree, sampling_tensors(1, backend.device, **parameters), **options)


def emitted(verified: Any, request: int = 0) -> list[int]:
    """The emitted ids of one request; checks that the padding is -1 behind them."""
    row, count = verified.output_token_ids[request].tolist(), int(verified.num_emitted[request])
    assert all(token == -1 for token in row[count:]), row
    return row[:count]


def path(verified: Any, request: int = 0) -> list[int]:
    row, count = verified.accepted_nodes[request].tolist(), int(verified.num_emitted[request])
    assert all(node == -1 for node in row[count:]), row
    return row[:count]


def count_accepted(verified: Any) -> int:
    """Requests of which at least one draft was accepted."""
    return int((verified.num_emitted > 1).sum())


def chain(length: int) -> list[int]:
    return [-1, *range(length)]


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom) with cells expecting fewer than 5 pooled; inf where a massless cell was hit."""
    counts, law = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(law, dtype=np.float64).ravel()
    if counts[law == 0].any():
        return float("inf"), 1
    expected = law / law.sum() * counts.sum()
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum()), max(len(counts) - 1, 1)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    statistic, freedom = chi_square(counts, law)
    return float(chi2.sf(statistic, freedom))


def assert_law(counts: np.ndarray, law: np.ndarray, limit: float = CASE_LIMIT) -> None:
    statistic, freedom = chi_square(counts, law)
    bound = chi2.isf(limit, freedom)
    assert statistic < bound, f"chi-square {statistic:.1f} at {freedom} degrees of freedom, limit {bound:.1f}"


def assert_biased(counts: np.ndarray, law: np.ndarray, limit: float = CASE_LIMIT) -> None:
    """The negative control's side of `assert_law`: the same check must fail."""
    statistic, freedom = chi_square(counts, law)
    assert statistic >= chi2.isf(limit, freedom), f"control passes: chi-square {statistic:.1f} at {freedom}"


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = (np.asarray(logits, dtype=np.float64) - np.max(logits, axis=-1, keepdims=True)) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum(axis=-1, keepdims=True)
