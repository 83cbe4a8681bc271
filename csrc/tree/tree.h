// Draft trees, one request at a time: the math every backend shares (g++, nvcc, CUDA-on-CPU).
//
// A tree is its `parents` array: node 0 is the root (the last committed token, parent -1) and every other node follows
// its parent, so no walk is ever needed to check it and one forward pass derives everything:
//
//   parents       -1  0  0  1  1  2          0          first_child    1  3  5 -1 -1 -1
//   depths         0  1  1  2  2  2         / \         next_sibling  -1  2 -1  4 -1 -1
//   row 0 bits     1                       1   2        mask[i] = mask[parent] | 1 << i, 32 nodes a word,
//   row 3 bits     1  1  .  1             / \   \       least significant bit first
//   row 5 bits     1  .  1  .  .  1      3   4   5
//
// Siblings keep their order of creation: running backwards, each node becomes its parent's first child and the former
// first child its next sibling, which needs no scratch memory.
#pragma once
#include <cstdint>

#include "common/flags.h"
#include "common/hostdevice.h"

namespace specdec {

constexpr int32_t kMaxTreeNodes = 1024;  // nodes of one request, root included

SPECDEC_HD int32_t mask_words(int32_t nodes) {
  return (nodes + 31) / 32;
}

// Rows [begin, begin + count) of a packed batch belong to one request.
struct NodeRange {
  int32_t begin, count, flags;
};

// Rows of request b. Offsets that decrease or leave [0, total_nodes] give an empty, flagged range, so that a fault
// never reaches the rows of another request.
SPECDEC_HD NodeRange node_range(const int32_t* cu_nodes, int64_t b, int64_t total_nodes) {
  int32_t begin = cu_nodes[b], end = cu_nodes[b + 1];
  NodeRange range;
  bool valid = begin >= 0 && end >= begin && end <= total_nodes;
  range.begin = valid ? begin : 0;
  range.count = valid ? end - begin : 0;
  range.flags = valid ? 0 : kFlagIndex;
  return range;
}

// First row behind the batch. If the last request's offsets are unsound, the rows behind the last sound one are
// nobody's.
SPECDEC_HD int64_t tail_begin(const int32_t* cu_nodes, int64_t requests, int64_t total_nodes) {
  for (int64_t b = requests; b >= 0 && b >= requests - 1; b--)
    if (cu_nodes[b] >= 0 && cu_nodes[b] <= total_nodes && (b == 0 || cu_nodes[b] >= cu_nodes[b - 1]))
      return cu_nodes[b];
  return total_nodes;
}

// Output arrays, one row a node: [N], the mask [N, words].
struct TreeRows {
  int32_t *parents, *tree_mask, *depths, *positions, *first_child, *next_sibling;
  int32_t words;
};

// The parent a node may name: -1 for the root, an earlier node for the others.
SPECDEC_HD bool parent_valid(int32_t node, int32_t parent) {
  return node == 0 ? parent == -1 : parent >= 0 && parent < node;
}

// A context length to which `nodes` positions can be added.
SPECDEC_HD bool context_valid(int32_t context_len, int32_t nodes) {
  return context_len >= 0 && context_len <= 2147483647 - nodes;
}

// A row that is nobody's: ids -1, values 0. Rows behind the batch and the nodes of a flagged request read so.
SPECDEC_HD void write_inert_node(const TreeRows& out, int64_t row) {
  out.parents[row] = out.first_child[row] = out.next_sibling[row] = -1;
  out.depths[row] = out.positions[row] = 0;
  for (int32_t w = 0; w < out.words; w++) out.tree_mask[row * out.words + w] = 0;
}

// A root alone: it sees itself. Without a column (max_nodes = 0) it has no bit either.
SPECDEC_HD void write_root(const TreeRows& out, int64_t row, int32_t position) {
  write_inert_node(out, row);
  out.positions[row] = position;
  if (out.words > 0) out.tree_mask[row * out.words] = 1;
}

// Parent of node i according to its mask row: the latest ancestor, which is the highest bit below i. -1 if there is
// none.
SPECDEC_HD int32_t parent_of_mask_row(const int32_t* mask_row, int32_t i) {
  for (int32_t w = i / 32; w >= 0; w--) {
    uint32_t bits = static_cast<uint32_t>(mask_row[w]);
    if (w == i / 32) bits &= (1u << (i % 32)) - 1u;
    for (int32_t j = 31; bits != 0 && j >= 0; j--)
      if (bits >> j & 1u) return w * 32 + j;
  }
  return -1;
}

// Whether row i is its parent's row plus its own bit: what makes a mask a tree. Bits at or above `count` are ignored.
SPECDEC_HD bool mask_row_valid(const int32_t* mask_row, const int32_t* parent_row, int32_t i, int32_t count) {
  for (int32_t w = 0; w < mask_words(count); w++) {
    uint32_t want = parent_row ? static_cast<uint32_t>(parent_row[w]) : 0u;
    if (w == i / 32) want |= 1u << (i % 32);
    uint32_t used = w == count / 32 ? (1u << (count % 32)) - 1u : 0xffffffffu;
    if ((static_cast<uint32_t>(mask_row[w]) ^ want) & used) return false;
  }
  return true;
}

// ---- one request, serially, O(count * words): the CPU op, and the shape of the truth for parallel kernels

// Every parent named before use, nothing too deep: 0, or the flags of a request that must be reduced to its root.
SPECDEC_HD int32_t check_parents(const int32_t* parents, int32_t count, int32_t max_nodes) {
  if (count > max_nodes) return kFlagTree;
  uint32_t bad = count > 0 && parents[0] != -1;
  for (int32_t i = 1; i < count; i++) bad |= static_cast<uint32_t>(parents[i]) >= static_cast<uint32_t>(i);
  return bad ? kFlagTree : 0;
}

// Root kept, the other rows inert.
SPECDEC_HD void reduce_to_root(const TreeRows& out, NodeRange range, int32_t context_len) {
  for (int32_t i = 1; i < range.count; i++) write_inert_node(out, int64_t{range.begin} + i);
  if (range.count > 0) write_root(out, range.begin, context_len > 0 ? context_len : 0);
}

// Writes every row of the request and returns its flags. `parents` points at the request's first node.
SPECDEC_HD int32_t build_request(const int32_t* parents, NodeRange range, int32_t context_len, int32_t max_nodes,
                                 int32_t max_depth, const TreeRows& all) {
  int32_t flags = range.flags | check_parents(parents, range.count, max_nodes);
  if (!context_valid(context_len, range.count)) flags |= kFlagIndex;
  if (flags) {
    reduce_to_root(all, range, context_len);
    return flags;
  }
  const int32_t words = all.words, count = range.count;
  TreeRows out = {all.parents + range.begin,
                  all.tree_mask + int64_t{range.begin} * words,
                  all.depths + range.begin,
                  all.positions + range.begin,
                  all.first_child + range.begin,
                  all.next_sibling + range.begin,
                  words};
  int32_t deepest = 0;
  for (int32_t i = 0; i < count; i++) {
    int32_t parent = i == 0 ? 0 : parents[i], depth = i == 0 ? 0 : out.depths[parent] + 1;
    deepest = depth > deepest ? depth : deepest;
    out.parents[i] = parents[i];
    out.depths[i] = depth;
    out.positions[i] = context_len + depth;
    out.first_child[i] = -1;
    int32_t* row = out.tree_mask + int64_t{i} * words;
    const int32_t* above = out.tree_mask + int64_t{parent} * words;
    int32_t known = i == 0 ? 0 : parent / 32 + 1;  // words of the parent's row that can be set
    for (int32_t w = 0; w < known; w++) row[w] = above[w];
    for (int32_t w = known; w < words; w++) row[w] = 0;
    row[i / 32] = static_cast<int32_t>(static_cast<uint32_t>(row[i / 32]) | 1u << (i % 32));
  }
  if (deepest > max_depth) {
    reduce_to_root(all, range, context_len);
    return kFlagTree;
  }
  for (int32_t i = count - 1; i > 0; i--) {
    out.next_sibling[i] = out.first_child[parents[i]];
    out.first_child[parents[i]] = i;
  }
  if (count > 0) out.next_sibling[0] = -1;
  return 0;
}

// Node i of a chain of `count` nodes.
SPECDEC_HD void write_chain_node(const TreeRows& out, int64_t row, int32_t i, int32_t count, int32_t context_len) {
  out.parents[row] = i - 1;
  out.depths[row] = i;
  out.positions[row] = context_len + i;
  out.first_child[row] = i + 1 < count ? i + 1 : -1;
  out.next_sibling[row] = -1;
  for (int32_t w = 0; w < out.words; w++) {
    int32_t set = i + 1 - 32 * w;  // bits of this word that lie at or below i
    uint32_t bits = set >= 32 ? 0xffffffffu : set <= 0 ? 0u : (1u << set) - 1u;
    out.tree_mask[row * out.words + w] = static_cast<int32_t>(bits);
  }
}

// How many nodes a chain request gets: num_drafts + 1 (num_drafts = -1: none at all). What does not fit is flagged and
// reduced to the root, or to nothing where not even that fits.
struct ChainSize {
  int32_t count, flags;
};
SPECDEC_HD ChainSize chain_size(int32_t num_drafts, int32_t context_len, int32_t max_nodes, int64_t rows_left) {
  ChainSize size = {0, 0};
  if (num_drafts == -1) return size;
  int64_t wanted = int64_t{num_drafts} + 1;
  if (num_drafts < -1 || wanted > max_nodes) size.flags = kFlagTree;
  if (wanted > rows_left || !context_valid(context_len, max_nodes)) size.flags |= kFlagIndex;
  size.count = static_cast<int32_t>(size.flags ? (rows_left > 0 && num_drafts > -1 ? 1 : 0) : wanted);
  return size;
}

}  // namespace specdec
