"""draft_sample and verify_probs of the CUDA paths against the CPU ops: equal ids, laws, paths and flags."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sk
from tests.conftest import Backend
from tests.cuda_paths import same
from tests.sampling_helpers import chain, ints, sampling_tensors, tree_tensors

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("coupled", [False, True])
def test_siblings_in_draw_order(coupled: bool, gpu: Backend):
    """Filters, greedy and dead rows, rows of nobody, more siblings than the row has tokens; a reduced vocabulary."""
    R, V = 8, 300
    torch.manual_seed(11)
    logits = torch.randn(R, V) * 2
    logits[3], logits[4, 2:], logits[5, 7] = -INF, -INF, NAN
    sampling = sampling_tensors(
        4, temperature=[1.0, 0.0, 0.7, 3.0], top_k=[0, 0, 4, 0], top_p=[1.0, 1.0, 1.0, 0.6], seed=[5, 6, -7, 2**40],
        step=[0, 1, 2, 3],
    )  # fmt: skip
    owners = ints([0, 1, 2, 0, 0, 3, 4, 2])
    positions = torch.arange(R) * 2**33
    options = dict(row_requests=owners, row_positions=positions, row_paths=torch.arange(R).int() * 7, coupled=coupled)
    same(gpu, "draft_sample", logits, 5, sampling, **options)
    same(gpu, "draft_sample", logits[:, 1:200].half(), 2, sampling, vocab_size=190, **options)
    d2t = torch.randint(-3, 40, (V,), dtype=torch.int32)
    same(gpu, "draft_sample", logits, 3, sampling, d2t=d2t, vocab_size=310, **options)


def test_siblings_from_the_far_tail(gpu: Backend):
    """Weights of 2^-90 to 2^-130 of the first one's: no float comparison may lose them."""
    logits = torch.full((6, 40), -INF)
    logits[:, 3], logits[:, 10:22] = 0.0, torch.linspace(-62, -91, 12)
    options = dict(row_requests=torch.arange(6).int(), row_positions=torch.arange(6))
    drawn = same(gpu, "draft_sample", logits, 9, sampling_tensors(6, seed=range(6)), **options)
    assert (drawn.token_ids >= 0).all()


@pytest.mark.parametrize("method", ["target_only", "rejection"])
def test_probabilities(method: str, gpu: Backend):
    """Chains and trees, dyadic and other laws, faults; coins on both sides."""
    B, V = 12, 40
    torch.manual_seed(2)
    parents = [-1, 0, 0, 1, 1, 3] if method == "target_only" else chain(4)
    n = len(parents)
    probs = (torch.randn(B * n, V) * 2).softmax(-1)
    probs[5], probs[7, :20], probs[9, 3] = 0.0, 0.0, NAN
    probs[12:24] = torch.nn.functional.one_hot(torch.arange(12) % 4, V).float()
    drafts = (probs + 0.05).nan_to_num(0.5) / 3
    ids = torch.multinomial(drafts, 1)[:, 0].int()
    ids[1], ids[n + 1], ids[2 * n + 2] = -1, V + 4, -9
    tree = tree_tensors([parents] * B)
    links = tree.next_sibling.clone()
    links[3 * n + 1] = 1
    arguments = [probs, ids, tree._replace(next_sibling=links), torch.rand(B * n), torch.rand(B)]
    for draft in [None, drafts] if method == "rejection" else [None]:
        same(gpu, "verify_probs", *arguments, method=method, draft_probs=draft)
    wide = torch.rand(2, 9001).softmax(-1)
    single = tree_tensors([[-1], [-1]])
    for u in (0.0, 0.3, 0.999999):
        same(gpu, "verify_probs", wide, ints([0, 0]), single, torch.rand(2), torch.full((2,), u), method=method)


def test_offsets_outside_the_batch(gpu: Backend):
    tree = tree_tensors([chain(1)] * 3)
    tree = tree._replace(cu_nodes=ints([0, 99, 4, 6]))
    probs = torch.full((6, 4), 0.25)
    out = same(
        gpu, "verify_probs", probs, ints([0, 1] * 3), tree, torch.rand(6), torch.rand(3), method="target_only"
    )  # fmt: skip
    assert out.flags.tolist()[:2] == [sk.Flag.INDEX] * 2
