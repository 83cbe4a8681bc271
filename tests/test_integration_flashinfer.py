"""FlashInfer's signatures against float64 loops."""

from __future__ import annotations

import math

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels.integrations import flashinfer


def laws(batch: int, drafts: int, vocab: int, seed: int = 0):
    """(draft_probs, draft ids drawn from them, target_probs); some have zeros, the last draft's law is the target's."""
    rng = torch.Generator().manual_seed(seed)
    draft = (torch.randn(batch, drafts, vocab, generator=rng) * 1.5).softmax(-1)
    target = (torch.randn(batch, drafts + 1, vocab, generator=rng) * 1.5).softmax(-1)
    target[::3, :, ::2] = 0
    target /= target.sum(-1, keepdim=True)
    draft[:, -1] = target[:, drafts - 1]
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=rng).view(batch, drafts).int()
    return draft, ids, target


def loop(draft, ids, target, coins, final):
    """Leviathan's rule in float64, by inverse CDF: (tokens, accepted drafts)."""
    draft, target = draft.double(), target.double()
    tokens, k = [], 0
    while k < len(ids) and float(coins[k]) * draft[k, ids[k]] < target[k, ids[k]]:
        tokens.append(int(ids[k]))
        k += 1
    left = target[k] if k == len(ids) else (target[k] - draft[k]).clamp(min=0)
    cumulative = left.cumsum(0)
    return [*tokens, int((cumulative > float(final) * cumulative[-1]).int().argmax())], k


def test_chains_are_the_loops():
    batch, drafts, vocab = 200, 3, 9
    draft, ids, target = laws(batch, drafts, vocab)
    rng = torch.Generator().manual_seed(3)
    coins, final = torch.rand(batch, drafts, generator=rng), torch.rand(batch, generator=rng)
    found = flashinfer.verify_chains(draft, ids, target, coins, final)
    kinds = set()
    for b in range(batch):
        tokens, accepted = loop(draft[b], ids[b], target[b], coins[b], final[b])
        kinds.add(accepted)
        assert found.output_token_ids[b].tolist() == tokens + [-1] * (drafts - accepted)
    assert {0, 1, 3} <= kinds
    assert not found.flags.any()


def test_counters_add_up_and_a_seed_repeats():
    draft, ids, target = laws(64, 4, 12, seed=1)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(draft, ids, target, seed=7, offset=2)
    assert tokens.dtype == accepted.dtype == emitted.dtype == torch.int32
    assert torch.equal((tokens >= 0).sum(1), emitted + 1)
    assert bool((accepted >= emitted).all())
    assert bool((accepted > emitted).any())  # a draft behind a refused one may pass by itself
    counts = torch.full((64,), 5, dtype=torch.int32), torch.full((64,), 3, dtype=torch.int32)
    again = flashinfer.chain_speculative_sampling(draft, ids, target, *counts, seed=torch.tensor(7), offset=2)
    assert torch.equal(again[0], tokens)
    assert again[1] is counts[0]
    assert torch.equal(counts[0], accepted + 5)
    assert torch.equal(counts[1], emitted + 3)
    other, _, _ = flashinfer.chain_speculative_sampling(draft, ids, target, seed=7, offset=3)
    assert not torch.equal(other, tokens)


def test_the_law_of_the_first_token():
    rounds, vocab = 20000, 6
    draft, _, target = laws(1, 1, vocab, seed=2)
    ids = torch.multinomial(draft[0, 0], rounds, replacement=True, generator=torch.Generator().manual_seed(1))
    tokens, _, _ = flashinfer.chain_speculative_sampling(
        draft.expand(rounds, -1, -1), ids[:, None].int(), target.expand(rounds, -1, -1),
        generator=torch.Generator().manual_seed(4),
    )  # fmt: skip
    seen = torch.bincount(tokens[:, 0].long(), minlength=vocab).double()

    def p_value(law):
        kept = law > 0
        assert not seen[~kept].any()
        statistic = ((seen - rounds * law)[kept] ** 2 / (rounds * law)[kept]).sum()
        return float(torch.special.gammaincc((kept.sum() - 1) / 2.0, statistic / 2))

    assert p_value(target[0, 0].double()) > 1e-9
    mixed = 0.9 * target[0, 0].double() + 0.1 * target[0, 0].double().roll(2)
    assert p_value(mixed) < 1e-9  # control


def dense(q, k, v, mask, scale, cap):
    """float64 (out, lse in base 2)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / math.log(2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["bool", "packed", "causal", "all"])
def test_custom_masks(layout, form):
    rng = torch.Generator().manual_seed(0)
    queries, keys = 7, 45
    q = torch.randn(queries, 4, 64, generator=rng)
    k, v = torch.randn(2, keys, 2, 64, generator=rng)
    mask = torch.rand(queries, keys, generator=rng) < 0.4
    mask[3] = False
    options = {"custom_mask": mask}
    if form == "packed":
        padded = torch.nn.functional.pad(mask.flatten(), (0, -queries * keys % 8)).view(-1, 8)
        options = {"packed_custom_mask": (padded.int() << torch.arange(8)).sum(1).to(torch.uint8)}
    elif form in ("causal", "all"):
        mask = torch.ones(queries, keys).tril(keys - queries if form == "causal" else keys).bool()
        options = {"causal": form == "causal"}
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = flashinfer.single_prefill_with_kv_cache(
        q, *given, **options, kv_layout=layout, sm_scale=0.2, logits_soft_cap=4.0, return_lse=True
    )
    right, right_lse = dense(q, k, v, mask, 0.2, 4.0)
    assert torch.allclose(out.double(), right, atol=1e-5)
    assert torch.allclose(lse.double(), right_lse, atol=1e-5)
    assert bool((lse[3] == -math.inf).all()) == (form in ("bool", "packed"))


def test_our_trees_packed_masks_are_read():
    """What `to_layout(tree, "flashinfer")` packs, context included, is the tree's own attention."""
    rng = torch.Generator().manual_seed(1)
    parents, context = torch.tensor([-1, 0, 0, 1, 1, 2], dtype=torch.int32), 21
    lens, cu = torch.tensor([context], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
    tree = sk.build_tree(parents, cu, lens, max_nodes=6)
    packed = sk.to_layout(tree, "flashinfer", total_bytes=64).packed_mask
    q, k, v = torch.randn(6, 2, 64, generator=rng), *torch.randn(2, context + 6, 1, 64, generator=rng)
    ours = sk.tree_attention(
        q, k[None], v[None], torch.zeros(1, 1, dtype=torch.int32), lens, cu, tree.tree_mask, max_nodes=6
    )
    theirs = flashinfer.single_prefill_with_kv_cache(q, k, v, packed_custom_mask=packed)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_what_is_not_there_is_refused():
    q = torch.zeros(2, 1, 64)
    with pytest.raises(NotImplementedError, match="single_prefill_with_kv_cache: not supported: window_left"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, window_left=4)
    with pytest.raises(NotImplementedError, match="not supported: pos_encoding_mode"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(ValueError, match="custom_mask: expected 2 x 2 bits, got 6"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, custom_mask=torch.ones(2, 3))
