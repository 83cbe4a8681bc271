"""Random draft heads for the toy target, and the drafters made of them."""

from __future__ import annotations

import torch

from python_ref.decoder import ToyTarget
from specdec_kernels.engine.drafters.draft_model_tree import DraftModelTreeDrafter
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.heads import DraftHead, HeadConfig, make_head
from tests.toy_model import ToyModel

KINDS = ("eagle", "eagle3", "mtp", "medusa", "draft_model")
SHAPES = ("chain", "tree")
MEDUSA_TREE = [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0)]


def random_head(kind: str, model: ToyModel, *, draft_vocab: int | None = None, seed: int = 3) -> DraftHead:
    """A head with lively laws; EAGLE-3's knows all but the target's second token unless told otherwise."""
    vocab = model.vocab_size
    if draft_vocab is None:
        draft_vocab = vocab - 1 if kind == "eagle3" else vocab
    d2t = None
    if draft_vocab < vocab:
        d2t = torch.tensor([i for i in range(vocab) if i != 1][:draft_vocab]) - torch.arange(draft_vocab)
    layers = (0, 1, 2) if kind == "eagle3" else (model.num_layers,)
    config = HeadConfig(
        kind=kind, hidden_size=model.hidden_size, vocab_size=vocab, draft_vocab_size=draft_vocab, feature_layers=layers,
        num_q_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=96, num_medusa=3 if kind == "medusa" else 0,
    )  # fmt: skip
    torch.manual_seed(seed)
    head = make_head(config, d2t)
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.2 * parameter.shape[1] ** -0.5)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    head.bind(model.embedding(), model.output_matrix() * 0.25)
    return head


def make_drafter(kind: str, shape: str, model: ToyModel, *, sampled: bool = True, seed: int = 3):
    """A drafter of `kind` on a random head; "chain" or "tree"."""
    if kind == "medusa":
        paths = [(0,), (0, 0), (0, 0, 0)] if shape == "chain" else MEDUSA_TREE
        return MedusaDrafter(random_head(kind, model, seed=seed), paths=paths, sampled=sampled)
    options = {"top_k": 1, "depth": 3, "num_nodes": 3} if shape == "chain" else {"top_k": 3, "depth": 3, "num_nodes": 8}
    if kind == "draft_model":
        other = ToyModel(ToyTarget(vocab=model.vocab_size, surprise=2))
        return DraftModelTreeDrafter(other, sampled=sampled, **options)
    return EagleDrafter(random_head(kind, model, seed=seed), sampled=sampled, **options)
