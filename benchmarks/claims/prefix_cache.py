"""Claim: speculation lowers the prefix cache's hit rate from 85 to 62 %; rejected KV kept as soft pages restores 78 %.

One recorded trace is replayed through the engine (scheduler, arena, prefix cache and n-gram drafter are the real ones;
the model's answers are the recorded tokens): multi-turn chats behind one system prompt, best-of-4 samples, and two
continuations of each first sample's half. The tokens are SmolLM2-135M's own, recorded by this script on first use.

Arms: no speculation; rejected KV discarded; kept as SOFT; an EAGLE-type drafter that gives up the last matched page;
successor-aware keys in its place (both with n-gram drafts: the cache sees no difference). Three pool sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.common import Claim
from benchmarks.recorded import Replay
from specdec_kernels.engine import Engine, EngineConfig, KVCache, Request
from specdec_kernels.engine.pages import PageState

PAGE_SIZE, MAX_BATCH = 8, 4
SYSTEM = (
    "You are the assistant of a small public library. You answer in plain words, in at most three sentences. "
    "The library is open from nine to six, on Saturdays until one. Books may be kept for four weeks, films for one; "
    "both can be renewed twice unless somebody waits for them. Late returns cost ten cents a day. There are six desks "
    "with computers, a reading room, and a workshop for children on Wednesdays. Do not invent books; if you do not "
    "know, say so."
)
CHATS = [
    ["When are you open on Saturday?", "And how long may I keep a film?", "Can I renew it?"],
    ["What does a late book cost?", "I am five days late with two books. How much is that?", "Thank you. Until when?"],
    ["Is there something for children?", "On which day?", "May parents stay?"],
    ["Name three things I can do in the library.", "Which of them needs a desk?", "How many desks are there?"],
    ["I need a quiet place to work.", "Can I use a computer there?", "Repeat the opening hours."],
    ["How many weeks may I keep a book?", "Twice renewed, how many weeks is that?", "And a film?"],
]
SAMPLED = ["Write a one-sentence welcome for new readers.", "Invent a name for the workshop.", "Thank a volunteer."]
ARMS = ("no speculation", "discard", "soft", "EAGLE, last page dropped", "EAGLE, successor keys")


def record(path: Path, tokens: int) -> None:
    """Let SmolLM2 answer, and write {"rounds": [[{"prompt", "output", "temperature"}]]}."""
    from specdec_kernels.engine import load_model
    from specdec_kernels.engine.tokens import encode_prompt

    model = load_model("smollm2")
    engine = Engine(model, "ngram")

    def answer(prompts: list[list[int]], temperature: float, count: int, n: int = 1) -> list[list[int]]:
        results = engine.generate(prompts, max_tokens=count, temperature=temperature, seed=1, n=n)
        return [list(result.token_ids) for result in results]

    def job(prompt: list[int], output: list[int], temperature: float) -> dict[str, Any]:
        return {"prompt": prompt, "output": output, "temperature": temperature}

    def said(text: str) -> list[int]:
        return list(model.tokenizer.encode(text, add_special_tokens=False))

    first = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": chat[0]}] for chat in CHATS]
    prompts = [encode_prompt(model.tokenizer, messages) for messages in first]
    rounds = []
    for turn in range(3):
        outputs = answer(prompts, 0.0, tokens)
        rounds.append([job(prompt, output, 0.0) for prompt, output in zip(prompts, outputs)])
        if turn < 2:
            ends = ["" if output[-1] in model.eos_token_ids else "<|im_end|>" for output in outputs]
            questions = [
                said(f"{end}\n<|im_start|>user\n{chat[turn + 1]}<|im_end|>\n<|im_start|>assistant\n")
                for chat, end in zip(CHATS, ends)
            ]
            prompts = [p + o + q for p, o, q in zip(prompts, outputs, questions)]
    asked = [
        encode_prompt(model.tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}])
        for text in SAMPLED
    ]
    samples = answer(asked, 0.8, tokens, n=4)
    rounds.append([job(asked[i // 4], output, 0.8) for i, output in enumerate(samples)])
    halves = [asked[i] + samples[4 * i][: max(1, len(samples[4 * i]) // 2)] for i in range(len(asked))]
    more = answer(halves, 0.8, max(1, tokens // 2), n=2)
    rounds.append([job(halves[i // 2], output, 0.8) for i, output in enumerate(more)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": model.name, "rounds": rounds}) + "\n")


class Recorded:
    """Stands for the model: it has a vocabulary and a cache, and is never run."""

    name, tokenizer, num_layers, max_context = "recorded", None, 1, 1 << 20
    eos_token_ids: frozenset[int] = frozenset()
    dtype, device = torch.float32, torch.device("cpu")
    kv_shape = (1, 1, 8)

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        return KVCache.allocate(1, num_pages, page_size, 1, 8, self.dtype, self.device)

    def forward(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("the recorded tokens answer, not a model")


def compact(rounds: list[list[dict[str, Any]]]) -> tuple[list[list[dict[str, Any]]], int]:
    """The same trace with its ids numbered from 0: the cache sees equal and unequal tokens as before."""
    ids: dict[int, int] = {}

    def renamed(tokens: list[int]) -> list[int]:
        return [ids.setdefault(token, len(ids)) for token in tokens]

    out = [
        [job | {"prompt": renamed(job["prompt"]), "output": renamed(job["output"])} for job in jobs] for jobs in rounds
    ]
    return out, len(ids)


def replay(rounds: list[list[dict[str, Any]]], vocab_size: int, arm: str, num_pages: int) -> dict[str, float]:
    config = EngineConfig(
        page_size=PAGE_SIZE, num_pages=num_pages, max_batch=MAX_BATCH, soft_pages=arm == "soft", check=True
    )  # fmt: skip
    engine = Replay(Recorded(vocab_size), "none" if arm == ARMS[0] else "ngram", config)
    engine.texts = {}
    assert engine.prefixes is not None
    engine.prefixes.drop_last = arm == ARMS[3]
    engine.prefixes.lookahead = int(arm == ARMS[4])
    for jobs in rounds:
        for i, job in enumerate(jobs):
            request = Request(job["prompt"], max_tokens=len(job["output"]), temperature=job["temperature"], seed=i)
            engine.texts[engine.add(request)] = job["prompt"] + job["output"]
        while engine.has_work:
            for event in engine.step():
                if event.result is not None:
                    text = engine.texts[event.request_id]
                    if text[len(text) - len(event.result.token_ids) :] != event.result.token_ids:
                        raise RuntimeError(f"{arm}: the replay left the recorded text")
    m, evicted = engine.metrics, engine.arena.evicted
    return {
        "hit rate": m.prefix_hits / m.prefix_queries,
        "committed": m.prefix_hits - m.prefix_soft_hits,
        "soft": m.prefix_soft_hits,
        "dropped": m.prefix_dropped,
        "overshoot": m.overshoot,
        "evicted soft": evicted[PageState.SOFT],
        "evicted committed": evicted[PageState.COMMITTED],
        "computed": m.prefill_tokens,
        "pre-empted": m.preemptions,
        "tokens a step": m.mean_accepted_length,
    }


def pools(rounds: list[list[dict[str, Any]]]) -> dict[str, int]:
    """Pages: all that the trace can ever hold; half of what it holds at once if nothing is evicted; little more than
    what the running requests need."""
    lengths = [len(job["prompt"]) + len(job["output"]) for jobs in rounds for job in jobs]
    longest = -(-(max(lengths) + 16) // PAGE_SIZE)
    whole = sum(-(-(length + 16) // PAGE_SIZE) for length in lengths)
    distinct = len({tuple(job["prompt"][: (i + 1) * PAGE_SIZE]) for jobs in rounds for job in jobs
                    for i in range(len(job["prompt"]) // PAGE_SIZE)})  # fmt: skip
    least = longest * MAX_BATCH
    return {"ample": whole + least, "mild": max(distinct, least + 8), "heavy": least // 2 + 8}


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim(
        "prefix_cache",
        __doc__,
        argv,
        lambda parser: parser.add_argument("--trace", type=Path, help="recorded trace (default: record it)"),
    )
    name = "prefix_trace_quick.json" if claim.quick else "prefix_trace.json"
    path = claim.options.trace or claim.options.out / name
    if not path.exists():
        record(path, 12 if claim.quick else 40)
    rounds, vocab_size = compact(json.loads(path.read_text())["rounds"])
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for pressure, num_pages in pools(rounds).items():
        figures[pressure] = {arm: replay(rounds, vocab_size, arm, num_pages) for arm in ARMS}
        rows = [[arm, *values.values()] for arm, values in figures[pressure].items()]
        columns = ["arm", *figures[pressure][ARMS[0]]]
        claim.table(f"{pressure}: {num_pages} pages of {PAGE_SIZE} tokens; tokens, evictions in pages", columns, rows)
    with claim.plot("Prompt tokens found in the prefix cache", "pool", "hit rate, token-weighted") as axes:
        for i, arm in enumerate(ARMS):
            places = [j + 0.16 * i for j in range(len(figures))]
            axes.bar(places, [figures[pressure][arm]["hit rate"] for pressure in figures], 0.15, label=arm)
        axes.set_xticks([j + 0.32 for j in range(len(figures))], list(figures))
        axes.set_ylim(0, 1.5)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])

    def line(pressure: str) -> str:
        return f"{pressure} " + "/".join(f"{figures[pressure][arm]['hit rate']:.3f}" for arm in ARMS)

    def given_back(pressure: str) -> str:
        """What successor keys give back of the hits that EAGLE's dropped pages cost."""
        plain, dropped, keyed = (figures[pressure][arm]["hit rate"] for arm in (ARMS[1], ARMS[3], ARMS[4]))
        return f"{(keyed - dropped) / (plain - dropped):.0%}" if plain > dropped else "nothing was lost"

    saved = sum(figures[pressure]["soft"]["soft"] for pressure in figures)
    return claim.conclude(
        says="85 % falls to 62 % with speculation, soft pages restore 78 %",
        so=f"hit rates ({', '.join(ARMS)}): {'; '.join(map(line, figures))}; soft pages gave {saved:.0f} tokens in all "
        f"{len(figures)}; of what EAGLE's dropped pages cost successor keys give back "
        + ", ".join(given_back(pressure) for pressure in figures),
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
