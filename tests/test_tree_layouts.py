"""Round trips and exact contents of other engines' tree buffers, and the d2t check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from python_ref import tree_layouts as ref
from specdec_kernels import _ops
from specdec_kernels.tree import DraftTree, SGLangTree, build_tree, check_d2t, from_layout, static_tree, to_layout
from tests.fuzz import fuzz


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    nodes = draw(st.sampled_from([1, 4, 8, 9, 16, 17, 31, 32, 33, 40]))
    sizes = draw(st.lists(st.integers(0, nodes), max_size=3))
    trees = [[-1] * (n > 0) + [draw(st.integers(max(0, i - 4), i - 1)) for i in range(1, n)] for n in sizes]
    lens = [draw(st.integers(0, 9)) if tree else 0 for tree in trees]
    return {"trees": trees, "lens": lens, "nodes": nodes}


def build(example: dict[str, Any], device: str) -> DraftTree:
    trees = example["trees"]
    cu = [0]
    for tree in trees:
        cu.append(cu[-1] + len(tree))
    parents = [p for tree in trees for p in tree] + [7]  # garbage behind the batch
    return build_tree(*(ints(x, device) for x in (parents, cu, example["lens"])), max_nodes=example["nodes"])


def same(got: DraftTree, tree: DraftTree) -> None:
    rows = int(tree.cu_nodes[-1])
    assert torch.equal(got.cu_nodes, tree.cu_nodes)
    for name in ("parents", "tree_mask", "depths", "positions", "first_child", "next_sibling"):
        assert torch.equal(getattr(got, name)[:rows], getattr(tree, name)[:rows]), name
    assert torch.equal(got.flags, tree.flags)


def contents(got: Any, want: dict[str, Any]) -> None:
    for name, value in want.items():
        tensor = getattr(got, name)
        tensor = tensor.long() if tensor.dtype in (torch.uint16, torch.uint32) else tensor
        assert tensor.tolist() == value, name


def check_sglang(backend: Any, example: dict[str, Any]) -> None:
    tree = build(example, backend.device)
    nodes, requests = example["nodes"], len(example["trees"])
    # their buffers know no request without a node: it comes back as a root
    whole = {**example, "trees": [t or [-1] for t in example["trees"]]}
    for mode in ("FULL_MASK", "QLEN_ONLY", "QLEN_ONLY_BITPACKING")[: 3 if nodes <= 32 else 2]:
        got = to_layout(tree, "sglang", mask_mode=mode, total_context=sum(example["lens"]) + 2)
        want = ref.sglang(example["trees"], example["lens"], nodes, mode)
        if mode == "FULL_MASK":
            want["tree_mask"] += [False] * (2 * nodes)  # what the bound left over
        if requests:
            contents(got, want)
        wanted = {torch.uint8: nodes <= 8, torch.uint16: 8 < nodes <= 16, torch.uint32: nodes > 16}
        assert mode != "QLEN_ONLY_BITPACKING" or wanted[got.tree_mask.dtype]
        same(from_layout(got), build(whole, backend.device))
        masked = got._replace(retrive_next_token=None, retrive_next_sibling=None)
        same(from_layout(masked, context_lens=ints(example["lens"], backend.device)), tree)


def check_others(backend: Any, example: dict[str, Any]) -> None:
    tree = build(example, backend.device)
    nodes, lens = example["nodes"], ints(example["lens"], backend.device)
    trt = to_layout(tree, "trtllm")
    medusa = to_layout(tree, "medusa")
    if example["trees"]:
        contents(trt, ref.tensorrt(example["trees"], nodes))
        contents(medusa, ref.medusa(example["trees"], nodes, tree.max_depth))
    assert all(t.dtype == torch.int32 for t in trt)
    same(from_layout(trt, context_lens=lens), tree)
    same(from_layout(medusa, context_lens=lens), tree)
    packed, offsets = ref.flashinfer(example["trees"], example["lens"])
    got = to_layout(tree, "flashinfer", total_bytes=len(packed) + 3)
    assert got.packed_mask.tolist() == [*packed, 0, 0, 0]
    assert got.mask_indptr.tolist() == offsets
    same(from_layout(got, context_lens=lens, max_nodes=nodes), tree)


test_sglang_fuzz, test_sglang_fuzz_long = fuzz(batches(), check_sglang, 60)
test_others_fuzz, test_others_fuzz_long = fuzz(batches(), check_others, 60)


def test_the_layout_of_a_small_tree_by_hand():
    """parents [-1, 0, 0, 1, 2], L = 2: every buffer written out."""
    tree = build_tree(ints([-1, 0, 0, 1, 2]), ints([0, 5]), ints([2]), max_nodes=5)
    sglang = to_layout(tree, "sglang", mask_mode="QLEN_ONLY_BITPACKING")
    assert sglang.tree_mask.tolist() == [1, 3, 5, 11, 21]
    assert sglang.retrive_next_token.tolist() == [[1, 3, 4, -1, -1]]
    assert sglang.retrive_next_sibling.tolist() == [[-1, 2, -1, -1, -1]]
    assert sglang.positions.tolist() == [2, 3, 3, 4, 4]
    full = to_layout(tree, "sglang", mask_mode="FULL_MASK", total_context=2).tree_mask.view(5, 7)
    assert full[3].tolist() == [True, True, True, True, False, True, False]
    assert to_layout(tree, "trtllm").position_offsets.tolist() == [[0, 1, 1, 2, 2]]
    paths = to_layout(tree._replace(max_depth=2), "medusa").retrieve_indices
    assert paths[0].tolist() == [[0, 2, 4], [0, 1, 3], *[[-1, -1, -1]] * 3]
    assert to_layout(tree, "flashinfer", total_bytes=5).packed_mask.tolist() == [135, 199, 229, 117, 5]


def test_medusa_paths_of_a_static_tree():
    """Longest and latest paths first, as Medusa's own buffers have them."""
    parents, cu = static_tree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]).repeat(1)
    tree = build_tree(parents, cu, ints([0]), max_nodes=7, max_depth=3)
    paths = to_layout(tree, "medusa").retrieve_indices[0]
    assert paths[:3].tolist() == [[0, 1, 3, 6], [0, 2, 5, -1], [0, 1, 4, -1]]


def test_foreign_links_that_are_no_tree_are_flagged():
    tree = build_tree(ints([-1, 0, 0, 1, 2]), ints([0, 5]), ints([2]), max_nodes=5)
    layout = to_layout(tree, "trtllm")
    lost = layout._replace(retrieve_next_sibling=torch.full((1, 5), -1, dtype=torch.int32))  # node 2 hangs on nothing
    assert from_layout(lost, context_lens=ints([2])).flags.tolist() == [_ops.Flag.TREE]
    loop = layout._replace(retrieve_next_token=ints([[1, 3, 4, 1, -1]]))  # node 3's child is node 1
    assert from_layout(loop, context_lens=ints([2])).flags.tolist() == [_ops.Flag.TREE]


def test_layouts_work_under_fake_tensors():
    """No value is read on the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        tree = build_tree(*tensors, max_nodes=5)
        out: list[Any] = []
        for layout in ("sglang", "trtllm", "medusa", "flashinfer"):
            there = to_layout(tree, layout, mask_mode="FULL_MASK", total_context=9, total_bytes=20)
            back = from_layout(there, context_lens=tensors[2], max_nodes=5)
            out += [t for t in (*there, *back) if isinstance(t, torch.Tensor)]
        return out

    tensors = [ints([-1, 0, 0, 1, 2, -1]), ints([0, 5, 6]), ints([2, 3])]
    with FakeTensorMode() as mode:
        fake = run(*(mode.from_tensor(t) for t in tensors))
    real = run(*tensors)
    assert [(f.shape, f.dtype) for f in fake] == [(r.shape, r.dtype) for r in real]


def test_bad_input_is_named():
    tree = build_tree(ints([-1, 0]), ints([0, 2]), ints([2]), max_nodes=40)
    with pytest.raises(ValueError, match=r"^to_layout: mask_mode: expected at most 32 nodes a request"):
        to_layout(tree, "sglang", mask_mode="QLEN_ONLY_BITPACKING")
    with pytest.raises(TypeError, match=r"^to_layout: total_context: expected the sum of the context lengths"):
        to_layout(tree, "sglang", mask_mode="FULL_MASK")
    with pytest.raises(
        ValueError, match=r"^to_layout: layout: expected sglang, trtllm, medusa or flashinfer, got 'vllm'"
    ):
        to_layout(tree, "vllm")
    with pytest.raises(TypeError, match=r"^from_layout: context_lens: expected int32 \[B\], got None"):
        from_layout(to_layout(tree, "trtllm"))
    with pytest.raises(TypeError, match=r"^from_layout: source: expected what to_layout returns, got DraftTree"):
        from_layout(tree)  # type: ignore[arg-type]


# ---- VT-01: d2t holds offsets; bad maps are refused on load


def test_VT_01_offsets_and_absolute_ids():
    for values, kind in (([0, 1, 3], "offset"), ([0, 2, 5], "absolute")):
        d2t, t2d = check_d2t(torch.tensor(values), draft_vocab_size=3, target_vocab_size=6, kind=kind)
        assert (torch.arange(3) + d2t).tolist() == [0, 2, 5]
        assert t2d.tolist() == [0, -1, 1, -1, -1, 2]
        assert d2t.dtype == t2d.dtype == torch.int32


def test_VT_01_bad_maps_are_refused():
    sizes: dict = {"draft_vocab_size": 3, "target_vocab_size": 6, "kind": "offset"}
    with pytest.raises(ValueError, match=r"^check_d2t: d2t: expected targets in 0..5, got 11 for draft id 2"):
        check_d2t(torch.tensor([0, 1, 9]), **sizes)
    with pytest.raises(ValueError, match=r"^check_d2t: d2t: expected distinct targets, got one for draft ids 0 and 1"):
        check_d2t(torch.tensor([1, 0, 0]), **sizes)
    with pytest.raises(ValueError, match=r"^check_d2t: d2t: expected targets in 0..5, got -1 for draft id 0"):
        check_d2t(torch.tensor([-1, 0, 0]), **sizes)
    with pytest.raises(ValueError, match=r"^check_d2t: d2t: expected integers \[3\], got torch.int64 \[2\]"):
        check_d2t(torch.tensor([0, 1]), **sizes)
    with pytest.raises(ValueError, match=r"^check_d2t: d2t: expected integers \[3\], got torch.float32"):
        check_d2t(torch.tensor([0.0, 1, 3]), **sizes)
    with pytest.raises(ValueError, match=r"^check_d2t: kind: expected 'offset' or 'absolute', got 'auto'"):
        check_d2t(torch.tensor([0, 1, 3]), **sizes | {"kind": "auto"})
    with pytest.raises(TypeError, match="kind"):  # the reading is never guessed
        check_d2t(torch.tensor([0, 1, 3]), draft_vocab_size=3, target_vocab_size=6)  # type: ignore[call-arg]


def test_VT_01_an_absent_map_is_identity_only_for_equal_sizes():
    assert check_d2t(None, draft_vocab_size=6, target_vocab_size=6, kind="offset") == (None, None)
    with pytest.raises(ValueError, match=r"^check_d2t: d2t: expected a map from 3 to 6 ids, got None"):
        check_d2t(None, draft_vocab_size=3, target_vocab_size=6, kind="offset")


def test_sglang_buffers_of_no_nodes():
    none = torch.zeros(3, 0, dtype=torch.int64)
    tree = from_layout(SGLangTree(none[0].bool(), none[0], none, none, none, "QLEN_ONLY"))
    assert tree.cu_nodes.tolist() == [0, 0, 0, 0]
    assert tree.flags.tolist() == [0, 0, 0]
