"""Cases VT-03 and VT-05 (vocabularies), ME-01 to ME-03 (what is counted) and PF-04 (when not to draft)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_kernels.advisor import tokenizer_check as tc
from specdec_kernels.advisor import vocabulary as vb
from specdec_kernels.advisor.acceptance import AcceptanceCounts, StepRecord
from specdec_kernels.advisor.rollout import overlap
from specdec_kernels.advisor.selection import CostTable, choose_num_drafts

TARGET = {0: b"<s>", 1: b"a", 2: b"b", 3: b"ab"}


# ---- VT-05


def test_VT_05_same_size_is_not_same_tokens():
    report = tc.check_tokenizers(TARGET, {0: b"<s>", 1: b"a", 2: b"ab", 3: b"b"})
    assert report.verdict == tc.INCOMPATIBLE
    assert report.summary.startswith("incompatible, 2 of 4 differ, first at 2")
    assert report.first_differences == [tc.Difference(2, b"b", b"ab"), tc.Difference(3, b"ab", b"b")]


def test_VT_05_same_prefix_is_usable():
    six = TARGET | {4: b"c", 5: b"d"}
    report = tc.check_tokenizers(six, TARGET)
    assert (report.verdict, report.num_ids) == (tc.PREFIX, 4)
    assert report.summary.startswith("compatible on 4 ids")
    assert tc.check_tokenizers(TARGET, six).num_ids == 4  # a longer draft as well: ids from 4 on are never proposed


def test_VT_05_other_eos_is_flagged_with_both_ids():
    report = tc.check_tokenizers(vb.from_map(TARGET, special={"eos": 0}), vb.from_map(TARGET, special={"eos": 3}))
    assert report.verdict == tc.COMPATIBLE
    assert report.special_differences == {"eos": (0, 3)}
    assert report.flags == ["eos id: target 0, draft 3"]
    same = tc.check_tokenizers(vb.from_map(TARGET, special={"eos": 0}), vb.from_map(TARGET, special={"eos": 0}))
    assert not same.flags


def test_VT_05_conversion_adds_nothing():
    draft, target = {0: b"a", 1: b"b"}, vb.from_map(TARGET, special={"bos": 0})
    assert tc.check_tokenizers(target, draft).verdict == tc.CONVERSION
    assert tc.convert_drafts([0, 1], draft, target) == [3]


def test_VT_05_conversion_through_a_tokenizer_that_prepends_bos_adds_nothing():
    from tokenizers import AddedToken, Tokenizer, models, processors

    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer.encode("ab").ids == [0, 3]  # what re-encoding draft text would give
    assert tc.convert_drafts([0, 1], {0: b"a", 1: b"b"}, tokenizer) == [3]


# ---- PF-04

PF_04 = CostTable({1: {0: 10.0, 1: 10.2, 3: 10.5}, 64: {0: 20.0, 1: 34.0, 3: 60.0}}, draft_time=1.0)


@pytest.mark.parametrize(
    ("batch", "num_drafts", "per_token"),
    [(1, 3, {0: 10.0, 1: 7.467, 3: 7.2}), (64, 0, {0: 20.0, 1: 23.333, 3: 33.6})],
)
def test_PF_04_says_no_drafts_at_large_batches(batch, num_drafts, per_token):
    choice = choose_num_drafts(PF_04, 0.5, batch)
    assert choice.num_drafts == num_drafts
    assert choice.time_per_token == pytest.approx(per_token, abs=1e-3)


@pytest.mark.parametrize(("batch", "expected"), [(1, 3), (64, 0)])
def test_PF_04_no_flapping_when_estimates_wobble_by_two_percent(batch, expected):
    rng = np.random.default_rng(0)
    current = None
    for _ in range(500):
        rows = {b: {k: t * rng.uniform(0.98, 1.02) for k, t in row.items()} for b, row in PF_04.verify_time.items()}
        table = CostTable(rows, 1.0 * rng.uniform(0.98, 1.02))
        current = choose_num_drafts(table, 0.5 * rng.uniform(0.98, 1.02), batch, current).num_drafts
        assert current == expected


# ---- VT-03


@pytest.mark.parametrize("filler", [0.0, 50.0])
def test_VT_03_narrower_and_wider_draft_heads(filler):
    """Acceptance sees real tokens only: padding with logit 0 would have mass, and mass behind the target's end too."""
    law = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    other = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.2], dtype=torch.float64)
    right = float(torch.minimum(law, other).sum())
    padding = torch.full((3,), filler, dtype=torch.float64)
    padded, narrow = torch.cat([law.log(), padding]), other.log()
    assert float(overlap(padded, narrow, vocab_size=5)) == pytest.approx(right)
    assert float(overlap(narrow, padded)) == pytest.approx(right)
    eight = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.05, 0.05, 0.1], dtype=torch.float64)
    assert float(overlap(eight.log(), narrow)) == pytest.approx(float(torch.minimum(eight[:5], other).sum()))


# ---- ME-01 to ME-03


def test_ME_01_counts_are_never_negative():
    counts = AcceptanceCounts()
    history = []
    for record in (
        StepRecord.from_emitted("r", num_drafted=3, num_emitted=0),  # an error row: nothing returned
        StepRecord("r", num_drafted=3, failed=True),  # aborted in mid-step
        StepRecord.from_emitted("r", num_drafted=3, num_emitted=1),
        StepRecord.from_emitted("r", num_drafted=3, num_emitted=4),
    ):
        counts.add(record)
        history.append([counts.steps, counts.failed_steps, counts.drafted, counts.accepted, counts.emitted])
    assert history == [[0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [1, 2, 3, 0, 1], [2, 2, 6, 3, 5]]


@pytest.mark.parametrize(
    ("record", "drafted", "masked", "accepted", "emitted"),
    [
        (StepRecord("r", num_drafted=5 - 1, num_accepted=2, depth=2), 4, 0, 2, 3),  # tree of 5 nodes, root included
        (StepRecord("r", num_drafted=3, num_masked=3), 3, 3, 0, 1),
        (StepRecord("r", num_drafted=0), 0, 0, 0, 1),
        (StepRecord("r", num_drafted=4, num_accepted=4, num_emitted=2), 4, 0, 2, 2),  # max_tokens cuts the block
    ],
)
def test_ME_02_what_counts_as_drafted(record, drafted, masked, accepted, emitted):
    counts = AcceptanceCounts()
    counts.add(record)
    assert (counts.steps, counts.drafted, counts.masked) == (1, drafted, masked)
    assert (counts.accepted, counts.emitted) == (accepted, emitted)
    assert counts.accepted <= counts.emitted
    assert np.isnan(counts.accepted_over_drafted) == (drafted == 0)  # no division by zero


def test_ME_03_token_weighted_rates():
    counts = AcceptanceCounts()
    counts.add(StepRecord("a", num_drafted=4, num_accepted=4))
    counts.add(StepRecord("b", num_drafted=1, num_accepted=0))
    assert counts.accepted_over_drafted == 4 / 5
    assert counts.accepted_length == 3.0
    assert counts.acceptance_per_position.tolist() == [0.5, 1, 1, 1]
    shards = [AcceptanceCounts(drafted=100, accepted=90), AcceptanceCounts(drafted=10, accepted=1)]
    assert (shards[0] + shards[1]).accepted_over_drafted == (shards[1] + shards[0]).accepted_over_drafted == 91 / 110
