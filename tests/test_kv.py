"""commit_kv, advance, copy_pages against copy-out/copy-in references, with canaries everywhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from python_ref import kv as ref
from specdec_kernels.kv import advance, commit_kv, copy_pages, kv_handle
from tests.fuzz import fuzz


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    """A batch after verification: disjoint pages, rising paths, and garbage where nothing may look."""
    requests, page_size, width = (
        draw(st.integers(0, 4)),
        draw(st.sampled_from([1, 2, 3, 4, 16])),
        draw(st.integers(1, 6)),
    )
    lens = [draw(st.integers(0, 20)) for _ in range(requests)]
    nodes = [draw(st.integers(0, 12)) for _ in range(requests)]
    columns = max([1, *(-(-(length + n) // page_size) for length, n in zip(lens, nodes))])
    num_pages = max(1, requests * columns) + 2
    pool = draw(st.permutations(range(num_pages)))
    table = [[pool[b * columns + c] for c in range(columns)] for b in range(requests)]
    for row in table:
        for c in range(columns):
            if draw(st.integers(0, 7)) == 0:
                row[c] = draw(st.sampled_from([-1, num_pages, 2**31 - 1]))  # no page here: nothing is moved
    accepted, emitted = [], []
    for count in nodes:
        path = sorted(draw(st.sets(st.integers(0, max(0, count - 1)), max_size=min(width, count))))
        emitted.append(draw(st.sampled_from([len(path), len(path), len(path), -3, 99])))
        garbage = [draw(st.integers(-2, 14)) for _ in range(width - len(path))]
        accepted.append(path + garbage)
    order = draw(st.one_of(st.none(), st.lists(st.integers(-1, requests), unique=True)))
    return {
        "page_size": page_size, "num_pages": num_pages, "page_table": table, "context_lens": lens,
        "cu_nodes": [0, *np.cumsum(nodes).tolist()], "accepted_nodes": accepted, "num_emitted": emitted,
        "request_order": order, "kv_layout": draw(st.sampled_from(["NHD", "HND"])), "columns": columns, "width": width,
        "form": draw(st.sampled_from(["list", "layers", "interleaved", "padded", "handle"])),
    }  # fmt: skip


def make_caches(
    form: str, pages: int, page: int, layout: str, device: str, layers: int = 2
) -> tuple[Any, Any, list[torch.Tensor]]:
    """(k_caches, v_caches, all the 4-D views, in order): every element distinct, in the forms engines hold them."""
    heads, dims = 2, (8, 5)  # K and V of different width
    shapes = [(pages, page, heads, d) if layout == "NHD" else (pages, heads, page, d) for d in dims]
    if form == "interleaved":  # K and V in one tensor
        both = torch.arange(layers * pages * 2 * page * heads * 8.0, device=device).view(
            layers, pages, 2, *shapes[0][1:]
        )
        k, v = both[:, :, 0], both[:, :, 1]
    elif form == "padded":  # slices of wider heads
        wide = [torch.arange(layers * np.prod(s) * 2.0, device=device).view(layers, *s[:3], 2 * s[3]) for s in shapes]
        k, v = (w[..., : s[3]] for w, s in zip(wide, shapes))
    else:
        k, v = (torch.arange(layers * np.prod(s) * 1.0, device=device).view(layers, *s) for s in shapes)
    views = [*k.unbind(0), *v.unbind(0)]
    if form in ("list", "padded"):
        return list(k.unbind(0)), list(v.unbind(0)), views
    return k, v, views


def check_commit(backend: Any, step: dict[str, Any]) -> None:
    backend.require("commit_kv")
    k, v, views = make_caches(step["form"], step["num_pages"], step["page_size"], step["kv_layout"], backend.device)
    names = ("page_table", "context_lens", "cu_nodes", "accepted_nodes", "num_emitted", "request_order")
    want = ref.commit_kv([c.cpu().numpy() for c in views], *(step[name] for name in names), step["kv_layout"])
    requests = len(step["context_lens"])
    tensors = [None if step[name] is None else ints(step[name], backend.device) for name in names]
    tensors[0] = tensors[0].view(requests, step["columns"])
    tensors[3] = tensors[3].view(requests, step["width"])
    before = [t if t is None else t.clone() for t in tensors]
    caches: tuple[Any, Any] = (k, v)
    if step["form"] == "handle":
        caches = (kv_handle(k, v, kv_layout=step["kv_layout"]), None)
    commit_kv(*caches, *tensors[:5], request_order=tensors[5], kv_layout=step["kv_layout"],
              page_size=step["page_size"], **backend.kwargs)  # fmt: skip
    for got, expected in zip(views, want):
        assert np.array_equal(got.cpu().numpy(), expected)
    for now, then in zip(tensors, before):
        assert now is None or torch.equal(now, then)


test_commit_fuzz, test_commit_fuzz_long = fuzz(steps(), check_commit, 150)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_commit_moves_every_dtype_bitwise(backend: Any, dtype: torch.dtype):
    backend.require("commit_kv")
    raw = torch.randint(0, 256, (3, 4, 2, 16 * dtype.itemsize), dtype=torch.uint8, device=backend.device)
    k, v = raw.clone().view(dtype), raw.flip(0).clone().view(dtype)
    want = ref.commit_kv([k.view(torch.uint8).cpu().numpy(), v.view(torch.uint8).cpu().numpy()],
                         [[2, 0, 1]], [1], [0, 6], [[0, 2, 5]], [3])  # fmt: skip
    args = [ints(x, backend.device) for x in ([[2, 0, 1]], [1], [0, 6], [[0, 2, 5]], [3])]
    commit_kv(k, v, *args, page_size=4, **backend.kwargs)
    assert np.array_equal(k.view(torch.uint8).cpu().numpy(), want[0])
    assert np.array_equal(v.view(torch.uint8).cpu().numpy(), want[1])


@pytest.mark.parametrize("form", ["layers", "padded"])
@pytest.mark.parametrize("path", [[0, 2, 3, 4], [0, 5, 6, 7], [0, 1, 3, 9]], ids=str)
def test_a_commit_larger_than_the_caches(backend: Any, form: str, path: list[int]):
    """12 to 18 MiB of rows: on a CPU the targets are written around the cache (padded heads: the ordinary way)."""
    backend.require("commit_kv")
    if backend.name not in ("cpu", "cuda"):
        pytest.skip(f"outside the sizes of backend {backend.name}")
    requests, page, heads, dim, layers = 64, 16, 8, 128, 24
    shape = (layers, requests, page, heads, dim + (8 if form == "padded" else 0))
    k = torch.randint(-99, 99, shape, device=backend.device).bfloat16()[..., :dim]
    v = k.flip(0)
    want = [t.clone() for t in (k, v)]
    for t in want:  # L = 3: node j lies in row 3 + j of the request's page
        t[:, :, [3 + j for j in range(len(path))]] = t[:, :, [3 + node for node in path]]
    table = torch.arange(requests, dtype=torch.int32, device=backend.device).view(requests, 1)
    args = [ints(x, backend.device) for x in ([3] * requests, [10 * b for b in range(requests + 1)], [path] * requests)]
    commit_kv(k, v, table, *args, ints([len(path)] * requests, backend.device), **backend.kwargs)
    assert torch.equal(k, want[0])
    assert torch.equal(v, want[1])


@pytest.mark.long
def test_commit_addresses_beyond_2_gib(backend: Any):
    """Element offsets above 2^31 - 1: 64-bit products."""
    backend.require("commit_kv")
    pages = 2**31 // (16 * 8 * 128) + 2
    k = torch.zeros(pages, 16, 8, 128, dtype=torch.float8_e5m2, device=backend.device)
    marks = torch.arange(16, dtype=torch.uint8, device=backend.device).view(16, 1, 1)
    k.view(torch.uint8)[-1] = marks
    args = [ints(x, backend.device) for x in ([[pages - 1]], [3], [0, 9], [[0, 4, 8]], [3])]
    commit_kv(k, k[:, :, :0], *args, page_size=16, **backend.kwargs)
    assert k.view(torch.uint8)[-1, :, 0, 0].tolist() == [0, 1, 2, 3, 7, 11, *range(6, 16)]


def test_advance(backend: Any):
    backend.require("advance")
    lens, emitted = ints([5, 0, 7, 2**31 - 2], backend.device), ints([3, 0, -4, 9], backend.device)
    advance(lens, emitted, **backend.kwargs)
    assert lens.tolist() == [8, 0, 7, 2**31 - 1]
    assert emitted.tolist() == [3, 0, -4, 9]
    assert ref.advance([5, 0, 7], [3, 0, -4]) == [8, 0, 7]


@pytest.mark.parametrize("form", ["list", "layers", "interleaved", "padded", "handle"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copy_pages(backend: Any, form: str, layout: str):
    backend.require("copy_pages")
    k, v, views = make_caches(form, 6, 4, layout, backend.device)
    src, dst = [5, 0, -1, 2, 3, 7], [1, 4, 2, -1, 3, 0]
    want = ref.copy_pages([c.cpu().numpy() for c in views], src, dst)
    caches = (kv_handle(k, v, kv_layout=layout), None) if form == "handle" else (k, v)
    copy_pages(*caches, ints(src, backend.device), ints(dst, backend.device), **backend.kwargs)
    for got, expected in zip(views, want):
        assert np.array_equal(got.cpu().numpy(), expected)


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch):
    k = torch.zeros(4, 2, 1, 8)
    args = [ints(x) for x in ([[0]], [0], [0, 1], [[0]], [1])]
    with pytest.raises(ValueError, match=r"^commit_kv: page_size: expected the caches' 2, got 3"):
        commit_kv(k, k, *args, page_size=3)
    with pytest.raises(ValueError, match=r"^commit_kv: kv_layout: expected one of \('NHD', 'HND'\), got 'DHN'"):
        commit_kv(k, k, *args, kv_layout="DHN")
    with pytest.raises(TypeError, match=r"^commit_kv: page_table: expected int32, got int64"):
        commit_kv(k, k, args[0].long(), *args[1:])
    with pytest.raises(ValueError, match=r"^commit_kv: num_emitted: expected shape \[1\], got \[2\]"):
        commit_kv(k, k, *args[:4], ints([1, 1]))
    with pytest.raises(
        ValueError, match=r"^commit_kv: v_caches: expected the same pages in every cache \(4 of 2 rows\)"
    ):
        commit_kv(k, k[:3], *args)
    with pytest.raises(ValueError, match=r"^commit_kv: k_caches: expected a dense last dimension"):
        commit_kv(k.transpose(1, 3), k, *args)
    with pytest.raises(TypeError, match=r"^commit_kv: v_caches: expected a tensor or a list of tensors, got None"):
        commit_kv(k, None, *args)
    with pytest.raises(ValueError, match=r"^kv_handle: v_caches: expected 4 pages of 2 rows, got 3 of 2"):
        kv_handle([k, k], [k, k[:3]])
    monkeypatch.setenv("SPECDEC_CHECK", "1")
    with pytest.raises(ValueError, match=r"^copy_pages: dst: expected distinct pages that are no sources"):
        copy_pages(k, k, ints([0, 1]), ints([1, 2]))


def test_another_layout_beside_a_handle_is_refused():
    caches = torch.zeros(2, 3, 4, 1, 8), torch.zeros(2, 3, 4, 1, 8)
    handle, one = kv_handle(*caches), torch.zeros(1, dtype=torch.int32)
    step = (torch.zeros(1, 2, dtype=torch.int32), one, torch.arange(2, dtype=torch.int32), one[None], one)
    for same in (None, "NHD"):
        commit_kv(handle, None, *step, kv_layout=same)
    with pytest.raises(ValueError, match=r"^commit_kv: kv_layout: expected the handle's 'NHD', or None, got 'HND'"):
        commit_kv(handle, None, *step, kv_layout="HND")
