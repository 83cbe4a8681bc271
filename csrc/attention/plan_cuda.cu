// plan_tree_attention on the GPU: one block, two passes over the requests (totals, then prefix sums). Reads device
// lengths only, so it is captured in a graph and run again each step. Grid: 1. Shared memory: one int64 a warp.
#include "attention/attention_launch.h"
#include "common/reduce.cuh"

namespace specdec {

constexpr int kPlanThreads = 256;

__global__ void __launch_bounds__(kPlanThreads, 4) plan_tree_attention_kernel(const PlanParams p) {
  SPECDEC_SHARED(int64_t, scratch, kPlanThreads / 32);
  int64_t total = 0, longest = 0;
  for (int32_t n = threadIdx.x; n < p.num_order; n += kPlanThreads) {
    const PlanRequest r = p.request(n);
    total += r.items * r.units;
    if (r.items && r.units > longest) longest = r.units;
  }
  total = block_reduce(total, Sum{}, int64_t{0}, scratch);
  longest = block_reduce(longest, Maximum{}, int64_t{0}, scratch);
  const int grain = plan_grain(total);
  int32_t *first_unit = p.plan + kPlanHeader, *item_units = first_unit + p.num_order + 1;
  int64_t unit = 0;
  for (int32_t base = 0; base < p.num_order; base += kPlanThreads) {
    const int32_t n = base + static_cast<int32_t>(threadIdx.x);
    const PlanRequest r = n < p.num_order ? p.request(n) : PlanRequest{0, 0};
    const int64_t units = ceil_shift(r.units, grain);
    int64_t all = 0;
    const int64_t before = block_exclusive_sum(r.items * units, &all, scratch);
    if (n < p.num_order) {
      first_unit[n] = static_cast<int32_t>(unit + before);
      item_units[n] = static_cast<int32_t>(units);
    }
    unit += all;
  }
  if (threadIdx.x != 0) return;
  first_unit[p.num_order] = static_cast<int32_t>(unit);
  p.write_header(unit, ceil_shift(longest, grain), grain);
}

void launch_plan(const PlanParams& p, Stream stream) {
  SPECDEC_LAUNCH(plan_tree_attention_kernel, dim3(1), dim3(kPlanThreads), 0, stream, p);
}

void plan_tree_attention_cuda(Tensor context_lens, Tensor cu_nodes, std::optional<Tensor> request_order,
                              int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim, int64_t max_nodes,
                              int64_t window, int64_t num_workers, bool batch_invariant, Tensor plan) {
  DeviceGuard guard(context_lens);
  const MachineLimits machine = machine_limits(context_lens, &plan_tree_attention_kernel);
  const PlanParams p = plan_params(context_lens, cu_nodes, request_order, num_q_heads, num_kv_heads, head_dim,
                                   max_nodes, window, num_workers, batch_invariant, plan, machine);
  launch_plan(p, current_stream(context_lens));
  check_launch("plan_tree_attention");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("plan_tree_attention", TORCH_BOX(&specdec::plan_tree_attention_cuda));
}
