"""What was written is what attention reads; `merge_attention` against float64. `write_kv` itself: test_kv_write.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from python_ref import attention as ref
from tests.attention_suite import as64, build, rng_of
from tests.attention_trees import chain, eagle26, random_tree

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_written_tree_is_what_attention_reads(backend):
    """slot_mapping + write_kv put slot j of request b where tree_attention looks for it."""
    for op in ("slot_mapping", "write_kv", "tree_attention"):
        backend.require(op)
    from specdec_kernels.attention import slot_mapping, write_kv

    rng = rng_of("round trip")
    trees = [eagle26(), chain(3), random_tree(18, rng)]
    problem = build(trees, [31, 0, 16], rng, page_size=8).to(backend.device)
    expected = problem.run(backend)
    t, heads = problem.tensors, problem.tensors["k_cache"].shape[2]
    cu = t["cu_nodes"].tolist()
    tensors = t["page_table"], t["context_lens"], t["cu_nodes"]
    slots = slot_mapping(*tensors, 8, total_nodes=len(t["q"]), **backend.kwargs)
    packed = []
    for name in ("k_cache", "v_cache"):
        flat = t[name].reshape(-1, heads, 64)
        packed.append(torch.zeros(len(t["q"]), heads, 64, device=backend.device))
        packed[-1][: cu[-1]] = flat[slots[: cu[-1]].long()]
        for slot in slots[: cu[-1]].tolist():
            t[name][slot // 8, slot % 8] = float("nan")
    write_kv(*packed, t["k_cache"], t["v_cache"], slots, kv_layout="NHD", **backend.kwargs)
    assert all(torch.equal(a, b) for a, b in zip(problem.run(backend), expected))


# ---- merge


def merge(backend, *args, **kwargs):
    from specdec_kernels.attention import merge_attention

    backend.require("merge_attention")
    return merge_attention(*args, **kwargs, **backend.kwargs)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name_of)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 64), (1, 1, 80), (33, 6, 128), (7, 3, 256)])
def test_merge_against_float64(backend, dtype, with_sinks, shape):
    rng = rng_of("merge", shape)
    out_a, out_b = (torch.from_numpy(rng.standard_normal(shape)).to(dtype).to(backend.device) for _ in range(2))
    lse_a, lse_b = (torch.from_numpy(20 * rng.standard_normal(shape[:2])).float().to(backend.device) for _ in range(2))
    for lse, rows in ((lse_a, slice(0, 3)), (lse_b, slice(2, 5))):
        lse[rows] = float("-inf")
    out_a[:3] = 0
    out_b[2:5] = 0
    sinks = torch.tensor(rng.standard_normal(shape[1]), dtype=F32, device=backend.device) if with_sinks else None
    copies = [x.clone() for x in (out_a, lse_a, out_b, lse_b)]
    got, got_lse = merge(backend, out_a, lse_a, out_b, lse_b, sinks=sinks)
    assert all(torch.equal(a, b) for a, b in zip((out_a, lse_a, out_b, lse_b), copies))
    expected, expected_lse = ref.merge_attention(*(as64(x) for x in copies), None if sinks is None else as64(sinks))
    assert got.dtype == dtype
    tolerance = {F32: 2e-6, BF16: 2**-8, F16: 2**-11}[dtype]
    assert np.abs(as64(got) - expected).max(initial=0) <= tolerance * (1 + np.abs(expected).max(initial=0))
    empty = np.isneginf(expected_lse)
    assert (np.isneginf(as64(got_lse)) == empty).all()
    assert np.abs(np.where(empty, 0, as64(got_lse) - np.where(empty, 0, expected_lse))).max(initial=0) < 1e-5
    assert not as64(got)[2:3].any()  # both sides empty


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefix_and_tree_merged_equal_one_call(backend, dtype, with_sinks):
    """The shared-prefix recipe: zero mask rows on the prefix pages, the rest apart, merged, sinks entering once."""
    rng = rng_of("shared prefix")
    page_size, prefix = 16, 48
    trees = [random_tree(12, rng), eagle26(), chain(1)]
    contexts = [prefix + 9, prefix, prefix + 33]
    options = {"page_size": page_size, "share_prefix": True, "tail_rows": 0, "sinks": with_sinks}
    problem = build(trees, contexts, rng, dtype=dtype, **options)
    whole_out, whole_lse = problem.run(backend)
    t = problem.to(backend.device).tensors
    count = len(t["q"])
    int32 = lambda x: torch.tensor(x, dtype=torch.int32, device=backend.device)  # noqa: E731
    from specdec_kernels.attention import tree_attention

    data = t["q"], t["k_cache"], t["v_cache"]
    same = {"return_lse": True, **backend.kwargs}
    nothing = torch.zeros(count, 2, dtype=torch.int32, device=backend.device)
    columns = prefix // page_size
    prefix_table, rest_table = t["page_table"][:1, :columns].contiguous(), t["page_table"][:, columns:].contiguous()
    a = tree_attention(*data, prefix_table, int32([prefix]), int32([0, count]), nothing, max_nodes=64, **same)
    rest = rest_table, int32([9, 0, 33]), t["cu_nodes"], t["tree_mask"]
    b = tree_attention(*data, *rest, max_nodes=problem.max_nodes, **same)
    out, lse = merge(backend, *a, *b, sinks=t["sinks"])
    tolerance = 2e-6 if dtype == F32 else 2**-6
    assert (out.double() - whole_out.double()).abs().max() <= tolerance
    assert (lse - whole_lse).abs().max() <= 2e-5
    if dtype == F32:
        problem.check(out, lse)


def test_merge_is_associative_and_commutative(backend):
    rng = rng_of("associative")
    normal = lambda *shape: torch.from_numpy(5 * rng.standard_normal(shape)).float().to(backend.device)  # noqa: E731
    a, b, c = [(normal(9, 2, 64), normal(9, 2)) for _ in range(3)]
    left = merge(backend, *merge(backend, *a, *b), *c)
    right = merge(backend, *a, *merge(backend, *b, *c))
    swapped = merge(backend, *merge(backend, *c, *a), *b)
    for other in (right, swapped):
        assert all((x - y).abs().max() < 1e-5 for x, y in zip(left, other))
