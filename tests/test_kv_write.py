"""`write_kv` and `slot_mapping` against plain loops, on every backend.

A write touches the bytes of its slots and no other byte of the storage.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from python_ref import kv_write as ref_kv
from specdec_kernels.attention import slot_mapping, write_kv
from tests.attention_suite import DEAD_PAGE_IDS, FP8, as64, rng_of, strided_cache

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16, *FP8)
PLACES = (("NHD", "dense"), ("HND", "padded"), ("NHD", "interleaved"))


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
    backend.require("write_kv")
    if (
        backend.name.startswith("triton")
        and (layout, style) != PLACES[(DTYPES.index(dtype) + DTYPES.index(kv_dtype)) % 3]
    ):
        pytest.skip(f"outside the sizes of backend {backend.name}")  # each case is a kernel to compile
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
    backend.require("write_kv")
    x = torch.ones(1, 2, 64, device=backend.device)
    caches = [strided_cache(7, (4, 2), 64, "padded", F32).to(backend.device) for _ in range(2)]
    before = [whole(c).clone() for c in caches]
    mapping = torch.tensor([slot], dtype=torch.int32, device=backend.device)
    write_kv(x, x, *caches, mapping, kv_layout="NHD", **backend.kwargs)
    assert all(torch.equal(whole(c), b) for c, b in zip(caches, before))


@pytest.mark.parametrize("page_size", [1, 4, 5, 16, 48, 256])
def test_slot_mapping(backend, page_size):
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
    backend.require("slot_mapping")
    int32 = lambda x: torch.tensor(x, dtype=torch.int32, device=backend.device)  # noqa: E731
    got = slot_mapping(int32([[4, 5]]), int32([2]), int32([0, 9]), 16, total_nodes=4, **backend.kwargs)
    assert got.tolist() == [66, 67, 68, 69]
