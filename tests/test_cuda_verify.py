"""verify of the CUDA paths against the CPU op: tokens, paths, flags and log-probabilities, bit for bit.

The CPU op is held to the float64 reference and to the laws elsewhere; with `--long` the CUDA paths run
those suites too.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from tests import cuda_on_cpu, test_verify_sharded
from tests.conftest import Backend
from tests.cuda_paths import place, same
from tests.sampling_helpers import bit_rows, chain, floats, ints, sampling_tensors, tree_tensors
from tests.sampling_requests import Request, random_request

INF, NAN = float("inf"), float("nan")
METHODS = ["rejection", "target_only", "block", "coupled", "typical", "greedy"]


def requests_for(method: str, vocab: int, count: int, seed: int = 1, edits: bool = False) -> list[Request]:
    rng = random.Random(seed)
    requests = [random_request(rng, vocab, rng.randint(1, 7), edits=edits) for _ in range(count)]
    for request in requests if method == "block" else []:
        nodes = len(request.parents)
        request.parents, request.draft_of = chain(nodes - 1), [-1, *range(nodes - 1)]
    return requests


def call_of(requests: list[Request], method: str, dtype: torch.dtype = torch.float32):
    """Arguments and options of one ragged `verify` over the requests."""
    offset, rows = 0, []
    for request in requests:
        rows += [row + offset if row >= 0 else -1 for row in request.draft_of]
        offset += len(request.draft_logits)
    options = dict(method=method, return_logprobs="both")
    B = len(requests)

    def columns(parameters):
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: [getattr(p, name) for p in parameters] for name in names}

    own = dict(
        seed=[r.seed for r in requests], position=[r.position for r in requests], step=[r.step for r in requests]
    )
    if method in ("rejection", "block"):
        options["draft_logits"] = floats(np.concatenate([r.draft_logits for r in requests]), dtype=dtype)
        options["draft_rows"] = ints(rows)
        options["draft_sampling"] = sampling_tensors(B, **columns([r.draft_parameters for r in requests]), **own)
    if requests[0].allowed is not None:
        options["allowed"] = torch.as_tensor(np.concatenate([r.allowed for r in requests]))
        entries = [sorted(row.items()) for r in requests for row in r.bias]
        flat = [entry for row in entries for entry in row]
        cu = ints(np.concatenate([[0], np.cumsum([len(row) for row in entries])]))
        options["bias"] = (cu, ints([token for token, _ in flat]), floats([value for _, value in flat]))
    arguments = [
        floats(np.concatenate([r.logits for r in requests]), dtype=dtype),
        ints([t for r in requests for t in r.token_ids]),
        tree_tensors([list(r.parents) for r in requests]),
        sampling_tensors(B, **columns([r.parameters for r in requests]), **own),
    ]
    return arguments, options


@pytest.mark.parametrize("form", ["eager", "lazy"])
@pytest.mark.parametrize("method", METHODS)
def test_mixed_requests(method: str, form: str, gpu: Backend):
    """Ragged trees (block: chains) of every kind of law, filter and temperature; then with masks and biases."""
    arguments, options = call_of(requests_for(method, 37, 9), method)
    out = same(gpu, "verify", *arguments, form=form, **options)
    assert (out.num_emitted > 1).any()
    arguments, options = call_of(requests_for(method, 37, 4, seed=2, edits=True), method)
    same(gpu, "verify", *arguments, form=form, **options)


@pytest.mark.long
def test_many_mixed_requests(gpu: Backend):
    shapes = ((5, torch.float32), (300, torch.bfloat16), (2100, torch.float16))
    for seed, method, form, (vocab, dtype) in itertools.product(range(4), METHODS, ("eager", "lazy"), shapes):
        arguments, options = call_of(requests_for(method, vocab, 12, seed=seed, edits=seed % 2 == 0), method, dtype)
        same(gpu, "verify", *arguments, form=form, **options)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_batches_of_faults(method: str, gpu: Backend):
    """Odd vocabularies from two ids on; dead, NaN and infinite rows, one-hot laws, greedy and mistaken temperatures."""
    for seed, vocab in enumerate((2, 3, 31, 33, 257)):
        make = test_verify_sharded.reduced if method in ("rejection", "block") and vocab in (33, 257) else None
        arguments = (make or test_verify_sharded.batch)(seed + 50, vocab, method, 3, edits=vocab in (31, 33))
        logits = arguments["target_logits"]
        logits[0] = torch.where(torch.arange(vocab) == vocab - 1, 0.0, -INF)
        first = [arguments.pop(name) for name in ("target_logits", "draft_token_ids", "tree", "sampling")]
        same(gpu, "verify", *first, form=("eager", "lazy")[seed % 2], **arguments)


def test_rows_shared_by_blocks(gpu: Backend):
    """Two splits of the last token's row in half precision; the law of all drafts accepted and of one rejected."""
    for seed in range(2):
        arguments, options = call_of(requests_for("rejection", 2100, 2, seed=seed), "rejection", torch.bfloat16)
        same(gpu, "verify", *arguments, form="eager", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_coins_of_the_caller(dtype: torch.dtype, gpu: Backend):
    for method in ("rejection", "target_only", "block"):
        arguments, options = call_of(requests_for(method, 12, 8, seed=3), method)
        coins = torch.rand(len(arguments[0]), dtype=dtype)
        same(gpu, "verify", *arguments, uniforms=coins, form="lazy", **options)


def test_reduced_draft_vocabulary(gpu: Backend):
    """Draft columns behind d2t, two of them without a target id; the inverse given or made here; stored laws."""
    V, Vd, B = 40, 16, 8
    torch.manual_seed(3)
    ids = torch.randperm(V)[:Vd].sort().values.int()
    ids[[3, 9]] = torch.tensor([V + 5, -2], dtype=torch.int32)
    d2t = ids - torch.arange(Vd, dtype=torch.int32)
    t2d = torch.full((V,), -1, dtype=torch.int32)
    t2d[ids[(ids >= 0) & (ids < V)].long()] = torch.arange(Vd, dtype=torch.int32)[(ids >= 0) & (ids < V)]
    parents = [-1, 0, 0, 1]
    drafts = torch.randn(2 * B, Vd)
    sampling = sampling_tensors(B, temperature=0.9, seed=np.arange(B))
    owners, at = torch.arange(2 * B).int() // 2, torch.arange(2 * B) % 2
    drawn = sk.draft_sample(drafts, 2, sampling, row_requests=owners, row_positions=at, d2t=d2t, vocab_size=V)
    first, second = drawn.token_ids.view(B, 2, 2).unbind(1)
    zero = torch.zeros(B, 1, dtype=torch.int32)
    token_ids = torch.cat([zero, first, second[:, :1]], 1).reshape(-1)
    log_q = torch.cat([zero.float(), drawn.log_probs.view(B, 4)[:, :3]], 1).reshape(-1)
    rows = torch.stack([torch.tensor([-1, 2 * b, 2 * b, 2 * b + 1]) for b in range(B)]).int().reshape(-1)
    arguments = [torch.randn(4 * B, V), token_ids, tree_tensors([parents] * B), sampling]
    options = dict(method="rejection", draft_logits=drafts, draft_rows=rows, d2t=d2t, return_logprobs="raw")
    twins = d2t.clone()
    twins[5] = twins[4] - 1  # two columns of one id: the first counts
    same(gpu, "verify", *arguments, form="lazy", **(options | dict(d2t=twins)))
    for form in ("eager", "lazy"):
        same(gpu, "verify", *arguments, form=form, **options)
        same(gpu, "verify", *arguments, form=form, t2d=t2d, **options)
        same(gpu, "verify", *arguments, form=form, draft_log_probs=log_q, draft_lse=drawn.lse, **options)


def test_faults_in_data(gpu: Backend):
    """NaN, infinities, dead rows, wild ids, twins, siblings of two kinds, unsound trees and offsets, request_order."""
    V, parents = 20, [-1, 0, 0, 1, 1]
    B, n = 10, len(parents)
    torch.manual_seed(7)
    logits = torch.randn(B, n, V)
    logits[0, 0, 3], logits[1, 1], logits[2, 0, [4, 9]], logits[3, 0] = NAN, NAN, INF, -INF
    ids = torch.randint(0, V, (B, n)).int()
    ids[4, 1], ids[4, 2], ids[5, 2], ids[6, 1] = -1, V + 3, ids[5, 1], -7
    rows = torch.tensor([-1, 0, 0, 1, 1]).repeat(B, 1).int()
    rows[7, 2], rows[8, 1] = -1, 99
    tree = tree_tensors([parents] * B)
    links = tree.first_child.clone()
    links[9 * n] = 77
    tree = tree._replace(first_child=links)
    arguments = [logits.view(-1, V), ids.view(-1), tree, sampling_tensors(B, temperature=[1.0, 0.7] * 5)]
    options = dict(draft_logits=torch.randn(2, V), draft_rows=rows.view(-1), return_logprobs="processed")
    for method in ("rejection", "target_only", "coupled", "typical"):
        for form in ("eager", "lazy"):
            only = options if method == "rejection" else dict(return_logprobs="processed")
            out = same(gpu, "verify", *arguments, method=method, form=form, **only)
        assert out.flags[9] & sk.Flag.TREE
    offsets = tree.cu_nodes.clone()
    offsets[4], offsets[7] = -3, 10**6
    arguments[2] = tree._replace(cu_nodes=offsets)
    order = torch.tensor([8, 2, 99, -1, 6, 3, 5], dtype=torch.int32)
    for form in ("eager", "lazy"):
        same(gpu, "verify", *arguments, method="target_only", form=form, request_order=order)


def test_tile_statistics(gpu: Backend):
    """Statistics of a fused output layer, and such that are none of this row."""
    arguments, options = call_of(requests_for("target_only", 4200, 3, seed=5), "target_only")
    stats = sk.tile_stats(arguments[0])
    stats[0] += 1
    for method in ("target_only", "greedy"):
        same(gpu, "verify", *arguments, tile_stats=stats, form="lazy", **(options | dict(method=method)))


def test_one_workspace_for_calls_of_any_size(gpu: Backend):
    """A workspace for the largest call serves smaller ones before and after it; too small a one is refused."""
    gpu.require("verify")
    large, small = (call_of(requests_for("rejection", 12, count, seed=count), "rejection") for count in (9, 2))
    nodes = len(large[0][0])
    workspace = torch.zeros(sk.workspace_size("verify", requests=9, nodes=nodes), dtype=torch.uint8, device=gpu.device)
    for arguments, options in (small, large, small, large):
        same(gpu, "verify", *arguments, form="eager", workspace=workspace, native=dict(workspace=None), **options)
    arguments = [place(value, gpu.device) for value in large[0]]
    options = {name: place(value, gpu.device) for name, value in large[1].items()}
    with pytest.raises(ValueError, match="verify: workspace: expected at least"):
        sk.verify(*arguments, form="eager", workspace=workspace[:256], **options, **gpu.kwargs)


def test_at_most_two_launches(gpu: Backend):
    """Rows and walk, then the last token; the walk alone where it draws nothing, and in the lazy form."""
    gpu.require("verify")
    if gpu.name == "cuda":
        pytest.skip(f"outside the sizes of backend {gpu.name}")  # the runtime counts launches
    library = cuda_on_cpu.suite_library()
    for method, form in itertools.product(METHODS, ("eager", "lazy")):
        arguments, options = call_of(requests_for(method, 37, 3), method)
        before = library.emulated_launch_count()
        sk.verify(*arguments, form=form, **options, **gpu.kwargs)
        launches = library.emulated_launch_count() - before
        assert launches == (1 if form == "lazy" or method in ("greedy", "coupled") else 2), (method, form)


def test_empty_batches(gpu: Backend):
    V = 8
    for parents in ([], [[], [-1], []]):
        tree = tree_tensors(parents)
        nodes, B = len(tree.parents), len(parents)
        arguments = [torch.randn(nodes, V), ints(np.zeros(nodes)), tree, sampling_tensors(B)]
        for form in ("eager", "lazy"):
            same(gpu, "verify", *arguments, method="target_only", form=form, allowed=bit_rows([[1, 2]] * nodes, V))
