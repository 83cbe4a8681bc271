"""Hopper's asynchronous units: path A against path B and torch, and the reports on misuse of each of them."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.library import EmulationError, Library

pytestmark = pytest.mark.skipif(build.missing() is not None or build.nvcc() is None, reason="no CUDA toolkit")

COPIES = ("bulk", "async", "stores")
FAULTS = ("none", "no_proxy_fence", "early_release", "no_wait", "no_wgmma_fence", "short_expectation", "unwaited",
          "unreleased")  # fmt: skip
TILES = 5  # more than stages plus one


@pytest.fixture(scope="module")
def library() -> Library:
    source = build.HERE / "kernels" / "hopper.cu"
    return Library(build.emulated_library([source], "specdec_hopper", "race", [build.Ptx(source, "90a")]))


def swizzled(panels: torch.Tensor) -> torch.Tensor:
    """[..., 64, 64] panels in the 128-byte swizzle: chunk c of row r at c ^ (r % 8)."""
    chunks = panels.view(*panels.shape[:-1], 8, 8)
    rows = torch.arange(64)[:, None]
    return chunks[..., rows, torch.arange(8)[None] ^ (rows % 8), :].reshape(panels.shape).contiguous()


def run(
    library: Library, columns: int = 64, dtype: torch.dtype = torch.bfloat16, transposed: bool = False,
    registers: bool = False, copy: str = "bulk", fault: str = "none",
    out: torch.Tensor | None = None, **config: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(what the kernel computed, what it should have)."""
    generator = torch.Generator().manual_seed(columns)
    a = torch.randn(TILES, 64, 64, generator=generator).to(dtype)
    b = torch.randn(TILES, columns // 64, 64, 64, generator=generator).to(dtype)
    left = a.double().mT if transposed and not registers else a.double()
    if transposed:  # panels of k rows, beside each other
        right = b.double().transpose(1, 2).reshape(TILES, 64, columns)
    else:
        right = b.double().reshape(TILES, columns, 64).mT
    given = [swizzled(x) if copy == "bulk" else x for x in (a, b)]
    out = torch.full((64, columns), float("nan")) if out is None else out
    named = [("a", given[0], False), ("b", given[1], False), ("out", out, True)]
    with library.configured(**config), library.tensors(named):
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*given, out)]
        numbers = (
            TILES,
            columns,
            dtype == torch.bfloat16,
            transposed,
            registers,
            COPIES.index(copy),
            FAULTS.index(fault),
        )
        library.run_hopper(*pointers, *map(int, numbers))
    return out, (left @ right).sum(0).float()


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_paths_equal_each_other_and_the_product(library: Library, columns: int, dtype: torch.dtype):
    for transposed, registers, copy in itertools.product((False, True), (False, True), COPIES):
        results = []
        for path in ("source", "ptx"):
            out, want = run(library, columns, dtype, transposed, registers, copy, path=path)
            assert torch.allclose(out, want, atol=1e-3, rtol=1e-4), (transposed, registers, copy, path)
            results.append(out)
        assert torch.equal(*results), (transposed, registers, copy)


@pytest.mark.parametrize("path", ["source", "ptx"])
@pytest.mark.parametrize("schedule", ["reverse", "random", "priority"])
def test_no_report_on_any_schedule(library: Library, schedule: str, path: str):
    expected, _ = run(library)
    for seed, copy in itertools.product(range(3), COPIES):
        config = dict(path=path, schedule=schedule, seed=seed, landing="random", preempt=200)
        assert torch.equal(run(library, copy=copy, **config)[0], expected), (seed, copy)


@pytest.mark.parametrize("path", ["source", "ptx"])
@pytest.mark.parametrize(
    ("fault", "copy", "says"),
    [
        ("no_proxy_fence", "async", r"wgmma operand was written without fence\.proxy\.async"),
        ("no_proxy_fence", "stores", r"wgmma operand was written without fence\.proxy\.async"),
        ("early_release", "bulk", r"write to a wgmma operand in flight|write-after-read race on shared"),
        ("early_release", "async", r"write to a wgmma operand in flight|write-after-read race on shared"),
        ("no_wait", "bulk", r"never written|copy in flight|race on a wgmma operand"),
        ("no_wait", "stores", r"never written|race on a wgmma operand"),
        ("no_wgmma_fence", "bulk", r"wgmma without wgmma\.fence"),
        ("short_expectation", "bulk", r"race on a wgmma operand|copy in flight"),
        ("unwaited", "bulk", r"products that were never waited for"),
        ("unreleased", "bulk", r"deadlock: no thread can run; .* waits at .*hopper\.cu:\d+"),
    ],
)
def test_misuse_is_reported(library: Library, fault: str, copy: str, says: str, path: str):
    with pytest.raises(EmulationError, match=says):
        run(library, fault=fault, copy=copy, path=path)


def test_accumulators_hold_nothing_before_the_wait(library: Library):
    """Path A delivers products at the wait: a kernel that never waits stores NaN (on path B only the report tells)."""
    out = torch.zeros(64, 64)
    with pytest.raises(EmulationError):
        run(library, fault="unwaited", out=out)
    assert out.isnan().all()


PROMISES = ("kept", "own_wait", "met", "early_read", "neighbour", "other_barrier", "other_phase", "greedy")


def run_promises(library: Library, way: str, **config: object) -> None:
    """Copies promised to mbarriers (kernels/hopper.cu says who waits for what); checks what the readers have stored."""
    source = torch.arange(2 * 128 * 4, dtype=torch.int32)
    out = torch.full((3, *source.shape), -1, dtype=torch.int32)
    with library.configured(**config), library.tensors([("source", source, False), ("out", out, True)]):
        library.run_promises(*(ctypes.c_void_p(t.data_ptr()) for t in (source, out)), PROMISES.index(way))
    for group in range(1 if way == "kept" else 0, 3):
        assert torch.equal(out[group], source), group


@pytest.mark.parametrize("path", ["source", "ptx"])
@pytest.mark.parametrize("way", ["kept", "own_wait", "met"])
def test_a_promised_copy_may_be_waited_for_twice(library: Library, way: str, path: str):
    """By those the mbarrier tells, and by the thread that made it, for itself and for whom it meets later."""
    for schedule, landing, seed in itertools.product(("random", "priority"), ("early", "late", "random"), range(3)):
        run_promises(library, way, path=path, schedule=schedule, landing=landing, seed=seed, preempt=5)


@pytest.mark.parametrize("path", ["source", "ptx"])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("early_read", r"read of a cp\.async destination before its wait"),
        ("neighbour", r"read-after-write race on shared|before its wait"),
        ("other_barrier", r"read-after-write race on shared|before its wait"),
        ("other_phase", r"read-after-write race on shared|before its wait|uninitialised shared|deadlock"),
        ("greedy", r"deadlock: no thread can run; .* waits at .*hopper\.cu(h)?:\d+"),
    ],
)
def test_a_broken_promise_is_reported(library: Library, way: str, says: str, path: str):
    """Whatever the schedule: also where the copies have landed long ago, because somebody else has waited for them."""
    for schedule, landing, seed in itertools.product(("random", "sequential"), ("early", "late"), range(2)):
        with pytest.raises(EmulationError, match=says):
            run_promises(library, way, path=path, schedule=schedule, landing=landing, seed=seed, preempt=5)


# A tensor map's size, stride (bytes), box. The first lies as keys of attention do (docs/attention.md): strides that do
# not nest, the last one in units smaller than a row.
KEYS = (64, 2, 4, 8, 20), (256, 16 * 256, 2 * 256, 128), (64, 2, 4, 8, 1)
PLAIN = (128, 3, 5, 4, 3), (256, 768, 3840, 15360), (64, 2, 2, 4, 2)
MISUSES = ("none", "short_announcement", "long_announcement", "no_proxy_fence", "unwaited", "misaligned", "no_map")


@pytest.fixture(scope="module")
def copies() -> Library:
    source = build.HERE / "kernels" / "tensor_copy.cu"
    return Library(build.emulated_library([source], "specdec_tensor_copy", "race", [build.Ptx(source, "90a")]))


def run_tensor_copy(
    library: Library, shape: tuple[tuple[int, ...], ...], first: tuple[int, ...], misuse: str = "none",
    skip: int = 0, length: int = 46080 // 2, **config: object,
) -> tuple[int, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(1 if the encoder refused, the box as copied, as it should be). `skip`: elements before the tensor's first."""
    size, stride, box = shape
    source = torch.arange(1, 1 + skip + length, dtype=torch.int16)
    given = source[skip:]
    ranges = [torch.arange(n) for n in box[:0:-1]]  # outermost first, so that rows come in the order of a copy
    at = [i + f for i, f in zip(torch.meshgrid(*ranges, indexing="ij"), first[:0:-1])]
    inside = torch.stack([(i >= 0) & (i < n) for i, n in zip(at, size[:0:-1])]).all(0).flatten()
    row = sum(i * s // 2 for i, s in zip(at, stride[::-1])).flatten()
    column = torch.arange(64) + first[0]
    valid = inside[:, None] & ((column >= 0) & (column < size[0]))[None]
    places = torch.where(valid, row[:, None] + column, 0)
    want = torch.where(valid, given[places.clamp(0, length - 1)], 0)
    out = torch.full((len(row), 64), -1, dtype=torch.int16)
    numbers = (ctypes.c_int64 * 19)(*size, *stride, *box, *first)
    with library.configured(**config), library.tensors([("source", source, False), ("out", out, True)]):
        pointers = (ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()), numbers)
        refused = library.run_tensor_copy(*pointers, MISUSES.index(misuse))
    return refused, out, want


@pytest.mark.parametrize("path", ["source", "ptx"])
@pytest.mark.parametrize(
    ("shape", "first"),
    [
        (KEYS, (0, 0, 0, 0, 0)), (KEYS, (0, 0, 0, 0, 19)), (KEYS, (0, 0, 0, 0, 20)), (PLAIN, (64, 1, 2, 0, 1)),
        (PLAIN, (-32, -1, 4, 2, 2)), (PLAIN, (96, 2, -1, -2, -1)), (PLAIN, (0, 0, 0, 0, -2)),
    ],
)  # fmt: skip
def test_a_tensor_copy_brings_its_box(copies: Library, shape, first, path: str):
    """Inside, at the edges (zeros), and all outside; landing when it likes."""
    before = copies.emulated_tensor_copies()
    for landing in ("late", "early", "random"):
        refused, out, want = run_tensor_copy(copies, shape, first, path=path, landing=landing, schedule="random")
        assert not refused
        assert torch.equal(out, want), landing
    assert copies.emulated_tensor_copies() - before == 3


@pytest.mark.parametrize("path", ["source", "ptx"])
@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        ("short_announcement", r"deadlock: no thread can run; .* waits at .*tensor_copy\.cu:\d+"),
        ("long_announcement", r"deadlock: no thread can run; .* waits at .*tensor_copy\.cu:\d+"),
        ("no_proxy_fence", r"bulk copy over bytes that were written without fence\.proxy\.async"),
        ("unwaited", r"destination before its wait|never waited for|race on shared"),
        ("misaligned", r"the swizzle needs an address that is a multiple of 1024"),
        ("no_map", r"tensor map: never encoded"),
    ],
)
def test_misuse_of_a_tensor_copy_is_reported(copies: Library, misuse: str, says: str, path: str):
    with pytest.raises(EmulationError, match=says):
        run_tensor_copy(copies, KEYS, (0,) * 5, misuse, path=path)


def test_a_map_that_reaches_past_its_tensor_is_reported(copies: Library):
    with pytest.raises(EmulationError, match=r"global read of 16 bytes outside every tensor"):
        run_tensor_copy(copies, KEYS, (0, 0, 0, 0, 19), length=8192)


@pytest.mark.parametrize(
    ("part", "index", "value", "skip"),
    [
        ("size", 4, 0, 0), ("size", 4, 2**32 + 1, 0), ("stride", 3, 136, 0), ("stride", 0, 2**40, 0),
        ("box", 3, 257, 0), ("box", 0, 128, 0), ("box", 1, 0, 0), ("size", 0, 64, 4),
    ],
)  # fmt: skip
def test_the_encoder_refuses_what_the_driver_does(copies: Library, part: str, index: int, value: int, skip: int):
    """Limits of cuTensorMapEncodeTiled; the last row is an address that is no multiple of 16 bytes."""
    shape = {name: list(numbers) for name, numbers in zip(("size", "stride", "box"), KEYS)}
    shape[part][index] = value
    # The encoder comes before any launch, so a wild box or size is never copied.
    numbers = (ctypes.c_int64 * 19)(*shape["size"], *shape["stride"], *shape["box"], *[0] * 5)
    source = torch.zeros(64, dtype=torch.int16)[skip:]
    launches = copies.emulated_launch_count()
    assert copies.run_tensor_copy(ctypes.c_void_p(source.data_ptr()), None, numbers, 0) == 1
    assert copies.emulated_launch_count() == launches
