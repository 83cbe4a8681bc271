// plan_tree_attention on the CPU: the layout and the arithmetic of attention/plan.h in two plain loops.
#include <torch/csrc/stable/library.h>

#include "attention/plan.h"
#include "attention/plan_checks.h"

namespace specdec {

void plan_tree_attention_cpu(Tensor context_lens, Tensor cu_nodes, std::optional<Tensor> request_order,
                             int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim, int64_t max_nodes,
                             int64_t window, int64_t num_workers, bool batch_invariant, Tensor plan) {
  const PlanParams p = plan_params(context_lens, cu_nodes, request_order, num_q_heads, num_kv_heads, head_dim,
                                   max_nodes, window, num_workers, batch_invariant, plan, MachineLimits{});
  int64_t total = 0, longest = 0;
  for (int32_t n = 0; n < p.num_order; n++) {
    const PlanRequest r = p.request(n);
    total += r.items * r.units;
    if (r.items && r.units > longest) longest = r.units;
  }
  const int grain = plan_grain(total);
  int32_t *first_unit = p.plan + kPlanHeader, *item_units = first_unit + p.num_order + 1;
  int64_t unit = 0;
  for (int32_t n = 0; n < p.num_order; n++) {
    const PlanRequest r = p.request(n);
    first_unit[n] = static_cast<int32_t>(unit);
    item_units[n] = static_cast<int32_t>(ceil_shift(r.units, grain));
    unit += r.items * ceil_shift(r.units, grain);
  }
  first_unit[p.num_order] = static_cast<int32_t>(unit);
  p.write_header(unit, ceil_shift(longest, grain), grain);
}

}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("plan_tree_attention", TORCH_BOX(&specdec::plan_tree_attention_cpu));
}
