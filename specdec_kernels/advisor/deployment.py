"""`advise`: which drafter, how large, where to stop, how to keep KV: each answer with the figure it rests on.

Nothing here is a rule of thumb. The inputs are a `DraftSelection` measured on the user's model and prompts, and a
`Workload` read from the user's trace; the thresholds that are usually quoted are shown beside what was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_kernels.advisor.draft_selection import PLAIN, DraftSelection, Measurement

_OP = "advise"
_TRAINED = ("eagle", "eagle3", "mtp", "medusa")  # drafters that know one version of the target's weights


@dataclass(frozen=True)
class Workload:
    """What is served. prompt_tokens, output_tokens: of each request. shared_tokens: prompt tokens that an earlier
    request had as its beginning too (empty: unknown). batch_share: batch size -> share of the steps run at it.
    sampled_share: requests with a temperature; updates_per_day: of the target's weights."""

    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    batch_share: Mapping[int, float]
    shared_tokens: Sequence[int] = ()
    sampled_share: float = 0.0
    updates_per_day: float = 0.0

    def __post_init__(self) -> None:
        for name, values, least in (
            ("prompt_tokens", self.prompt_tokens, 1),
            ("output_tokens", self.output_tokens, 1),
            ("shared_tokens", self.shared_tokens, 0),
        ):
            optional = name == "shared_tokens" and not values
            if (not optional and len(values) != len(self.prompt_tokens)) or not self.prompt_tokens:
                raise ValueError(
                    f"Workload: {name}: expected one for each of {len(self.prompt_tokens)} requests, got {len(values)}"
                )
            if values and min(values) < least:
                raise ValueError(f"Workload: {name}: expected integers >= {least}, got {min(values)}")
        total = sum(self.batch_share.values())
        if not self.batch_share or min(self.batch_share) < 1 or abs(total - 1) > 1e-6:
            raise ValueError(f"Workload: batch_share: expected shares that sum to 1, got {dict(self.batch_share)}")

    @classmethod
    def from_jsonl(cls, path: str | Path, *, updates_per_day: float = 0.0) -> Workload:
        """A line a request: {"prompt_tokens": 812, "output_tokens": 190, "batch": 4, "shared_tokens": 512,
        "temperature": 0.7}; the last two are optional, batch is the number of requests that ran with it."""
        rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
        if not rows:
            raise ValueError(f"Workload: {Path(path).name}: expected a request a line, got none")
        for name in ("prompt_tokens", "output_tokens", "batch"):
            wrong = [i for i, row in enumerate(rows) if not isinstance(row.get(name), int) or row[name] < 1]
            if wrong:
                got = f"{rows[wrong[0]].get(name)!r} in line {wrong[0] + 1}"
                raise ValueError(f"Workload: {name}: expected an integer >= 1 a request, got {got}")
        steps: dict[int, float] = {}
        for row in rows:  # a step at batch b serves b requests at once
            steps[row["batch"]] = steps.get(row["batch"], 0.0) + row["output_tokens"] / row["batch"]
        total = sum(steps.values())
        return cls(
            [row["prompt_tokens"] for row in rows],
            [row["output_tokens"] for row in rows],
            {batch: value / total for batch, value in sorted(steps.items())},
            [row["shared_tokens"] for row in rows] if all("shared_tokens" in row for row in rows) else (),
            sum(row.get("temperature", 0) > 1e-5 for row in rows) / len(rows),
            updates_per_day,
        )


@dataclass(frozen=True)
class Recommendation:
    """One answer. topic: "drafter", "switch off", ...; choice: what to set; reason: why, with the figures in words;
    figures: the same as numbers."""

    topic: str
    choice: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """A threshold as it is usually quoted, what was measured, and whether that bears it out: "yes", "no" or "not
    measured"."""

    rule: str
    measured: str
    borne_out: str


@dataclass(frozen=True)
class Advice:
    recommendations: list[Recommendation]
    rules: list[Rule]

    def __getitem__(self, topic: str) -> Recommendation:
        return next(r for r in self.recommendations if r.topic == topic)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def speedup_at(selection: DraftSelection, candidate: str, batch: int) -> tuple[float, bool]:
    """(predicted speed-up, whether the batch lies within the measured ones): between measured sizes by the logarithm
    of the batch, beyond them that of the nearest."""
    if candidate == PLAIN:
        return 1.0, True
    sizes = selection.batch_sizes
    values = [selection.at(candidate, size).speedup.value for size in sizes]
    value = float(np.interp(math.log2(batch), np.log2(sizes), values))
    return value, sizes[0] <= batch <= sizes[-1]


def advise(
    selection: DraftSelection,
    workload: Workload,
    *,
    target_kv_bytes: int,
    page_size: int = 16,
    prefill_seconds: Mapping[int, float] | None = None,
    soft_hits: float | None = None,
) -> Advice:
    """Answers for this target and this load.

    target_kv_bytes: of one token of the target (`model.kv_shape.bytes_per_token`). prefill_seconds: measured, by
    prompt length (at least two lengths); without it nothing is said about whole requests. soft_hits: share of prompt
    tokens that a running engine found in rejected drafts' KV (`prefix_soft_hits / prefix_queries`).
    """
    if target_kv_bytes < 1:
        raise ValueError(f"{_OP}: target_kv_bytes: expected at least 1, got {target_kv_bytes}")
    if prefill_seconds is not None and len(prefill_seconds) < 2:
        raise ValueError(f"{_OP}: prefill_seconds: expected at least two lengths, got {dict(prefill_seconds)}")
    names = list(dict.fromkeys(m.candidate for m in selection.measurements))
    over_load = {name: _over_load(selection, name, workload) for name in [PLAIN, *names]}
    chosen = max(over_load, key=lambda name: (over_load[name], name == PLAIN))
    answers = [
        _drafter(selection, workload, chosen, over_load),
        _switch_off(selection, chosen),
        _size(selection, chosen, names),
        _prefix_cache(workload, soft_hits),
        _floors(selection, workload, chosen, target_kv_bytes, page_size),
        _updates(workload, chosen),
    ]
    if prefill_seconds is not None:
        answers.append(_whole_requests(selection, workload, chosen, prefill_seconds))
    return Advice(answers, _rules(selection, workload, chosen, prefill_seconds))


def _over_load(selection: DraftSelection, name: str, workload: Workload) -> float:
    """Speed-up over the whole load. batch_share counts steps of plain decoding, so times add up as share / speed-up."""
    return 1.0 / sum(share / speedup_at(selection, name, b)[0] for b, share in workload.batch_share.items())


def _drafter(
    selection: DraftSelection, workload: Workload, chosen: str, over_load: Mapping[str, float]
) -> Recommendation:
    ranking = sorted(over_load, key=lambda name: -over_load[name])
    listed = ", ".join(f"{name} {over_load[name]:.2f}x" for name in ranking)
    outside = [b for b in workload.batch_share if not selection.batch_sizes[0] <= b <= selection.batch_sizes[-1]]
    note = f"; batches {outside} were not measured and count as the nearest" if outside else ""
    return Recommendation(
        "drafter", chosen, f"predicted over this load's batch sizes: {listed}{note}",
        {"speedup": dict(over_load), "unmeasured_batches": outside},
    )  # fmt: skip


def _switch_off(selection: DraftSelection, chosen: str) -> Recommendation:
    if chosen == PLAIN:
        return Recommendation("switch off", "always", "no candidate is predicted to pay on this load")
    rows = {b: selection.at(chosen, b) for b in selection.batch_sizes}
    losing = [b for b, m in rows.items() if m.speedup.high < 1]
    seen = ", ".join(f"{m.speedup.value:.2f}x at {b}" for b, m in rows.items())
    choice = f"from batch {min(losing)} on" if losing else "nowhere in the measured range"
    return Recommendation(
        "switch off", choice,
        f"{chosen}: {seen}. GoodputPolicy decides it step by step from the engine's own times",
        {"speedup": {b: m.speedup.value for b, m in rows.items()}, "losing_batches": losing},
    )  # fmt: skip


def _size(selection: DraftSelection, chosen: str, names: Sequence[str]) -> Recommendation:
    """Sizes are compared where candidates share a stem, as eagle3/8 and eagle3/24 do."""
    stem = chosen.split("/")[0]
    family = [name for name in names if name.split("/")[0] == stem]
    if chosen == PLAIN or len(family) < 2:
        why = "only one size was measured; give sizes of one drafter as NAME/NODES to compare them"
        return Recommendation("tree size", "as measured" if chosen != PLAIN else "none", why)
    per_batch = {b: max(family, key=lambda name: selection.at(name, b).speedup.value) for b in selection.batch_sizes}
    listed = ", ".join(f"{name} at batch {b}" for b, name in per_batch.items())
    return Recommendation("tree size", chosen, f"best of its sizes by batch: {listed}", {"best": per_batch})


def _prefix_cache(workload: Workload, soft_hits: float | None) -> Recommendation:
    if not workload.shared_tokens:
        return Recommendation("prefix cache", "on", "the trace does not tell shared prefixes: measure, then decide")
    share = sum(workload.shared_tokens) / sum(workload.prompt_tokens)
    figures: dict[str, Any] = {"shared_share": share, "soft_hits": soft_hits}
    if share == 0:
        return Recommendation("prefix cache", "off", "no prompt token of this trace was seen before", figures)
    if workload.sampled_share == 0:
        soft, why = "soft pages off", "greedy requests never take a rejected path again"
    elif soft_hits is None:
        soft, why = "soft pages on", f"{workload.sampled_share:.0%} of the requests sample; soft hits are not known yet"
    else:
        soft = "soft pages on" if soft_hits > 0 else "soft pages off"
        why = f"{soft_hits:.2%} of the prompt tokens were found in rejected drafts' KV"
    return Recommendation("prefix cache", f"on, {soft}", f"{share:.0%} of the prompt tokens repeat; {why}", figures)


def _floors(
    selection: DraftSelection, workload: Workload, chosen: str, target_kv_bytes: int, page_size: int
) -> Recommendation:
    lengths = np.array(workload.prompt_tokens) + np.array(workload.output_tokens)
    longest = math.ceil(int(lengths.max()) / page_size)
    per_token = 0 if chosen == PLAIN else selection.at(chosen, selection.batch_sizes[0]).memory_per_token
    share = per_token / (per_token + target_kv_bytes)
    batch = max(b for b, part in workload.batch_share.items() if part > 0)
    mean = float(lengths.mean())
    # A page holds as many bytes for either tenant. A floor is what must never be lent: one longest text for the target,
    # and the drafter's KV of one longest text; the rest may be borrowed in either direction.
    draft_pages = math.ceil(longest * per_token / target_kv_bytes)
    return Recommendation(
        "pool floors", f"target_floor={longest}, draft_floor={draft_pages}",
        f"the longest text has {int(lengths.max())} tokens; the draft's KV is {share:.1%} of all KV, so a fixed "
        f"reservation would waste what differs from that; a full batch of {batch} mean texts needs "
        f"{math.ceil(batch * mean / page_size)} target pages",
        {"target_floor": longest, "draft_floor": draft_pages, "draft_share": share},
    )  # fmt: skip


def _updates(workload: Workload, chosen: str) -> Recommendation:
    trained = chosen.split("/")[0] in _TRAINED
    if workload.updates_per_day == 0:
        return Recommendation("target updates", "nothing to do", "the target's weights do not change")
    if not trained:
        why = f"{chosen} draws on the text or on the target itself: new weights only flush cached KV"
        return Recommendation("target updates", "Engine.weights_changed() after each", why)
    why = (
        f"{chosen} was trained on one version of the weights, which change {workload.updates_per_day:g} times a day: "
        "watch its conditional acceptance per version (docs/monitoring.md), train again when the alert fires"
    )
    return Recommendation("target updates", "Engine.weights_changed() after each; retrain on alert", why)


def _whole_requests(
    selection: DraftSelection, workload: Workload, chosen: str, prefill_seconds: Mapping[int, float]
) -> Recommendation:
    classes = _by_prompt_length(selection, workload, chosen, prefill_seconds)
    listed = ", ".join(f"{name}: {value:.2f}x" for name, value in classes.items())
    return Recommendation("whole requests", f"{classes['all']:.2f}x", f"prefill included, {listed}", classes)


def _by_prompt_length(
    selection: DraftSelection, workload: Workload, chosen: str, prefill_seconds: Mapping[int, float]
) -> dict[str, float]:
    """Speed-up of whole requests at the load's batch sizes: speculation shortens decoding alone."""
    known = sorted(prefill_seconds)
    prompts, outputs = np.array(workload.prompt_tokens), np.array(workload.output_tokens)
    fresh = prompts - (np.array(workload.shared_tokens) if workload.shared_tokens else 0)
    prefill = np.interp(fresh, known, [prefill_seconds[n] for n in known])
    sizes = selection.batch_sizes
    measured = [next(m.plain_seconds for m in selection.measurements if m.batch == size) for size in sizes]
    tokens = {b: share * b for b, share in workload.batch_share.items()}  # a step at batch b is a token of b requests
    plain_step = sum(n * np.interp(b, sizes, measured) for b, n in tokens.items()) / sum(tokens.values())
    speedup = _over_load(selection, chosen, workload)
    plain, drafted = prefill + outputs * plain_step, prefill + outputs * plain_step / speedup
    masks = {
        "under 500": prompts < 500,
        "500 to 2000": (prompts >= 500) & (prompts <= 2000),
        "over 2000": prompts > 2000,
    }
    found = {name: float(plain[mask].sum() / drafted[mask].sum()) for name, mask in masks.items() if mask.any()}
    return found | {"all": float(plain.sum() / drafted.sum())}


def _rules(
    selection: DraftSelection, workload: Workload, chosen: str, prefill_seconds: Mapping[int, float] | None
) -> list[Rule]:
    first = selection.batch_sizes[0]
    rows: list[Measurement] = [m for m in selection.measurements if m.batch == first]
    low = [m for m in rows if m.conditional_acceptance.value < 0.65]
    lows = ", ".join(f"{m.candidate} {m.conditional_acceptance.value:.2f}: {m.speedup.value:.2f}x" for m in low)
    ok = {True: "yes", False: "no"}
    rules = [
        Rule(
            "an acceptance under 65 % gives less than 1.3x",
            f"at batch {first}: {lows}" if low else "no candidate is below 65 %",
            ok[all(m.speedup.value < 1.3 for m in low)] if low else "not measured",
        )
    ]
    large = [b for b in selection.batch_sizes if b > 8]
    beyond = ", ".join(f"{selection.best(b)} at {b}" for b in large)
    rules.append(
        Rule("speculation stops paying beyond batch 8", f"best: {beyond}" if large else "no batch above 8 was measured",
             ok[all(selection.best(b) == PLAIN for b in large)] if large else "not measured")
    )  # fmt: skip
    rule = "prompts under 500 tokens gain nothing, over 2000 most"
    if prefill_seconds is None:
        return [*rules, Rule(rule, "no prefill times were given", "not measured")]
    classes = _by_prompt_length(selection, workload, chosen, prefill_seconds)
    short, long = classes.get("under 500"), classes.get("over 2000")
    text = ", ".join(f"{name}: {value:.2f}x" for name, value in classes.items() if name != "all")
    known = short is not None and long is not None and chosen != PLAIN
    holds = known and short < 1.05 and long > short  # type: ignore[operator]
    return [*rules, Rule(rule, text, ok[bool(holds)] if known else "not measured")]
