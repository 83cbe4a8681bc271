"""What Prometheus reads is what the engine counted, and it can be added up over engines."""

from __future__ import annotations

import pytest

from python_ref.decoder import ToyTarget
from specdec_kernels.engine import Engine, EngineConfig, Request
from tests.toy_model import OracleDrafter, ToyModel
from tests.toy_text import finish

prometheus = pytest.importorskip("prometheus_client", reason="needs prometheus_client")


def scrape(*engines: Engine) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    from specdec_kernels.engine.exporter import EngineCollector

    registry = prometheus.CollectorRegistry()
    registry.register(EngineCollector(*engines))
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def run(seed: int) -> Engine:
    target = ToyTarget()
    engine = Engine(ToyModel(target), OracleDrafter(target, seed=seed), EngineConfig(page_size=4, num_pages=64))
    finish(engine, *[Request([1, 2, 3, 4, 5, i], max_tokens=20 + i, temperature=0.5, seed=i, n=2) for i in range(5)])
    return engine


def test_every_counter_is_exported_under_vllms_names():
    from prometheus_client import exposition

    from specdec_kernels.engine.exporter import EngineCollector

    engine = run(0)
    got, counted = scrape(engine), engine.metrics
    for name, value in (
        ("spec_decode_num_drafts", counted.drafts),
        ("spec_decode_num_draft_tokens", counted.drafted),
        ("spec_decode_num_accepted_tokens", counted.accepted),
        ("prefix_cache_queries", counted.prefix_queries),
        ("prefix_cache_hits", counted.prefix_hits),
        ("prefix_cache_soft_hits", counted.prefix_soft_hits),
        ("generation_tokens", counted.emitted),
    ):
        assert got[f"specdec:{name}_total", ()] == value, name
    assert counted.prefix_hits > 0
    for position, value in enumerate(counted.accepted_per_pos):
        assert got["specdec:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(position)),)] == value
    assert got["specdec:request_success_total", (("finished_reason", "length"),)] == 10
    assert got["specdec:spec_decode_tokens_per_step_count", ()] == counted.steps
    assert got["specdec:spec_decode_tokens_per_step_sum", ()] == counted.emitted
    assert got["specdec:spec_decode_tokens_per_step_bucket", (("le", "1.0"),)] == counted.emitted_per_step[0]
    assert got["specdec:spec_decode_request_acceptance_count", ()] == 10
    assert got["specdec:kv_cache_usage_perc", ()] == 0.0
    registry = prometheus.CollectorRegistry()
    registry.register(EngineCollector(engine))
    assert b"specdec:spec_decode_num_drafts_total{model_name=" in exposition.generate_latest(registry)


def test_engines_add_up():
    engines = [run(1), run(2)]
    both = scrape(*engines)
    apart = [scrape(engine) for engine in engines]
    for key, value in both.items():
        if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and all(key in one for one in apart):
            assert value == pytest.approx(sum(one[key] for one in apart)), key
