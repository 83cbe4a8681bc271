// write_kv and slot_mapping: what every native backend shares. Arguments are checked here, before the first write.
#pragma once
#include <optional>
#include <string>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/paged_kv.h"
#include "common/stored.h"

namespace specdec {

struct KvRows {  // K or V: rows [num_rows, num_heads, head_dim] and the cache they go to; strides in elements
  const void* x;
  void* cache;
  const float* scale;  // null: 1
  PagedCache layout;
  int64_t stride_row, stride_head, scale_stride, head_dim;

  // First element of a row's head in the cache, from a slot that is in it.
  SPECDEC_HD int64_t offset(int32_t slot, int32_t head) const {
    return layout.offset(slot / layout.page_size, slot % layout.page_size, head);
  }
};

struct WriteKvArgs {
  const int32_t* slots;  // [num_rows]
  KvRows k, v;
  int64_t num_rows, num_heads;

  SPECDEC_HD bool has_slot(int64_t n) const {
    return slots[n] >= 0 && slots[n] < int64_t{k.layout.num_pages} * k.layout.page_size;
  }
};

inline KvRows check_kv_rows(const char* argument, const Tensor& x, const Tensor& cache, bool hnd,
                            const char* scale_name, const std::optional<Tensor>& scale) {
  check_dense_rows("write_kv", argument, x);
  const int row = hnd ? 2 : 1, head = hnd ? 1 : 2;
  KvRows rows = {};
  rows.x = data<char>(x);
  rows.cache = mutable_data<char>(cache);
  rows.layout = {cache.stride(0), cache.stride(row), cache.stride(head), static_cast<int32_t>(cache.size(0)),
                 static_cast<int32_t>(cache.size(row))};
  rows.stride_row = x.stride(0);
  rows.stride_head = x.stride(1);
  rows.head_dim = x.size(2);
  if (scale) {
    check_tensor("write_kv", scale_name, *scale, ScalarType::Float, {kAny});
    if (scale->size(0) != 1 && scale->size(0) != x.size(1))
      fail("write_kv", scale_name, "shape [1] or [", x.size(1), "], got ", shape_text(*scale));
    rows.scale = data<float>(*scale);
    rows.scale_stride = scale->size(0) == 1 ? 0 : scale->stride(0);
  }
  return rows;
}

inline WriteKvArgs check_write_kv(const Tensor& k, const Tensor& v, const Tensor& slot_mapping,
                                  const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                  const std::string& kv_layout, const Tensor& k_cache, const Tensor& v_cache) {
  const char* op = "write_kv";
  const bool hnd = is_hnd(op, kv_layout);
  check_tensor(op, "k_cache", k_cache, k_cache.scalar_type(), {kAny, kAny, kAny, kAny});
  check_tensor(op, "v_cache", v_cache, k_cache.scalar_type(),
               {k_cache.size(0), k_cache.size(1), k_cache.size(2), kAny});
  const int64_t num_heads = k_cache.size(hnd ? 1 : 2);
  check_tensor(op, "k", k, k.scalar_type(), {kAny, num_heads, k_cache.size(3)});
  check_tensor(op, "v", v, k.scalar_type(), {k.size(0), num_heads, v_cache.size(3)});
  check_index(op, "slot_mapping", slot_mapping, {k.size(0)});
  check_dense_rows(op, "k_cache", k_cache);
  check_dense_rows(op, "v_cache", v_cache);
  if (k_cache.size(hnd ? 2 : 1) < 1) fail(op, "k_cache", "at least one row a page, got ", shape_text(k_cache));
  WriteKvArgs args = {};
  args.slots = data<int32_t>(slot_mapping);
  args.k = check_kv_rows("k", k, k_cache, hnd, "k_scale", k_scale);
  args.v = check_kv_rows("v", v, v_cache, hnd, "v_scale", v_scale);
  args.num_rows = k.size(0);
  args.num_heads = num_heads;
  return args;
}

// body(Type<From>{}, Type<To>{}) for the dtypes of the rows and of the cache: equal, or float8 in the cache.
template <class Body>
inline void dispatch_write_kv(const Tensor& k, const Tensor& k_cache, Body&& body) {
  const char* op = "write_kv";
  dispatch_float(op, "k", k.scalar_type(), [&](auto from) {
    dispatch_kv(op, "k_cache", k_cache.scalar_type(), [&](auto to) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      if constexpr (sizeof(To) != 1 && !std::is_same_v<From, To>)
        fail(op, "k_cache", dtype_name(k.scalar_type()), " (the dtype of k) or float8, got ",
             dtype_name(k_cache.scalar_type()));
      else
        body(from, to);
    });
  });
}

struct SlotMappingArgs {
  const int32_t* page_table;    // [requests, max_pages]
  const int32_t* context_lens;  // [requests]
  const int32_t* cu_nodes;      // [requests + 1]
  int32_t* slots;               // [total]
  int64_t total;
  int32_t requests, max_pages, page_size;

  // Slot of row n: its request is the last that begins at or before it.
  SPECDEC_HD int32_t slot(int64_t n) const {
    int32_t b = -1, above = requests;  // cu[b] <= n < cu[above], as far as they are sorted
    while (above - b > 1) {
      const int32_t middle = b + (above - b) / 2;
      if (cu_nodes[middle] <= n)
        b = middle;
      else
        above = middle;
    }
    if (b < 0 || n >= cu_nodes[b + 1] || context_lens[b] < 0) return -1;
    return slot_of(page_table + int64_t{b} * max_pages, max_pages, page_size, context_lens[b] + (n - cu_nodes[b]));
  }
};

inline SlotMappingArgs check_slot_mapping(const Tensor& page_table, const Tensor& context_lens, const Tensor& cu_nodes,
                                          int64_t page_size, const Tensor& slots) {
  const char* op = "slot_mapping";
  check_index(op, "context_lens", context_lens, {kAny});
  const int64_t requests = context_lens.size(0);
  check_index(op, "page_table", page_table, {requests, kAny});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "slots", slots, {kAny});
  check_range(op, "page_size", page_size, 1, INT32_MAX);
  return {data<int32_t>(page_table),
          data<int32_t>(context_lens),
          data<int32_t>(cu_nodes),
          mutable_data<int32_t>(slots),
          slots.size(0),
          static_cast<int32_t>(requests),
          static_cast<int32_t>(page_table.size(1)),
          static_cast<int32_t>(page_size)};
}

}  // namespace specdec
