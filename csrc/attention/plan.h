// Work plan of tree_attention: how the row tiles of a batch are spread over a fixed number of workers (thread blocks
// that stay). Shared by the CPU planner, the device planner and the kernel that follows the plan.
//
// The work lies on one line of units (about one 64-key tile each, plus a fixed price an item), in the order of
// requests, heads and row tiles; every worker owns `share` units of it. An item that a border falls into is cut there,
// unless one of the two sides would be shorter than `snap`; an item that is not cut belongs to the owner of its middle.
//
//   worker    0            | 1            | 2            |        share units each
//   items     [--A--][---B-+-][------C----+------][-D-]  |
//   parts      A  B0         B1  C0         C1      D             B and C are split; A and D are not
//
// Which part of an item a worker has is arithmetic on (unit, units, share, snap), so a plan is one prefix sum over the
// requests and needs neither lists nor the host. The kernel maps units to the item's true tiles in proportion: a plan
// made from other lengths costs balance, never a wrong answer.
#pragma once
#include <cstdint>

#include "attention/attention.h"

namespace specdec {

// int32 fields of the plan tensor: the header, then first_unit[num_order + 1], then item_units[num_order]. kPlanGrain,
// the number of units that one of the plan stands for, is for people who read a plan.
enum PlanField { kPlanTag, kPlanTileRows, kPlanKvHeads, kPlanOrder, kPlanShare, kPlanSnap, kPlanWorkers, kPlanGrain };
constexpr int kPlanHeader = 8;
constexpr int32_t kPlanTagValue = 0x706c616e;
constexpr int64_t kItemPrice = 5;        // units of an item's start and end: queries, first loads, result
constexpr int64_t kMinPart = 4;          // tiles: a shorter part costs more to merge than it saves
constexpr int64_t kMostUnits = 1 << 30;  // of a plan; longer ones count in coarser units
constexpr int32_t kNeverCut = 1 << 30;   // snap of batch-invariant plans

SPECDEC_HD int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// a / 2^shift, rounded up. The device planner divides no 64-bit numbers: that is a subroutine, with spills around it.
SPECDEC_HD int64_t ceil_shift(int64_t a, int shift) {
  return (a + (int64_t{1} << shift) - 1) >> shift;
}

// What the planner may know of a request; garbage counts as an empty one.
struct PlanRequest {
  int64_t items, units;  // row tiles over all heads; units of each
};
SPECDEC_HD PlanRequest plan_request(int64_t context_len, int64_t first, int64_t last, int64_t group, int64_t kv_heads,
                                    int64_t tile_rows, int64_t window) {
  const int64_t nodes = first >= 0 && last > first ? last - first : 0;
  if (nodes == 0) return {0, 0};
  const int64_t keys = (context_len > 0 ? context_len : 0) + nodes;
  int64_t tiles = ceil_div(keys, kTileKeys);
  if (window >= 0 && ceil_div(window + nodes, kTileKeys) + 1 < tiles) tiles = ceil_div(window + nodes, kTileKeys) + 1;
  const int shift = tile_rows == 16 ? 4 : tile_rows == 32 ? 5 : tile_rows == 64 ? 6 : 7;
  return {kv_heads * ceil_shift(nodes * group, shift), tiles + kItemPrice};
}

// One unit of the plan stands for 2^grain units.
SPECDEC_HD int plan_grain(int64_t total_units) {
  int grain = 0;
  while (total_units >> grain >= kMostUnits) grain++;
  return grain;
}

// Units of a worker. Lower bounds keep the traffic of partial results to about a quarter of the KV bytes (tile_rows / 4
// tiles a part) and the longest merge to 16 parts, or 32 where that would leave half of the workers idle.
SPECDEC_HD uint32_t plan_share(uint32_t total, uint32_t longest, uint32_t workers, int64_t tile_rows, int grain) {
  const auto over = [](uint32_t a, uint32_t b) { return a / b + (a % b != 0); };  // all in units of the plan
  const uint32_t even = over(total, workers), shortest = static_cast<uint32_t>(ceil_shift(kMinPart, grain));
  uint32_t least = static_cast<uint32_t>(ceil_shift(tile_rows / 4, grain));
  if (shortest > least) least = shortest;
  if (over(longest, 16) > least) least = over(longest, 16);
  const uint32_t half = workers > 1 ? workers / 2 : 1;
  if (total / least < half) {
    least = over(total, half) > shortest ? over(total, half) : shortest;
    if (over(longest, 32) > least) least = over(longest, 32);
  }
  return even > least ? even : least;
}

// Parts of the item that occupies units [first, first + units): part i belongs to worker first_worker + i.
struct ItemParts {
  int32_t first_worker, parts;
};
SPECDEC_HD ItemParts item_parts(int32_t first, int32_t units, int32_t share, int32_t snap) {
  const int32_t low = static_cast<int32_t>((static_cast<uint32_t>(first) + snap + share - 1) / share);
  const int32_t high = units < snap ? -1 : (first + units - snap) / share;
  if (low > high) return {(first + units / 2) / share, 1};
  return {low - 1, high - low + 2};
}

// First unit, counted from the item's own, of part `part`.
SPECDEC_HD int32_t part_begin(const ItemParts& item, int32_t part, int32_t first, int32_t units, int32_t share) {
  if (part <= 0) return 0;
  return part >= item.parts ? units : (item.first_worker + part) * share - first;
}

}  // namespace specdec
