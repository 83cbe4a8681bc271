"""`sample` and `verify` on vocabulary shards; what crosses ranks: _sharded.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._ops import Flag
from specdec_kernels._sampling_args import (
    LOGPROBS,
    Bias,
    Sampling,
    draft_sampling_args,
    index_arg,
    logits_arg,
    request_args,
    tree_arg,
    vocab_arg,
)
from specdec_kernels._sharded import ACCEPT, BLOCK, MASK, MASS_SCALE, Shards, draw, order_key, order_value, weights
from specdec_kernels._sharded_draw import Leftover, coins, draw_last
from specdec_kernels._sharded_law import Law, reported
from specdec_kernels._sharded_rows import DraftColumns, check_edits, edited, within
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
    _ops.expect_int(op, "vocab_start", vocab_start, 0, "a multiple of 32")
    _ops.expect(op, "vocab_start", vocab_start % 32 == 0, "a multiple of 32", vocab_start)


def sample_sharded(
    logits: Tensor,
    sampling: Sampling,
    *,
    vocab_start: int,
    group: Any | None,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
    vocab_size: int | None = None,
    return_logprobs: str | None = None,
) -> Sampled:
    """`sample` where every rank of `group` holds columns [vocab_start, vocab_start + Vs) of logits [B, Vs].

    Ranks follow one another in the vocabulary and begin at multiples of 32; every rank gets the tokens, flags and
    log-probabilities that one process gets from the whole rows, whatever the number of ranks. allowed: int32
    [B, ceil(Vs / 32)], the words of this rank's columns; bias, vocab_size: of whole rows, as in `sample`. An unfiltered
    row costs 30 bytes of reductions (torch.distributed), top-k and top-p 8 KiB each.
    """
    op = "sample_sharded"
    rows, columns = logits_arg(op, "logits", logits).shape
    _check(op, return_logprobs, vocab_start)
    check_edits(op, rows, columns, allowed, bias)
    vocab_arg(op, vocab_size, columns, shard=True)
    request_args(op, sampling)
    _ops.expect(op, "sampling", len(sampling.temperature) == rows, f"{rows} requests", len(sampling.temperature))
    seed, position = sampling.seed, sampling.position
    assert seed is not None
    assert position is not None
    shards, raw = Shards(group), within(logits.float(), vocab_start, vocab_size)
    vocab = shards.vocabulary(columns, vocab_size, logits.device)
    law = Law(edited(raw, vocab_start, allowed, bias), vocab_start, sampling, shards, vocab)
    token = law.draw(seed, position)
    logprobs = None
    if return_logprobs is not None:
        every = torch.arange(rows, device=token.device)
        plain, x = law.plain(), law.logits_at(every, token)
        raw_plain, raw_x = plain, x
        if return_logprobs != "processed" and (allowed is not None or bias is not None):
            raw_plain = Law(raw, vocab_start, Sampling(torch.ones_like(sampling.temperature)), shards, vocab)
            raw_x = raw_plain.logits_at(every, token)
        logprobs = reported(law, plain, x, raw_plain, raw_x, token, return_logprobs)
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
    d2t: Tensor | None = None,
    allowed: Tensor | None = None,
    bias: Bias | None = None,
    vocab_size: int | None = None,
    uniforms: Tensor | None = None,
    return_logprobs: str | None = None,
    epsilon: float = 0.3,
    delta: float = 0.09,
    max_siblings: int | None = None,
) -> Verified:
    """`verify` on vocabulary shards, as in `sample_sharded`: target_logits [N, Vs], draft_logits [Rd, Vs] and allowed
    [N, ceil(Vs / 32)] are this rank's columns; everything else is the same on every rank. With d2t, draft_logits
    [Rd, Vd] are the whole rows of the reduced vocabulary.

    Every rank gets what `verify` gives one process. Rows of target and draft logits cost 18 bytes of reductions each
    (whole draft rows none), a node 4, or 8 where its draft row is split too, and 8 more if it has siblings before it;
    the last token of a request 13 and, by a race, 32 for every boundary between ranks; log-probabilities 8 a row and 4
    a request, 18 and 4 a token more where rows are edited; filters as in `sample_sharded`. max_siblings: no node has
    more children (default: max_nodes - 1; 1 for chains spares the rounds that siblings need; a node that has more sets
    Flag.TREE). A draft row belongs to one request (else Flag.INDEX). Other arguments as in `verify`.
    """
    op = "verify_sharded"
    _ops.expect(op, "method", method in METHODS, f"one of {METHODS}", repr(method))
    nodes, columns = logits_arg(op, "target_logits", target_logits).shape
    _check(op, return_logprobs, vocab_start)
    index_arg(op, "draft_token_ids", draft_token_ids, nodes)
    request_args(op, sampling)
    requests = len(sampling.temperature)
    tree_arg(op, tree, nodes, requests)
    draft_sampling_args(op, draft_sampling, requests)
    check_edits(op, nodes, columns, allowed, bias)
    vocab_arg(op, vocab_size, columns, shard=True)
    drawn = method in ("rejection", "block") and draft_logits is not None
    if draft_logits is not None:
        wide = logits_arg(op, "draft_logits", draft_logits).shape[1]
        if d2t is not None:
            _ops.expect_tensor(op, "d2t", d2t, torch.int32, 1)
        else:
            _ops.expect(op, "draft_logits", wide == columns, f"{columns} columns as target_logits", wide)
    elif draft_rows is not None and method in ("rejection", "block"):
        _ops.expect(op, "draft_logits", False, "the rows that draft_rows points into", None)
    index_arg(op, "draft_rows", draft_rows, nodes)
    if uniforms is not None:
        _ops.expect_tensor(op, "uniforms", uniforms, (torch.float32, torch.float64), 1)
        _ops.expect(op, "uniforms", len(uniforms) == nodes, f"{nodes} entries", len(uniforms))
    siblings = max(tree.max_nodes - 1, 0) if max_siblings is None else max_siblings
    _ops.expect_int(op, "max_siblings", siblings, 0, "at least 0")
    width = tree.max_depth + 1
    if not nodes or not requests:
        filler = target_logits.new_full((requests, width), -1, dtype=torch.int32)
        two = (2,) if return_logprobs == "both" else ()
        logprobs = None if return_logprobs is None else target_logits.new_zeros((requests, width, *two)).float()
        return Verified(filler, filler[:, 0] + 1, filler.clone(), filler[:, 0] + 1, logprobs)
    return _Verification(
        target_logits, draft_token_ids, tree, sampling, method, Shards(group), vocab_start,
        draft_logits if drawn else None, draft_rows, draft_sampling or sampling, d2t, (allowed, bias), vocab_size,
        uniforms, siblings,
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
        d2t: Tensor | None,
        edits: tuple[Tensor | None, Bias | None],
        vocab_size: int | None,
        uniforms: Tensor | None,
        siblings: int,
    ):
        self.method, self.shards = method, shards
        self.uniforms, self.start, self.nodes = uniforms, start, len(token_ids)
        rows = None
        if draft_logits is not None:
            rows = self._draft_rows(tree, draft_rows, len(draft_logits))
        self.vocab = vocab = shards.vocabulary(target_logits.shape[1], vocab_size, target_logits.device)
        self.trees = t = Trees(tree, token_ids, vocab, rows, siblings)
        self.rounds = min(max(tree.max_nodes - 1, 0), tree.max_depth * siblings)
        self.row = _rows_of(sampling, t.owner)
        shape = self.row
        if method == "greedy":
            shape = Sampling(torch.zeros_like(self.row.temperature))
        raw = within(target_logits.float(), start, vocab_size)
        self.raw = raw if any(edit is not None for edit in edits) else None
        self.p = Law(edited(raw, start, *edits), start, shape, shards, vocab)
        if method == "greedy":
            heat = self.row.temperature
            self.p.flags = self.p.flags | torch.where((heat >= 0) & (heat < torch.inf), 0, Flag.PARAMETER).int()
        self.q: Law | None = None
        self.columns: DraftColumns | None = None  # of a reduced draft vocabulary
        self.own: Tensor | None = None  # of this rank's target ids
        if draft_logits is not None and rows is not None:
            place = torch.where(rows >= 0, rows, len(draft_logits))
            spare = torch.full((len(draft_logits) + 1,), len(sampling.temperature), device=rows.device)
            owner = spare.scatter_reduce(0, place, t.owner, "amin").clamp_max(len(sampling.temperature) - 1)
            shape = _rows_of(draft_sampling, owner[:-1])
            if d2t is None:
                self.q = Law(within(draft_logits.float(), start, vocab_size), start, shape, shards, vocab)
            else:
                wide = min(draft_logits.shape[1], len(d2t))
                self.columns = DraftColumns(d2t, wide, vocab)
                self.own = self.columns.of(self.p.ids)
                whole = torch.full_like(vocab, wide)
                law = torch.where(self.columns.exists, draft_logits[:, :wide].float(), -torch.inf)
                self.q = Law(law, 0, shape, Shards(None), whole)
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
        """Every node's token in its parent's row and in its draft row: its logit in the one, float32 [N + 1, 1], and
        its log-probability in the other (0 where there is none), float64 [N + 1]; one reduction."""
        t, q, last = self.trees, self.q, self.nodes - 1
        column = t.token - self.start
        mine = t.exists & (column >= 0) & (column < self.p.x.shape[1])
        at, row = column.clamp(0, self.p.x.shape[1] - 1), t.kind[t.parent].clamp_min(0)
        key = torch.where(mine, order_key(self.p.x[t.parent.clamp_max(last), at]), 0)
        if q is None or self.columns is not None:  # one rank's number: the sum may wrap
            x = order_value(self.shards.total(key.int()).long() & MASK)[:, None]
        else:
            both = key << 32 | torch.where(mine, order_key(q.x[row, at]), 0)
            both = self.shards.total(both)
            x, y = order_value(both >> 32 & MASK)[:, None], order_value(both & MASK)[:, None]
        if q is None:
            return x, torch.zeros(len(t.token), dtype=torch.float64, device=x.device)
        ids = t.token
        if self.columns is not None:
            ids = self.columns.of(t.token)
            y = torch.where(ids < 0, -torch.inf, q.x[row, ids.clamp_min(0)])[:, None]
        drawn = q.scalars(row)
        log_q = drawn.log_prob(y, ids[:, None])[:, 0]
        return x, torch.where(t.exists & ~drawn.is_empty[:, 0], log_q, -torch.inf)

    def _drawn_law(self, node: Tensor) -> Law:
        """The draft laws of nodes' children, in this rank's columns of the target."""
        assert self.q is not None
        index = self.trees.kind[node].clamp_min(0)
        if self.own is None:
            return self.q.rows(index)
        law = self.q.scalars(index)
        law.x = torch.where(self.own < 0, -torch.inf, self.q.x[index][:, self.own.clamp_min(0)])
        law.ids = self.own
        return law

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
        self.x, log_q = self._kids()
        above = p.scalars(up)
        log_p = torch.where(t.exists, above.log_prob(self.x, ids)[:, 0], -torch.inf)
        held = (self.x > above.threshold) | ((self.x == above.threshold) & (ids <= above.last_tie))
        mass = (weights(self.x, above.peak, above.rate).double() * MASS_SCALE).round().long()[:, 0]
        one_hot, draft_flags = t.kind < 0, torch.zeros_like(t.token)
        if q is not None:
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
        p, q = self.p.rows(node.clamp_max(self.nodes - 1)), self._drawn_law(node)
        a = (MASS_SCALE / p.mass.double()).float()
        b = (c[:, None] * (MASS_SCALE / q.mass.double())).float()
        w = torch.where(p.kept(), weights(p.x, p.peak, p.rate), 0.0) * a
        w = w - torch.where(q.kept(), weights(q.x, q.peak, q.rate), 0.0) * b
        left = (w.clamp_min(0.0).double() * RESIDUAL_SCALE).round().long().sum(1, keepdim=True)
        # a one-hot draft law leaves 1 - min(c, p): the rank that has its token says p
        here = q.ids == q.argmax
        column = here.int().argmax(1, keepdim=True)
        single = p.log_prob(p.x.gather(1, column), p.ids[column]).exp()
        single = torch.where(here.any(1, keepdim=True), single, 0.0)
        left = self.shards.total(torch.where(q.is_point, single.view(torch.int64), left))
        point = 1.0 - torch.minimum(c[:, None], left.view(torch.float64))
        return torch.where(q.is_empty, 1.0, torch.where(q.is_point, point, left / RESIDUAL_SCALE))[:, 0]

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
            q = self._drawn_law(node)
            log_q = torch.where(q.is_empty, -torch.inf, q.log_probs())
        drawn = end.kids & ~one_hot
        left = Leftover(end.kids, drawn, drawn & ~end.by_block, without[:, :Vs], end.log_c, end.last_log_c)
        assert self.row.seed is not None
        assert self.row.position is not None
        seed, position = self.row.seed[at], self.row.position[at] + end.depth
        starts = self.shards.starts(self.start, node.device)
        can_reject = self.method != "typical"
        found, empty = draw_last(self.p.rows(at), log_q, left, starts, seed, position, can_reject)
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
            at, token = end.path.clamp_max(self.nodes - 1).flatten(), tokens.flatten()
            x = self.p.logits_at(node.clamp_max(self.nodes - 1), last)
            x = torch.where(is_last, x, self.x[:, 0][next_node]).view(-1, 1)
            plain = self.p.plain().scalars(at)
            raw_plain, raw_x = plain, x
            if self.raw is not None and return_logprobs != "processed":
                heat = torch.ones_like(self.row.temperature)
                raw = Law(self.raw, self.start, Sampling(heat), self.shards, self.vocab)
                raw_plain, raw_x = raw.scalars(at), raw.logits_at(at, token)
            value = reported(self.p.scalars(at), plain, x, raw_plain, raw_x, token, return_logprobs)
            value = value.view(*tokens.shape, *value.shape[1:])
            logprobs = torch.where(emitted if value.dim() == 2 else emitted[..., None], value, 0.0)
        emitted_count = torch.where(some, end.depth + 1, 0).int()
        return Verified(tokens.int(), emitted_count, nodes.int(), end.flags.int(), logprobs)
