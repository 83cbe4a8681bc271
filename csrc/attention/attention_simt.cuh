// Tree attention without tensor cores: float32, float8 caches, any head dims and alignment. One warp a row.
//
// The warp goes through 64-key tiles: lane l scores keys l and l + 32, the warp's softmax is updated once a tile, then
// the lanes take turns at the output dims (lane l owns dims l, l + 32, ...) and walk the visible keys.
// Also here: the rows behind the last request. Grid: (row tiles of 4, KV heads, up to 65535 requests in order).
// Numerics: float32 throughout.
#pragma once
#include "attention_tail.cuh"

namespace specdec {

constexpr int kSimtWarps = 4, kSimtMaxDim = kMaxHeadDim;

template <class T>
__global__ void __launch_bounds__(32 * kSimtWarps) clear_tail_kernel(const AttentionParams p) {
  const uint32_t warps = blockDim.x / 32;
  clear_tail<T>(p, blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps);
}

template <class T, class KV>
__global__ void __launch_bounds__(32 * kSimtWarps, 6) tree_attention_simt_kernel(const AttentionParams p) {
  SPECDEC_SHARED(float, query_rows, kSimtWarps* kSimtMaxDim);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const int32_t b = ordered_request(p, p.first_order + blockIdx.z);
  if (b < 0) return;
  const AttentionRequest r = attention_request(p, b);
  const int32_t row = static_cast<int32_t>(blockIdx.x) * kSimtWarps + warp;
  if (row >= static_cast<int32_t>(r.num_nodes) * p.group) return;  // whole warps; nothing below waits for the block
  const int32_t node = row / p.group, q_head = head * p.group + row % p.group;
  const T* q = reinterpret_cast<const T*>(p.q) + (r.first_row + node) * p.q_stride_n + q_head * p.q_stride_h;
  float* query = query_rows + warp * kSimtMaxDim;
  for (int d = lane; d < p.head_dim; d += 32) query[d] = to_float(q[d]);
  __syncwarp();
  const KV* k_head = reinterpret_cast<const KV*>(p.k_cache) + head * p.k_stride_head;
  const KV* v_head = reinterpret_cast<const KV*>(p.v_cache) + head * p.v_stride_head;
  const float scale = p.softmax_scale * (p.k_scale ? p.k_scale[head * p.k_scale_stride] : 1.0f);
  const TreeQuery asked = attention_query(p, r, node);
  const TileRange tiles = key_tiles(p, r, node, node);
  const int32_t page_size = static_cast<int32_t>(p.page_size);

  float top = -INFINITY, sum = 0.0f, out[kSimtMaxDim / 32] = {};
  for (int32_t tile = tiles.begin; tile < tiles.end; tile++) {
    const uint64_t visible = visible_keys(r.tree, asked, int64_t{tile} * kTileKeys);
    int32_t slot[2];
    float score[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = 32 * half + lane;
      const bool seen = visible >> key & 1;
      slot[half] = seen ? key_slot(p, r, int64_t{tile} * kTileKeys + key) : -1;
      float dot = 0.0f;
      if (slot[half] >= 0) {
        const KV* k = k_head + cache_offset(slot[half], page_size, p.k_stride_page, p.k_stride_row);
        for (int d = 0; d < p.head_dim; d++) dot = fmaf(query[d], to_float(k[d]), dot);
      }
      score[half] = slot[half] >= 0 ? score_log2(p, dot, scale) : -INFINITY;
    }
    const float best = fmaxf(top, warp_max(fmaxf(score[0], score[1])));  // NaN scores aside: the same in every lane
    const bool broken = __any_sync(kFullWarp, score[0] != score[0] || score[1] != score[1]);
    if (best == -INFINITY && !broken) continue;
    const float base = best == -INFINITY ? 0.0f : best;
    const float shrink = exp2f(top - base);
    const float weight[2] = {exp2f(score[0] - base), exp2f(score[1] - base)};
    top = best;
    sum = sum * shrink + warp_sum(weight[0] + weight[1]);
#pragma unroll
    for (int i = 0; i < kSimtMaxDim / 32; i++) out[i] *= shrink;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      for (int from = 0; from < 32; from++) {
        if (!(visible >> (32 * half + from) & 1)) continue;  // the same in every lane
        const float w = __shfl_sync(kFullWarp, weight[half], from);
        const int32_t at = __shfl_sync(kFullWarp, slot[half], from);
        if (at < 0) continue;
        const KV* v = v_head + cache_offset(at, page_size, p.v_stride_page, p.v_stride_row);
#pragma unroll
        for (int i = 0; i < kSimtMaxDim / 32; i++)
          if (i * 32 + lane < p.v_dim) out[i] = fmaf(w, to_float(v[i * 32 + lane]), out[i]);
      }
    }
  }
  const RowEnd end = finish_row(p, top, sum, q_head);
  T* target = reinterpret_cast<T*>(p.out) + (r.first_row + node) * p.out_stride_n + q_head * p.out_stride_h;
#pragma unroll
  for (int i = 0; i < kSimtMaxDim / 32; i++)
    if (i * 32 + lane < p.v_dim) store_value(target + i * 32 + lane, out[i] * end.weight);
  if (lane == 0 && p.lse) p.lse[(r.first_row + node) * p.lse_stride_n + q_head] = end.lse;
}

}  // namespace specdec
