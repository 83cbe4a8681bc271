// tree_attention on the GPU: choice of the kernel, launch.
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

// Row tiles of the longest request. All tiles of a call are counted in 32 bits, as are the blocks of a launch.
static void count_row_tiles(AttentionParams& p, int64_t most_rows, int tile_rows) {
  const int64_t tiles = ceil_div(most_rows, tile_rows), most = INT32_MAX / p.num_kv_heads / p.num_order;
  if (tiles > most)
    fail(kAttentionOp, "max_nodes", "at most ", most, " tiles of ", tile_rows, " rows a request and KV head, got ",
         tiles);
  p.row_tiles = static_cast<int32_t>(tiles);
}

template <class T, class KV>
static void launch_simt(AttentionParams p, Stream stream) {
  constexpr int32_t kMost = 65535;  // of grid dimensions y and z
  if (p.num_kv_heads > kMost) fail(kAttentionOp, "k_cache", "at most ", kMost, " heads, got ", p.num_kv_heads);
  for (; p.first_order < p.num_order; p.first_order += kMost) {
    const int32_t left = p.num_order - p.first_order;
    const dim3 grid(static_cast<unsigned>(p.row_tiles), static_cast<unsigned>(p.num_kv_heads),
                    static_cast<unsigned>(left < kMost ? left : kMost));
    SPECDEC_LAUNCH((tree_attention_simt_kernel<T, KV>), grid, dim3(32 * kSimtWarps), 0, stream, p);
  }
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
  const bool float8 = is_float8(kv_dtype);
  const int64_t most_rows = (p.causal && p.num_rows > max_nodes ? p.num_rows : max_nodes) * p.group;
  if (p.num_order > 0 && most_rows > 0 && !std::is_same_v<T, float> && aligned_rows(p, float8 ? 1 : 2)) {
    const MachineLimits machine = machine_limits(q, &clear_tail_kernel<T>);
    const int rows = choose_tile_rows(p.head_dim, max_nodes * p.group, p.batch_invariant, machine.shared_tile);
    const bool known = rows > 0 && p.v_dim == (p.head_dim == 192 ? 128 : p.head_dim);
    if (known && launch_mma<T>(p, {rows, 0, machine, stream, true}, float8)) {
      count_row_tiles(p, most_rows, rows);
      p.e5m2 = kv_dtype == ScalarType::Float8_e5m2;
      if (workspace) lay_out_workspace(p, *workspace, rows);
      const int64_t blocks = schedule(p, plan, num_splits, rows, machine, stream);
      const HopperLaunch hopper = rows == 128 && !float8 ? hopper_launch(q) : nullptr;
      if (!hopper || !hopper(p, {rows, blocks, machine, stream}, std::is_same_v<T, BFloat16>))
        launch_mma<T>(p, {rows, blocks, machine, stream}, float8);
      return;
    }
  }
  const bool any = p.num_order > 0 && most_rows > 0;
  if (any) count_row_tiles(p, most_rows, kSimtWarps);
  const auto blocks = static_cast<unsigned>(multiprocessor_count(q));
  SPECDEC_LAUNCH((clear_tail_kernel<T>), dim3(blocks), dim3(32 * kSimtWarps), 0, stream, p);
  if (!any) return;
  switch (kv_dtype) {
    case ScalarType::Float8_e4m3fn: return launch_simt<T, Float8E4M3>(p, stream);
    case ScalarType::Float8_e5m2: return launch_simt<T, Float8E5M2>(p, stream);
    default: return launch_simt<T, T>(p, stream);
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
  AttentionParams p = {};
  check_tree_attention(p, q, k_cache, v_cache, page_table, context_lens, cu_nodes, tree_mask, query_start, causal,
                       positions, request_order, sinks, k_scale, v_scale, plan, max_nodes, softmax_scale, softcap,
                       window, kv_layout, num_splits, batch_invariant, out, lse);
  if (p.num_rows == 0 || p.num_q_heads == 0) return;
  DeviceGuard guard(q);
  dispatch_float(kAttentionOp, "q", q.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    run<T>(p, k_cache.scalar_type(), max_nodes, plan, workspace, num_splits, q);
  });
  check_launch(kAttentionOp);
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("tree_attention", TORCH_BOX(&specdec::tree_attention_cuda));
}
