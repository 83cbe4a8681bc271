"""20,000 independent trials of one small request in one call: the form most cases of the survey take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.conftest import Backend
from tests.sampling_helpers import floats, ints, sampling_tensors, tree_tensors, verify

TRIALS = 20_000


def trials_of(backend: Backend) -> int:
    return TRIALS if backend.name in ("cpu", "cuda") else 2_000


def trials(
    backend: Backend,
    target: Any,
    token_ids: Any,
    parents: Sequence[int],
    *,
    method: str,
    draft: Any = None,
    draft_rows: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    sampling: dict[str, Any] | None = None,
    draft_sampling: dict[str, Any] | None = None,
    count: int | None = None,
    **options: Any,
) -> Any:
    """verify on `count` copies. `target` [n, V] logits, `token_ids` [n] or [count, n], `draft` [R, V] logits."""
    B, n = count or trials_of(backend), len(parents)
    ids = np.broadcast_to(np.asarray(token_ids), (B, n))
    if draft is not None:
        rows = np.asarray(draft_rows if draft_rows is not None else [-1] + [0] * (n - 1))
        R = len(draft)
        shifted = np.where(rows >= 0, rows + R * np.arange(B)[:, None], -1)
        options["draft_logits"] = floats(np.tile(np.asarray(draft, dtype=np.float32), (B, 1)), dtype=dtype)
        options["draft_rows"] = ints(shifted.ravel())
    if draft_sampling is not None:
        options["draft_sampling"] = sampling_tensors(B, backend.device, **draft_sampling)
    for name in ("allowed", "uniforms"):
        if name in options:
            value = torch.as_tensor(options[name])
            options[name] = value.repeat(B, *([1] * (value.dim() - 1)))
    return verify(
        backend,
        floats(np.tile(np.asarray(target, dtype=np.float32), (B, 1)), dtype=dtype),
        ints(ids.ravel()),
        tree_tensors([list(parents)], backend.device, copies=B),
        sampling_tensors(B, backend.device, **(sampling or {})),
        method=method,
        **options,
    )


def first_counts(verified: Any, vocab: int) -> np.ndarray:
    """Counts of the first emitted token; every trial must have emitted one inside the vocabulary."""
    first = verified.output_token_ids[:, 0].cpu().numpy()
    assert (first >= 0).all()
    assert (first < vocab).all()
    return np.bincount(first, minlength=vocab)


def draws(q: Any, count: int, k: int = 1, seed: int = 0) -> np.ndarray:
    """[count, k + 1] ids: column 0 is the ignored root, then k siblings without replacement in draw order."""
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):
        scores = np.log(np.asarray(q, dtype=np.float64)) + rng.gumbel(size=(count, len(q)))
    return np.concatenate([np.zeros((count, 1), dtype=np.int64), np.argsort(-scores, axis=1)[:, :k]], axis=1)
