"""Lists of described requests, run in one ragged call of `verify` and one by one through the float64 reference."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from python_ref.sampling import Parameters
from python_ref.sampling_dice import PhiloxDice
from python_ref.sampling_verify import verify_request
from tests import cuda_on_cpu
from tests.conftest import Backend
from tests.sampling_helpers import emitted, floats, ints, path, sampling_tensors, tree_tensors, verify

ONE_IN = 29  # of random requests, where they are slow
EPSILON = 1e-5  # distance of swept coins from their float64 threshold


@dataclass
class Request:
    """`draft_of[i]`: the row of `draft_logits` node i was drawn from, -1 for the root and deterministic nodes."""

    logits: np.ndarray
    token_ids: Sequence[int]
    parents: Sequence[int]
    draft_logits: np.ndarray | None = None
    draft_of: Sequence[int] | None = None
    parameters: Parameters = field(default_factory=Parameters)
    draft_parameters: Parameters | None = None
    seed: int = 0
    position: int = 0
    step: int = 0
    allowed: np.ndarray | None = None
    bias: Sequence[dict[int, float]] | None = None
    uniforms: list[float] | None = None

    def reference(self, method: str, **options: Any):
        return verify_request(
            self.logits, self.token_ids, self.parents, self.parameters, method=method, seed=self.seed,
            position=self.position, step=self.step, draft_logits=self.draft_logits, draft_rows=self.draft_of,
            draft_parameters=self.draft_parameters, allowed=self.allowed, bias=self.bias, uniforms=self.uniforms,
            **options,
        )  # fmt: skip


class SweepDice(PhiloxDice):
    """Chooses every coin it is asked for 1e-5 beside its threshold, on a side drawn by `sides`, and notes it."""

    def __init__(self, request: Request, sides: random.Random):
        super().__init__(request.seed, request.position, request.step)
        self.sides, self.chosen = sides, [sides.random() for _ in request.parents]

    def _near(self, threshold: float) -> float:
        side = self.sides.choice([-EPSILON, EPSILON])
        return threshold + (side if EPSILON <= threshold + side <= 1 - EPSILON else -side)

    def coin(self, ratio: float, *, node: int, **key: int) -> bool:
        if ratio <= 0:  # a difference of equal laws may round to 1e-9; exact zeros: RS-01
            self.chosen[node] = EPSILON
        elif ratio < 1 - EPSILON:
            self.chosen[node] = self._near(ratio)
        else:  # certain, with the coin most likely to break it
            self.chosen[node] = 1 - (2.0**-24 if ratio > 1 + EPSILON else 3 * EPSILON)
        return self.chosen[node] < ratio

    def bucket(self, masses: Sequence[float], *, node: int, **key: int) -> int | None:
        edges = np.cumsum(np.asarray(masses, dtype=np.float64))
        self.chosen[node] = self._near(float(self.sides.choice(list(edges))))
        hits = np.flatnonzero(self.chosen[node] < edges)
        return int(hits[0]) if len(hits) else None


def sweep(request: Request, method: str, sides: random.Random, **options: Any) -> Request:
    """The request with uniforms that sit beside the thresholds it meets."""
    dice = SweepDice(request, sides)
    request.reference(method, dice=dice, **options)
    request.uniforms = dice.chosen
    return request


def run(backend: Backend, requests: Sequence[Request], method: str, *, dtype: torch.dtype = torch.float32, **options):
    """One ragged call over all requests."""
    offset, rows, draft_logits = 0, [], []
    for request in requests:
        draft = request.draft_of if request.draft_of is not None else [-1] * len(request.parents)
        rows += [row + offset if row >= 0 else -1 for row in draft]
        if request.draft_logits is not None:
            draft_logits.append(request.draft_logits)
            offset += len(request.draft_logits)
    if draft_logits and method in ("rejection", "block"):
        options["draft_logits"] = floats(np.concatenate(draft_logits), dtype=dtype)
        options["draft_rows"] = ints(rows)
    if requests[0].uniforms is not None:
        options["uniforms"] = floats([u for request in requests for u in request.uniforms])
    if requests[0].allowed is not None:
        options["allowed"] = torch.as_tensor(np.concatenate([r.allowed for r in requests]))
    if requests[0].bias is not None:
        entries = [sorted(row.items()) for r in requests for row in r.bias]
        cu = np.concatenate([[0], np.cumsum([len(row) for row in entries])])
        flat = [entry for row in entries for entry in row]
        options["bias"] = (ints(cu), ints([token for token, _ in flat]), floats([value for _, value in flat]))
    if requests[0].draft_parameters is not None:
        options["draft_sampling"] = parameters_of(backend, requests, [r.draft_parameters for r in requests])
    return verify(
        backend,
        floats(np.concatenate([r.logits for r in requests]), dtype=dtype),
        ints([token for r in requests for token in r.token_ids]),
        tree_tensors([list(r.parents) for r in requests], backend.device),
        parameters_of(backend, requests, [r.parameters for r in requests]),
        method=method,
        **options,
    )


def parameters_of(backend: Backend, requests: Sequence[Request], parameters: Sequence[Parameters]):
    return sampling_tensors(
        len(requests),
        backend.device,
        temperature=[p.temperature for p in parameters],
        top_k=[p.top_k for p in parameters],
        top_p=[p.top_p for p in parameters],
        min_p=[p.min_p for p in parameters],
        seed=[r.seed for r in requests],
        position=[r.position for r in requests],
        step=[r.step for r in requests],
    )


class BranchDice(PhiloxDice):
    """Notes which way every decision went, and whether it was open: what two requests of one branch share."""

    def __init__(self, request: Request):
        super().__init__(request.seed, request.position, request.step, request.uniforms)
        self.branch: list[Any] = []

    def coin(self, ratio: float, **key: int) -> bool:
        taken = super().coin(ratio, **key)
        self.branch.append((taken, 0 < ratio < 1))
        return taken

    def bucket(self, masses: Sequence[float], **key: int) -> int | None:
        hit = super().bucket(masses, **key)
        self.branch.append(hit)
        return hit

    def pick(self, weights: np.ndarray, *, depth: int) -> int:
        self.branch.append("pick")
        return super().pick(weights, depth=depth)

    def race(self, law: np.ndarray, weights: np.ndarray, *, depth: int) -> int:
        self.branch.append("race")
        return super().race(law, weights, depth=depth)


def branches(requests: Iterable[Request], method: str) -> list[Request]:
    """The first clear request of every branch: of each sequence of decisions, path and flags that the reference takes
    among them."""
    first: dict[Any, Request] = {}
    for request in requests:
        dice = BranchDice(request)
        right, distance = request.reference(method, dice=dice)
        if distance >= EPSILON / 2:
            first.setdefault((tuple(dice.branch), tuple(right.nodes), right.flags), request)
    return list(first.values())


def share(requests: Iterable[Request], method: str) -> list[Request]:
    """Some of many random requests."""
    return list(requests)[::ONE_IN]


def compare_all(
    backend: Backend, requests: Iterable[Request], method: str, *, some: Callable = branches, **options: Any
) -> None:
    """`compare` of all requests. Emulated backends run `some` of them with the checks of races and bounds, then all of
    them without; Triton's interpreter some."""
    requests = list(requests)
    if backend.name in cuda_on_cpu.BACKENDS:
        compare(backend, some(requests, method), method, **options)
    if backend.name != "triton_interpret":
        with cuda_on_cpu.unchecked() if backend.name in cuda_on_cpu.BACKENDS else contextlib.nullcontext():
            compare(backend, requests, method, **options)


def compare(
    backend: Backend, requests: Sequence[Request], method: str, *, margin: float = 4e-6, clear: float = 0.98, **options
) -> int:
    """Tokens, paths and flags of every request equal the reference's where its margin allows; returns how many."""
    found = run(backend, requests, method, **options)
    compared = 0
    for index, request in enumerate(requests):
        right, distance = request.reference(method)
        if distance < margin:
            continue
        compared += 1
        what = f"request {index}: {request}, margin {distance}"
        assert emitted(found, index) == right.tokens, what
        assert path(found, index) == right.nodes, what
        assert int(found.flags[index]) == right.flags, what
    assert compared >= min(clear * len(requests), len(requests) - 1), (
        f"only {compared} of {len(requests)} decisions are clear"
    )
    return compared


def random_tree(rng: random.Random, nodes: int, widest: int) -> list[int]:
    parents = [-1]
    while len(parents) < nodes:
        parent = rng.randrange(len(parents))
        if parents.count(parent) < widest:
            parents.append(parent)
    return parents


def random_request(rng: random.Random, vocab: int, nodes: int, *, mixed: bool = True, edits: bool = True) -> Request:
    """A random tree; below each node the siblings are drawn from a draft row or deterministic."""
    draws = np.random.default_rng(rng.randrange(2**32))
    parents = random_tree(rng, nodes, min(3, vocab - 1))
    tokens, draft_of, seen = [0] * nodes, [-1] * nodes, {}
    deterministic = {node: mixed and rng.random() < 0.3 for node in range(nodes)}
    draft = draws.normal(0, 1.5, (nodes, vocab)).astype(np.float32)
    for node in range(1, nodes):
        parent = parents[node]
        likely = np.argsort(-draft[parent])[: max(6, vocab // 100)].tolist()
        tokens[node] = rng.choice([t for t in likely if t not in seen.setdefault(parent, set())])
        seen[parent].add(tokens[node])
        draft_of[node] = -1 if deterministic[parent] else parent
        if rng.random() < 0.05:
            tokens[node] = -1
    parameters = Parameters(
        rng.choice([0.0, 0.5, 1.0, 1.0, 1.7]),
        rng.choice([0, 0, 3, vocab]),
        rng.choice([1.0, 1.0, 0.83]),
        rng.choice([0.0, 0.0, 0.07]),
    )
    allowed = draws.integers(-(2**31), 2**31, (nodes, (vocab + 31) // 32)).astype(np.int32)
    allowed |= np.int32(1 << rng.randrange(min(vocab, 31)))
    bias = [
        {rng.randrange(vocab): rng.choice([-np.inf, -1.5, 0.75, 2.0]) for _ in range(rng.randrange(3))}
        for _ in range(nodes)
    ]
    return Request(
        (draft + draws.normal(0, 0.7, (nodes, vocab))).astype(np.float32), tokens, parents, draft, draft_of,
        parameters, Parameters(temperature=rng.choice([0.8, 1.0])), rng.randrange(-(2**63), 2**63),
        rng.choice([0, 17, 2**31, 2**40]), rng.randrange(3), allowed if edits else None, bias if edits else None,
    )  # fmt: skip
