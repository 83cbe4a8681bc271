// One work item: the rows of a block against the tiles of a KV chunk, read straight from the pages; and the merge of a
// block's chunks.
#pragma once
#include <cmath>
#include <cstring>

#include "common/numerics.h"
#include "common/paged_kv.h"
#include "schedule_cpu.h"

namespace specdec {

// Addresses of a tile's 64 keys in the block's first head; bit i of `live` is clear where there is none (behind the
// end, or no valid page).
struct TileRows {
  const char *k[kTileKeys], *v[kTileKeys];
  uint64_t live;
};

class ItemWorker {
 public:
  // rows: the most rows (all heads together) that one block holds
  ItemWorker(const TreeAttentionParams& p, int64_t rows) : p_(p), kernels_(*p.kernels) {
    static thread_local Arena arena;
    const int64_t unit_bytes = 4 / kernels_.pack, kv_bytes = element_bytes(p.kv_element);
    q_row_ = p.head_dim / kernels_.pack;
    const int64_t k_units = int64_t{kTileKeys} * q_row_, v_units = int64_t{kTileKeys} * p.v_dim / kernels_.pack;
    staged_ = p.kv_element != (kernels_.pack == 1 ? Element::float32 : Element::bfloat16);
    const int64_t stage = staged_ ? kTileKeys * unit_bytes : 0;
    const int64_t lines = kTileKeys * ((p.head_dim * kv_bytes + 63) / 64 + (p.v_dim * kv_bytes + 63) / 64);
    arena.reserve(Arena::bytes_for<uint32_t>(rows * q_row_) + Arena::bytes_for<uint32_t>(k_units) +
                  Arena::bytes_for<uint32_t>(v_units) + Arena::bytes_for<float>(rows * p.v_dim) +
                  Arena::bytes_for<float>(rows) + Arena::bytes_for<float>(rows * kLanes) +
                  Arena::bytes_for<uint64_t>(rows) + Arena::bytes_for<char>(kMaxHeadDim * 4) +
                  Arena::bytes_for<char>(stage * p.head_dim) + Arena::bytes_for<char>(stage * p.v_dim) +
                  Arena::bytes_for<const char*>(lines));
    q_ = arena.take<uint32_t>(rows * q_row_);
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
    lines_ = arena.take<const char*>(lines);
  }

  // Results go to `partials` (a chunk: out, maxima, sums of all rows) or, with a single chunk, to the output.
  void run(const Block& block, int chunk, float* partials) {
    const AttentionRequest request = attention_request(p_, block.request);
    const int64_t stride = padded_rows(p_, block.num_nodes), rows = block.num_heads * stride;
    load_queries(block, request);
    std::memset(out_, 0, sizeof(float) * rows * p_.v_dim);
    std::memset(row_sum_, 0, sizeof(float) * rows * kLanes);
    for (int64_t r = 0; r < rows; r++) row_max_[r] = -INFINITY;

    int64_t base = block.first_tile;
    if (p_.batch_invariant) base -= block.first_tile % kInvariantTiles;
    int64_t tile = base + static_cast<int64_t>(chunk) * block.chunk_tiles, end = tile + block.chunk_tiles;
    if (tile < block.first_tile) tile = block.first_tile;
    if (end > block.first_tile + block.num_tiles) end = block.first_tile + block.num_tiles;
    attend_tiles(block, request, tile, end);

    float* part = partials + block.partials + static_cast<int64_t>(chunk) * rows * (p_.v_dim + 2);
    if (block.num_chunks > 1) {
      std::memcpy(part, out_, sizeof(float) * rows * p_.v_dim);
      std::memcpy(part + rows * p_.v_dim, row_max_, sizeof(float) * rows);
    }
    for (int h = 0; h < block.num_heads; h++)
      for (int r = 0; r < block.num_nodes * p_.group; r++) {
        const int64_t at = h * stride + r;
        float sum = 0;
        for (int i = 0; i < kLanes; i++) sum += row_sum_[at * kLanes + i];
        if (block.num_chunks > 1)
          part[rows * (p_.v_dim + 1) + at] = sum;
        else
          finish_row(block, request, h, r, out_ + at * p_.v_dim, row_max_[at], sum);
      }
  }

  // Chunks in order, so that the sum does not depend on who finished when.
  void merge(const Block& block, const float* partials) {
    const AttentionRequest request = attention_request(p_, block.request);
    const int64_t stride = padded_rows(p_, block.num_nodes), rows = block.num_heads * stride;
    const float* first = partials + block.partials;
    const int64_t chunk = rows * (p_.v_dim + 2);
    for (int h = 0; h < block.num_heads; h++)
      for (int r = 0; r < block.num_nodes * p_.group; r++) {
        const int64_t at = h * stride + r;
        const float *max = first + rows * p_.v_dim + at, *sum = max + rows;
        float top = -INFINITY, total = 0;
        for (int c = 0; c < block.num_chunks; c++) top = max[c * chunk] > top ? max[c * chunk] : top;
        std::memset(out_, 0, sizeof(float) * p_.v_dim);
        for (int c = 0; c < block.num_chunks; c++) {
          if (max[c * chunk] == -INFINITY && sum[c * chunk] == 0) continue;  // the chunk held nothing visible
          float weight = std::exp2(max[c * chunk] - top);
          total += weight * sum[c * chunk];
          kernels_.add_scaled(first + c * chunk + at * p_.v_dim, weight, out_, p_.v_dim);
        }
        finish_row(block, request, h, r, out_, top, total);
      }
  }

 private:
  void load_queries(const Block& block, const AttentionRequest& request) {
    const int64_t bytes = element_bytes(p_.q_element), stride = padded_rows(p_, block.num_nodes);
    for (int h = 0; h < block.num_heads; h++)
      for (int r = 0; r < block.num_nodes * p_.group; r++) {
        const int64_t row = request.first_row + block.first_node + r / p_.group;
        const int64_t head = static_cast<int64_t>(block.first_head + h) * p_.group + r % p_.group;
        kernels_.convert(p_.q + (row * p_.q_stride_n + head * p_.q_stride_h) * bytes, p_.q_element,
                         q_ + (h * stride + r) * q_row_, p_.head_dim);
      }
  }

  void resolve(const Block& block, const AttentionRequest& request, int64_t tile, TileRows& rows) const {
    const int32_t* table = request.page_row;
    const int64_t bytes = element_bytes(p_.kv_element);
    const char* k_head = p_.k_cache + block.first_head * p_.k_stride_head * bytes;
    const char* v_head = p_.v_cache + block.first_head * p_.v_stride_head * bytes;
    int64_t position = tile * kTileKeys, end = request.tree.context_len + request.tree.num_slots;
    int64_t column = position / p_.page_size, row = position % p_.page_size;
    rows.live = 0;
    for (int i = 0; i < kTileKeys; i++, position++, row++) {
      if (row == p_.page_size) {
        row = 0;
        column++;
      }
      rows.k[i] = rows.v[i] = nullptr;
      if (position >= end || column >= p_.max_pages) continue;
      const int64_t page = table[column];
      if (page < 0 || page >= p_.num_pages) continue;
      rows.live |= uint64_t{1} << i;
      rows.k[i] = k_head + (page * p_.k_stride_page + row * p_.k_stride_row) * bytes;
      rows.v[i] = v_head + (page * p_.v_stride_page + row * p_.v_stride_row) * bytes;
    }
  }

  // visible_[r] for every row of a head; returns their union.
  uint64_t look(const Block& block, const AttentionRequest& request, int64_t first_key, uint64_t live, bool& all) {
    uint64_t any = 0;
    all = true;
    for (int i = 0; i < block.num_nodes; i++) {
      const TreeQuery query = attention_query(p_, request, block.first_node + i);
      const uint64_t bits = visible_keys(request.tree, query, first_key) & live;
      any |= bits;
      all &= bits == ~uint64_t{0};
      for (int g = 0; g < p_.group; g++) visible_[i * p_.group + g] = bits;
    }
    return any;
  }

  void attend_tiles(const Block& block, const AttentionRequest& request, int64_t tile, int64_t end) {
    // Keys in [full_begin, full_end) are seen by every node of the block: no mask is looked at there.
    int64_t full_begin = 0,
            full_end = request.tree.context_len + (request.causal ? request.start + block.first_node + 1 : 0);
    for (int i = 0; p_.window >= 0 && i < block.num_nodes; i++) {
      const int64_t begin = attention_query(p_, request, block.first_node + i).position - p_.window + 1;
      if (begin > full_begin) full_begin = begin;
    }
    TileRows buffers[2];
    if (tile < end) resolve(block, request, tile, buffers[0]);
    for (int turn = 0; tile < end; tile++, turn ^= 1) {
      TileRows &now = buffers[turn], &next = buffers[turn ^ 1];
      const int64_t first_key = tile * kTileKeys;
      bool all = now.live == ~uint64_t{0} && first_key >= full_begin && first_key + kTileKeys <= full_end;
      const uint64_t any = all ? now.live : look(block, request, first_key, now.live, all);
      if (tile + 1 < end) resolve(block, request, tile + 1, next);
      for (int h = 0; any && h < block.num_heads; h++) {
        const bool last = h + 1 == block.num_heads;
        lines_[0] = zeros_;
        Prefetch ahead = {lines_, lines_, 1};
        if (!last || tile + 1 < end) ask_for(last ? next : now, last ? 0 : h + 1, block, ahead);
        attend_head(block, now, h, any, all, ahead);
      }
    }
  }

  // Spreads the lines of the coming head's tile over the steps of this one.
  void ask_for(const TileRows& rows, int head, const Block& block, Prefetch& ahead) const {
    const int64_t bytes = element_bytes(p_.kv_element);
    const int64_t k_shift = head * p_.k_stride_head * bytes, v_shift = head * p_.v_stride_head * bytes;
    const char** line = lines_;
    for (int i = 0; i < kTileKeys; i++) {
      if (!rows.k[i]) continue;
      for (int64_t b = 0; b < p_.head_dim * bytes; b += 64) *line++ = rows.k[i] + k_shift + b;
      for (int64_t b = 0; b < p_.v_dim * bytes; b += 64) *line++ = rows.v[i] + v_shift + b;
    }
    if (line == lines_) return;
    ahead.last = line - 1;
    const int64_t products =
        (block.num_nodes * p_.group + 5) / 6 * (q_row_ + kTileKeys / kernels_.pack * ((p_.v_dim + 63) / 64));
    const int64_t left = line - lines_ - products;
    ahead.pace = static_cast<int>(left > 0 ? left / 256 + 1 : 1);  // a tile is packed in about 256 steps
  }

  // One KV head's tile: pack it, then every row of that head against it.
  void attend_head(const Block& block, const TileRows& rows, int head, uint64_t any, bool all, Prefetch& ahead) {
    const int kv_head = block.first_head + head, num_rows = block.num_nodes * p_.group;
    const float scale = p_.softmax_scale * (p_.k_scale ? p_.k_scale[kv_head * p_.k_scale_stride] : 1.0f);
    AttendArgs args = {};
    args.k = packed_k_;
    args.v = packed_v_;
    args.careful = pack(rows, head, any, !all, ahead);
    args.head_dim = p_.head_dim;
    args.v_dim = p_.v_dim;
    args.scale = p_.softcap > 0 ? scale / p_.softcap : scale * kLog2E;
    args.cap = p_.softcap > 0 ? p_.softcap * kLog2E : 0.0f;
    args.ahead = &ahead;
    const int64_t first = head * padded_rows(p_, block.num_nodes);
    for (int r = 0; r < num_rows; r += args.rows) {
      args.rows = num_rows - r < kernels_.block_rows ? num_rows - r : kernels_.block_rows;
      args.q = q_ + (first + r) * q_row_;
      args.visible = all ? nullptr : visible_ + r;
      args.out = out_ + (first + r) * p_.v_dim;
      args.row_max = row_max_ + first + r;
      args.row_sum = row_sum_ + (first + r) * kLanes;
      kernels_.attend(args);
    }
  }

  // Keys that nobody sees are zeros: dead slots may hold anything and are not read. Returns whether V needs care.
  bool pack(const TileRows& rows, int head, uint64_t any, bool check, Prefetch& ahead) {
    const int64_t bytes = element_bytes(p_.kv_element), unit_bytes = 4 / kernels_.pack;
    const int64_t k_shift = head * p_.k_stride_head * bytes, v_shift = head * p_.v_stride_head * bytes;
    const void *k[kTileKeys], *v[kTileKeys];
    for (int i = 0; i < kTileKeys; i++) {
      k[i] = v[i] = zeros_;
      if (!(any >> i & 1)) continue;
      k[i] = rows.k[i] + k_shift;
      v[i] = rows.v[i] + v_shift;
      if (!staged_) continue;
      char *k_stage = stage_k_ + i * p_.head_dim * unit_bytes, *v_stage = stage_v_ + i * p_.v_dim * unit_bytes;
      kernels_.convert(k[i], p_.kv_element, k_stage, p_.head_dim);
      kernels_.convert(v[i], p_.kv_element, v_stage, p_.v_dim);
      k[i] = k_stage;
      v[i] = v_stage;
    }
    kernels_.pack_k(k, p_.head_dim, packed_k_, ahead);
    return kernels_.pack_v(v, p_.v_dim, packed_v_, check, ahead);
  }

  // Normalise, apply the value scale and the sink (one more key of weight exp(sink), value 0), write out and lse.
  void finish_row(const Block& block, const AttentionRequest& request, int h, int r, const float* x, float max,
                  float sum) {
    const int64_t row = request.first_row + block.first_node + r / p_.group;
    const int64_t kv_head = block.first_head + h, head = kv_head * p_.group + r % p_.group;
    const bool empty = max == -INFINITY && sum == 0;
    float denominator = sum;
    if (p_.sinks && !empty) denominator += std::exp2(p_.sinks[head] * kLog2E - max);
    const float v_scale = p_.v_scale ? p_.v_scale[kv_head * p_.v_scale_stride] : 1.0f;
    char* out = p_.out + (row * p_.out_stride_n + head * p_.out_stride_h) * element_bytes(p_.q_element);
    kernels_.store(x, empty ? 0.0f : v_scale / denominator, out, p_.q_element, p_.v_dim);
    if (p_.lse) p_.lse[row * p_.lse_stride_n + head] = empty ? -INFINITY : (max + std::log2(sum)) * kLn2;
  }

  const TreeAttentionParams& p_;
  const TileKernels& kernels_;
  int64_t q_row_;  // units a query row
  bool staged_;
  uint32_t *q_, *packed_k_, *packed_v_;
  float *out_, *row_max_, *row_sum_;
  uint64_t* visible_;
  char *zeros_, *stage_k_, *stage_v_;
  const char** lines_;
};

}  // namespace specdec
