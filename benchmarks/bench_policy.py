"""The goodput policy against every fixed number of drafts, on the real engine:
`python -m benchmarks.bench_policy [--quick] [--batches 1,4,8] [--drafter ngram] [--out FILE] [--seconds N]`.

The same requests (renamings in code, summaries, questions) are served by one engine under one policy after another, at
a fixed batch size while the queue lasts, a few of them at a time: whatever else the machine does hits all arms. Plain
decoding wrote their texts first, and every arm writes these again: the model runs in full, then the recorded token is
made certain (bfloat16 logits tie too often for texts to stay equal of themselves). The gate: every arm's text is the
recorded one, and where the model's own choice differs, its logit lies within a tie. The policy's cost models are fitted
to steps of the same engine (`engine.costs`).

FILE is also the checkpoint: with `--seconds` the run ends in time, and the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.recorded import Guided
from specdec_kernels.batching import BatchCostModel
from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.costs import StepRecorder, fit_costs
from specdec_kernels.engine.equality import LARGEST_GAP
from specdec_kernels.engine.policy import DraftCosts, DraftPolicy, FixedDrafts, GoodputPolicy
from specdec_kernels.engine.tokens import encode_prompt

RENAMINGS = (("h", "heap"), ("order", "rank"))  # two long prompts: each is read once a process
QUESTIONS = (
    "Explain to a curious ten-year-old how a rainbow forms.",
    "Write five short tips for a first visit to a museum.",
    "What is the difference between a violin and a viola?",
    "Tell a short story about a lighthouse keeper and a lost boat.",
    "Why does bread rise?",
    "List the planets of the solar system, one a line, with one fact each.",
)
KEEP_WITHIN = 0.12  # fixed depths that fall further behind in the first round are not measured again


def workload(model: Any, count: int) -> list[list[int]]:
    """Prompts of unlike acceptance in turn: copies, summaries, free text."""
    folder = files("specdec_kernels.engine") / "prompts"
    code, summary = ((folder / name).read_text() for name in ("code_edit.txt", "summary.txt"))
    ask, text = summary.split("\n\n", 1)
    paragraphs = [text, *text.split("\n\n")]
    prompts: list[Any] = []
    for i in range(count):
        kind, turn = i % 4, i // 4
        if kind == 0:
            old, new = RENAMINGS[turn % len(RENAMINGS)]
            prompts.append(code.replace("Rename `h` to `heap`.", f"Rename `{old}` to `{new}`."))
        elif kind == 2:
            prompts.append([{"role": "user", "content": f"{ask}\n\n{paragraphs[turn % len(paragraphs)]}"}])
        else:
            question = QUESTIONS[(2 * turn + kind // 2) % len(QUESTIONS)]
            prompts.append([{"role": "user", "content": question}])
    return [encode_prompt(model.tokenizer, prompt) for prompt in prompts]


class Bench:
    """One engine, its recorded requests, and the rows measured so far."""

    def __init__(self, model: Any, options: argparse.Namespace):
        self.options, self.quick = options, options.quick
        self.depths = [0, 1, 4] if self.quick else options.depths
        self.rows: list[dict[str, Any]] = []
        if options.out and options.out.exists():
            self.rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        self.recorder = StepRecorder()
        config = EngineConfig(num_pages=1024, max_batch=8, num_drafts=max(self.depths))
        self.engine = Guided(model, options.drafter, config, policy=self.recorder)
        self.engine.texts = {}
        self.prompts = workload(model, 4 if self.quick else 16)
        self.outputs = self.once("texts", lambda: {"outputs": self.record(model)})["outputs"]
        self.goodput: dict[int, GoodputPolicy] = {}

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {"family": "policy", "drafter": self.options.drafter, **row, "machine": machine.describe()}
        self.rows.append(row)
        if self.options.out:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            with self.options.out.open("a") as sink:
                sink.write(json.dumps(row) + "\n")
        return row

    def once(self, op: str, make: Any) -> dict[str, Any]:
        known = [r for r in self.rows if r["op"] == op and r["drafter"] == self.options.drafter]
        return known[0] if known else self.keep({"op": op, **make()})

    def record(self, model: Any) -> list[list[int]]:
        engine = Engine(model, "none", EngineConfig(num_pages=1024, max_batch=8))
        tokens = 12 if self.quick else self.options.tokens
        return [list(r.token_ids) for r in engine.generate(self.prompts, max_tokens=tokens, ignore_eos=True)]

    def groups(self, batch: int) -> list[range]:
        """Requests that are served in one go: twice the batch; of a batch of 1, only the first four, one by one."""
        size, count = (1, 4) if batch == 1 else (2 * batch, len(self.prompts))
        return [range(i, min(i + size, count)) for i in range(0, count, size)]

    def serve(self, policy: DraftPolicy, batch: int, chosen: range, most: int | None = None) -> dict[str, Any]:
        """Serve the chosen requests; tokens and seconds of the steps that hold no prefill."""
        self.recorder.policy = policy
        self.engine.scheduler.max_batch = batch
        for i in chosen:
            request = Request(self.prompts[i], max_tokens=len(self.outputs[i]), ignore_eos=True)
            self.engine.texts[self.engine.add(request)] = self.prompts[i] + self.outputs[i]
        tokens, seconds, cpu, steps, drafts = 0, 0.0, 0.0, 0, 0
        with machine.Quiet() as quiet:
            while self.engine.has_work and (most is None or steps < most):
                start, own = time.perf_counter(), time.process_time()
                events = self.engine.step()
                spent, used = time.perf_counter() - start, time.process_time() - own
                timing = self.recorder.timings[-1]
                for event in events:
                    text = self.engine.texts[event.request_id]
                    if event.result is not None and text[-len(event.result.token_ids) :] != event.result.token_ids:
                        raise AssertionError(f"request {event.request_id} left its recorded text")
                if timing.nodes == timing.requests + timing.drafts:
                    tokens, seconds = tokens + sum(len(e.token_ids) for e in events), seconds + spent
                    cpu, steps, drafts = cpu + used, steps + 1, drafts + timing.drafts
        for key in list(self.engine.texts):
            self.engine.abort(key)
        self.engine.texts.clear()
        return {
            "tokens": tokens, "seconds": round(seconds, 4), "cpu_seconds": round(cpu, 4), "steps": steps,
            "drafts": drafts, "tokens_per_s": round(tokens / seconds, 2), "foreign_cpu": round(quiet.foreign, 3),
        }  # fmt: skip

    def calibrate(self, batches: list[int]) -> dict[str, Any]:
        """Fit the costs to a few steps at each batch size and some numbers of drafts."""
        everyone = range(len(self.prompts))
        for batch in batches:
            for depth in (0, 2, self.depths[-1] // 2, self.depths[-1]):
                self.serve(FixedDrafts(depth), batch, everyone, most=6 if self.quick else 24)
        forward, draft = fit_costs(self.recorder.timings)
        return {"forward": forward._asdict(), "draft": draft._asdict()}

    def warm(self, batch: int, fit: dict[str, Any]) -> None:
        """The policy's first, untimed round, in which the model's own choices are compared with the recorded ones."""
        costs, draft = BatchCostModel(**fit["forward"]), DraftCosts(**fit["draft"])
        self.goodput[batch] = GoodputPolicy(costs, draft, max_depth=max(self.depths))
        self.engine.gaps = []
        for group in self.groups(batch):
            self.serve(self.goodput[batch], batch, group)
        gaps, self.engine.gaps = self.engine.gaps, None
        ties = [gap for gap in gaps if gap > 0]
        largest = LARGEST_GAP[self.engine.model.dtype]
        if max(ties, default=0.0) > largest:
            raise AssertionError(f"batch {batch}: a recorded token lies {max(ties)} below the model's own choice")
        print(f"batch {batch}: gate passed, {len(ties)} of {len(gaps)} rows prefer another token, by at most "
              f"{max(ties, default=0.0)} (allowed: {largest})", flush=True)  # fmt: skip

    def seconds(self, batch: int, clock: str = "seconds") -> dict[str, dict[tuple[int, int], float]]:
        """Seconds a token by arm, and by round and group; clock "cpu_seconds": of CPU, which other programs on the
        machine lengthen less."""
        found: dict[str, dict[tuple[int, int], float]] = {}
        for row in self.rows:
            if row["op"] == "round" and row["B"] == batch and row["drafter"] == self.options.drafter:
                found.setdefault(row["arm"], {})[row["round"], row["group"]] = row[clock] / row["tokens"]
        return found

    def arms(self, batch: int, turn: int) -> list[str]:
        """All in the first round; then plain decoding, the policy, and the depths that are not far behind."""
        everyone = ["goodput", *(f"fixed {depth}" for depth in self.depths)]
        if turn:
            seconds = self.seconds(batch)
            first = {arm: sum(t for (r, _), t in seconds[arm].items() if r == 0) for arm in everyone}
            most = (1 + KEEP_WITHIN) * min(first[arm] for arm in everyone[1:])
            everyone = [arm for arm in everyone if arm in ("goodput", "fixed 0") or first[arm] <= most]
        return everyone

    def summary(self, batch: int) -> dict[str, Any]:
        """An arm's figure: the goodput policy's tokens a second over its own, by what both took for the same requests
        in the same rounds; with the range over rounds."""
        seconds = self.seconds(batch)
        over, by_cpu = (self._over(self.seconds(batch, clock)) for clock in ("seconds", "cpu_seconds"))
        best = min((arm for arm in over if arm != "goodput"), key=lambda arm: over[arm][0])
        rate = {arm: round(len(found) / sum(found.values()), 1) for arm, found in seconds.items()}
        return {
            "op": "summary", "B": batch, "rounds": 1 + max(turn for turn, _ in seconds["goodput"]), "best": best,
            "goodput_over_best": over[best], "goodput_over_plain": over["fixed 0"], "goodput_over": over,
            "goodput_over_by_cpu_time": by_cpu, "tokens_per_s": rate,
        }  # fmt: skip

    @staticmethod
    def _over(seconds: dict[str, dict[tuple[int, int], float]]) -> dict[str, list[float]]:
        """By arm: in all, median, least and greatest round of the policy's speed over the arm's."""
        over: dict[str, list[float]] = {}
        for arm, found in seconds.items():
            both = found.keys() & seconds["goodput"].keys()
            by_round = [
                sum(found[key] for key in both if key[0] == turn)
                / sum(seconds["goodput"][key] for key in both if key[0] == turn)
                for turn in sorted({turn for turn, _ in both})
            ]
            total = sum(found[key] for key in both) / sum(seconds["goodput"][key] for key in both)
            over[arm] = [round(x, 3) for x in (total, statistics.median(by_round), min(by_round), max(by_round))]
        return over


def main(argv: list[str] | None = None) -> int:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--depths", default="0,1,2,3,5,8,15", help="fixed numbers of drafts; 0: plain decoding")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each request")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further round behind this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.depths = sorted({0, *map(int, options.depths.split(","))})
    batches = [1, 4] if options.quick else [int(b) for b in options.batches.split(",")]
    bench = Bench(load_model("smollm2", getattr(torch, options.dtype)), options)
    fit = bench.once("fit", lambda: bench.calibrate(batches))
    print({"forward": fit["forward"], "draft": fit["draft"]}, flush=True)
    for batch in batches:
        groups = bench.groups(batch)
        places = itertools.product(range(1 if options.quick else options.rounds), range(len(groups)))
        for turn, group in places:
            arms = bench.arms(batch, turn)
            first = (turn * len(groups) + group) % len(arms)
            for arm in arms[first:] + arms[:first]:
                if (turn, group) in bench.seconds(batch).get(arm, {}):
                    continue
                if time.perf_counter() - begun > options.seconds:
                    print("to be continued: the same command goes on from here", flush=True)
                    return 0
                if batch not in bench.goodput:
                    bench.warm(batch, fit)
                policy = bench.goodput[batch] if arm == "goodput" else FixedDrafts(int(arm.split()[1]))
                found = bench.serve(policy, batch, groups[group])
                print(batch, turn, group, arm, found, flush=True)
                bench.keep({"op": "round", "B": batch, "round": turn, "group": group, "arm": arm, **found})
        print(bench.summary(batch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
