"""The work plan of tree attention, item by item: a line of units, cut at the workers' borders.

An item is a row tile of one KV head of one request; it costs one unit a 64-key tile and 5 more. Every worker owns an
equal share of the line. A border inside an item splits it, unless one side would be shorter than `snap`; an uncut item
goes to the owner of its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILE_KEYS, ITEM_PRICE, MIN_PART, MOST_UNITS = 64, 5, 4, 1 << 30


@dataclass(frozen=True)
class Part:
    """Units [begin, end) of an item (request in order, number within it) that `worker` does."""

    request: int
    item: int
    worker: int
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    share: int
    snap: int  # -1: items are never split
    grain: int
    first_unit: list[int]  # of each request in order, and the total
    item_units: list[int]

    def fields(self, tile_rows: int, num_kv_heads: int, workers: int) -> list[int]:
        """The plan tensor (csrc/attention/plan.h)."""
        header = [0x706C616E, tile_rows, num_kv_heads, len(self.item_units), self.share, self.snap, workers, self.grain]
        return [*header, *self.first_unit, *self.item_units]

    def parts(self) -> list[Part]:
        """Every part of every item, in the order of the line."""
        found = []
        for n, units in enumerate(self.item_units):
            items = (self.first_unit[n + 1] - self.first_unit[n]) // units if units else 0
            for item in range(items):
                first = self.first_unit[n] + item * units
                last = first + units
                borders = [] if self.snap < 0 else [
                    k for k in range(first // self.share, last // self.share + 1)
                    if k * self.share - first >= self.snap and last - k * self.share >= self.snap
                ]  # fmt: skip
                if not borders:
                    found.append(Part(n, item, (first + units // 2) // self.share, 0, units))
                    continue
                cuts = [0, *(k * self.share - first for k in borders), units]
                found += [Part(n, item, borders[0] - 1 + i, cuts[i], cuts[i + 1]) for i in range(len(cuts) - 1)]
        return found


def plan(
    context_lens: Sequence[int],
    cu_nodes: Sequence[int],
    order: Sequence[int],
    *,
    group: int,
    num_kv_heads: int,
    tile_rows: int,
    window: int = -1,
    workers: int = 8,
    batch_invariant: bool = False,
) -> Plan:
    """`order`: requests to handle; entries that are no request get no work."""
    items, units = [], []
    for b in order:
        known = 0 <= b < len(context_lens)
        nodes = cu_nodes[b + 1] - cu_nodes[b] if known and cu_nodes[b] >= 0 else 0
        if nodes <= 0:
            items.append(0)
            units.append(0)
            continue
        tiles = -(-(max(context_lens[b], 0) + nodes) // TILE_KEYS)
        if window >= 0:
            tiles = min(tiles, -(-(window + nodes) // TILE_KEYS) + 1)
        items.append(num_kv_heads * -(-nodes * group // tile_rows))
        units.append(tiles + ITEM_PRICE)
    total = sum(i * u for i, u in zip(items, units))
    grain = 1
    while total // grain >= MOST_UNITS:
        grain *= 2
    units = [-(-u // grain) for u in units]
    first = [0]
    for i, u in zip(items, units):
        first.append(first[-1] + i * u)
    longest, shortest = max([0, *units]), -(-MIN_PART // grain)
    least = max(shortest, -(-(tile_rows // 4) // grain), -(-longest // 16))
    half = max(workers // 2, 1)
    if first[-1] // least < half:
        least = max(shortest, -(-first[-1] // half), -(-longest // 32))
    share = max(-(-first[-1] // workers), least)
    return Plan(share, -1 if batch_invariant else max(share // 8, 2), grain, first, units)
