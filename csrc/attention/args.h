// tree_attention: its arguments, checked once for every native backend, and the geometry of a request.
#pragma once
#include "attention/attention.h"
#include "attention/plan.h"
#include "common/dispatch.h"

namespace specdec {

// One call: every pointer and stride (in elements; last dimensions are dense).
struct AttentionCall {
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
  int32_t window;  // < 0: none
  bool batch_invariant;
};

// Garbage lengths are clamped, and a request with garbage offsets is empty: neither reaches another request's rows.
struct AttentionRequest {
  int64_t first_row, num_nodes, start;
  bool causal;
  TreeRequest tree;
  const int32_t* page_row;
};

SPECDEC_HD AttentionRequest attention_request(const AttentionCall& p, int32_t b) {
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

SPECDEC_HD TreeQuery attention_query(const AttentionCall& p, const AttentionRequest& r, int64_t node) {
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
SPECDEC_HD TileRange key_tiles(const AttentionCall& p, const AttentionRequest& r, int64_t first, int64_t last) {
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
    begin = begin < 0 ? 0 : begin > r.tree.context_len ? r.tree.context_len : begin;  // slots are cut inside tiles
  }
  return {static_cast<int32_t>(begin / kTileKeys), static_cast<int32_t>((end + kTileKeys - 1) / kTileKeys)};
}

// ------------------------------------------------------------------ host
inline bool is_float8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

// Fills `p`; the backends add what is theirs.
inline void check_tree_attention(AttentionCall& p, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                 const Tensor& page_table, const Tensor& context_lens, const Tensor& cu_nodes,
                                 const std::optional<Tensor>& tree_mask, const std::optional<Tensor>& query_start,
                                 const std::optional<Tensor>& causal, const std::optional<Tensor>& positions,
                                 const std::optional<Tensor>& request_order, const std::optional<Tensor>& sinks,
                                 const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                 const std::optional<Tensor>& plan, int64_t max_nodes, double softmax_scale,
                                 double softcap, int64_t window, const std::string& kv_layout, int64_t num_splits,
                                 bool batch_invariant, const Tensor& out, const std::optional<Tensor>& lse) {
  const char* op = "tree_attention";
  const ScalarType q_dtype = q.scalar_type(), kv_dtype = k_cache.scalar_type();
  if (q_dtype != ScalarType::Float && q_dtype != ScalarType::BFloat16 && q_dtype != ScalarType::Half)
    fail(op, "q", "float32, bfloat16 or float16, got ", dtype_name(q_dtype));
  if (kv_dtype != q_dtype && !is_float8(kv_dtype))
    fail(op, "k_cache", dtype_name(q_dtype), " (the dtype of q) or float8, got ", dtype_name(kv_dtype));
  check_tensor(op, "q", q, q_dtype, {kAny, kAny, kAny});
  check_tensor(op, "k_cache", k_cache, kv_dtype, {kAny, kAny, kAny, q.size(2)});
  const bool hnd = is_hnd(op, kv_layout);
  const int row_axis = hnd ? 2 : 1, head_axis = hnd ? 1 : 2;
  check_tensor(op, "v_cache", v_cache, kv_dtype, {k_cache.size(0), k_cache.size(1), k_cache.size(2), kAny});
  p.num_rows = q.size(0);
  p.num_q_heads = static_cast<int32_t>(q.size(1));
  p.head_dim = static_cast<int32_t>(q.size(2));
  p.v_dim = static_cast<int32_t>(v_cache.size(3));
  p.num_kv_heads = static_cast<int32_t>(k_cache.size(head_axis));
  p.num_pages = k_cache.size(0);
  p.page_size = k_cache.size(row_axis);
  if (p.num_kv_heads == 0 || p.num_q_heads % p.num_kv_heads)
    fail(op, "q", "a multiple of ", p.num_kv_heads, " query heads, got ", p.num_q_heads);
  p.group = p.num_q_heads / p.num_kv_heads;
  for (int dim : {p.head_dim, p.v_dim})
    if (dim < 16 || dim > kMaxHeadDim || dim % 16)
      fail(op, "q", "head dims that are multiples of 16 up to 256, got ", dim);
  if (p.page_size < 1) fail(op, "k_cache", "at least one row a page, got ", shape_text(k_cache));
  for (auto [name, tensor] :
       {std::pair<const char*, const Tensor*>{"q", &q}, {"k_cache", &k_cache}, {"v_cache", &v_cache}, {"out", &out}})
    check_dense_rows(op, name, *tensor);
  check_index(op, "context_lens", context_lens, {kAny});
  p.num_requests = static_cast<int32_t>(context_lens.size(0));
  check_index(op, "cu_nodes", cu_nodes, {int64_t{p.num_requests} + 1});
  check_index(op, "page_table", page_table, {p.num_requests, kAny});
  check_index(op, "tree_mask", tree_mask, {p.num_rows, kAny});
  check_index(op, "query_start", query_start, {p.num_requests});
  check_index(op, "causal", causal, {p.num_requests}, ScalarType::Bool);
  check_index(op, "positions", positions, {p.num_rows});
  check_index(op, "request_order", request_order, {kAny});
  check_index(op, "sinks", sinks, {p.num_q_heads}, ScalarType::Float);
  check_tensor(op, "out", out, q_dtype, {p.num_rows, p.num_q_heads, p.v_dim});
  if (lse) {
    check_tensor(op, "lse", *lse, ScalarType::Float, {p.num_rows, p.num_q_heads});
    check_dense_rows(op, "lse", *lse);
    p.lse = mutable_data<float>(*lse);
    p.lse_stride_n = lse->stride(0);
  }
  check_range(op, "max_nodes", max_nodes, 0, INT32_MAX);
  if (window >= 0 && tree_mask && !positions)
    fail(op, "positions", "a tensor (a window over a tree needs depths), got None");
  if (window >= 0 && tree_mask && query_start)
    fail(op, "query_start", "None with a window over a tree (earlier slots have no depth here), got a tensor");
  if (tree_mask && !causal && max_nodes > 32 * tree_mask->size(1))
    fail(op, "tree_mask", (max_nodes + 31) / 32, " words a row for max_nodes ", max_nodes, ", got ",
         shape_text(*tree_mask));
  p.num_order = request_order ? static_cast<int32_t>(request_order->size(0)) : p.num_requests;
  check_index(op, "plan", plan, {kPlanHeader + 2 * int64_t{p.num_order} + 1});
  check_range(op, "num_splits", num_splits, 0, 1 << 20);

  p.q = data<char>(q);
  p.k_cache = data<char>(k_cache);
  p.v_cache = data<char>(v_cache);
  p.out = mutable_data<char>(out);
  p.q_stride_n = q.stride(0);
  p.q_stride_h = q.stride(1);
  p.out_stride_n = out.stride(0);
  p.out_stride_h = out.stride(1);
  p.k_stride_page = k_cache.stride(0);
  p.k_stride_row = k_cache.stride(row_axis);
  p.k_stride_head = k_cache.stride(head_axis);
  p.v_stride_page = v_cache.stride(0);
  p.v_stride_row = v_cache.stride(row_axis);
  p.v_stride_head = v_cache.stride(head_axis);
  p.page_table = data<int32_t>(page_table);
  p.max_pages = page_table.size(1);
  p.context_lens = data<int32_t>(context_lens);
  p.cu_nodes = data<int32_t>(cu_nodes);
  p.tree_mask = data_or_null<int32_t>(tree_mask);
  p.num_words = tree_mask ? static_cast<int32_t>(tree_mask->size(1)) : 0;
  p.query_start = data_or_null<int32_t>(query_start);
  p.causal = data_or_null<bool>(causal);
  p.positions = data_or_null<int32_t>(positions);
  p.request_order = data_or_null<int32_t>(request_order);
  p.sinks = data_or_null<float>(sinks);
  auto scale_of = [&](const char* name, const std::optional<Tensor>& scale, int64_t& stride) -> const float* {
    if (!scale) return nullptr;
    check_tensor(op, name, *scale, ScalarType::Float, {kAny});
    if (scale->size(0) != 1 && scale->size(0) != p.num_kv_heads)
      fail(op, name, "shape [1] or [", p.num_kv_heads, "], got ", shape_text(*scale));
    stride = scale->size(0) == 1 ? 0 : scale->stride(0);
    return data<float>(*scale);
  };
  p.k_scale = scale_of("k_scale", k_scale, p.k_scale_stride);
  p.v_scale = scale_of("v_scale", v_scale, p.v_scale_stride);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  p.window = window < 0 || window > INT32_MAX ? -1 : static_cast<int32_t>(window);
  p.batch_invariant = batch_invariant;
}

}  // namespace specdec
