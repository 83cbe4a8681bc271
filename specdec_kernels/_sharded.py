"""Sampling and exact-match verification on vocabulary shards: every rank of a group holds some columns of a row.

Rank r's columns follow rank r - 1's; shards begin at multiples of 32 ids. What crosses ranks is integers (order keys,
masses of 2^-44, ids) and one float64 score a row, so the result depends on neither the number of shards nor their order
of arrival: an unfiltered row takes four reductions of 48 bytes in all, top-k and top-p 8 KiB of histograms each. Plain
torch on any device; nothing is read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._ops import Flag
from specdec_kernels._sampling_args import Sampling

LARGEST = torch.finfo(torch.float32).max
MASS_SCALE = 2.0**44
LOG2E = 1.44269504088896341
NO_TIE = 2**31 - 1
EMIT, TAIL, TAIL_WORDS = 2, 0x80, 4096
MASK = 0xFFFFFFFF


class Shards:
    """The reductions over a process group (None: this process holds the whole vocabulary)."""

    def __init__(self, group: Any | None):
        self.group = group
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.world: int = dist.get_world_size(group) if group is not None else 1

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op, self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor.clone(), dist.ReduceOp.MAX)

    def smallest(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor.clone(), dist.ReduceOp.MIN)

    def total(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor.clone(), dist.ReduceOp.SUM)

    def before(self, counts: Tensor) -> Tensor:
        """Sum of the earlier ranks' counts."""
        if self.group is None:
            return torch.zeros_like(counts)
        every = [torch.empty_like(counts) for _ in range(self.world)]
        dist.all_gather(every, counts, self.group)
        return torch.stack(every)[: self.rank].sum(0)


def order_key(x: Tensor) -> Tensor:
    """int64 in [0, 2^32) that rises with x; -0 and +0 are one number."""
    bits = torch.where(x == 0, 0.0, x).contiguous().view(torch.int32).long() & MASK
    return torch.where(bits >> 31 == 1, MASK - bits, bits | 1 << 31)


def order_value(key: Tensor) -> Tensor:
    bits = torch.where(key >> 31 == 1, key & 0x7FFFFFFF, MASK - key)
    return torch.where(bits >> 31 == 1, bits - (1 << 32), bits).int().view(torch.float32)


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of float32 numbers, rounded once (up to ties of the float64 sum)."""

    def wide(x: Tensor | float) -> Tensor:
        return x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32, device=a.device).double()

    return (wide(a) * wide(b) + wide(c)).float()


def weights(x: Tensor, peak: Tensor, rate: Tensor) -> Tensor:
    """exp((x - peak) tau), by the operations of exp_scaled in csrc/sampling/law.h. Rows [R, V], scalars [R, 1]."""
    lowest = -125.0 / rate
    d = torch.maximum(x - peak, lowest)
    shifted = fused(d, rate, 12582912.0)
    r = fused(d, rate, 12582912.0 - shifted)
    value = fused(r, 1.32647273e-3, 9.67151299e-3)
    for c in (5.55073358e-2, 2.40222424e-1, 6.93147004e-1, 1.0):
        value = fused(value, r, c)
    return (value.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def philox(c: list[Tensor], k0: Tensor, k1: Tensor) -> list[Tensor]:
    """Philox4x32-10 of int64 tensors that hold 32-bit words."""
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # modulo 2^64: the halves are right
        c = [(product1 >> 32 & MASK) ^ c[1] ^ k0, product1 & MASK, (product0 >> 32 & MASK) ^ c[3] ^ k1, product0 & MASK]
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c


def gumbel(seed: Tensor, position: Tensor, start: int, count: int) -> Tensor:
    """float64 [R, count], noise of the ids from `start` (a multiple of 4) under purpose 2."""
    blocks = torch.arange(start // 4, (start + count + 3) // 4, device=seed.device).expand(len(seed), -1)

    def words(purpose: int) -> Tensor:
        low, high = position & MASK, (position >> 32 & 0xFFFFFF) << 8 | purpose
        counter = [blocks, *((x[:, None] + 0 * blocks) for x in (low, high, 0 * low))]
        out = philox(counter, (seed & MASK)[:, None], (seed >> 32 & MASK)[:, None])
        return torch.stack(out, -1).flatten(1)[:, :count]

    first = words(EMIT)
    cell = torch.where(first < TAIL_WORDS, (words(EMIT | TAIL).double() + 0.5) * 2.0**-32, 0.5)
    return -(-(-(first.double() + cell) * 2.0**-32).log1p()).log()


class Law:
    """The law of rows [R, Vs] (this rank's columns) under the filters; its scalars, [R, 1], are the same everywhere."""

    def __init__(self, x: Tensor, ids: Tensor, sampling: Sampling, shards: Shards):
        self.ids, self.shards = ids, shards
        nan, inf = (x != x).any(1), (x > LARGEST).any(1)
        self.x = x = torch.where(x != x, -torch.inf, x).clamp_max(LARGEST)
        best = (order_key(x) << 31 | (NO_TIE - ids)).max(1).values if x.shape[1] else torch.zeros(len(x)).long()
        key, nan, inf = shards.largest(torch.stack([best, nan.long(), inf.long()], 1)).unbind(1)
        peak = order_value(key >> 31)
        self.is_empty = ~(peak > -torch.inf)[:, None]
        self.argmax = torch.where(self.is_empty[:, 0], 0, NO_TIE - (key & NO_TIE))[:, None]
        self.peak = torch.where(self.is_empty, 0.0, peak[:, None])
        heat, p, least = sampling.temperature[:, None], sampling.top_p, sampling.min_p
        self.is_point = self.is_empty | ~(heat > 1e-5) | (heat > LARGEST)
        fault = ~((heat >= 0) & (heat <= LARGEST))[:, 0]
        for number in (p, least):
            fault |= number != number if number is not None else False
        self.flags = (nan * Flag.NAN_LOGIT | inf * Flag.INF_LOGIT | self.is_empty[:, 0] * Flag.DEAD_ROW).int()
        self.flags |= (fault * Flag.PARAMETER).int()
        self.tau = 1.0 / torch.where(self.is_point, 1.0, heat.clamp_max(1e36))
        self.rate = self.tau * torch.tensor(LOG2E, dtype=torch.float32)
        self.threshold = torch.full_like(self.peak, -torch.inf)
        self.last_tie = torch.full_like(self.argmax, NO_TIE)
        if least is not None:
            self.threshold = torch.where((least > 0)[:, None], self._least_kept(least), self.threshold)
        top_k = sampling.top_k[:, None].long() if sampling.top_k is not None else torch.zeros_like(self.argmax)
        size = shards.total(torch.tensor([x.shape[1]], device=x.device))
        has_k = (top_k > 0) & (top_k < size)
        if sampling.top_k is not None:
            self._select(torch.ones_like(ids).expand(x.shape), top_k, has_k)
        one = (weights(self.x, self.peak, self.rate).double() * MASS_SCALE).round().long()
        w = torch.where(self.kept(), weights(self.x, self.peak, self.rate), 0.0)
        fours = torch.nn.functional.pad(w, (0, -w.shape[1] % 4)).view(len(x), -1, 2, 2).sum(-1).sum(-1)
        mass = torch.where(has_k, torch.where(self.kept(), one, 0).sum(1, keepdim=True),
                           (fours.double() * MASS_SCALE).round().long().sum(1, keepdim=True))  # fmt: skip
        self.mass = shards.total(mass)
        if p is not None:
            share = p[:, None].double() * self.mass.double()
            self._select(one, share.ceil().clamp_min(1).long(), p[:, None] < 1.0)
        self.log_mass = torch.where(self.mass > 0, (self.mass.double() / MASS_SCALE).log(), 0.0)

    def kept(self) -> Tensor:
        tie = (self.x == self.threshold) & (self.ids <= self.last_tie)
        return ((self.x > self.threshold) | tie) & (self.x > -torch.inf)

    def _least_kept(self, least: Tensor) -> Tensor:
        """The smallest logit that min-p keeps, by bisection over the order keys."""
        distance = torch.where(least >= 1.0, 0.0, least.double().log().float())[:, None]
        low, high = order_key(torch.full_like(self.peak, -LARGEST)), order_key(self.peak)
        for _ in range(32):
            middle = low + (high - low) // 2
            inside = (order_value(middle) - self.peak) * self.tau >= distance
            low, high = torch.where(inside, low, torch.minimum(middle + 1, high)), torch.where(inside, middle, high)
        return order_value(low)

    def _select(self, one: Tensor, wanted: Tensor, active: Tensor) -> None:
        """Keeps the shortest prefix of the total order whose weight reaches `wanted`; `one`: every id's weight.

        Four rounds of 256 bins over the order keys, from their high bits down."""
        kept, key = self.kept(), order_key(self.x)
        weight = torch.where(kept, one, 0)
        wanted = torch.minimum(wanted, self.shards.total(weight.sum(1, keepdim=True)))
        prefix, above = torch.zeros_like(wanted), torch.zeros_like(wanted)
        at = above
        for shift in (24, 16, 8, 0):
            here = torch.where(key >> shift + 8 == prefix, weight, 0)
            bins = torch.zeros(len(key), 256, dtype=torch.int64, device=key.device)
            bins = self.shards.total(bins.scatter_add_(1, 255 - (key >> shift & 255), here))
            sums = above + bins.cumsum(1)
            bin = (sums < wanted).sum(1, keepdim=True).clamp_max(255)
            at = bins.gather(1, bin)
            above = sums.gather(1, bin) - at
            prefix = prefix << 8 | 255 - bin
        value = order_value(prefix)
        tie = kept & (self.x == value)
        each = self.shards.largest(torch.where(tie, one, 0).amax(1, keepdim=True)).clamp_min(1)
        ties = at // each
        needed = torch.minimum((wanted - above + each - 1) // each, ties)
        place = self.shards.before(tie.sum(1, keepdim=True)) + tie.cumsum(1)
        last = self.shards.largest(torch.where(tie & (place == needed), self.ids, -1).amax(1, keepdim=True))
        last = torch.where(needed < ties, last, torch.where(value > self.threshold, NO_TIE, self.last_tie))
        self.last_tie = torch.where(active, last, self.last_tie)
        self.threshold = torch.where(active, value, self.threshold)
        if hasattr(self, "mass"):
            self.mass = torch.where(active, above + needed * each, self.mass)

    def draw(self, seed: Tensor, position: Tensor) -> Tensor:
        """[R] ids: argmax of log weight + Gumbel noise, ties to the lowest."""
        noise = gumbel(seed, position, int(self.ids[0]) if len(self.ids) else 0, self.x.shape[1])
        score = torch.where(self.kept(), ((self.x - self.peak) * self.tau).double() + noise, -torch.inf)
        best = self.shards.largest(score.amax(1, keepdim=True))
        found = torch.where((score == best) & (score > -torch.inf), self.ids, NO_TIE).amin(1, keepdim=True)
        found = self.shards.smallest(found)
        return torch.where(self.is_point | (found == NO_TIE), self.argmax, found)[:, 0]

    def log_prob(self, token: Tensor) -> Tensor:
        """float32 [R], log p of one id a row at its law (not at the point that a greedy row is)."""
        mine = self.ids == token[:, None]
        x = self.shards.largest(torch.where(mine, self.x, -torch.inf).amax(1, keepdim=True))
        kept = (x > self.threshold) | ((x == self.threshold) & (token[:, None] <= self.last_tie))
        value = ((x - self.peak) * self.tau).double() - self.log_mass
        value = torch.where(kept, value, -torch.inf)
        return torch.where(self.is_empty, 0.0, value).float()[:, 0]


def draw_rows(
    op: str,
    logits: Tensor,
    sampling: Sampling,
    vocab_start: int,
    group: Any | None,
    return_logprobs: str | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(token_ids int32 [R], flags int32 [R], logprobs) of the rows of as many requests."""
    _ops.expect(op, "vocab_start", vocab_start % 32 == 0, "a multiple of 32", vocab_start)
    seed, position = sampling.seed, sampling.position
    assert seed is not None
    assert position is not None
    shards = Shards(group)
    ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    law = Law(logits.float(), ids, sampling, shards)
    token = law.draw(seed, position)
    columns = []
    if return_logprobs is not None:
        plain = Law(logits.float(), ids, Sampling(torch.ones_like(sampling.temperature)), shards).log_prob(token)
        columns = [plain] if return_logprobs in ("raw", "both") else []
        if return_logprobs in ("processed", "both"):
            columns += [torch.where(law.is_point[:, 0], plain, law.log_prob(token))]
    return token.int(), law.flags, torch.stack(columns, 1).squeeze(1) if columns else None


def matched_tree(token_ids: Tensor, drawn: Tensor, is_dead: Tensor, vocab: Tensor, tree: Any) -> tuple[Tensor, Tensor]:
    """(logits [N, max_nodes + 1], draft ids int32 [N]) of a small vocabulary in which `verify` by its greedy rule
    accepts the children that equal the token drawn at their parent: id i + 1 is node i, id 0 is no child's.

    A later twin has its first twin's id, an id that does not exist one behind the vocabulary."""
    nodes, columns = len(token_ids), tree.max_nodes + 1
    n = torch.arange(nodes, device=drawn.device)
    begin = tree.cu_nodes.long()[torch.searchsorted(tree.cu_nodes[1:].contiguous(), n.int(), right=True).clamp_max(
        len(tree.cu_nodes) - 2)]  # fmt: skip
    parent = torch.where(tree.parents >= 0, begin + tree.parents, nodes).clamp(0, nodes)  # nodes: of a root
    same = (parent[:, None] == parent) & (token_ids[:, None] == token_ids)
    own = same.int().argmax(1) - begin + 1
    exists = (token_ids >= 0) & (token_ids < vocab)
    draft_ids = torch.where(token_ids == -1, -1, torch.where(exists, own, columns + 1))
    wanted = torch.cat([drawn, drawn.new_full((1,), -1)])[parent]
    child = torch.where(exists & (token_ids == wanted), n, nodes)
    first = torch.full((nodes + 1,), nodes, device=n.device).scatter_reduce_(0, parent, child, "amin")[:nodes]
    column = torch.where(first < nodes, first - begin + 1, 0).clamp(0, columns - 1)
    logits = torch.zeros(nodes, columns, device=n.device).scatter_(1, column[:, None], 1.0)
    return torch.where(is_dead[:, None], -torch.inf, logits), draft_ids.int()
