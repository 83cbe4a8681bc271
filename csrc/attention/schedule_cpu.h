// How one tree_attention call is cut into work items, and the memory it reuses from call to call.
//
//   block = (request, some KV heads, up to 256 rows a head)        item = block x KV chunk (whole 64-key tiles)
//
// Rows are node-major: row r of a head is node r / group, query head kv_head * group + r % group, so neighbours share a
// mask row. The heads of a block take turns on each tile: in an NHD cache their rows lie side by side, so memory is
// read in long runs and each page is translated once. Chunks exist so that few blocks still fill every thread; a
// block's chunks are merged in chunk order by whichever thread finishes last, so a result never depends on which thread
// ran what.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "args.h"
#include "tile_cpu.h"

namespace specdec {

// Grow-only memory, 64-byte aligned: nothing is allocated once the largest shape has been seen.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(base_);
    size_ = 0;  // also if there is no memory now: the next, smaller call asks again
    const size_t whole = (bytes + 4095) & ~size_t{4095};
    base_ = static_cast<char*>(std::aligned_alloc(4096, whole));
    if (!base_) throw std::bad_alloc();
    size_ = whole;
  }
  template <class T>
  T* take(int64_t count) {
    char* at = base_ + used_;
    used_ += bytes_for<T>(count);
    return reinterpret_cast<T*>(at);
  }
  template <class T>
  static size_t bytes_for(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) & ~size_t{63};
  }

 private:
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

struct TreeAttentionParams : AttentionCall {
  const TileKernels* kernels;
  Element q_element, kv_element;
  int num_splits;
};

struct Block {
  int32_t request, first_head, num_heads, first_node, num_nodes;  // nodes of this request
  int32_t first_tile, num_tiles, num_chunks, chunk_tiles;
  int32_t first_item;
  int64_t partials;  // offset of the block's partial results, in floats; unused with one chunk
};

constexpr int kBlockRowLimit = 256;     // rows of one head
constexpr int kBlockOutputs = 1 << 17;  // float32 outputs of a block (512 KiB): they stay in the second-level cache
constexpr int kInvariantTiles = 32;     // batch_invariant: chunks of 2048 keys, whatever the batch
constexpr int kMinChunkTiles = 4;       // below 256 keys a chunk costs more to merge than it saves
constexpr int kItemsPerThread = 4;

inline int64_t nodes_per_block(const TreeAttentionParams& p, int64_t num_nodes) {
  int64_t most = kBlockRowLimit / p.group > 1 ? kBlockRowLimit / p.group : 1;
  int64_t blocks = (num_nodes + most - 1) / most;
  return blocks ? (num_nodes + blocks - 1) / blocks : 1;
}

// Tiles that hold a key some node of the block may see.
inline void block_tiles(const TreeAttentionParams& p, const AttentionRequest& r, Block& block) {
  const TileRange tiles = key_tiles(p, r, block.first_node, int64_t{block.first_node} + block.num_nodes - 1);
  block.first_tile = tiles.begin;
  block.num_tiles = tiles.end > tiles.begin ? tiles.end - tiles.begin : 0;
}

// Rows a head takes in a block's arrays: AMX tiles touch up to 31 rows behind the last one.
inline int64_t padded_rows(const TreeAttentionParams& p, int64_t nodes) {
  int64_t rows = nodes * p.group;
  return p.kernels->block_rows == kMaxBlockRows ? (rows + kMaxBlockRows - 1) / kMaxBlockRows * kMaxBlockRows : rows;
}

// KV heads of a block: as many as the cache holds outputs for.
inline int heads_per_block(const TreeAttentionParams& p, int64_t nodes, int heads_limit) {
  int64_t heads = kBlockOutputs / (padded_rows(p, nodes) * p.v_dim);
  if (heads > heads_limit) heads = heads_limit;
  return static_cast<int>(heads < 1 ? 1 : heads);
}

struct Schedule {
  int64_t num_blocks, num_items, partial_floats, rows;  // rows: the most that one block holds, padded
};

// visit(block) for every block, with the cost of its tiles filled in.
template <class Visit>
void for_each_block(const TreeAttentionParams& p, int heads_limit, Visit&& visit) {
  for (int64_t i = 0; i < p.num_order; i++) {
    int64_t b = p.request_order ? p.request_order[i] : i;
    if (b < 0 || b >= p.num_requests) continue;
    const AttentionRequest r = attention_request(p, static_cast<int32_t>(b));
    if (!r.num_nodes) continue;
    const int64_t step = nodes_per_block(p, r.num_nodes);
    const int heads = heads_per_block(p, step, heads_limit);
    for (int64_t first = 0; first < r.num_nodes; first += step)
      for (int head = 0; head < p.num_kv_heads; head += heads) {
        Block block = {};
        block.request = static_cast<int32_t>(b);
        block.first_head = head;
        block.num_heads = p.num_kv_heads - head < heads ? p.num_kv_heads - head : heads;
        block.first_node = static_cast<int32_t>(first);
        block.num_nodes = static_cast<int32_t>(r.num_nodes - first < step ? r.num_nodes - first : step);
        block_tiles(p, r, block);
        visit(block);
      }
  }
}

// Work of one tile of a block: packing costs about as much as 8 rows do.
inline int64_t tile_cost(const TreeAttentionParams& p, const Block& block) {
  return static_cast<int64_t>(block.num_heads) * (block.num_nodes * p.group + 8);
}

// How many heads may share a block: the choice with the least estimated work, in units of one row against one tile.
// Many heads read the cache in long runs; few heads make enough blocks to fill the threads without cutting them along
// the keys, and a cut costs each row its partial result, written and merged (measured: half a tile of that row).
inline int choose_heads_limit(const TreeAttentionParams& p, int threads) {
  if (threads == 1) return p.num_kv_heads;
  const int64_t items = static_cast<int64_t>(threads) * kItemsPerThread;
  const int64_t row_bytes = p.head_dim * element_bytes(p.kv_element);
  const bool side_by_side = p.k_stride_head < p.k_stride_row;  // the heads of a key, as in an NHD cache
  int64_t least = INT64_MAX;
  int best = p.num_kv_heads;
  for (int limit = p.num_kv_heads;; limit = (limit + 1) / 2) {
    const int64_t run = side_by_side ? limit * row_bytes : 2048;
    const int64_t short_run = run < 2048 ? 2048 / run - 1 : 0;  // rows that a tile read in short runs costs more
    int64_t blocks = 0, cost = 0, cut = 0, most_items = 0;
    for_each_block(p, limit, [&](const Block& block) {
      blocks++;
      cost += block.num_tiles * (tile_cost(p, block) + block.num_heads * short_run);
      cut += static_cast<int64_t>(block.num_heads) * block.num_nodes * p.group;
      most_items += block.num_tiles / kMinChunkTiles + 1;
    });
    const int64_t chunks = blocks ? (items + blocks - 1) / blocks : 1;
    if (chunks > 1) cost += cut * chunks / 2;
    if (most_items < items) cost += cost;  // threads would stand idle
    if (cost < least) {
      least = cost;
      best = limit;
    }
    if (limit == 1) return best;
  }
}

inline int64_t count_blocks(const TreeAttentionParams& p, int heads_limit) {
  int64_t blocks = 0;
  for_each_block(p, heads_limit, [&](const Block&) { blocks++; });
  return blocks;
}

// Fills blocks[count_blocks(p, heads_limit)].
inline Schedule make_schedule(const TreeAttentionParams& p, int threads, int heads_limit, Block* blocks) {
  Schedule schedule = {};
  int64_t cost = 0;
  for_each_block(p, heads_limit, [&](const Block& block) {
    blocks[schedule.num_blocks++] = block;
    cost += block.num_tiles * tile_cost(p, block);
  });
  const int64_t share = cost / (static_cast<int64_t>(threads) * kItemsPerThread) + 1;
  for (int64_t i = 0; i < schedule.num_blocks; i++) {
    Block& block = blocks[i];
    int64_t tiles = share / tile_cost(p, block);
    if (p.num_splits > 0)
      tiles = (block.num_tiles + p.num_splits - 1) / p.num_splits;
    else if (threads == 1)
      tiles = block.num_tiles;
    else if (tiles < kMinChunkTiles)
      tiles = kMinChunkTiles;
    if (p.batch_invariant) tiles = kInvariantTiles;
    if (tiles < 1) tiles = 1;
    // Chunk borders of batch_invariant calls lie at fixed key positions: the first chunk may start inside one.
    int64_t lead = p.batch_invariant ? block.first_tile % kInvariantTiles : 0;
    block.num_chunks = static_cast<int32_t>((lead + block.num_tiles + tiles - 1) / tiles);
    if (block.num_chunks < 1) block.num_chunks = 1;
    block.chunk_tiles = static_cast<int32_t>(tiles);
    if (!p.batch_invariant) block.chunk_tiles = (block.num_tiles + block.num_chunks - 1) / block.num_chunks;
    block.first_item = static_cast<int32_t>(schedule.num_items);
    block.partials = schedule.partial_floats;
    schedule.num_items += block.num_chunks;
    int64_t rows = block.num_heads * padded_rows(p, block.num_nodes);
    if (rows > schedule.rows) schedule.rows = rows;
    if (block.num_chunks > 1) schedule.partial_floats += block.num_chunks * rows * (p.v_dim + 2);
  }
  return schedule;
}

}  // namespace specdec
