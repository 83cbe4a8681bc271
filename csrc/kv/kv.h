// Which KV rows a step moves: the math that every backend of commit_kv, copy_pages and the hand-over ops shares.
//
// After a step the accepted nodes of request b (root first) sit at cache positions L + node; commit_kv brings them to
// L, L + 1, ... Nodes along a path increase, so the i-th accepted node is never below i and every row moves down or
// stays. Moved in order of the path, a row is read before anything is written over it:
//
//   accepted   0  2  3  4            position  L  L+1 L+2 L+3 L+4 L+5
//   moves      -  2>1 3>2 4>3                  root x  2   3   4   x     ->   root 2  3  4
#pragma once
#include <cstdint>

#include "common/hostdevice.h"
#include "common/paged_kv.h"

namespace specdec {

// Entries of `accepted` that count: num_emitted (root and accepted drafts), cut to the array, to the request's nodes
// and at the first entry that does not rise, so that garbage can only shorten a path.
SPECDEC_HD int32_t path_length(const int32_t* accepted, int32_t num_emitted, int32_t width, int32_t count) {
  int32_t limit = num_emitted < width ? num_emitted : width, previous = -1, length = 0;
  while (length < limit && accepted[length] > previous && accepted[length] < count) previous = accepted[length++];
  return length;
}

// Tokens emitted by a request according to a [B, width] array: garbage counts are cut to 0..width.
SPECDEC_HD int32_t emitted_count(int32_t num_emitted, int32_t width) {
  return num_emitted < 0 ? 0 : num_emitted < width ? num_emitted : width;
}

// Row number page * page_size + row of a cache position; -1 where the table, the cache or int32 has no such page.
SPECDEC_HD int32_t cache_slot(const int32_t* page_row, int32_t max_pages, int32_t page_size, int32_t num_pages,
                              int64_t position) {
  int32_t slot = slot_of(page_row, max_pages, page_size, position);
  return slot >= 0 && slot / page_size < num_pages ? slot : -1;
}

struct Move {
  int32_t source, target;  // slots; source = target or either -1: nothing to do
};

// The move of the j-th accepted node.
SPECDEC_HD Move accepted_move(const int32_t* page_row, int32_t max_pages, int32_t page_size, int32_t num_pages,
                              int32_t context_len, int32_t node, int32_t j) {
  Move move = {-1, -1};
  if (node == j || context_len < 0) return move;
  move.source = cache_slot(page_row, max_pages, page_size, num_pages, int64_t{context_len} + node);
  move.target = cache_slot(page_row, max_pages, page_size, num_pages, int64_t{context_len} + j);
  return move;
}

SPECDEC_HD bool moves(Move move) {
  return move.source >= 0 && move.target >= 0 && move.source != move.target;
}

}  // namespace specdec
