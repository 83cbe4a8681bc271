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

// ---- what the ops get, checked (args.h)

struct CommitArgs {
  const int32_t* page_table;      // [requests, max_pages]
  const int32_t* context_lens;    // [requests]
  const int32_t* cu_nodes;        // [requests + 1]
  const int32_t* accepted_nodes;  // [requests, width]
  const int32_t* num_emitted;     // [requests]
  const int32_t* request_order;   // [handled], or null: all of them
  int32_t requests, handled, max_pages, width, page_size, num_pages;

  // n-th request to handle, -1: none.
  SPECDEC_HD int32_t request(int32_t n) const {
    const int32_t b = request_order ? request_order[n] : n;
    return b < requests ? b : -1;
  }
  SPECDEC_HD Move move(int32_t b, int32_t node, int32_t j) const {
    return accepted_move(page_table + int64_t{b} * max_pages, max_pages, page_size, num_pages, context_lens[b], node,
                         j);
  }
};

// context_len + num_emitted, held at the largest int32.
SPECDEC_HD int32_t advanced(int32_t context_len, int32_t num_emitted) {
  const int64_t sum = int64_t{context_len} + (num_emitted > 0 ? num_emitted : 0);
  return sum < 2147483647 ? static_cast<int32_t>(sum) : 2147483647;
}

struct TruncateArgs {
  const int32_t* limit;     // [requests]
  int32_t *tokens, *nodes;  // [requests, width]
  int32_t* emitted;         // [requests]
  int32_t requests, width;

  SPECDEC_HD int32_t kept(int32_t b) const {
    const int32_t count = emitted_count(emitted[b], width), cut = limit[b] > 0 ? limit[b] : 0;
    return count < cut ? count : cut;
  }
};

struct GatherArgs {
  const char* x;            // rows of `bytes`, x_stride apart
  char* out;                // [total] rows, out_stride apart
  const int32_t* cu_nodes;  // [requests + 1]
  const int32_t* nodes;     // [requests, width]
  const int32_t* emitted;   // [requests]
  int32_t* cu_out;          // [requests + 1]
  int64_t x_rows, x_stride, out_stride, bytes, total;
  int32_t requests, width;
};

struct PrepareArgs {
  const int32_t* tokens;                     // [requests, width]
  const int32_t *emitted, *context_lens;     // [requests]
  const int32_t* page_table;                 // [requests, max_pages]
  int32_t *roots, *ids, *positions, *slots;  // [requests], then [total] each
  int32_t* cu_tokens;                        // [requests + 1]
  int64_t total, position_offset;
  int32_t requests, width, max_pages, page_size;

  // Row `row` of the output is the i-th emitted token of request b.
  SPECDEC_HD void write(int64_t row, int32_t b, int32_t i) const {
    const int64_t at = int64_t{context_lens[b]} + position_offset + i;
    const bool valid = context_lens[b] >= 0 && at <= 2147483647;
    ids[row] = tokens[int64_t{b} * width + i];
    positions[row] = valid ? static_cast<int32_t>(at) : 0;
    slots[row] = valid ? slot_of(page_table + int64_t{b} * max_pages, max_pages, page_size, at) : -1;
  }
  SPECDEC_HD void write_tail(int64_t row) const {
    ids[row] = slots[row] = -1;
    positions[row] = 0;
  }
};

}  // namespace specdec
