// Arguments of plan_tree_attention, checked, and the variant of the kernel that a plan is made for. Host code.
#pragma once
#include "attention/plan.h"
#include "common/check.h"

namespace specdec {

// What a kernel variant may use; the defaults are those of an sm_80 with 4 multiprocessors (the CPU runtime).
// shared_tile: what a row tile of the loaded code may take. Tiles too large for the architecture they were compiled for
// have no code, and a device may run code of an older one (PTX, or another minor version's) that holds less than it.
struct MachineLimits {
  int64_t multiprocessors = 4, shared_block = 163 << 10, shared_multiprocessor = 164 << 10, shared_tile = 163 << 10;
};

// Rows of the variants (S, M, L, XL: docs/attention.md) that serve a head dim where a block may have so much shared
// memory; 0 ends the list.
struct VariantRows {
  int rows[5];
};
inline VariantRows variant_rows(int64_t head_dim, int64_t shared_block) {
  switch (head_dim) {
    case 64: return {16, 32, 64, 128};
    case 80:
    case 96: return {32, 64};
    case 128: return shared_block < (128 << 10) ? VariantRows{16, 32, 64} : VariantRows{16, 32, 64, 128};
    case 192: return shared_block < (128 << 10) ? VariantRows{16} : VariantRows{16, 64};
    case 256: return shared_block < (176 << 10) ? VariantRows{16} : VariantRows{16, 64};
    default: return {};
  }
}

// Rows of the row tile for requests of up to `most_rows` packed rows; 0 where no tensor-core kernel exists. The
// batch-invariant choice stays among variants whose rows are summed in one order (the warps split the keys).
inline int choose_tile_rows(int64_t head_dim, int64_t most_rows, bool batch_invariant, int64_t shared_block) {
  int best = 0;
  for (int rows : variant_rows(head_dim, shared_block).rows) {
    if (rows == 0 || (batch_invariant && rows > 32)) break;
    best = rows;
    if (rows >= most_rows) break;
  }
  return best;
}

// Shared memory of a block beside what a launch asks for: the system's part, and static arrays (WalkState, MergeState).
constexpr int64_t reserved_shared(int64_t tile_rows) {
  return 1024 + 384 + (tile_rows <= 32 ? 32 * tile_rows : 0);
}

// Workers of a plan when the caller names no number: as many blocks as stay on the machine at once, for 16-bit caches
// (two stages of keys and values, queries, lookups; attention_tile.cuh has the exact count).
inline int64_t default_workers(const MachineLimits& machine, int64_t head_dim, int64_t tile_rows) {
  const int64_t v_dim = head_dim == 192 ? 128 : head_dim;
  const int64_t block = tile_rows * (2 * head_dim + 16) + 2 * kTileKeys * 2 * (head_dim + v_dim + 16) +
                        3 * (16 * kTileKeys + 16 * tile_rows + 48) + reserved_shared(tile_rows);
  return machine.multiprocessors * (2 * block <= machine.shared_multiprocessor ? 2 : 1);
}

struct PlanParams {
  const int32_t *context_lens, *cu_nodes, *request_order;
  int32_t num_requests, num_order, kv_heads, group, tile_rows, workers;
  int64_t window;
  bool batch_invariant;
  int32_t* plan;

  SPECDEC_HD PlanRequest request(int32_t n) const {
    const int32_t b = request_order ? request_order[n] : n;
    if (b < 0 || b >= num_requests) return {0, 0};
    return plan_request(context_lens[b], cu_nodes[b], cu_nodes[b + 1], group, kv_heads, tile_rows, window);
  }
  SPECDEC_HD void write_header(int64_t total, int64_t longest, int grain) const {
    // Garbage offsets may ask for more items than can be counted: such a plan is not followed (share 0).
    const uint32_t share = total > INT32_MAX ? 0
                                             : plan_share(static_cast<uint32_t>(total), static_cast<uint32_t>(longest),
                                                          workers, tile_rows, grain);
    plan[kPlanTag] = kPlanTagValue;
    plan[kPlanTileRows] = tile_rows;
    plan[kPlanKvHeads] = kv_heads;
    plan[kPlanOrder] = num_order;
    plan[kPlanShare] = static_cast<int32_t>(share);
    plan[kPlanSnap] = batch_invariant ? -1 : static_cast<int32_t>(share / 8 > 2 ? share / 8 : 2);
    plan[kPlanWorkers] = workers;
    plan[kPlanGrain] = static_cast<int32_t>(int64_t{1} << grain);
  }
};

inline PlanParams plan_params(const Tensor& context_lens, const Tensor& cu_nodes,
                              const std::optional<Tensor>& request_order, int64_t num_q_heads, int64_t num_kv_heads,
                              int64_t head_dim, int64_t max_nodes, int64_t window, int64_t num_workers,
                              bool batch_invariant, const Tensor& plan, const MachineLimits& machine) {
  const char* op = "plan_tree_attention";
  check_index(op, "context_lens", context_lens, {kAny});
  const int64_t requests = context_lens.size(0);
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "request_order", request_order, {kAny});
  check_range(op, "num_kv_heads", num_kv_heads, 1, 1 << 20);
  check_range(op, "num_q_heads", num_q_heads, 1, 1 << 20);
  if (num_q_heads % num_kv_heads)
    fail(op, "num_q_heads", "a multiple of ", num_kv_heads, " KV heads, got ", num_q_heads);
  check_range(op, "max_nodes", max_nodes, 0, INT32_MAX);
  check_range(op, "num_workers", num_workers, 0, 1 << 20);
  PlanParams p = {};
  p.num_requests = static_cast<int32_t>(requests);
  p.num_order = request_order ? static_cast<int32_t>(request_order->size(0)) : p.num_requests;
  check_index(op, "plan", plan, {kPlanHeader + 2 * int64_t{p.num_order} + 1});
  p.context_lens = data<int32_t>(context_lens);
  p.cu_nodes = data<int32_t>(cu_nodes);
  p.request_order = data_or_null<int32_t>(request_order);
  p.kv_heads = static_cast<int32_t>(num_kv_heads);
  p.group = static_cast<int32_t>(num_q_heads / num_kv_heads);
  p.tile_rows = choose_tile_rows(head_dim, max_nodes * p.group, batch_invariant, machine.shared_tile);
  if (p.tile_rows == 0) fail(op, "head_dim", "64, 80, 96, 128, 192 or 256, got ", head_dim);
  p.workers = static_cast<int32_t>(num_workers ? num_workers : default_workers(machine, head_dim, p.tile_rows));
  p.window = window;
  p.batch_invariant = batch_invariant;
  p.plan = mutable_data<int32_t>(plan);
  return p;
}

}  // namespace specdec
