"""Any `transformers` causal LM through our attention: packed ragged rows and trees give the same logits as its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from specdec_kernels.engine import Draft, Engine, EngineConfig, Request, TransformersModel
from specdec_kernels.engine.equality import compare_greedy
from specdec_kernels.engine.linear import PackedLinear, SharedLinear, can_pack, pack_linears
from specdec_kernels.engine.pack import Chunk, pack_step

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=97, hidden_size=128, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=256, eos_token_id=96,
)  # fmt: skip
CAPPED = {"sliding_window": 6, "attn_logit_softcapping": 4.0}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2 (biases)": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3 (query norms)": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral (window)": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 6}),
    "gemma2 (softcap, window)": ("Gemma2Config", "Gemma2ForCausalLM", CAPPED),
    "phi3 (stacked projections)": ("Phi3Config", "Phi3ForCausalLM", {"pad_token_id": 0}),
    "mixtral (experts)": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe (experts, query norms)": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    "qwen2-moe (shared and own experts)": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", MOE),
    "gpt-neox (parallel)": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"hidden_size": 256, "num_key_value_heads": 4}),
}  # fmt: skip


def build(name: str) -> nn.Module:
    config_name, model_name, extra = MODELS[name]
    config = getattr(transformers, config_name)(**{**SMALL, **extra})
    torch.manual_seed(0)
    module = getattr(transformers, model_name)(config).eval()
    for parameter in module.parameters():  # the default initialisation gives nearly flat logits
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    return module


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_packed_rows_and_trees_equal_the_models_own_forward(name: str, packed: bool, monkeypatch):
    """packed: with the linear layers, norms and (Llama, Qwen2) whole layers replaced, whether that pays here or not."""
    if packed and not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("torch's oneDNN path does not serve float32 here")
    monkeypatch.setattr("specdec_kernels.engine.linear._WORTH", float("inf") if packed else 0.0)
    module = build(name)
    own = copy.deepcopy(module)
    own.set_attn_implementation("eager")
    model = TransformersModel(module)
    assert model.num_fused_layers == (3 if packed and name in ("llama", "qwen2 (biases)") else 0)
    engine = Engine(model, "none", EngineConfig(page_size=4, num_pages=64))
    rng = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 96, (n,), generator=rng).tolist() for n in (19, 3, 11)]
    states = [state for text in texts for state in engine._prepare(Request(text))]
    for state in states:
        engine.arena.grow(state.pages, 64)

    def full(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return own(torch.tensor([tokens]), use_cache=False).logits[0]

    # Prefill all but the roots, in two uneven chunks, then one step with a tree, a chain and a finishing prefill.
    for part in (lambda n: n // 2, lambda n: n - 1 - n // 2):
        chunks = [Chunk(s, part(len(s.tokens)), False) for s in states if part(len(s.tokens)) > 0]
        model.forward(pack_step([], chunks, 4, model.device, model.vocab_size).batch, engine.cache)
        for chunk in chunks:
            chunk.state.context_len += chunk.num_tokens
    tree = Draft((5, 7, 11, 13, 17), (0, 0, 1, 2, 3))
    packed = pack_step(
        [(states[0], tree), (states[1], Draft.chain([3, 4]))],
        [Chunk(states[2], 1, True)],
        4,
        model.device,
        model.vocab_size,
    )
    logits = model.forward(packed.batch, engine.cache)
    rows = []
    paths = [[], [5], [7], [5, 11], [7, 13], [5, 11, 17]]
    rows += [full(texts[0] + path)[-1] for path in paths]
    rows += [full(texts[1] + path)[-1] for path in ([], [3], [3, 4])]
    rows += [full(texts[2])[-1]]
    wanted = torch.stack(rows)
    scale = wanted.std()
    assert torch.allclose(logits, wanted, atol=float(2e-5 * scale), rtol=1e-4), (logits - wanted).abs().max() / scale
    assert not torch.allclose(logits[1:], wanted[:-1], atol=float(0.1 * scale))  # rows are told apart


@pytest.mark.parametrize("name", ["llama", "gemma2 (softcap, window)"])
@pytest.mark.parametrize("drafter", ["ngram", "self"])
def test_greedy_text_is_the_same_with_drafts(name: str, drafter: str, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = TransformersModel(build(name))
    rng = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (n,), generator=rng).tolist() * 3 for n in (4, 9, 2, 7)]
    plain = Engine(model, "none").generate(prompts, max_tokens=40)
    engine = Engine(model, drafter, EngineConfig(page_size=4, num_pages=128, check=True))
    for prompt, a, b in zip(prompts, plain, engine.generate(prompts, max_tokens=40)):
        difference = compare_greedy(model, prompt, a.token_ids, b.token_ids)
        assert difference is None or difference.excused, difference
    assert engine.metrics.drafted > 0
    assert engine.metrics.drafter_failures == 0


def test_a_layer_subset_really_skips_layers():
    model = TransformersModel(build("llama"))
    engine = Engine(model, "none", EngineConfig(page_size=4, num_pages=64))
    (state,) = engine._prepare(Request([1, 2, 3, 4, 5]))
    engine.arena.grow(state.pages, 8)
    batch = pack_step([], [Chunk(state, 5, True)], 4, model.device, model.vocab_size).batch
    whole = model.forward(batch, engine.cache).clone()
    assert not torch.allclose(whole, model.forward(batch, engine.cache, (0, 2)))
    assert torch.equal(whole, model.forward(batch, engine.cache, (0, 1, 2)))
    assert torch.equal(whole, model.forward(batch, engine.cache))


def test_unsupported_models_are_refused_by_name():
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, vocab_size=50,
    )  # fmt: skip
    module = transformers.DeepseekV3ForCausalLM(config)
    with pytest.raises(NotImplementedError, match=r"load_model: .*latent attention"):
        TransformersModel(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linears_compute_the_same(dtype: torch.dtype, monkeypatch):
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip(f"torch's oneDNN path does not serve {dtype} here")
    monkeypatch.setattr("specdec_kernels.engine.linear._WORTH", float("inf"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 96), nn.Linear(64, 32), nn.Linear(64, 32)
            self.gate_proj, self.up_proj = nn.Linear(64, 80, bias=False), nn.Linear(64, 80, bias=False)
            self.down_proj = nn.Linear(80, 64)

        def forward(self, x):
            mixed = self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), mixed], -1)

    block = Block().to(dtype)
    inputs = [torch.randn(n, 64, dtype=dtype) for n in (1, 3, 1, 17)]
    with torch.inference_mode():
        before = [block(x) for x in inputs]
        other = inputs[0] + 1
        other_key = block.k_proj(other)
        assert pack_linears(block, dtype, torch.device("cpu")) == 6
        assert isinstance(block.down_proj, PackedLinear)
        assert isinstance(block.q_proj, SharedLinear)
        for x, wanted in zip(inputs, before):
            assert torch.allclose(block(x), wanted, atol=1e-5 if dtype == torch.float32 else 0.06)
        assert block.q_proj.state.x is None  # no input is kept alive between steps
        block.q_proj(inputs[0])  # its siblings' parts are never fetched ...
        assert torch.allclose(block.k_proj(other), other_key, atol=1e-5 if dtype == torch.float32 else 0.06)  # ... late


def test_chunked_attention_is_refused_by_name():
    """Llama 4's layers but every fourth see their own chunk alone."""
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_local_experts=2, num_experts_per_tok=1, vocab_size=50,
        attention_chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"load_model: .*chunked attention"):
        TransformersModel(transformers.Llama4ForCausalLM(config))
