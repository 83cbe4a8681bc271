"""Trees of a head grow only where it can matter what they find."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specdec_kernels.engine import Request
from specdec_kernels.engine.drafters import Limit, grow
from specdec_kernels.engine.drafters.grow import Shape, grow_trees


def test_the_device_is_waited_for_once_a_level_and_once_a_kind(monkeypatch):
    """Not once a request: a batch of twelve, half of it drawn, reads as often as a pair does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        scalars = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.scalars += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    law = torch.arange(32.0, 0.0, -1.0)
    lists = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append(1) or tolist(self))

    def reads(batch: int) -> int:
        levels = []

        def forward(level):
            levels.append(level.depth)
            return law.expand(level.token_ids.numel(), 32)

        states = [
            SimpleNamespace(request=Request([1], temperature=i % 2), seed=i, num_output=0, num_steps=0)
            for i in range(batch)
        ]
        lists.clear()
        with Counting() as mode:
            drafts = grow_trees(law.expand(batch, 32), forward, states, [Limit(8, 4)] * batch, Shape(3, 4, 8),
                                sampled=True, vocab_size=32)  # fmt: skip
        assert all(len(draft) == 8 for draft in drafts)
        assert max(levels) > 1
        assert mode.scalars <= max(levels) + 1
        assert len(lists) == 2
        return mode.scalars + len(lists)

    assert reads(12) == reads(2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("by_rank", [None, (0.6, 0.2, 0.1)])
def test_growing_where_it_pays_gives_the_whole_growths_tree(temperature: float, by_rank, monkeypatch):
    """The same drafts as growing all levels to their full width, with fewer rows; alone as in a batch."""
    mixing = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    rows = []

    def grown(states, sharpness):
        laws = {}  # of every node: its parent's, turned by its token; some requests are surer than others

        def forward(level):
            count, width = level.token_ids.shape
            before = laws["last"].view(count, -1, 32)
            parents = before.gather(1, level.parents[:, :, None].expand(-1, -1, 32))
            turned = (parents.roll(1, -1) + mixing[level.token_ids]) / 2**0.5
            rows.append(count * width)
            laws["last"] = turned * 1.0
            return (turned * sharpness[:, None, None]).flatten(0, 1)

        roots = torch.stack([mixing[s.seed] for s in states])
        laws["last"] = roots[:, None]
        limits = [Limit(3 + 2 * (s.seed % 5), 1 + s.seed % 6) for s in states]
        return grow_trees(roots * sharpness[:, None], forward, states, limits, Shape(3, 6, 10), sampled=True,
                          vocab_size=32, by_rank=by_rank)  # fmt: skip

    request = Request([1], temperature=temperature)
    states = [SimpleNamespace(request=request, seed=s, num_output=0, num_steps=0) for s in range(12)]
    sharpness = torch.linspace(0.5, 6.0, 12)
    together = grown(states, sharpness)
    fewer, rows = [sum(rows)], []
    alone = [grown([s], sharpness[i : i + 1])[0] for i, s in enumerate(states)]
    fewer.append(sum(rows))
    monkeypatch.setattr(grow, "_best", lambda best, scores, *_: torch.full((len(scores), 1), -torch.inf))
    rows = []
    whole = grown(states, sharpness)
    for one, other in [*zip(whole, together), *zip(whole, alone)]:
        assert one.token_ids == other.token_ids
        assert one.parents == other.parents
        assert one.logits is None or torch.equal(one.logits[one.rows], other.logits[other.rows])
    assert fewer[0] < sum(rows)
    assert fewer[1] < 0.75 * sum(rows)
    assert max(draft.depth for draft in whole) >= 4
