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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"config\.json: expected an object, got \[\]"),
        ("7", r"config\.json: expected an object, got 7"),
        ("\udcff", r"config\.json: expected JSON, got .*decode"),
    ],
)
def test_configs_that_are_no_object_are_refused_by_file(text: str, message: str, tmp_path):
    hand_written(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"^load_head: .*{message}"):
        load_head(tmp_path, num_layers=3)


def test_a_folder_without_a_config_is_named_like_one_without_weights(tmp_path):
    hand_written(tmp_path)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError) as raised:
            load_head(tmp_path, num_layers=3)
        assert str(raised.value) == f"load_head: expected {tmp_path / name}, got no such file"


@pytest.mark.parametrize("place", ["", "transformer_layer_config", "specdec"])
@pytest.mark.parametrize("value", ["576", [576], 57.5, True, -576, {}])
def test_numbers_of_a_wrong_type_are_refused_by_file_and_field(place: str, value, tmp_path):
    """Every field that is read as an integer: none reaches a comparison, a division or a tensor's shape."""
    hand_written(tmp_path, extra={"specdec": {"num_medusa": 0}})
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    names = {
        "": ("draft_vocab_size", "target_hidden_size"),
        "specdec": ("num_medusa",),
        "transformer_layer_config": (
            "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
            "max_position_embeddings",
        ),
    }[place]  # fmt: skip
    for name in names:
        fields = {**(stored[place] if place else stored), name: value}
        path.write_text(json.dumps({**stored, place: fields} if place else fields))
        with pytest.raises(ValueError, match=r"expected an int >= \d, got") as raised:
            load_head(tmp_path, num_layers=3)
        where = ": ".join([str(path), *([place] if place else []), name])
        assert str(raised.value).startswith(f"load_head: {where}: ")
        assert str(raised.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("extra", "layer", "message"),
    [
        ({"specdec": []}, {}, r"specdec: expected an object, got \[\]"),
        ({"transformer_layer_config": [1]}, {}, r"transformer_layer_config: expected an object, got \[1\]"),
        ({"speculators_config": "x"}, {}, "speculators_config: expected an object, got 'x'"),
        ({"speculators_config": {"verifier": "x"}}, {}, "speculators_config: verifier: expected an object, got 'x'"),
        ({"speculators_config": {"verifier": {"name_or_path": 3}}}, {}, "name_or_path: expected a string, got 3"),
        ({"specdec": {"fingerprint": 3}}, {}, "specdec: fingerprint: expected a string, got 3"),
        ({"specdec": {"feature_layers": 3}}, {}, "feature_layers: expected a list of ints >= 0, got 3"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, {}, r"layer_ids: expected a list of ints >= 0, got \['2'\]"),
        ({}, {"rope_parameters": "x"}, "rope_parameters: expected an object, got 'x'"),
        ({}, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta: expected a number > 0, got 'x'"),
        ({}, {"rope_theta": float("inf")}, "rope_theta: expected a number > 0, got inf"),
        ({}, {"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number > 0, got '1e-5'"),
        ({}, {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads: expected an int >= 1, got 0"),
        ({}, {"hidden_size": None}, "transformer_layer_config: hidden_size: expected an int >= 1, got None"),
    ],
)
def test_other_fields_of_a_wrong_type_are_refused_by_file_and_field(extra: dict, layer: dict, message: str, tmp_path):
    hand_written(tmp_path, extra=extra)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    if layer:
        stored["transformer_layer_config"].update(layer)
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=rf"^load_head: .*config\.json: .*{message}"):
        load_head(tmp_path, num_layers=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, value: float, tmp_path):
    """The head of a run that diverged loaded in silence and drafted nonsense."""
    hand_written(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name].view(-1)[3] = value
    save_file({key: t.bfloat16() if t.is_floating_point() else t for key, t in tensors.items()}, path)
    with pytest.raises(ValueError) as raised:
        load_head(tmp_path, num_layers=3)
    size = tensors[name].numel()
    assert str(raised.value) == f"load_head: {path}: {name}: expected finite values, got 1 NaN or infinite of {size}"


def test_weights_that_are_integers_are_refused_by_name(tmp_path):
    hand_written(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "fc.weight": torch.zeros(128, 384, dtype=torch.int64)}, path)
    with pytest.raises(ValueError, match=r"load_head: fc.weight: expected floating-point values, got torch\.int64"):
        load_head(tmp_path, num_layers=3)
