"""The engine's counters for Prometheus: vLLM's names under the prefix `specdec:`, read when they are scraped.

Counters only, so that rates are formed by the query, over any window and any number of replicas:
acceptance per draft = rate(num_accepted_tokens) / rate(num_draft_tokens); the conditional one has rejections in its
denominator, accepted / (accepted + num_rejections). Needs `pip install 'specdec_kernels[metrics]'`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specdec_kernels.engine.decoder import Engine
from specdec_kernels.engine.metrics import ACCEPTANCE_BUCKETS, EngineCounters
from specdec_kernels.engine.pages import PageState

PREFIX = "specdec:"
STEP_EDGES = range(1, 33)  # tokens a step; the same for all replicas and at all times, so that buckets add up

# name -> (attribute of EngineCounters, help)
COUNTERS = {
    "spec_decode_num_steps": ("steps", "Verification steps, with or without drafts."),
    "spec_decode_num_drafts": ("drafts", "Verification steps that had drafts."),
    "spec_decode_num_draft_tokens": ("drafted", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": ("accepted", "Draft tokens accepted and emitted."),
    "spec_decode_num_rejections": ("rejected", "Steps in which a draft was tried and refused."),
    "spec_decode_num_rejections_at_first": ("rejected_at_first", "Of these, at the first position."),
    "spec_decode_num_bonus_tokens": ("bonus", "Tokens emitted behind a wholly accepted draft."),
    "spec_decode_overshoot_tokens": ("overshoot", "Verified tokens behind a stop, not part of the text."),
    "spec_decode_resample_fallback": ("resample_fallback", "Steps whose residual had no mass."),
    "spec_decode_nan_rows": ("nan_rows", "Steps that met a NaN logit."),
    "spec_decode_flagged_steps": ("flagged", "Steps whose data the verifier flagged."),
    "spec_decode_drafter_failures": ("drafter_failures", "Requests whose drafter was given up."),
    "spec_decode_verify_slots_real": ("verify_slots", "Tree nodes verified, roots included."),
    "spec_decode_verify_slots_padded": ("verify_slots_padded", "Node slots added to fill a graph's bucket."),
    "spec_decode_draft_seconds": ("draft_time_s", "Time spent drafting."),
    "spec_decode_verify_seconds": ("verify_time_s", "Time spent verifying and committing."),
    "forward_seconds": ("forward_time_s", "Time spent in the target's forward pass."),
    "step_seconds": ("step_time_s", "Time spent in engine steps."),
    "forward_passes": ("forwards", "Target forward passes."),
    "generation_tokens": ("emitted", "Tokens emitted."),
    "prompt_tokens": ("prefill_tokens", "Prompt tokens computed."),
    "num_preemptions": ("preemptions", "Requests sent back to the queue."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Of these, found."),
    "prefix_cache_soft_hits": ("prefix_soft_hits", "Of the hits, in rejected drafts."),
    "prefix_cache_dropped": ("prefix_dropped", "Matched tokens given up for a drafter."),
    "copied_pages": ("copied_pages", "Pages copied between samples of one request."),
}

# The same counts by class: labels method (drafter), temperature (greedy, sampled) and draft_version (the newest few).
CLASS_COUNTERS = {
    "spec_decode_class_steps": ("steps", "Verification steps of a class of requests."),
    "spec_decode_class_emitted_tokens": ("emitted", "Tokens they emitted."),
    "spec_decode_class_draft_tokens": ("drafted", "Their draft tokens verified."),
    "spec_decode_class_accepted_tokens": ("accepted", "Their draft tokens accepted and emitted."),
    "spec_decode_class_rejections": ("rejected", "Their steps in which a draft was tried and refused."),
}


class EngineCollector:
    """A `prometheus_client` collector over one or several engines: `registry.register(EngineCollector(engine))`.

    Nothing is counted here and nothing is read from the device. Several engines are added up. Engines may step
    meanwhile, in other threads.
    """

    def __init__(self, *engines: Engine, labels: dict[str, str] | None = None):
        self._engines = engines
        self._labels = {"model_name": engines[0].model.name, **(labels or {})}

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        total = EngineCounters()
        for engine in self._engines:
            total.merge(engine.metrics)
        for name, (attribute, text) in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=names)
            family.add_metric(values, getattr(total, attribute))
            yield family
        for name, counts, text in (
            ("num_draft_tokens_per_pos", total.drafted_per_pos, "Steps with a draft at this position."),
            ("num_accepted_tokens_per_pos", total.accepted_per_pos, "Drafts accepted at this position."),
        ):
            family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=[*names, "position"])
            for position, count in enumerate(counts):
                family.add_metric([*values, str(position)], count)
            yield family
        for name, (attribute, text) in CLASS_COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=[*names, "method", "temperature", "draft_version"])
            for (method, temperature, version), counted in sorted(total.by_class.items()):
                family.add_metric([*values, method, temperature, str(version)], getattr(counted, attribute))
            yield family
        for name, times, text in (
            ("priced", total.priced_time_s, "Time of decode steps that a policy's cost model priced, prefill apart."),
            ("plain_equivalent", total.plain_time_s, "What plain decoding would have taken for their tokens."),
        ):
            family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}_seconds", text, labels=[*names, "draft_version"])
            for version, seconds in sorted(times.items()):
                family.add_metric([*values, str(version)], seconds)
            yield family
        family = CounterMetricFamily(f"{PREFIX}request_success", "Requests ended.", labels=[*names, "finished_reason"])
        for reason, count in sorted(total.finished_by.items()):
            family.add_metric([*values, reason], count)
        yield family
        family = CounterMetricFamily(f"{PREFIX}prefix_cache_evictions", "Pages evicted.", labels=[*names, "state"])
        for state in (PageState.SOFT, PageState.COMMITTED):
            family.add_metric([*values, state.name.lower()], sum(e.arena.evicted[state] for e in self._engines))
        yield family
        yield _histogram(
            HistogramMetricFamily(
                f"{PREFIX}spec_decode_tokens_per_step", "Tokens a verification step emitted.", labels=names
            ),
            values,
            STEP_EDGES,
            total.emitted_per_step,
            total.emitted,
        )
        tenths = [(i + 1) / ACCEPTANCE_BUCKETS for i in range(ACCEPTANCE_BUCKETS)]
        counts = total.request_acceptance
        middle = sum(count * (edge - 0.5 / ACCEPTANCE_BUCKETS) for count, edge in zip(counts, tenths))
        yield _histogram(
            HistogramMetricFamily(
                f"{PREFIX}spec_decode_request_acceptance", "Conditional acceptance of ended requests.", labels=names
            ),
            values,
            tenths,
            counts,
            middle,
        )
        running = sum(len(engine.scheduler.running) for engine in self._engines)
        waiting = sum(len(engine.scheduler.waiting) for engine in self._engines)
        pages = sum(engine.arena.num_pages for engine in self._engines)
        used = sum(sum(engine.arena.active) for engine in self._engines)
        for name, value, text in (
            ("num_requests_running", running, "Requests running."),
            ("num_requests_waiting", waiting, "Requests waiting."),
            ("kv_cache_usage_perc", used / pages, "Share of pages that requests own."),
            ("spec_decode_draft_version", total.draft_version, "Version of the drafter's weights."),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge


def _histogram(family: Any, labels: list[str], edges: Sequence[float], counts: Sequence[int], total: float) -> Any:
    """Counts of a bucket each, as the cumulative buckets of the format. edges: upper bounds of the first buckets;
    counts: of as many as were needed, those behind the last edge included."""
    buckets, below = [], 0
    for i, edge in enumerate(edges):
        below += counts[i] if i < len(counts) else 0
        buckets.append((str(float(edge)), below))
    family.add_metric(labels, [*buckets, ("+Inf", sum(counts))], total)
    return family
