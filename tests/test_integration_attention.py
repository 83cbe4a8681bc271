"""Our attention under transformers' own loop: the same logits and the same text as its own attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specdec_kernels.integrations.transformers_attention import dense_attention, padding_mask, register_attention
from tests.test_engine_transformers import MODELS, build

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_under_padding_on_either_side(name):
    module = build(name)
    own = copy.deepcopy(module)
    own.set_attn_implementation("eager")
    module.set_attn_implementation(register_attention())
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 90, (3, 17), generator=rng)
    for mask in (
        None,
        [[0] * 5 + [1] * 12, [1] * 17, [0] * 2 + [1] * 15],
        [[1] * 9 + [0] * 8, [1] * 17, [1] * 16 + [0]],
    ):
        kept = torch.ones(3, 17) if mask is None else torch.tensor(mask)
        positions = (kept.cumsum(1) - 1).clamp(min=0).long()
        with torch.inference_mode():
            ours, theirs = (
                m(ids, attention_mask=None if mask is None else kept, position_ids=positions).logits
                for m in (module, own)
            )
        rows = kept.bool()
        assert torch.allclose(ours[rows], theirs[rows], atol=float(2e-5 * theirs.std()), rtol=1e-4)
        assert ours.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gemma2 (softcap, window)"])
def test_generates_the_same_text(name):
    module = build(name)
    rng = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 90, (4, 13), generator=rng)
    mask = torch.tensor([[0] * n + [1] * (13 - n) for n in (0, 3, 7, 11)])
    options = {
        "attention_mask": mask,
        "max_new_tokens": 20,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    theirs = module.generate(ids, **options)
    module.set_attn_implementation(register_attention())
    assert torch.equal(module.generate(ids, **options), theirs)


def test_holes_are_no_tokens():
    """Keys behind a hole are the ones next to it: against dense attention over the tokens alone."""
    rng = torch.Generator().manual_seed(5)
    q = torch.randn(2, 4, 2, 64, generator=rng)
    k, v = torch.randn(2, 2, 2, 9, 64, generator=rng)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 0, 1]]).bool()
    k[0, :, 2] = v[0, :, 2] = float("nan")  # padding may hold anything
    out, _ = dense_attention(torch.nn.Module(), q, k, v, mask)
    for b, last in ((0, 7), (0, 8), (1, 8)):
        seen = mask[b].clone()
        seen[last + 1 :] = False
        keys, values = (x[b][:, seen].repeat_interleave(2, 0) for x in (k, v))
        row = q[b, :, last - 7]
        weights = (torch.einsum("hd,hkd->hk", row, keys) / 8).softmax(-1)
        assert torch.allclose(out[b, last - 7], torch.einsum("hk,hkd->hd", weights, values), atol=1e-5)
    assert (out[1, 0] == 0).all()


def test_what_is_not_there_is_named():
    q, k = torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 3, 64)
    with pytest.raises(NotImplementedError, match="dropout"):
        dense_attention(torch.nn.Module(), q, k, k, None, dropout=0.1)
    layer = torch.nn.Module()
    layer.is_causal = False
    with pytest.raises(NotImplementedError, match="expected causal attention"):
        dense_attention(layer, q, k, k, None)
    with pytest.raises(NotImplementedError, match=r"attention_mask: expected \[B, k\]"):
        padding_mask(1, 1, 3, 2, attention_mask=torch.ones(1, 1, 1, 3))
    for mask in (None, torch.ones(1, 3)):
        with pytest.raises(NotImplementedError, match="static cache"):
            padding_mask(1, 1, 64, 2, attention_mask=mask)
    assert padding_mask(1, 1, 3, 2, attention_mask=torch.ones(1, 3)) is None


def test_no_count_is_read_of_the_device():
    """A layer under padding reads no value on the host: rows chosen by a mask would raise here."""
    q, k = torch.randn(2, 4, 5, 64), torch.randn(2, 2, 9, 64)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1, 0, 0]]).bool()
    rows = mask[:, 0]
    with FakeTensorMode() as mode:
        out, _ = dense_attention(torch.nn.Module(), *(mode.from_tensor(t) for t in (q, k, k, mask)))
        assert out.shape == (2, 5, 4, 64)
        with pytest.raises(Exception, match=r"(?i)data.dependent|dynamic|nonzero"):
            mode.from_tensor(q)[mode.from_tensor(rows)]


def test_masks_that_are_not_causal_are_refused():
    theirs = transformers.masking_utils
    zeros, restarts = torch.zeros(1, 6, dtype=torch.int64), torch.tensor([[0, 0, 0, 1, 1, 1]])
    causal, windowed = theirs.causal_mask_function, theirs.sliding_window_causal_mask_function(3)
    for good in (None, causal, windowed):
        assert padding_mask(1, 6, 6, mask_function=good) is None
    for bad in (
        theirs.chunked_causal_mask_function(4, zeros[:, 0]), theirs.bidirectional_mask_function,
        theirs.packed_sequence_compatibility_function(causal, zeros, restarts),
        theirs.packed_sequence_compatibility_function(windowed, zeros, restarts),
        theirs.or_masks(causal, theirs.blockwise_overlay(restarts)), theirs.and_masks(causal, lambda b, h, q, k: q > k),
        theirs.or_masks(theirs.sliding_window_overlay(3), causal), theirs.sliding_window_bidirectional_mask_function(3),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="mask_function: expected causal attention"):
            padding_mask(1, 6, 6, mask_function=bad)


@pytest.mark.parametrize("name", ["llama", "mistral (window)"])
def test_packed_sequences_are_refused(name):
    """Position ids that begin anew are two texts to transformers; as one text the second would see the first."""
    module = build(name)
    ids, positions = torch.arange(2, 14)[None], torch.arange(6).repeat(2)[None]
    whole = module(ids, position_ids=positions, use_cache=False).logits[0, 6:]
    assert torch.allclose(whole, module(ids[:, 6:], use_cache=False).logits[0], atol=1e-4)
    module.set_attn_implementation(register_attention())
    with pytest.raises(NotImplementedError, match="packed sequences"):
        module(ids, position_ids=positions, use_cache=False)
