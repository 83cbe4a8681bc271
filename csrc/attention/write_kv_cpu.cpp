// write_kv: rows to cache slots, quantising to float8 where the cache is float8. slot_mapping: nodes to cache slots.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <type_traits>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/paged_kv.h"

namespace specdec {
namespace {

struct Rows {
  const void* x;
  int64_t stride_n, stride_h, head_dim;
  const float* scale;
  int64_t scale_stride;
};

template <class T>
T stored(float x);
template <>
Float8E4M3 stored(float x) {
  return to_float8_e4m3(x);
}
template <>
Float8E5M2 stored(float x) {
  return to_float8_e5m2(x);
}
template <>
float stored(float x) {
  return x;
}
template <>
BFloat16 stored(float x) {
  return to_bfloat16(x);
}
template <>
Half stored(float x) {
  return to_half(x);
}

template <class From, class To>
void write_rows(const Rows& rows, To* cache, const PagedCache& layout, const int32_t* slots, int64_t first,
                int64_t last, int64_t num_heads) {
  for (int64_t n = first; n < last; n++) {
    int64_t slot = slots[n];
    if (slot < 0 || slot >= static_cast<int64_t>(layout.num_pages) * layout.page_size) continue;
    for (int64_t h = 0; h < num_heads; h++) {
      const From* src = static_cast<const From*>(rows.x) + n * rows.stride_n + h * rows.stride_h;
      To* dst = cache + layout.offset(static_cast<int32_t>(slot / layout.page_size),
                                      static_cast<int32_t>(slot % layout.page_size), static_cast<int32_t>(h));
      if (std::is_same_v<From, To> && !rows.scale) {
        std::memcpy(dst, src, rows.head_dim * sizeof(To));
        continue;
      }
      float scale = rows.scale ? rows.scale[h * rows.scale_stride] : 1.0f;
      for (int64_t d = 0; d < rows.head_dim; d++) dst[d] = stored<To>(to_float(src[d]) / scale);
    }
  }
}

Rows rows_of(const char* argument, const Tensor& x, const char* scale_name, const std::optional<Tensor>& scale) {
  check_dense_rows("write_kv", argument, x);
  Rows rows = {data<char>(x), x.stride(0), x.stride(1), x.size(2), nullptr, 0};
  if (scale) {
    check_tensor("write_kv", scale_name, *scale, ScalarType::Float, {kAny});
    if (scale->size(0) != 1 && scale->size(0) != x.size(1))
      fail("write_kv", scale_name, "shape [1] or [", x.size(1), "], got ", shape_text(*scale));
    rows.scale = data<float>(*scale);
    rows.scale_stride = scale->size(0) == 1 ? 0 : scale->stride(0);
  }
  return rows;
}

PagedCache layout_of(const Tensor& cache, bool hnd) {
  const int row = hnd ? 2 : 1, head = hnd ? 1 : 2;
  return {cache.stride(0), cache.stride(row), cache.stride(head), static_cast<int32_t>(cache.size(0)),
          static_cast<int32_t>(cache.size(row))};
}

void write_kv_cpu(Tensor k, Tensor v, Tensor slot_mapping, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                  std::string kv_layout, Tensor k_cache, Tensor v_cache) {
  const char* op = "write_kv";
  const bool hnd = is_hnd(op, kv_layout);
  const int row_axis = hnd ? 2 : 1, head_axis = hnd ? 1 : 2;
  check_tensor(op, "k_cache", k_cache, k_cache.scalar_type(), {kAny, kAny, kAny, kAny});
  check_tensor(op, "v_cache", v_cache, k_cache.scalar_type(),
               {k_cache.size(0), k_cache.size(1), k_cache.size(2), kAny});
  const int64_t num_heads = k_cache.size(head_axis);
  check_tensor(op, "k", k, k.scalar_type(), {kAny, num_heads, k_cache.size(3)});
  check_tensor(op, "v", v, k.scalar_type(), {k.size(0), num_heads, v_cache.size(3)});
  check_index(op, "slot_mapping", slot_mapping, {k.size(0)});
  check_dense_rows(op, "k_cache", k_cache);
  check_dense_rows(op, "v_cache", v_cache);
  if (k_cache.size(row_axis) < 1) fail(op, "k_cache", "at least one row a page, got ", shape_text(k_cache));
  const Rows k_rows = rows_of("k", k, "k_scale", k_scale), v_rows = rows_of("v", v, "v_scale", v_scale);
  const PagedCache k_layout = layout_of(k_cache, hnd), v_layout = layout_of(v_cache, hnd);
  const int32_t* slots = data<int32_t>(slot_mapping);
  dispatch_float(op, "k", k.scalar_type(), [&](auto from) {
    dispatch_kv(op, "k_cache", k_cache.scalar_type(), [&](auto to) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      if constexpr (sizeof(To) != 1 && !std::is_same_v<From, To>) {
        fail(op, "k_cache", dtype_name(k.scalar_type()), " (the dtype of k) or float8, got ",
             dtype_name(k_cache.scalar_type()));
      } else {
        To *k_out = mutable_data<To>(k_cache), *v_out = mutable_data<To>(v_cache);
        const int64_t grain = 32768 / (num_heads * (k_rows.head_dim + v_rows.head_dim) + 1) + 1;
        torch::stable::parallel_for(0, k.size(0), grain, [&](int64_t first, int64_t last) {
          write_rows<From, To>(k_rows, k_out, k_layout, slots, first, last, num_heads);
          write_rows<From, To>(v_rows, v_out, v_layout, slots, first, last, num_heads);
        });
      }
    });
  });
}

void slot_mapping_cpu(Tensor page_table, Tensor context_lens, Tensor cu_nodes, int64_t page_size, Tensor slots) {
  const char* op = "slot_mapping";
  check_index(op, "context_lens", context_lens, {kAny});
  const int64_t batch = context_lens.size(0);
  check_index(op, "page_table", page_table, {batch, kAny});
  check_index(op, "cu_nodes", cu_nodes, {batch + 1});
  check_index(op, "slots", slots, {kAny});
  check_range(op, "page_size", page_size, 1, INT32_MAX);
  const int32_t *table = data<int32_t>(page_table), *lengths = data<int32_t>(context_lens);
  const int32_t* offsets = data<int32_t>(cu_nodes);
  int32_t* out = mutable_data<int32_t>(slots);
  const int64_t total = slots.size(0), max_pages = page_table.size(1);
  for (int64_t n = 0; n < total; n++) out[n] = -1;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t n = offsets[b] < 0 ? 0 : offsets[b]; n < offsets[b + 1] && n < total; n++) {
      if (lengths[b] < 0) continue;
      out[n] = slot_of(table + b * max_pages, static_cast<int32_t>(max_pages), static_cast<int32_t>(page_size),
                       lengths[b] + (n - offsets[b]));
    }
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&specdec::write_kv_cpu));
  m.impl("slot_mapping", TORCH_BOX(&specdec::slot_mapping_cpu));
}
