"""Cases BT and ST of the survey at the level of the sampling ops: batches, masks, log-probabilities, seeds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_biased,
    assert_law,
    bit_rows,
    chain,
    emitted,
    floats,
    ints,
    log,
    one,
    path,
    sampling_tensors,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_trials import draws, first_counts, trials, trials_of

METHODS = ["greedy", "rejection", "target_only", "coupled"]
INF = float("inf")


def hot(*ids: int, vocab: int = 12) -> np.ndarray:
    """Rows that leave no doubt which id is the largest."""
    return np.eye(vocab)[list(ids)] * 60


# ---- BT-03


@pytest.mark.parametrize("method", [*METHODS, "block"])
@pytest.mark.parametrize("blank", [-1, 3, 7, -2, 2**31 - 1])
def test_BT_03_placeholders_are_not_drafts(method, blank, backend: Backend):
    out = one(backend, log([[0, 0, 1]] * 3), [0, blank, blank], chain(2), method=method)
    assert emitted(out) == [2]
    assert path(out) == [0]
    assert int(out.flags) == (0 if blank == -1 else sk.Flag.TOKEN_RANGE)
    if method != "block":
        out = one(backend, log([[0, 0, 1]] * 3), [0, blank, 2], [-1, 0, 0], method=method)
        assert emitted(out) == [2, 2]  # the later sibling is still tried
        assert path(out) == [0, 2]


@pytest.mark.parametrize("method", [*METHODS, "block"])
def test_BT_03_no_drafts_means_bonus_only(method, backend: Backend):
    out = one(backend, log([[1, 0, 0]]), [0], [-1], method=method)
    assert emitted(out) == [0]
    assert path(out) == [0]


def test_BT_03_control_blanking_forbidden_ids_is_biased(backend: Backend):
    """p = (.5, .5, 0), q = (.5, 0, .5): id 2 is forbidden. It keeps its id; written as -1 the law is (.75, .25)."""
    ids = draws([0.5, 0, 0.5], trials_of(backend))
    rows, draft = log([[0.5, 0.5, 0]] * 2), log([[0.5, 0, 0.5]])
    out = trials(backend, rows, ids, chain(1), method="rejection", draft=draft)
    assert_law(first_counts(out, 3), [0.5, 0.5, 0])
    masked = trials(
        backend, log([[0.25, 0.25, 0.5]] * 2), ids, chain(1), method="rejection", draft=draft, draft_sampling={},
        allowed=bit_rows([[0, 1]] * 2, 3),
    )  # fmt: skip
    assert_law(first_counts(masked, 3), [0.5, 0.5, 0])
    blanked = np.where(ids == 2, -1, ids)
    out = trials(backend, rows, blanked, chain(1), method="rejection", draft=draft)
    assert_biased(first_counts(out, 3), [0.5, 0.5, 0])


# ---- BT-04


def test_BT_04_all_patterns_of_greedy_and_sampled(backend: Backend):
    torch.manual_seed(4)
    parents, B = chain(3), 4
    logits, draft = torch.randn(16, 50), torch.randn(16, 50)
    ids = torch.randint(0, 50, (16,), dtype=torch.int32)
    rows = ints([node - 1 if node % 4 else -1 for node in range(16)])
    tree = tree_tensors([parents] * B, backend.device)

    def run(temperature):
        sampling = sampling_tensors(B, backend.device, temperature=temperature, seed=[3, 7, 11, 13])
        return verify(backend, logits, ids, tree, sampling, method="rejection", draft_logits=draft, draft_rows=rows)

    greedy, sampled = run([0.0] * 4), run([1.0] * 4)
    for pattern in itertools.product([0.0, 1.0], repeat=4):
        out = run(list(pattern))
        for b, temperature in enumerate(pattern):
            right = sampled if temperature else greedy
            assert emitted(out, b) == emitted(right, b)
    solo = verify(
        backend, logits[4:8], ids[4:8], tree_tensors([parents], backend.device),
        sampling_tensors(1, backend.device, seed=7), method="rejection", draft_logits=draft, draft_rows=rows[4:8],
    )  # fmt: skip
    assert emitted(solo) == emitted(sampled, 1)


# ---- BT-05


@pytest.mark.parametrize("method", [*METHODS, "block", "typical"])
def test_BT_05_ragged_counts_equal_solo_runs(method, backend: Backend):
    rng = np.random.default_rng(5)
    for counts in [[3, 0, 1, 2], [0, 0, 0], list(rng.integers(0, 6, 17)), [None, 2, None, None, 0, 5, None]]:
        parents = [[] if c is None else chain(int(c)) for c in counts]
        starts = np.concatenate([[0], np.cumsum([len(p) for p in parents])])
        N = int(starts[-1])
        logits, draft = rng.normal(0, 1, (N, 33)), rng.normal(0, 1, (max(N, 1), 33))
        ids = rng.integers(0, 33, N)
        rows = np.array([start + p if p >= 0 else -1 for start, request in zip(starts, parents) for p in request])
        options = {"draft_logits": floats(draft), "draft_rows": ints(rows)} if method in ("rejection", "block") else {}
        out = verify(
            backend, floats(logits.reshape(N, 33)), ints(ids), tree_tensors(parents, backend.device),
            sampling_tensors(len(counts), backend.device), method=method, **options,
        )  # fmt: skip
        for b, request in enumerate(parents):
            tokens = emitted(out, b)
            if not request:
                assert tokens == []
                assert int(out.flags[b]) == 0
                continue
            assert 1 <= len(tokens) <= len(request)
            here = slice(starts[b], starts[b + 1])
            solo = verify(
                backend, floats(logits[here]), ints(ids[here]), tree_tensors([request], backend.device),
                sampling_tensors(1, backend.device, seed=b), method=method,
                **({**options, "draft_rows": ints(rows[here])} if options else {}),
            )  # fmt: skip
            assert emitted(solo) == tokens
            assert path(solo) == path(out, b)


@pytest.mark.parametrize("method", [*METHODS, "block", "typical"])
def test_BT_05_empty_batch(method, backend: Backend):
    tree = tree_tensors([], backend.device)
    out = verify(backend, torch.zeros(0, 7), ints([]), tree, sampling_tensors(0, backend.device), method=method)
    assert out.output_token_ids.shape == (0, tree.max_depth + 1)
    assert out.num_emitted.shape == (0,)


# ---- BT-07


@pytest.mark.parametrize(
    ("drafts", "right"), [([1, 6, 7], [5]), ([5, 9, 7], [5, 6]), ([5, 6, 7], [5, 6, 7, 8]), ([5, 6, 1], [5, 6, 7])]
)
@pytest.mark.parametrize("method", [*METHODS, "block", "typical"])
def test_BT_07_row_i_judges_draft_i(method, drafts, right, backend: Backend):
    out = one(backend, hot(5, 6, 7, 8), [0, *drafts], chain(3), method=method)
    assert emitted(out) == right
    assert path(out) == list(range(len(right)))


# ---- ST-01, ST-02, ST-03


def test_ST_01_mask_is_per_position(backend: Backend):
    everything = list(range(4))
    rows = [[0, 3, 1, 2], [0, 1, 4, 2], [0, 0, 0, 1]]
    out = one(backend, rows, [0, 1, 2], chain(2), method="greedy", allowed=bit_rows([[1, 2], [3], everything], 4))
    assert emitted(out) == [1, 3]
    # the mask starts only behind token 9
    rows, everything = hot(9, 4, 5), list(range(12))
    out = one(
        backend, rows, [0, 9, 4], chain(2), method="greedy", allowed=bit_rows([everything, [6, 7], everything], 12)
    )
    assert emitted(out)[0] == 9
    assert emitted(out)[1] in (6, 7)


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_ST_01_recovered_and_bonus_token_under_a_mask(method, backend: Backend):
    p, q, count = np.array([0.4, 0.3, 0.2, 0.1]), [0.1, 0.2, 0.3, 0.4], trials_of(backend)
    mask, right = bit_rows([[0, 2, 3], [1, 3]], 4), np.array([0.4, 0, 0.2, 0.1]) / 0.7
    out = trials(
        backend, log([p, p]), draws(q, count), chain(1), method=method, draft=log([q]), draft_sampling={}, allowed=mask
    )
    assert_law(first_counts(out, 4), right)
    bonus = out.output_token_ids[:, 1][out.num_emitted == 2].cpu().numpy()
    assert_law(np.bincount(bonus, minlength=4), [0, 0.75, 0, 0.25])


def test_ST_02_masks_follow_their_nodes_in_any_order_and_trim(backend: Backend):
    rng = np.random.default_rng(2)
    full = [rng.normal(0, 1, (4, 20)) for _ in range(3)]
    masks = [[sorted(rng.choice(20, 7, replace=False).tolist()) for _ in range(4)] for _ in range(3)]
    drafts = [rng.integers(0, 20, 4) for _ in range(3)]
    for order in itertools.permutations(range(3)):
        for trims in itertools.product([0, 1, 3], repeat=3):
            parents = [chain(trims[r]) for r in order]
            out = verify(
                backend,
                floats(np.concatenate([full[r][: trims[r] + 1] for r in order])),
                ints(np.concatenate([drafts[r][: trims[r] + 1] for r in order])),
                tree_tensors(parents, backend.device),
                sampling_tensors(3, backend.device, seed=list(order)),
                method="target_only",
                allowed=bit_rows([mask for r in order for mask in masks[r][: trims[r] + 1]], 20),
            )
            for b, r in enumerate(order):
                for node, token in zip(path(out, b), emitted(out, b)):
                    assert token in masks[r][node]
                solo = one(
                    backend, full[r][: trims[r] + 1], drafts[r][: trims[r] + 1], chain(trims[r]), seed=r,
                    method="target_only", allowed=bit_rows(masks[r][: trims[r] + 1], 20),
                )  # fmt: skip
                assert emitted(solo) == emitted(out, b)


@pytest.mark.parametrize("method", ["greedy", "target_only", "rejection"])
def test_ST_03_invalid_branch_is_blocked_siblings_are_not(method, backend: Backend):
    """root -> a (forbidden) -> c and root -> b -> d; the target prefers a, then c; a's and c's rows allow nothing."""
    a, b, c, d = 1, 2, 3, 4
    parents, ids = [-1, 0, 0, 1, 2], [0, a, b, c, d]
    rows = np.full((5, 8), -9.0)
    rows[0, [a, b]], rows[1, c], rows[2, [c, d]], rows[4, 6] = [5, 4], 9, [9, 4], 9
    allowed = bit_rows([[b], [], [d], [], [6]], 8)
    out = one(backend, rows, ids, parents, method=method, allowed=allowed)
    assert emitted(out) == [b, d, 6]
    assert path(out) == [0, 2, 4]
    assert int(out.flags) == 0  # rows that allow nothing were not visited
    pruned = one(backend, rows[[0, 2, 4]], [0, b, d], chain(2), method=method, allowed=bit_rows([[b], [d], [6]], 8))
    assert emitted(pruned) == emitted(out)


# ---- ST-04


def test_ST_04_logprobs_belong_to_the_emitted_tokens(backend: Backend):
    rows = [[2.0, 1, 0]] * 4
    for which, right in [("raw", [-0.4076]), ("processed", [-0.1429]), ("both", [-0.4076, -0.1429])]:
        uniforms = floats([0.5, 0.0, 1 - 2.0**-24, 0.5])
        out = one(
            backend, rows, [0, 0, 0, 1], chain(3), temperature=0.5, method="rejection", uniforms=uniforms,
            return_logprobs=which,
        )  # fmt: skip
        tokens = emitted(out)
        assert tokens[0] == 0
        assert len(tokens) == 2
        found = out.logprobs[0].reshape(4, -1)
        np.testing.assert_allclose(found[0].cpu().numpy(), right, atol=1e-4)
        law = (
            np.log(np.exp([2.0, 1, 0]) / np.exp([2.0, 1, 0]).sum()),
            np.log(np.exp([4.0, 2, 0]) / np.exp([4.0, 2, 0]).sum()),
        )
        expected = {"raw": [law[0]], "processed": [law[1]], "both": list(law)}[which]
        np.testing.assert_allclose(found[1].cpu().numpy(), [row[tokens[1]] for row in expected], atol=1e-5)
    assert one(backend, rows, [0, 0, 0, 1], chain(3), method="rejection").logprobs is None


# ---- ST-05, ST-06


def test_ST_05_end_token_bans_count_tokens(backend: Backend):
    """Minimum of 3 tokens: the end token 1 is banned at the first three positions of this very step."""
    rows = np.full((5, 9), -20.0)
    rows[:, 1], rows[:, 7] = 3, 2
    bias = (ints([0, 1, 2, 3, 3, 3]), ints([1, 1, 1]), floats([-INF] * 3))
    out = one(backend, rows, [0, 7, 7, 7, 7], chain(4), method="greedy", bias=bias)
    assert emitted(out) == [7, 7, 7, 1]
    allowed = bit_rows([[t for t in range(9) if t != 1]] * 3 + [list(range(9))] * 2, 9)
    out = one(backend, rows, [0, 7, 7, 7, 7], chain(4), method="greedy", allowed=allowed)
    assert emitted(out) == [7, 7, 7, 1]


def test_ST_06_same_seed_same_text_other_seeds_independent(backend: Backend):
    backend.require("sample")
    rows = floats(np.random.default_rng(0).normal(0, 1, (1, 1000)), backend.device)

    def text(seeds, at):
        out = []
        for position in range(8):
            sampling = sampling_tensors(len(seeds), backend.device, seed=seeds, position=position)
            drawn = sk.sample(rows.expand(len(seeds), -1).contiguous(), sampling, **backend.kwargs).token_ids
            out.append(drawn[at].item())
        return out

    alone = text([7], 0)
    assert text([1, 2, 7, 3], 2) == alone
    assert text([7, 7 + 2**32], 0) == alone
    assert text([7], 0) == alone
    assert text([7 + 2**32], 0) != alone  # the whole 64-bit seed counts
    assert text([8], 0) != alone
    uniform = torch.zeros(2, 1000, device=backend.device)
    a, b = sk.sample(uniform, sampling_tensors(2, backend.device, seed=[1, 2]), **backend.kwargs).token_ids.tolist()
    assert a != b
