"""TensorRT-LLM's buffers around our verification: its walk as a plain loop, and requests without a valid tree."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from python_ref.tree_layouts import links
from specdec_kernels._ops import Flag
from specdec_kernels.integrations.trtllm import verify_for_trtllm
from specdec_kernels.sampling import Sampling, verify
from specdec_kernels.tree import build_tree

VOCAB = 5


def trees(rng: random.Random, batch: int, nodes: int) -> list[list[int]]:
    return [[-1, *(rng.randrange(max(0, i - 3), i) for i in range(1, nodes))] for _ in range(batch)]


def buffers(parents: list[list[int]], nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = [links(tree, nodes) for tree in parents]
    return torch.tensor([m[0] for m in made]), torch.tensor([m[1] for m in made])


def walk(first: list[int], following: list[int], ids: list[int], says: list[int], steps: int) -> tuple[list, int, list]:
    """Its greedy walk: at each depth the first sibling that is the target's choice at the last accepted node."""
    index, tokens, node = [0], [says[0]], 0
    while len(index) < steps:
        node = first[node]
        while node >= 0 and ids[node] != says[index[-1]]:
            node = following[node]
        if node < 0:
            break
        index.append(node)
        tokens.append(says[node])
    pad = [0] * (steps - len(index))
    return index + pad, len(index) - 1, tokens + pad


@pytest.mark.parametrize("nodes", [1, 2, 7, 33])
def test_greedy_acceptance_is_its_walk(nodes: int):
    rng = random.Random(nodes)
    torch.manual_seed(nodes)
    deepest = 0
    for _ in range(20):
        batch = rng.randrange(1, 4)
        parents = trees(rng, batch, nodes)
        first, following = buffers(parents, nodes)
        ids, logits = torch.randint(0, VOCAB, (batch, nodes)), torch.randn(batch * nodes, VOCAB)
        valid = torch.tensor([rng.random() < 0.8 for _ in range(batch)])
        accepted, found = verify_for_trtllm(
            ids[:, 1:], logits, first.int(), following.int(), valid, nodes, Sampling.of(batch, temperature=0.0),
        )  # fmt: skip
        says = logits.argmax(1).view(batch, nodes).tolist()
        for b in range(batch):
            step = nodes if valid[b] else 1
            index, count, tokens = walk(first[b].tolist(), following[b].tolist(), ids[b].tolist(), says[b], step)
            pad = [0] * (nodes - step)
            assert accepted.accept_index[b].tolist() == index + pad
            assert accepted.accept_token_num[b] == count
            assert accepted.accept_token[b].tolist() == tokens + pad
            deepest = max(deepest, count)
        assert not (found.flags & Flag.TREE).any()
        assert all(buffer.dtype == torch.int64 for buffer in accepted)
    assert deepest >= min(2, nodes - 1)


@pytest.mark.parametrize("method", ["target_only", "rejection"])
def test_sampled_acceptance_is_our_verify_on_the_same_tree(method: str):
    """Same seeds, same tokens: nothing but layouts lies between."""
    parents, nodes, batch = [[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]], 5, 2
    first, following = buffers(parents, nodes)
    torch.manual_seed(3)
    sampling = Sampling.of(batch, temperature=1.0, seed=[4, 5])
    emitted = set()
    for step in range(30):
        sampling = dataclasses.replace(sampling, position=torch.full((batch,), step))
        logits, ids = torch.randn(batch * nodes, VOCAB), torch.randint(0, VOCAB, (batch, nodes))
        laws = torch.randn(batch * nodes, VOCAB) if method == "rejection" else None
        rows = torch.tensor([5 * b + max(p, 0) for b in range(batch) for p in parents[b]], dtype=torch.int32)
        law = {"method": method, "draft_logits": laws, "draft_rows": rows if method == "rejection" else None}
        accepted, found = verify_for_trtllm(
            ids[:, 1:], logits, first, following, torch.tensor([True, True]), 3, sampling, **law
        )
        flat = torch.tensor([p for tree in parents for p in tree], dtype=torch.int32)
        lens = torch.zeros(batch, dtype=torch.int32)
        tree = build_tree(flat, torch.tensor([0, 5, 10], dtype=torch.int32), lens, max_nodes=5, max_depth=2)
        ours = verify(logits, ids.flatten().int(), tree, sampling, **law)
        assert torch.equal(ours.output_token_ids, found.output_token_ids)
        assert torch.equal(accepted.accept_token, ours.output_token_ids.clamp(min=0).long())
        assert torch.equal(accepted.accept_index, ours.accepted_nodes.clamp(min=0).long())
        emitted |= set(ours.num_emitted.tolist())
    assert emitted == {1, 2, 3}


def test_links_that_are_no_tree_flag_their_request_alone():
    first, following = buffers([[-1, 0, 1], [-1, 0, 1]], 3)
    first[0, 2] = 1  # a loop
    logits = torch.eye(VOCAB)[[1, 2, 3, 1, 2, 3]]
    accepted, found = verify_for_trtllm(
        torch.tensor([[1, 2], [1, 2]]), logits, first, following, torch.tensor([True, True]), 3,
        Sampling.of(2, temperature=0.0),
    )  # fmt: skip
    assert found.flags.ne(0).tolist() == [True, False]
    assert accepted.accept_token_num.tolist() == [0, 2]
    assert accepted.accept_token.tolist() == [[1, 0, 0], [1, 2, 3]]


def test_bad_input_is_named():
    first, following = buffers([[-1, 0, 1]], 3)
    valid, sampling = torch.tensor([True]), Sampling.of(1, temperature=0.0)
    with pytest.raises(ValueError, match=r"^verify_for_trtllm: draft_tokens: expected shape \[1, 2\], got \[1, 3\]"):
        verify_for_trtllm(torch.zeros(1, 3).long(), torch.zeros(3, 4), first, following, valid, 3, sampling)
    with pytest.raises(ValueError, match=r"^verify_for_trtllm: target_logits: expected 3 rows, one a node, got shape"):
        verify_for_trtllm(torch.zeros(1, 2).long(), torch.zeros(1, 3, 4), first, following, valid, 3, sampling)
    with pytest.raises(
        ValueError, match=r"^verify_for_trtllm: num_spec_step: expected a depth \+ 1, at least 1, got 0"
    ):
        verify_for_trtllm(torch.zeros(1, 2).long(), torch.zeros(3, 4), first, following, valid, 0, sampling)
