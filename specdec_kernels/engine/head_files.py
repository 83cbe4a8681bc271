"""Draft heads on disk, in the `speculators` format: config.json and model.safetensors in a folder.

EAGLE-3 and MTP follow that format's tensor names and fields, so that other engines load what is written here. EAGLE and
Medusa have no current counterpart there and use the same envelope. What only we need (the target's fingerprint, the
layers read, the kind of a Medusa set's blocks) stands under "specdec" in config.json; a checkpoint without it loads
too, but for a Medusa set, whose tensors do not tell what its blocks are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from specdec_kernels.engine.heads import KINDS, MEDUSA_BLOCK, DraftHead, HeadConfig, make_head
from specdec_kernels.engine.linear import pack_linears
from specdec_kernels.tree import check_d2t

SHIPPED = Path(__file__).parents[1] / "_heads"
_WEIGHTS = "model.safetensors"
_ARCHITECTURES = {
    "eagle3": "Eagle3Speculator", "eagle": "EagleSpeculator", "mtp": "MTPSpeculator", "medusa": "MedusaSpeculator",
}  # fmt: skip
# Names inside an MTP layer there -> here.
_MTP_NAMES = {
    "input_proj.": "fc.", "final_layernorm.": "norm.", "hidden_layernorm.": "hidden_layernorm.",
    "token_layernorm.": "token_layernorm.",
}  # fmt: skip
_SWITCHES = ("norm_before_fc", "fc_norm", "norm_output")


def save_head(head: DraftHead, folder: str | Path, *, with_embedding: bool = True, num_drafts: int = 5) -> Path:
    """Write a head. `with_embedding` adds the target's embedding, and its output rows if the head reads those; other
    engines want both. The head must be bound for it."""
    from safetensors.torch import save_file

    c = head.config
    tensors = {_stored_name(c.kind, name): value for name, value in head.state_dict().items()}
    if head.d2t is not None:
        _, t2d = check_d2t(head.d2t, draft_vocab_size=c.draft_vocab_size, target_vocab_size=c.vocab_size, kind="offset")
        assert t2d is not None
        tensors["t2d"] = t2d >= 0
    if with_embedding:
        if head.embedding is None:
            raise ValueError("save_head: with_embedding: expected a head bound to its target, got one without")
        tensors["embed_tokens.weight"] = head.embedding[: c.vocab_size]
        if c.kind in ("eagle3", "mtp") and head.output is not None:
            tensors["lm_head.weight"] = head.output
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / _WEIGHTS)
    (folder / "config.json").write_text(json.dumps(_stored_config(c, num_drafts, head), indent=2) + "\n")
    return folder


def load_head(folder: str | Path, *, num_layers: int | None = None) -> DraftHead:
    """Read a head of any kind. `num_layers`: of the target, for EAGLE-3 checkpoints that do not say which layers they
    read (then its layers 2, n // 2 and n - 3). Raises FileNotFoundError, ValueError or NotImplementedError by name."""
    folder = Path(folder)
    stored = _read_config(folder / "config.json")
    tensors = _read(folder / _WEIGHTS)
    config = _parse_config(stored, num_layers)
    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    check_d2t(d2t, draft_vocab_size=config.draft_vocab_size, target_vocab_size=config.vocab_size, kind="offset")
    head = make_head(config, d2t)
    if "lm_head.weight" not in tensors:
        head.lm_head = None  # it reads the target's
    if t2d is not None and d2t is not None:
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[head.draft_ids] = True
        if not torch.equal(known, t2d.bool()):
            raise ValueError("load_head: t2d: expected the tokens that d2t names, got others")
    embedding = tensors.pop("embed_tokens.weight", None)
    output = tensors.pop("lm_head.weight", None) if config.kind != "eagle3" else None
    for name, value in (("embedding", embedding), ("output", output)):
        if value is not None:
            rows = config.vocab_size if name == "embedding" else config.draft_vocab_size
            _expect_shape(f"{name} matrix", value, (rows, config.hidden_size))
            setattr(head, name, value)
    state = {_own_name(config.kind, name): value for name, value in tensors.items()}
    wanted = {name: value for name, value in head.state_dict().items() if name != "d2t"}
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(
            f"load_head: {_WEIGHTS}: expected the tensors of one {config.kind} layer, got missing {missing}, "
            f"unknown {extra}"
        )
    for name, value in wanted.items():
        _expect_shape(name, state[name], tuple(value.shape))
        if not state[name].is_floating_point():
            raise ValueError(f"load_head: {name}: expected floating-point values, got {state[name].dtype}")
    head.load_state_dict(state, strict=False)
    return head.to(next(iter(state.values())).dtype)


def find_head(given: str | Path | DraftHead | None, kind: str, model: Any) -> DraftHead:
    """The head in the folder `given`, or the one of `kind` that ships for this target; ValueError if none does."""
    if isinstance(given, DraftHead):
        return given
    if given is not None:
        return load_head(given, num_layers=model.num_layers)
    fingerprint = model.fingerprint() if hasattr(model, "fingerprint") else None
    for path in sorted(SHIPPED.glob("*/config.json")):
        own = json.loads(path.read_text()).get("specdec", {})
        if own.get("kind") == kind and own.get("fingerprint") == fingerprint:
            return load_head(path.parent)
    raise ValueError(
        f"Engine: drafter: expected a trained {kind!r} head for {model.name!r}, got none with this package; train one "
        f"(python -m specdec_kernels train-head --kind {kind}) and pass its folder to the drafter"
    )


def bind_head(head: DraftHead, model: Any, *, pack: bool = False) -> Any:
    """The head in the target's dtype, with the target's embedding and output matrix; ValueError if it was made for
    another target. pack: lay out its linear layers as the target's, where that is faster (it cannot be saved then)."""
    c = head.config
    if not hasattr(model, "hidden_size"):
        raise ValueError(f"{c.kind} head: target: expected a model that gives its hidden states, got {model.name!r}")
    if c.fingerprint:
        own = model.fingerprint() if hasattr(model, "fingerprint") else "a model without fingerprint"
        if own != c.fingerprint:
            raise ValueError(f"{c.kind} head: target: expected {c.target} ({c.fingerprint}), got {model.name} ({own})")
    for name, expected, got in (
        ("hidden size", c.target_hidden_size or c.hidden_size, model.hidden_size),
        ("vocabulary", c.vocab_size, model.vocab_size),
    ):
        if expected != got:
            raise ValueError(f"{c.kind} head: target: expected a {name} of {expected}, got {got}")
    outside = [layer for layer in c.feature_layers if not 0 <= layer <= model.num_layers]
    if outside:
        raise ValueError(f"{c.kind} head: feature_layers: expected 0..{model.num_layers}, got {outside}")
    head = head.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
    for name in ("embedding", "output"):
        value = getattr(head, name)
        if value is not None:
            setattr(head, name, value.to(device=model.device, dtype=model.dtype))
    head.bind(model.embedding(), model.output_matrix())
    if pack:
        pack_linears(head, model.dtype, model.device)
    return head


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise FileNotFoundError(f"load_head: expected {path}, got no such file")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"load_head: {path}: expected intact safetensors, got {error}") from error
    for name, value in tensors.items():
        # Such a head (of a training run that diverged) drafts nonsense in silence: nothing behind here would notice.
        plain = value.float() if value.is_floating_point() and value.dtype.itemsize == 1 else value
        bad = int((~torch.isfinite(plain)).sum())
        if bad:
            raise ValueError(
                f"load_head: {path}: {name}: expected finite values, got {bad} NaN or infinite of {value.numel()}"
            )
    return tensors


def _read_config(path: Path) -> _Fields:
    if not path.exists():
        raise FileNotFoundError(f"load_head: expected {path}, got no such file")
    try:
        stored = json.loads(path.read_text())
    except (ValueError, OSError) as error:  # also text that is not UTF-8
        raise ValueError(f"load_head: {path}: expected JSON, got {error}") from error
    if not isinstance(stored, Mapping):
        raise ValueError(f"load_head: {path}: expected an object, got {stored!r}")
    return _Fields(stored, str(path))


class _Fields(dict[str, Any]):
    """A JSON object whose fields are read with their type, so that a wrong one is refused by file and name."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        super().__init__(fields)
        self.where = where

    def _expect(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"load_head: {self.where}: {name}: expected {expected}, got {self.get(name)!r}")

    def object(self, name: str) -> _Fields:
        """A field that may be missing or null: an empty object then."""
        value = self.get(name)
        self._expect(value is None or isinstance(value, Mapping), name, "an object")
        return _Fields(value or {}, f"{self.where}: {name}")

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        if self.get(name) is None and default is not None:
            return default
        value: Any = self.get(name)
        self._expect(_is_int(value) and value >= least, name, f"an int >= {least}")
        return value

    def number(self, name: str, default: float) -> float:
        value = default if self.get(name) is None else self[name]
        self._expect(_is_int(value) or isinstance(value, float), name, "a number > 0")
        self._expect(0 < value < math.inf, name, "a number > 0")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        self._expect(value is None or isinstance(value, str), name, "a string")
        return value or ""

    def layers(self, name: str) -> tuple[int, ...] | None:
        value = self.get(name)
        fine = value is None or (isinstance(value, list) and all(_is_int(layer) and layer >= 0 for layer in value))
        self._expect(fine, name, "a list of ints >= 0")
        return None if value is None else tuple(value)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _expect_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"load_head: {name}: expected {list(shape)}, got {list(value.shape)}")


def _stored_name(kind: str, name: str) -> str:
    if kind != "mtp" or name == "d2t":
        return name
    if name.startswith("layers.0."):
        return "mtp_layers.0." + name.removeprefix("layers.0.")
    return next(
        f"mtp_layers.0.{theirs}" + name.removeprefix(own) for theirs, own in _MTP_NAMES.items() if name.startswith(own)
    )


def _own_name(kind: str, name: str) -> str:
    if kind != "mtp" or not name.startswith("mtp_layers.0."):
        return name
    rest = name.removeprefix("mtp_layers.0.")
    for theirs, own in _MTP_NAMES.items():
        if rest.startswith(theirs):
            return own + rest.removeprefix(theirs)
    return f"layers.0.{rest}"


def _stored_config(c: HeadConfig, num_drafts: int, head: DraftHead) -> dict[str, Any]:
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[c.kind]],
        "speculators_model_type": c.kind,
        "speculators_version": "0.9.0",  # and no model_type: vLLM 0.32 knows the format by its absence
        "draft_vocab_size": c.draft_vocab_size,
        "transformer_layer_config": layer,
        "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": c.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": c.target, "architectures": ["LlamaForCausalLM"]},
        },
        "specdec": {
            "kind": c.kind,
            "feature_layers": list(c.feature_layers),
            "fingerprint": c.fingerprint,
            "num_medusa": c.num_medusa,
        },
    }
    if c.kind == "eagle3":
        config["norm_before_residual"] = c.norm_before_residual
        config["target_hidden_size"] = c.target_hidden_size or c.hidden_size
        config["eagle_aux_hidden_state_layer_ids"] = list(c.feature_layers)
    if c.kind == "mtp":
        config["num_nextn_predict_layers"] = 1
    if c.kind == "medusa":
        config["specdec"]["block"] = MEDUSA_BLOCK
    return config


def _parse_config(stored: _Fields, num_layers: int | None) -> HeadConfig:
    own = stored.object("specdec")
    kind = stored.get("speculators_model_type")
    if kind not in KINDS:
        raise NotImplementedError(f"load_head: speculators_model_type: expected one of {KINDS}, got {kind!r}")
    if kind == "medusa" and own.get("block") != MEDUSA_BLOCK:
        # The paper's residual blocks have tensors of the same names and shapes and mean something else.
        raise NotImplementedError(f"load_head: specdec.block: expected {MEDUSA_BLOCK!r}, got {own.get('block')!r}")
    for switch in _SWITCHES:
        if stored.get(switch):
            raise NotImplementedError(f"load_head: {switch}: expected false, got {stored[switch]!r}")
    layer = stored.object("transformer_layer_config")
    if layer.get("model_type", "llama") != "llama":
        raise NotImplementedError(f"load_head: model_type: expected 'llama' layers, got {layer['model_type']!r}")
    if layer.get("num_hidden_layers", 1) != 1 or stored.get("num_nextn_predict_layers", 1) != 1:
        raise NotImplementedError("load_head: num_hidden_layers: expected one layer, got more")
    rope = layer.object("rope_parameters") or layer.object("rope_scaling")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise NotImplementedError(f"load_head: rope_parameters: expected default rotary positions, got {rope}")
    ids = own.layers("feature_layers") or stored.layers("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        if num_layers is None:
            raise ValueError("load_head: num_layers: expected the target's, as config.json names no layers, got None")
        ids = (2, num_layers // 2, num_layers - 3) if kind == "eagle3" else (num_layers,)
    heads, hidden_size, vocab_size = (layer.whole(n) for n in ("num_attention_heads", "hidden_size", "vocab_size"))
    config = HeadConfig(
        kind=kind,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=stored.whole("draft_vocab_size", vocab_size),
        feature_layers=ids,
        num_q_heads=heads,
        num_kv_heads=layer.whole("num_key_value_heads", heads),
        head_dim=layer.whole("head_dim", hidden_size // heads),
        intermediate_size=layer.whole("intermediate_size", least=0),
        rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", layer.number("rope_theta", 10000.0)),
        max_positions=layer.whole("max_position_embeddings", 2048),
        norm_before_residual=bool(stored.get("norm_before_residual", False)),
        num_medusa=own.whole("num_medusa", 0, least=0),
        target=stored.object("speculators_config").object("verifier").text("name_or_path"),
        fingerprint=own.text("fingerprint"),
    )
    wide = stored.whole("target_hidden_size", 0, least=0)
    if wide and wide != config.hidden_size:
        config = replace(config, target_hidden_size=wide)
    config.validate()
    return config
