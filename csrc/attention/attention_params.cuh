// One tree_attention call on the GPU, and the geometry of a request and of a row tile, as both kernels see them.
#pragma once
#include "attention/attention.h"
#include "common/device.cuh"

namespace specdec {

// Bytes of shared memory that a block can have on an architecture (90: sm_90).
SPECDEC_HD constexpr int64_t shared_of_architecture(int number) {
  return int64_t{1024} * (number == 86 || number == 89 || number >= 120 ? 99 : number < 90 ? 163 : 227);
}

// Every pointer and stride (in elements; last dimensions are dense).
struct AttentionParams {
  const char *q, *k_cache, *v_cache;  // q [N, Hq, D]; caches by pages, see the strides
  char* out;                          // [N, Hq, Dv]
  float* lse;                         // [N, Hq], may be null
  int64_t q_stride_n, q_stride_h, out_stride_n, out_stride_h, lse_stride_n;
  int64_t k_stride_page, k_stride_row, k_stride_head, v_stride_page, v_stride_row, v_stride_head;
  const int32_t *page_table, *context_lens, *cu_nodes, *tree_mask, *query_start, *positions, *request_order;
  const bool* causal;
  const float *sinks, *k_scale, *v_scale;
  int64_t k_scale_stride, v_scale_stride;  // 0: one scale for all heads
  int64_t num_rows, max_pages, num_pages, page_size;
  int32_t num_requests, num_order, num_q_heads, num_kv_heads, group, head_dim, v_dim, num_words;
  float softmax_scale, softcap;
  int32_t window;
  bool e5m2, batch_invariant;  // e5m2: of the two float8 formats of the caches
  // Tensor-core kernel only.
  int32_t stages, row_tiles, num_splits;  // ring stages; row tiles of the longest request; parts of an item, no plan
  const int32_t* plan;                    // plan_tree_attention's, or null
  int32_t* own_plan;   // the same, where this call made it in the workspace: the last block clears it
  int32_t* tickets;    // [slot_pairs + 1], zero before and after every call
  float* slots;        // two partial results a worker (Destination), zero before and after
  int64_t slot_pairs;  // workers that the workspace has room for
};

// Garbage lengths are clamped, and a request with garbage offsets is empty: neither reaches another request's rows.
struct AttentionRequest {
  int64_t first_row, num_nodes, start;
  bool causal;
  TreeRequest tree;
  const int32_t* page_row;
};

__device__ __forceinline__ AttentionRequest attention_request(const AttentionParams& p, int32_t b) {
  AttentionRequest r;
  const int64_t begin = p.cu_nodes[b], end = p.cu_nodes[b + 1], capacity = p.max_pages * p.page_size;
  const bool valid = begin >= 0 && begin <= end && end <= p.num_rows;
  r.first_row = valid ? begin : 0;
  r.num_nodes = valid ? end - begin : 0;
  r.start = p.query_start && p.query_start[b] > 0 ? p.query_start[b] : 0;
  r.causal = !p.tree_mask || (p.causal && p.causal[b]);
  const int64_t length = p.context_lens[b];
  r.tree.context_len = length < 0 ? 0 : length > capacity ? capacity : length;
  r.tree.num_slots = r.start + r.num_nodes;
  r.tree.slot_positions = p.positions && !r.causal ? p.positions + r.first_row : nullptr;
  r.tree.window = p.window;
  r.page_row = p.page_table + int64_t{b} * p.max_pages;
  return r;
}

__device__ __forceinline__ TreeQuery attention_query(const AttentionParams& p, const AttentionRequest& r,
                                                     int64_t node) {
  TreeQuery query;
  query.words = r.causal ? nullptr : p.tree_mask + (r.first_row + node) * p.num_words;
  query.num_words = p.num_words;
  query.slot = r.start + node;
  query.position = r.causal || !p.positions ? r.tree.context_len + query.slot : p.positions[r.first_row + node];
  return query;
}

// First and last + 1 of the key tiles that hold a key some node in [first, last] may see.
struct TileRange {
  int32_t begin, end;
};
__device__ __forceinline__ TileRange key_tiles(const AttentionParams& p, const AttentionRequest& r, int64_t first,
                                               int64_t last) {
  const int64_t capacity = p.max_pages * p.page_size;
  int64_t end = r.tree.context_len + r.start + (r.causal ? last + 1 : r.num_nodes), begin = 0;
  if (end > capacity) end = capacity;
  if (p.window >= 0) {
    int64_t lowest = INT64_MAX;
    for (int64_t node = first; node <= last; node++) {
      const int64_t position = attention_query(p, r, node).position;
      lowest = position < lowest ? position : lowest;
    }
    begin = lowest - p.window + 1;
    begin = begin < 0 ? 0 : begin > r.tree.context_len ? r.tree.context_len : begin;
  }
  return {static_cast<int32_t>(begin / kTileKeys), static_cast<int32_t>((end + kTileKeys - 1) / kTileKeys)};
}

// Slot (page * page_size + row) of a key in the caches, or -1 where the page table has no page for it. As slot_of, with
// 32-bit divisions: a 64-bit one is a subroutine call in the inner loop, and spills around it.
__device__ __forceinline__ int32_t key_slot(const AttentionParams& p, const AttentionRequest& r, int64_t position) {
  if (position < 0 || position > INT32_MAX) return -1;
  const uint32_t page_size = static_cast<uint32_t>(p.page_size), column = static_cast<uint32_t>(position) / page_size;
  if (column >= p.max_pages) return -1;
  const int64_t page = r.page_row[column], first = page * page_size;
  if (page < 0 || page >= p.num_pages || first + page_size - 1 > INT32_MAX) return -1;
  return static_cast<int32_t>(first + static_cast<uint32_t>(position) % page_size);
}
__device__ __forceinline__ int64_t cache_offset(int32_t slot, int32_t page_size, int64_t page, int64_t row) {
  return slot / page_size * page + slot % page_size * row;
}

// Request that grid slot z works on, or -1.
__device__ __forceinline__ int32_t ordered_request(const AttentionParams& p, int32_t z) {
  const int32_t b = p.request_order ? p.request_order[z] : z;
  return b >= 0 && b < p.num_requests ? b : -1;
}

// Scaled (and capped) score in units of log2.
__device__ __forceinline__ float score_log2(const AttentionParams& p, float dot, float scale) {
  constexpr float kLog2E = 1.4426950408889634f;
  float x = dot * scale;
  if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
  return x * kLog2E;
}

struct RowEnd {
  float weight, lse;  // out = weight * sum of p v; natural log, sinks excluded
};
// Ends a row whose scores had maximum `top` (log2 units) and whose 2^(score - top) sum to `sum`.
__device__ __forceinline__ RowEnd finish_row(const AttentionParams& p, float top, float sum, int32_t q_head) {
  constexpr float kLn2 = 0.6931471805599453f, kLog2E = 1.4426950408889634f;
  if (sum == 0.0f) return {0.0f, -INFINITY};  // nothing seen; a NaN sum goes on to the output
  const float all = p.sinks ? sum + ptx::ex2(p.sinks[q_head] * kLog2E - top) : sum;
  const float v_scale = p.v_scale ? p.v_scale[q_head / p.group * p.v_scale_stride] : 1.0f;
  return {v_scale / all, (top + ptx::lg2(sum)) * kLn2};  // sum is near 1 or more: lg2 is good to 2^-22
}

__device__ __forceinline__ void store_value(float* out, float x) {
  *out = x;
}
__device__ __forceinline__ void store_value(BFloat16* out, float x) {
  *out = to_bfloat16(x);
}
__device__ __forceinline__ void store_value(Half* out, float x) {
  *out = to_half(x);
}

}  // namespace specdec
