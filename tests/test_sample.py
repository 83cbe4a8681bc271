"""`sample`: the bonus token on its own, its far tail, its log-probabilities, rows that share requests, edge rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_ref import rng
from python_ref.sampling import Parameters, target_law
from python_ref.sampling_dice import TAIL_WORDS, gumbel_row, noise_words
from tests.conftest import Backend
from tests.sampling_helpers import bit_rows, chain, floats, ints, sampling_tensors, tree_tensors, verify

INF = float("inf")


def draw(backend: Backend, logits, sampling, **options):
    backend.require("sample")
    rows = logits if isinstance(logits, torch.Tensor) else floats(logits)
    options = {
        name: tuple(t.to(backend.device) for t in value) if isinstance(value, tuple)
        else value.to(backend.device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }  # fmt: skip
    return sk.sample(rows.to(backend.device), sampling, **options, **backend.kwargs)


@pytest.mark.parametrize("vocab", [5, 37, 1025, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_equal_the_float64_reference(vocab, dtype, backend: Backend):
    draws, R = np.random.default_rng(vocab), 40
    logits = torch.tensor(draws.normal(0, 2, (R, vocab)).astype(np.float32)).to(dtype)
    values = {
        "temperature": draws.choice([0.0, 0.6, 1.0, 1.8], R), "top_k": draws.choice([0, 3, 50], R),
        "top_p": draws.choice([1.0, 0.85], R), "min_p": draws.choice([0.0, 0.03], R),
        "seed": draws.integers(-(2**62), 2**62, R), "position": draws.integers(0, 2**40, R),
    }  # fmt: skip
    out = draw(backend, logits, sampling_tensors(R, backend.device, **values), return_logprobs="both")
    clear = 0
    for r in range(R):
        t, top_p, min_p = (float(np.float32(values[name][r])) for name in ("temperature", "top_p", "min_p"))
        p = Parameters(t, int(values["top_k"][r]), top_p, min_p)
        row = logits[r].float().numpy()
        law, _ = target_law(row, p)
        noise = gumbel_row(vocab, int(values["seed"][r]), int(values["position"][r]), rng.EMIT)
        with np.errstate(divide="ignore"):
            scores = np.sort(np.log(law) + noise)
            token = int(np.argmax(np.log(law) + noise))
        if scores[-1] - scores[-2] < 1e-4:
            continue
        clear += 1
        assert int(out.token_ids[r]) == token
        raw = target_law(row)[0]
        shaped = raw if p.greedy else law  # a greedy row reports its softmax, not 0
        found = out.logprobs[r].cpu().numpy()
        np.testing.assert_allclose(found, [np.log(raw[token]), np.log(shaped[token])], atol=5e-6)
    assert clear > 0.9 * R


def test_far_tail_of_the_noise(backend: Backend):
    """Case 10: tokens e^-14 .. e^-22 below the head win as often as their words say, to 64 bits.

    Words under 4096 are looked up, the row is a head and that one token, set 1e-4 above or below what it needs."""
    rows, seeds, right, tokens = [], [], [], []
    for seed in range(24):
        words = noise_words(2**18, seed, 0, rng.EMIT)
        for token in np.flatnonzero(words < TAIL_WORDS)[:2]:
            noise = gumbel_row(int(token) + 1, seed, 0, rng.EMIT)
            for side in (-1e-4, 1e-4):
                row = np.full(2**18, -np.inf, dtype=np.float32)
                row[0], row[token] = 0, noise[0] - noise[token] + side
                rows.append(row)
                seeds.append(seed)
                tokens.append(int(token))
                right.append(int(token) if side > 0 else 0)
        if len(rows) >= 12:
            break
    assert len(rows) >= 6
    out = draw(backend, np.stack(rows), sampling_tensors(len(rows), backend.device, seed=seeds))
    assert out.token_ids.tolist() == right
    # control: noise from the 24 leading bits alone decides some of them the other way
    coarse = [noise_words(2**18, s, 0, rng.EMIT)[t] >> 8 << 8 for s, t in zip(seeds, tokens)]
    fine = [gumbel_row(t + 1, s, 0, rng.EMIT)[t] for s, t in zip(seeds, tokens)]
    assert np.abs(-np.log(-np.log1p(-(np.array(coarse) + 128.0) * 2.0**-32)) - fine).max() > 1e-3


def test_edits_equal_those_of_verify(backend: Backend):
    """Masks, biases and the valid vocabulary: `sample` and verification without drafts agree in every bit."""
    torch.manual_seed(1)
    B, vocab = 60, 333
    logits = torch.randn(B, vocab)
    options = {
        "allowed": bit_rows([range(b % 5, vocab, 3) for b in range(B)], vocab),
        "bias": (ints(range(0, 2 * B + 1, 2)), ints(np.arange(2 * B) % 40), floats(np.linspace(-3, 3, 2 * B))),
        "vocab_size": 300,
    }
    sampling = sampling_tensors(B, backend.device, temperature=0.8, top_k=40, top_p=0.95, position=np.arange(B))
    tree = tree_tensors([[-1]], backend.device, copies=B)
    for which in ("raw", "processed", "both"):
        left = verify(backend, logits, ints(np.zeros(B)), tree, sampling, method="rejection", return_logprobs=which,
                      **options)  # fmt: skip
        right = draw(backend, logits, sampling, return_logprobs=which, **options)
        assert torch.equal(left.output_token_ids[:, 0], right.token_ids)
        assert torch.equal(left.logprobs[:, 0].reshape(-1), right.logprobs.reshape(-1))
        assert int(right.token_ids.max()) < 300


def test_rows_name_their_request_and_position(backend: Backend):
    """Three rows of two requests at three positions equal single calls."""
    logits = torch.randn(3, 50)
    sampling = sampling_tensors(2, backend.device, seed=[5, 6], temperature=[0.7, 1.4], position=[100, 200])
    positions = torch.tensor([7, 8, 9])
    out = draw(backend, logits, sampling, row_requests=ints([1, 0, 1]), row_positions=positions)
    for r, (seed, temperature) in enumerate([(6, 1.4), (5, 0.7), (6, 1.4)]):
        alone = sampling_tensors(1, backend.device, seed=seed, temperature=temperature, position=int(positions[r]))
        assert draw(backend, logits[r : r + 1], alone).token_ids[0] == out.token_ids[r]
    out = draw(backend, logits, sampling, row_requests=ints([1, 9, -1]))
    assert out.token_ids[1:].tolist() == [-1, -1]
    assert out.flags.tolist() == [0, sk.Flag.INDEX, sk.Flag.INDEX]


def test_edge_rows_and_inputs_untouched(backend: Backend):
    rows = floats([[np.nan] * 4, [-INF] * 4, [0, INF, 0, INF], [np.nan, 1, np.nan, -INF], [1, 2, 2, 0]])
    before = rows.clone()
    out = draw(backend, rows, sampling_tensors(5, backend.device, temperature=[1, 1, 1, 1, 0]))
    assert out.token_ids[:2].tolist() == [0, 0]
    assert int(out.token_ids[2]) in (1, 3)
    assert out.token_ids[3:].tolist() == [1, 1]
    F = sk.Flag
    assert out.flags.tolist() == [F.NAN_LOGIT | F.DEAD_ROW, F.DEAD_ROW, F.INF_LOGIT, F.NAN_LOGIT, 0]
    assert torch.equal(rows.view(torch.int32), before.view(torch.int32))
    assert draw(backend, torch.zeros(0, 4), sampling_tensors(0, backend.device)).token_ids.shape == (0,)


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_stored_draft_law_takes_the_same_decisions(method, backend: Backend):
    """`draft_sample`'s log q and log-sum-exp spare reading the draft rows and change no decision."""
    backend.require("draft_sample")
    torch.manual_seed(2)
    B, gamma, vocab = 400, 4, 77
    draft = torch.randn(B * gamma, vocab) * 2
    requests, depth = np.repeat(np.arange(B), gamma), np.tile(np.arange(gamma), B)
    sampling = sampling_tensors(B, backend.device, temperature=0.8, position=11)
    drawn = sk.draft_sample(
        draft.to(backend.device), 1, sampling, row_requests=ints(requests, backend.device),
        row_positions=torch.as_tensor(11 + depth).to(backend.device), row_paths=ints(depth, backend.device),
        **backend.kwargs,
    )  # fmt: skip
    node = np.arange(B * (gamma + 1)) % (gamma + 1)
    ids, log_q = torch.zeros(B * (gamma + 1), dtype=torch.int32), torch.zeros(B * (gamma + 1))
    ids[torch.as_tensor(node > 0)] = drawn.token_ids[:, 0].cpu()
    log_q[torch.as_tensor(node > 0)] = drawn.log_probs[:, 0].cpu()
    logits = torch.randn(B * (gamma + 1), vocab)
    logits[torch.as_tensor(node < gamma)] += draft
    tree = tree_tensors([chain(gamma)], backend.device, copies=B)
    plain = verify(backend, logits, ids, tree, sampling, method=method, draft_logits=draft)
    stored = verify(backend, logits, ids, tree, sampling, method=method, draft_logits=draft, draft_log_probs=log_q,
                    draft_lse=drawn.lse)  # fmt: skip
    assert torch.equal(plain.output_token_ids, stored.output_token_ids)
    assert float(plain.num_emitted.float().mean()) > 1.5
    # equal laws never reject, stored or not, at any coin
    logits[torch.as_tensor(node < gamma)] = draft
    top = torch.full((len(ids),), 1 - 2.0**-24)
    for extra in ({}, {"draft_log_probs": log_q, "draft_lse": drawn.lse}):
        out = verify(backend, logits, ids, tree, sampling, method=method, draft_logits=draft, uniforms=top, **extra)
        if method == "rejection":
            assert (out.num_emitted == gamma + 1).all()
