// tree_attention on the GPU: checks, choice of the kernel, launch.
//
//   bfloat16, float16 queries with 16-byte rows and a compiled head dim   attention_mma.cuh, 16 to 128 rows a block
//   everything else                                                       attention_simt.cuh, one warp a row
//
// A workspace (bytes, zeroed once, left zero by every call) allows splits of the KV length: a plan of this call's own,
// counters, partial results (docs/attention.md). Without one, or with batch_invariant, a row is summed by one block,
// tile after tile.
#include "attention/attention_launch.h"
#include "attention/attention_simt.cuh"
#include "common/dispatch.h"

#if defined(SPECDEC_EMULATED)
extern "C" bool specdec_attention_sm90(const specdec::AttentionParams& p, const specdec::MmaLaunch& launch, bool bf16);
#else
#include <dlfcn.h>
#endif

namespace specdec {

static const char* const kAttentionOp = "tree_attention";

static const float* scale_of(const char* argument, const std::optional<Tensor>& scale, int64_t heads, int64_t& stride) {
  if (!scale) return nullptr;
  check_tensor(kAttentionOp, argument, *scale, ScalarType::Float, {kAny});
  if (scale->size(0) != 1 && scale->size(0) != heads)
    fail(kAttentionOp, argument, "shape [1] or [", heads, "], got ", shape_text(*scale));
  stride = scale->size(0) == 1 ? 0 : scale->stride(0);
  return data<float>(*scale);
}

// Places the call's plan, tickets and partial results in the workspace.
static void lay_out_workspace(AttentionParams& p, const Tensor& workspace, int tile_rows) {
  const int64_t bytes = workspace.numel() * static_cast<int64_t>(workspace.element_size());
  const int64_t plan_bytes = ceil_div(kPlanHeader + 2 * int64_t{p.num_order} + 1, 32) * 128;
  const int64_t pair = 2 * 4 * int64_t{tile_rows} * (p.v_dim + 2), room = bytes - plan_bytes - 256;  // 256: alignment
  p.slot_pairs = room < pair ? 0 : room / (pair + 4);
  char* base = mutable_data<char>(workspace);
  base += (16 - reinterpret_cast<intptr_t>(base) % 16) % 16;
  p.own_plan = reinterpret_cast<int32_t*>(base);
  p.tickets = reinterpret_cast<int32_t*>(base + plan_bytes);
  p.slots = reinterpret_cast<float*>(base + plan_bytes + ceil_div((p.slot_pairs + 1) * 4, 16) * 16);
}

// How the call's items are spread: the caller's plan, a plan made here, a fixed number of parts, or one block an item.
// Returns the grid.
static int64_t schedule(AttentionParams& p, const std::optional<Tensor>& plan, int64_t num_splits, int tile_rows,
                        const MachineLimits& machine, Stream stream) {
  const int64_t items = int64_t{p.num_order} * p.num_kv_heads * p.row_tiles;
  const int64_t workers = default_workers(machine, p.head_dim, tile_rows);
  int32_t* const own_plan = p.own_plan;
  p.own_plan = nullptr;
  p.num_splits = 1;
  if (plan) {
    p.plan = data<int32_t>(*plan);
    return workers;
  }
  if (p.batch_invariant || num_splits == 1 || p.slot_pairs < 2) return items;
  if (num_splits > 1) {
    const int64_t most = p.slot_pairs / (items ? items : 1);
    p.num_splits = static_cast<int32_t>(num_splits < most ? num_splits : most > 1 ? most : 1);
    return items * p.num_splits;
  }
  PlanParams own = {};
  own.context_lens = p.context_lens;
  own.cu_nodes = p.cu_nodes;
  own.request_order = p.request_order;
  own.num_requests = p.num_requests;
  own.num_order = p.num_order;
  own.kv_heads = p.num_kv_heads;
  own.group = p.group;
  own.tile_rows = tile_rows;
  own.workers = static_cast<int32_t>(workers < p.slot_pairs ? workers : p.slot_pairs);
  own.window = p.window;
  own.plan = own_plan;
  launch_plan(own, stream);
  p.plan = p.own_plan = own_plan;
  return own.workers;
}

template <class T, class KV>
static void launch_simt(const AttentionParams& p, int64_t rows, Stream stream) {
  const dim3 grid(static_cast<unsigned>((rows + kSimtWarps - 1) / kSimtWarps), static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(p.num_order));
  SPECDEC_LAUNCH((tree_attention_simt_kernel<T, KV>), grid, dim3(32 * kSimtWarps), 0, stream, p);
}

// 16-byte copies need aligned rows in both caches and q; outputs are stored in units of up to 8 bytes.
static bool aligned_rows(const AttentionParams& p, int64_t kv_size) {
  int64_t bits =
      reinterpret_cast<int64_t>(p.q) | reinterpret_cast<int64_t>(p.k_cache) | reinterpret_cast<int64_t>(p.v_cache);
  for (int64_t stride :
       {p.k_stride_page, p.k_stride_row, p.k_stride_head, p.v_stride_page, p.v_stride_row, p.v_stride_head})
    bits |= stride * kv_size;
  for (int64_t stride : {p.q_stride_n, p.q_stride_h}) bits |= stride * 2;
  const int64_t out_bits = reinterpret_cast<int64_t>(p.out) | p.out_stride_n * 2 | p.out_stride_h * 2;
  return bits % 16 == 0 && out_bits % 8 == 0;
}

// The Hopper kernel where the device is one and the library of sm_90a code lies beside this one; null elsewhere.
static HopperLaunch hopper_launch(const Tensor& q) {
#if defined(SPECDEC_EMULATED)
  return emulated::hopper ? &specdec_attention_sm90 : nullptr;
#else
  static const HopperLaunch found = [] {
    Dl_info self;
    if (!dladdr(reinterpret_cast<const void*>(&hopper_launch), &self)) return HopperLaunch{nullptr};
    std::string path = self.dli_fname;
    const size_t at = path.rfind("_cuda.");
    if (at == std::string::npos) return HopperLaunch{nullptr};
    void* library = dlopen(path.replace(at, 6, "_cuda_sm90.").c_str(), RTLD_NOW | RTLD_LOCAL);
    return library ? reinterpret_cast<HopperLaunch>(dlsym(library, "specdec_attention_sm90")) : HopperLaunch{nullptr};
  }();
  return found && is_hopper(q) ? found : nullptr;
#endif
}

template <class T>
static bool launch_mma(const AttentionParams& p, const MmaLaunch& launch, bool float8) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return float8 ? launch_mma_bfloat16_float8(p, launch) : launch_mma_bfloat16(p, launch);
  else if constexpr (std::is_same_v<T, Half>)
    return float8 ? launch_mma_float16_float8(p, launch) : launch_mma_float16(p, launch);
  return false;
}

template <class T>
static void run(AttentionParams& p, ScalarType kv_dtype, int64_t max_nodes, const std::optional<Tensor>& plan,
                const std::optional<Tensor>& workspace, int64_t num_splits, const Tensor& q) {
  const Stream stream = current_stream(q);
  const bool float8 = kv_dtype == ScalarType::Float8_e4m3fn || kv_dtype == ScalarType::Float8_e5m2;
  const int64_t most_rows = (p.causal && p.num_rows > max_nodes ? p.num_rows : max_nodes) * p.group;
  if (p.num_order > 0 && most_rows > 0 && !std::is_same_v<T, float> && aligned_rows(p, float8 ? 1 : 2)) {
    const MachineLimits machine = machine_limits(q, &clear_tail_kernel<T>);
    const int rows = choose_tile_rows(p.head_dim, max_nodes * p.group, p.batch_invariant, machine.shared_tile);
    const bool known = rows > 0 && p.v_dim == (p.head_dim == 192 ? 128 : p.head_dim);
    if (known && launch_mma<T>(p, {rows, 0, machine, stream, true}, float8)) {
      p.row_tiles = static_cast<int32_t>(ceil_div(most_rows, rows));
      p.e5m2 = kv_dtype == ScalarType::Float8_e5m2;
      if (workspace) lay_out_workspace(p, *workspace, rows);
      const int64_t blocks = schedule(p, plan, num_splits, rows, machine, stream);
      const HopperLaunch hopper = rows == 128 && !float8 ? hopper_launch(q) : nullptr;
      if (!hopper || !hopper(p, {rows, blocks, machine, stream}, std::is_same_v<T, BFloat16>))
        launch_mma<T>(p, {rows, blocks, machine, stream}, float8);
      return;
    }
  }
  SPECDEC_LAUNCH((clear_tail_kernel<T>), dim3(1), dim3(32 * kSimtWarps), 0, stream, p);
  if (p.num_order == 0 || most_rows == 0) return;
  switch (kv_dtype) {
    case ScalarType::Float8_e4m3fn: return launch_simt<T, Float8E4M3>(p, most_rows, stream);
    case ScalarType::Float8_e5m2: return launch_simt<T, Float8E5M2>(p, most_rows, stream);
    default: return launch_simt<T, T>(p, most_rows, stream);
  }
}

void tree_attention_cuda(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor context_lens,
                         Tensor cu_nodes, std::optional<Tensor> tree_mask, std::optional<Tensor> query_start,
                         std::optional<Tensor> causal, std::optional<Tensor> positions,
                         std::optional<Tensor> request_order, std::optional<Tensor> sinks,
                         std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, std::optional<Tensor> plan,
                         int64_t max_nodes, double softmax_scale, double softcap, int64_t window, std::string kv_layout,
                         int64_t num_splits, bool batch_invariant, std::optional<Tensor> workspace, Tensor out,
                         std::optional<Tensor> lse) {
  const char* op = kAttentionOp;
  AttentionParams p = {};
  const ScalarType q_dtype = q.scalar_type(), kv_dtype = k_cache.scalar_type();
  const bool float8 = kv_dtype == ScalarType::Float8_e4m3fn || kv_dtype == ScalarType::Float8_e5m2;
  if (kv_dtype != q_dtype && !float8)
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
    if (dim < 16 || dim > kSimtMaxDim || dim % 16)
      fail(op, "q", "head dims that are multiples of 16 up to 256, got ", dim);
  if (p.page_size < 1) fail(op, "k_cache", "at least one row a page, got ", shape_text(k_cache));
  check_dense_rows(op, "q", q);
  check_dense_rows(op, "k_cache", k_cache);
  check_dense_rows(op, "v_cache", v_cache);
  check_dense_rows(op, "out", out);
  check_index(op, "context_lens", context_lens, {kAny});
  p.num_requests = static_cast<int32_t>(context_lens.size(0));
  check_index(op, "cu_nodes", cu_nodes, {p.num_requests + 1});
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
  if (window >= 0 && tree_mask && !positions)
    fail(op, "positions", "a tensor (a window over a tree needs depths), got None");
  if (window >= 0 && tree_mask && query_start)
    fail(op, "query_start", "None with a window over a tree (earlier slots have no depth here), got a tensor");
  if (tree_mask && !causal && max_nodes > 32 * tree_mask->size(1))
    fail(op, "tree_mask", (max_nodes + 31) / 32, " words a row for max_nodes ", max_nodes, ", got ",
         shape_text(*tree_mask));
  check_index(op, "plan", plan, {kPlanHeader + 2 * (request_order ? request_order->size(0) : p.num_requests) + 1});
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
  p.num_order = request_order ? static_cast<int32_t>(request_order->size(0)) : p.num_requests;
  p.sinks = data_or_null<float>(sinks);
  p.k_scale = scale_of("k_scale", k_scale, p.num_kv_heads, p.k_scale_stride);
  p.v_scale = scale_of("v_scale", v_scale, p.num_kv_heads, p.v_scale_stride);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  p.window = window < 0 || window > 2147483647 ? -1 : static_cast<int32_t>(window);
  p.batch_invariant = batch_invariant;
  if (p.num_rows == 0 || p.num_q_heads == 0) return;
  DeviceGuard guard(q);
  dispatch_float(op, "q", q_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    run<T>(p, kv_dtype, max_nodes, plan, workspace, num_splits, q);
  });
  check_launch(op);
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("tree_attention", TORCH_BOX(&specdec::tree_attention_cuda));
}
