"""Nothing but a request's own data decides its tokens and log-probabilities: bit-equal under every rearrangement."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from tests import test_verify_sharded as sharded
from tests.conftest import Backend
from tests.cuda_paths import place
from tests.sampling_helpers import (
    chain,
    floats,
    ints,
    results_alone,  # noqa: F401
    sampling_tensors,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_requests import Request, parameters_of, random_request, run
from tests.test_verify_sharded import ranks  # noqa: F401

METHODS = ["rejection", "target_only", "block", "coupled", "typical", "greedy"]


def some_requests(method: str, vocab: int = 1025, count: int = 9, seed: int = 1) -> list[Request]:
    rng = random.Random(seed)
    requests = [random_request(rng, vocab, rng.randint(1, 7), edits=True) for _ in range(count)]
    if method == "block":
        for request in requests:
            nodes = len(request.parents)
            request.parents, request.draft_of = chain(nodes - 1), [-1, *range(nodes - 1)]
    return requests


def results(out, order=None):
    """Per request everything that `verify` says about it, log-probabilities as bits."""
    found = []
    for b in range(len(out.num_emitted)) if order is None else order:
        count = int(out.num_emitted[b])
        bits = out.logprobs[b, :count].contiguous().view(torch.int32).tolist()
        nodes = out.accepted_nodes[b, :count].tolist()
        found.append((out.output_token_ids[b, :count].tolist(), nodes, int(out.flags[b]), bits))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_permuting_the_batch(method, backend: Backend):
    requests = some_requests(method)
    plain = results(run(backend, requests, method, return_logprobs="both"))
    assert any(len(tokens) > 1 for tokens, *_ in plain)
    for seed in range(3):
        order = random.Random(seed).sample(range(len(requests)), len(requests))
        mixed = results(run(backend, [requests[i] for i in order], method, return_logprobs="both"))
        assert mixed == [plain[i] for i in order]


@pytest.mark.parametrize("method", METHODS)
def test_neighbours_and_solo_runs(method, backend: Backend):
    requests = some_requests(method)
    together = results(run(backend, requests, method, return_logprobs="both"))
    for request, right in zip(requests, together):
        assert results(run(backend, [request], method, return_logprobs="both")) == [right]
    more = results(run(backend, some_requests(method, seed=2) + requests, method, return_logprobs="both"))
    assert more[-len(requests) :] == together


@pytest.mark.parametrize("method", METHODS)
def test_garbage_behind_the_active_rows(method, backend: Backend):
    """Rows behind cu_nodes[B] hold NaN logits and wild ids: legal, and without effect."""
    requests = some_requests(method, vocab=257)
    for request in requests:
        request.allowed = request.bias = None
    plain = results(run(backend, requests, method, return_logprobs="both"))
    extra, vocab = 5, 257
    logits = floats(np.concatenate([*(r.logits for r in requests), np.full((extra, vocab), np.nan)]))
    ids = ints([t for r in requests for t in r.token_ids] + [2**31 - 1] * extra)
    tree = tree_tensors([list(r.parents) for r in requests], backend.device)
    filler = torch.full((extra,), 2**30, dtype=torch.int32, device=backend.device)
    longer = {
        name: torch.cat([getattr(tree, name), filler])
        for name in ("parents", "depths", "positions", "first_child", "next_sibling")
    }
    mask = torch.cat([tree.tree_mask, tree.tree_mask.new_full((extra, tree.tree_mask.shape[1]), -1)])
    tree = tree._replace(tree_mask=mask, **longer)
    offset, rows, options = 0, [], {}
    for request in requests:
        rows += [row + offset if row >= 0 else -1 for row in request.draft_of]
        offset += len(request.draft_logits)
    if method in ("rejection", "block"):
        options["draft_logits"] = floats(np.concatenate([r.draft_logits for r in requests]))
        options["draft_rows"] = ints(rows + [2**30] * extra)
    sampling = parameters_of(backend, requests, [r.parameters for r in requests])
    draft_sampling = parameters_of(backend, requests, [r.draft_parameters for r in requests])
    out = verify(
        backend, logits, ids, tree, sampling, method=method, return_logprobs="both", draft_sampling=draft_sampling,
        **options,
    )  # fmt: skip
    assert results(out) == plain


@pytest.mark.parametrize("method", ["rejection", "block", "target_only"])
@pytest.mark.parametrize("vocab", [37, 9001])
def test_eager_and_lazy_forms(method, vocab, backend: Backend):
    requests = some_requests(method, vocab)
    eager = results(run(backend, requests, method, return_logprobs="both", form="eager"))
    lazy = results(run(backend, requests, method, return_logprobs="both", form="lazy"))
    chosen = results(run(backend, requests, method, return_logprobs="both"))
    assert eager == lazy == chosen


@pytest.mark.parametrize("method", ["rejection", "block", "target_only"])
def test_split_counts(method, backend: Backend):
    """The row of the last token is shared by four blocks, by two or by none, as one, two or five requests run."""
    requests = some_requests(method, vocab=4200, count=5)
    together = results(run(backend, requests, method, return_logprobs="both", form="eager"))
    for count in (1, 2):
        assert results(run(backend, requests[:count], method, return_logprobs="both", form="eager")) == together[:count]


@pytest.mark.parametrize("method", METHODS)
def test_shard_counts(method, backend: Backend, ranks):  # noqa: F811
    """One rank, two and three that hold parts of every row emit what this backend does; faults in the batch too."""
    arguments = sharded.batch(8, 97, method, 3, edits=method in ("coupled", "typical"))
    placed = {name: place(value, backend.device) for name, value in arguments.items()}
    right = place(tuple(sk.verify(**placed, **backend.kwargs)), "cpu")
    if backend.name == "triton_interpret":  # it does not fuse: log-probabilities may differ by a part in 10^7
        right = (*right[:-1], None)
    for world in (1, 2, 3):
        for rank, found in enumerate(sharded.on_shards(ranks(world), arguments)):
            sharded.assert_same(found, right, (method, world, rank))


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["eager", "lazy"])
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_thread_counts(method, form, backend: Backend, restore_threads):
    requests, found = some_requests(method, vocab=20_011), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(results(run(backend, requests, method, return_logprobs="both", form=form)))
    assert all(other == found[0] for other in found)


@pytest.fixture
def limit_isa():
    paths = sorted(Path(sk.__file__).parent.glob("_cpu.*so"))
    if not paths:
        pytest.skip("the CPU library is not built")
    limit = ctypes.CDLL(str(paths[0])).specdec_limit_isa
    yield limit
    limit(4)


@pytest.mark.parametrize("method", METHODS)
def test_instruction_sets(method, backend: Backend, limit_isa):
    """Scalar, AVX2 and AVX-512 code give the same bits: the fixed-point sums and exp are one sequence of operations."""
    if backend.name != "cpu":
        pytest.skip("instruction sets of the CPU library")
    requests, levels, found = some_requests(method, vocab=4099), [], []
    for level in range(5):
        levels.append(limit_isa(level))
        found.append(results(run(backend, requests, method, return_logprobs="both")))
        for dtype in (torch.bfloat16, torch.float16):
            found[-1] += results(run(backend, requests, method, return_logprobs="both", dtype=dtype))
    assert levels[0] == 0
    assert all(other == found[0] for other in found), f"levels {levels}"


def test_instruction_sets_on_far_tails(limit_isa):
    """Siblings of weights down to 2^-200 of the row's largest, some of small words, and filters on the way."""
    R, V = 64, 700
    logits = torch.randn(R, V) * 2 - torch.rand(R, V) * 140
    logits[:, 5] = 3.0
    for filters in ({}, {"top_k": 300}, {"top_p": 0.9}):
        found = []
        for level in range(5):
            limit_isa(level)
            drawn = sk.draft_sample(
                logits, 60, sampling_tensors(R, seed=range(R), **filters), row_requests=torch.arange(R).int(),
                row_positions=torch.arange(R),
            )  # fmt: skip
            found.append(drawn.token_ids)
        assert all(torch.equal(other, found[0]) for other in found), filters
        if not filters:
            assert (found[0] >= 0).all()


def test_request_order_handles_only_those_requests(backend: Backend):
    requests = some_requests("target_only", vocab=129)
    for request in requests:
        request.allowed = request.bias = None
    plain = run(backend, requests, "target_only")
    order = [5, 0, 7]
    some = run(backend, requests, "target_only", request_order=ints(order))
    for b in order:
        assert torch.equal(some.output_token_ids[b], plain.output_token_ids[b])
        assert some.num_emitted[b] == plain.num_emitted[b]


def test_sample_equals_the_bonus_token(backend: Backend):
    """`sample` has the law and the noise of the bonus token: plain decoding and K = 0 verification agree."""
    backend.require("sample")
    logits = torch.randn(200, 333)
    sampling = sampling_tensors(200, backend.device, temperature=0.8, top_k=40, top_p=0.95, position=np.arange(200))
    tree = tree_tensors([[-1]], backend.device, copies=200)
    out = verify(backend, logits, ints(np.zeros(200)), tree, sampling, method="rejection", return_logprobs="processed")
    plain = sk.sample(logits.to(backend.device), sampling, **backend.kwargs)
    assert torch.equal(out.output_token_ids[:, 0], plain.token_ids)
