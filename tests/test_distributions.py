"""Statistical mode: many identical requests in one call, several consecutive steps, against the exact joint laws.

CI draws 5 * 10^4 requests a suite, `--long` 10^6; a GPU 10^4 and 10^5, kernels on the CPU 10^4, which take a minute or
two a suite (`--long -k "emulated and rejection-tree"` picks one). Controls: test_distribution_controls.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_ref import sampling as ref
from tests import cuda_on_cpu
from tests.conftest import Backend
from tests.sampling_helpers import (
    SUITE_LIMIT,
    assert_law,
    chain,
    emitted,
    floats,
    ints,
    results_alone,  # noqa: F401
    sampling_tensors,
    softmax,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_models import Markov, State, folded_law, gumbel_draw, joint_counts, simulate, top_draw

CHAIN = chain(4)
FULL_TREE = [-1, 0, 0, 0, 0] + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4  # 21 nodes
RAGGED_TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]
CHUNK = 50_000


def requests(backend: Backend, config: pytest.Config, share: float = 1.0) -> int:
    if backend.name in cuda_on_cpu.BACKENDS:
        return 10_000
    if backend.device != "cpu" or backend.selector is not None:
        return 100_000 if config.getoption("--long") else 10_000
    return 1_000_000 if config.getoption("--long") else int(50_000 * share)


def op_verifier(
    backend: Backend,
    method: str,
    *,
    deterministic: Callable[[State], np.ndarray] | None = None,
    draft_temperature: float | None = None,
    fixed_step: bool = False,
    flags: list[int] | None = None,
    **parameters: Any,
) -> Callable[[State], tuple[np.ndarray, np.ndarray]]:
    """The op as a simulator's verifier; `deterministic(state)` [B, n] marks the nodes that were not drawn.

    A flag fails the suite, unless `flags` is there to collect them."""

    def run(state: State) -> tuple[np.ndarray, np.ndarray]:
        B, n = state.token_ids.shape
        device, vocab = backend.device, state.model.vocab
        step = 0 if fixed_step else state.step
        values = {name: value(state) if callable(value) else value for name, value in parameters.items()}
        sampling = sampling_tensors(B, device, seed=state.seeds, position=state.position, step=step, **values)
        options: dict[str, Any] = {}
        if method in ("rejection", "block"):
            parents = np.array(state.parents)
            rows = np.where(parents >= 0, np.arange(B)[:, None] * n + parents, -1)
            if deterministic is not None:
                rows = np.where(deterministic(state), -1, rows)
            options["draft_logits"] = floats(state.rows(state.model.draft_logits).reshape(B * n, vocab))
            options["draft_rows"] = ints(rows.ravel())
        if draft_temperature is not None:
            options["draft_sampling"] = sampling_tensors(B, device, temperature=draft_temperature)
        tree = tree_tensors([list(state.parents)], device, copies=B)
        logits = floats(state.rows(state.model.target_logits).reshape(B * n, vocab))
        out = verify(backend, logits, ints(state.token_ids.ravel()), tree, sampling, method=method, **options)
        if flags is None:
            assert not out.flags.any(), "a clean batch raised flags"
        else:
            flags.extend(out.flags[out.flags != 0].tolist()[:1])
        return out.output_token_ids.cpu().numpy().astype(np.int64), out.num_emitted.cpu().numpy().astype(np.int64)

    return run


def joint_laws(model: Markov, law: Callable[[np.ndarray], np.ndarray] = softmax) -> tuple[np.ndarray, np.ndarray]:
    return model.joint(2, law=law), folded_law(model.joint(4, law=law), 4)


def collect(model: Markov, parents, draw, run, total: int, first: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """(joint counts of tokens 0-1, joint counts of tokens 0-3 by t % 4, mean emitted in step 0) over chunks.

    first: number of the first request, which decides all of its randomness."""
    two, four, emitted_sum, done = 0, 0, 0.0, 0
    while done < total:
        size = min(CHUNK, total - done)
        text, counts = simulate(model, parents, draw, run, requests=size, length=4, seed=1000 + first + done)
        two = two + joint_counts(text[:, :2], model.vocab)
        four = four + joint_counts(text, model.vocab, 4)
        emitted_sum += float(counts.sum())
        done += size
    return two, four, emitted_sum / total


def all_true(state: State) -> np.ndarray:
    return np.ones(state.token_ids.shape, dtype=bool)


def deep_nodes(state: State) -> np.ndarray:
    """Nodes at depth 2 and below: sampled siblings on top, deterministic ones under them."""
    parents = np.array(state.parents)
    return np.broadcast_to(parents > 0, state.token_ids.shape)


def mixed_depth_draw(state: State, node: int, k: int) -> np.ndarray:
    return (gumbel_draw() if node == 0 else top_draw)(state, node, k)


SUITES: dict[str, tuple] = {
    "rejection-chain": (CHAIN, gumbel_draw(), "rejection", {}),
    "rejection-chain-one-hot": (CHAIN, top_draw, "rejection", {"deterministic": all_true}),
    "rejection-tree": (FULL_TREE, gumbel_draw(), "rejection", {}),
    "rejection-ragged-tree": (RAGGED_TREE, gumbel_draw(), "rejection", {}),
    "rejection-mixed-depths": (FULL_TREE, mixed_depth_draw, "rejection", {"deterministic": deep_nodes}),
    "target-only-tree": (FULL_TREE, top_draw, "target_only", {}),
    "target-only-chain": (CHAIN, top_draw, "target_only", {}),
    "block-chain": (CHAIN, gumbel_draw(), "block", {}),
    "coupled-tree": (RAGGED_TREE, top_draw, "coupled", {}),
}


@pytest.mark.parametrize("name", SUITES)
def test_joint_laws(name: str, backend: Backend, pytestconfig: pytest.Config):
    parents, draw, method, options = SUITES[name]
    model = Markov(seed=len(name), distance=0.4 if draw is top_draw else 1.0)
    total = requests(backend, pytestconfig, 0.5 if len(parents) > 10 else 1.0)
    two, four, mean = collect(model, parents, draw, op_verifier(backend, method, **options), total)
    law_two, law_four = joint_laws(model)
    assert_law(two, law_two, SUITE_LIMIT)
    assert_law(four, law_four, SUITE_LIMIT)
    assert mean > 1.1, "no draft is ever accepted: the suite would not see the acceptance rule"


FILTERED = ref.Parameters(temperature=0.7, top_k=7, top_p=0.9, min_p=0.02)


@functools.cache
def filtered_draft(model: Markov) -> np.ndarray:
    return filtered_law(model.draft_logits)


def filtered_law(table: np.ndarray) -> np.ndarray:
    return np.stack([ref.target_law(row, FILTERED)[0] for row in table])


@pytest.mark.parametrize(("parents", "method"), [(CHAIN, "rejection"), (RAGGED_TREE, "rejection"), (CHAIN, "block")])
def test_joint_laws_with_filters(parents, method, backend: Backend, pytestconfig: pytest.Config):
    """Temperature, top-k, top-p and min-p shape the verified rows and the drafter's law alike (RS-02, RS-14)."""
    model = Markov(seed=77, distance=0.7)
    filters = {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "min_p": 0.02}
    draw = gumbel_draw(table=filtered_draft)
    total = requests(backend, pytestconfig, 0.5)
    two, four, mean = collect(model, parents, draw, op_verifier(backend, method, **filters), total)
    law_two, law_four = joint_laws(model, filtered_law)
    assert_law(two, law_two, SUITE_LIMIT)
    assert_law(four, law_four, SUITE_LIMIT)
    assert mean > 1.1


def test_draft_temperature_of_its_own(backend: Backend, pytestconfig: pytest.Config):
    model = Markov(seed=78)
    run = op_verifier(backend, "rejection", draft_temperature=0.6)
    two, four, _ = collect(model, CHAIN, gumbel_draw(0.6), run, requests(backend, pytestconfig, 0.5))
    assert_law(two, joint_laws(model)[0], SUITE_LIMIT)
    assert_law(four, joint_laws(model)[1], SUITE_LIMIT)


def test_mixed_kinds_in_one_batch(backend: Backend, pytestconfig: pytest.Config):
    """Request r is sampled siblings, deterministic siblings, a sampled chain inside the tree's slots, or greedy."""
    model, parents = Markov(seed=5), RAGGED_TREE
    # the chain 0-1-4-7-9; other slots never drafted
    on_chain = np.isin(np.arange(len(parents)), [0, 1, 4, 7, 9])

    def kind(state: State) -> np.ndarray:
        return state.who % 4

    def draw(state: State, node: int, k: int) -> np.ndarray:
        sampled, top = gumbel_draw()(state, node, k), top_draw(state, node, k)
        ids = np.where((kind(state) == 1)[:, None], top, sampled)
        children = state.children(node)
        return np.where((kind(state) == 2)[:, None] & ~on_chain[children][None], -1, ids)

    texts: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: [], 3: []}
    run = op_verifier(
        backend,
        "rejection",
        deterministic=lambda state: np.broadcast_to((kind(state) == 1)[:, None], state.token_ids.shape),
        temperature=lambda state: np.where(kind(state) == 3, 0.0, 1.0),
    )
    total = requests(backend, pytestconfig)
    for seed in range(max(1, total // CHUNK)):
        text, _ = simulate(model, parents, draw, run, requests=min(total, CHUNK), length=4, seed=seed)
        for which in texts:
            texts[which].append(text[which::4])
    law_two, law_four = joint_laws(model)
    for which in (0, 1, 2):
        assert_law(joint_counts(np.concatenate(texts[which])[:, :2], 16), law_two, SUITE_LIMIT)
        assert_law(joint_counts(np.concatenate(texts[which]), 16, 4), law_four, SUITE_LIMIT)
    greedy, last = [], 0
    for _ in range(4):
        last = int(model.target_logits[last].argmax())
        greedy.append(last)
    assert (np.concatenate(texts[3]) == greedy).all()


def test_coupled_text_equals_plain_decoding(backend: Backend):
    """Whatever is drafted, the text is what `sample` gives with the same seeds, token for token."""
    backend.require("sample")
    model, B, length = Markov(seed=9), 2000, 6
    seeds: list[np.ndarray] = []

    def remember(state: State) -> None:
        seeds.append(state.seeds)

    run = op_verifier(backend, "coupled")
    speculated, first = simulate(model, RAGGED_TREE, top_draw, run, requests=B, length=length, edit=remember)
    last, plain = np.zeros(B, dtype=np.int64), []
    for position in range(length):
        sampling = sampling_tensors(B, backend.device, seed=seeds[0], position=position)
        rows = floats(model.target_logits[last], backend.device)
        last = sk.sample(rows, sampling, **backend.kwargs).token_ids.cpu().numpy().astype(np.int64)
        plain.append(last)
    assert (speculated == np.stack(plain, axis=1)).all()
    assert first.mean() > 1.1


def test_sample_law_and_independence_of_neighbours(backend: Backend, pytestconfig: pytest.Config):
    """Pairs of consecutive positions, and of consecutive seeds, are independent draws of the row's law."""
    backend.require("sample")
    model, total = Markov(seed=3), requests(backend, pytestconfig)
    row = floats(model.target_logits[:1], backend.device)
    p = softmax(model.target_logits[0])
    pairs = {"positions": 0, "seeds": 0}
    for chunk in range(0, total, CHUNK):
        B = min(CHUNK, total - chunk)
        rows = row.expand(B, -1).contiguous()
        drawn = [
            sk.sample(
                rows, sampling_tensors(B, backend.device, seed=chunk + np.arange(B), position=at), **backend.kwargs
            ).token_ids.cpu()
            for at in (0, 1)
        ]
        pairs["positions"] += joint_counts(torch.stack(drawn, 1).numpy(), 16)
        pairs["seeds"] += joint_counts(torch.stack([drawn[0][0::2], drawn[0][1::2]], 1).numpy(), 16)
    for counts in pairs.values():
        assert_law(counts, np.outer(p, p), SUITE_LIMIT)


@pytest.mark.long
def test_wide_vocabulary_by_probability_decile(backend: Backend):
    """V = 151936: emitted ids fall into ten classes of equal target mass; rejection with a narrow drafter."""
    if backend.device == "cpu" and backend.selector is not None:
        pytest.skip("wide rows are too slow on emulated backends")
    V, B, rng = 151936, 4, np.random.default_rng(0)
    target = rng.normal(0, 2, V).astype(np.float32)
    draft = (target + rng.normal(0, 1, V)).astype(np.float32)
    p, q = softmax(target), softmax(draft)
    order = np.argsort(-p)
    decile = np.empty(V, dtype=np.int64)
    decile[order] = np.minimum((np.cumsum(p[order]) * 10).astype(np.int64), 9)
    law = np.bincount(decile, weights=p, minlength=10)
    counts = np.zeros(10)
    logits, drafts = floats(np.tile(target, (2 * B, 1))), floats(np.tile(draft, (B, 1)))
    tree = tree_tensors([chain(1)], backend.device, copies=B)
    rows = ints([[-1, b] for b in range(B)]).ravel()
    for trial in range(1500):
        x = rng.choice(V, size=B, p=q)
        ids = ints(np.stack([np.zeros(B), x], 1)).ravel()
        sampling = sampling_tensors(B, backend.device, seed=trial * B + np.arange(B))
        out = verify(backend, logits, ids, tree, sampling, method="rejection", draft_logits=drafts, draft_rows=rows)
        counts += np.bincount([decile[emitted(out, b)[0]] for b in range(B)], minlength=10)
    assert_law(counts, law, SUITE_LIMIT)
