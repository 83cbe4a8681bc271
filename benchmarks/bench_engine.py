"""Plain decoding against transformers' `generate`, and where a step's time goes:
`python -m benchmarks.bench_engine [--quick] [--batches 1,4] [--dtype bfloat16] [--profile] [--out FILE]`.

Both continue the same prompts from their own caches, in segments that take turns, so that whatever else the machine
does hits both. The gate: both texts are equal up to a tie.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import machine
from specdec_kernels.engine import Engine, EngineConfig, Request, load_model
from specdec_kernels.engine.checkpoint import quiet_transformers, smollm2_path
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.tokens import encode_prompt

PROMPT_TOKENS = 48
TIE = {torch.bfloat16: 0.25, torch.float32: 1e-3}


def prompts_of(model: Any, count: int) -> list[list[int]]:
    """Equal lengths: `generate` needs padding otherwise, which would be ours to win and is not the point."""
    text = (Path(__file__).parents[1] / "specdec_kernels" / "engine" / "prompts" / "summary.txt").read_text()
    ids = encode_prompt(model.tokenizer, text * 4)
    return [ids[37 * i : 37 * i + PROMPT_TOKENS] for i in range(count)]


class Ours:
    def __init__(self, model: Any, prompts: list[list[int]], max_tokens: int, drafter: Any = "none"):
        self.engine = Engine(model, drafter, EngineConfig(num_pages=512, max_batch=len(prompts)))
        self.texts: dict[int, list[int]] = {}
        for prompt in prompts:
            self.texts[self.engine.add(Request(prompt, max_tokens=max_tokens, ignore_eos=True))] = []

    def advance(self, num_tokens: int) -> None:
        goal = min(map(len, self.texts.values())) + num_tokens
        while min(map(len, self.texts.values())) < goal and self.engine.has_work:
            for event in self.engine.step():
                self.texts[event.request_id] += event.token_ids


class Generate:
    def __init__(self, module: Any, prompts: list[list[int]]):
        from transformers import DynamicCache

        module.generation_config.eos_token_id = None  # neither stops at an end token nor avoids it, as the engine here
        self.module, self.ids = module, torch.tensor(prompts)
        self.start, self.cache = self.ids.shape[1], DynamicCache(config=module.config)

    def advance(self, num_tokens: int) -> None:
        with torch.inference_mode():
            self.ids = self.module.generate(
                self.ids,
                attention_mask=torch.ones_like(self.ids),
                past_key_values=self.cache,
                max_new_tokens=num_tokens,
                do_sample=False,
            )


def race(model: Any, module: Any, batch: int, rounds: int, size: int) -> dict[str, Any]:
    """Tokens a second of both, and the ratio of their times segment by segment."""
    prompts = prompts_of(model, batch)
    arms: dict[str, Any] = {"engine": Ours(model, prompts, (rounds + 1) * size), "generate": Generate(module, prompts)}
    times: dict[str, list[float]] = {name: [] for name in arms}
    with machine.Quiet() as quiet:
        for turn in range(rounds + 1):
            for name in arms if turn % 2 else reversed(arms):
                start = time.perf_counter()
                arms[name].advance(size)
                if turn:  # the first segment holds the prefill
                    times[name].append(time.perf_counter() - start)
    ours, theirs = list(arms["engine"].texts.values()), arms["generate"].ids[:, PROMPT_TOKENS:].tolist()
    found = [compare_greedy(model, p, b, a[: len(b)]) for p, a, b in zip(prompts, ours, theirs)]
    # Two implementations round differently: equal up to two units in the last place of a logit between 16 and 32.
    if any(d is not None and not d.excused and d.gap > TIE[model.dtype] for d in found):
        raise AssertionError(f"batch {batch}: texts differ: {found}")
    ratios = [b / a for a, b in zip(times["engine"], times["generate"])]
    return {
        "op": "plain decoding",
        "B": batch,
        "engine_tokens_per_s": round(batch * size * rounds / sum(times["engine"]), 2),
        "generate_tokens_per_s": round(batch * size * rounds / sum(times["generate"]), 2),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "segments": rounds,
        "ties": sum(difference is not None for difference in found),
        "foreign_cpu": round(quiet.foreign, 3),
    }


def profile(model: Any, batch: int, steps: int, drafter: Any) -> dict[str, Any]:
    """What of a step is this package's Python: all that lies outside the forward pass (the verification's C++ with it),
    and the wrappers inside, timed with the ops they call taken out."""
    arm = Ours(model, prompts_of(model, batch), 16 * steps, drafter)
    arm.advance(2)
    seen: list[Any] = []
    forward_of = model.forward
    model.forward = lambda packed, cache, layers=None: (seen.append(packed), forward_of(packed, cache, layers))[1]
    counted = arm.engine.metrics
    before = (counted.step_time_s, counted.forward_time_s, counted.draft_time_s)
    for _ in range(steps):
        arm.engine.step()
    step, forward, draft = (
        (b - a) / steps for a, b in zip(before, (counted.step_time_s, counted.forward_time_s, counted.draft_time_s))
    )
    del model.forward
    wrappers = wrapper_seconds(model, seen[-1], arm.engine.cache)
    return {
        "op": "profile",
        "B": batch,
        "drafter": drafter,
        "ms_per_step": round(1e3 * step, 3),
        "outside_forward": round((step - forward - draft) / step, 4),
        "wrappers_in_forward": round(wrappers / step, 4),
        "own_python_share": round((step - forward - draft + wrappers) / step, 4),
        "drafting": round(draft / step, 4),
    }


def wrapper_seconds(model: Any, batch: Any, cache: Any) -> float:
    """Seconds that attention's and the packed layers' Python takes in one forward pass: they run with ops that do
    nothing. Views and splits of torch count as ours."""
    from specdec_kernels import _ops
    from specdec_kernels.engine import linear
    from specdec_kernels.engine import model as model_file

    class Nothing:
        """In place of torch.ops.mkldnn."""

        outputs: ClassVar[dict[int, torch.Tensor]] = {}

        @staticmethod
        def _linear_pointwise(x: Any, packed: Any, *rest: Any) -> torch.Tensor:
            return Nothing.outputs[id(packed)]

    rows, shape = len(batch.token_ids), model.kv_shape
    query_heads = model.module.config.num_attention_heads
    q = torch.zeros(1, query_heads, rows, shape.head_dim, dtype=model.dtype)
    k = torch.zeros(1, shape.num_kv_heads, rows, shape.head_dim, dtype=model.dtype)
    layers = [m for m in model.module.modules() if hasattr(m, "layer_idx")]
    packed = [m for m in model.module.modules() if isinstance(m, (linear.PackedLinear, linear.SharedLinear))]
    for m in packed:
        own = m if isinstance(m, linear.PackedLinear) else m.state.packed
        Nothing.outputs[id(own.packed)] = torch.zeros(1, rows, own.out_features, dtype=model.dtype)
    x = torch.zeros(1, rows, 8, dtype=model.dtype)
    call, mkldnn = _ops.call, linear._mkldnn
    model_file._current.batch, model_file._current.cache = batch, cache
    best = float("inf")
    try:
        _ops.call, linear._mkldnn = (lambda *arguments: None), Nothing
        for _ in range(10):
            start = time.perf_counter()
            for layer in layers:
                model_file.attention_forward(layer, q, k, k, None, scaling=0.1)
            for module in packed:
                module(x)
            best = min(best, time.perf_counter() - start)
    finally:
        _ops.call, linear._mkldnn = call, mkldnn
    return best


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--profile", action="store_true", help="only the profile of a step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", type=int, default=12, help="tokens a segment")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype)
    model = load_model("smollm2", dtype)
    batches = [2] if options.quick else [int(b) for b in options.batches.split(",")]

    def report(row: dict[str, Any]) -> None:
        row = {"family": "engine", **row, "dtype": options.dtype, "machine": machine.describe()}
        print({k: v for k, v in row.items() if k not in ("family", "machine")}, flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as sink:
                sink.write(json.dumps(row) + "\n")

    if options.profile:
        for batch in batches:
            for drafter in ("none", "ngram"):
                report(profile(model, batch, 4 if options.quick else 15, drafter))
        return 0
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=dtype).eval()
    rounds, size = (2, 4) if options.quick else (options.rounds, options.size)
    for batch in batches:
        report(race(model, module, batch, rounds, size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
