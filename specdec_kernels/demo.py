"""The demo: three real prompts, plain and with each drafter. Same text, less time, all measured while you watch.

Equality is checked in float32 under the tie rule. Speed is measured in the dtype that this CPU computes fastest: every
arm writes the same text in segments, and the arms take turns segment by segment, so that whatever else the machine does
hits all of them; a speed-up is the ratio of two arms' times per token in the same segment.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch

from specdec_kernels._console import Stream, print_table
from specdec_kernels.engine import Engine, EngineConfig, Event, Request, SpecCounters, load_model
from specdec_kernels.engine.checkpoint import SMOLLM2, quiet_transformers, resolve_device, resolve_dtype, smollm2_path
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.head_files import find_head
from specdec_kernels.engine.tokens import TextStream, encode_prompt

PROMPTS = (
    ("code editing", "code_edit.txt", False, 256),
    ("summary", "summary.txt", True, 128),
    ("chat", "chat.txt", True, 128),
)
EQUALITY_TOKENS = 96
PAIRS, SEGMENT_TOKENS = 5, 16  # timed segments a prompt, tokens each, behind a first one that holds the prefill


@dataclass
class Arm:
    """One way of writing the text of a prompt, a segment at a time."""

    name: str
    times: list[float] = field(default_factory=list)  # seconds a segment; the first one holds the prompt's prefill
    counts: list[int] = field(default_factory=list)  # tokens a segment
    finished: bool = False
    stats: SpecCounters = field(default_factory=SpecCounters)

    def segment(self, num_tokens: int) -> None:
        """Write `num_tokens` more tokens (a step may overshoot), if the text has not ended."""
        if self.finished:
            return
        start = time.perf_counter()
        count = self.advance(num_tokens)
        self.times.append(time.perf_counter() - start)
        self.counts.append(count)

    def advance(self, num_tokens: int) -> int:
        raise NotImplementedError

    def per_token(self) -> list[float]:
        """Seconds a token of every segment behind the first."""
        return [t / n for t, n in zip(self.times[1:], self.counts[1:]) if n]

    @property
    def rate(self) -> float:
        """Tokens a second behind the first segment."""
        return sum(self.counts[1:]) / sum(self.times[1:]) if self.times[1:] else 0.0


@dataclass
class EngineArm(Arm):
    """Our engine with one drafter."""

    engine: Engine | None = None
    stream: Stream | None = None

    def start(self, prompt: Any, max_tokens: int) -> None:
        assert self.engine is not None
        self._pieces = TextStream(self.engine.model.tokenizer)
        self.engine.add(Request(prompt, max_tokens=max_tokens))

    def advance(self, num_tokens: int) -> int:
        assert self.engine is not None
        done = 0
        while done < num_tokens and not self.finished:
            for event in self.engine.step():
                done += len(event.token_ids)
                self.finished = event.result is not None
                self._show(event)
        return done

    def _show(self, event: Event) -> None:
        if self.stream is not None:
            ids, accepted = event.token_ids, event.num_accepted
            self.stream.write(
                self._pieces.push(ids[:accepted]), self._pieces.push(ids[accepted:], last=event.result is not None)
            )


@dataclass
class GenerateArm(Arm):
    """transformers' own `generate` on its own model, continued from its own cache."""

    module: Any = None

    def start(self, prompt_ids: list[int], max_tokens: int) -> None:
        from transformers import DynamicCache

        self.ids = torch.tensor([prompt_ids], device=self.module.device)
        self.left, self.cache = max_tokens, DynamicCache(config=self.module.config)

    def advance(self, num_tokens: int) -> int:
        size = min(num_tokens, self.left)
        with torch.inference_mode():
            out = self.module.generate(
                self.ids,
                attention_mask=torch.ones_like(self.ids),
                past_key_values=self.cache,
                max_new_tokens=size,
                do_sample=False,
            )
        count = out.shape[1] - self.ids.shape[1]
        self.ids, self.left = out, self.left - count
        self.finished = self.left == 0 or count < size or out[0, -1].item() in _as_set(self.module)
        return count


def _as_set(module: Any) -> set[int]:
    eos = module.generation_config.eos_token_id
    return set(eos) if isinstance(eos, list) else {eos}


def drafters_for(model: Any) -> tuple[str, ...]:
    """Plain decoding, n-gram drafts, and the EAGLE-3 head that ships for this model (else layer-skipping drafts)."""
    try:
        find_head(None, "eagle3", model)
    except ValueError:
        return ("none", "ngram", "self")
    return ("none", "ngram", "eagle3")


def make_drafter(name: str) -> str | EagleDrafter:
    """By name; the head with a tree that is small enough for a CPU, where every verified row costs."""
    return EagleDrafter(num_nodes=8) if name == "eagle3" else name


def check_equality(model: Any, drafters: tuple[str, ...], prompts: list[Any], lengths: list[int]) -> bool:
    """Greedy texts with every drafter against plain ones, all prompts in one batch; prints what it finds."""
    config = EngineConfig(num_pages=512)
    texts: dict[str, list[list[int]]] = {}
    for drafter in drafters:
        print(f"greedy text in float32, drafter {drafter} ...", flush=True)
        engine = Engine(model, make_drafter(drafter), config)
        ids = [engine.add(Request(prompt, max_tokens=n)) for prompt, n in zip(prompts, lengths)]
        found: dict[int, list[int]] = {}
        while engine.has_work:
            found.update({e.request_id: e.result.token_ids for e in engine.step() if e.result is not None})
        texts[drafter] = [found[i] for i in ids]
    good, rows = True, []
    for drafter in drafters[1:]:
        cells = []
        for prompt, plain, text in zip(prompts, texts["none"], texts[drafter]):
            difference = compare_greedy(model, encode_prompt(model.tokenizer, prompt), plain, text)
            if difference is None:
                cells.append(f"{len(plain)} tokens identical")
            else:
                good &= difference.excused
                word = "excused tie" if difference.excused else "DIFFERENT"
                cells.append(f"{word} at {difference.position}: gap {difference.gap:.1e}, noise {difference.noise:.1e}")
        rows.append([drafter, *cells])
    print_table("Greedy text against plain decoding, float32", ["drafter", *(name for name, *_ in PROMPTS)], rows)
    return good


def race(
    model: Any, drafters: tuple[str, ...], module: Any, name: str, prompt: Any, max_tokens: int
) -> list[list[str]]:
    """All arms on one prompt, taking turns; returns the rows of the table."""
    config = EngineConfig(num_pages=160, max_batch=1)
    engine_arms = [EngineArm(drafter, engine=Engine(model, make_drafter(drafter), config)) for drafter in drafters]
    arms: list[Arm] = list(engine_arms)
    for engine_arm in engine_arms:
        engine_arm.start(prompt, max_tokens)
    if module is not None:
        generate = GenerateArm("transformers generate", module=module)
        generate.start(encode_prompt(model.tokenizer, prompt), max_tokens)
        arms.append(generate)
    stream = engine_arms[1].stream = Stream(live=False)
    print(f"\n{name}, written with n-gram drafts:\n")
    size = min(SEGMENT_TOKENS, max_tokens // PAIRS)
    for turn in range(PAIRS + 1):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:  # nobody always goes first
            arm.segment(1 if turn == 0 else size)
    for engine_arm in engine_arms:
        assert engine_arm.engine is not None
        engine_arm.stats.merge(engine_arm.engine.metrics)
    while not engine_arms[1].finished:  # the rest of the text, untimed
        engine_arms[1].advance(size)
    stream.close()
    return report(name, arms)


def report(name: str, arms: list[Arm]) -> list[list[str]]:
    """Rows: prompt and arm, tokens/s, accepted length, both acceptances, speed-up over the faster baseline."""
    baseline = max((arm for arm in arms if arm.name in ("none", "transformers generate")), key=lambda arm: arm.rate)
    rows = []
    for arm in arms:
        ratios = [b / t for b, t in zip(baseline.per_token(), arm.per_token())]
        spread = (
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)})" if ratios else "-"
        )
        total = sum(arm.counts) / sum(arm.times)
        stats = arm.stats if arm.stats.drafted else None
        rows.append(
            [
                f"{name}: {arm.name}",
                f"{arm.rate:.1f}",
                f"{total:.1f}",
                f"{stats.mean_accepted_length:.2f}" if stats else "1.00" if arm.name == "none" else "-",
                f"{stats.conditional_acceptance:.2f}" if stats else "-",
                f"{stats.acceptance_per_draft:.2f}" if stats else "-",
                "baseline" if arm is baseline else spread,
            ]
        )
    return rows


def main(model_name: str = SMOLLM2, dtype: str | None = None, device: str = "cpu", quick: bool = False) -> int:
    """Run the demo; 1 if a text differs without excuse."""
    start = time.perf_counter()
    folder = files("specdec_kernels.engine") / "prompts"
    prompts: list[Any] = []
    lengths = []
    for _, file, chat, tokens in PROMPTS:
        text = (folder / file).read_text()
        prompts.append([{"role": "user", "content": text}] if chat else text)
        lengths.append(24 if quick else tokens)
    chosen = resolve_dtype(dtype, resolve_device(device))
    print(f"loading {model_name} ...", flush=True)
    model = load_model(model_name, chosen, device)
    drafters = drafters_for(model)
    if "self" in drafters:  # measures once, then cached
        Engine(model, "self", EngineConfig(num_pages=16)).generate(["Hello"], max_tokens=4)
    exact = model if chosen == torch.float32 else load_model(model_name, torch.float32, device)
    good = check_equality(exact, drafters, prompts, [min(n, EQUALITY_TOKENS) for n in lengths])
    del exact
    module = _plain_module(model_name, chosen, device)
    rows = []
    for (name, *_), prompt, tokens in zip(PROMPTS, prompts, lengths):
        rows += race(model, drafters, module, name, prompt, tokens)
    word = str(chosen).removeprefix("torch.")
    columns = ["prompt: drafter", "tokens/s", "with prefill", "accepted length", "conditional acceptance",
               "accepted/drafted", "speed-up: median (range, pairs)"]  # fmt: skip
    print_table(f"Batch 1, {word}, {torch.get_num_threads()} threads", columns, rows)
    print(
        "accepted length: tokens a verification step, the target's own included; speed-up: time per token of the\n"
        "faster of plain decoding and transformers' generate over that of the arm, segment by segment.\n"
        f"{time.perf_counter() - start:.0f} s in all."
    )
    if not good:
        print("A greedy text differed from plain decoding without being a tie.")
    return 0 if good else 1


def _plain_module(model_name: str, dtype: torch.dtype, device: str) -> Any:
    """The same checkpoint untouched, for transformers' generate."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        path = smollm2_path() if model_name == SMOLLM2 else model_name
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
