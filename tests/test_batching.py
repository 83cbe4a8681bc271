"""Bucket plans, packing and padding counts against the reference, on every backend."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from python_ref import batching as ref
from specdec_kernels.batching import pack_rows, padding_stats, plan_buckets, unpack_rows
from tests.fuzz import fuzz


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(-1, 40), max_size=12))
    sizes = sorted(draw(st.sets(st.integers(1, 36), min_size=1, max_size=5)))
    return {
        "counts": counts,
        "sizes": sizes,
        "tile": draw(st.sampled_from([1, 8, 16, 64])),
        "group": draw(st.integers(1, 8)),
    }


def check_plan(backend: Any, example: dict[str, Any]) -> None:
    backend.require("plan_buckets")
    counts, sizes = example["counts"], example["sizes"]
    plan = plan_buckets(ints(counts, backend.device), sizes, **backend.kwargs)
    order, offsets, cu = ref.plan_buckets(counts, sizes)
    assert (plan.order.tolist(), plan.bucket_offsets.tolist(), plan.cu_nodes.tolist()) == (order, offsets, cu)
    assert sorted(order) == list(range(len(counts)))
    for k in range(len(sizes)):
        members = order[offsets[k] : offsets[k + 1]]
        assert plan.bucket(k).tolist() == members + [-1] * (len(counts) - len(members))
    backend.require("padding_stats")
    stats = padding_stats(plan, tile_rows=example["tile"], group_size=example["group"], **backend.kwargs)
    want = np.array(ref.padding_stats(counts, sizes, example["tile"], example["group"]))
    for column, name in enumerate(("requests", "nodes", "bucketed", "tile_rows")):
        assert getattr(stats, name).tolist() == want[:, column].tolist(), name
    assert stats.padded.tolist() == (want[:, 0] * sizes[-1]).tolist()
    assert stats.useful_rows.tolist() == (want[:, 1] * example["group"]).tolist()


test_plan_fuzz, test_plan_fuzz_long = fuzz(batches(), check_plan, 100)


@st.composite
def ragged(draw: Any) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(0, 6), max_size=6))
    return {
        "cu": [0, *np.cumsum(counts).tolist()], "rows": draw(st.integers(1, 6)), "extra": draw(st.integers(0, 3)),
        "shape": draw(st.sampled_from([(), (1,), (5,), (2, 3), (0,)])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])),
    }  # fmt: skip


def check_rows(backend: Any, example: dict[str, Any]) -> None:
    backend.require("pack_rows")
    cu, rows, shape, dtype = (example[name] for name in ("cu", "rows", "shape", "dtype"))
    total = cu[-1] + example["extra"]
    x = (torch.rand(len(cu) - 1, rows + 1, *shape, device=backend.device) * 99 - 20).to(dtype)[:, :rows]
    y = (torch.rand(total, *shape, device=backend.device) * 99 - 20).to(dtype)
    offsets = ints(cu, backend.device)

    def raw(t: torch.Tensor) -> np.ndarray:
        return (t.float() if dtype == torch.bfloat16 else t).cpu().numpy()

    packed = pack_rows(x, offsets, total=total, **backend.kwargs)
    assert packed.dtype == dtype
    assert np.array_equal(raw(packed), ref.pack_rows(raw(x), cu, total))
    padded = unpack_rows(y, offsets, max_rows=rows, **backend.kwargs)
    assert np.array_equal(raw(padded), ref.unpack_rows(raw(y), cu, rows))
    whole = max([0, *(b - a for a, b in itertools.pairwise(cu))])
    again = pack_rows(unpack_rows(y, offsets, max_rows=max(1, whole)), offsets, total=cu[-1], **backend.kwargs)
    assert torch.equal(again, y[: cu[-1]])


test_rows_fuzz, test_rows_fuzz_long = fuzz(ragged(), check_rows, 100)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"^plan_buckets: bucket_sizes: expected rising sizes of at least 1"):
        plan_buckets(ints([1]), [4, 4])
    with pytest.raises(ValueError, match=r"^plan_buckets: bucket_sizes: expected 1 to 64 sizes, got 0"):
        plan_buckets(ints([1]), [])
    with pytest.raises(TypeError, match=r"^plan_buckets: num_nodes: expected int32, got float32"):
        plan_buckets(torch.ones(2), [4])
    with pytest.raises(ValueError, match=r"^pack_rows: cu: expected shape \[3\], got \[2\]"):
        pack_rows(torch.zeros(2, 3, 4), ints([0, 1]), total=3)
    with pytest.raises(ValueError, match=r"^pack_rows: x: expected dense items behind the row dimension"):
        pack_rows(torch.zeros(2, 3, 4, 5).transpose(2, 3), ints([0, 1, 2]), total=3)
    with pytest.raises(ValueError, match=r"^unpack_rows: max_rows: expected a value of at least 0, got -1"):
        unpack_rows(torch.zeros(2, 3), ints([0, 1]), max_rows=-1)


@pytest.mark.parametrize("k", [-1, 2])
def test_a_bucket_that_does_not_exist_is_named(k):
    plan = plan_buckets(torch.tensor([1, 5, 2], dtype=torch.int32), [2, 8])
    assert plan.bucket(1).tolist() == [1, -1, -1]
    with pytest.raises(ValueError, match=rf"^BucketPlan.bucket: k: expected a bucket in \[0, 1\], got {k}"):
        plan.bucket(k)
