// tree_attention on the CPU: checks, schedule, threads. The arithmetic is in attention_cpu_<instruction set>.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/check.h"
#include "common/cpu.h"
#include "common/dispatch.h"
#include "item_cpu.h"

namespace specdec {
namespace {

constexpr const char* kOp = "tree_attention";

Element element_of(const char* argument, ScalarType dtype, bool cache) {
  switch (dtype) {
    case ScalarType::Float: return Element::float32;
    case ScalarType::BFloat16: return Element::bfloat16;
    case ScalarType::Half: return Element::float16;
    case ScalarType::Float8_e4m3fn:
      if (cache) return Element::float8_e4m3;
      break;
    case ScalarType::Float8_e5m2:
      if (cache) return Element::float8_e5m2;
      break;
    default: break;
  }
  fail(kOp, argument, "float32, bfloat16 or float16", cache ? ", float8_e4m3fn or float8_e5m2" : "", ", got ",
       dtype_name(dtype));
}

// float8 values are bfloat16 values and a bfloat16 cache meets bfloat16 queries, so the pair kernels lose nothing.
const TileKernels& choose_kernels(Element q) {
#if defined(__x86_64__)
  Isa level = isa();
  if (q == Element::bfloat16 && level >= Isa::amx) return amx_kernels();
  if (q == Element::bfloat16 && level >= Isa::avx512_bf16) return avx512_bf16_kernels();
  if (level >= Isa::avx512) return avx512_kernels();
  if (level >= Isa::avx2) return avx2_kernels();
#endif
  return scalar_kernels();
}

const float* scale_of(const char* argument, const std::optional<Tensor>& scale, int64_t heads, int64_t& stride) {
  if (!scale) return nullptr;
  check_tensor(kOp, argument, *scale, ScalarType::Float, {kAny});
  if (scale->size(0) != 1 && scale->size(0) != heads)
    fail(kOp, argument, "shape [1] or [", heads, "], got ", shape_text(*scale));
  stride = scale->size(0) == 1 ? 0 : scale->stride(0);
  return data<float>(*scale);
}

void run(const TreeAttentionParams& p) {
  static thread_local Arena plan_arena, partial_arena;
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int heads_limit = choose_heads_limit(p, threads);
  const int64_t num_blocks = count_blocks(p, heads_limit);
  plan_arena.reserve(Arena::bytes_for<Block>(num_blocks));
  Block* blocks = plan_arena.take<Block>(num_blocks);
  Schedule schedule = make_schedule(p, threads, heads_limit, blocks);
  partial_arena.reserve(Arena::bytes_for<float>(schedule.partial_floats) +
                        Arena::bytes_for<int32_t>(schedule.num_items) +
                        Arena::bytes_for<std::atomic<int32_t>>(num_blocks));
  float* partials = partial_arena.take<float>(schedule.partial_floats);
  int32_t* item_block = partial_arena.take<int32_t>(schedule.num_items);
  auto* open_chunks = partial_arena.take<std::atomic<int32_t>>(num_blocks);
  for (int64_t i = 0; i < num_blocks; i++) {
    new (open_chunks + i) std::atomic<int32_t>(blocks[i].num_chunks);
    for (int c = 0; c < blocks[i].num_chunks; c++) item_block[blocks[i].first_item + c] = static_cast<int32_t>(i);
  }
  std::atomic<int64_t> next_item{0};
  auto drain = [&](int64_t, int64_t) {
    ItemWorker worker(p, schedule.rows);
    for (int64_t i; (i = next_item.fetch_add(1, std::memory_order_relaxed)) < schedule.num_items;) {
      const Block& block = blocks[item_block[i]];
      worker.run(block, static_cast<int>(i - block.first_item), partials);
      if (block.num_chunks > 1 && open_chunks[item_block[i]].fetch_sub(1, std::memory_order_acq_rel) == 1)
        worker.merge(block, partials);
    }
  };
  int64_t workers = schedule.num_items < threads ? schedule.num_items : threads;
  if (workers == 1) drain(0, 1);
  if (workers > 1) torch::stable::parallel_for(0, workers, 1, drain);
}

// Rows behind the last request hold no query: 0 and -inf, so that no garbage reaches what follows.
void clear_tail(const TreeAttentionParams& p) {
  int64_t row = 0;
  for (int64_t b = 0; b < p.num_requests; b++) {
    RequestShape s = request_shape(p, b);
    if (s.first_row + s.num_nodes > row) row = s.first_row + s.num_nodes;
  }
  for (; row < p.num_rows; row++)
    for (int64_t h = 0; h < p.num_q_heads; h++) {
      int bytes = element_bytes(p.q_element);
      std::memset(p.out + (row * p.out_stride_n + h * p.out_stride_h) * bytes, 0, p.v_dim * bytes);
      if (p.lse) p.lse[row * p.lse_stride_n + h] = -INFINITY;
    }
}

void tree_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor context_lens,
                        Tensor cu_nodes, std::optional<Tensor> tree_mask, std::optional<Tensor> query_start,
                        std::optional<Tensor> causal, std::optional<Tensor> positions,
                        std::optional<Tensor> request_order, std::optional<Tensor> sinks, std::optional<Tensor> k_scale,
                        std::optional<Tensor> v_scale, std::optional<Tensor> plan, int64_t max_nodes,
                        double softmax_scale, double softcap, int64_t window, std::string kv_layout, int64_t num_splits,
                        bool batch_invariant, std::optional<Tensor> workspace, Tensor out, std::optional<Tensor> lse) {
  TreeAttentionParams p = {};
  p.q_element = element_of("q", q.scalar_type(), false);
  p.kv_element = element_of("k_cache", k_cache.scalar_type(), true);
  if (p.kv_element != p.q_element && element_bytes(p.kv_element) != 1)
    fail(kOp, "k_cache", dtype_name(q.scalar_type()), " (the dtype of q) or float8, got ",
         dtype_name(k_cache.scalar_type()));
  check_tensor(kOp, "q", q, q.scalar_type(), {kAny, kAny, kAny});
  check_tensor(kOp, "k_cache", k_cache, k_cache.scalar_type(), {kAny, kAny, kAny, q.size(2)});
  const bool hnd = is_hnd(kOp, kv_layout);
  const int row_dim = hnd ? 2 : 1, head_axis = hnd ? 1 : 2;
  check_tensor(kOp, "v_cache", v_cache, k_cache.scalar_type(),
               {k_cache.size(0), k_cache.size(1), k_cache.size(2), kAny});
  p.num_rows = q.size(0);
  p.num_q_heads = static_cast<int>(q.size(1));
  p.head_dim = static_cast<int>(q.size(2));
  p.v_dim = static_cast<int>(v_cache.size(3));
  p.num_kv_heads = static_cast<int>(k_cache.size(head_axis));
  p.num_pages = k_cache.size(0);
  p.page_size = k_cache.size(row_dim);
  if (p.num_kv_heads == 0 || p.num_q_heads % p.num_kv_heads)
    fail(kOp, "q", "a multiple of ", p.num_kv_heads, " query heads, got ", p.num_q_heads);
  p.group = p.num_q_heads / p.num_kv_heads;
  for (int dim : {p.head_dim, p.v_dim})
    if (dim < 16 || dim > kMaxHeadDim || dim % 16)
      fail(kOp, "q", "head dims that are multiples of 16 up to 256, got ", dim);
  if (p.page_size < 1) fail(kOp, "k_cache", "at least one row a page, got ", shape_text(k_cache));
  for (auto [name, tensor] :
       {std::pair<const char*, const Tensor*>{"q", &q}, {"k_cache", &k_cache}, {"v_cache", &v_cache}, {"out", &out}})
    check_dense_rows(kOp, name, *tensor);

  check_index(kOp, "context_lens", context_lens, {kAny});
  p.num_requests = context_lens.size(0);
  check_index(kOp, "cu_nodes", cu_nodes, {p.num_requests + 1});
  check_index(kOp, "page_table", page_table, {p.num_requests, kAny});
  check_index(kOp, "tree_mask", tree_mask, {p.num_rows, kAny});
  check_index(kOp, "query_start", query_start, {p.num_requests});
  check_index(kOp, "causal", causal, {p.num_requests}, ScalarType::Bool);
  check_index(kOp, "positions", positions, {p.num_rows});
  check_index(kOp, "request_order", request_order, {kAny});
  check_index(kOp, "sinks", sinks, {p.num_q_heads}, ScalarType::Float);
  check_tensor(kOp, "out", out, q.scalar_type(), {p.num_rows, p.num_q_heads, p.v_dim});
  if (lse) {
    check_tensor(kOp, "lse", *lse, ScalarType::Float, {p.num_rows, p.num_q_heads});
    check_dense_rows(kOp, "lse", *lse);
    p.lse = mutable_data<float>(*lse);
    p.lse_stride_n = lse->stride(0);
  }
  if (window >= 0 && tree_mask && !positions)
    fail(kOp, "positions", "a tensor (a window over a tree needs depths), got None");
  if (window >= 0 && tree_mask && query_start)
    fail(kOp, "query_start", "None with a window over a tree (earlier slots have no depth here), got a tensor");
  if (tree_mask && !causal && max_nodes > 32 * tree_mask->size(1))
    fail(kOp, "tree_mask", (max_nodes + 31) / 32, " words a row for max_nodes ", max_nodes, ", got ",
         shape_text(*tree_mask));
  check_index(kOp, "plan", plan, {kAny});  // how GPU blocks share the work; threads here draw items from a counter
  check_range(kOp, "num_splits", num_splits, 0, 1 << 20);

  p.kernels = &choose_kernels(p.q_element);
  p.q = data<char>(q);
  p.k_cache = data<char>(k_cache);
  p.v_cache = data<char>(v_cache);
  p.out = mutable_data<char>(out);
  p.q_stride_n = q.stride(0);
  p.q_stride_h = q.stride(1);
  p.out_stride_n = out.stride(0);
  p.out_stride_h = out.stride(1);
  p.k_stride_page = k_cache.stride(0);
  p.k_stride_row = k_cache.stride(row_dim);
  p.k_stride_head = k_cache.stride(head_axis);
  p.v_stride_page = v_cache.stride(0);
  p.v_stride_row = v_cache.stride(row_dim);
  p.v_stride_head = v_cache.stride(head_axis);
  p.page_table = data<int32_t>(page_table);
  p.max_pages = page_table.size(1);
  p.context_lens = data<int32_t>(context_lens);
  p.cu_nodes = data<int32_t>(cu_nodes);
  p.tree_mask = data_or_null<int32_t>(tree_mask);
  p.num_words = tree_mask ? static_cast<int>(tree_mask->size(1)) : 0;
  p.query_start = data_or_null<int32_t>(query_start);
  p.causal = data_or_null<bool>(causal);
  p.positions = data_or_null<int32_t>(positions);
  p.request_order = data_or_null<int32_t>(request_order);
  p.num_order = request_order ? request_order->size(0) : p.num_requests;
  p.sinks = data_or_null<float>(sinks);
  p.k_scale = scale_of("k_scale", k_scale, p.num_kv_heads, p.k_scale_stride);
  p.v_scale = scale_of("v_scale", v_scale, p.num_kv_heads, p.v_scale_stride);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  p.window = static_cast<int>(window < -1 ? -1 : window > INT32_MAX ? -1 : window);
  p.num_splits = static_cast<int>(num_splits);
  p.batch_invariant = batch_invariant;
  if (p.num_rows == 0 || p.num_q_heads == 0) return;
  run(p);
  clear_tail(p);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("tree_attention", TORCH_BOX(&specdec::tree_attention_cpu));
}
