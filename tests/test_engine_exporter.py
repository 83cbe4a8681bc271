"""What Prometheus reads is what the engine counted, and it can be added up over engines."""

from __future__ import annotations

import pytest

from python_ref.decoder import ToyTarget
from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.metrics import KEPT_VERSIONS, EngineCounters
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


def test_a_drafter_that_learns_leaves_a_few_series_not_one_a_version():
    """500 versions of one drafter beside one that never changes: the newest versions, the other, and all in the sum."""
    engine = Engine(ToyModel(), "none", EngineConfig(page_size=4, num_pages=64))
    counted = engine.metrics
    for version in range(500):
        counted.draft_version = version
        for method, temperature, made in (("eagle3", 0.0, version), ("eagle3", 1.0, version), ("ngram", 0.0, 0)):
            for counters in (counted, counted.of_class(method, temperature, made)):
                counters.record([1], 1, 2, True)
        counted.price(2.0, 3.0 + (version == 0))
    newest = set(range(500 - KEPT_VERSIONS, 500))
    for temperature in ("greedy", "sampled"):
        assert {v for m, t, v in counted.by_class if (m, t) == ("eagle3", temperature)} == newest
    assert counted.by_class["ngram", "greedy", 0].steps == 500
    assert counted.steps == 1500
    assert set(counted.priced_time_s) == set(counted.plain_time_s) == newest
    assert counted.realised_speedup == 1501 / 1000  # of all versions
    got = scrape(engine)
    assert len(got) < 400
    assert got["specdec:generation_tokens_total", ()] == 3000
    both = EngineCounters()
    for _ in range(2):
        both.merge(counted)
    assert both.realised_speedup == 1501 / 1000
    assert both.by_class["eagle3", "greedy", 499].emitted == 4


def test_two_drafters_of_one_name_share_the_places():
    """One learns, the other of that name is at version 0 for ever: it is counted again after it was dropped."""
    counted = EngineCounters()
    for version in range(1, 100):
        counted.of_class("eagle3", 0.0, version).steps += 1
        counted.of_class("eagle3", 0.0, 0).steps += 1
    assert 0 < counted.by_class["eagle3", "greedy", 0].steps <= KEPT_VERSIONS
    assert len(counted.by_class) == KEPT_VERSIONS


@pytest.mark.parametrize("longest", [0, 1, 5, 32, 40])
def test_the_steps_histogram_has_the_same_buckets_everywhere(longest: int):
    """Replicas' buckets add up in a query only if all have the same edges; what is longer is in the last one."""
    engine = Engine(ToyModel(), "none", EngineConfig(page_size=4, num_pages=64))
    engine.metrics.emitted_per_step = [2] * longest
    engine.metrics.emitted = 7
    got = {labels[0][1]: v for (name, labels), v in scrape(engine).items() if name.endswith("tokens_per_step_bucket")}
    assert list(got) == [f"{i}.0" for i in range(1, 33)] + ["+Inf"]
    assert [got[f"{i}.0"] for i in range(1, 33)] == [2 * min(i, longest) for i in range(1, 33)]
    assert got["+Inf"] == 2 * longest


def test_engines_add_up():
    engines = [run(1), run(2)]
    both = scrape(*engines)
    apart = [scrape(engine) for engine in engines]
    for key, value in both.items():
        if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and all(key in one for one in apart):
            assert value == pytest.approx(sum(one[key] for one in apart)), key
