"""`python -m specdec_kernels COMMAND`: environment, generation, benchmarks, advisor, metrics."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
import time
from typing import Any

DESCRIPTION = "Speculative-decoding kernels: environment, generation, microbenchmarks, demo, advisor, metrics."

# Commands with a parser of their own: word -> (module, function, help)
DELEGATED = {
    "check-tokenizer": ("advisor.tokenizer_check", "main", "may this draft propose tokens to that target?"),
    "speedup": ("advisor.cli", "speedup_main", "what a chain of drafts gives at these costs"),
    "choose-drafts": ("advisor.cli", "choose_main", "how many drafts at a batch size, from measured costs"),
    "select": ("advisor.select_cli", "select_main", "measure drafters on your prompts: which, at which batch?"),
    "advise": ("advisor.select_cli", "advise_main", "what to deploy, from `select --out` and a trace of requests"),
    "check-vllm": ("integrations.vllm", "check_main", "has the installed vLLM every hook that the plug-in needs?"),
    "serve-metrics": ("advisor.serve", "main", "generate, and serve the counters for Prometheus"),
    "watch": ("advisor.watch", "main", "speculation live in the terminal, from a /metrics address"),
    "monitoring": ("advisor.cli", "monitoring_main", "the alert rules and the Grafana dashboard"),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m specdec_kernels", description=DESCRIPTION)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what was compiled, what runs here, what is missing and how to get it")
    generate = commands.add_parser("generate", help="stream text from a model, accepted drafts in green")
    generate.add_argument("prompt", help="the prompt, or - to read it from standard input")
    _model_options(generate)
    generate.add_argument(
        "--drafter", default="ngram", help="none, ngram, self, eagle, eagle3, mtp or medusa (default: %(default)s)"
    )
    generate.add_argument("--head", help="folder of a trained head (train-head) for the last four")
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    commands.add_parser(
        "bench", help="the microbenchmarks (in the source folder); what follows is theirs", add_help=False
    )
    demo = commands.add_parser("demo", help="three real prompts, plain and with each drafter: same text, less time")
    _model_options(demo)
    demo.add_argument("--quick", action="store_true", help="short texts: does it run?")
    from specdec_kernels.training import command

    command.add_arguments(commands.add_parser("train-head", help="train a draft head for a model (docs/training.md)"))
    for word, (_, _, about) in DELEGATED.items():
        commands.add_parser(word, help=about, add_help=False)
    return top


def _model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="smollm2", help="smollm2, or a transformers checkpoint folder")
    command.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the fastest here)")
    command.add_argument("--device", default="cpu")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["bench"]:  # argparse cannot pass on options it does not know
        return bench(arguments[1:])
    if arguments[:1] and arguments[0] in DELEGATED:
        module, function, _ = DELEGATED[arguments[0]]
        if argv is None:
            _with_sleeping_threads()
        return getattr(importlib.import_module(f"specdec_kernels.{module}"), function)(arguments[1:])
    options = parser().parse_args(arguments)
    if argv is None:
        _with_sleeping_threads()
    try:
        return COMMANDS[options.command](options)
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _with_sleeping_threads() -> None:
    """Threads that sleep while they wait: a little slower on an idle machine, many times faster on a busy one. The
    OpenMP runtime reads this once, when torch is imported, which importing the package has done: start again."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "specdec_kernels", *sys.argv[1:]])


def info(options: argparse.Namespace) -> int:
    from specdec_kernels import collect_env

    return collect_env.main()


def generate(options: argparse.Namespace) -> int:
    from specdec_kernels._console import Stream
    from specdec_kernels.engine import Engine, Event, Request, load_model
    from specdec_kernels.engine.tokens import TextStream

    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.raw and not text:  # this and what follows: before seconds of loading
        raise ValueError("generate: prompt: expected at least one token, got an empty prompt")
    drafter = _drafter(options)
    law = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")}
    Request(text, **law).validate()
    start = time.perf_counter()
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    print(f"{model.name}, {str(model.dtype).removeprefix('torch.')}, {time.perf_counter() - start:.1f} s to load",
          file=sys.stderr)  # fmt: skip
    engine = Engine(model, drafter)
    chat = not options.raw and getattr(model.tokenizer, "chat_template", None) is not None
    engine.add(Request([{"role": "user", "content": text}] if chat else text, **law))
    pieces, screen = TextStream(model.tokenizer), Stream()
    start = time.perf_counter()

    def show(event: Event) -> None:
        accepted = pieces.push(event.token_ids[: event.num_accepted])
        own = pieces.push(event.token_ids[event.num_accepted :], last=event.result is not None)
        m = engine.metrics
        status = (
            f"{m.emitted / (time.perf_counter() - start):.1f} tokens/s, {m.mean_accepted_length:.2f} tokens a step, "
            f"conditional acceptance {m.conditional_acceptance:.2f}, accepted/drafted {m.acceptance_per_draft:.2f}"
        )
        screen.write(accepted, own, status)

    try:
        while engine.has_work:
            for event in engine.step():
                show(event)
    finally:
        screen.close()
    return 0


def _drafter(options: argparse.Namespace) -> Any:
    """The drafter asked for: by its name, or made with the head in a folder."""
    from specdec_kernels.engine.drafters import check_name

    if options.head is None:
        return check_name(options.drafter)
    from specdec_kernels.engine.drafters.eagle import EagleDrafter
    from specdec_kernels.engine.drafters.medusa import MedusaDrafter

    if options.drafter not in ("eagle", "eagle3", "mtp", "medusa"):
        raise ValueError(f"--head: expected --drafter eagle, eagle3, mtp or medusa, got {options.drafter}")
    return (
        MedusaDrafter(options.head) if options.drafter == "medusa" else EagleDrafter(options.head, kind=options.drafter)
    )


def bench(arguments: list[str]) -> int:
    if importlib.util.find_spec("benchmarks") is None or importlib.util.find_spec("benchmarks.run") is None:
        print("bench: the microbenchmarks live in the source folder, not in the wheel: run `make bench` there",
              file=sys.stderr)  # fmt: skip
        return 2
    sys.argv = ["benchmarks.run", *arguments]
    runpy.run_module("benchmarks.run", run_name="__main__")
    return 0


def demo(options: argparse.Namespace) -> int:
    from specdec_kernels import demo

    return demo.main(options.model, options.dtype, options.device, options.quick)


def train_head(options: argparse.Namespace) -> int:
    from specdec_kernels.training import command

    return command.run(options)


COMMANDS = {"info": info, "generate": generate, "demo": demo, "train-head": train_head}

if __name__ == "__main__":
    raise SystemExit(main())
