"""Token-weighted speculation statistics of a vLLM server, under the names of our own exporter.

vLLM loads `SpecStatLogger` in its asynchronous server (entry point group `vllm.stat_logger_plugins`); `LLM(...)` has no
such hook. Counters only, so that a query forms the rates, weighted by tokens over any window. vLLM itself divides what
was accepted at a position by all drafts, whatever their length; here drafted and accepted tokens stand a position.

What vLLM's statistics do not tell (how many chains ended in a refusal) is not exported: there is no
`num_rejections`, hence no conditional acceptance.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from specdec_kernels.engine.exporter import COUNTERS, PREFIX
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.integrations._hooks import Hook, missing_hooks

logger = logging.getLogger("specdec_kernels")
TESTED = ("0.32.0", "0.33.0")  # 0.33.0: signatures alone
HOOKS = (
    Hook("vllm.v1.metrics.loggers", "StatLoggerBase.record", (
        "self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx",
    )),
    Hook("vllm.v1.spec_decode.metrics", "SpecDecodingStats", (
        "num_spec_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos",
        "num_draft_tokens_per_pos",
    )),
)  # fmt: skip
_EXPORTED = (
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_verify_slots_real", "generation_tokens", "prompt_tokens", "num_preemptions", "prefix_cache_queries",
    "prefix_cache_hits",
)  # fmt: skip
_PER_POSITION = {
    "spec_decode_num_draft_tokens_per_pos": ("drafted_per_pos", "Steps with a draft at this position."),
    "spec_decode_num_accepted_tokens_per_pos": ("accepted_per_pos", "Drafts accepted at this position."),
}


def counters_of(scheduler_stats: Any, iteration_stats: Any) -> EngineCounters:
    """What one record of vLLM adds to our counters."""
    new = EngineCounters()
    if iteration_stats is not None:
        new.emitted = iteration_stats.num_generation_tokens
        new.prefill_tokens = iteration_stats.num_prompt_tokens
        new.preemptions = iteration_stats.num_preempted_reqs
    if scheduler_stats is not None:
        prefix, spec = scheduler_stats.prefix_cache_stats, scheduler_stats.spec_decoding_stats
        if prefix is not None:
            new.prefix_queries, new.prefix_hits = prefix.queries, prefix.hits
        if spec is not None:
            new.drafts, new.drafted, new.accepted = spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens
            new.verify_slots = new.drafts + new.drafted
            new.drafted_per_pos = list(spec.num_draft_tokens_per_pos)
            new.accepted_per_pos = list(spec.num_accepted_tokens_per_pos)
    return new


def summary(counted: EngineCounters) -> str:
    """One line, every rate weighted by tokens or drafts; empty without drafts."""
    if not counted.drafts:
        return ""
    places = ", ".join(f"{rate:.3f}" for rate in counted.acceptance_at)
    useful = (counted.accepted + counted.drafts) / counted.verify_slots
    return (
        f"speculation: {1 + counted.accepted / counted.drafts:.2f} tokens a step with drafts, accepted "
        f"{counted.accepted} of {counted.drafted} drafts ({counted.acceptance_per_draft:.3f}), at each position "
        f"{places}, useful share of verified rows {useful:.3f}"
    )


@functools.cache
def _metric(name: str, text: str, labels: tuple[str, ...]) -> Any:
    """A Prometheus counter of this process: loggers of several engines share it."""
    return importlib.import_module("prometheus_client").Counter(PREFIX + name, text, labels)


@functools.cache
def stat_logger() -> type:
    """The class, made on vLLM's base. ImportError with one line if a hook has moved: vLLM logs it and goes on."""
    moved = missing_hooks(HOOKS)
    if moved:
        raise ImportError(f"specdec_kernels: no statistics of vLLM, tested with {', '.join(TESTED)}: {moved[0]}")
    base: Any = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase

    class SpecStatLogger(base):
        """Adds up vLLM's records and says one line whenever vLLM logs."""

        def __init__(self, vllm_config: Any, engine_index: int = 0):
            self.total, self.since = EngineCounters(), EngineCounters()
            self.labels = (str(vllm_config.model_config.served_model_name), str(engine_index))

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            new = counters_of(scheduler_stats, iteration_stats)
            self.total.merge(new)
            self.since.merge(new)
            for name in _EXPORTED:
                attribute, text = COUNTERS[name]
                _metric(name, text, ("model_name", "engine")).labels(*self.labels).inc(getattr(new, attribute))
            for name, (attribute, text) in _PER_POSITION.items():
                metric = _metric(name, text, ("model_name", "engine", "position"))
                for position, count in enumerate(getattr(new, attribute)):
                    metric.labels(*self.labels, str(position)).inc(count)

        def log(self) -> None:
            line, self.since = summary(self.since), EngineCounters()
            if line:
                logger.info("engine %s: %s", self.labels[1], line)

        def log_engine_initialized(self) -> None:
            pass

    return SpecStatLogger


def __getattr__(name: str) -> Any:
    """`SpecStatLogger`, which the entry point names: its base exists where vLLM is."""
    if name == "SpecStatLogger":
        return stat_logger()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
