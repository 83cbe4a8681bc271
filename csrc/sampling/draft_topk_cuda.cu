// draft_topk on the GPU: a block a row, which is read once.
//
//   tile of 8192    a thread takes 8 neighbouring logits (16 bytes of bfloat16), the next tile's already on their way
//   log-sum-exp     each thread its own maximum and sum, merged at the end
//   running top-k   logits above the bound go into a list in shared memory; when it grows past its limit, bisection
//                   over its keys gives a bound with k to k + slack entries above it, and the rest is dropped
//   at the end      the list is sorted by counting, and log probabilities need nothing but the list
//
//   list    | kept: at most kLimit | this tile's: at most 8192 |
//
// A key is the logit's order, then the lower id. The first tile fills the list, later ones add the few that beat the
// bound. Numerics: differences to the maximum are scaled, so a logit d below it has error d * 2^-24; sums in float32.
// Not handled here: splitting a row over blocks.
#include "common/copy.cuh"
#include "common/dispatch.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "sampling/draft_topk.h"

namespace specdec {

constexpr int kTopkThreads = 1024;
constexpr int kChunk = 8;  // logits of a thread and tile
constexpr int32_t kTile = kTopkThreads * kChunk;
constexpr int32_t kLimit = 2048;  // list entries that outlive a tile
constexpr int32_t kList = kLimit + kTile;

template <class T>
struct Chunk {
  uint4 word[kChunk * sizeof(T) / 16];
};

// Logits c .. c + 7 of a row as they are; what lies behind the row is -inf.
template <class T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* row, int32_t c, int32_t valid, bool aligned) {
  Chunk<T> chunk;
  if (aligned && c + kChunk <= valid) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(kChunk * sizeof(T) / 16); w++)
      chunk.word[w] = ptx::load_stream_16(reinterpret_cast<const uint4*>(row + c) + w);
  } else {
    T values[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; e++) {
      if constexpr (sizeof(T) == 4)
        values[e] = c + e < valid ? row[c + e] : -INFINITY;
      else
        values[e] = c + e < valid ? row[c + e] : T{std::is_same_v<T, Half> ? uint16_t{0xfc00} : uint16_t{0xff80}};
    }
    memcpy(chunk.word, values, sizeof values);
  }
  return chunk;
}

__device__ __forceinline__ uint64_t logit_key(float logit, int32_t column) {
  return uint64_t{order_key(logit)} << 32 | ~static_cast<uint32_t>(column);
}
__device__ __forceinline__ float key_logit(uint64_t key) {
  return order_value(static_cast<uint32_t>(key >> 32));
}

// Drops list entries below a bound that leaves `least` to `most` of them. Every entry is distinct, so bisection always
// finds one.
struct Kept {
  uint64_t bound;
  int32_t count;
};
__device__ __forceinline__ Kept tighten(uint64_t* list, int32_t count, int32_t least, int32_t most, int32_t* scratch) {
  uint64_t bound = 0;  // at least `least` entries reach it
  for (int bit = 63; bit >= 0; bit--) {
    const uint64_t trial = bound | uint64_t{1} << bit;
    int32_t above = 0;
    for (int32_t i = threadIdx.x; i < count; i += kTopkThreads) above += list[i] >= trial;
    above = block_reduce(above, Sum{}, 0, scratch);
    if (above >= least) bound = trial;
    if (above >= least && above <= most) break;
  }
  int32_t left = 0;
  for (int32_t first = 0; first < count; first += kTopkThreads) {  // entries move down, behind what was read
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const uint64_t key = i < count ? list[i] : 0;
    const bool keep = i < count && key >= bound;
    int32_t here = 0;
    const int32_t place = left + block_exclusive_sum(static_cast<int32_t>(keep), &here, scratch);
    if (keep) list[place] = key;
    left += here;
    __syncthreads();
  }
  return {bound, left};
}

// Grid: rows.
template <class T>
__global__ void __launch_bounds__(kTopkThreads) draft_topk_kernel(const DraftTopkArgs p) {
  SPECDEC_DYNAMIC_SHARED(uint64_t, list);  // [kList]
  SPECDEC_SHARED(int32_t, scratch, kTopkThreads / 32);
  SPECDEC_SHARED(float, sums, kTopkThreads / 32);
  const int32_t thread = threadIdx.x;
  const int64_t r = blockIdx.x;
  const T* row = static_cast<const T*>(p.logits) + r * p.row_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  const int32_t slack = p.k + p.k / 2 + 64;
  const float scale = p.tau * kLog2E;

  float largest = -INFINITY, sum = 0.0f, floor = -INFINITY;  // floor: the bound's logit
  uint64_t bound = 0;
  int32_t count = 0;
  Chunk<T> next = load_chunk(row, thread * kChunk, p.valid, aligned);
  for (int32_t base = 0; base < p.valid; base += kTile) {
    const Chunk<T> chunk = next;
    const int32_t c = base + thread * kChunk;
    if (base + kTile < p.valid) next = load_chunk(row, c + kTile, p.valid, aligned);
    T values[kChunk];
    memcpy(values, chunk.word, sizeof values);
    float x[kChunk], best = -INFINITY;
#pragma unroll
    for (int e = 0; e < kChunk; e++) {
      x[e] = fminf(fmaxf(to_float(values[e]), -INFINITY), kInfLogit);  // NaN is -inf, +inf the largest float
      if (p.d2t && c + e < p.valid && !p.exists(c + e)) x[e] = -INFINITY;
      best = fmaxf(best, x[e]);
    }
    if (best > largest) {
      sum *= largest > -INFINITY ? ptx::ex2((largest - best) * scale) : 0.0f;
      largest = best;
    }
    if (largest > -INFINITY) {
#pragma unroll
      for (int e = 0; e < kChunk; e++) sum += ptx::ex2((x[e] - largest) * scale);
    }
    int32_t mine = 0;
    if (best >= floor && best > -INFINITY) {
#pragma unroll
      for (int e = 0; e < kChunk; e++) mine += x[e] > -INFINITY && logit_key(x[e], c + e) >= bound;
    }
    if (!__syncthreads_or(mine)) continue;
    int32_t here = 0;
    int32_t place = count + block_exclusive_sum(mine, &here, scratch);
    if (mine) {
#pragma unroll
      for (int e = 0; e < kChunk; e++)
        if (x[e] > -INFINITY && logit_key(x[e], c + e) >= bound) list[place++] = logit_key(x[e], c + e);
    }
    count += here;
    __syncthreads();
    if (count > kLimit) {
      const Kept kept = tighten(list, count, p.k, slack, scratch);
      count = kept.count;
      bound = kept.bound;
      floor = key_logit(bound);
    }
  }
  if (count > slack) count = tighten(list, count, p.k, slack, scratch).count;

  const float top = block_reduce(largest, Maximum{}, -INFINITY, sums);
  sum *= largest > -INFINITY ? ptx::ex2((largest - top) * scale) : 0.0f;
  const float total = block_reduce(sum, Sum{}, 0.0f, sums);
  const double log_mass = log(static_cast<double>(total));
  if (thread == 0) p.lse[r] = count ? static_cast<float>(static_cast<double>(top) * p.tau + log_mass) : -INFINITY;
  for (int32_t i = thread; i < count; i += kTopkThreads) {
    const uint64_t key = list[i];
    int32_t place = 0;  // entries before this one
    for (int32_t j = 0; j < count; j++) place += list[j] > key;
    if (place >= p.k) continue;
    const int32_t column = static_cast<int32_t>(~static_cast<uint32_t>(key));
    p.token_ids[r * p.k + place] = static_cast<int32_t>(p.target_id(column));
    p.log_probs[r * p.k + place] = static_cast<float>(static_cast<double>((key_logit(key) - top) * p.tau) - log_mass);
  }
  for (int32_t i = count + thread; i < p.k; i += kTopkThreads) {
    p.token_ids[r * p.k + i] = -1;
    p.log_probs[r * p.k + i] = -INFINITY;
  }
}

// ------------------------------------------------------------------ host
void draft_topk_cuda(const Tensor& logits, const std::optional<Tensor>& d2t, int64_t k, double temperature,
                     int64_t vocab_size, const Tensor& token_ids, const Tensor& log_probs, const Tensor& lse) {
  const DraftTopkArgs p = check_draft_topk(logits, d2t, k, temperature, vocab_size, token_ids, log_probs, lse);
  if (p.rows == 0) return;
  constexpr int64_t bytes = kList * static_cast<int64_t>(sizeof(uint64_t));
  DeviceGuard guard(logits);
  dispatch_float("draft_topk", "logits", logits.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    allow_shared_memory(reinterpret_cast<const void*>(&draft_topk_kernel<T>), bytes);
    SPECDEC_LAUNCH(draft_topk_kernel<T>, dim3(static_cast<unsigned>(p.rows)), dim3(kTopkThreads), bytes,
                   current_stream(logits), p);
  });
  check_launch("draft_topk");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("draft_topk", TORCH_BOX(&specdec::draft_topk_cuda));
}
