"""One bad argument to a batch full of data faults: verify refuses before it writes, or does what the CPU op does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import specdec_kernels as sk
from specdec_kernels import _ops
from tests import test_verify_sharded as sharded
from tests.conftest import Backend, poisoned
from tests.cuda_paths import place
from tests.fuzz import fuzz
from tests.sampling_helpers import verify_is_built  # noqa: F401

SCHEMA = torch.ops.specdec.verify.default._schema.arguments
NAMES = [argument.name for argument in SCHEMA]
OUTPUTS = ("output_token_ids", "num_emitted", "accepted_nodes", "flags", "logprobs")


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values two elements apart."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


SPOILS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.double() if t.dtype != torch.float64 else t.half(),
    lambda t: t.long() if t.dtype != torch.int64 else t.int(),
    lambda t: t.to(torch.uint8),
    lambda t: t[:-1],
    lambda t: torch.cat([t, t[:1]]),
    lambda t: t[..., :-1],
    lambda t: t.unsqueeze(0),
    lambda t: t.flatten()[:1].squeeze(0),
    spread,
]
NUMBERS: list[tuple[str, Any]] = [
    ("method", "greedier"), ("method", ""), ("form", "fast"), ("return_logprobs", "all"), ("vocab_size", 0),
    ("vocab_size", -5), ("max_depth", -1), ("max_depth", 2**40), ("max_nodes", -1), ("max_nodes", 70_000),
]  # fmt: skip


def op_arguments(arguments: dict[str, Any], backend: str | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the public function hands to the op."""
    seen: list[list[Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr(_ops, "call", lambda op, b, device, *rest: seen.append(list(rest)))
        sk.verify(**arguments, backend=backend)
    return seen[0]


def attempt(backend: str | None, given: list[Any], at: int = 0, change: Callable = lambda x: x) -> Any:
    """The op's outputs, or how it refused the call with argument `at` changed; then nothing is written."""
    own = list(given)
    for i, name in enumerate(NAMES):
        if name in OUTPUTS and own[i] is not None:
            own[i] = poisoned(*own[i].shape, dtype=own[i].dtype)
    own[at] = change(own[at])
    before = [own[i].clone() for i, value in enumerate(own) if isinstance(value, torch.Tensor)]
    refusal = None
    try:
        _ops.call("verify", backend, torch.device("cpu"), *own)
    except (ValueError, TypeError) as error:
        refusal = str(error)
    if refusal is not None:
        after = [value for value in own if isinstance(value, torch.Tensor)]
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True)), refusal
        assert refusal.startswith("verify: "), refusal
        return refusal
    return [own[NAMES.index(name)] for name in OUTPUTS if own[NAMES.index(name)] is not None]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: NaN is itself."""
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def check_bad_argument(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    method = rng.choice(sharded.METHODS)
    make = sharded.reduced if method in sharded.DRAWN and rng.random() < 0.3 else sharded.batch
    arguments = make(rng.randrange(2**30), 97, method, 4, edits=rng.random() < 0.5)
    with pytest.MonkeyPatch.context() as monkeypatch:
        given = op_arguments(arguments, backend.selector, monkeypatch)
    given[NAMES.index("form")] = rng.choice(["eager", "lazy"])
    right, found = attempt(None, given), attempt(backend.selector, given)
    assert not isinstance(right, str), right
    same_answer(backend, found, right, "as given")
    tensors = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor) and NAMES[i] != "workspace"]
    for _ in range(6):
        if rng.random() < 0.2:
            name, value = rng.choice(NUMBERS)
            at, change = NAMES.index(name), lambda _, value=value: value
        else:
            at, change = rng.choice(tensors), rng.choice(SPOILS)
            if given[at].numel() == 0:
                continue
            bad = change(given[at])
            value = (bad.dtype, list(bad.shape), bad.stride())
        right, found = attempt(None, given, at, change), attempt(backend.selector, given, at, change)
        same_answer(backend, found, right, f"{NAMES[at]}: {value}")
    same_answer(backend, attempt(backend.selector, given), attempt(None, given), "as given, again")


def same_answer(backend: Backend, found: Any, right: Any, what: str) -> None:
    """Both refuse, or both give the same; the interpreter's log-probabilities closely."""
    assert isinstance(found, str) == isinstance(right, str), (what, found, right)
    if isinstance(right, str):
        return
    for name, a, b in zip(OUTPUTS, found, right, strict=True):
        if backend.name == "triton_interpret" and name == "logprobs":
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(a, b), (what, name, a, b)


test_bad_arguments_and_data_faults, test_bad_arguments_and_data_faults_long = fuzz(
    st.integers(0, 2**40), check_bad_argument
)


def test_more_nodes_than_the_bound(backend: Backend):
    """A request with more nodes than `max_nodes` is flagged and emits nothing; the others are as without it."""
    arguments = sharded.batch(1, 33, "target_only", 6)
    placed = {name: place(value, backend.device) for name, value in arguments.items()}
    counts = placed["tree"].cu_nodes.diff()
    free = sk.verify(**placed, **backend.kwargs)
    placed["tree"] = placed["tree"]._replace(max_nodes=int(counts.max()) - 1)
    bound = sk.verify(**placed, **backend.kwargs)
    over = counts > placed["tree"].max_nodes
    assert over.any()
    assert not over.all()
    assert (bound.flags[over] & sk.Flag.INDEX).all()
    assert not bound.num_emitted[over].any()
    for name in ("output_token_ids", "num_emitted", "flags"):
        assert torch.equal(getattr(bound, name)[~over], getattr(free, name)[~over]), name


@pytest.mark.parametrize("bound", [-1, 70_000])
def test_bound_of_nodes(bound: int, backend: Backend):
    """What no grid can have is refused by the CPU op too."""
    arguments = sharded.batch(1, 33, "target_only", 2)
    placed = {name: place(value, backend.device) for name, value in arguments.items()}
    placed["tree"] = placed["tree"]._replace(max_nodes=bound)
    with pytest.raises(ValueError, match=r"verify: max_nodes: expected a value in \[0, 65535\], got"):
        sk.verify(**placed, **backend.kwargs)
