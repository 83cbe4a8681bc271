"""Draft trees as tables, and the walks of all requests at once: what csrc/sampling/walk_cpu.cpp does for one of them.

Tables have an entry a node and one more, N, that stands for "no node". A walk takes as many rounds as the host knows it
can need; a request that is done waits at node N. All ranks take the same decisions: they start from reduced numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels._ops import Flag
from specdec_kernels.tree import DraftTree

ROOM = 1.0 + 2.384185791015625e-7  # a coin that a caller put on a boundary belongs to the next bucket


class Trees:
    """Links, trials and kinds of N nodes. draft_rows: int64 [N], -1 deterministic, -2 out of range; None where the
    method does not ask. A tree whose links contradict one another is cut to its root."""

    def __init__(
        self,
        tree: DraftTree,
        token_ids: Tensor,
        vocab: Tensor,
        draft_rows: Tensor | None,
        max_siblings: int,
    ):
        N, B, device = len(token_ids), len(tree.cu_nodes) - 1, token_ids.device
        self.max_siblings, self.max_depth = max_siblings, tree.max_depth
        n = torch.arange(N, device=device)
        cu = tree.cu_nodes.long()
        first, last = cu[:-1], cu[1:]
        gone = (first < 0) | (last > N) | (first > last)
        self.count = torch.where(gone, 0, last - first)
        self.begin = first.clamp(0, N)
        self.owner = torch.searchsorted(cu[1:].contiguous(), n, right=True).clamp_max(B - 1)
        self.root = torch.where(self.count > 0, self.begin, N)
        at, size = self.begin[self.owner], self.count[self.owner]
        i, inside = n - at, (n >= at) & (n < at + size)
        parent, child, following = tree.parents.long(), tree.first_child.long(), tree.next_sibling.long()

        def parent_of(local: Tensor) -> Tensor:
            return parent[(at + local).clamp(0, N - 1)]

        def behind(local: Tensor) -> Tensor:
            return (local > i) & (local < size)

        sound = torch.where(i == 0, (parent == -1) & (following == -1), (parent >= 0) & (parent < i))
        sound &= (child == -1) | (behind(child) & (parent_of(child) == i))
        sound &= (following == -1) | (behind(following) & (parent_of(following) == parent))
        broken = _any_by(self.owner, inside & ~sound, B)
        faults = torch.zeros_like(self.count) if tree.flags is None else tree.flags.long()
        alone = (broken | (faults != 0)) & (self.count > 0)
        self.flags = gone * Flag.INDEX | torch.where(alone, faults | Flag.TREE, 0)

        def link(local: Tensor) -> Tensor:
            linked = (local >= 0) & inside & ~alone[self.owner]
            return torch.cat([torch.where(linked, at + local, N), n.new_tensor([N])])

        self.parent, self.child, self.following = link(parent), link(child), link(following)
        self.depth = (self.parent < N).long()
        above = self.parent
        for _ in range(tree.max_nodes.bit_length()):
            self.depth, above = self.depth + self.depth[above], above[above]
        self._list_children(token_ids, vocab, draft_rows)

    def _list_children(self, token_ids: Tensor, vocab: Tensor, draft_rows: Tensor | None) -> None:
        """Children in draw order that can be tried at all: drafted, of the first one's kind, no twin of an earlier."""
        N = len(token_ids)
        self.token = torch.cat([token_ids.long(), token_ids.new_tensor([-1]).long()])
        linked = torch.zeros(N + 1, dtype=torch.bool, device=token_ids.device)
        self.trial = torch.zeros_like(self.child)
        kid = self.child
        for trial in range(self.max_siblings):
            linked[kid], self.trial[kid] = True, trial
            kid = self.following[kid]
        too_many = kid < N
        self.flags |= _any_by(self.owner, too_many[:N], len(self.flags)) * Flag.TREE
        drafted = linked & (self.token != -1)
        drafted[N] = False
        self.exists = (self.token >= 0) & (self.token < vocab)
        row = torch.cat([draft_rows, draft_rows.new_tensor([-1])]) if draft_rows is not None else self.token * 0 - 1
        n = torch.arange(N + 1, device=token_ids.device)
        self.eldest = self._first(drafted, n)
        self.kind = torch.where(self.eldest < N, row[self.eldest], -1)  # of a node's children
        like = (row == self.kind[self.parent]) & (row != -2)
        able = drafted & like
        key = torch.where(able & self.exists, self.parent << 32 | self.token.clamp_min(0), -1 - n)
        key, order = key.sort(stable=True)
        twin = torch.zeros_like(able)
        twin[order[1:]] = key[1:] == key[:-1]
        self.listed = able & ~twin
        self.eldest = self._first(self.listed, n)
        self.num_listed = torch.zeros_like(n).scatter_add_(0, self.parent, self.listed.long())
        faults = (
            (Flag.TOKEN_RANGE, drafted & ~self.exists),
            (Flag.INDEX, drafted & (row == -2)),
            (Flag.SIBLINGS, drafted & (row != self.kind[self.parent]) | twin),
        )
        self.kid_flags = sum((_any_by(self.parent, bad, N + 1) * flag for flag, bad in faults), torch.zeros_like(n))
        self.kid_flags[N] = 0
        self.num_listed[N] = 0

    def _first(self, which: Tensor, n: Tensor) -> Tensor:
        """[N + 1], the first child of every node among `which`."""
        none = len(n) - 1
        return torch.full_like(n, none).scatter_reduce_(0, self.parent, torch.where(which, n, none), "amin")


def _any_by(index: Tensor, which: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long, device=which.device).scatter_reduce_(0, index, which.long(), "amax") > 0


@dataclass
class Scores:
    """What a walk compares; [N + 1] each, of a node's row, or of a node as a child (log_p to log_u)."""

    flags: Tensor  # of the target's row
    draft_flags: Tensor  # of the draft row of a node's children
    dead: Tensor
    wanted: Tensor  # the one token of a point law or of a coupled draw, else -1
    one_hot: Tensor  # children are deterministic
    mass: Tensor
    kid_mass: Tensor  # of the child's token under the target, 0 if it does not count
    counts: Tensor
    log_p: Tensor
    log_q: Tensor
    u: Tensor
    log_u: Tensor
    block_u: Tensor
    room: float  # ROOM where the caller brought the coins


@dataclass
class Ending:
    """Where a walk ends: its nodes [B, max_depth + 1] (N behind the last), and what is left to draw from."""

    path: Tensor
    depth: Tensor
    flags: Tensor
    kids: Tensor  # bool: children of the last node were tried in vain
    log_c: Tensor  # the residual is max(p - c q, 0)
    last_log_c: Tensor  # the one before the latest rejection; not by block verification
    by_block: Tensor

    @property
    def node(self) -> Tensor:
        return self.path.gather(1, self.depth[:, None])[:, 0]

    def where(self, this: Tensor, other: Ending) -> Ending:
        """Of `self` the requests that `this` marks, of `other` the rest; the flags of both there."""
        both = other.flags | torch.where(this, self.flags, 0)
        wide = this[:, None]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in vars(self) if name != "flags"}
        return Ending(
            flags=both, **{name: torch.where(wide if a.dim() == 2 else this, a, b) for name, (a, b) in pairs.items()}
        )


def log_residual(log_p: Tensor, log_q: Tensor, log_c: Tensor) -> Tensor:
    """log max(p - c q, 0), never NaN (csrc/sampling/acceptance.h)."""
    d = log_c + log_q - log_p
    shrink = torch.where(d > -0.6931471805599453, (-torch.expm1(d)).log(), torch.log1p(-d.exp()))
    left = torch.where(d > -torch.inf, torch.where(d >= 0, -torch.inf, log_p + shrink), log_p)
    return torch.where(log_p == -torch.inf, -torch.inf, left)


Residual = Callable[[Tensor, Tensor], Tensor]  # (node, c) of as many rows -> sum max(p - c q, 0), float64


def walk_tree(t: Trees, s: Scores, residual: Residual, rounds: int) -> Ending:
    """Greedy, one-hot, sampled siblings, coupled: a child of every request a round."""
    B, N = len(t.root), len(t.token) - 1
    every = torch.arange(B, device=t.root.device)
    one = torch.ones(B, dtype=torch.float64, device=t.root.device)
    node, depth = t.root, torch.zeros_like(t.root)
    path = t.root.new_full((B, t.max_depth + 1), N)
    path[:, 0] = node

    def enter(to: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """(flags, first child to try) of nodes entered at some depth."""
        inner = at < t.max_depth
        tries = inner & ~s.dead[to] & (t.num_listed[to] > 0)
        drawn = tries & (s.wanted[to] < 0) & ~s.one_hot[to]
        seen = s.flags[to] | torch.where(inner, t.kid_flags[to], 0) | torch.where(drawn, s.draft_flags[to], 0)
        return seen, torch.where(tries, t.child[to], N)

    flags, kid = enter(node, depth)
    flags = flags | t.flags
    c, last_c, Z, W, total, stale = one * 0, one * 0, one, one, torch.zeros_like(node), one < 0
    for number in range(rounds):
        tried = t.listed[kid]
        matches, one_hot = s.wanted[node] >= 0, s.one_hot[node]
        drawn = tried & ~matches & ~one_hot
        stop = torch.zeros_like(tried)
        if number and t.max_siblings > 1:  # what is left of the target behind the first rejection
            left, again = residual(node, c), drawn & stale
            stop = again & ~(left > 0)
            Z = torch.where(again & ~stop, left, Z)
            c = torch.where(stop, last_c, c)
            flags = flags | stop * Flag.ZERO_RESIDUAL
            tried, drawn = tried & ~stop, drawn & ~stop
        counted = tried & ~matches & one_hot & s.counts[kid]
        total = total + torch.where(counted, s.kid_mass[kid], 0)
        bar = s.u[t.child[node]] * s.mass[node].double() * s.room
        within = counted & ((total.double() > bar) | (total >= s.mass[node]))
        p, q = s.log_p[kid], s.log_q[kid]
        ratio = torch.where(c == 0, p - q, log_residual(p, q, c.log()) - Z.log() + W.log() - q)
        taken = (q > -torch.inf) & (ratio > -torch.inf) & ((ratio >= 0) | (s.log_u[kid] < ratio))
        hit = tried & torch.where(matches, t.token[kid] == s.wanted[node], torch.where(one_hot, within, drawn & taken))
        flags = flags | (drawn & t.exists[kid] & ~(q > -torch.inf)) * Flag.DRAFT_MASS
        rejected = drawn & ~hit
        last_c = torch.where(rejected, c, last_c)
        c = torch.where(rejected, c + Z / W, c)
        W = torch.where(rejected & (q > -torch.inf), W - q.exp(), W)
        stale = stale | rejected
        stop = stop | (rejected & (W <= 1e-12))
        depth = depth + hit
        node = torch.where(hit, kid, node)
        path[every, depth] = node
        seen, child = enter(node, depth)
        flags = flags | torch.where(hit, seen, 0)
        kid = torch.where(hit, child, torch.where(stop, N, t.following[kid]))
        c, last_c, stale = torch.where(hit, 0, c), torch.where(hit, 0, last_c), stale & ~hit
        Z, W, total = torch.where(hit, 1, Z), torch.where(hit, 1, W), torch.where(hit, 0, total)
    kids = (depth < t.max_depth) & ~s.dead[node] & (t.num_listed[node] > 0)
    return Ending(path, depth, flags, kids, c.log(), last_c.log(), one < 0)


def walk_block(t: Trees, s: Scores, residual: Residual) -> tuple[Ending, Tensor]:
    """Block verification of chains, and which requests met a greedy or dead row: those go by the chain rule."""
    B, N = len(t.root), len(t.token) - 1
    none = t.root.new_full((B,), N)
    log_rho = torch.zeros(N + 1, dtype=torch.float64, device=t.root.device)
    last = torch.ones(N + 1, dtype=torch.bool, device=t.root.device)
    node, flags, restart, path = t.root, t.flags, none < 0, []
    for depth in range(t.max_depth + 1):
        path.append(node)
        inner = depth < t.max_depth
        flags = flags | s.flags[node] | (t.following[node] < N) * Flag.TREE
        flags = flags | t.kid_flags[node] if inner else flags
        restart = restart | (s.wanted[node] >= 0)
        kid = torch.where(restart, N, t.eldest[node]) if inner else none
        go = kid < N
        flags = flags | torch.where(go & ~s.one_hot[node], s.draft_flags[node], 0)
        q = torch.where(s.one_hot[node], 0.0, s.log_q[kid])
        flags = flags | (go & t.exists[kid] & ~(q > -torch.inf)) * Flag.DRAFT_MASS
        rho = log_rho[node] + s.log_p[kid] - q
        rho = torch.where((q > -torch.inf) & (rho > -torch.inf), rho.clamp_max(0.0), -torch.inf)
        log_rho[kid], last[node] = rho, ~go
        node = torch.where(rho > -torch.inf, kid, N)
    log_rho[N], last[N] = 0.0, True
    n = torch.arange(N + 1, device=node.device)
    rho, p = log_rho.exp(), torch.where(t.exists[t.eldest], s.log_p[t.eldest].exp(), 0.0)
    left = residual(n, torch.where(rho > 0, 1.0 / rho, 1.0))
    left = torch.where(s.one_hot, rho * (1.0 - p) + (rho * p - 1.0).clamp_min(0.0), rho * left)
    missing = -torch.expm1(log_rho)
    chance = torch.where(last, rho, torch.where(missing == 0, 1.0, left / (left + missing)))
    cut = torch.zeros_like(t.root)
    for depth in range(1, t.max_depth + 1):
        cut = torch.where((path[depth] < N) & (s.block_u[path[depth]] < chance[path[depth]]), depth, cut)
    way = torch.stack(path, 1)
    way = torch.where(torch.arange(t.max_depth + 1, device=node.device) <= cut[:, None], way, N)
    node = way.gather(1, cut[:, None])[:, 0]
    return Ending(way, cut, flags, ~last[node], -log_rho[node], -log_rho[node], ~restart), restart


def walk_typical(t: Trees, s: Scores, entropy: Tensor, epsilon: float, delta: float) -> Ending:
    """Medusa's rule: the deepest node whose whole path passes, the first one among equals."""
    B, N = len(t.root), len(t.token) - 1
    bar = (delta * torch.exp(-entropy)).clamp_max(epsilon)
    passes = t.exists & ~s.dead[t.parent] & (s.log_p > -torch.inf) & (s.log_p.exp() > bar[t.parent])
    alive = torch.zeros_like(passes)
    alive[t.root] = True
    alive[N] = False
    looked = torch.zeros_like(passes)
    for _ in range(t.max_depth):
        asked = alive[t.parent] & (t.depth <= t.max_depth) & (t.token != -1)
        looked, alive = looked | asked, alive | (asked & passes)
    seen = s.flags[t.parent] | (~t.exists) * Flag.TOKEN_RANGE
    flags = t.flags | s.flags[t.root]
    for bit in Flag:
        flags = flags | _any_by(t.owner, (looked & (seen & bit != 0))[:N], B) * bit
    n = torch.arange(N + 1, device=bar.device)
    rank = torch.where(alive, t.depth * (N + 1) + (N - n), -1)[:N]
    best = torch.full_like(t.root, -1).scatter_reduce_(0, t.owner, rank, "amax")
    node = torch.where(best < 0, N, N - best % (N + 1))
    flags = flags | s.flags[node]
    depth = torch.where(node < N, t.depth[node], 0)
    path = t.root.new_full((B, t.max_depth + 1), N)
    for back in range(t.max_depth + 1):
        column = (depth - back)[:, None]
        path = torch.where(torch.arange(t.max_depth + 1, device=bar.device) == column, node[:, None], path)
        node = t.parent[node]
    none = torch.full((B,), -torch.inf, dtype=torch.float64, device=bar.device)
    return Ending(path, depth, flags, none == 0, none, none, none == 0)
