"""`write_kv`, `slot_mapping`, `merge_attention` against plain loops and float64.

A write touches the bytes of its slots and no other byte of the storage.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from python_ref import attention as ref
from python_ref import kv_write as ref_kv
from tests.attention_suite import DEAD_PAGE_IDS, FP8, as64, build, rng_of, strided_cache
from tests.attention_trees import chain, eagle26, random_tree

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16, *FP8)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole(cache: torch.Tensor) -> torch.Tensor:
    """Everything in the storage a view was cut from."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bits_of", [F32, BF16, F16], ids=name_of)
def test_rounding_reference_agrees_with_torch(dtype, bits_of):
    """The arithmetic rounding of the reference is the format's: every bf16/fp16 pattern, and random float32."""
    if bits_of == F32:
        x = torch.randn(20000) * torch.exp2(torch.randint(-30, 30, (20000,)).float())
    else:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(bits_of).float()
    largest = ref_kv.FORMATS[name_of(dtype)][2]
    x = x[x.isfinite() & (x.abs() <= (largest if dtype in FP8 else math.inf))]
    assert np.array_equal(ref_kv.round_to(as64(x), name_of(dtype)), as64(x.to(dtype)))


# A cache is in the model's dtype or in float8.
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(d, k) for d in (F32, BF16, F16) for k in (d, *FP8)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("style", ["dense", "padded", "interleaved"])
def test_write_kv(backend, dtype, kv_dtype, layout, style):
    from specdec_kernels.attention import write_kv

    backend.require("write_kv")
    rng = rng_of("write_kv", dtype, kv_dtype, layout, style)
    heads, dims, page_size, pages, rows = 3, (64, 80), 5, 7, 17
    middle = (page_size, heads) if layout == "NHD" else (heads, page_size)
    scale = torch.tensor([0.5, 2.0, 0.25]) if kv_dtype in FP8 else None
    slots = rng.permutation(pages * page_size)[:rows]
    slots[[3, 9]] = -1
    slots[11] = -7
    caches, inputs, expected, before = [], [], [], []
    for dim in dims:
        cache = strided_cache(pages, middle, dim, style, kv_dtype).to(backend.device)
        x = torch.from_numpy(3 * rng.standard_normal((rows, heads + 1, dim + 2))).to(dtype)
        x[5] *= 1e-3
        x[6] *= 300.0  # beyond e4m3's 448 after scaling: saturates
        x = x.to(backend.device)[:, 1:, :dim]
        raw = as64(cache)
        factors = None if scale is None else scale.numpy()
        expected.append(ref_kv.write_kv(as64(x), raw, slots, name_of(kv_dtype), scale=factors, kv_layout=layout))
        before.append(whole(cache).clone())
        caches.append(cache)
        inputs.append(x)
    copies = [x.clone() for x in inputs]
    scales = {} if scale is None else {"k_scale": scale.to(backend.device), "v_scale": scale.to(backend.device)}
    mapping = torch.tensor(slots, dtype=torch.int32, device=backend.device)
    write_kv(*inputs, *caches, mapping, kv_layout=layout, **scales, **backend.kwargs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies))
    for cache, want, old in zip(caches, expected, before):
        got = as64(cache)
        assert np.array_equal(got, want, equal_nan=True)
        # Bytes outside the written rows, the padding between them included, are as they were.
        touched = torch.zeros(whole(cache).numel(), dtype=torch.bool)
        rows_first = cache if layout == "NHD" else cache.transpose(1, 2)
        width = cache.element_size()
        for slot in (s for s in slots.tolist() if s >= 0):
            for h in range(heads):
                start = rows_first[slot // page_size, slot % page_size, h].storage_offset() * width
                touched[start : start + rows_first.shape[3] * width] = True
        assert torch.equal(whole(cache).cpu()[~touched], old.cpu()[~touched])
        assert not torch.equal(whole(cache).cpu()[touched], old.cpu()[touched])


@pytest.mark.parametrize("kv_dtype", FP8, ids=name_of)
def test_write_kv_scaled_then_read_is_within_half_a_step(backend, kv_dtype):
    """Any scale (not a power of two), per tensor and per head: the stored value times the scale is the nearest."""
    from specdec_kernels.attention import write_kv

    backend.require("write_kv")
    for count in (1, 2):
        rng = rng_of("fp8", count)
        k_scale, v_scale = (torch.tensor(rng.uniform(0.01, 0.3, count), dtype=F32).to(backend.device) for _ in range(2))
        x = torch.from_numpy(rng.standard_normal((16, 2, 64))).to(BF16).to(backend.device)
        caches = [strided_cache(2, (8, 2), 64, "dense", kv_dtype).to(backend.device) for _ in range(2)]
        mapping = torch.arange(16, dtype=torch.int32, device=backend.device)
        write_kv(x, x, *caches, mapping, k_scale=k_scale, v_scale=v_scale, kv_layout="NHD", **backend.kwargs)
        step = 2.0 ** -(ref_kv.FORMATS[name_of(kv_dtype)][0] + 1)
        for cache, scale in zip(caches, (k_scale, v_scale)):
            factor = as64(scale)[:, None] if count > 1 else as64(scale)
            stored = as64(cache).reshape(16, 2, 64) * factor
            error = np.abs(stored - as64(x))
            smallest = 2.0 ** ref_kv.FORMATS[name_of(kv_dtype)][1]
            assert (error <= step * (1 + 1e-5) * np.maximum(np.abs(as64(x)), smallest * factor)).all()
            assert error.max() > 0


def test_write_kv_nan_stays_nan(backend):
    from specdec_kernels.attention import write_kv

    backend.require("write_kv")
    for kv_dtype in DTYPES:
        dtype = kv_dtype if kv_dtype not in FP8 else F32
        x = torch.zeros(1, 1, 64, dtype=dtype, device=backend.device)
        x[0, 0, 5] = float("nan")
        caches = [torch.zeros(1, 4, 1, 64, device=backend.device).to(kv_dtype) for _ in range(2)]
        slot = torch.tensor([2], dtype=torch.int32, device=backend.device)
        write_kv(x, x, *caches, slot, kv_layout="NHD", **backend.kwargs)
        for cache in caches:
            assert np.isnan(as64(cache)).sum() == 1
            assert np.isnan(as64(cache)[0, 2, 0, 5])


@pytest.mark.parametrize("slot", [-1, -(2**31), 2**31 - 1, 28, 29])
def test_write_kv_slots_outside_the_cache_write_nothing(backend, slot):
    from specdec_kernels.attention import write_kv

    backend.require("write_kv")
    x = torch.ones(1, 2, 64, device=backend.device)
    caches = [strided_cache(7, (4, 2), 64, "padded", F32).to(backend.device) for _ in range(2)]
    before = [whole(c).clone() for c in caches]
    mapping = torch.tensor([slot], dtype=torch.int32, device=backend.device)
    write_kv(x, x, *caches, mapping, kv_layout="NHD", **backend.kwargs)
    assert all(torch.equal(whole(c), b) for c, b in zip(caches, before))


@pytest.mark.parametrize("page_size", [1, 4, 5, 16, 48, 256])
def test_slot_mapping(backend, page_size):
    from specdec_kernels.attention import slot_mapping

    backend.require("slot_mapping")
    rng = rng_of("slots", page_size)
    for batch in (0, 1, 7, 17):
        counts = rng.integers(0, 30, batch)
        contexts = rng.integers(0, 5 * page_size + 40, batch)
        columns = int(rng.integers(1, 9))  # often too few: such nodes have no slot
        table = rng.integers(0, 1000, (batch, columns))
        dead = rng.random(table.shape) < 0.3
        table[dead] = rng.choice(DEAD_PAGE_IDS, int(dead.sum()))
        cu = np.cumsum([0, *counts])
        total = int(cu[-1]) + 5
        int32 = lambda x: torch.tensor(np.asarray(x), dtype=torch.int32, device=backend.device)  # noqa: E731
        tensors = int32(table).reshape(batch, columns), int32(contexts), int32(cu)
        got = slot_mapping(*tensors, page_size, total_nodes=total, **backend.kwargs)
        assert got.dtype == torch.int32
        assert got.tolist() == ref_kv.slot_mapping(table, contexts, cu, page_size, total)


def test_slot_mapping_bound_below_the_real_count(backend):
    """total_nodes is the caller's bound: nodes behind it are dropped, nothing is written outside."""
    from specdec_kernels.attention import slot_mapping

    backend.require("slot_mapping")
    int32 = lambda x: torch.tensor(x, dtype=torch.int32, device=backend.device)  # noqa: E731
    got = slot_mapping(int32([[4, 5]]), int32([2]), int32([0, 9]), 16, total_nodes=4, **backend.kwargs)
    assert got.tolist() == [66, 67, 68, 69]


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
