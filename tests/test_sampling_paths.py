"""A row's law is the same bits whichever way it is found: value table, lists, bins, edited or plain, any dtype."""

from __future__ import annotations

import itertools

import pytest
import torch

import specdec_kernels as sk
from tests.conftest import Backend

ROWS = {
    "spread": lambda V: torch.randn(6, V) * 3,
    "ties": lambda V: (torch.randn(6, V) * 2).round(),
    "all equal": lambda V: torch.full((6, V), 1.25),
    "near zero": lambda V: (torch.randn(6, V) * 2).round() * torch.tensor([1.0, -1.0]).repeat(V)[:V] * 1e-3,
    "peaked": lambda V: torch.cat([torch.full((6, 1), 30.0), torch.randn(6, V - 1)], 1),
    "masked": lambda V: torch.where(torch.rand(6, V) < 0.9, -torch.inf, torch.randn(6, V)),
}
FILTERS = [
    dict(top_k=k, top_p=p, min_p=m, temperature=t)
    for k, p, m, t in itertools.product((0, 3, 700, 5000), (1.0, 0.9, 0.3), (0.0, 0.05), (0.7, 3.0))
]


def full_mask(rows: int, V: int) -> torch.Tensor:
    return torch.full((rows, (V + 31) // 32), -1, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("V", [37, 10_007])
def test_every_path_gives_the_same_bits(V: int, kind: str, dtype: torch.dtype, backend: Backend):
    backend.require("filter_rows")
    logits = ROWS[kind](V).to(dtype).to(backend.device)
    wide = logits.float()
    mask = full_mask(6, V).to(backend.device)
    for filters in FILTERS:
        sampling = sk.Sampling.of(6, seed=list(range(6)), device=backend.device, **filters)
        plain = sk.filter_rows(logits, sampling, **backend.kwargs)
        for other in (
            sk.filter_rows(wide, sampling, **backend.kwargs),
            sk.filter_rows(logits, sampling, allowed=mask, **backend.kwargs),
        ):
            for name, a, b in zip(plain._fields, plain, other, strict=True):
                assert torch.equal(a, b), (name, filters, a, b)
        tokens = sk.sample(logits, sampling, **backend.kwargs).token_ids
        assert torch.equal(tokens, sk.sample(wide, sampling, **backend.kwargs).token_ids), filters


def kept_by_sorting(row: torch.Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> set[int]:
    values, order = row.double().sort(descending=True, stable=True)
    live = values > -torch.inf
    values, order = values[live], order[live]
    scaled = (values - values[0]) / temperature
    if min_p > 0:
        order, scaled = order[scaled.exp() >= min_p], scaled[scaled.exp() >= min_p]
    if top_k:
        order, scaled = order[:top_k], scaled[:top_k]
    mass = scaled.softmax(0)
    before = mass.cumsum(0) - mass
    return set(order[before < top_p].tolist()) if top_p < 1 else set(order.tolist())


@pytest.mark.parametrize("kind", ROWS)
def test_kept_sets_against_sorting(kind: str, backend: Backend):
    """The three scalars describe the sorted prefix; sets may differ by ids at a top-p edge closer than 1e-6."""
    backend.require("filter_rows")
    V = 3001
    logits = ROWS[kind](V).to(torch.bfloat16).to(backend.device)
    for filters in FILTERS:
        found = sk.filter_rows(logits, sk.Sampling.of(6, device=backend.device, **filters), **backend.kwargs)
        for r in range(6):
            row = logits[r].float().cpu()
            above = (row > found.threshold[r].item()).nonzero()[:, 0].tolist()
            ties = (row == found.threshold[r].item()).nonzero()[:, 0].tolist()[: int(found.tie_budget[r])]
            mine = {i for i in above + ties if row[i] > -torch.inf}
            right = kept_by_sorting(row, **filters)
            edge = sum(float(row[i].double().exp()) for i in mine ^ right) / float(row.double().exp().sum())
            assert mine == right or (edge < 1e-3 and filters["top_p"] < 1 and len(mine ^ right) <= 2), (filters, r)
