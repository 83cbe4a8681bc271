// The tiles of one item on their way into shared memory.
//
// Three steps a tile, each a barrier or more ahead of the next, so that no latency is waited for:
//
//   ask       the page ids of the tile's 64 keys into a register (threads 0..63)       one tile before look_up
//   look_up   row offsets of keys, and on masked tiles the rows' visibility words      before the barrier
//   load      16-byte cp.async of K and V into the ring, one group a tile              after the barrier
#pragma once
#include "attention/attention_fragments.cuh"
#include "common/reduce.cuh"

namespace specdec {

// One row tile of one head of one request, and the tiles [begin, end) of its keys. Lies in shared memory: registers are
// for outputs.
struct Item {
  AttentionRequest request;
  int32_t head, row0, rows;  // rows: of the request and head; the tile has row0 .. row0 + kRows - 1 of them
  int32_t begin, end;        // this part's key tiles
  int32_t masked_from;       // tiles from here on hold tree slots (or lie behind the keys)
  int32_t masked_until;      // tiles before this are cut by some row's window
};

template <class Tile>
class TileLoader {
 public:
  using KV = typename Tile::KV;
  using Info = typename Tile::Info;

  __device__ __forceinline__ TileLoader(const AttentionParams& p, const Item& item, unsigned char* ring, Info* info)
      : p_(p), item_(item), ring_(ring), info_(info) {
    const int32_t row = item.row0 + static_cast<int32_t>(threadIdx.x);
    node_ = threadIdx.x < Tile::kRows && row < item.rows ? row / p.group : -1;
    k_head_ = reinterpret_cast<const KV*>(p.k_cache) + item.head * p.k_stride_head;
    v_head_ = reinterpret_cast<const KV*>(p.v_cache) + item.head * p.v_stride_head;
  }

  // Holds tree slots or a window's edge. Uniform over the block, and known without a look at memory.
  __device__ __forceinline__ bool masked(int32_t tile) const {
    return tile >= item_.masked_from || tile < item_.masked_until;
  }
  __device__ __forceinline__ Info& info(int slot) const { return info_[slot]; }
  __device__ __forceinline__ const unsigned char* keys(int stage) const { return ring_ + stage * Tile::kStage; }
  __device__ __forceinline__ const unsigned char* values(int stage) const {
    return ring_ + stage * Tile::kStage + Tile::kValues;
  }

  __device__ __forceinline__ void ask(int32_t tile) {
    page_ = -1;
    if (threadIdx.x >= kTileKeys || tile >= item_.end) return;
    const uint32_t position = static_cast<uint32_t>(tile) * kTileKeys + threadIdx.x;
    const uint32_t column = position / static_cast<uint32_t>(p_.page_size);
    row_ = position % static_cast<uint32_t>(p_.page_size);
    if (column < p_.max_pages) page_ = item_.request.page_row[column];
  }

  __device__ __forceinline__ void look_up(int32_t tile, int slot) {
    Info& here = info_[slot];
    if (threadIdx.x < kTileKeys) {
      const bool paged = page_ >= 0 && page_ < p_.num_pages;
      const int at = position_of(threadIdx.x);
      here.k_row[at] = paged ? (page_ * p_.k_stride_page + row_ * p_.k_stride_row) * Tile::kSize : -1;
      here.v_row[at] = paged ? (page_ * p_.v_stride_page + row_ * p_.v_stride_row) * Tile::kSize : -1;
      const uint32_t word = __ballot_sync(kFullWarp, paged);
      if (threadIdx.x % 32 == 0) here.paged[threadIdx.x / 32] = word;
    }
    if (masked(tile)) look_up_visible(tile, here);
  }

  __device__ __forceinline__ void load(int32_t tile, int slot, int stage) {
    if (tile < item_.end) {
      if (masked(tile))
        copy_tile<true>(info_[slot], stage);
      else
        copy_tile<false>(info_[slot], stage);
    }
    ptx::cp_async_commit();  // an empty group behind the last tile: groups count tiles
  }

 private:
  __device__ __forceinline__ void look_up_visible(int32_t tile, Info& here) {
    uint64_t visible = 0;
    if (node_ >= 0)
      visible = visible_keys(item_.request.tree, attention_query(p_, item_.request, node_), int64_t{tile} * kTileKeys);
    if (threadIdx.x < Tile::kRows || Tile::kRows < 32) spread_visible(visible, here);
    const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(visible));
    const uint32_t high = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(visible >> 32));
    if (threadIdx.x % 32 == 0) {
      here.needed[threadIdx.x / 32 * 2] = low;
      here.needed[threadIdx.x / 32 * 2 + 1] = high;
    }
  }

  // Of rows g and g + 8 each thread takes two of the four threads t that read their words. Whole warps.
  __device__ __forceinline__ void spread_visible(uint64_t visible, Info& here) {
    constexpr int kBits = Tile::kMaskUnit / 4;  // of a row, in a word
    const int row = ptx::in_place(threadIdx.x), half = row >> 3 & 1;
    const auto own = static_cast<uint32_t>(half ? visible >> 32 : visible);
    const uint32_t other = __shfl_xor_sync(kFullWarp, static_cast<uint32_t>(half ? visible : visible >> 32), 8);
    if (row >= Tile::kRows) return;
    const uint32_t lower = half ? other : own, upper = half ? own : other;
    const int warp = Tile::kSplitKeys ? 0 : row / (16 * Tile::kRowTiles), m = row / 16 % Tile::kRowTiles;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int unit = 0; unit < Tile::kMaskUnits; unit++) {
        const int shift = 16 * i + unit * kBits;
        const uint32_t bits = (lower >> shift & ((1u << kBits) - 1)) | (upper >> shift & ((1u << kBits) - 1)) << kBits;
        here.visible[mask_index<Tile>(warp, row % 8, 2 * half + i, unit, m)] =
            static_cast<typename Tile::MaskWord>(mask_word_of(bits));
      }
  }

  // Keys without a page, and on masked tiles keys that no row sees, become zeros, whatever lies there.
  template <bool kMasked>
  __device__ __forceinline__ void copy_tile(const Info& here, int stage) {
    uint64_t needed = 0;
    if constexpr (kMasked) {
      for (int w = 0; w < kMmaWarps; w++)
        needed |= static_cast<uint64_t>(here.needed[2 * w + 1]) << 32 | here.needed[2 * w];
    }
    unsigned char* target = ring_ + stage * Tile::kStage;
    copy_rows<kMasked, Tile::D, false>(target, k_head_, here.k_row, needed);
    copy_rows<kMasked, Tile::DV, true>(target, v_head_, here.v_row, needed);
  }
  template <bool kMasked, int kDim, bool kValues>
  __device__ __forceinline__ void copy_rows(unsigned char* target, const KV* head, const int64_t (&rows)[kTileKeys],
                                            uint64_t needed) {
    constexpr int kChunks = kDim * Tile::kSize / 16, kCopies = kTileKeys * kChunks, kStep = kMmaThreads / kChunks;
    constexpr bool kEven =
        kMmaThreads % kChunks == 0;  // then a thread keeps its column, and everything is one addition
    const int thread = threadIdx.x;
    int row = thread / kChunks, chunk = thread % kChunks;
    // kStep is a power of two then, and key_at moves bits: key_at(row + pass * kStep) is the sum of both parts' keys.
    const uint64_t wanted = kMasked && kEven ? needed >> key_at(row) : 0;
#pragma unroll
    for (int pass = 0; pass < (kCopies + kMmaThreads - 1) / kMmaThreads; pass++) {
      if (!kEven) {
        const int c = pass * kMmaThreads + thread;
        if (kCopies % kMmaThreads && c >= kCopies) break;
        row = c / kChunks, chunk = c % kChunks;
      }
      const int at = kEven ? row + pass * kStep : row;
      const int64_t offset = rows[at];
      const bool seen = kEven ? wanted >> key_at(pass * kStep) & 1 : needed >> key_at(at) & 1;
      const bool valid = offset >= 0 && (!kMasked || seen);
      const char* source = reinterpret_cast<const char*>(head) + chunk * 16 + (valid ? offset : 0);
      ptx::cp_async_16(target + (kValues ? Tile::value_byte(at, chunk) : Tile::key_byte(at, chunk)), source, valid);
    }
  }

  const AttentionParams& p_;
  const Item& item_;
  unsigned char* ring_;
  Info* info_;
  const KV *k_head_, *v_head_;
  int32_t page_ = -1;
  uint32_t row_ = 0;
  int32_t node_;
};

}  // namespace specdec
