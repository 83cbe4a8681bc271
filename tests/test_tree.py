"""build_tree, chain_tree and the mask conversions against the reference, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from python_ref import tree as ref
from specdec_kernels import _ops
from specdec_kernels.tree import build_tree, chain_tree, pack_mask, tree_from_mask, unpack_mask
from tests.conftest import poisoned
from tests.fuzz import fuzz

NAMES = ("parents", "depths", "positions", "first_child", "next_sibling", "flags")


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def same_tree(got: Any, want: ref.Tree, max_nodes: int) -> None:
    for name in NAMES:
        assert getattr(got, name).tolist() == getattr(want, name), name
    words = (max_nodes + 31) // 32
    assert got.tree_mask.tolist() == [ref.pack_words(row, words) for row in want.mask]


def random_parents(draw: Any, count: int) -> list[int]:
    """A well-formed tree: now and then chain-like or star-like."""
    style = draw(st.sampled_from(["any", "chain", "star"]))
    low = {"any": lambda i: 0, "chain": lambda i: max(0, i - 2), "star": lambda i: 0}[style]
    high = {"any": lambda i: i - 1, "chain": lambda i: i - 1, "star": lambda i: min(i - 1, 1)}[style]
    return [-1] * (count > 0) + [draw(st.integers(low(i), high(i))) for i in range(1, count)]


@st.composite
def batches(draw: Any, malformed: bool = False) -> dict[str, Any]:
    max_nodes = draw(st.sampled_from([1, 2, 5, 31, 32, 33, 40, 64, 65, 100]))
    requests = draw(st.integers(0, 5))
    parents: list[int] = []
    cu = [0]
    for _ in range(requests):
        count = draw(st.integers(0, max_nodes + (1 if malformed else 0)))
        own = random_parents(draw, count)
        if malformed and count and draw(st.booleans()):
            own[draw(st.integers(0, count - 1))] = draw(
                st.sampled_from([-2, -1, 0, count - 1, count, 2**31 - 1, -(2**31)])
            )
        parents += own
        cu.append(len(parents))
    parents += [draw(st.integers(-5, 5)) for _ in range(draw(st.integers(0, 3)))]  # garbage behind the batch
    lens = [draw(st.integers(0, 40)) for _ in range(requests)]
    max_depth = max_nodes - 1
    if malformed:
        max_depth = draw(st.integers(0, max_nodes))
        lens = [draw(st.sampled_from([length, length, -1, 2**31 - 1])) for length in lens]
        if requests and draw(st.integers(0, 9)) == 0:  # the last request's rows do not exist: nobody else's are touched
            cu[-1] = draw(st.sampled_from([-7, len(parents) + 1, 2**31 - 1]))
    return {"parents": parents, "cu_nodes": cu, "context_lens": lens, "max_nodes": max_nodes, "max_depth": max_depth}


def check_build(backend: Any, example: dict[str, Any]) -> None:
    backend.require("build_tree")
    want = ref.build_tree(**example)
    lists = [ints(example[name], backend.device) for name in ("parents", "cu_nodes", "context_lens")]
    before = [t.clone() for t in lists]
    bounds = {name: example[name] for name in ("max_nodes", "max_depth")}
    got = build_tree(*lists, **bounds, **backend.kwargs)
    valid = example["cu_nodes"][-1] <= len(example["parents"]) and example["cu_nodes"][-1] >= 0
    if valid:
        same_tree(got, want, example["max_nodes"])
    else:  # whose rows the last ones are is unknown: only the sound requests are determined
        assert got.flags.tolist() == want.flags
        rows = example["cu_nodes"][-2]
        for name in NAMES[:-1]:
            assert getattr(got, name)[:rows].tolist() == getattr(want, name)[:rows], name
    assert all(torch.equal(a, b) for a, b in zip(lists, before))


test_build_fuzz, test_build_fuzz_long = fuzz(batches(), check_build, 80)
test_build_malformed_fuzz, test_build_malformed_fuzz_long = fuzz(batches(malformed=True), check_build, 120)


@st.composite
def chains(draw: Any) -> dict[str, Any]:
    requests = draw(st.integers(0, 6))
    max_nodes = draw(st.sampled_from([0, 1, 4, 32, 33, 70]))
    drafts = [draw(st.one_of(st.integers(-1, max(0, max_nodes - 1)), st.integers(-3, 80))) for _ in range(requests)]
    lens = [draw(st.sampled_from([0, 3, 17, 2**31 - 1, -1, 5, 6])) for _ in range(requests)]
    total = draw(st.integers(0, sum(max(0, n + 1) for n in drafts) + 3))
    return {"num_drafts": drafts, "context_lens": lens, "total_nodes": total, "max_nodes": max_nodes}


def check_chain(backend: Any, example: dict[str, Any]) -> None:
    backend.require("chain_tree")
    want, cu_nodes = ref.chain_tree(**example)
    lists = [ints(example[name], backend.device) for name in ("num_drafts", "context_lens")]
    bounds = {name: example[name] for name in ("total_nodes", "max_nodes")}
    got = chain_tree(*lists, **bounds, **backend.kwargs)
    assert got.cu_nodes.tolist() == cu_nodes
    same_tree(got, want, example["max_nodes"])


test_chain_fuzz, test_chain_fuzz_long = fuzz(chains(), check_chain, 120)


@pytest.mark.parametrize("count", [1023, 1024])
def test_largest_trees(backend: Any, count: int, pytestconfig: pytest.Config):
    backend.require("build_tree")
    if backend.name == "triton_ptx" and not pytestconfig.getoption("--long"):
        pytest.skip("long suite: pytest --long")  # twenty seconds of compiling
    generator = torch.Generator().manual_seed(count)
    for parents in (
        [-1, *range(count - 1)],  # a chain
        [-1] + [0] * (count - 1),  # a star
        [-1] + [int(torch.randint(i, (), generator=generator)) for i in range(1, count)],
    ):
        want = ref.build_tree(parents, [0, count], [9], 1024, 1023)
        got = build_tree(
            *(ints(x, backend.device) for x in (parents, [0, count], [9])), max_nodes=1024, **backend.kwargs
        )
        same_tree(got, want, 1024)


def test_outputs_are_overwritten_whole_and_alone(backend: Any):
    """Poisoned outputs: nothing of the poison stays; canaries behind them: nothing else is written."""
    backend.require("build_tree")
    parents, cu, lens = (ints(x, backend.device) for x in ([-1, 0, 0, 9, 5, 5], [0, 3, 4], [7, 2]))
    shapes = [(6,), (6, 2), (6,), (6,), (6,), (6,), (2,)]
    wide = [poisoned(shape[0] + 1, *shape[1:], dtype=torch.int32, device=backend.device) for shape in shapes]
    _ops.call("build_tree", backend.selector, parents.device, parents, cu, lens, 40, 39, *[w[:-1] for w in wide])
    for buffer in wide:
        assert bool((buffer[:-1] != 0x7F7F7F7F).all())
        assert bool((buffer[-1] == 0x7F7F7F7F).all())
    same_tree(
        type("T", (), dict(zip(("parents", "tree_mask", *NAMES[1:]), [w[:-1] for w in wide])))(),
        ref.build_tree(parents.tolist(), cu.tolist(), lens.tolist(), 40, 39), 40,
    )  # fmt: skip


@st.composite
def masks(draw: Any) -> torch.Tensor:
    rows, columns = draw(st.integers(0, 4)), draw(st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 100]))
    return (
        torch.tensor(draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)))
        .bool()
        .view(rows, columns)
    )


def check_pack(backend: Any, mask: torch.Tensor) -> None:
    backend.require("pack_mask")
    backend.require("unpack_mask")
    columns = mask.shape[1]
    words = pack_mask(mask.to(backend.device), **backend.kwargs)
    assert words.tolist() == [
        ref.pack_words(set(torch.nonzero(row).flatten().tolist()), (columns + 31) // 32) for row in mask
    ]
    assert torch.equal(unpack_mask(words, columns, **backend.kwargs).cpu(), mask)
    if columns % 32:  # garbage above the last column is not a column
        words[:, -1:] |= -1 << (columns % 32)
        assert torch.equal(unpack_mask(words, columns, **backend.kwargs).cpu(), mask)


test_pack_fuzz, test_pack_fuzz_long = fuzz(masks(), check_pack, 60)


def test_pack_mask_of_a_wider_tensor(backend: Any):
    backend.require("pack_mask")
    wide = torch.rand(5, 50, device=backend.device) < 0.5
    assert torch.equal(
        pack_mask(wide[:, 3:40], **backend.kwargs), pack_mask(wide[:, 3:40].contiguous(), **backend.kwargs)
    )


def check_from_mask(backend: Any, example: dict[str, Any]) -> None:
    """tree_from_mask inverts build_tree, and a mask that is no tree comes out as parents that build_tree flags."""
    backend.require("tree_from_mask")
    tensors = [ints(example[name], backend.device) for name in ("parents", "cu_nodes", "context_lens")]
    tree = build_tree(*tensors, max_nodes=example["max_nodes"])
    garbage = ((1 << 32) - 1) >> 1  # bits of nodes that do not exist must not matter
    mask = tree.tree_mask.clone()
    counts = [b - a for a, b in zip(example["cu_nodes"], example["cu_nodes"][1:])]
    for row, count in enumerate(c for c in counts for _ in range(c)):
        if count % 32:
            mask[row, count // 32] |= garbage & (-1 << (count % 32))
    got = tree_from_mask(mask, tensors[1], max_nodes=example["max_nodes"], **backend.kwargs)
    assert torch.equal(got, tree.parents)
    sets = [ref.unpack_words(row, 32 * mask.shape[1]) for row in mask.tolist()]
    assert got.tolist() == ref.tree_from_mask(sets, example["cu_nodes"], example["max_nodes"])


test_from_mask_fuzz, test_from_mask_fuzz_long = fuzz(batches(), check_from_mask, 60)


def test_tree_from_a_mask_that_is_no_tree(backend: Any):
    backend.require("tree_from_mask")
    rows = [{0}, {0, 1}, {0, 2}, {1, 2, 3}, {0, 1, 2, 4}, {0, 5}]  # 3 has two branches, so has 4
    mask = ints([ref.pack_words(row, 1) for row in rows], backend.device)
    parents = tree_from_mask(mask, ints([0, 6], backend.device), max_nodes=6, **backend.kwargs)
    assert parents.tolist() == [-1, 0, 0, -1, -1, 0]
    assert parents.tolist() == ref.tree_from_mask(rows, [0, 6], 6)
    tree = build_tree(parents, ints([0, 6], backend.device), ints([3], backend.device), max_nodes=6)
    assert tree.flags.tolist() == [_ops.Flag.TREE]


def test_bad_input_is_named_before_anything_is_written():
    parents, cu, lens = ints([-1, 0]), ints([0, 2]), ints([3])
    with pytest.raises(TypeError, match=r"^build_tree: parents: expected int32, got int64"):
        build_tree(parents.long(), cu, lens, max_nodes=4)
    with pytest.raises(TypeError, match=r"^build_tree: cu_nodes: expected a tensor, got list"):
        build_tree(parents, [0, 2], lens, max_nodes=4)
    with pytest.raises(ValueError, match=r"^build_tree: cu_nodes: expected shape \[2\], got \[3\]"):
        build_tree(parents, ints([0, 1, 2]), lens, max_nodes=4)
    with pytest.raises(ValueError, match=r"^build_tree: max_nodes: expected a value in \[0, 1024\], got 2000"):
        build_tree(parents, cu, lens, max_nodes=2000)
    with pytest.raises(ValueError, match=r"^build_tree: parents: expected a contiguous tensor"):
        build_tree(ints([-1, 5, 0, 5])[::2], cu, lens, max_nodes=4)
    with pytest.raises(ValueError, match=r"^chain_tree: total_nodes: expected a value of at least 0, got -1"):
        chain_tree(ints([1]), lens, total_nodes=-1, max_nodes=4)
    with pytest.raises(ValueError, match=r"^unpack_mask: num_columns: expected a value in \[0, 32\], got 33"):
        unpack_mask(ints([[1]]), 33)
    out = [poisoned(2, dtype=torch.int32) for _ in range(6)]
    with pytest.raises(ValueError, match=r"^build_tree: tree_mask: expected shape \[2, 1\], got \[2\]"):
        _ops.call("build_tree", None, parents.device, parents, cu, lens, 4, 3, out[0], out[1], *out[2:], ints([0]))
    assert all(bool((t == 0x7F7F7F7F).all()) for t in out)


def test_check_mode_raises_instead_of_flagging(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDEC_CHECK", "1")
    with pytest.raises(ValueError, match=r"^build_tree: parents: expected well-formed trees, got request 1: .*TREE"):
        build_tree(ints([-1, 0, -1, 1]), ints([0, 2, 4]), ints([3, 4]), max_nodes=4)
    build_tree(ints([-1, 0]), ints([0, 2]), ints([3]), max_nodes=4)
