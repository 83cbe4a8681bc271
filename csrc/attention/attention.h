// What a tree query may see, and the algebra of partial softmaxes: shared by every backend.
//
//   key position   0 ........ L-1 | L ............ L+S-1      L = context_len, S = query_start + number of queries
//                  context        | tree slots 0 .. S-1
//
// Tree row: the whole context and the slots whose bit is set in its mask words. Causal row: everything up to its own
// slot. A window cuts by depth: visible iff position_q - position_k < window.
#pragma once
#include <cstdint>

#include "common/planted.h"

namespace specdec {

constexpr int kTileKeys = 64;  // keys a tile: one 64-bit word of visibility a query row
constexpr int kMaxHeadDim = 256;

struct TreeRequest {
  int64_t context_len, num_slots;
  const int32_t* slot_positions;  // [num_slots], read only for tree rows with window >= 0
  int32_t window;                 // < 0: none
};

struct TreeQuery {
  const int32_t* words;  // mask row, num_words words; null: causal
  int32_t num_words;
  int64_t slot, position;  // position is read only with window >= 0
};

// The low n bits, n clamped to 0..64.
SPECDEC_HD uint64_t low_bits(int64_t n) {
  return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// Mask word w of a row, zero outside.
SPECDEC_HD uint64_t mask_word(const TreeQuery& query, int64_t w) {
  if (planted(Bug::mask_ignored)) return 0xffffffffu;
  if (planted(Bug::mask_word_off_by_one)) w += 1;
  if (w < 0 || w >= query.num_words) return 0;
  const uint32_t word = static_cast<uint32_t>(query.words[w]);
  if (!planted(Bug::mask_bit_order)) return word;
  uint32_t reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (word >> i & 1u) << (31 - i);
  return reversed;
}

// Bits of tree slots first .. first+63 (first may be negative): a window of the mask row, three words wide.
SPECDEC_HD uint64_t slot_bits(const TreeQuery& query, int64_t first, int64_t num_slots) {
  if (first <= -64 || first >= num_slots) return 0;
  int64_t w = first >= 0 ? first / 32 : -((-first + 31) / 32);
  int shift = static_cast<int>(first - w * 32);  // 0..31
  uint64_t bits = (mask_word(query, w) | mask_word(query, w + 1) << 32) >> shift;
  if (shift) bits |= mask_word(query, w + 2) << (64 - shift);
  return bits & low_bits(num_slots - first) & ~low_bits(-first);
}

// Bit i: may the query attend key position first + i?
SPECDEC_HD uint64_t visible_keys(const TreeRequest& request, const TreeQuery& query, int64_t first) {
  const int64_t length = request.context_len;
  uint64_t tree = 0, dense;
  if (query.words) {
    dense = low_bits(length - first);
    tree = slot_bits(query, first - length, request.num_slots);
  } else {
    int64_t end = length + (query.slot + 1 < request.num_slots ? query.slot + 1 : request.num_slots);
    dense = low_bits(end - first);
  }
  if (request.window < 0) return dense | tree;
  dense &= ~low_bits(query.position - request.window + 1 - first);
#pragma unroll 1
  for (int i = 0; i < kTileKeys; i++) {
    if (!(tree >> i & 1)) continue;
    const int64_t position =
        planted(Bug::window_by_slot) ? first + i : int64_t{request.slot_positions[first + i - length]};
    if (query.position - position >= request.window) tree &= ~(uint64_t{1} << i);
  }
  return dense | tree;
}

}  // namespace specdec
