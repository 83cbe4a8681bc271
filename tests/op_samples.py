"""One sample call of every public function that is built: opcheck, fakes, torch.compile and canaries follow from it.

A sample is (callable over tensors only, tensors). `B` changes from call to call, 0 included; `strided` asks for data
tensors that are views of wider ones. test_op_contract.py fails when a built op has no sample here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import specdec_kernels as sk

Sample = tuple[Callable[..., Any], list[torch.Tensor]]
PAGE, PAGES, HEADS_Q, HEADS_KV, DIM, VOCAB, NODES = 4, 12, 4, 2, 64, 40, 5
PARENTS = [-1, 0, 0, 1, 2]


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def view(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    """The same values as a slice of a wider tensor (all dimensions but the last keep their order)."""
    if not strided or tensor.dim() < 2:
        return tensor
    wide = torch.full((*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 8), 7, dtype=tensor.dtype)
    part = wide[..., : tensor.shape[-2], : tensor.shape[-1]]
    part.copy_(tensor)
    return part


def offsets(B: int) -> torch.Tensor:
    return torch.arange(B + 1, dtype=torch.int32) * NODES


def context(B: int) -> torch.Tensor:
    return ints([3 + b for b in range(B)])


def table(B: int) -> torch.Tensor:
    return (torch.arange(B * 4, dtype=torch.int32) % PAGES).view(B, 4)


def caches(strided: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(view(torch.randn(PAGES, PAGE, HEADS_KV, DIM), strided) for _ in range(2))  # type: ignore[return-value]


def tree_tensors(B: int) -> sk.DraftTree:
    return sk.build_tree(ints(PARENTS * B), offsets(B), context(B), max_nodes=NODES)


def sampling(B: int) -> list[torch.Tensor]:
    return [torch.full((B,), 0.8), torch.arange(B), torch.full((B,), 5)]


def _sampling(temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> sk.Sampling:
    return sk.Sampling(temperature=temperature, seed=seed, position=position)


def _build_tree(B: int, strided: bool) -> Sample:
    return (lambda p, cu, L: sk.build_tree(p, cu, L, max_nodes=NODES)), [ints(PARENTS * B), offsets(B), context(B)]


def _chain_tree(B: int, strided: bool) -> Sample:
    counts = ints([b % 4 for b in range(B)])
    return (lambda n, L: sk.chain_tree(n, L, total_nodes=B * 4, max_nodes=4)), [counts, context(B)]


def _tree_attention(B: int, strided: bool) -> Sample:
    q, (k, v) = view(torch.randn(B * NODES, HEADS_Q, DIM), strided), caches(strided)
    mask = tree_tensors(B).tree_mask
    return (
        lambda q, k, v, t, L, cu, m: sk.tree_attention(q, k, v, t, L, cu, m, max_nodes=NODES, return_lse=True),
        [q, k, v, table(B), context(B), offsets(B), mask],
    )


def _plan_tree_attention(B: int, strided: bool) -> Sample:
    shape = dict(num_q_heads=HEADS_Q, num_kv_heads=HEADS_KV, head_dim=64, max_nodes=NODES, num_workers=6)
    return (lambda L, cu: sk.plan_tree_attention(L, cu, **shape)), [context(B), offsets(B)]


def _write_kv(B: int, strided: bool) -> Sample:
    k, v = (view(torch.randn(B * NODES, HEADS_KV, DIM), strided) for _ in range(2))
    slots = torch.arange(B * NODES, dtype=torch.int32) % (PAGES * PAGE)
    return (lambda k, v, kc, vc, s: sk.write_kv(k, v, kc, vc, s, kv_layout="NHD")), [k, v, *caches(strided), slots]


def _slot_mapping(B: int, strided: bool) -> Sample:
    return (
        lambda t, L, cu: sk.slot_mapping(t, L, cu, PAGE, total_nodes=B * NODES),
        [table(B), context(B), offsets(B)],
    )


def _merge_attention(B: int, strided: bool) -> Sample:
    a, b = (view(torch.randn(B * NODES, HEADS_Q, DIM), strided) for _ in range(2))
    la, lb = torch.randn(B * NODES, HEADS_Q), torch.randn(B * NODES, HEADS_Q)
    return sk.merge_attention, [a, la, b, lb]


def _verify(B: int, strided: bool) -> Sample:
    logits = view(torch.randn(B * NODES, VOCAB), strided)
    drafts = torch.arange(B * NODES, dtype=torch.int32) % VOCAB

    def run(logits, drafts, parents, cu, L, t, s, p):
        tree = sk.build_tree(parents, cu, L, max_nodes=NODES)
        return sk.verify(logits, drafts, tree, _sampling(t, s, p), method="target_only")

    return run, [logits, drafts, ints(PARENTS * B), offsets(B), context(B), *sampling(B)]


def _sample(B: int, strided: bool) -> Sample:
    return (lambda x, t, s, p: sk.sample(x, _sampling(t, s, p))), [view(torch.randn(B, VOCAB), strided), *sampling(B)]


def _draft_topk(B: int, strided: bool) -> Sample:
    return (lambda x: sk.draft_topk(x, 3)), [view(torch.randn(B, VOCAB), strided)]


def _commit_kv(B: int, strided: bool) -> Sample:
    path = ints([[0, 2, 4, -1, -1]] * B).view(B, NODES)
    emitted = ints([3] * B)
    return (
        lambda kc, vc, t, L, cu, path, n: sk.commit_kv([kc], [vc], t, L, cu, path, n, page_size=PAGE),
        [*caches(strided), table(B), context(B), offsets(B), path, emitted],
    )


def _advance(B: int, strided: bool) -> Sample:
    return sk.advance, [context(B), ints([1] * B)]


def _plan_buckets(B: int, strided: bool) -> Sample:
    return (lambda n: sk.plan_buckets(n, [2, 4, 8])), [ints([1 + b % 7 for b in range(B)])]


def _pack_rows(B: int, strided: bool) -> Sample:
    return (
        lambda x, cu: sk.pack_rows(x, cu, total=B * NODES),
        [view(torch.randn(B, NODES, 6), strided), offsets(B)],
    )


def _unpack_rows(B: int, strided: bool) -> Sample:
    return (
        lambda x, cu: sk.unpack_rows(x, cu, max_rows=NODES),
        [view(torch.randn(B * NODES, 6), strided), offsets(B)],
    )


def _padding_stats(B: int, strided: bool) -> Sample:
    return (
        lambda n: sk.padding_stats(sk.plan_buckets(n, [2, 4, 8]), group_size=4),
        [ints([1 + b % 7 for b in range(B)])],
    )


def _expand_tree(B: int, strided: bool) -> Sample:
    return (
        lambda scores, steps: sk.expand_tree(scores, steps, 3),
        [view(-torch.rand(B, 2), strided), view(-torch.rand(B, 2, 4), strided)],
    )


def _rerank_tree(B: int, strided: bool) -> Sample:
    scores = torch.tensor([0.0, -0.5, -1.2, -0.7, -1.4] * B)
    return (
        lambda s, p, cu, n: sk.rerank_tree(s, p, cu, n, total_nodes=4 * B, sampled=True),
        [scores, ints(PARENTS * B), offsets(B), ints([4] * B)],
    )


def _pack_mask(B: int, strided: bool) -> Sample:
    return sk.pack_mask, [view(torch.rand(B, 40) < 0.5, strided)]


def _unpack_mask(B: int, strided: bool) -> Sample:
    return (lambda words: sk.unpack_mask(words, 37)), [torch.randint(-(2**31), 2**31 - 1, (B, 2), dtype=torch.int32)]


def _tree_from_mask(B: int, strided: bool) -> Sample:
    mask = ints([[1], [3], [5], [11], [21]] * B).view(B * NODES, 1)
    return (lambda m, cu: sk.tree_from_mask(m, cu, max_nodes=NODES)), [mask, offsets(B)]


class _Outcome(NamedTuple):
    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    accepted_nodes: torch.Tensor


def outcome(B: int) -> list[torch.Tensor]:
    return [
        ints([[7, 8, 9, -1]] * B).view(B, 4),
        ints([3] * B),
        ints([[0, 2, 4, -1]] * B).view(B, 4),
    ]


def _truncate(B: int, strided: bool) -> Sample:
    return (
        lambda t, n, a, limit: sk.truncate(_Outcome(t, n, a), limit),
        [*outcome(B), ints([b % 4 for b in range(B)])],
    )


def _gather_accepted(B: int, strided: bool) -> Sample:
    return (
        lambda x, cu, a, n: sk.gather_accepted(x, cu, a, n, total=B * 4),
        [view(torch.randn(B * NODES, 6), strided), offsets(B), *outcome(B)[:0:-1]],
    )


def _prepare_next(B: int, strided: bool) -> Sample:
    return (
        lambda t, n, a, L, table: sk.prepare_next(_Outcome(t, n, a), L, table, page_size=PAGE, total=B * 4),
        [*outcome(B), context(B), table(B)],
    )


def _copy_pages(B: int, strided: bool) -> Sample:
    return (
        lambda k, v, src, dst: sk.copy_pages([k], [v], src, dst),
        [*caches(strided), torch.arange(B, dtype=torch.int32), torch.arange(B, dtype=torch.int32) + 6],
    )


def _draft_sample(B: int, strided: bool) -> Sample:
    def run(logits, rows, t, s, p):
        return sk.draft_sample(logits, 3, _sampling(t, s, p), row_requests=rows, row_positions=p)

    return run, [view(torch.randn(B, VOCAB), strided), torch.arange(B, dtype=torch.int32), *sampling(B)]


def _row_stats(B: int, strided: bool) -> Sample:
    return (lambda x, t: sk.row_stats(x, temperature=t)), [view(torch.randn(B, VOCAB), strided), torch.full((B,), 0.7)]


def _filter_rows(B: int, strided: bool) -> Sample:
    return (
        lambda x, t, s, p: sk.filter_rows(x, _sampling(t, s, p)),
        [view(torch.randn(B, VOCAB), strided), *sampling(B)],
    )


def _residual_log_weights(B: int, strided: bool) -> Sample:
    p, q = (view(torch.randn(B, VOCAB), strided) for _ in range(2))
    return sk.residual_log_weights, [p, q, torch.zeros(B)]


def _verify_probs(B: int, strided: bool) -> Sample:
    probs = view(torch.randn(B * NODES, VOCAB).softmax(-1), strided)
    drafts = torch.arange(B * NODES, dtype=torch.int32) % VOCAB

    def run(probs, drafts, parents, cu, L, u, final):
        tree = sk.build_tree(parents, cu, L, max_nodes=NODES)
        return sk.verify_probs(probs, drafts, tree, u, final, method="target_only")

    coins = [torch.rand(B * NODES), torch.rand(B)]
    return run, [probs, drafts, ints(PARENTS * B), offsets(B), context(B), *coins]


SAMPLES: dict[str, Callable[[int, bool], Sample]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_")
    and callable(function)
    and name not in ("_sampling", "_Outcome")
    and not name.startswith("__")
}
