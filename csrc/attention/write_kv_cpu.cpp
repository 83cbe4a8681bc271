// write_kv: rows to cache slots, quantising to float8 where the cache is float8. slot_mapping: nodes to cache slots.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <type_traits>

#include "attention/write_kv.h"

namespace specdec {
namespace {

template <class From, class To>
void write_rows(const WriteKvArgs& p, const KvRows& rows, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n++) {
    if (!p.has_slot(n)) continue;
    for (int32_t h = 0; h < p.num_heads; h++) {
      const From* src = static_cast<const From*>(rows.x) + n * rows.stride_row + h * rows.stride_head;
      To* dst = static_cast<To*>(rows.cache) + rows.offset(p.slots[n], h);
      if (std::is_same_v<From, To> && !rows.scale) {
        std::memcpy(dst, src, rows.head_dim * sizeof(To));
        continue;
      }
      float scale = rows.scale ? rows.scale[h * rows.scale_stride] : 1.0f;
      for (int64_t d = 0; d < rows.head_dim; d++) dst[d] = stored<To>(to_float(src[d]) / scale);
    }
  }
}

void write_kv_cpu(Tensor k, Tensor v, Tensor slot_mapping, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                  std::string kv_layout, Tensor k_cache, Tensor v_cache) {
  const WriteKvArgs p = check_write_kv(k, v, slot_mapping, k_scale, v_scale, kv_layout, k_cache, v_cache);
  dispatch_write_kv(k, k_cache, [&](auto from, auto to) {
    using From = typename decltype(from)::type;
    using To = typename decltype(to)::type;
    const int64_t grain = 32768 / (p.num_heads * (p.k.head_dim + p.v.head_dim) + 1) + 1;
    torch::stable::parallel_for(0, p.num_rows, grain, [&](int64_t first, int64_t last) {
      write_rows<From, To>(p, p.k, first, last);
      write_rows<From, To>(p, p.v, first, last);
    });
  });
}

void slot_mapping_cpu(Tensor page_table, Tensor context_lens, Tensor cu_nodes, int64_t page_size, Tensor slots) {
  const SlotMappingArgs p = check_slot_mapping(page_table, context_lens, cu_nodes, page_size, slots);
  for (int64_t n = 0; n < p.total; n++) p.slots[n] = p.slot(n);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&specdec::write_kv_cpu));
  m.impl("slot_mapping", TORCH_BOX(&specdec::slot_mapping_cpu));
}
