// merge_attention on the CPU: a row of one head after the other.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "attention/merge.h"

namespace specdec {
namespace {

void merge_attention_cpu(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, std::optional<Tensor> sinks,
                         Tensor out, std::optional<Tensor> lse) {
  const MergeArgs p = check_merge(out_a, lse_a, out_b, lse_b, sinks, out, lse);
  dispatch_float("merge_attention", "out_a", out_a.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    torch::stable::parallel_for(0, p.num_rows * p.num_heads, 16384 / (p.dim + 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const int64_t n = i / p.num_heads, h = i % p.num_heads;
        const MergeWeights w = p.weights(n, h);
        const T* x = static_cast<const T*>(p.a.out) + n * p.a.stride_row + h * p.a.stride_head;
        const T* y = static_cast<const T*>(p.b.out) + n * p.b.stride_row + h * p.b.stride_head;
        T* z = static_cast<T*>(p.to.out) + n * p.to.stride_row + h * p.to.stride_head;
        for (int64_t d = 0; d < p.dim; d++) z[d] = stored<T>(merged(w, to_float(x[d]), to_float(y[d])));
        if (p.to.lse) p.to.lse[n * p.to.lse_stride + h] = w.lse;
      }
    });
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("merge_attention", TORCH_BOX(&specdec::merge_attention_cpu));
}
