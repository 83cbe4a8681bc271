"""Which drafter serves this target best at these batch sizes: acceptance and costs measured on the user's own prompts.

What a step emits is the text's affair and hardly depends on the batch; what it costs is the batch's affair and hardly
depends on the text. So tokens a step are pooled over all batch sizes, request by request, and step costs are measured
at each size, in turns that interleave the candidates with plain decoding:

    speed-up(batch) = tokens a step * plain step(batch) / candidate's step(batch)

A drafter that drafts when it finds something has cheap and dear steps, and a few turns meet another mix of them than
whole texts do. So a step's cost is taken at the number of drafts that whole texts gave, along a robust line through the
turns:

    turn's step / plain step
      |            . x          slope: Theil-Sen, the median over pairs of turns
      |        x .              cost:  median of the turns, each moved along the slope to
      |    . x                         the mean number of drafts of whole texts
      | x ______________ drafts a request and step
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec_kernels.advisor.acceptance import Interval
from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.metrics import SpecCounters
from specdec_kernels.engine.tokens import encode_prompt

PLAIN = "none"
_OP = "select_draft_model"
_TURNS_A_TEXT = 3  # then other prompts: more texts in few turns, where every turn would prefill more than it measures


@dataclass(frozen=True)
class Candidate:
    """A way to draft. `make`: a drafter's name, or a function that makes a drafter (a drafter belongs to one engine).
    num_drafts: most draft nodes a request and step."""

    make: str | Callable[[], Any]
    num_drafts: int = 15


@dataclass(frozen=True)
class Measurement:
    """One candidate at one batch size. Seconds: plain_seconds and draft_seconds are medians over turns of the mean
    step, step_seconds is plain_seconds times the cost (above). speedup's interval joins a bootstrap over requests
    (tokens a step) with one over turns (costs).

    memory: bytes of the draft's own parameters; memory_per_token: of its KV. verdict: "pays" where the whole interval
    lies above 1, "does not pay" where it lies below, else "undecided".
    """

    candidate: str
    batch: int
    tokens_per_step: Interval
    conditional_acceptance: Interval
    accepted_over_drafted: Interval
    step_seconds: float
    draft_seconds: float
    plain_seconds: float
    speedup: Interval
    memory: int
    memory_per_token: int
    verdict: str

    @property
    def step_cost(self) -> float:
        """A step, drafting included, in plain decode steps."""
        return self.step_seconds / self.plain_seconds

    @property
    def draft_cost(self) -> float:
        """Drafting of one step, in plain decode steps."""
        return self.draft_seconds / self.plain_seconds


@dataclass(frozen=True)
class DraftSelection:
    """What `select_draft_model` found. measurements: by candidate and batch, in the order given."""

    target: str
    num_prompts: int
    temperature: float
    measurements: list[Measurement]

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({m.batch for m in self.measurements})

    def at(self, candidate: str, batch: int) -> Measurement:
        """KeyError if it was not measured."""
        for m in self.measurements:
            if (m.candidate, m.batch) == (candidate, batch):
                return m
        raise KeyError(f"DraftSelection: expected a measured candidate and batch, got {candidate!r} at {batch}")

    def best(self, batch: int) -> str:
        """The candidate with the greatest predicted speed-up at a measured batch; "none" where none exceeds 1."""
        found = [m for m in self.measurements if m.batch == batch]
        if not found:
            raise KeyError(f"DraftSelection: batch: expected one of {self.batch_sizes}, got {batch}")
        winner = max(found, key=lambda m: m.speedup.value)
        return winner.candidate if winner.speedup.value > 1.0 else PLAIN

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(columns, rows) of text, for `print_table`."""
        columns = ["candidate", "batch", "tokens a step", "conditional acceptance", "accepted/drafted",
                   "step cost", "draft cost", "speed-up (95 %)", "memory MB", "verdict"]  # fmt: skip
        rows = []
        for m in self.measurements:
            mark = " (best)" if self.best(m.batch) == m.candidate else ""
            rows.append([
                m.candidate, str(m.batch), f"{m.tokens_per_step.value:.2f}", f"{m.conditional_acceptance.value:.2f}",
                f"{m.accepted_over_drafted.value:.2f}", f"{m.step_cost:.2f}", f"{m.draft_cost:.2f}",
                f"{m.speedup.value:.2f} ({m.speedup.low:.2f} to {m.speedup.high:.2f})", f"{m.memory / 1e6:.1f}",
                m.verdict + mark,
            ])  # fmt: skip
        return columns, rows

    def to_json(self) -> str:
        best = {str(batch): self.best(batch) for batch in self.batch_sizes}
        return json.dumps(asdict(self) | {"best": best}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> DraftSelection:
        """Read what `to_json` wrote. ValueError if it is something else."""
        try:
            raw = json.loads(text)
            raw.pop("best")
            rows = raw.pop("measurements")
            spans = ("tokens_per_step", "conditional_acceptance", "accepted_over_drafted", "speedup")
            found = [Measurement(**row | {name: Interval(**row[name]) for name in spans}) for row in rows]
            return cls(**raw, measurements=found)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"DraftSelection: expected what `select --out` writes, got {error!r}") from None

    def plot(self, path: str | Path) -> None:
        """Predicted speed-up by batch size, with intervals, as SVG or PNG. Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(m.candidate for m in self.measurements):
            found = sorted((m for m in self.measurements if m.candidate == name), key=lambda m: m.batch)
            middle = np.array([m.speedup.value for m in found])
            spread = np.array([[m.speedup.low, m.speedup.high] for m in found]).T
            axes.errorbar([m.batch for m in found], middle, np.abs(spread - middle), marker="o", capsize=3, label=name)
        axes.axhline(1.0, color="grey", linewidth=1, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(self.batch_sizes, [str(b) for b in self.batch_sizes])
        axes.set_xlabel("batch size")
        axes.set_ylabel("predicted speed-up over plain decoding")
        axes.set_title(f"Drafters for {self.target}, {self.num_prompts} prompts")
        axes.legend()
        figure.savefig(path)


class _Arm:
    """One candidate decoding at one batch size, in turns of some steps; prompts follow one another as texts end."""

    def __init__(self, target: Any, candidate: Candidate, prompts: Sequence[Sequence[int]], batch: int, options: Any):
        self.prompts, self.batch, self.parameters = prompts, batch, options.parameters
        self.most = candidate.num_drafts + 1  # tokens a step
        self.steps: list[float] = []
        self.drafts: list[float] = []
        self.nodes: list[float] = []  # drafts a request and step
        self._next = 0
        self._left: dict[int, int] = {}  # tokens to come, by request
        self.engine = _engine(target, candidate, batch, options.num_pages)

    def turn(self, num_steps: int) -> None:
        """Run a turn within which no text ends, and note what its mean step took."""
        ending = min(self._left.values(), default=0) <= num_steps * self.most
        if ending or len(self.steps) % _TURNS_A_TEXT == 0:
            self._refill()
        counted, start = self.engine.metrics, time.perf_counter()
        before, nodes, steps = counted.draft_time_s, counted.drafted, counted.steps
        for _ in range(num_steps):
            self._step()
        self.steps.append((time.perf_counter() - start) / num_steps)
        self.drafts.append((counted.draft_time_s - before) / num_steps)
        self.nodes.append((counted.drafted - nodes) / (counted.steps - steps))

    def _refill(self) -> None:
        """The next prompts, prefilled: turns measure decoding alone."""
        for request_id in self._left:
            self.engine.abort(request_id)
        chosen = [self.prompts[(self._next + i) % len(self.prompts)] for i in range(self.batch)]
        self._next += self.batch
        requests = [Request(prompt, **self.parameters) for prompt in chosen]
        self._left = {self.engine.add(request): request.max_tokens for request in requests}
        while max(self._left.values()) == self.parameters["max_tokens"]:  # until the last one gave its first token
            self._step()

    def _step(self) -> None:
        for event in self.engine.step():
            if event.result is not None:
                raise _ended(self.parameters["max_tokens"], event.result.finish_reason)
            self._left[event.request_id] -= len(event.token_ids)


def _ended(max_tokens: int, reason: str) -> ValueError:
    return ValueError(
        f"{_OP}: expected texts of {max_tokens} tokens to fit the context and num_pages, "
        f"got one that ended with {reason!r}"
    )


@dataclass(frozen=True)
class _Options:
    parameters: Mapping[str, Any]
    num_pages: int


def _engine(target: Any, candidate: Candidate, batch: int, num_pages: int) -> Engine:
    drafter = candidate.make if isinstance(candidate.make, str) else candidate.make()
    config = EngineConfig(
        num_pages=num_pages, max_batch=batch, num_drafts=candidate.num_drafts, prefix_cache=False,
        max_step_tokens=EngineConfig.page_size * num_pages,  # a prompt is prefilled whole
    )  # fmt: skip
    return Engine(target, drafter, config)


def select_draft_model(
    target: Any,
    candidates: Mapping[str, Candidate | str],
    prompts: Sequence[Any],
    batch_sizes: Sequence[int] = (1, 4, 8),
    *,
    max_tokens: int = 128,
    turns: int = 9,
    steps_per_turn: int = 4,
    temperature: float = 0.0,
    num_pages: int = 2048,
    seed: int = 0,
    report: Callable[[str], None] | None = None,
) -> DraftSelection:
    """Measure every candidate against plain decoding on `prompts` and predict its speed-up at each batch size.

    target: a loaded model (`load_model`). candidates: name -> drafter name or `Candidate`; "none" is measured anyway.
    prompts: text, token ids or chat messages, as `Request` takes them; use at least 20 of the kind that will be
    served. Each is decoded once a candidate, max_tokens tokens, for acceptance; then costs are measured at every batch
    size in `turns` turns of steps_per_turn steps, all candidates in each turn, after one turn of warm-up. Batches
    larger than the number of prompts repeat them. report: called with a line of progress.

    The prediction is of throughput (all tokens over all steps) of texts that run to their end, prefill apart.
    ValueError for bad input or texts that do not fit.
    """
    wanted = {name: Candidate(c) if isinstance(c, str) else c for name, c in candidates.items() if name != PLAIN}
    _check(wanted, prompts, batch_sizes, max_tokens, turns, steps_per_turn)
    ids = [encode_prompt(target.tokenizer, prompt) for prompt in prompts]
    parameters: dict[str, Any] = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": seed,
    }
    options = _Options(parameters, num_pages)
    say = report or (lambda line: None)
    stats, memory = {}, {}
    for name, candidate in wanted.items():
        say(f"acceptance of {name} on {len(ids)} prompts")
        engine = _engine(target, candidate, max(batch_sizes), num_pages)
        memory[name] = draft_memory(engine)
        results = engine.generate(ids, **parameters)
        short = [result.finish_reason for result in results if len(result.token_ids) < max_tokens]
        if short:
            raise _ended(max_tokens, short[0])
        stats[name] = [result.stats for result in results]
    found = []
    for batch in batch_sizes:
        arms = {n: _Arm(target, c, ids, batch, options) for n, c in {PLAIN: Candidate(PLAIN, 0), **wanted}.items()}
        order = list(arms)
        for turn in range(turns + 1):
            say(f"costs at batch {batch}: turn {turn} of {turns}")
            order = order[1:] + order[:1]
            for name in order:
                arms[name].turn(steps_per_turn)
        found += [_measurement(n, arms[n], arms[PLAIN], stats[n], memory[n], seed) for n in wanted]
    found.sort(key=lambda m: list(wanted).index(m.candidate))
    return DraftSelection(target.name, len(ids), temperature, found)


def draft_memory(engine: Engine) -> tuple[int, int]:
    """(bytes of the drafter's parameters that are not the target's, bytes of its KV a token)."""
    drafter = engine._default_drafter
    owned = {p.data_ptr() for p in _parameters(engine.model)}
    own = {p.data_ptr(): p.numel() * p.element_size() for x in vars(drafter).values() for p in _parameters(x)}
    shape = getattr(drafter, "kv_shape", None)
    return sum(size for at, size in own.items() if at not in owned), 0 if shape is None else shape.bytes_per_token


def _parameters(thing: Any) -> list[torch.Tensor]:
    module = thing if isinstance(thing, torch.nn.Module) else getattr(thing, "module", None)
    return list(module.parameters()) if isinstance(module, torch.nn.Module) else []


def _at_usual_drafts(costs: np.ndarray, nodes: np.ndarray, usual: float) -> np.ndarray:
    """[turns] costs, moved along their Theil-Sen slope over drafts to `usual` drafts. A step without drafts costs a
    plain step, one point more for the slope. Drafts cost time: no negative slope; and none from pairs nearer than a
    quarter draft, where noise is all there is."""
    x, y = np.append(nodes, 0.0), np.append(costs, 1.0)
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[first] - x[second]) > 0.25
    if not apart.any():
        return costs
    slopes = (y[first] - y[second])[apart] / (x[first] - x[second])[apart]
    return np.asarray(costs - max(0.0, float(np.median(slopes))) * (nodes - usual))


def _measurement(
    name: str,
    arm: _Arm,
    plain: _Arm,
    counts: Sequence[SpecCounters],
    memory: tuple[int, int],
    seed: int,
    num_resamples: int = 2000,
) -> Measurement:
    rng = np.random.default_rng([seed, arm.batch])
    weights = rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=num_resamples)

    def ratio(above: Callable[[SpecCounters], int], below: Callable[[SpecCounters], int]) -> tuple[float, np.ndarray]:
        up, down = np.array([above(c) for c in counts], float), np.array([below(c) for c in counts], float)
        total = weights @ down
        drawn = np.divide(weights @ up, total, out=np.full(num_resamples, np.nan), where=total > 0)
        return (float(up.sum() / down.sum()) if down.sum() else float("nan")), drawn

    def interval(value: float, drawn: np.ndarray) -> Interval:
        known = drawn[~np.isnan(drawn)]
        if len(counts) < 2 or not len(known):
            return Interval(value, float("nan"), float("nan"))
        low, high = np.quantile(known, [0.025, 0.975])
        return Interval(value, float(low), float(high))

    tokens, drawn_tokens = ratio(lambda c: c.emitted - 1, lambda c: c.steps - 1)  # the first comes with the prefill
    turns = np.array(arm.steps[1:]) / np.array(plain.steps[1:])  # turn by turn: what slows both cancels
    usual = sum(c.drafted for c in counts) / max(1, sum(c.steps - 1 for c in counts))
    turns = _at_usual_drafts(turns, np.array(arm.nodes[1:]), usual)
    picks = rng.integers(len(turns), size=(num_resamples, len(turns)))
    cost, drawn_cost = float(np.median(turns)), np.median(turns[picks], axis=1)
    speedup = interval(tokens / cost, drawn_tokens / drawn_cost)
    verdict = "pays" if speedup.low > 1 else "does not pay" if speedup.high < 1 else "undecided"
    plain_seconds = statistics.median(plain.steps[1:])
    return Measurement(
        name, arm.batch, interval(tokens, drawn_tokens),
        interval(*ratio(lambda c: c.accepted, lambda c: c.accepted + c.rejected)),
        interval(*ratio(lambda c: c.accepted, lambda c: c.drafted)),
        cost * plain_seconds, statistics.median(arm.drafts[1:]), plain_seconds, speedup, *memory, verdict,
    )  # fmt: skip


def _check(
    wanted: Mapping[str, Candidate], prompts: Sequence[Any], batches: Sequence[int], tokens: int, turns: int, steps: int
) -> None:
    if any(candidate.num_drafts < 1 for candidate in wanted.values()):
        raise ValueError(f"{_OP}: candidates: expected at least one draft a step of each, got num_drafts below 1")
    if not wanted:
        raise ValueError(f'{_OP}: candidates: expected at least one besides "{PLAIN}", got none')
    if isinstance(prompts, str) or len(prompts) < 2:
        raise ValueError(f"{_OP}: prompts: expected a list of at least 2, got {prompts if prompts else 'none'!r}")
    if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
        raise ValueError(f"{_OP}: batch_sizes: expected different integers >= 1, got {list(batches)}")
    for name, value, least in (("turns", turns, 2), ("steps_per_turn", steps, 1)):
        if value < least:
            raise ValueError(f"{_OP}: {name}: expected at least {least}, got {value}")
    least = (steps + 1) * (1 + max(candidate.num_drafts for candidate in wanted.values()))
    if tokens < least:
        raise ValueError(f"{_OP}: max_tokens: expected at least {least}, what a turn may emit, got {tokens}")
