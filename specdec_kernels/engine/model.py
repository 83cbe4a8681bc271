"""A `transformers` causal LM as a target: packed ragged tokens, our paged cache, our attention."""

from __future__ import annotations

import hashlib
import inspect
import threading
from typing import Any

import torch

from specdec_kernels.attention import tree_attention, write_kv
from specdec_kernels.engine.batch import Batch, HiddenStates, KVCache, KVShape
from specdec_kernels.engine.fused_layer import fuse_layers
from specdec_kernels.engine.linear import fuse_norms, pack_linears
from specdec_kernels.engine.parallel import Parallel, whole

ATTENTION = "specdec_kernels"
_UNSUPPORTED = {
    "kv_lora_rank": "latent attention (MLA)",
    "mamba_d_state": "recurrent (Mamba) layers",
    "ssm_state_size": "recurrent (Mamba) layers",
    "linear_num_key_heads": "linear-attention layers",
    "attention_chunk_size": "chunked attention",
}


class _Current(threading.local):
    """The batch and cache of the forward pass running on this thread: the attention function finds them here, because
    not every architecture passes unknown keyword arguments down to its attention."""

    batch: Batch
    cache: KVCache
    hidden: HiddenStates | None = None


_current = _Current()


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window or -1
    out = _attend(module.layer_idx, q, k, v, scaling, window=window, softcap=softcap or 0.0, sinks=s_aux)
    return out.unsqueeze(0), None


def _attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    *,
    window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the batch at hand over layer `layer` of its cache: query [T, Hq, D], key and value [T, Hkv, D]."""
    batch, cache = _current.batch, _current.cache
    k_cache, v_cache = cache.k[layer], cache.v[layer]
    write_kv(key, value, k_cache, v_cache, batch.slots)
    out = tree_attention(
        query,
        k_cache,
        v_cache,
        batch.page_table,
        batch.context_lens,
        batch.cu_nodes,
        batch.tree_mask,
        max_nodes=batch.max_nodes,
        softmax_scale=scale,
        query_start=batch.query_start,
        causal=batch.causal,
        positions=batch.positions if window > 0 else None,
        softcap=softcap,
        window=window,
        sinks=sinks,
    )
    assert isinstance(out, torch.Tensor)  # no lse was asked for
    return out


class TransformersModel:
    """Runs a `transformers` causal LM on packed batches (see `TargetModel`).

    The model's attention is replaced through `AttentionInterface`; its linear layers are packed for oneDNN where that
    is measured to be faster. The module given is changed in place and belongs to this object from then on. One that
    transformers has split over ranks stays split (`parallel`); then every rank makes the same calls.
    """

    def __init__(self, module: Any, tokenizer: Any = None, name: str = "model", pack: bool = True):
        from transformers import AttentionInterface

        config = module.config.get_text_config()
        for attribute, what in _UNSUPPORTED.items():
            if getattr(config, attribute, None):
                raise NotImplementedError(f"load_model: {name}: expected standard attention in every layer, got {what}")
        AttentionInterface.register(ATTENTION, attention_forward)
        module.set_attn_implementation(ATTENTION)
        module.eval().requires_grad_(False)
        self.module, self.tokenizer, self.name = module, tokenizer, name
        self.dtype, self.device = module.dtype, module.device
        self.vocab_size: int = config.vocab_size
        self.max_context: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.parallel = Parallel.of(module, num_kv_heads, name)
        self.num_kv_heads: int = num_kv_heads if self.parallel is None else self.parallel.num_kv_heads
        pack = pack and self.parallel is None
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.hidden_size: int = config.hidden_size
        self.eos_token_ids = _eos_ids(module, tokenizer)
        self._output = module.get_output_embeddings().weight.detach()  # packing hides it
        self.num_packed = pack_linears(module, self.dtype, self.device) if pack else 0
        self.num_fused = fuse_norms(module, self.dtype, self.device) if pack else 0
        self._body = module.get_decoder()
        self.num_fused_layers = fuse_layers(self._body.layers, _attend) if pack else 0
        self._all_layers = self._body.layers
        self._layer_sets: dict[tuple[int, ...], torch.nn.ModuleList] = {}
        self._keeping: set[int] = set()  # layers that have a hook
        self._slices_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        return KVCache.allocate(
            self.num_layers, num_pages, page_size, self.num_kv_heads, self.head_dim, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        layers: tuple[int, ...] | None = None,
        hidden: HiddenStates | None = None,
        own_columns: bool = False,
    ) -> torch.Tensor:
        """See `TargetModel`. own_columns: of a model split by vocabulary, this rank's columns alone."""
        _current.batch, _current.cache, _current.hidden = batch, cache, hidden
        for layer in hidden.layers if hidden is not None else ():
            self._keep(layer)
        kwargs: dict[str, Any] = {}
        if batch.logit_rows is not None and self._slices_rows:
            kwargs["logits_to_keep"] = batch.logit_rows
        if layers is not None:
            self._body.layers = self._layer_set(layers)
        try:
            logits = self.module(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **kwargs
            ).logits[0]
        finally:
            _current.hidden = None
            if layers is not None:
                self._body.layers = self._all_layers
        if batch.logit_rows is not None and not self._slices_rows:
            logits = logits[batch.logit_rows]
        if self.parallel is not None and self.parallel.vocab_start is not None and not own_columns:
            logits = self.parallel.gather(logits)
        return logits

    def fingerprint(self) -> str:
        """Names this model's weights, cheaply and whatever the dtype: a hash over its vectors and first embeddings."""
        digest = hashlib.sha256(f"{self.num_layers} {self.vocab_size}".encode())
        for parameter in (whole(self.module.get_input_embeddings().weight)[:64], *self.module.parameters()):
            if parameter.dim() == 1 or parameter.shape[0] == 64:
                parameter = whole(parameter)
                digest.update(parameter.detach().bfloat16().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def embedding(self) -> torch.Tensor:
        """Input embedding matrix [V or more, hidden]."""
        return whole(self.module.get_input_embeddings().weight.detach())

    def output_matrix(self) -> torch.Tensor:
        """Output matrix [V or more, hidden]."""
        return whole(self._output)

    def _keep(self, layer: int) -> None:
        """See that forward passes hand the state at `layer` to whoever asks for it."""
        if layer in self._keeping:
            return
        if not 0 <= layer <= self.num_layers:
            raise ValueError(f"HiddenStates: layers: expected 0..{self.num_layers}, got {layer}")
        self._keeping.add(layer)

        def keep(state: torch.Tensor) -> None:
            if _current.hidden is not None and layer in _current.hidden.layers:
                _current.hidden.states[layer] = state[0]

        if layer == self.num_layers:
            self._body.register_forward_hook(lambda module, args, output: keep(output[0]))
        else:
            self._all_layers[layer].register_forward_pre_hook(
                lambda module, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )

    def _layer_set(self, layers: tuple[int, ...]) -> torch.nn.ModuleList:
        """Layers keep their `layer_idx`, hence their place in the cache, in any subset."""
        if layers not in self._layer_sets:
            self._layer_sets[layers] = torch.nn.ModuleList(self._all_layers[i] for i in layers)
        return self._layer_sets[layers]


def _eos_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for source in (getattr(module, "generation_config", None), module.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)
