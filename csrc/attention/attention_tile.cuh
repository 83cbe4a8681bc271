// Shapes of the tensor-core kernel: which warp has which part of a tile, and what lies where in shared memory.
//
//   variant  rows   a warp has                      scores a warp holds   keys a step
//   S        16     all rows, 16 keys of each tile  16 x 16               16
//   M        32     all rows, 16 keys of each tile  32 x 16               16
//   L        64     16 rows, all 64 keys            16 x 64 (D 256: 16 x 32, twice a tile)
//   XL       128    32 rows, all 64 keys            32 x 32, twice a tile
//
//   S, M:          keys 0..15   16..31   32..47   48..63         L, XL:        keys 0 .............. 63
//        rows      warp 0       warp 1   warp 2   warp 3              rows     warp 0
//                  (four softmaxes, merged at the end)                         warp 1 .. warp 3
//
// Keys lie in a tile in an order that gives a thread of an mma neighbouring ones, so that the word of a row, shifted
// once, holds its bits side by side: position 8 n + 2 t + i (fragment n of 8 keys, thread t of four, column i) has key
// 16 t + 2 n + i.
//
// Shared memory: Q | ring of K and V stages (reused by the merge of S and M) | ring of TileInfo, one longer.
// Rows are padded to an odd number of 16-byte units: ldmatrix reads eight of them without bank conflicts.
#pragma once
#include "attention/attention_params.cuh"

namespace specdec {

constexpr int kMmaThreads = 128, kMmaWarps = 4, kMaxStages = 4;

// Shared memory that a block can have on the architecture being compiled for.
#if defined(__CUDA_ARCH__)
constexpr int64_t kSharedHere = shared_of_architecture(__CUDA_ARCH__ / 10);
#else
constexpr int64_t kSharedHere = 227 * 1024;
#endif

SPECDEC_HD constexpr int key_at(int position) {
  return (position >> 1 & 3) * 16 + (position >> 3) * 2 + (position & 1);
}
SPECDEC_HD constexpr int position_of(int key) {
  return (key >> 1 & 7) * 8 + (key >> 4) * 2 + (key & 1);
}

// The threads that do an item's arithmetic and bookkeeping together: here the whole block. Unsigned as threadIdx.x is:
// a signed thread() / 32 is another value to the compiler, which keeps both, and XL has no register left for that.
struct WholeBlock {
  static constexpr int kThreads = kMmaThreads;
  __device__ __forceinline__ static uint32_t thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
};

// Either float8 format; which one is a run-time flag, since only the widening of a fragment differs.
struct Float8 {
  uint8_t bits;
};

template <class Tile>
struct TileInfo;

template <class T_, class KV_, int D_, int DV_, int kRows_>
struct MmaTile {
  using T = T_;
  using KV = KV_;
  using Team = WholeBlock;
  using Info = TileInfo<MmaTile>;
  static constexpr int D = D_, DV = DV_, kRows = kRows_;
  static constexpr bool kFloat8 = sizeof(KV) == 1, kSplitKeys = kRows <= 32;
  static constexpr int kRowTiles = kSplitKeys ? kRows / 16 : kRows / 64;  // of 16 rows, a warp
  static constexpr int kStepKeys = kSplitKeys ? 16 : kRowTiles * DV >= 256 ? 32 : 64;
  static constexpr int kSteps = kSplitKeys ? 1 : kTileKeys / kStepKeys;
  static constexpr int kFragments = kStepKeys / 8;  // of 8 keys
  static constexpr bool kQInRegisters = kRowTiles == 1 && D <= 128;

  static constexpr int padded(int bytes) { return bytes + (bytes / 16 % 2 ? 32 : 16); }
  static constexpr int kSize = sizeof(KV);
  static constexpr int kQRow = padded(2 * D), kKRow = padded(kSize * D), kVRow = padded(kSize * DV);
  static constexpr int kStage = kTileKeys * (kKRow + kVRow);
  // Byte of a stage that 16-byte chunk `chunk` of a row of K, or of V, lies at.
  static constexpr int kValues = kTileKeys * kKRow;
  SPECDEC_HD static constexpr int key_byte(int row, int chunk) { return row * kKRow + chunk * 16; }
  SPECDEC_HD static constexpr int value_byte(int row, int chunk) { return kValues + row * kVRow + chunk * 16; }
  static constexpr int kMergeRow = DV + 8;  // floats: float2 stores without bank conflicts
  static constexpr int kMerge = kSplitKeys ? kMmaWarps * kRows * kMergeRow * 4 : 0;
  static constexpr int kMaskUnit = kStepKeys == 16 ? 16 : 32, kMaskUnits = kTileKeys / kMaskUnit;
  static constexpr int kStepUnits = kStepKeys / kMaskUnit;
  using MaskWord = std::conditional_t<kMaskUnit == 16, uint16_t, uint32_t>;
  static constexpr int kMaskWords = (kSplitKeys ? 1 : kMmaWarps) * 32 * kMaskUnits * kRowTiles;
  SPECDEC_HD static constexpr int ring(int stages) { return stages * kStage > kMerge ? stages * kStage : kMerge; }
  SPECDEC_HD static constexpr int bytes(int stages) {
    return kRows * kQRow + ring(stages) + (stages + 1) * static_cast<int>(sizeof(TileInfo<MmaTile>));
  }
  // The ring is sized for two blocks a multiprocessor; registers (outputs dominate) must allow them.
  static constexpr int kMinBlocks = 2;
  static constexpr int kSlot = kRows * (DV + 2);  // floats of a partial result: outputs, then tops, then sums
};

// Visibility of a masked tile, as the softmax wants it. A word holds what one thread of an mma may see of a unit of 16
// or 32 keys in its two rows of a row tile: bit e is element e = half * kMaskUnit / 4 + 2 n + i of its scores (row g +
// 8 half, fragment n of the unit, column i). Six bits a byte, 1 to 6: R2P moves as many to predicates at once (a test
// of bit 0 compiles to something else).
SPECDEC_HD constexpr int mask_bit(int element) {
  return element / 6 * 8 + element % 6 + 1;
}
SPECDEC_HD constexpr uint32_t mask_word_of(uint32_t elements) {
  return (elements & 0x3fu) << 1 | (elements & 0xfc0u) << 3 | (elements & 0xf000u) << 5;
}

// What loads and softmax need to know of a tile; written one barrier before its loads start.
template <class Tile>
struct alignas(16) TileInfo {
  int64_t k_row[kTileKeys], v_row[kTileKeys];  // by position: bytes from the head's first row; < 0: no page
  // Masked tiles: [warps with rows of their own][row g][thread t][unit][row tile]; side by side what a thread reads at
  // once.
  alignas(16) typename Tile::MaskWord visible[Tile::kMaskWords];
  uint32_t needed[2 * kMmaWarps];  // masked tiles: keys that some row of a warp's share sees
  uint32_t paged[2];               // keys that have a page
};

template <class Tile>
__device__ __forceinline__ uint64_t shown_keys(const TileInfo<Tile>& info) {
  return static_cast<uint64_t>(info.paged[1]) << 32 | info.paged[0];
}

// The running state of a row tile in one warp's registers.
template <class Tile>
struct WarpState {
  float o[Tile::kRowTiles][Tile::DV / 8][4], top[Tile::kRowTiles][2], sum[Tile::kRowTiles][2];
  uint32_t q[Tile::kQInRegisters ? Tile::D / 16 : 1][4];
};

// Row of the tile that a warp's row tile m, half h (rows g and g + 8 of an mma) belongs to.
template <class Tile>
__device__ __forceinline__ int row_of(int warp, int m, int half, int lane) {
  return (Tile::kSplitKeys ? 0 : warp * 16 * Tile::kRowTiles) + m * 16 + half * 8 + lane / 4;
}
// Index in TileInfo::visible of the first word for a thread's rows.
template <class Tile>
__device__ __forceinline__ int mask_index(int warp, int g, int t, int unit, int m) {
  return ((((Tile::kSplitKeys ? 0 : warp) * 8 + g) * 4 + t) * Tile::kMaskUnits + unit) * Tile::kRowTiles + m;
}
// Column of element i of output fragment n. A float8 fragment pair interleaves even and odd columns
// (attention_fragments).
template <class Tile>
__device__ __forceinline__ int column_of(int n, int i, int lane) {
  const int t = lane % 4;
  return Tile::kFloat8 ? 16 * (n / 2) + 4 * t + 2 * i + n % 2 : 8 * n + 2 * t + i;
}

}  // namespace specdec
