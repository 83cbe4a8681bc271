"""expand_tree and rerank_tree: against the reference, ancestor-closed, tie-stable, and lossless for drawn siblings."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from python_ref import dynamic_tree as ref
from specdec_kernels import _ops
from specdec_kernels.tree import build_tree, collect_candidates, expand_tree, rerank_tree
from tests.fuzz import fuzz

INF = math.inf


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def logs(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).log()


@st.composite
def levels(draw: Any) -> dict[str, Any]:
    requests, parents, ranks = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = st.sampled_from([0.0, -0.25, -0.5, -1.0, -INF, math.nan, -3.5])  # many ties
    return {
        "scores": [[draw(value) for _ in range(parents)] for _ in range(requests)],
        "steps": [[[draw(value) for _ in range(ranks)] for _ in range(parents)] for _ in range(requests)],
        "k": draw(st.integers(0, 6)), "shape": (requests, parents, ranks),
    }  # fmt: skip


def check_expand(backend: Any, example: dict[str, Any]) -> None:
    backend.require("expand_tree")
    shape = example["shape"]
    scores = torch.tensor(example["scores"], device=backend.device).float().view(shape[:2])
    steps = torch.tensor(example["steps"], device=backend.device).float().view(shape)
    got = expand_tree(scores, steps, example["k"], **backend.kwargs)
    for b in range(shape[0]):
        sums, best = ref.expand_tree(example["scores"][b], example["steps"][b], example["k"])
        assert got.child_scores[b].tolist() == sums
        assert got.beam[b].tolist() == best
        assert got.beam_scores[b].tolist() == [sums[i] if i >= 0 else -INF for i in best]


test_expand_fuzz, test_expand_fuzz_long = fuzz(levels(), check_expand, 80)


@st.composite
def candidates(draw: Any) -> dict[str, Any]:
    """Batches of candidates with tied scores (probabilities rounded to 1/4), absent ones, and malformed parents."""
    requests = draw(st.integers(0, 4))
    sampled = draw(st.booleans())
    scores, parents, cu = [], [], [0]
    for _ in range(requests):
        count = draw(st.integers(0, 12))
        own, above = [0.0] * min(count, 1), [-1] * min(count, 1)
        for i in range(1, count):
            parent = draw(st.integers(0, i - 1))
            edge = draw(st.sampled_from([0.25, 0.5, 0.75, 1.0, 0.0]))
            own.append(own[parent] + (math.log(edge) if edge else -INF))
            above.append(draw(st.sampled_from([parent] * 12 + [-1, i, 99])) if not sampled else parent)
        if count > 2 and draw(st.integers(0, 3)) == 0:
            own[draw(st.integers(1, count - 1))] = math.nan
        if count > 2 and not sampled and draw(st.booleans()):
            own[draw(st.integers(1, count - 1))] = 0.5  # scores that do not fall along the path
        scores += own
        parents += above
        cu.append(len(scores))
    wanted = [draw(st.integers(-1, 14)) for _ in range(requests)]
    return {"scores": scores, "parents": parents, "cu": cu, "num_nodes": wanted, "sampled": sampled}


def as_float32(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


def check_rerank(backend: Any, example: dict[str, Any]) -> None:
    backend.require("rerank_tree")
    cu, wanted, sampled = example["cu"], example["num_nodes"], example["sampled"]
    args = [torch.tensor(example["scores"], dtype=torch.float32, device=backend.device)]
    args += [ints(example[name], backend.device) for name in ("parents", "cu", "num_nodes")]
    total = sum(max(0, n) for n in wanted) + 2
    got = rerank_tree(*args, total_nodes=total, sampled=sampled, **backend.kwargs)
    offsets = got.cu_nodes.tolist()
    for b, count in enumerate(wanted):
        part = slice(cu[b], cu[b + 1])
        kept, parents = ref.rerank_tree(as_float32(example["scores"])[part], example["parents"][part], count, sampled)
        rows = slice(offsets[b], offsets[b + 1])
        assert got.selected[rows].tolist() == kept
        assert got.parents[rows].tolist() == parents
        own = (args[0][part], args[1][part], ints([0, cu[b + 1] - cu[b]], backend.device), args[3][b : b + 1])
        solo = rerank_tree(*own, total_nodes=max(0, count), sampled=sampled, **backend.kwargs)
        assert solo.selected.tolist() == kept + [-1] * (max(0, count) - len(kept))  # alone as in the batch
    assert got.selected[offsets[-1] :].tolist() == [-1] * (total - offsets[-1])
    assert got.parents[offsets[-1] :].tolist() == [-1] * (total - offsets[-1])
    # closed: what build_tree makes of it is never flagged
    tree = build_tree(got.parents, got.cu_nodes, torch.zeros_like(got.flags), max_nodes=16)
    assert not tree.flags.any()


test_rerank_fuzz, test_rerank_fuzz_long = fuzz(candidates(), check_rerank, 150)


def test_rerank_is_best_first_growth(backend: Any):
    """For falling scores the result is what a best-first search from the root would keep."""
    backend.require("rerank_tree")
    generator = torch.Generator().manual_seed(3)
    scores, parents = [0.0], [-1]
    for i in range(1, 200):
        parent = int(torch.randint(min(i, 40), (), generator=generator))
        parents.append(parent)
        scores.append(scores[parent] - 0.01 - float(torch.rand((), generator=generator)))
    kept = {0}
    while len(kept) < 60:
        kept.add(max((i for i in range(200) if i not in kept and parents[i] in kept), key=lambda i: scores[i]))
    args = (torch.tensor(scores, device=backend.device), *(ints(x, backend.device) for x in (parents, [0, 200], [60])))
    assert rerank_tree(*args, total_nodes=60, **backend.kwargs).selected.tolist() == sorted(kept)


def test_rerank_of_many_candidates(backend: Any):
    """More candidates than a block has threads and shared keys, three requests beside them, the last one cut."""
    backend.require("rerank_tree")
    if backend.name == "triton_interpret":
        pytest.skip(f"outside the sizes of backend {backend.name}")
    flat = lambda lists: list(itertools.chain.from_iterable(lists))  # noqa: E731
    generator = torch.Generator().manual_seed(4)
    counts, wanted = [1300, 1, 40, 300], [300, 5, 40, 290]
    scores, parents = [], []
    for count in counts:
        own, above = [0.0], [-1]
        for i in range(1, count):
            above.append(int(torch.randint(i, (), generator=generator)))
            own.append(own[above[-1]] - round(float(torch.rand((), generator=generator)), 1))  # many ties
        scores.append(as_float32(own))
        parents.append(above)
    cu = [0, *itertools.accumulate(counts)]
    kept = [ref.rerank_tree(s, p, n) for s, p, n in zip(scores, parents, wanted)]
    room = sum(len(selected) for selected, _ in kept) - 30
    kept[3] = ref.rerank_tree(scores[3], parents[3], wanted[3] - 30)
    tensors = [torch.tensor(flat(scores), device=backend.device), ints(flat(parents), backend.device)]
    tensors += [ints(cu, backend.device), ints(wanted, backend.device)]
    got = rerank_tree(*tensors, total_nodes=room, **backend.kwargs)
    assert got.selected.tolist() == flat(selected for selected, _ in kept)
    assert got.parents.tolist() == flat(links for _, links in kept)
    assert got.flags.tolist() == [0, 0, 0, _ops.Flag.INDEX]


def test_rerank_takes_no_workspace_between_words(gpu: Any):
    """The workspace holds 64-bit keys: a slice that begins elsewhere would be a misaligned address on the device."""
    gpu.require("rerank_tree")
    size = _ops.workspace_size("rerank_tree", requests=1, candidates=3)
    workspace = torch.zeros(size + 8, dtype=torch.uint8, device=gpu.device)
    first = -workspace.data_ptr() % 8
    scores = torch.tensor([0.0, -1.0, -2.0], device=gpu.device)
    args = [torch.tensor(x, dtype=torch.int32, device=gpu.device) for x in ([-1, 0, 0], [0, 3], [2])]
    for shift in (1, 4):
        part = workspace[(first + shift) % 8 :][:size]
        with pytest.raises(ValueError, match=r"^rerank_tree: workspace: expected an address that 8 divides"):
            rerank_tree(scores, *args, total_nodes=2, workspace=part, **gpu.kwargs)
    part = workspace[first:][:size]
    assert rerank_tree(scores, *args, total_nodes=2, workspace=part, **gpu.kwargs)[0].tolist() == [0, 1]


def test_rerank_leaves_its_workspace_zeroed(backend: Any):
    """Called twice on one workspace: the same result, and nothing left in it."""
    backend.require("rerank_tree")
    size = _ops.workspace_size("rerank_tree", requests=2, candidates=9)
    workspace = torch.zeros(size, dtype=torch.uint8, device=backend.device)
    scores = torch.tensor([0.0, -1, -2, -1, 0.0, -1, -3, -2, -2], device=backend.device)
    args = [ints(x, backend.device) for x in ([-1, 0, 0, 1, -1, 0, 0, 1, 5], [0, 4, 9], [3, 4])]
    for sampled in (False, False, True):
        got = rerank_tree(scores, *args, total_nodes=6, sampled=sampled, workspace=workspace, **backend.kwargs)
        assert got.selected.tolist() == ([0, 1, 3, 0, 1, 3] if not sampled else [0, 1, 2, 0, 1, 2])
        assert got.flags.tolist() == [0, _ops.Flag.INDEX | _ops.Flag.TREE]
        assert not workspace.any()  # the last block could not tell itself from others otherwise


def test_expand_wider_than_a_block(backend: Any):
    """300 children, most of them tied; a beam wider than what is kept sorted by insertion."""
    backend.require("expand_tree")
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(-3, 1, (1, 12), generator=generator).float()
    steps = torch.randint(-3, 1, (1, 12, 25), generator=generator).float()
    for k in (5, 40):
        got = expand_tree(scores.to(backend.device), steps.to(backend.device), k, **backend.kwargs)
        sums, best = ref.expand_tree(scores[0].tolist(), steps[0].tolist(), k)
        assert got.child_scores[0].tolist() == sums
        assert got.beam[0].tolist() == best
        assert got.beam_scores[0].tolist() == [sums[i] for i in best]


def test_rerank_faults_stay_in_their_request(backend: Any):
    backend.require("rerank_tree")
    scores = torch.tensor([0.0, -1, -2, 0.0, -1, -2], device=backend.device)
    parents = ints([-1, 9, 0, -1, 0, 1], backend.device)
    got = rerank_tree(
        scores, parents, ints([0, 3, 6], backend.device), ints([3, 3], backend.device), total_nodes=6, **backend.kwargs
    )
    assert got.flags.tolist() == [_ops.Flag.TREE, 0]
    assert got.selected.tolist() == [0, 2, 0, 1, 2, -1]
    tight = rerank_tree(
        scores, parents, ints([0, 3, 6], backend.device), ints([3, 3], backend.device), total_nodes=4, **backend.kwargs
    )
    assert tight.flags.tolist() == [_ops.Flag.TREE, _ops.Flag.INDEX]
    assert tight.selected.tolist() == [0, 2, 0, 1]
    wrong = rerank_tree(
        scores, parents, ints([0, 3, 9], backend.device), ints([3, 3], backend.device), total_nodes=6, **backend.kwargs
    )
    assert wrong.flags.tolist() == [_ops.Flag.TREE, _ops.Flag.INDEX]
    assert wrong.selected.tolist() == [0, 2, 0, -1, -1, -1]  # its root remains


@pytest.mark.parametrize("sampled", [False, True])
def test_requests_that_share_candidates_are_refused(sampled: bool):
    """Offsets 0, 5, 3, 15: the third request is sound by itself and begins in the middle of the first one's rows."""
    scores = torch.tensor([0.0, -0.5, -1.2, -0.7, -1.4] * 3)
    parents, cu = ints([-1, 0, 0, 1, 2] * 3), ints([0, 5, 3, 15])
    alone = rerank_tree(scores[:5], parents[:5], ints([0, 5]), ints([4]), total_nodes=4, sampled=sampled)
    for _ in range(20):  # two threads used the same scratch
        out = rerank_tree(scores, parents, cu, ints([4, 4, 4]), total_nodes=12, sampled=sampled)
        assert out.flags.tolist() == [0, _ops.Flag.INDEX, _ops.Flag.INDEX]
        assert out.cu_nodes.tolist() == [0, 4, 5, 6]
        assert torch.equal(out.selected[:4], alone.selected)
        assert torch.equal(out.parents[:4], alone.parents)


def test_levels_line_up(backend: Any):
    """Two levels by hand: candidates, their parents, and the tokens of the kept nodes."""
    backend.require("expand_tree")
    zeros = torch.zeros(2, 1, device=backend.device)
    first = expand_tree(zeros, logs([[[0.6, 0.3]], [[0.2, 0.7]]], backend.device), 2, **backend.kwargs)
    assert first.beam.tolist() == [[0, 1], [1, 0]]
    second_steps = logs([[[0.7, 0.2], [0.9, 0.05]], [[0.5, 0.4], [0.3, 0.1]]], backend.device)
    second = expand_tree(first.beam_scores, second_steps, 2, **backend.kwargs)
    lined = collect_candidates([first, second])
    assert lined.per_request == 7
    assert lined.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2, -1, 0, 0, 2, 2, 1, 1]
    products = torch.tensor([1, 0.6, 0.3, 0.42, 0.12, 0.27, 0.015, 1, 0.2, 0.7, 0.35, 0.28, 0.06, 0.02])
    torch.testing.assert_close(lined.scores.exp().cpu(), products, rtol=1e-5, atol=0)
    tree = rerank_tree(*lined[:3], ints([5, 4], backend.device), total_nodes=9, **backend.kwargs)
    assert tree.selected.tolist() == [0, 1, 2, 3, 5, 0, 2, 3, 4]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, -1, 0, 1, 1]
    tokens = torch.arange(14).view(2, 7) + 100
    assert tree.take(tokens).tolist() == [100, 101, 102, 103, 105, 107, 109, 110, 111]
    assert rerank_tree(*lined[:3], ints([1, 0]), total_nodes=3).take(tokens).tolist() == [100, -1, -1]


# ---- drawn siblings: the emitted law must be the target's, whatever was pruned (exact rationals)

DRAFT = (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10))


def target(prefix: tuple[int, ...]) -> ref.Law:
    shift = sum(prefix) + len(prefix)
    base = (Fraction(2, 10), Fraction(5, 10), Fraction(3, 10))
    return tuple(base[(i + shift) % 3] for i in range(3)) if prefix else base


def pruned_law(num_nodes: int, sampled: bool, depth: int, backend: Any) -> dict[tuple[int, ...], Fraction]:
    """Law of the first two tokens, over every draw of 2 siblings a node, num_nodes kept by rerank_tree."""
    pairs = list(ref.draws(DRAFT, 2))
    outcomes = []
    for root, weight in pairs:
        for below in itertools.product(pairs, repeat=2 if depth == 2 else 0):
            tokens, parents, chance = [-1, *root], [-1, 0, 0], weight
            for node, (own, p) in enumerate(below, 1):
                tokens += own
                parents += [node, node]
                chance *= p
            outcomes.append((tokens, parents, chance))
    scores = []
    for tokens, parents, _ in outcomes:
        own = [0.0]
        for token, parent in zip(tokens[1:], parents[1:]):
            own.append(own[parent] + math.log(DRAFT[token]))
        scores.append(own)
    count, size = len(outcomes), len(scores[0])
    kept = rerank_tree(
        torch.tensor(scores, device=backend.device).float().view(-1),
        ints([o[1] for o in outcomes], backend.device).view(-1),
        torch.arange(count + 1, dtype=torch.int32, device=backend.device) * size,
        torch.full((count,), num_nodes, dtype=torch.int32, device=backend.device),
        total_nodes=count * num_nodes, sampled=sampled, **backend.kwargs,
    )  # fmt: skip
    law: dict[tuple[int, ...], Fraction] = {}
    cu, selected, links = kept.cu_nodes.tolist(), kept.selected.tolist(), kept.parents.tolist()
    for (tokens, _, chance), begin, end in zip(outcomes, cu, cu[1:]):
        own = [tokens[i] for i in selected[begin:end]]
        for text, p in ref.emitted_law(target, DRAFT, own, links[begin:end], 2).items():
            law[text] = law.get(text, Fraction(0)) + chance * p
    return law


def wanted_law() -> dict[tuple[int, ...], Fraction]:
    return {(a, b): target(())[a] * target((a,))[b] for a in range(3) for b in range(3)}


@pytest.mark.parametrize(("num_nodes", "depth"), [*((n, 1) for n in (1, 2, 3)), *((n, 2) for n in range(1, 8))])
def test_pruning_drawn_siblings_is_lossless(backend: Any, num_nodes: int, depth: int):
    backend.require("rerank_tree")
    if depth == 2 and backend.name == "triton_interpret":  # 216 requests
        pytest.skip(f"outside the sizes of backend {backend.name}")
    assert pruned_law(num_nodes, True, depth, backend) == wanted_law()


def test_naive_reranking_of_drawn_siblings_is_biased(backend: Any):
    """The control that must fail: ranking drawn tokens by their own law shifts what is emitted."""
    backend.require("rerank_tree")
    law = pruned_law(2, False, 1, backend)  # of two draws, keep the likelier
    first = [float(sum(law[a, b] for b in range(3))) for a in range(3)]
    assert first == pytest.approx([0.308, 0.384, 0.308], abs=5e-4)
    for num_nodes, depth in ((2, 1), (3, 2), (4, 2), (5, 2)) if backend.name != "triton_interpret" else ((2, 1),):
        law = pruned_law(num_nodes, False, depth, backend)
        distance = sum(abs(law.get(t, Fraction(0)) - p) for t, p in wanted_law().items()) / 2
        assert distance > Fraction(2, 100), (num_nodes, float(distance))


def test_drawn_siblings_are_kept_as_a_prefix(backend: Any):
    """Also where a later sibling is far likelier than the first."""
    backend.require("rerank_tree")
    scores = logs([1.0, 0.01, 0.9, 0.05], backend.device)
    for count, want in ((2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])):
        args = (ints(x, backend.device) for x in ([-1, 0, 0, 0], [0, 4], [count]))
        assert rerank_tree(scores, *args, total_nodes=count, sampled=True, **backend.kwargs).selected.tolist() == want
    ended = torch.tensor([0.0, -1.0, -INF, -0.5], device=backend.device)  # the second draw was not made
    args = (ints(x, backend.device) for x in ([-1, 0, 0, 0], [0, 4], [4]))
    assert rerank_tree(ended, *args, total_nodes=4, sampled=True, **backend.kwargs).selected.tolist() == [0, 1, -1, -1]


def test_bad_input_is_named():
    with pytest.raises(TypeError, match=r"^rerank_tree: scores: expected float32, got float64"):
        rerank_tree(torch.zeros(2).double(), ints([-1, 0]), ints([0, 2]), ints([2]), total_nodes=2)
    with pytest.raises(ValueError, match=r"^rerank_tree: cu_candidates: expected shape \[2\], got \[3\]"):
        rerank_tree(torch.zeros(2), ints([-1, 0]), ints([0, 1, 2]), ints([2]), total_nodes=2)
    with pytest.raises(ValueError, match=r"^expand_tree: child_log_probs: expected shape \[2, 3, \*\]"):
        expand_tree(torch.zeros(2, 3), torch.zeros(2, 4, 5), 2)
    with pytest.raises(ValueError, match=r"^collect_candidates: levels: expected at least one level, got none"):
        collect_candidates([])
