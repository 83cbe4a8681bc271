"""The goodput policy against every fixed number of drafts, on the real engine:
`python -m benchmarks.bench_policy [--quick] [--batches 1,4,8] [--drafter ngram] [--out FILE] [--seconds N]`.

Each arm (the policy, each fixed number of drafts) has an engine of its own on the same model and serves the same
endless queue at a fixed batch size. The arms take turns step by step, so that whatever else the machine does hits all
alike. An arm's seconds a token are

    mean seconds of a step * mean steps of a request / (batch * tokens of a request)

with steps of full batches without prefill, and over the requests that the policy ended. Under a fixed number of drafts
a text takes the same steps whatever else is served: these are counted once, by replay. So no arm gains by what part of
the queue it happened to serve.

Plain decoding wrote the texts first, and every arm writes these again: the model runs in full, then the recorded token
is made certain (bfloat16 logits tie too often for texts to stay equal of themselves). The gate: every arm's text is the
recorded one, and where the model's own choice differs, its logit lies within a tie. The policy's cost models are fitted
to steps of the same engine (`engine.costs`).

FILE is also the checkpoint, block by block: with `--seconds` the run ends in time, and the same command goes on where
it ended (with engines and a policy that start anew).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.recorded import Guided, Replay
from specdec_kernels.batching import BatchCostModel
from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.costs import StepRecorder, fit_costs
from specdec_kernels.engine.equality import LARGEST_GAP
from specdec_kernels.engine.policy import DraftCosts, DraftPolicy, FixedDrafts, GoodputPolicy, StepTiming
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
KEEP_WITHIN = 0.10  # fixed depths that fall further behind in two blocks are not measured again
MOST_DRAFTS = 15


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


class Arm:
    """One way of drafting, on an engine and an endless queue of its own."""

    def __init__(self, model: Any, drafter: str, policy: DraftPolicy, batch: int, prompts: list[list[int]],
                 outputs: list[list[int]], first: int = 0):  # fmt: skip
        self.recorder = StepRecorder(policy)
        most = max(len(p) + len(o) for p, o in zip(prompts, outputs)) + 32
        pages = (batch + 1) * -(-most // 16) + sum(map(len, prompts)) // 16
        config = EngineConfig(num_pages=pages, max_batch=batch, num_drafts=MOST_DRAFTS)
        self.engine = Guided(model, drafter, config, policy=self.recorder)
        self.engine.texts = {}
        self.prompts, self.outputs, self.batch = prompts, outputs, batch
        self.next = first
        self.turns: dict[int, int] = {}  # steps that gave a request tokens, the one that ended its prompt left out
        self.kinds: dict[int, int] = {}

    def step(self) -> dict[str, Any]:
        """One step: its seconds if it counts, and kind and steps of the requests that it ended."""
        engine = self.engine
        while len(engine.scheduler.waiting) < 2:
            i = self.next % len(self.prompts)
            self.next += 1
            key = engine.add(Request(self.prompts[i], max_tokens=len(self.outputs[i]), ignore_eos=True))
            engine.texts[key], self.kinds[key] = self.prompts[i] + self.outputs[i], i
        start, own = time.perf_counter(), time.process_time()
        events = engine.step()
        spent, used = time.perf_counter() - start, time.process_time() - own
        ended: list[list[int]] = []
        for event in events:
            key = event.request_id
            self.turns[key] = self.turns.get(key, -1) + 1
            if event.result is not None:
                if engine.texts.pop(key)[-len(event.result.token_ids) :] != event.result.token_ids:
                    raise AssertionError(f"request {key} left its recorded text")
                ended.append([self.kinds.pop(key), self.turns.pop(key)])
        timing = self.recorder.timings[-1]
        counts = timing.requests == self.batch and timing.nodes == timing.requests + timing.drafts
        return {"seconds": spent * counts, "cpu_seconds": used * counts, "steps": int(counts),
                "drafts": timing.drafts * counts, "ended": ended}  # fmt: skip


class Bench:
    """The recorded requests, the arms of one batch size, and the rows measured so far."""

    def __init__(self, model: Any, options: argparse.Namespace):
        self.model, self.options, self.quick = model, options, options.quick
        self.depths = [0, 1, 4] if self.quick else options.depths
        self.rows: list[dict[str, Any]] = []
        if options.out and options.out.exists():
            self.rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        texts = workload(model, 2 if self.quick else 16)
        self.prompts = [text[-64:] * 2 for text in texts] if self.quick else texts  # short, and worth drafting
        self.outputs = self.once("texts", lambda: {"outputs": self.record()})["outputs"]
        self.turns = self.once("turns", lambda: {"turns": self.replay()})["turns"]

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

    def record(self) -> list[list[int]]:
        engine = Engine(self.model, "none", EngineConfig(num_pages=1024, max_batch=8))
        tokens = 12 if self.quick else self.options.tokens
        return [list(r.token_ids) for r in engine.generate(self.prompts, max_tokens=tokens, ignore_eos=True)]

    def arm(self, policy: DraftPolicy, batch: int, first: int = 0) -> Arm:
        return Arm(self.model, self.options.drafter, policy, batch, self.prompts, self.outputs, first)

    def replay(self) -> dict[str, list[int]]:
        """By fixed number of drafts: the steps that each text takes, the one that ends its prompt left out."""
        turns = {}
        for depth in self.depths:
            config = EngineConfig(num_pages=2048, max_batch=len(self.prompts), num_drafts=MOST_DRAFTS)
            engine = Replay(self.model, self.options.drafter, config, policy=FixedDrafts(depth))
            keys = [
                engine.add(Request(prompt, max_tokens=len(output), ignore_eos=True))
                for prompt, output in zip(self.prompts, self.outputs)
            ]
            engine.texts = {key: p + o for key, p, o in zip(keys, self.prompts, self.outputs)}
            count = dict.fromkeys(keys, -1)
            while engine.has_work:
                for event in engine.step():
                    count[event.request_id] += 1
            turns[f"fixed {depth}"] = [count[key] for key in keys]
        return turns

    def calibrate(self, batches: list[int]) -> dict[str, Any]:
        """Fit the costs to a few steps at each batch size and some numbers of drafts."""
        timings: list[StepTiming] = []
        for batch in batches:
            for depth in (0, 2, self.depths[-1] // 2, self.depths[-1]):
                arm, counted = self.arm(FixedDrafts(depth), batch), 0
                while counted < (6 if self.quick else 24):
                    counted += arm.step()["steps"]
                timings += arm.recorder.timings
        forward, draft = fit_costs(timings)
        return {"forward": forward._asdict(), "draft": draft._asdict()}

    def start(self, batch: int, fit: dict[str, Any]) -> dict[str, Arm]:
        """The arms that still count, the policy having served a little, untimed, while the gate looked on."""
        costs, draft = BatchCostModel(**fit["forward"]), DraftCosts(**fit["draft"])
        policies: dict[str, DraftPolicy] = {"goodput": GoodputPolicy(costs, draft, max_depth=max(1, *self.depths))}
        policies |= {f"fixed {depth}": FixedDrafts(depth) for depth in self.depths}
        names, first = self.arms(batch), 5 * len(self.blocks(batch))  # a resumed run begins elsewhere in the queue
        arms = {name: self.arm(policies[name], batch, first) for name in names}
        gaps: list[float] = []
        arms["goodput"].engine.gaps = gaps
        for arm in arms.values():
            for _ in range(4 if self.quick else len(self.outputs[0])):
                arm.step()
        arms["goodput"].engine.gaps = None
        ties = [gap for gap in gaps if gap > 0]
        largest = LARGEST_GAP[self.model.dtype]
        if max(ties, default=0.0) > largest:
            raise AssertionError(f"batch {batch}: a recorded token lies {max(ties)} below the model's own choice")
        print(f"batch {batch}: gate passed, {len(ties)} of {len(gaps)} rows prefer another token, by at most "
              f"{max(ties, default=0.0)} (allowed: {largest})", flush=True)  # fmt: skip
        return arms

    def block(self, arms: dict[str, Arm], batch: int, number: int, steps: int) -> None:
        """`steps` steps of each arm in turn; one row an arm."""
        found: dict[str, dict[str, Any]] = {
            name: {"seconds": 0.0, "cpu_seconds": 0.0, "steps": 0, "drafts": 0, "ended": []} for name in arms
        }
        with machine.Quiet() as quiet:
            for _ in range(steps):
                for name, arm in arms.items():
                    for key, value in arm.step().items():
                        found[name][key] += value
        for name, row in found.items():
            self.keep({"op": "block", "B": batch, "block": number, "arm": name, **row,
                       "foreign_cpu": round(quiet.foreign, 3)})  # fmt: skip

    def blocks(self, batch: int) -> dict[int, dict[str, dict[str, Any]]]:
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            if row["op"] == "block" and row["B"] == batch and row["drafter"] == self.options.drafter:
                found.setdefault(row["block"], {})[row["arm"]] = row
        return found

    def arms(self, batch: int) -> list[str]:
        """All at first; after two blocks plain decoding, the policy, and the depths that are not far behind."""
        everyone = ["goodput", *(f"fixed {depth}" for depth in self.depths)]
        if len(self.blocks(batch)) < 2:
            return everyone
        cost = self.costs(batch, "seconds")
        most = (1 + KEEP_WITHIN) * min(cost[arm] for arm in everyone[1:])
        return [arm for arm in everyone if arm in ("goodput", "fixed 0") or cost[arm] <= most]

    def costs(self, batch: int, clock: str, only: int | None = None) -> dict[str, float]:
        """Seconds a token by arm; step seconds relative to plain decoding's in the same blocks, as not every arm is in
        all of them. only: step seconds of one block, requests of all."""
        blocks = self.blocks(batch)
        names = {arm for rows in blocks.values() for arm in rows}
        plain = self._step_seconds(list(blocks.values()), "fixed 0", clock)
        ended = [end for rows in blocks.values() for end in rows["goodput"]["ended"]]
        cost = {}
        for arm in names:
            mine = [rows for number, rows in blocks.items() if arm in rows and only in (None, number)]
            if not mine:
                continue
            ratio = self._step_seconds(mine, arm, clock) / self._step_seconds(mine, "fixed 0", clock)
            steps = [turns if arm == "goodput" else self.turns[arm][i] for i, turns in ended]
            cost[arm] = plain * ratio * statistics.mean(steps) / (batch * (len(self.outputs[0]) - 1))
        return cost

    @staticmethod
    def _step_seconds(blocks: list[dict[str, dict[str, Any]]], arm: str, clock: str) -> float:
        return float(sum(rows[arm][clock] for rows in blocks) / sum(rows[arm]["steps"] for rows in blocks))

    def summary(self, batch: int) -> dict[str, Any]:
        """An arm's figure: the policy's tokens a second over its own, in all; and the least and greatest block of the
        best fixed depth."""
        cost, by_cpu, blocks = self.costs(batch, "seconds"), self.costs(batch, "cpu_seconds"), self.blocks(batch)
        best = min((arm for arm in cost if arm != "goodput"), key=lambda arm: cost[arm])
        each = [self.costs(batch, "seconds", number) for number, rows in blocks.items() if best in rows]
        spread = sorted(round(one[best] / one["goodput"], 3) for one in each)
        return {
            "op": "summary", "B": batch, "blocks": len(blocks), "best": best,
            "goodput_over_best": round(cost[best] / cost["goodput"], 3), "over_best_by_block": spread,
            "goodput_over_plain": round(cost["fixed 0"] / cost["goodput"], 3),
            "goodput_over": {arm: round(cost[arm] / cost["goodput"], 3) for arm in sorted(cost)},
            "goodput_over_by_cpu_time": {arm: round(by_cpu[arm] / by_cpu["goodput"], 3) for arm in sorted(cost)},
            "tokens_per_s": {arm: round(1 / cost[arm], 1) for arm in sorted(cost)},
            "drafts_per_step": {arm: round(statistics.mean(r[arm]["drafts"] / max(1, r[arm]["steps"])
                                for r in blocks.values() if arm in r), 1) for arm in sorted(cost)},
            "foreign_cpu": max(row["foreign_cpu"] for rows in blocks.values() for row in rows.values()),
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--depths", default="0,1,2,3,5,8,15", help="fixed numbers of drafts; 0: plain decoding")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=int, default=4, help="blocks of each batch size")
    parser.add_argument(
        "--steps", type=int, default=60, help="steps of a block at batch 8; twice and 4 times as many at 4 and 1"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further round behind this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.depths = sorted({0, *map(int, options.depths.split(","))})
    batches = [1, 2] if options.quick else [int(b) for b in options.batches.split(",")]
    bench = Bench(load_model("smollm2", getattr(torch, options.dtype)), options)
    fit = bench.once("fit", lambda: bench.calibrate(batches))
    print({"forward": fit["forward"], "draft": fit["draft"]}, flush=True)
    for batch in batches:
        steps = 16 if options.quick else options.steps * 8 // max(batch, 2)
        arms: dict[str, Arm] = {}
        for number in range(1 if options.quick else options.blocks):
            if number in bench.blocks(batch):
                continue
            if time.perf_counter() - begun > options.seconds:
                print("to be continued: the same command goes on from here", flush=True)
                return 0
            arms = arms or bench.start(batch, fit)
            arms = {name: arms[name] for name in bench.arms(batch) if name in arms}
            bench.block(arms, batch, number, steps)
            print({arm: round(1 / cost, 1) for arm, cost in sorted(bench.costs(batch, "seconds").items())}, flush=True)
        print(bench.summary(batch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
