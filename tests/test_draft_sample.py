"""`draft_sample` and `draft_topk`: laws without replacement, what they report, noise by path, step and coupling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_ref import rng
from python_ref.sampling import Parameters, draft_law, target_law
from python_ref.sampling_dice import draft_salt, gumbel_row
from tests.conftest import Backend
from tests.sampling_helpers import assert_biased, assert_law, floats, ints, sampling_tensors, softmax
from tests.sampling_trials import first_counts, trials, trials_of

INF = float("inf")


def longs(values, device: str = "cpu") -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device)


def draw(backend: Backend, logits, k, *, requests=None, positions=None, paths=None, parameters=None, **options):
    """draft_sample with one request a row unless told otherwise."""
    backend.require("draft_sample")
    rows = logits if isinstance(logits, torch.Tensor) else floats(logits)
    R = len(rows)
    requests = np.arange(R) if requests is None else requests
    sampling = sampling_tensors(int(np.max(requests, initial=-1)) + 1, backend.device, **(parameters or {}))
    return sk.draft_sample(
        rows.to(backend.device), k, sampling, row_requests=ints(requests, backend.device),
        row_positions=longs(np.broadcast_to(0 if positions is None else positions, (R,)).copy(), backend.device),
        row_paths=None if paths is None else ints(paths, backend.device),
        **{n: v.to(backend.device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}, **backend.kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("wide", [False, True])
def test_siblings_from_the_far_tail(wide, backend: Backend):
    """Next to nothing is left behind the first draw (a peaked row, a low temperature): the rest comes all the same, by
    its own law, and among many ids without weight."""
    R, V = 4000 if backend.name in ("cpu", "cuda") else 300, 5000 if wide else 12
    if wide:
        R = R // 10
    tail = np.array([0.4, 0.3, 0.2, 0.1])
    places = np.arange(4) * (V // 4) + 1
    logits = np.full(V, -INF, dtype=np.float32)
    logits[0], logits[places] = 0.0, (np.log(tail) - 80).astype(np.float32)
    out = draw(backend, np.tile(logits, (R, 1)), 5, parameters={"seed": np.arange(R)})
    ids = out.token_ids.cpu().numpy()
    assert (ids[:, 0] == 0).all()
    assert (np.sort(ids, 1) == np.sort([0, *places])).all()
    assert_law((ids[:, 1:2] == places).sum(0), tail)
    short = draw(backend, np.tile(logits, (9, 1)), 7).token_ids
    assert (short[:, 5:] == -1).all()


@pytest.mark.parametrize("vocab", [5, 37, 1025, 5000])
@pytest.mark.parametrize("coupled", [False, True])
def test_tokens_equal_the_float64_reference(vocab, coupled, backend: Backend):
    """The k largest scores log q + Gumbel, in order, with the keys of the design; log q and lse as the softmax says."""
    draws = np.random.default_rng(vocab)
    R, k = 24, 4
    logits = draws.normal(0, 2, (R, vocab)).astype(np.float32)
    requests, positions = draws.integers(0, 5, R), draws.integers(0, 2**40, R)
    paths, seeds, steps = draws.integers(0, 2**31, R), draws.integers(-(2**62), 2**62, 5), draws.integers(0, 9, 5)
    temperature = [0.7, 1.0, 1.3, 1.0, 0.5]
    out = draw(
        backend, logits, k, requests=requests, positions=positions, paths=paths, coupled=coupled,
        parameters={"seed": seeds, "step": steps, "temperature": temperature, "top_k": [0, 0, 5, 0, 0]},
    )  # fmt: skip
    clear = 0
    for r in range(R):
        b = requests[r]
        law = target_law(logits[r], Parameters(temperature[b], [0, 0, 5, 0, 0][b]))[0]
        salt = 0 if coupled else draft_salt(int(paths[r]), int(steps[b]))
        noise = gumbel_row(vocab, int(seeds[b]), int(positions[r]), rng.EMIT if coupled else rng.DRAFT, salt)
        with np.errstate(divide="ignore"):
            scores = np.log(law) + noise
        order = np.argsort(-scores, kind="stable")
        tokens = out.token_ids[r].tolist()
        if np.diff(-scores[order][: k + 1]).min() > 1e-5:
            clear += 1
            assert tokens == order[:k].tolist()
        np.testing.assert_allclose(out.log_probs[r].cpu().numpy(), np.log(law[tokens]), atol=3e-6)
        kept = law > 0
        scaled = logits[r][kept].astype(np.float64) / temperature[b]
        assert float(out.lse[r]) == pytest.approx(np.log(np.exp(scaled - scaled.max()).sum()) + scaled.max(), abs=1e-5)
    assert clear > R * 0.9


def test_ordered_pairs_without_replacement(backend: Backend):
    q, B = np.array([0.45, 0.25, 0.15, 0.1, 0.05]), trials_of(backend)
    out = draw(backend, np.tile(np.log(q), (B, 1)), 2)
    pairs = out.token_ids.cpu().numpy().astype(np.int64)
    law = q[:, None] * q[None, :] / (1 - q[:, None])
    np.fill_diagonal(law, 0)
    assert_law(np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25), law)
    # control: independent draws would sometimes repeat a token
    twice = draw(backend, np.tile(np.log(q), (2 * B, 1)), 1).token_ids.view(B, 2).cpu().numpy().astype(np.int64)
    assert_biased(np.bincount(twice[:, 0] * 5 + twice[:, 1], minlength=25), law)


def test_filters_shape_the_law_and_bound_the_siblings(backend: Backend):
    """Three tokens survive top-k 3: a fourth sibling does not exist."""
    q, B = np.array([0.4, 0.3, 0.15, 0.1, 0.05]), trials_of(backend)
    out = draw(backend, np.tile(np.log(q), (B, 1)), 4, parameters={"top_k": 3})
    tokens = out.token_ids.cpu().numpy()
    assert (tokens[:, 3] == -1).all()
    assert torch.isneginf(out.log_probs[:, 3]).all()
    assert (np.sort(tokens[:, :3], axis=1) == [0, 1, 2]).all()
    assert_law(np.bincount(tokens[:, 0], minlength=5), [*(q[:3] / q[:3].sum()), 0, 0])


def test_branches_and_steps_have_noise_of_their_own(backend: Backend):
    """Same request and position: equal paths repeat their draw, other paths, steps and purposes do not."""
    B, vocab = 300, 64
    logits = np.tile(np.zeros(vocab), (3 * B, 1))
    requests = np.repeat(np.arange(B), 3)
    paths = np.tile([1, 2, 1], B)
    tokens = draw(backend, logits, 1, requests=requests, paths=paths).token_ids.view(B, 3).cpu().numpy()
    assert (tokens[:, 0] == tokens[:, 2]).all()
    assert (tokens[:, 0] == tokens[:, 1]).mean() < 0.1
    later = draw(backend, logits, 1, requests=requests, paths=paths, parameters={"step": 1}).token_ids.view(B, 3)
    assert (tokens[:, 0] == later[:, 0].cpu().numpy()).mean() < 0.1
    backend.require("sample")
    emit = sk.sample(floats(logits[:B], backend.device), sampling_tensors(B, backend.device), **backend.kwargs)
    assert (tokens[:, 0] == emit.token_ids.cpu().numpy()).mean() < 0.1
    coupled = draw(backend, logits[:B], 1, coupled=True).token_ids[:, 0]
    assert torch.equal(coupled, emit.token_ids)


def test_control_shared_noise_biases_pruning_across_branches(backend: Backend):
    """Two branches a, b hold one draw each from the same q; a's is dropped when b's is token 1.

    With noise by path that choice is independent of a's own draw: the law stays p = (.2, .5, .3). With shared noise it
    looks at the drawn value, and a's branch never carries token 1."""
    p, q, B = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.5, 0.2]), trials_of(backend)
    counts = {}
    for name, paths in {"own": np.tile([1, 2], B), "shared": np.tile([1, 1], B)}.items():
        drawn = draw(backend, np.tile(np.log(q), (2 * B, 1)), 1, requests=np.repeat(np.arange(B), 2), paths=paths)
        a, b = drawn.token_ids.view(B, 2).cpu().numpy().T
        ids = np.stack([np.zeros(B), np.where(b == 1, -1, a)], axis=1).astype(np.int64)
        out = trials(backend, np.log([p, p]), ids, [-1, 0], method="rejection", draft=np.log([q]))
        counts[name] = first_counts(out, 3)
    assert_law(counts["own"], p)
    assert_biased(counts["shared"], p)


def test_reduced_vocabulary_and_padding(backend: Backend):
    q, B = np.array([0.5, 0.3, 0.2]), trials_of(backend) // 4
    out = draw(backend, np.tile(np.log(q), (B, 1)), 3, d2t=ints([0, 1, 3]))
    tokens = out.token_ids.cpu().numpy()
    assert set(np.unique(tokens)) == {0, 2, 5}
    assert_law(np.array([(tokens[:, 0] == t).sum() for t in (0, 2, 5)]), q)
    # padded columns have no mass at draft time
    wide = np.concatenate([np.tile(np.log(q), (B, 1)), np.full((B, 5), 40.0)], axis=1)
    out = draw(backend, wide, 3, vocab_size=3)
    assert int(out.token_ids.max()) == 2
    assert_law(np.bincount(out.token_ids[:, 0].cpu().numpy(), minlength=3), q)
    law = draft_law(wide[0], 8, vocab_size=3)
    np.testing.assert_allclose(law[:3], q, atol=1e-6)


def test_edges(backend: Backend):
    rows = floats([[1, 2, 2, 0], [np.nan] * 4, [-INF] * 4, [0, INF, 0, INF]])
    greedy = draw(backend, rows, 2, parameters={"temperature": 0.0})
    assert greedy.token_ids[:3].tolist() == [[1, -1], [-1, -1], [-1, -1]]
    assert greedy.log_probs[0, 0] == 0
    sampled = draw(backend, rows, 2)
    assert sampled.token_ids[1:3].tolist() == [[-1, -1], [-1, -1]]
    assert sorted(sampled.token_ids[3].tolist()) == [1, 3]
    assert draw(backend, torch.zeros(0, 9), 2).token_ids.shape == (0, 2)
    before = rows.clone()
    draw(backend, rows, 2)
    assert torch.equal(rows.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "k"), [(5, 5), (1025, 8), (32000, 10), (50257, 64)])
def test_topk_equals_a_stable_sort(vocab, k, dtype, backend: Backend):
    backend.require("draft_topk")
    if vocab > 5000 and backend.device == "cpu" and backend.selector is not None:
        pytest.skip("wide rows are too slow on emulated backends")
    logits = (torch.randn(6, vocab) * 3).to(dtype)
    if dtype == torch.bfloat16:
        logits = logits.round()  # many ties
    out = sk.draft_topk(logits.to(backend.device), k, **backend.kwargs)
    wide = logits.double()
    order = torch.argsort(wide, dim=1, descending=True, stable=True)[:, :k]
    assert out.token_ids.cpu().tolist() == order.tolist()
    right = torch.log_softmax(wide, 1).gather(1, order)
    np.testing.assert_allclose(out.log_probs.cpu().numpy(), right.numpy(), atol=3e-6)
    np.testing.assert_allclose(out.lse.cpu().numpy(), torch.logsumexp(wide, 1).numpy(), rtol=1e-6, atol=3e-6)
    warm = sk.draft_topk(logits.to(backend.device), k, temperature=0.5, **backend.kwargs)
    np.testing.assert_allclose(
        warm.log_probs.cpu().numpy(), torch.log_softmax(wide * 2, 1).gather(1, order).numpy(), atol=6e-6
    )


def test_topk_maps_to_target_ids_and_skips_padding(backend: Backend):
    backend.require("draft_topk")
    rows = floats([[0.5, 3, 1, 2, 60]], backend.device)
    out = sk.draft_topk(rows, 3, d2t=ints([0, 1, 3, 5, 9], backend.device), vocab_size=10, **backend.kwargs)
    assert out.token_ids.tolist() == [[2, 8, 5]]  # column 4 maps to 13, which does not exist
    out = sk.draft_topk(rows, 5, vocab_size=4, **backend.kwargs)
    assert out.token_ids.tolist() == [[1, 3, 2, 0, -1]]
    right = np.sort(softmax(np.array([0.5, 3, 1, 2])))[::-1]
    np.testing.assert_allclose(out.log_probs[0, :4].exp().cpu(), right, atol=1e-6)
