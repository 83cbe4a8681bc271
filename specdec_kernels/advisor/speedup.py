"""What speculation should give: expected tokens a step and speed-up, for chains and trees.

A step drafts, verifies all drafts in one forward, and emits the accepted drafts plus one token (recovered or bonus).
With conditional acceptance alpha (the chance that a draft that was reached is accepted: `1 - TV` of the two laws) a
chain of K drafts emits 1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha) tokens on average (Leviathan et
al., 2211.17192). That is an expectation, not a bound, and it assumes one alpha for all: see `expected_emitted_beta`
and `emitted_over_requests`.

All costs are in units of one plain decode step at the same batch, so that plain decoding has speed-up 1.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_kernels.engine.costs import DecodingCosts

_TOLERANCE = 1e-9


def _probability(op: str, name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: {name}: expected a probability in [0, 1], got {value}")
    return float(value)


def _depth(op: str, name: str, value: int) -> int:
    if value != int(value) or value < 0:
        raise ValueError(f"{op}: {name}: expected an integer >= 0, got {value}")
    return int(value)


# ---- expected tokens a step


def expected_emitted(acceptance: float | Sequence[float], num_drafts: int | None = None) -> float:
    """Mean tokens a step of a chain, the recovered or bonus token included.

    acceptance: one conditional acceptance for every position (then num_drafts is needed), or one a position:
    P(accepted at i | accepted up to i-1). Positions may differ a lot: prefer the measured sequence.
    """
    if isinstance(acceptance, (int, float)):
        if num_drafts is None:
            raise ValueError("expected_emitted: num_drafts: expected an integer with a single acceptance, got None")
        acceptance = [acceptance] * _depth("expected_emitted", "num_drafts", num_drafts)
    elif num_drafts is not None:
        if len(acceptance) < num_drafts:
            raise ValueError(f"expected_emitted: acceptance: expected {num_drafts} positions, got {len(acceptance)}")
        acceptance = acceptance[: _depth("expected_emitted", "num_drafts", num_drafts)]
    total = reached = 1.0
    for value in acceptance:
        reached *= _probability("expected_emitted", "acceptance", value)
        total += reached
    return total


def expected_emitted_beta(a: float, b: float, num_drafts: int) -> float:
    """Mean tokens a step when every step draws its own alpha from Beta(a, b): sum over i of E[alpha^i].

    Larger than `expected_emitted` at the mean alpha (the sum is convex): a mean acceptance never describes a mixed
    load. It weights steps; a load whose *requests* differ is `emitted_over_requests`, which is smaller.
    """
    if a <= 0 or b <= 0:
        raise ValueError(f"expected_emitted_beta: a, b: expected positive parameters, got {a}, {b}")
    total = moment = 1.0
    for i in range(_depth("expected_emitted_beta", "num_drafts", num_drafts)):
        moment *= (a + i) / (a + b + i)
        total += moment
    return total


def emitted_over_requests(acceptances: Sequence[float], num_tokens: Sequence[float], num_drafts: int) -> float:
    """Tokens a step over a load in which request r emits num_tokens[r] tokens at its own acceptances[r].

    Total tokens over total steps: the token-weighted harmonic mean of the requests' tokens a step. Slow requests need
    more steps for their tokens, so neither the mean acceptance nor the mean of tokens a step gives this number.
    """
    if len(acceptances) != len(num_tokens) or not len(acceptances):
        raise ValueError(
            f"emitted_over_requests: num_tokens: expected {len(acceptances)} counts, got {len(num_tokens)}"
        )
    steps = sum(n / expected_emitted(float(alpha), num_drafts) for alpha, n in zip(acceptances, num_tokens))
    return float(sum(num_tokens)) / steps


def expected_emitted_tree(parents: Sequence[int], node_acceptance: Sequence[float]) -> float:
    """Mean tokens a step of a tree: 1 + sum over nodes of the product of acceptances along the node's path.

    parents[N]: as in `build_tree` (root first with -1, parents before children). node_acceptance[N]: the chance that
    this child is the accepted one, given that its parent was (the root's entry is ignored); siblings sum to at most
    1.
    """
    op = "expected_emitted_tree"
    if not len(parents) or len(parents) != len(node_acceptance) or parents[0] != -1:
        raise ValueError(f"{op}: parents: expected a root (-1) and one acceptance a node, got {list(parents)[:4]}")
    reached, siblings = [1.0] * len(parents), [0.0] * len(parents)
    for node in range(1, len(parents)):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ValueError(f"{op}: parents: expected an earlier node for node {node}, got {parent}")
        value = _probability(op, "node_acceptance", node_acceptance[node])
        siblings[parent] += value
        if siblings[parent] > 1.0 + _TOLERANCE:
            raise ValueError(f"{op}: node_acceptance: expected siblings of {parent} to sum to at most 1")
        reached[node] = reached[parent] * value
    return sum(reached)


# ---- cost and speed-up


def verify_curve(times: Mapping[int, float], *, stepwise: bool = False) -> Callable[[int], float]:
    """Cost of a forward over n tokens, relative to n = 1, from measured times {n: time} (any unit; n = 1 must be
    there).

    stepwise: between measurements take the next larger one (captured graphs pad up); otherwise interpolate. Beyond
    the largest measurement the curve raises ValueError instead of guessing.
    """
    counts = sorted(times)
    if not counts or counts[0] != 1 or min(times.values()) <= 0:
        raise ValueError(f"verify_curve: times: expected positive times from 1 token on, got {dict(times)}")

    def cost(num_tokens: int) -> float:
        if not 1 <= num_tokens <= counts[-1]:
            raise ValueError(f"verify_curve: num_tokens: expected 1..{counts[-1]} (measured), got {num_tokens}")
        at = bisect_left(counts, num_tokens)
        high = counts[at]
        if stepwise or high == num_tokens:
            return times[high] / times[1]
        low = counts[at - 1]
        share = (num_tokens - low) / (high - low)
        return (times[low] + share * (times[high] - times[low])) / times[1]

    return cost


def free_verification(num_tokens: int) -> float:
    """The usual assumption: a forward over few tokens costs as much as over one. Holds while memory-bound."""
    return 1.0


@dataclass(frozen=True)
class StepCosts:
    """draft: one draft forward. verify(n): the target's forward over n tokens, root included. overhead: sampling,
    commit, host time a step. All in plain decode steps."""

    draft: float
    verify: Callable[[int], float] = free_verification
    overhead: float = 0.0

    @classmethod
    def fitted(cls, costs: DecodingCosts, *, requests: int = 1, context: float = 0.0) -> StepCosts:
        """Those of an engine's own steps at a batch of `requests` behind `context` tokens each (`engine.costs`). What a
        drafted node costs the drafter counts with its verification."""
        plain, per = costs.seconds(0, 0, requests=requests, context=context), costs.draft

        def verify(num_tokens: int) -> float:
            forward = costs.forward.predict(requests * num_tokens, requests, requests * context)
            return (forward + per.per_node * requests * (num_tokens - 1)) / plain

        return cls(per.per_level / plain, verify, per.per_step / plain)

    def step(self, num_draft_forwards: int, num_verified: int) -> float:
        """Cost of one step. Nothing drafted is a plain step: cost 1."""
        if num_draft_forwards == 0 and num_verified == 1:
            return 1.0
        return num_draft_forwards * self.draft + self.verify(num_verified) + self.overhead


def speedup_chain(acceptance: float | Sequence[float], num_drafts: int, costs: StepCosts) -> float:
    """Speed-up over plain decoding of a chain of num_drafts drafts, one draft forward each."""
    return expected_emitted(acceptance, num_drafts) / costs.step(num_drafts, num_drafts + 1)


def speedup_tree(
    parents: Sequence[int], node_acceptance: Sequence[float], costs: StepCosts, *, num_draft_forwards: int | None = None
) -> float:
    """Speed-up of a tree; one draft forward a level unless given (Medusa: its heads count as one)."""
    if num_draft_forwards is None:
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        num_draft_forwards = max(depths)
    return expected_emitted_tree(parents, node_acceptance) / costs.step(num_draft_forwards, len(parents))


def acceptance_for(speedup: float, num_drafts: int, costs: StepCosts) -> float | None:
    """The conditional acceptance at which a chain reaches `speedup` (1.0: break-even); None if even alpha = 1 falls
    short.

    Bisection: tokens a step grow with alpha.
    """
    low, high = 0.0, 1.0
    if speedup_chain(high, num_drafts, costs) < speedup:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup_chain(middle, num_drafts, costs) < speedup else (low, middle)
    return high


def optimal_depth(acceptance: float | Sequence[float], costs: StepCosts, *, max_drafts: int = 16) -> tuple[int, float]:
    """(num_drafts, speed-up) of the best chain; (0, 1.0) where no chain beats plain decoding. Ties to the shorter."""
    best = (0, 1.0)
    limit = max_drafts if isinstance(acceptance, (int, float)) else min(max_drafts, len(acceptance))
    for num_drafts in range(1, limit + 1):
        value = speedup_chain(acceptance, num_drafts, costs)
        if value > best[1]:
            best = (num_drafts, value)
    return best


# ---- trees


@dataclass(frozen=True)
class RankedTree:
    """parents[N] (root first, -1), node_acceptance[N], ranks[N] (which sibling: 0 the likeliest; root 0), depth."""

    parents: list[int]
    node_acceptance: list[float]
    ranks: list[int]
    depth: int
    expected_emitted: float


def best_tree(acceptance_by_rank: Sequence[float], num_nodes: int, *, max_depth: int | None = None) -> RankedTree:
    """The tree of num_nodes nodes (root included) that emits most when the r-th child is accepted with
    acceptance_by_rank[r].

    A node adds the product along its path, and no child adds more than its parent; so taking the largest products is
    optimal and gives a tree. acceptance_by_rank: non-increasing, sum at most 1. Fewer nodes if max_depth leaves no
    more.
    """
    op = "best_tree"
    ranks = [_probability(op, "acceptance_by_rank", value) for value in acceptance_by_rank]
    if sum(ranks) > 1.0 + _TOLERANCE or sorted(ranks, reverse=True) != ranks:
        raise ValueError(f"{op}: acceptance_by_rank: expected non-increasing, sum at most 1, got {list(ranks)}")
    if num_nodes < 1:
        raise ValueError(f"{op}: num_nodes: expected at least 1 (the root), got {num_nodes}")
    parents, values, chosen, depths, total = [-1], [1.0], [0], [0], 1.0
    reached = [1.0]
    queue: list[
        tuple[float, int, int, int]
    ] = []  # (-product, depth, parent, rank): ties to the shallower, then earlier

    def offer(parent: int, rank: int) -> None:
        if rank < len(ranks) and ranks[rank] > 0 and (max_depth is None or depths[parent] < max_depth):
            heapq.heappush(queue, (-reached[parent] * ranks[rank], depths[parent] + 1, parent, rank))

    offer(0, 0)
    while queue and len(parents) < num_nodes:
        product, depth, parent, rank = heapq.heappop(queue)
        parents.append(parent)
        values.append(ranks[rank])
        chosen.append(rank)
        depths.append(depth)
        reached.append(-product)
        total -= product
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return RankedTree(parents, values, chosen, max(depths), total)


def optimal_tree(
    acceptance_by_rank: Sequence[float], costs: StepCosts, *, max_nodes: int, max_depth: int
) -> tuple[RankedTree, float]:
    """(tree, speed-up) over all node budgets and depths; a single node (plain decoding) where no tree pays."""
    best, best_speedup = best_tree(acceptance_by_rank, 1), 1.0
    for depth in range(1, max_depth + 1):
        for num_nodes in range(2, max_nodes + 1):
            tree = best_tree(acceptance_by_rank, num_nodes, max_depth=depth)
            value = tree.expected_emitted / costs.step(tree.depth, len(tree.parents))
            if value > best_speedup:
                best, best_speedup = tree, value
            if len(tree.parents) < num_nodes:
                break
    return best, best_speedup


# ---- the text's formulas, kept to show their error


def printed_speedup(rejection_rate: float, num_drafts: int, draft_cost: float) -> float:
    """The text's (1 - q^(g+1)) / ((1 - q)(1 + c g)) exactly as printed: with q the *rejection* rate. Wrong; see
    `printed_error`. The formula wants the conditional acceptance."""
    q = _probability("printed_speedup", "rejection_rate", rejection_rate)
    if q == 1.0:
        return (num_drafts + 1) / (1 + draft_cost * num_drafts)
    return (1 - q ** (num_drafts + 1)) / ((1 - q) * (1 + draft_cost * num_drafts))


def printed_error(rejection_rate: float, num_drafts: int, draft_cost: float) -> float:
    """Relative error of `printed_speedup` against the right value: -0.5 means it prints half."""
    right = speedup_chain(1.0 - rejection_rate, num_drafts, StepCosts(draft_cost))
    return printed_speedup(rejection_rate, num_drafts, draft_cost) / right - 1.0


def printed_accepted_length(acceptance: float, num_drafts: int) -> float:
    """The text's "expected accepted length" g * alpha, which lets drafts behind a rejection count. Wrong; the right
    number of accepted drafts is `expected_emitted(acceptance, num_drafts) - 1`."""
    return acceptance * num_drafts
