"""GraphBuckets: one step function over several token buckets, static buffers, inert padding (the CPU part)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_kernels.attention import slot_mapping, write_kv
from specdec_kernels.batching import GraphBuckets
from specdec_kernels.kv import advance, commit_kv
from specdec_kernels.tree import build_tree


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def toy_step(**inputs: torch.Tensor) -> torch.Tensor:
    return inputs["x"] * 2 + inputs["bias"]


def buckets(step: Any = toy_step, **options: Any) -> GraphBuckets:
    return GraphBuckets(step, [4, 8], lambda size: {"x": torch.empty(size), "bias": torch.empty(())}, **options)


def test_the_smallest_bucket_is_used_and_padding_is_filler():
    run = buckets(fillers={"x": -1})
    assert run(3, x=torch.arange(3.0), bias=torch.tensor(1.0)).tolist() == [1, 3, 5, -1]
    assert run(5, x=torch.arange(5.0), bias=torch.tensor(0.0)).tolist() == [0, 2, 4, 6, 8, -2, -2, -2]
    assert run(2, x=torch.arange(2.0), bias=torch.tensor(0.0)).tolist() == [0, 2, -2, -2]  # nothing of the last call
    assert [run.size_for(n) for n in (0, 4, 5, 8)] == [4, 4, 8, 8]
    assert run.eager_calls == 3


def test_buffers_are_allocated_once_a_bucket():
    made: list[int] = []

    def make(size: int) -> dict[str, torch.Tensor]:
        made.append(size)
        return {"x": torch.empty(size), "bias": torch.empty(())}

    run = GraphBuckets(toy_step, [4, 8], make)
    for n in (1, 4, 8, 2, 7):
        run(n, x=torch.zeros(n), bias=torch.tensor(0.0))
    assert made == [4, 8]


def test_bad_calls_are_named():
    run = buckets()
    with pytest.raises(ValueError, match=r"^GraphBuckets: total: expected at most 8 tokens, got 9"):
        run(9, x=torch.zeros(9), bias=torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"^GraphBuckets: inputs: expected \['bias', 'x'\], got \['x'\]"):
        run(3, x=torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"^GraphBuckets: x: expected torch.float32 within \[4\], got torch.int64 \[3\]"
    ):
        run(3, x=torch.zeros(3).long(), bias=torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"^GraphBuckets: sizes: expected rising sizes of at least 1"):
        GraphBuckets(toy_step, [8, 4], lambda size: {})


def test_a_step_that_commits_kv_gives_the_same_caches_in_any_bucket():
    """Write, commit and advance through a bucket far too large: padding rows, requests and offsets are inert."""
    PAGE, requests = 4, 3

    def make(size: int) -> dict[str, torch.Tensor]:
        return {
            "parents": torch.empty(size, dtype=torch.int32), "cu_nodes": torch.empty(9, dtype=torch.int32),
            "context_lens": torch.empty(8, dtype=torch.int32), "page_table": torch.empty(8, 4, dtype=torch.int32),
            "k": torch.empty(size, 1, 8), "accepted_nodes": torch.empty(8, 3, dtype=torch.int32),
            "num_emitted": torch.empty(8, dtype=torch.int32),
        }  # fmt: skip

    parents = ints([-1, 0, 0, 1, 2, -1, 0, -1, 0, 0])
    step_inputs = {
        "parents": parents, "cu_nodes": ints([0, 5, 7, 10]), "context_lens": ints([2, 6, 0]),
        "page_table": ints([[3, 0, 9, 9], [1, 4, 8, 9], [2, 5, 9, 9]]), "k": torch.randn(10, 1, 8),
        "accepted_nodes": ints([[0, 2, 4], [0, -1, -1], [0, 2, -1]]), "num_emitted": ints([3, 1, 2]),
    }  # fmt: skip
    results = []
    for sizes in ([10], [16], [64]):
        k_cache, v_cache = torch.zeros(10, PAGE, 1, 8), torch.zeros(10, PAGE, 1, 8)

        def step(k_cache: torch.Tensor = k_cache, v_cache: torch.Tensor = v_cache, **t: torch.Tensor) -> Any:
            tree = build_tree(t["parents"], t["cu_nodes"], t["context_lens"], max_nodes=5)
            slots = slot_mapping(t["page_table"], t["context_lens"], t["cu_nodes"], PAGE, total_nodes=t["k"].shape[0])
            write_kv(t["k"], t["k"] * 2, k_cache, v_cache, slots, kv_layout="NHD")
            commit_kv(k_cache, v_cache, t["page_table"], t["context_lens"], t["cu_nodes"], t["accepted_nodes"],
                      t["num_emitted"], page_size=PAGE)  # fmt: skip
            lens = t["context_lens"].clone()
            advance(lens, t["num_emitted"])
            return tree.positions, lens

        run = GraphBuckets(
            step, sizes, make, fillers={"parents": -1, "page_table": -1, "accepted_nodes": -1}, repeat_last=["cu_nodes"]
        )
        positions, lens = run(10, **step_inputs)
        assert lens[:requests].tolist() == [5, 7, 2]
        assert positions[10:].tolist() == [0] * (sizes[0] - 10)
        results.append((positions[:10].tolist(), k_cache, v_cache))
    for positions, k_cache, v_cache in results[1:]:
        assert positions == results[0][0]
        assert torch.equal(k_cache, results[0][1])
        assert torch.equal(v_cache, results[0][2])
