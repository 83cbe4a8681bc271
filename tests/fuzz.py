"""Fuzzing against the references: a bounded number of examples in CI, 10,000 in the long suite, by one strategy."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LONG_EXAMPLES = 10_000
FAST = ("cpu", "cuda")  # the other backends interpret kernels: they see the first examples only
SLOW_EXAMPLES = 5


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[..., None], examples: int = 60) -> tuple[Any, Any]:
    """(CI test, long test) of `check(backend, example)`."""

    def build(count: int) -> Any:
        seen: collections.Counter[str] = collections.Counter()

        @settings(
            max_examples=count, deadline=None, derandomize=count < LONG_EXAMPLES, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(example=strategy)
        def test(backend: Any, example: Any) -> None:
            seen[backend.name] += 1
            if backend.name in FAST or seen[backend.name] <= SLOW_EXAMPLES * (count // 1000 + 1):
                check(backend, example)

        return test

    return build(examples), pytest.mark.long(pytest.mark.timeout(3600)(build(LONG_EXAMPLES)))
