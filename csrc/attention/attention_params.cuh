// One tree_attention call on the GPU as all kernels see it, and how they address keys and end rows.
#pragma once
#include "attention/args.h"
#include "common/device.cuh"

namespace specdec {

// Bytes of shared memory that a block can have on an architecture (90: sm_90).
SPECDEC_HD constexpr int64_t shared_of_architecture(int number) {
  return int64_t{1024} * (number == 86 || number == 89 || number >= 120 ? 99 : number < 90 ? 163 : 227);
}

struct AttentionParams : AttentionCall {
  int32_t row_tiles;    // of the longest request
  int32_t first_order;  // the request (in order) that a launch begins with; 0 but for tree_attention_simt_kernel
  // Tensor-core kernels only.
  int32_t stages, num_splits;  // ring stages; parts of an item, no plan
  const int32_t* plan;         // plan_tree_attention's, or null
  int32_t* own_plan;           // the same, where this call made it in the workspace: the last block clears it
  int32_t* tickets;            // [slot_pairs + 1], zero before and after every call
  float* slots;                // two partial results a worker (Destination), zero before and after
  int64_t slot_pairs;          // workers that the workspace has room for
  bool e5m2;                   // of the two float8 formats of the caches
};

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

// The request whose turn is z-th, or -1.
__device__ __forceinline__ int32_t ordered_request(const AttentionParams& p, int32_t z) {
  const int32_t b = p.request_order ? p.request_order[z] : z;
  return b >= 0 && b < p.num_requests ? b : -1;
}

// Scaled (and capped) score in units of log2.
__device__ __forceinline__ float score_log2(const AttentionParams& p, float dot, float scale) {
  float x = dot * scale;
  if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
  return x * kLog2E;
}

struct RowEnd {
  float weight, lse;  // out = weight * sum of p v; natural log, sinks excluded
};
// Ends a row whose scores had maximum `top` (log2 units) and whose 2^(score - top) sum to `sum`.
__device__ __forceinline__ RowEnd finish_row(const AttentionParams& p, float top, float sum, int32_t q_head) {
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
