"""Hidden states of real architectures, and draft heads on disk: our own and hand-written checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_kernels.engine import Engine, EngineConfig, TransformersModel
from specdec_kernels.engine.batch import HiddenStates
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.head_files import load_head, save_head
from specdec_kernels.engine.pack import Chunk, pack_step
from specdec_kernels.engine.request import Request
from tests.head_models import random_head
from tests.test_engine_transformers import build
from tests.toy_model import ToyModel

KINDS = ("eagle", "eagle3", "mtp", "medusa")


@pytest.mark.parametrize(
    "name", ["llama", "gemma2 (softcap, window)", "gpt-neox (parallel)", "phi3 (stacked projections)"]
)
def test_a_forward_pass_keeps_the_states_asked_for(name: str):
    """The same pass that gives the logits, at any layer, for prefill chunks too."""
    module = build(name)
    module.set_attn_implementation("eager")
    text = [5, 9, 2, 40, 41, 3, 7]
    with torch.inference_mode():
        wanted = module(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    model = TransformersModel(module)
    engine = Engine(model, "none", EngineConfig(page_size=4, num_pages=16))
    (state,) = engine._prepare(Request(text))
    engine.arena.grow(state.pages, len(text))
    hidden = HiddenStates([0, 2, model.num_layers])
    batch = pack_step([], [Chunk(state, len(text), True)], 4, model.device, model.vocab_size).batch
    logits = model.forward(batch, engine.cache, hidden=hidden)
    assert torch.allclose(logits[0], wanted.logits[0, -1], atol=2e-4)
    for layer in hidden.layers:
        theirs = wanted.hidden_states[layer][0]
        assert torch.allclose(hidden.states[layer], theirs, atol=float(1e-4 * theirs.std() + 1e-5)), layer
    assert not torch.allclose(hidden.states[2], wanted.hidden_states[1][0], atol=0.1)
    model.forward(batch, engine.cache)  # a pass that nobody watches keeps nothing
    with pytest.raises(ValueError, match=r"HiddenStates: layers: expected 0\.\.3, got 4"):
        model.forward(batch, engine.cache, hidden=HiddenStates([4]))


@pytest.mark.parametrize("with_embedding", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_as_they_were_saved(kind: str, with_embedding: bool, tmp_path):
    model = ToyModel()
    head = random_head(kind, model, draft_vocab=20)
    save_head(head, tmp_path, with_embedding=with_embedding)
    again = load_head(tmp_path)
    assert again.config == head.config
    assert torch.equal(again.draft_ids, head.draft_ids)
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert (again.embedding is not None) == with_embedding
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == kind
    assert "model_type" not in config  # vLLM 0.32 takes a config that has one for something else
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["t2d"].dtype == torch.bool
    assert stored["t2d"].sum() == 20
    assert stored["d2t"].dtype == torch.int64
    if kind == "mtp":
        assert "mtp_layers.0.input_proj.weight" in stored
    assert config["specdec"].get("block") == ("linear" if kind == "medusa" else None)


@pytest.mark.parametrize("block", ["residual", None])
def test_medusa_blocks_of_another_kind_are_refused(block: str | None, tmp_path):
    """Residual blocks have tensors of the same names and shapes: read as maps they would only draft badly."""
    save_head(random_head("medusa", ToyModel()), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["specdec"] = {name: value for name, value in {**config["specdec"], "block": block}.items() if value}
    path.write_text(json.dumps(config))
    with pytest.raises(NotImplementedError) as raised:
        load_head(tmp_path)
    assert str(raised.value) == f"load_head: specdec.block: expected 'linear', got {block!r}"


def hand_written(folder, *, vocab: int = 97, draft: int = 40, hidden: int = 128, extra: dict | None = None) -> None:
    """An EAGLE-3 checkpoint as other tools write it: nothing of ours in it, random weights."""
    rng = torch.Generator().manual_seed(4)
    shapes = {
        "embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden), "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,), "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (256, 2 * hidden), "layers.0.self_attn.k_proj.weight": (128, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (128, 2 * hidden), "layers.0.self_attn.o_proj.weight": (hidden, 256),
        "layers.0.mlp.gate_proj.weight": (160, hidden), "layers.0.mlp.up_proj.weight": (160, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 160),
    }  # fmt: skip
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=rng) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    ids = torch.randperm(vocab, generator=rng)[:draft].sort().values
    tensors["d2t"] = ids - torch.arange(draft)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
    tensors["t2d"][ids] = True
    config = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": draft,
        "norm_before_residual": True, "target_hidden_size": hidden,
        "transformer_layer_config": {
            "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
        },
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "llama"}},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **(extra or {})}))
    save_file(tensors, folder / "model.safetensors")


def test_a_hand_written_checkpoint_drafts(tmp_path):
    """Layers 2, n // 2 and n - 3 by default; greedy text equals plain decoding under the tie rule."""
    hand_written(tmp_path)
    model = TransformersModel(build("llama"))
    drafter = EagleDrafter(tmp_path, top_k=4, depth=3, num_nodes=12)
    engine = Engine(model, drafter, EngineConfig(page_size=4, num_pages=128, check=True))
    assert drafter.hidden_layers == (2, 1, 0)
    assert drafter.head.config.norm_before_residual
    prompts = [[3, 4, 5], [9] * 12, [50, 60, 70, 80]]
    plain = Engine(model, "none").generate(prompts, max_tokens=32)
    for prompt, a, b in zip(prompts, plain, engine.generate(prompts, max_tokens=32)):
        difference = compare_greedy(model, prompt, a.token_ids, b.token_ids)
        assert difference is None or difference.excused, difference
    assert engine.metrics.drafter_failures == 0
    assert engine.metrics.drafted > 100


def test_damaged_and_foreign_checkpoints_are_named(tmp_path):
    def refused(error: type, message: str, folder=tmp_path, **options) -> None:
        with pytest.raises(error, match=message):
            load_head(folder, num_layers=3, **options)

    refused(FileNotFoundError, "config.json")
    hand_written(tmp_path)
    tensors, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    tensors = {name: value.clone() for name, value in tensors.items()}

    def changed(**values) -> dict:
        return {name: value for name, value in {**tensors, **values}.items() if value is not None}

    save_file(changed(d2t=tensors["d2t"] + 60), path)
    refused(ValueError, r"check_d2t: d2t: expected targets in 0\.\.96, got \d+ for draft id")
    save_file(changed(d2t=torch.zeros(39, dtype=torch.int64)), path)
    refused(ValueError, r"check_d2t: d2t: expected integers \[40\]")
    save_file(changed(t2d=~tensors["t2d"]), path)
    refused(ValueError, "load_head: t2d: expected the tokens that d2t names")
    save_file(changed(**{"fc.weight": None}), path)
    refused(ValueError, r"missing \['fc.weight'\]")
    save_file(changed(**{"layers.0.self_attn.q_norm.weight": torch.ones(64)}), path)
    refused(ValueError, r"unknown \['layers.0.self_attn.q_norm.weight'\]")
    save_file(changed(**{"fc.weight": torch.zeros(128, 256)}), path)
    refused(ValueError, r"load_head: fc.weight: expected \[128, 384\], got \[128, 256\]")
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    refused(ValueError, "expected intact safetensors")
    (tmp_path / "config.json").write_text("{")
    refused(ValueError, "expected JSON")
    for extra, message in (
        ({"fc_norm": True}, "fc_norm: expected false"),
        ({"speculators_model_type": "dflash"}, "expected one of .* got 'dflash'"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "expected 'llama' layers, got 'qwen3'"),
    ):
        hand_written(tmp_path, extra=extra)
        refused(NotImplementedError, message)
    hand_written(tmp_path, vocab=90)
    with pytest.raises(ValueError, match="target: expected a vocabulary of 90, got 97"):
        Engine(TransformersModel(build("llama")), EagleDrafter(tmp_path))
