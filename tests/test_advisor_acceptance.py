"""Estimators of acceptance against known truths: what they converge to, what they ignore, whether intervals hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdec_kernels.advisor import rollout as ro
from specdec_kernels.advisor.acceptance import AcceptanceCounts, AcceptanceLog, StepRecord
from specdec_kernels.tree import check_d2t


def simulate(log: AcceptanceLog, rng, request, alpha: float, num_drafts: int, steps: int, **tags) -> None:
    """Steps of a chain with one conditional acceptance."""
    accepted = np.cumprod(rng.random((steps, num_drafts)) < alpha, axis=1).sum(axis=1)
    for count in accepted.tolist():
        log.add(StepRecord(request, num_drafts, count, **tags))


# ---- estimators


def test_censored_estimate_finds_alpha_and_the_ratio_does_not():
    log = AcceptanceLog()
    simulate(log, np.random.default_rng(0), 0, 0.7, 5, 20_000)
    counts = log.estimate(num_resamples=1).counts
    assert counts.conditional_acceptance == pytest.approx(0.7, abs=0.01)
    assert counts.accepted_over_drafted == pytest.approx(1.941 / 5, abs=0.01)  # .388: not an alpha
    assert counts.accepted_length == pytest.approx(2.941, abs=0.03)
    assert counts.conditional_acceptance_per_position == pytest.approx([0.7] * 5, abs=0.03)
    assert counts.acceptance_per_position == pytest.approx([0.7**i for i in range(1, 6)], abs=0.02)


def test_short_drafts_are_no_rejections_at_later_positions():
    counts = AcceptanceCounts()
    for num_drafts, accepted in ((1, 1), (1, 1), (3, 3), (3, 0)):
        counts.add(StepRecord(0, num_drafts, accepted))
    assert counts.acceptance_per_position.tolist() == [3 / 4, 1 / 2, 1 / 2]  # over steps it would be .75, .25, .25
    assert counts.conditional_acceptance_per_position.tolist() == [3 / 4, 1.0, 1.0]
    assert counts.conditional_acceptance == 5 / 6


def test_a_block_cut_by_a_limit_counts_nothing_behind_the_cut():
    counts = AcceptanceCounts()
    counts.add(StepRecord(0, 4, 4, num_emitted=2))
    counts.add(StepRecord(0, 4, 1, num_emitted=1))  # its rejection lies behind the cut
    assert (counts.accepted, counts.emitted, counts.rejections, counts.drafted) == (3, 3, 0, 8)
    assert counts.reached_per_pos.tolist() == [2, 1, 0, 0]


def test_tree_path_that_ends_is_no_rejection():
    counts = AcceptanceCounts()
    counts.add(StepRecord(0, 8, 1, depth=3, rejected=False))
    counts.add(StepRecord(0, 8, 1, depth=3, rejected=True))
    assert counts.conditional_acceptance == 2 / 3
    assert counts.reached_per_pos.tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="rejected: expected True or False for a tree, got None"):
        StepRecord(0, 8, 1, depth=3)


def test_expected_and_realised_conditional_acceptance_agree():
    """Overlaps vary by position; both estimators weigh positions by how often they are reached."""
    rng = np.random.default_rng(1)
    log = AcceptanceLog()
    for request in range(400):
        overlaps = rng.beta(3, 1, size=(20, 4))
        coins = rng.random((20, 4)) < overlaps
        for row, coin in zip(overlaps, coins):
            accepted = int(np.cumprod(coin).sum())
            log.add(StepRecord(request, 4, accepted, overlaps=tuple(row[: min(4, accepted + 1)])))
    estimate = log.estimate()
    expected, realised = estimate.expected_conditional_acceptance, estimate.conditional_acceptance
    assert expected.value == pytest.approx(realised.value, abs=0.01)
    assert expected.high - expected.low < realised.high - realised.low  # no coin noise


def test_counts_merge_exactly_in_any_order():
    logs = []
    for worker in range(3):
        log = AcceptanceLog()
        rng = np.random.default_rng(worker)
        simulate(log, rng, worker, 0.6, 2 + worker, 50)
        log.add_overlaps("text", rng.random(100).tolist())
        logs.append(log)
    merged = []
    for a, b, c in itertools.permutations(logs):
        merged.append(a.merge(b).merge(c).estimate(num_resamples=1).counts)
        merged.append(a.merge(b.merge(c)).estimate(num_resamples=1).counts)
    for counts in merged[1:]:
        for name, value in vars(merged[0]).items():
            assert np.array_equal(value, getattr(counts, name)), name


def test_domains_and_temperatures_are_kept_apart():
    log, rng = AcceptanceLog(), np.random.default_rng(2)
    for request in range(30):
        simulate(log, rng, request, 0.8, 4, 100, domain="code", temperature=0.0)
        simulate(log, rng, 100 + request, 0.5, 4, 100, domain="chat", temperature=1.0)
    together, chat, code = log.estimates()
    assert (chat.domain, chat.temperature, code.domain, code.temperature) == ("chat", 1.0, "code", 0.0)
    assert code.conditional_acceptance.low < 0.8 < code.conditional_acceptance.high
    assert chat.conditional_acceptance.low < 0.5 < chat.conditional_acceptance.high
    assert chat.conditional_acceptance.high < together.conditional_acceptance.value < code.conditional_acceptance.low
    assert len(code.per_position) == 4
    assert all(p.low <= p.value <= p.high for p in code.per_position)


def test_long_tailed_requests_are_weighed_by_tokens():
    """90 requests of 20 tokens at .85, 10 of 2000 at .6: the load accepts at about .6, the mean request at .82."""
    log, rng = AcceptanceLog(), np.random.default_rng(3)
    for request in range(100):
        alpha, tokens = (0.85, 20) if request < 90 else (0.6, 2000)
        simulate(log, rng, request, alpha, 5, round(tokens * (1 - alpha) / (1 - alpha**6)))
    weighed = log.estimate().conditional_acceptance
    by_request = np.mean([c.conditional_acceptance for c in log.by_request().values()])
    assert weighed.value == pytest.approx(0.617, abs=0.015)
    assert by_request == pytest.approx(0.825, abs=0.03)
    assert weighed.high < by_request


def coverage(resample: str, trials: int) -> float:
    """Share of logs whose 90 % interval holds the truth; 60 requests of very different acceptance each."""
    hits = 0
    for trial in range(trials):
        rng = np.random.default_rng([7, trial])
        log = AcceptanceLog()
        for request, alpha in enumerate(rng.beta(4, 4, size=60)):
            accepted = (rng.random(100) < alpha).tolist()
            if resample == "requests":
                counts = AcceptanceCounts(accepted=sum(accepted), rejections=100 - sum(accepted))
                log.cells[("", 0.0, request)] = counts
            else:  # every ten drafts of a request as if they were a request of their own
                for part in range(10):
                    piece = sum(accepted[10 * part : 10 * part + 10])
                    log.cells[("", 0.0, (request, part))] = AcceptanceCounts(accepted=piece, rejections=10 - piece)
        interval = log.estimate(confidence=0.9, num_resamples=300, seed=trial).conditional_acceptance
        hits += interval.low <= 0.5 <= interval.high
    return hits / trials


def test_intervals_hold_the_truth():
    assert 0.84 <= coverage("requests", 200) <= 0.96


def test_control_intervals_from_parts_of_requests_are_too_narrow():
    assert coverage("parts", 60) < 0.75


def test_one_request_has_no_interval():
    log = AcceptanceLog([StepRecord(0, 4, 2)])
    estimate = log.estimate()
    assert estimate.conditional_acceptance.value == 2 / 3
    assert np.isnan(estimate.conditional_acceptance.low)
    assert np.isnan(AcceptanceLog().estimate().accepted_length.value)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"num_drafted": -1}, "num_drafted: expected >= 0, got -1"),
        ({"num_drafted": 2, "num_accepted": 3}, r"num_accepted: expected 0\.\.2, got 3"),
        ({"num_drafted": 2, "num_accepted": -1}, r"num_accepted: expected 0\.\.2, got -1"),
        ({"num_drafted": 2, "num_accepted": 1, "num_emitted": 3}, r"num_emitted: expected 0\.\.2, got 3"),
        ({"num_drafted": 2, "num_masked": 3}, r"num_masked: expected 0\.\.2, got 3"),
        ({"num_drafted": 2, "num_accepted": 2, "rejected": True}, "expected False where every depth was accepted"),
        ({"num_drafted": 1, "overlaps": (1.5,)}, r"overlaps: expected values in \[0, 1\]"),
    ],
)
def test_wrong_records_are_refused(record, words):
    with pytest.raises(ValueError, match=words):
        StepRecord("r", **record)


# ---- two models


def markov(seed: int, size: int) -> tuple[np.ndarray, ro.Model]:
    """A model whose next-token law depends on the last token only: its table, and the callable."""
    table = np.random.default_rng(seed).dirichlet(np.full(size, 0.7), size=size)
    logits = torch.tensor(np.log(table))
    return table, lambda ids: logits[ids]


def test_on_policy_measurement_against_the_exact_chain():
    """M = min(p, q) row by row moves on an accepted draft, p - M on a rejection, p on the bonus token."""
    (p, target), (q, draft) = markov(7, 4), markov(8, 4)
    prompts = [torch.tensor([i % 4]) for i in range(150)]
    counts = ro.measure_acceptance(target, draft, prompts, num_drafts=3, max_tokens=80, seed=5).estimate().counts
    assert counts.emitted == 150 * 80
    M = np.minimum(p, q)
    step = sum(np.linalg.matrix_power(M, i) @ (p - M) for i in range(3)) + np.linalg.matrix_power(M, 3) @ p
    start = np.linalg.matrix_power(step, 200)[0]  # where steps begin in the long run
    reach = [float(start @ np.linalg.matrix_power(M, i).sum(1)) for i in range(4)]
    exact = sum(reach[1:]) / sum(reach[:3])
    assert counts.conditional_acceptance == pytest.approx(exact, abs=0.015)
    assert counts.expected_conditional_acceptance == pytest.approx(exact, abs=0.01)
    assert counts.accepted_length == pytest.approx(1 + sum(reach[1:]), rel=0.02)  # the last block is cut
    assert counts.expected_conditional_acceptance != pytest.approx(M.sum(1).mean(), abs=0.05)  # all states alike


def test_text_of_the_measurement_has_the_targets_law():
    """Target (.4, .6), draft (.8, .2): token 0 is accepted half the time; the third column of both heads is padding."""
    target, draft = torch.tensor([0.4, 0.6, 1e20]).log(), torch.tensor([0.8, 0.2, 1e20]).log()
    texts: list[list[int]] = []

    def spying(ids: torch.Tensor) -> torch.Tensor:
        texts.append(ids.tolist())
        return target.expand(len(ids), 3)

    counts = np.zeros(3)
    for seed in range(4000):  # the second verification's text holds what the first one emitted
        ro.measure_acceptance(
            spying,
            lambda ids: draft.expand(len(ids), 3),
            [torch.tensor([1])],
            num_drafts=1,
            max_tokens=2,
            vocab_size=2,
            seed=seed,
        )
        counts[texts[-1][1]] += 1
    assert counts[2] == 0
    assert abs(counts[0] - 1600) < 4.9 * np.sqrt(4000 * 0.4 * 0.6)
    assert abs(counts[0] - 3200) > 4.9 * np.sqrt(4000 * 0.4 * 0.6)  # control: the draft's law


def test_result_of_a_prompt_does_not_depend_on_the_others():
    (_, target), (_, draft) = markov(1, 4), markov(2, 4)
    prompts = [torch.tensor([0]), torch.tensor([1])]
    both = ro.measure_acceptance(target, draft, prompts, num_drafts=3, max_tokens=30)
    one = ro.measure_acceptance(target, draft, prompts[:1], num_drafts=3, max_tokens=30)
    assert vars(both.by_request()[0])["accepted"] == vars(one.by_request()[0])["accepted"]


def test_greedy_counts_agreement_and_stops_at_the_end_token():
    target = lambda ids: torch.nn.functional.one_hot((ids + 1) % 8, 8).double() * 9  # noqa: E731
    draft = lambda ids: torch.nn.functional.one_hot(torch.where(ids == 3, 0, (ids + 1) % 8), 8).double()  # noqa: E731
    log = ro.measure_acceptance(
        target, draft, [torch.tensor([0])], num_drafts=4, max_tokens=50, filters=ro.Filters(0.0), eos_token_id=7
    )
    counts = log.estimate().counts
    # 1 2 3 accepted, 0 refused, 4 recovered | 5 6 7 accepted; the end token cuts the block there
    assert (counts.steps, counts.emitted, counts.accepted, counts.rejections) == (2, 7, 6, 1)
    assert counts.expected_conditional_acceptance == 6 / 7


def test_identical_models_accept_everything():
    _, target = markov(1, 6)
    log = ro.measure_acceptance(target, target, [torch.tensor([0])] * 20, num_drafts=4, max_tokens=40)
    assert log.estimate().counts.conditional_acceptance == 1.0


def test_overlap_uses_the_filtered_laws():
    draft, target = torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), torch.tensor([0.35, 0.45, 0.15, 0.05]).log()
    assert float(ro.overlap(target, draft, filters=ro.Filters(top_k=2))) == pytest.approx(0.866, abs=5e-4)
    assert float(ro.overlap(target, draft, filters=ro.Filters(0.0))) == 0.0


@pytest.mark.parametrize(
    ("law", "filters", "right"),
    [
        ([0.4, 0.3, 0.3, 0.0], ro.Filters(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (
            [0.40, 0.30, 0.15, 0.10, 0.05],
            ro.Filters(top_k=3, top_p=0.8),
            [4 / 7, 3 / 7, 0, 0, 0],
        ),  # top-p over the kept
        ([0.5, 0.3, 0.2], ro.Filters(top_k=1, top_p=0.8), [1, 0, 0]),
        ([0.6, 0.25, 0.1, 0.05], ro.Filters(min_p=0.2), [0.6 / 0.85, 0.25 / 0.85, 0, 0]),
        ([0.25, 0.75], ro.Filters(temperature=0.5), [0.1, 0.9]),
        ([0.4, 0.4, 0.2], ro.Filters(temperature=0.0), [1, 0, 0]),
    ],
)
def test_filters(law, filters, right):
    assert filters.law(torch.tensor(law).log()).tolist() == pytest.approx(right, abs=1e-6)


def test_reduced_draft_vocabulary():
    """Map [0,2,5]: target law [.1,.2,.3,.1,.1,.2], draft law [.5,.3,.2] on those ids."""
    target = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.2], dtype=torch.float64).log()
    draft = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    d2t, _ = check_d2t(torch.tensor([0, 1, 3]), draft_vocab_size=3, target_vocab_size=6, kind="offset")
    assert float(ro.overlap(target, draft, d2t=d2t)) == pytest.approx(0.1 + 0.3 + 0.2)


def test_wrong_logits_are_refused():
    with pytest.raises(ValueError, match=r"draft_logits: expected leading shape \[3\], got \[2\]"):
        ro.overlap(torch.zeros(3, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="logits: expected numbers, got NaN"):
        ro.overlap(torch.tensor([float("nan"), 0.0]), torch.zeros(2))
    with pytest.raises(ValueError, match="prompts: expected non-empty"):
        ro.measure_acceptance(
            lambda i: torch.zeros(len(i), 4),
            lambda i: torch.zeros(len(i), 4),
            [torch.tensor([1]), torch.tensor([])],
            num_drafts=1,
            max_tokens=1,
        )
