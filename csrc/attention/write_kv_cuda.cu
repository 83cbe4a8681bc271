// write_kv and slot_mapping on the GPU.
//
// write_kv: a block a row and cache (K, V); a thread takes eight elements of a head at a time, 16 bytes of bfloat16,
// converts them where the cache is float8 or scaled, and stores them as one word, 8 bytes of float8. Rows or caches
// whose strides do not allow that go element by element. Numerics: as the CPU op, bit for bit (division by the scale is
// rounded, float8 rounds to nearest even and saturates).
#include <type_traits>

#include "attention/write_kv.h"
#include "common/copy.cuh"
#include "common/launch.cuh"

namespace specdec {

template <class From, class To>
__device__ __forceinline__ To converted(From x, bool plain, float scale) {
  if constexpr (std::is_same_v<From, To>) {
    if (plain) return x;
  }
  return stored<To>(to_float(x) / scale);
}

// Grid: (rows, 2).
template <class From, class To>
__global__ void __launch_bounds__(kCopyThreads) write_kv_kernel(const WriteKvArgs p, const bool whole_words) {
  const int64_t n = blockIdx.x;
  if (!p.has_slot(n)) return;
  const KvRows rows = blockIdx.y == 0 ? p.k : p.v;
  const int32_t slot = p.slots[n], dim = static_cast<int32_t>(rows.head_dim), each = (dim + kEight - 1) / kEight;
  const bool plain = rows.scale == nullptr;
  for (int32_t i = threadIdx.x; i < each * p.num_heads; i += kCopyThreads) {
    const int32_t head = i / each, d = i % each * kEight;
    const From* from = static_cast<const From*>(rows.x) + n * rows.stride_row + head * rows.stride_head + d;
    To* to = static_cast<To*>(rows.cache) + rows.offset(slot, head) + d;
    const float scale = plain ? 1.0f : rows.scale[head * rows.scale_stride];
    if (whole_words) {
      const Eight<From> x = load_eight(from);
      Eight<To> y;
#pragma unroll
      for (int e = 0; e < kEight; e++) y.value[e] = converted<From, To>(x.value[e], plain, scale);
      store_eight(to, y);
    } else {
      for (int e = 0; e < kEight && d + e < dim; e++) to[e] = converted<From, To>(from[e], plain, scale);
    }
  }
}

// Grid: blocks of rows.
__global__ void __launch_bounds__(kCopyThreads) slot_mapping_kernel(const SlotMappingArgs p) {
  const int64_t n = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (n < p.total) p.slots[n] = p.slot(n);
}

// ------------------------------------------------------------------ host
// Whether every head of every row begins on a word of eight elements (16 bytes at most) and is made of whole ones.
template <class From, class To>
static bool in_whole_words(const KvRows& rows) {
  constexpr int64_t kFrom = kEight * sizeof(From) < 16 ? kEight * sizeof(From) : 16,
                    kTo = kEight * sizeof(To) < 16 ? kEight * sizeof(To) : 16;
  const int64_t from = address_of(rows.x) | ((rows.stride_row | rows.stride_head) * static_cast<int64_t>(sizeof(From))),
                to = address_of(rows.cache) |
                     ((rows.layout.stride_page | rows.layout.stride_row | rows.layout.stride_head) *
                      static_cast<int64_t>(sizeof(To)));
  return rows.head_dim % kEight == 0 && from % kFrom == 0 && to % kTo == 0;
}

void write_kv_cuda(Tensor k, Tensor v, Tensor slot_mapping, std::optional<Tensor> k_scale,
                   std::optional<Tensor> v_scale, std::string kv_layout, Tensor k_cache, Tensor v_cache) {
  const WriteKvArgs p = check_write_kv(k, v, slot_mapping, k_scale, v_scale, kv_layout, k_cache, v_cache);
  dispatch_write_kv(k, k_cache, [&](auto from, auto to) {
    using From = typename decltype(from)::type;
    using To = typename decltype(to)::type;
    if (p.num_rows == 0) return;
    const bool whole_words = in_whole_words<From, To>(p.k) && in_whole_words<From, To>(p.v);
    DeviceGuard guard(k);
    SPECDEC_LAUNCH((write_kv_kernel<From, To>), dim3(static_cast<unsigned>(p.num_rows), 2), dim3(kCopyThreads), 0,
                   current_stream(k), p, whole_words);
    check_launch("write_kv");
  });
}

void slot_mapping_cuda(Tensor page_table, Tensor context_lens, Tensor cu_nodes, int64_t page_size, Tensor slots) {
  const SlotMappingArgs p = check_slot_mapping(page_table, context_lens, cu_nodes, page_size, slots);
  if (p.total == 0) return;
  DeviceGuard guard(slots);
  SPECDEC_LAUNCH(slot_mapping_kernel, dim3(static_cast<unsigned>((p.total + kCopyThreads - 1) / kCopyThreads)),
                 dim3(kCopyThreads), 0, current_stream(slots), p);
  check_launch("slot_mapping");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("write_kv", TORCH_BOX(&specdec::write_kv_cuda));
  m.impl("slot_mapping", TORCH_BOX(&specdec::slot_mapping_cuda));
}
