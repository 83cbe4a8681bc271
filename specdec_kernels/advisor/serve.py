"""`serve-metrics`: an engine's counters as a Prometheus endpoint, on the loopback address unless told otherwise."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.advisor.cli import guarded
from specdec_kernels.engine import Engine, Request, load_model
from specdec_kernels.engine.drafters import check_name


class GpuCollector:
    """Utilisation of the engines' GPUs as NVML reports it, and that times the useful-token ratio: the share of the
    GPU's busy time that went into tokens of the text rather than into rejected drafts."""

    def __init__(self, nvml: Any, engines: Sequence[Engine]):
        self._nvml, self._engines = nvml, engines
        nvml.nvmlInit()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        busy = GaugeMetricFamily("specdec:gpu_utilisation", "NVML utilisation, 0 to 1.", labels=["gpu"])
        useful = GaugeMetricFamily(
            "specdec:gpu_utilisation_useful", "NVML utilisation times emitted tokens a verified node.", labels=["gpu"]
        )
        emitted = sum(engine.metrics.emitted for engine in self._engines)
        nodes = sum(engine.metrics.verify_slots for engine in self._engines)
        for index in sorted({engine.model.device.index or 0 for engine in self._engines}):
            # NVML numbers all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves: the UUID is one GPU's
            uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            share = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            busy.add_metric([str(index)], share)
            useful.add_metric([str(index)], share * (emitted / nodes if nodes else 0.0))
        yield from (busy, useful)


def serve_metrics(*engines: Engine, host: str = "127.0.0.1", port: int = 9464) -> Any:
    """Serve the engines' counters under http://host:port/metrics from a thread; returns the server (`.shutdown()`,
    `.server_port`). port 0: any free one. Needs `prometheus_client`; with engines on a GPU and `pynvml` installed also
    its utilisation. OSError if the port is taken."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ImportError("serve-metrics needs prometheus_client: pip install 'specdec_kernels[metrics]'") from None
    from specdec_kernels.engine.exporter import EngineCollector

    registry = CollectorRegistry()
    registry.register(EngineCollector(*engines))
    on_gpu = [engine for engine in engines if engine.model.device.type == "cuda"]
    if on_gpu:
        try:
            import pynvml  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            pynvml = None
        if pynvml is not None:
            registry.register(GpuCollector(pynvml, on_gpu))
    return start_http_server(port, addr=host, registry=registry)[0]


def read_prompts(path: Path | None) -> list[str]:
    """A prompt a line of a file; None: the demo's three."""
    if path is not None:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--prompts: expected one prompt a line, got an empty file {path.name}")
        return lines
    folder = Path(__file__).parents[1] / "engine" / "prompts"
    return [file.read_text() for file in sorted(folder.glob("*.txt"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="specdec serve-metrics",
        description="Generate text for prompts, over and over, and serve the counters for Prometheus meanwhile.",
        epilog="exit code: 0, 2 wrong input, a taken port or a missing package. "
        "Example: serve-metrics --drafter ngram --requests 2 --max-tokens 16 --port 0 --json",
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, or a transformers checkpoint folder")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the fastest here)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafter", default="ngram", help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, help="file with a prompt a line (default: the demo's)")
    parser.add_argument("--requests", type=int, default=0, help="stop after so many (default: never)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    parser.add_argument("--port", type=int, default=9464, help="default: %(default)s; 0: any free one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    return guarded("serve-metrics", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts)
    drafter = check_name(args.drafter)  # before seconds of loading
    engine = Engine(load_model(args.model, dtype=args.dtype, device=args.device), drafter)
    server = serve_metrics(engine, host=args.host, port=args.port)
    url = f"http://{args.host}:{server.server_port}/metrics"
    print(json.dumps({"url": url}) if args.json else f"serving {url}", flush=True)
    chat = getattr(engine.model.tokenizer, "chat_template", None) is not None
    added = 0
    try:
        while engine.has_work or not args.requests or added < args.requests:
            while len(engine.scheduler.running) + len(engine.scheduler.waiting) < engine.config.max_batch and (
                not args.requests or added < args.requests
            ):
                text = prompts[added % len(prompts)]
                prompt: Any = [{"role": "user", "content": text}] if chat else text
                engine.add(Request(prompt, max_tokens=args.max_tokens, temperature=args.temperature))
                added += 1
            engine.step()
            time.sleep(0)  # let the server's thread answer
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
        server.server_close()
    counted = engine.metrics
    summary = {
        "requests": counted.finished,
        "tokens": counted.emitted,
        "conditional_acceptance": counted.conditional_acceptance,
        "tokens_a_step": counted.mean_accepted_length,
    }
    print(json.dumps(summary) if args.json else ", ".join(f"{k} {v}" for k, v in summary.items()))
    return 0
