// One work item: the rows of a block against the tiles of a KV chunk, read straight from the pages; and the merge of a
// block's chunks.
#pragma once
#include <cmath>
#include <cstring>

#include "common/paged_kv.h"
#include "schedule_cpu.h"

namespace specdec {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Addresses of a tile's 64 keys; bit i of `live` is clear where there is none (behind the end, or no valid page).
struct TileRows {
  const char *k[kTileKeys], *v[kTileKeys];
  uint64_t live;
};

class ItemWorker {
 public:
  explicit ItemWorker(const TreeAttentionParams& p) : p_(p), kernels_(*p.kernels) {
    static thread_local Arena arena;
    int64_t rows = static_cast<int64_t>(kBlockRowLimit > p.group ? kBlockRowLimit : p.group);
    int64_t unit_bytes = 4 / kernels_.pack;
    int64_t q_units = rows * p.head_dim / kernels_.pack, k_units = int64_t{kTileKeys} * p.head_dim / kernels_.pack,
            v_units = int64_t{kTileKeys} * p.v_dim / kernels_.pack;
    staged_ = p.kv_element != (kernels_.pack == 1 ? Element::float32 : Element::bfloat16);
    int64_t stage = staged_ ? kTileKeys * unit_bytes : 0;
    arena.reserve(Arena::bytes_for<uint32_t>(q_units) + Arena::bytes_for<uint32_t>(k_units) +
                  Arena::bytes_for<uint32_t>(v_units) + Arena::bytes_for<float>(rows * p.v_dim) +
                  Arena::bytes_for<float>(rows) + Arena::bytes_for<float>(rows * kLanes) +
                  Arena::bytes_for<uint64_t>(rows) + Arena::bytes_for<char>(kMaxHeadDim * 4) +
                  Arena::bytes_for<char>(stage * p.head_dim) + Arena::bytes_for<char>(stage * p.v_dim));
    q_ = arena.take<uint32_t>(q_units);
    packed_k_ = arena.take<uint32_t>(k_units);
    packed_v_ = arena.take<uint32_t>(v_units);
    out_ = arena.take<float>(rows * p.v_dim);
    row_max_ = arena.take<float>(rows);
    row_sum_ = arena.take<float>(rows * kLanes);
    visible_ = arena.take<uint64_t>(rows);
    zeros_ = arena.take<char>(kMaxHeadDim * 4);
    std::memset(zeros_, 0, kMaxHeadDim * 4);
    stage_k_ = arena.take<char>(stage * p.head_dim);
    stage_v_ = arena.take<char>(stage * p.v_dim);
  }

  // Results go to `partials` (chunk after chunk: out, maxima, sums) or, with a single chunk, to the output.
  void run(const Block& block, int chunk, float* partials) {
    const RequestShape shape = request_shape(p_, block.request);
    const int rows = block.num_nodes * p_.group;
    load_queries(block, shape);
    std::memset(out_, 0, sizeof(float) * rows * p_.v_dim);
    std::memset(row_sum_, 0, sizeof(float) * rows * kLanes);
    for (int r = 0; r < rows; r++) row_max_[r] = -INFINITY;

    int64_t base = block.first_tile;
    if (p_.batch_invariant) base -= block.first_tile % kInvariantTiles;
    int64_t tile = base + static_cast<int64_t>(chunk) * block.chunk_tiles, end = tile + block.chunk_tiles;
    if (tile < block.first_tile) tile = block.first_tile;
    if (end > block.first_tile + block.num_tiles) end = block.first_tile + block.num_tiles;
    attend_tiles(block, shape, tile, end);

    if (block.num_chunks == 1) {
      for (int r = 0; r < rows; r++) finish_row(block, shape, r, out_ + r * p_.v_dim, row_max_[r], sum_row(r));
      return;
    }
    float* part = partials + block.partials + static_cast<int64_t>(chunk) * rows * (p_.v_dim + 2);
    std::memcpy(part, out_, sizeof(float) * rows * p_.v_dim);
    std::memcpy(part + rows * p_.v_dim, row_max_, sizeof(float) * rows);
    for (int r = 0; r < rows; r++) part[rows * (p_.v_dim + 1) + r] = sum_row(r);
  }

  // Chunks in order, so that the sum does not depend on who finished when.
  void merge(const Block& block, const float* partials) {
    const RequestShape shape = request_shape(p_, block.request);
    const int rows = block.num_nodes * p_.group;
    const float* first = partials + block.partials;
    const int64_t stride = static_cast<int64_t>(rows) * (p_.v_dim + 2);
    for (int r = 0; r < rows; r++) {
      const float *max = first + rows * p_.v_dim + r, *sum = max + rows;
      float top = -INFINITY, total = 0;
      for (int c = 0; c < block.num_chunks; c++) top = max[c * stride] > top ? max[c * stride] : top;
      std::memset(out_, 0, sizeof(float) * p_.v_dim);
      for (int c = 0; c < block.num_chunks; c++) {
        if (max[c * stride] == -INFINITY && sum[c * stride] == 0) continue;  // the chunk held nothing visible
        float weight = std::exp2(max[c * stride] - top);
        total += weight * sum[c * stride];
        kernels_.add_scaled(first + c * stride + r * p_.v_dim, weight, out_, p_.v_dim);
      }
      finish_row(block, shape, r, out_, top, total);
    }
  }

 private:
  float sum_row(int r) const {
    float total = 0;
    for (int i = 0; i < kLanes; i++) total += row_sum_[r * kLanes + i];
    return total;
  }

  void load_queries(const Block& block, const RequestShape& shape) {
    const int units = p_.head_dim / kernels_.pack, bytes = element_bytes(p_.q_element);
    for (int i = 0; i < block.num_nodes; i++)
      for (int g = 0; g < p_.group; g++) {
        int64_t at = (shape.first_row + block.first_node + i) * p_.q_stride_n +
                     (static_cast<int64_t>(block.kv_head) * p_.group + g) * p_.q_stride_h;
        kernels_.convert(p_.q + at * bytes, p_.q_element, q_ + (i * p_.group + g) * units, p_.head_dim);
      }
  }

  void resolve(const Block& block, const RequestShape& shape, int64_t tile, TileRows& rows) const {
    const int32_t* table = p_.page_table + block.request * p_.max_pages;
    const int bytes = element_bytes(p_.kv_element);
    int64_t position = tile * kTileKeys, end = shape.length + shape.start + shape.num_nodes;
    int64_t column = position / p_.page_size, row = position % p_.page_size;
    rows.live = 0;
    for (int i = 0; i < kTileKeys; i++, position++, row++) {
      if (row == p_.page_size) {
        row = 0;
        column++;
      }
      rows.k[i] = rows.v[i] = zeros_;
      if (position >= end || column >= p_.max_pages) continue;
      int64_t page = table[column];
      if (page < 0 || page >= p_.num_pages) continue;
      rows.live |= uint64_t{1} << i;
      rows.k[i] =
          p_.k_cache + (page * p_.k_stride_page + row * p_.k_stride_row + block.kv_head * p_.k_stride_head) * bytes;
      rows.v[i] =
          p_.v_cache + (page * p_.v_stride_page + row * p_.v_stride_row + block.kv_head * p_.v_stride_head) * bytes;
    }
  }

  // Hardware prefetching stops at page borders, so each tile asks for the next one, a share per row block.
  void prefetch(const TileRows& rows, int part, int parts) const {
    const int bytes = element_bytes(p_.kv_element);
    const int first = kTileKeys * part / parts, last = kTileKeys * (part + 1) / parts;
    for (int i = first; i < last; i++) {
      for (int b = 0; b < p_.head_dim * bytes; b += 64) __builtin_prefetch(rows.k[i] + b, 0, 2);
      for (int b = 0; b < p_.v_dim * bytes; b += 64) __builtin_prefetch(rows.v[i] + b, 0, 2);
    }
  }

  // visible_[r] for every row; returns their union.
  uint64_t look(const Block& block, const RequestShape& shape, int64_t first_key, uint64_t live, bool& all) {
    TreeRequest request = {shape.length, shape.start + shape.num_nodes,
                           p_.positions ? p_.positions + shape.first_row : nullptr, p_.window};
    uint64_t any = 0;
    all = true;
    for (int i = 0; i < block.num_nodes; i++) {
      int64_t node = block.first_node + i, row = shape.first_row + node;
      TreeQuery query = {shape.causal ? nullptr : p_.tree_mask + row * p_.num_words, p_.num_words, shape.start + node,
                         0};
      if (p_.window >= 0) query.position = shape.causal ? shape.length + shape.start + node : p_.positions[row];
      uint64_t bits = visible_keys(request, query, first_key) & live;
      any |= bits;
      all &= bits == ~uint64_t{0};
      for (int g = 0; g < p_.group; g++) visible_[i * p_.group + g] = bits;
    }
    return any;
  }

  void attend_tiles(const Block& block, const RequestShape& shape, int64_t tile, int64_t end) {
    const int rows = block.num_nodes * p_.group, units = p_.head_dim / kernels_.pack;
    float scale = p_.softmax_scale * (p_.k_scale ? p_.k_scale[block.kv_head * p_.k_scale_stride] : 1.0f);
    AttendArgs args = {};
    args.k = packed_k_;
    args.v = packed_v_;
    args.head_dim = p_.head_dim;
    args.v_dim = p_.v_dim;
    args.scale = p_.softcap > 0 ? scale / p_.softcap : scale * kLog2e;
    args.cap = p_.softcap > 0 ? p_.softcap * kLog2e : 0.0f;

    // Keys in [full_begin, full_end) are seen by every node of the block: no mask is looked at there.
    int64_t full_begin = 0, full_end = shape.length + (shape.causal ? shape.start + block.first_node + 1 : 0);
    for (int i = 0; p_.window >= 0 && i < block.num_nodes; i++) {
      int64_t node = block.first_node + i;
      int64_t position = shape.causal ? shape.length + shape.start + node : p_.positions[shape.first_row + node];
      if (position - p_.window + 1 > full_begin) full_begin = position - p_.window + 1;
    }
    TileRows buffers[2];
    if (tile < end) resolve(block, shape, tile, buffers[0]);
    for (int turn = 0; tile < end; tile++, turn ^= 1) {
      TileRows &now = buffers[turn], &next = buffers[turn ^ 1];
      const int64_t first_key = tile * kTileKeys;
      bool all = now.live == ~uint64_t{0} && first_key >= full_begin && first_key + kTileKeys <= full_end;
      uint64_t any = all ? now.live : look(block, shape, first_key, now.live, all);
      for (int i = 0; i < kTileKeys; i++)
        if (!(any >> i & 1)) now.k[i] = now.v[i] = zeros_;  // dead slots may hold anything: they are not read
      if (any) args.careful = pack(now, !all);
      if (tile + 1 < end) resolve(block, shape, tile + 1, next);
      const int step = kernels_.block_rows, parts = (rows + step - 1) / step;
      for (int part = 0; part < parts; part++) {
        if (tile + 1 < end) prefetch(next, part, parts);
        if (!any) continue;
        int r = part * step;
        args.rows = rows - r < step ? rows - r : step;
        args.q = q_ + r * units;
        args.visible = all ? nullptr : visible_ + r;
        args.out = out_ + r * p_.v_dim;
        args.row_max = row_max_ + r;
        args.row_sum = row_sum_ + r * kLanes;
        kernels_.attend(args);
      }
    }
  }

  bool pack(TileRows& tile, bool check) {
    if (staged_) {
      const int bytes = 4 / kernels_.pack;
      for (int i = 0; i < kTileKeys; i++) {
        if (tile.k[i] == zeros_) continue;
        char *k = stage_k_ + i * p_.head_dim * bytes, *v = stage_v_ + i * p_.v_dim * bytes;
        kernels_.convert(tile.k[i], p_.kv_element, k, p_.head_dim);
        kernels_.convert(tile.v[i], p_.kv_element, v, p_.v_dim);
        tile.k[i] = k;
        tile.v[i] = v;
      }
    }
    kernels_.pack_k(reinterpret_cast<const void* const*>(tile.k), p_.head_dim, packed_k_);
    return kernels_.pack_v(reinterpret_cast<const void* const*>(tile.v), p_.v_dim, packed_v_, check);
  }

  // Normalise, apply the value scale and the sink (one more key of weight exp(sink), value 0), write out and lse.
  void finish_row(const Block& block, const RequestShape& shape, int r, const float* x, float max, float sum) {
    const int64_t row = shape.first_row + block.first_node + r / p_.group;
    const int64_t head = static_cast<int64_t>(block.kv_head) * p_.group + r % p_.group;
    const bool empty = max == -INFINITY && sum == 0;
    float denominator = sum;
    if (p_.sinks && !empty) denominator += std::exp2(p_.sinks[head] * kLog2e - max);
    float factor = empty ? 0.0f : (p_.v_scale ? p_.v_scale[block.kv_head * p_.v_scale_stride] : 1.0f) / denominator;
    char* out = p_.out + (row * p_.out_stride_n + head * p_.out_stride_h) * element_bytes(p_.q_element);
    kernels_.store(x, factor, out, p_.q_element, p_.v_dim);
    if (p_.lse) p_.lse[row * p_.lse_stride_n + head] = empty ? -INFINITY : (max + std::log2(sum)) * kLn2;
  }

  const TreeAttentionParams& p_;
  const TileKernels& kernels_;
  bool staged_;
  uint32_t *q_, *packed_k_, *packed_v_;
  float *out_, *row_max_, *row_sum_;
  uint64_t* visible_;
  char *zeros_, *stage_k_, *stage_v_;
};

}  // namespace specdec
