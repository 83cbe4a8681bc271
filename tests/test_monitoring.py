"""Alert rules and dashboard, evaluated by Prometheus' own promtool on replayed counters; structure without it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specdec_kernels.engine import Engine, EngineConfig, Request
from specdec_kernels.engine.exporter import EngineCollector
from specdec_kernels.engine.policy import FixedDrafts
from tests.toy_model import ToyModel

FOLDER = Path(__file__).parents[1] / "specdec_kernels" / "monitoring"
RULES, DASHBOARD = FOLDER / "specdec_rules.yml", FOLDER / "specdec_dashboard.json"
LOCAL = Path(__file__).parents[1] / ".venv" / "prometheus" / "usr" / "bin" / "promtool"
PROMTOOL = shutil.which("promtool") or (str(LOCAL) if LOCAL.exists() else None)
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (make promtool)")
CLASS = {"model_name": "m", "method": "ngram", "temperature": "greedy", "draft_version": "0"}
# vLLM's own counters, which the dashboard shows beside ours.
VLLM = {
    f"vllm:{name}_total"
    for name in (
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    )
}  # fmt: skip


def series(name: str, labels: dict[str, str], values: list[float]) -> dict[str, str]:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": " ".join(f"{value:g}" for value in values)}


def counts(minutes: int, alpha: Callable[[int], float], drafts: Callable[[int], int], seed: int) -> list[list[int]]:
    """Running totals a minute of (accepted, rejections, emitted, steps): chains of 5 at acceptance alpha(minute)."""
    rng = random.Random(seed)
    totals, rows = [0, 0, 0, 0], []
    for minute in range(minutes):
        for _ in range(drafts(minute)):
            accepted = next((i for i in range(5) if rng.random() >= alpha(minute)), 5)
            for i, value in enumerate((accepted, accepted < 5, accepted + 1, 1)):
                totals[i] += value
        rows.append(list(totals))
    return rows


def class_series(labels: dict[str, str], rows: list[list[int]], start: int = 0) -> list[dict[str, str]]:
    names = ("accepted_tokens", "rejections", "emitted_tokens", "steps")
    out = [
        series(f"specdec:spec_decode_class_{name}_total", labels, [row[i] for row in rows])
        for i, name in enumerate(names)
    ]
    for entry in out:  # a class that begins later
        entry["values"] = "_ " * start + entry["values"]
    return out


def promtool(tmp_path: Path, test: dict, rules: str | None = None) -> subprocess.CompletedProcess[str]:
    (tmp_path / "rules.yml").write_text(RULES.read_text() if rules is None else rules)
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document, width=1_000_000))
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def alert(name: str, minute: int, labels: dict[str, str] | None) -> dict:
    """Expect `name` firing with these labels at that minute, or nothing (None)."""
    rule = next(r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"] if r.get("alert") == name)
    firing = [] if labels is None else [{"exp_labels": labels | rule["labels"], "exp_annotations": rule["annotations"]}]
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": firing}


DROPS = ("SpecdecAcceptanceDropped", "SpecdecAcceptanceCollapsed", "SpecdecAcceptedLengthDropped")


def silent(minutes: range) -> list[dict]:
    return [alert(name, minute, None) for name in DROPS for minute in minutes]


@needs_promtool
def test_the_alert_fires_within_its_windows_on_a_drop_from_75_to_60_percent(tmp_path):
    rows = counts(300, lambda minute: 0.75 if minute < 180 else 0.60, lambda minute: 60, 1)
    test = {
        "interval": "1m",
        "input_series": class_series(CLASS, rows),
        "alert_rule_test": [
            *silent(range(60, 181, 20)),
            alert("SpecdecAcceptanceDropped", 185, None),  # five minutes alone are no proof
            alert("SpecdecAcceptanceDropped", 230, CLASS),  # within the hour
            alert("SpecdecAcceptedLengthDropped", 230, CLASS),
            alert("SpecdecAcceptanceCollapsed", 230, None),  # 0.8 of the baseline is no collapse
        ],
    }
    done = promtool(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr
    lax = RULES.read_text().replace("0.9 * specdec:conditional_acceptance:baseline", "0.5 * specdec:conditional_acceptance:baseline")  # fmt: skip  # noqa: E501
    assert promtool(tmp_path, test, lax).returncode != 0  # control: the test can fail


@needs_promtool
def test_a_collapse_is_critical_within_a_quarter_of_an_hour(tmp_path):
    rows = counts(240, lambda minute: 0.75 if minute < 180 else 0.30, lambda minute: 60, 2)
    test = {
        "interval": "1m",
        "input_series": class_series(CLASS, rows),
        "alert_rule_test": [
            alert("SpecdecAcceptanceCollapsed", 180, None),
            alert("SpecdecAcceptanceCollapsed", 195, CLASS),
        ],
    }
    done = promtool(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_silent_on_noise_on_little_traffic_and_on_a_new_draft_version(tmp_path):
    rng = random.Random(3)
    wobble = [rng.uniform(-0.08, 0.08) for _ in range(360)]
    noisy = counts(360, lambda minute: 0.75 + wobble[minute], lambda minute: 12 + minute % 9, 4)
    scarce = counts(360, lambda minute: 0.75 if minute < 180 else 0.5, lambda minute: 3, 5)
    old = counts(180, lambda minute: 0.8, lambda minute: 40, 6)
    new = counts(180, lambda minute: 0.6, lambda minute: 40, 7)
    inputs = [
        *class_series(CLASS, noisy),
        *class_series(CLASS | {"temperature": "sampled"}, scarce),
        *class_series(CLASS | {"method": "eagle3"}, old + [old[-1]] * 180),
        *class_series(CLASS | {"method": "eagle3", "draft_version": "1"}, new, start=180),
    ]
    done = promtool(tmp_path, {"interval": "1m", "input_series": inputs, "alert_rule_test": silent(range(60, 360, 15))})
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_silent_on_a_traffic_mix_shift_that_moves_the_overall_rate(tmp_path):
    easy = counts(360, lambda minute: 0.9, lambda minute: 90 if minute < 180 else 10, 8)
    hard = counts(360, lambda minute: 0.5, lambda minute: 10 if minute < 180 else 90, 9)
    inputs = class_series(CLASS, easy) + class_series(CLASS | {"temperature": "sampled"}, hard)
    taken, refused = (
        f"sum(rate(specdec:spec_decode_class_{name}_total[1h]))" for name in ("accepted_tokens", "rejections")
    )
    overall = f"({taken} / ({taken} + {refused}))"
    shifted = f"{overall} < bool 0.8 * ({overall.replace('[1h]', '[1h] offset 1h')})"
    test = {
        "interval": "1m",
        "input_series": inputs,
        "alert_rule_test": silent(range(60, 360, 15)),
        "promql_expr_test": [
            {"expr": shifted, "eval_time": "240m", "exp_samples": [{"labels": "{}", "value": 1}]}
        ],  # the overall rate did fall by more than a fifth
    }
    done = promtool(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_fault_counters_and_speed_and_prefix_alerts(tmp_path):
    labels = {"model_name": "m"}
    minutes = range(240)

    def total(per_minute: Callable[[int], float]) -> list[float]:
        values, now = [], 0.0
        for minute in minutes:
            now += per_minute(minute)
            values.append(now)
        return values

    def after(minute: int) -> bool:
        return minute > 180

    inputs = [
        series("specdec:spec_decode_nan_rows_total", labels, total(lambda m: m == 190)),
        series("specdec:spec_decode_resample_fallback_total", labels, total(lambda m: after(m))),
        series("specdec:spec_decode_num_drafts_total", labels, total(lambda m: 60)),
        series("specdec:spec_decode_drafter_failures_total", labels, total(lambda m: m == 200)),
        series("specdec:generation_tokens_total", labels, total(lambda m: 1000 if not after(m) else 600)),
        series("specdec:step_seconds_total", labels, total(lambda m: 50)),
        series("specdec:prefix_cache_queries_total", labels, total(lambda m: 1000)),
        series("specdec:prefix_cache_dropped_total", labels, total(lambda m: 200 * after(m))),
    ]
    expected = [
        ("SpecdecNanLogits", 189, 192), ("SpecdecZeroResiduals", 179, 200), ("SpecdecDrafterFailed", 199, 205),
        ("SpecdecSpeedDropped", 179, 235), ("SpecdecPrefixLoss", 179, 235),
    ]  # fmt: skip
    checks = [alert(name, before, None) for name, before, _ in expected]
    checks += [alert(name, then, labels) for name, _, then in expected]
    done = promtool(tmp_path, {"interval": "1m", "input_series": inputs, "alert_rule_test": checks})
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_realised_speed_up_against_its_draft_versions_baseline(tmp_path):
    """A minute of priced steps: version 0 falls from 1.6 to 1.2, version 1 from 1.1 to 0.9; version 2 starts at 1.3 and
    stays."""
    rng, minutes = random.Random(11), 300

    def inputs(version: int, before: float, after: float, start: int = 0) -> list[dict[str, str]]:
        labels = {"model_name": "m", "draft_version": str(version)}
        spent, plain, rows = 0.0, 0.0, []
        for minute in range(start, minutes):
            seconds = 40 * rng.uniform(0.8, 1.2)
            spent += seconds
            plain += seconds * (before if minute < 180 else after) * rng.uniform(0.95, 1.05)
            rows.append((plain, spent))
        names = ("plain_equivalent", "priced")
        out = [
            series(f"specdec:spec_decode_{n}_seconds_total", labels, [r[i] for r in rows]) for i, n in enumerate(names)
        ]
        for entry in out:
            entry["values"] = "_ " * start + entry["values"]
        return out

    def version(number: int) -> dict[str, str]:
        return {"model_name": "m", "draft_version": str(number)}

    dropped, losing = "SpecdecSpeedupDropped", "SpecdecDoesNotPay"
    checks = [alert(name, minute, None) for name in (dropped, losing) for minute in range(60, 186, 25)]
    test = {
        "interval": "1m",
        "input_series": [*inputs(0, 1.6, 1.2), *inputs(1, 1.1, 1.0), *inputs(2, 1.3, 1.3, start=150)],
        "alert_rule_test": [*checks, alert(dropped, 235, version(0)), alert(losing, 235, None)],
    }
    done = promtool(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr
    test["input_series"] = inputs(1, 1.1, 0.9)
    test["alert_rule_test"] = [*checks, alert(losing, 290, version(1))]
    done = promtool(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr
    test["alert_rule_test"] = [alert(losing, 290, None)]  # control
    assert promtool(tmp_path, test).returncode != 0


# ---- the dashboard


def expressions() -> list[tuple[str, str]]:
    """(panel title, expression), with Grafana's variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*"))
        for panel in panels
        for target in panel["targets"]
    ]


def scraped(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class Priced(FixedDrafts):
    """A plain step of one request takes 10 ms."""

    def plain_seconds(self, count: int, context: int) -> float:
        return 0.01 * count


@pytest.fixture(scope="module")
def recorded() -> list[dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """41 scrapes, 15 s apart on paper, of a real engine under load: shared prompts, drafts, stops, a small arena."""
    config = EngineConfig(num_pages=40, page_size=4, max_batch=4, num_drafts=4)
    engine = Engine(ToyModel(), "ngram", config, policy=Priced(4))
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    rng, scrapes = random.Random(0), []
    for turn in range(41):
        for _ in range(2):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, rng.randrange(32), rng.randrange(32)]
            engine.add(Request(prompt, max_tokens=14, temperature=turn % 2, seed=turn))
        for _ in range(6):
            engine.step()
        scrapes.append(scraped(registry))
    return scrapes


def inputs_of(scrapes) -> list[dict[str, str]]:
    """Recorded samples as promtool's input; a series that began later is absent until then."""
    keys = sorted({key for scrape in scrapes for key in scrape})
    out = []
    for name, labels in keys:
        entry = series(name, dict(labels), [])
        entry["values"] = " ".join(
            "_" if (name, labels) not in scrape else f"{scrape[name, labels]:.9g}" for scrape in scrapes
        )
        out.append(entry)
    for i, name in enumerate(sorted(VLLM)):  # written by hand: no vLLM runs in this test
        out.append(series(name, {"model_name": "v", "engine": "0"}, [(10 + i) * t for t in range(len(scrapes))]))
    version = {"model_name": "m", "draft_version": "0"}
    for name, labels in (("conditional_acceptance", CLASS), ("realised_speedup", version)):
        out.append(series(f"specdec:{name}:baseline", labels, [0.5] * len(scrapes)))
    return out


@needs_promtool
def test_every_dashboard_expression_gives_numbers_on_recorded_samples(tmp_path, recorded):
    first, last = recorded[20], recorded[40]

    def grown(name: str, **labels: str) -> float:
        keys = [k for k in last if k[0] == f"specdec:{name}_total" and labels.items() <= dict(k[1]).items()]
        assert keys, name
        return sum(last[key] - first.get(key, 0.0) for key in keys)

    def at(title: str, index: int = 0) -> str:
        return [expr for name, expr in expressions() if name == title][index]

    kind = {"method": "ngram", "temperature": "greedy"}
    taken, refused = (grown(f"spec_decode_class_{n}", **kind) for n in ("accepted_tokens", "rejections"))
    known = {
        f"max(({at('Conditional acceptance by class')}) and on (temperature) vector_greedy)": taken / (taken + refused),
        at("Tokens a step"): grown("generation_tokens") / grown("spec_decode_num_steps"),
        at("Accepted over drafted"): grown("spec_decode_num_accepted_tokens") / grown("spec_decode_num_draft_tokens"),
        at("Padding and rejection apart", 1): grown("generation_tokens") / grown("spec_decode_verify_slots_real"),
        at("Realised speed-up over plain decoding"): grown("spec_decode_plain_equivalent_seconds")
        / grown("spec_decode_priced_seconds"),
        at("Prefix cache: looked-up prompt tokens"): grown("prefix_cache_hits") / grown("prefix_cache_queries"),
    }
    helper = series("vector_greedy", {"temperature": "greedy"}, [1] * 41)

    def holds(expr: str) -> dict:
        return {"expr": expr, "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 1}]}

    checks = [holds(f"count(({expr}) == ({expr})) > bool 0") for _, expr in expressions()]
    checks += [holds(f"abs(sum({expr}) - {value!r}) < bool 1e-6") for expr, value in known.items()]
    test = {"interval": "15s", "input_series": [*inputs_of(recorded), helper], "promql_expr_test": checks}
    done = promtool(tmp_path, test)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    wrong = {**test, "promql_expr_test": [{**checks[-1], "expr": checks[-1]["expr"].replace("1e-6", "-1")}]}
    assert promtool(tmp_path, wrong).returncode != 0  # control


def test_every_metric_of_rules_and_dashboard_is_exported_or_recorded(recorded):
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    made = {name for name, _ in recorded[-1]} | VLLM | {rule["record"] for rule in rules if "record" in rule}
    used = {
        name
        for expr in [rule["expr"] for rule in rules] + [expr for _, expr in expressions()]
        for name in re.findall(r"(?:specdec|vllm):[a-z0-9_:]+", expr)
    }
    assert len(used) > 30
    assert used <= made, sorted(used - made)


def test_dashboard_is_sound():
    document = json.loads(DASHBOARD.read_text())
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    boxes = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(boxes)) == len(boxes)
    assert all(target["expr"] and target["legendFormat"] for panel in panels for target in panel["targets"])


@needs_promtool
def test_rules_are_valid():
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
