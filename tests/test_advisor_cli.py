"""The advisor's command line: `--json`, exit codes, one line for wrong input, and every help's example."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import threading
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from specdec_kernels import __main__
from specdec_kernels.advisor import serve, watch
from specdec_kernels.engine import Engine, EngineConfig
from tests.toy_model import ToyModel

COSTS = {"1": {"verify": {"0": 10, "1": 10.2, "3": 10.5}, "draft": 1}, "64": {"verify": {"0": 20, "1": 34, "3": 60}, "draft": 1}}  # fmt: skip  # noqa: E501


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    for name, tokens in (("target", ["a", "b", "ab"]), ("draft", ["a", "b"])):
        (tmp_path / f"{name}.json").write_text(json.dumps({str(i): token for i, token in enumerate(tokens)}))
    return tmp_path


@pytest.fixture
def endpoint():
    """An engine's counters on a loopback port; the engine goes on a step at every scrape."""
    engine = Engine(ToyModel(), "ngram", EngineConfig(num_drafts=4))
    server = serve.serve_metrics(engine, port=0)
    yield engine, f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # argparse breaks lines at hyphens too


def help_of(word: str, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        __main__.main([word, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", sorted(__main__.DELEGATED))
def test_help_has_an_example_and_the_exit_codes(word, capsys):
    text = " ".join(help_of(word, capsys).split())
    assert f"Example: {word} " in text
    assert "exit code: 0" in text
    assert "--json" in text


def example(word: str, capsys) -> list[str]:
    text = " ".join(help_of(word, capsys).split())
    return shlex.split(re.search(r"Example: (.*?)$", text).group(1))


@pytest.mark.parametrize(("word", "code"), [("speedup", 0), ("choose-drafts", 1), ("monitoring", 0)])
def test_the_examples_run(word, code, folder, capsys):
    arguments = example(word, capsys)
    assert __main__.main(arguments) == code
    assert json.loads(capsys.readouterr().out)


def test_the_example_of_check_tokenizer_runs(folder, capsys):
    arguments = example("check-tokenizer", capsys)
    files = {"target_dir": "target.json", "draft.gguf": "draft.json"}  # stand-ins for what the example calls them
    assert __main__.main([files.get(a, a) for a in arguments]) == 1  # compatible on the first two ids
    assert json.loads(capsys.readouterr().out)["num_ids"] == 2


def test_the_example_of_watch_runs(endpoint, capsys):
    engine, url = endpoint
    engine.generate([[1, 2, 3, 4]], max_tokens=30)
    arguments = [url if a.startswith("http") else a for a in example("watch", capsys)]
    arguments[arguments.index("--interval") + 1] = "0.05"
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            engine.generate([[1, 2, 3, 4]], max_tokens=20)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert __main__.main(arguments) == 0
    finally:
        stop.set()
        worker.join()
    views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(views) == 5
    assert set(views[0]) == set(watch.SHOWN)
    assert any(view["tokens_a_second"] > 0 for view in views)


def test_the_example_of_serve_metrics_runs(monkeypatch, capsys):
    """With the toy model in the real one's place: the example's own words otherwise."""
    monkeypatch.setattr(serve, "load_model", lambda name, dtype=None, device=None: ToyModel())
    monkeypatch.setattr(serve, "read_prompts", lambda path: [[1, 2, 3, 4, 5]])
    assert __main__.main(example("serve-metrics", capsys)) == 0
    first, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["url"].startswith("http://127.0.0.1:")
    assert last["requests"] == 2
    assert last["tokens"] == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speedup", "--acceptance", "0.7", "--drafts", "-1"], "num_drafts: expected an integer >= 0, got -1"),
        (["speedup", "--acceptance", "0.7", "--drafts", "5", "--verify", "1:1,3:2"], "expected 1..3 (measured), got 6"),
        (["choose-drafts", "nowhere.json", "--acceptance", "0.5", "--batch", "1"], "nowhere.json"),
        (["choose-drafts", "costs.json", "--acceptance", "0.5", "--batch", "0"], "batch: expected at least 1, got 0"),
        (["check-tokenizer", "nowhere", "target.json"], "expected a directory with tokenizer.json"),
        (["serve-metrics", "--prompts", "nowhere.txt"], "nowhere.txt"),
        (["watch", "http://127.0.0.1:9/metrics", "--count", "1"], "refused"),
        (["watch", "metrics"], "expected an http address"),
        (["monitoring", "--write", "costs.json"], "costs.json"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(arguments, message, folder, capsys):
    assert __main__.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(arguments[0])
    assert error.count("\n") == 1


def test_speedup_says_what_the_formulas_say(capsys):
    assert __main__.main(["speedup", "--acceptance", "0.7", "--drafts", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speedup"] == pytest.approx(1.9608, abs=1e-4)
    assert found["text_prints"] == pytest.approx(0.9517, abs=1e-4)
    assert found["best_drafts"] == 4
    assert found["break_even_acceptance"] == pytest.approx(0.334, abs=1e-3)
    assert __main__.main(["speedup", "--acceptance", "0.2", "--drafts", "5"]) == 1
    assert __main__.main(["speedup", "--acceptance", "0.9,0.5", "--drafts", "2", "--verify", "1:1,4:1.2"]) == 0


def test_a_model_that_is_not_served_is_one_line_and_exit_code_2(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("load_model: big: expected standard attention in every layer, got latent attention")

    monkeypatch.setattr("specdec_kernels.advisor.select_cli.load_model", refuse)
    assert __main__.main(["select", "--target", "big", "--candidate", "ngram"]) == 2
    error = capsys.readouterr().err
    assert error == "select: load_model: big: expected standard attention in every layer, got latent attention\n"


def test_tokens_a_step_are_those_of_the_drafts_asked_for(capsys):
    """Of four known acceptances two count where two drafts are verified: 1 + .8 + .8 .7, as in the speed-up."""
    arguments = ["speedup", "--acceptance", "0.8,0.7,0.6,0.5", "--drafts", "2", "--draft-cost", "0.1", "--json"]
    assert __main__.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_a_step"] == pytest.approx(2.36)
    assert found["speedup"] == pytest.approx(2.36 / 1.2)


def test_choose_drafts_is_case_pf_04(folder, capsys):
    assert __main__.main(["choose-drafts", "costs.json", "--acceptance", "0.5", "--batch", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_drafts"] == 3
    assert __main__.main(["choose-drafts", "costs.json", "--acceptance", "0.5", "--batch", "64"]) == 1
    assert capsys.readouterr().out.startswith("0 drafts")


def test_monitoring_writes_the_files(folder, capsys):
    assert __main__.main(["monitoring", "--write", "there"]) == 0
    assert {path.name for path in (folder / "there").iterdir()} == {"specdec_rules.yml", "specdec_dashboard.json"}


# ---- watch


class Fixed(BaseHTTPRequestHandler):
    text = b"# TYPE python_info gauge\npython_info 1\n"

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *args):
        pass


def test_an_endpoint_without_such_counters_is_exit_code_1(capsys):
    server = HTTPServer(("127.0.0.1", 0), Fixed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert __main__.main(["watch", f"http://127.0.0.1:{server.server_port}/metrics"]) == 1
    finally:
        server.shutdown()
        server.server_close()
    assert "got none" in capsys.readouterr().err


def exposition(prefix: str, **counters: float) -> str:
    rows = ((f"{prefix}{name}_total", value) for name, value in counters.items())
    return "".join(f"# TYPE {name} counter\n{name} {value}\n" for name, value in rows)


def test_rates_between_two_scrapes():
    before = watch.read_counters(exposition("specdec:", spec_decode_num_steps=0, generation_tokens=0))
    after = watch.read_counters(
        exposition(
            "specdec:", spec_decode_num_steps=10, spec_decode_num_drafts=10, spec_decode_num_draft_tokens=50,
            spec_decode_num_accepted_tokens=15, spec_decode_num_rejections=5, generation_tokens=25,
            spec_decode_verify_slots_real=60, spec_decode_verify_slots_padded=20,
        )
    )  # fmt: skip
    found = watch.rates(before, after, 5.0)
    assert found["conditional_acceptance"] == 0.75
    assert found["accepted_over_drafted"] == 0.3
    assert found["tokens_a_step"] == 2.5
    assert found["slot_utilisation"] == 0.75
    assert found["useful_token_ratio"] == pytest.approx(25 / 60)
    assert found["tokens_a_second"] == 5.0
    assert math.isnan(found["prefix_hits"])
    restarted = watch.read_counters(exposition("specdec:", spec_decode_num_steps=2, generation_tokens=4))
    assert watch.rates(after, restarted, 1.0)["tokens_a_step"] == 2.0
    text = "\n".join(watch.lines(found, 10.0))
    assert "conditional acceptance" in text
    assert "0.75" in text
    assert watch.bar(0.5, 1.0, 10) == "█████·····"
    assert watch.bar(float("nan"), 1.0, 4) == "····"


def test_vllm_counters_are_read_and_what_they_cannot_say_is_not_said():
    before = watch.read_counters(exposition("vllm:", spec_decode_num_drafts=0))
    counted = {"spec_decode_num_drafts": 10, "spec_decode_num_draft_tokens": 30, "spec_decode_num_accepted_tokens": 15}
    after = watch.read_counters(exposition("vllm:", **counted))
    found = watch.rates(before, after, 1.0)
    assert found["tokens_a_step"] == 2.5
    assert found["accepted_over_drafted"] == 0.5
    assert math.isnan(found["conditional_acceptance"])


def test_gpu_utilisation_times_useful_tokens(monkeypatch):
    """NVML stands in: half busy, and of five verified nodes two gave tokens. It knows GPUs that CUDA_VISIBLE_DEVICES
    hides: torch's first one is found by its UUID, not by that number."""
    busy = {"GPU-b0e7c3d2": 50, "GPU-another": 99}
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: "GPU-another",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=busy[handle]),
    )
    facts = {0: types.SimpleNamespace(uuid="b0e7c3d2")}
    monkeypatch.setattr("torch.cuda.get_device_properties", facts.__getitem__)
    engine = types.SimpleNamespace(
        metrics=types.SimpleNamespace(emitted=40, verify_slots=100),
        model=types.SimpleNamespace(device=types.SimpleNamespace(index=0)),
    )
    families = {family.name: family.samples[0].value for family in serve.GpuCollector(nvml, [engine]).collect()}
    assert families == {"specdec:gpu_utilisation": 0.5, "specdec:gpu_utilisation_useful": pytest.approx(0.2)}


def test_every_delegated_command_exists():
    for module, function, _ in __main__.DELEGATED.values():
        assert callable(getattr(importlib.import_module(f"specdec_kernels.{module}"), function))
