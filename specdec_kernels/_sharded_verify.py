"""`sample` and `verify` on vocabulary shards; what crosses ranks: _sharded.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._ops import Flag
from specdec_kernels._sampling_args import LOGPROBS, Sampling, index_arg, logits_arg
from specdec_kernels._sharded import ACCEPT, BLOCK, MASK, MASS_SCALE, Shards, draw, order_key, order_value, weights
from specdec_kernels._sharded_draw import Leftover, coins, draw_last
from specdec_kernels._sharded_law import Law, reported
from specdec_kernels._sharded_trees import ROOM, Ending, Scores, Trees, walk_block, walk_tree, walk_typical
from specdec_kernels.sampling import METHODS, Sampled, Verified
from specdec_kernels.tree import DraftTree

RESIDUAL_SCALE = 2.0**50


def _rows_of(sampling: Sampling, requests: Tensor) -> Sampling:
    """The parameters of every row, by its request."""
    columns = vars(sampling).items()
    return Sampling(**{name: None if column is None else column[requests] for name, column in columns})


def _check(op: str, return_logprobs: str | None, vocab_start: int) -> None:
    _ops.expect(op, "return_logprobs", return_logprobs in LOGPROBS, f"one of {LOGPROBS}", repr(return_logprobs))
    _ops.expect(op, "vocab_start", vocab_start % 32 == 0, "a multiple of 32", vocab_start)


def sample_sharded(
    logits: Tensor,
    sampling: Sampling,
    *,
    vocab_start: int,
    group: Any | None,
    return_logprobs: str | None = None,
) -> Sampled:
    """`sample` where every rank of `group` holds columns [vocab_start, vocab_start + Vs) of logits [B, Vs].

    Ranks follow one another in the vocabulary and begin at multiples of 32; every rank gets the tokens, flags and
    log-probabilities that one process gets from the whole rows, whatever the number of ranks. An unfiltered row costs
    40 bytes of reductions (torch.distributed), top-k and top-p 8 KiB each.
    """
    op = "sample_sharded"
    rows = logits_arg(op, "logits", logits).shape[0]
    _check(op, return_logprobs, vocab_start)
    _ops.expect(op, "sampling", len(sampling.temperature) == rows, f"{rows} requests", len(sampling.temperature))
    seed, position = sampling.seed, sampling.position
    assert seed is not None
    assert position is not None
    law = Law(logits.float(), vocab_start, sampling, Shards(group))
    token = law.draw(seed, position)
    logprobs = None
    if return_logprobs is not None:
        logprobs = reported(law, law.plain(), law.logit_of(token), token, return_logprobs)
    return Sampled(token.int(), law.flags, logprobs)


def verify_sharded(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    tree: DraftTree,
    sampling: Sampling,
    *,
    method: str,
    vocab_start: int,
    group: Any | None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    uniforms: Tensor | None = None,
    return_logprobs: str | None = None,
    epsilon: float = 0.3,
    delta: float = 0.09,
    max_siblings: int | None = None,
) -> Verified:
    """`verify` on vocabulary shards, as in `sample_sharded`: target_logits [N, Vs] and draft_logits [Rd, Vs] are this
    rank's columns of both; everything else is the same on every rank.

    Every rank gets what `verify` gives one process. Rows of target and draft logits cost 24 bytes of reductions each,
    a draft 8 (16 if it has siblings before it), the last token of a request 24 and, by a race, the 32 bounds of a cut
    block for every boundary; log-probabilities 8 a row; filters as in `sample_sharded`. max_siblings: no node has more
    children (default: max_nodes - 1; 1 for chains spares the rounds that siblings need; a node that has more sets
    Flag.TREE). A draft row belongs to one request (else Flag.INDEX). Other arguments as in `verify`.
    """
    op = "verify_sharded"
    _ops.expect(op, "method", method in METHODS, f"one of {METHODS}", repr(method))
    nodes, columns = logits_arg(op, "target_logits", target_logits).shape
    _check(op, return_logprobs, vocab_start)
    index_arg(op, "draft_token_ids", draft_token_ids, nodes)
    drawn = method in ("rejection", "block") and draft_logits is not None
    if draft_logits is not None:
        wide = logits_arg(op, "draft_logits", draft_logits).shape[1]
        _ops.expect(op, "draft_logits", wide == columns, f"{columns} columns as target_logits", wide)
    elif draft_rows is not None and method in ("rejection", "block"):
        _ops.expect(op, "draft_logits", False, "the rows that draft_rows points into", None)
    index_arg(op, "draft_rows", draft_rows, nodes)
    if uniforms is not None:
        _ops.expect_tensor(op, "uniforms", uniforms, (torch.float32, torch.float64), 1)
        _ops.expect(op, "uniforms", len(uniforms) == nodes, f"{nodes} entries", len(uniforms))
    siblings = max(tree.max_nodes - 1, 0) if max_siblings is None else max_siblings
    _ops.expect(op, "max_siblings", siblings >= 0, "at least 0", siblings)
    requests, width = len(sampling.temperature), tree.max_depth + 1
    if not nodes or not requests:
        filler = target_logits.new_full((requests, width), -1, dtype=torch.int32)
        two = (2,) if return_logprobs == "both" else ()
        logprobs = None if return_logprobs is None else target_logits.new_zeros((requests, width, *two)).float()
        return Verified(filler, filler[:, 0] + 1, filler.clone(), filler[:, 0] + 1, logprobs)
    return _Verification(
        target_logits, draft_token_ids, tree, sampling, method, Shards(group), vocab_start,
        draft_logits if drawn else None, draft_rows, draft_sampling or sampling, uniforms, siblings,
    ).run(return_logprobs, epsilon, delta)  # fmt: skip


class _Verification:
    def __init__(
        self,
        target_logits: Tensor,
        token_ids: Tensor,
        tree: DraftTree,
        sampling: Sampling,
        method: str,
        shards: Shards,
        start: int,
        draft_logits: Tensor | None,
        draft_rows: Tensor | None,
        draft_sampling: Sampling,
        uniforms: Tensor | None,
        siblings: int,
    ):
        self.method, self.shards, self.dtype = method, shards, target_logits.dtype
        self.uniforms, self.start, self.nodes = uniforms, start, len(token_ids)
        rows = None
        if draft_logits is not None:
            rows = self._draft_rows(tree, draft_rows, len(draft_logits))
        vocab = shards.total(torch.tensor([target_logits.shape[1]], device=target_logits.device))
        self.trees = t = Trees(tree, token_ids, vocab, rows, siblings)
        self.rounds = min(max(tree.max_nodes - 1, 0), tree.max_depth * siblings)
        self.row = _rows_of(sampling, t.owner)
        shape = self.row
        if method == "greedy":
            shape = Sampling(torch.zeros_like(self.row.temperature))
        self.p = Law(target_logits.float(), start, shape, shards)
        if method == "greedy":
            heat = self.row.temperature
            self.p.flags = self.p.flags | torch.where((heat >= 0) & (heat < torch.inf), 0, Flag.PARAMETER).int()
        self.q = None
        if draft_logits is not None and rows is not None:
            place = torch.where(rows >= 0, rows, len(draft_logits))
            spare = torch.full((len(draft_logits) + 1,), len(sampling.temperature), device=rows.device)
            owner = spare.scatter_reduce(0, place, t.owner, "amin").clamp_max(len(sampling.temperature) - 1)
            self.q = Law(draft_logits.float(), start, _rows_of(draft_sampling, owner[:-1]), shards)
            shared = (rows >= 0) & (owner[place] != t.owner)
            t.flags |= torch.zeros_like(t.flags).scatter_reduce_(0, t.owner, shared * Flag.INDEX, "amax")

    @staticmethod
    def _draft_rows(tree: DraftTree, draft_rows: Tensor | None, count: int) -> Tensor:
        """int64 [N]: -1 deterministic, -2 out of range."""
        n = torch.arange(len(tree.parents), device=tree.parents.device)
        owner = torch.searchsorted(tree.cu_nodes[1:].long().contiguous(), n, right=True)
        row = n - owner - 1 if draft_rows is None else draft_rows.long()
        return torch.where((row >= -1) & (row < count), row, -2)

    def _kids(self) -> tuple[Tensor, Tensor]:
        """Logits of every node's token in its parent's row and in its draft row, float32 [N + 1, 1]; one reduction."""
        t, last = self.trees, self.nodes - 1
        column = t.token - self.start
        mine = t.exists & (column >= 0) & (column < self.p.x.shape[1])
        at = column.clamp(0, self.p.x.shape[1] - 1)
        both = order_key(self.p.x[t.parent.clamp_max(last), at]) << 32
        if self.q is not None:
            both = both | order_key(self.q.x[t.kind[t.parent].clamp(0, len(self.q.x) - 1), at])
        both = self.shards.total(torch.where(mine, both, 0))  # one rank's number: the sum may wrap
        return order_value(both >> 32 & MASK)[:, None], order_value(both & MASK)[:, None]

    def _scores(self) -> Scores:
        t, p, q, row = self.trees, self.p, self.q, self.row
        last = self.nodes - 1
        up, ids = t.parent.clamp_max(last), t.token[:, None]
        own = torch.arange(self.nodes + 1, device=ids.device).clamp_max(last)
        real = own.new_ones(self.nodes + 1, dtype=torch.bool)
        real[-1] = False
        assert row.seed is not None
        assert row.position is not None
        wanted = torch.where(p.is_point[:, 0], p.argmax[:, 0], -1)
        if self.method == "coupled":
            wanted = p.draw(row.seed, row.position + t.depth[:-1])
        self.x, y = self._kids()
        above = p.scalars(up)
        log_p = torch.where(t.exists, above.log_prob(self.x, ids)[:, 0], -torch.inf)
        held = (self.x > above.threshold) | ((self.x == above.threshold) & (ids <= above.last_tie))
        mass = (weights(self.x, above.peak, above.rate).double() * MASS_SCALE).round().long()[:, 0]
        one_hot, log_q, draft_flags = t.kind < 0, torch.zeros_like(log_p), torch.zeros_like(t.token)
        if q is not None:
            drawn = q.scalars(t.kind[t.parent].clamp_min(0))
            log_q = torch.where(t.exists & ~drawn.is_empty[:, 0], drawn.log_prob(y, ids)[:, 0], -torch.inf)
            seen = q.flags[t.kind.clamp_min(0)].long() & (Flag.NAN_LOGIT | Flag.INF_LOGIT | Flag.PARAMETER)
            draft_flags = torch.where(one_hot, 0, seen)
        seed, position, owner = row.seed[own], row.position[own], own
        u, log_u = coins(draw(seed, position + t.depth[t.parent], ACCEPT, t.trial))
        step = torch.zeros_like(seed) if row.step is None else row.step[own]
        block_u = coins(draw(seed, position + t.depth - 1, BLOCK, torch.zeros_like(owner), step))[0]
        if self.uniforms is not None:
            u = block_u = self.uniforms.double()[own]
            log_u = torch.where(u > 0, u.log(), -torch.inf)
        return Scores(
            flags=torch.where(real, p.flags[own].long(), 0), draft_flags=draft_flags,
            dead=torch.where(real, p.is_empty[own, 0], True), wanted=torch.where(real, wanted[own], -1),
            one_hot=one_hot, mass=p.mass[own, 0], kid_mass=mass, counts=t.exists & held[:, 0], log_p=log_p,
            log_q=log_q, u=u, log_u=log_u, block_u=block_u, room=ROOM if self.uniforms is not None else 1.0,
        )  # fmt: skip

    def _residual(self, node: Tensor, c: Tensor) -> Tensor:
        """sum max(p - c q, 0) of the rows of some nodes, float64 (csrc/sampling/draft_row_cpu.h)."""
        assert self.q is not None
        p, q = self.p.rows(node.clamp_max(self.nodes - 1)), self.q.rows(self.trees.kind[node].clamp_min(0))
        a = (MASS_SCALE / p.mass.double()).float()
        b = (c[:, None] * (MASS_SCALE / q.mass.double())).float()
        w = torch.where(p.kept(), weights(p.x, p.peak, p.rate), 0.0) * a
        w = w - torch.where(q.kept(), weights(q.x, q.peak, q.rate), 0.0) * b
        sum = (w.clamp_min(0.0).double() * RESIDUAL_SCALE).round().long().sum(1, keepdim=True)
        # a one-hot draft law leaves 1 - min(c, p): the rank that has its token says p
        column = (q.argmax - self.start).clamp(0, p.x.shape[1] - 1)
        mine = q.ids[column] == q.argmax
        single = torch.where(mine, p.log_prob(p.x.gather(1, column), q.argmax).exp(), 0.0)
        sum = self.shards.total(torch.where(q.is_point, single.view(torch.int64), sum))
        left = torch.where(q.is_point, 1.0 - torch.minimum(c[:, None], sum.view(torch.float64)), sum / RESIDUAL_SCALE)
        return torch.where(q.is_empty, 1.0, left)[:, 0]

    def _walk(self, s: Scores, epsilon: float, delta: float) -> Ending:
        t = self.trees

        def residual(node: Tensor, c: Tensor) -> Tensor:
            return torch.ones_like(c) if self.q is None else self._residual(node, c)

        if self.method == "typical":
            p, tau = self.p, self.p.tau
            d = torch.maximum(p.x - p.peak, -125.0 / p.rate) * tau
            term = (weights(p.x, p.peak, p.rate) * d * -MASS_SCALE).double().round().long()
            total = self.shards.total(torch.where(p.kept(), term, 0).sum(1, keepdim=True))
            entropy = p.log_mass + total.double() / p.mass.double()
            entropy = torch.where(p.is_point, 0.0, entropy)[:, 0]
            return walk_typical(t, s, torch.cat([entropy, entropy.new_zeros(1)]), epsilon, delta)
        if self.method != "block":
            return walk_tree(t, s, residual, self.rounds)
        by_block, restart = walk_block(t, s, residual)
        return walk_tree(t, s, residual, self.rounds).where(restart, by_block)

    def _last(self, end: Ending, s: Scores) -> Tensor:
        """[B] the last tokens."""
        t, node = self.trees, end.node
        at = node.clamp_max(self.nodes - 1)
        requests, Vs = len(node), self.p.x.shape[1]
        one_hot = s.one_hot[node]
        tried = t.listed & (t.parent < self.nodes)
        owner = torch.cat([t.owner, t.owner[:1] * 0])
        tried &= (node[owner] == t.parent) & (~end.by_block[owner] | (t.eldest[t.parent] == torch.arange(
            self.nodes + 1, device=node.device)))  # fmt: skip
        tried &= (one_hot & end.kids)[owner] & (t.token >= self.start) & (t.token < self.start + Vs)
        without = torch.zeros(requests, Vs + 1, dtype=torch.bool, device=node.device)
        without[owner, torch.where(tried, t.token - self.start, Vs)] = True
        log_q = None
        if self.q is not None:
            q = self.q.rows(t.kind[node].clamp_min(0))
            log_q = torch.where(q.is_empty, -torch.inf, q.log_probs())
        drawn = end.kids & ~one_hot
        left = Leftover(end.kids, drawn, drawn & ~end.by_block, without[:, :Vs], end.log_c, end.last_log_c)
        assert self.row.seed is not None
        assert self.row.position is not None
        seed, position = self.row.seed[at], self.row.position[at] + end.depth
        starts = self.shards.starts(self.start, node.device)
        can_reject = self.method != "typical"
        found, empty = draw_last(self.p.rows(at), log_q, left, starts, self.dtype, seed, position, can_reject)
        fixed = s.wanted[node]
        end.flags = end.flags | (empty & (fixed < 0)) * Flag.ZERO_RESIDUAL
        return torch.where(fixed >= 0, fixed, found)

    def run(self, return_logprobs: str | None, epsilon: float, delta: float) -> Verified:
        t, s = self.trees, self._scores()
        end = self._walk(s, epsilon, delta)
        node, some = end.node, t.count > 0
        last = s.wanted[node] if self.method in ("greedy", "coupled") else self._last(end, s)
        place = torch.arange(end.path.shape[1], device=node.device)
        next_node = torch.cat([end.path[:, 1:], torch.full_like(end.path[:, :1], self.nodes)], 1)
        is_last = place == end.depth[:, None]
        tokens = torch.where(is_last, last[:, None], t.token[next_node])
        emitted = (place <= end.depth[:, None]) & some[:, None]
        tokens = torch.where(emitted, tokens, -1)
        nodes = torch.where(emitted, end.path - t.begin[:, None], -1)
        logprobs = None
        if return_logprobs is not None:
            at = end.path.clamp_max(self.nodes - 1)
            x = torch.where(
                is_last, self.p.rows(node.clamp_max(self.nodes - 1)).logit_of(last), self.x[:, 0][next_node]
            )
            law, plain = self.p.scalars(at.flatten()), self.p.plain().scalars(at.flatten())
            value = reported(law, plain, x.view(-1, 1), tokens.flatten(), return_logprobs)
            value = value.view(*tokens.shape, *value.shape[1:])
            logprobs = torch.where(emitted if value.dim() == 2 else emitted[..., None], value, 0.0)
        emitted_count = torch.where(some, end.depth + 1, 0).int()
        return Verified(tokens.int(), emitted_count, nodes.int(), end.flags.int(), logprobs)
