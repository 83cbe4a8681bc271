"""A head in the engine: emitted tokens a step, and time against plain decoding beside what fitted costs predict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec_kernels.engine import Engine, EngineConfig, Event, SpecCounters
from specdec_kernels.engine.costs import DecodingCosts, measure_costs
from specdec_kernels.engine.drafters import Drafter


@dataclass
class Arm:
    """One way of decoding, and what it took behind the first token of each prompt (prefill is not decoding)."""

    engine: Engine
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    stats: SpecCounters = field(default_factory=SpecCounters)

    @classmethod
    def of(cls, model: Any, drafter: str | Drafter, *, longest: int, num_drafts: int = 24) -> Arm:
        """A batch-1 engine without prefix cache for texts of at most `longest` tokens."""
        pages = 2 * (-(-(longest + num_drafts + 1) // 16) + 2)
        config = EngineConfig(num_pages=pages, max_batch=1, num_drafts=num_drafts, prefix_cache=False)
        return cls(Engine(model, drafter, config))

    def run(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Write `max_tokens` greedy tokens behind a prompt."""
        times: list[float] = []

        def note(_: int, event: Event) -> None:
            times.append(time.perf_counter())

        (result,) = self.engine.generate([list(prompt)], max_tokens=max_tokens, ignore_eos=True, on_event=note)
        self.seconds.append(times[-1] - times[0])
        self.tokens.append(len(result.token_ids) - 1)
        self.steps.append(result.stats.steps - 1)
        self.texts.append(result.token_ids)
        self.stats.merge(result.stats)

    @property
    def tokens_a_step(self) -> float:
        return sum(self.tokens) / max(1, sum(self.steps))

    @property
    def mean_draft(self) -> tuple[float, float]:
        """(nodes, depth) of a mean draft."""
        drafts = max(1, self.stats.drafts)
        return self.stats.drafted / drafts, sum(self.stats.drafted_per_pos) / drafts


def race(arms: Mapping[str, Arm], prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """All arms on every prompt, none always first."""
    names = list(arms)
    for name in names:  # a first run has more to do than others
        arms[name].engine.generate([list(prompts[0][:16])], max_tokens=4, ignore_eos=True)
    for turn, prompt in enumerate(prompts):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            arms[name].run(prompt, max_tokens)


class EngineRun(NamedTuple):
    """A drafter on held-out prompts. `tokens`: emitted a step; `ngram`: the same of n-gram drafts; `speedups`: of each
    prompt, decoding behind the first token against plain decoding; `measured`: of all of them together; `predicted`:
    from `tokens` and `costs` (see `DecodingCosts`), for drafts of `drafts` nodes in `levels` levels."""

    tokens: float
    ngram: float
    speedups: list[float]
    measured: float
    predicted: float
    drafts: float
    levels: float
    context: float
    costs: DecodingCosts

    def lines(self) -> list[str]:
        """For a model card."""
        s = sorted(self.speedups)
        plain, verify = (self.costs.forward.predict(1 + n, 1, self.context) for n in (0.0, self.drafts))
        draft = self.costs.seconds(self.drafts, self.levels, context=self.context) - verify
        return [
            f"- in the engine, greedy, batch 1, {len(s)} held-out prompts: {self.tokens:.2f} tokens a step (n-gram "
            f"drafts: {self.ngram:.2f}), {self.drafts:.1f} drafts in {self.levels:.1f} levels a step",
            f"- speed-up over plain decoding: {statistics.median(s):.2f} ({s[0]:.2f} to {s[-1]:.2f}), of the total "
            f"time {self.measured:.2f}; predicted from those tokens and the costs below: {self.predicted:.2f}",
            f"- fitted costs of a step, ms: plain {1e3 * plain:.1f}, verify {1 + self.drafts:.0f} rows "
            f"{1e3 * verify:.1f}, draft {1e3 * draft:.1f}",
        ]


def measure_head(
    model: Any, make_drafter: Callable[[], Drafter], prompts: Sequence[Sequence[int]], max_tokens: int
) -> EngineRun:
    """Race plain decoding, n-gram drafts and a head's drafter over `prompts` (token ids), after fitting the drafter's
    costs to steps behind the first of them."""
    costs = measure_costs(model, make_drafter(), prompts[:1])
    longest = max(map(len, prompts)) + max_tokens
    drafters: dict[str, str | Drafter] = {"plain": "none", "ngram": "ngram", "head": make_drafter()}
    arms = {name: Arm.of(model, drafter, longest=longest) for name, drafter in drafters.items()}
    race(arms, prompts, max_tokens)
    plain, head = arms["plain"], arms["head"]
    drafts, levels = head.mean_draft
    context = statistics.mean(map(len, prompts)) + max_tokens / 2
    return EngineRun(
        tokens=head.tokens_a_step,
        ngram=arms["ngram"].tokens_a_step,
        speedups=[p / h for p, h in zip(plain.seconds, head.seconds)],
        measured=sum(plain.seconds) / sum(head.seconds),
        predicted=costs.speedup(head.tokens_a_step, drafts, levels, context=context),
        drafts=drafts,
        levels=levels,
        context=context,
        costs=costs,
    )
