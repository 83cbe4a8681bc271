// merge_attention: attention over two disjoint key sets from the results over each, weighted by exp(lse).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "common/check.h"
#include "common/dispatch.h"
#include "merge.h"

namespace specdec {
namespace {

void store(float x, float* out) {
  *out = x;
}
void store(float x, BFloat16* out) {
  *out = to_bfloat16(x);
}
void store(float x, Half* out) {
  *out = to_half(x);
}

struct Part {
  const void* out;
  const float* lse;
  int64_t stride_n, stride_h, lse_stride;
};

Part part_of(const char* out_name, const Tensor& out, const char* lse_name, const Tensor& lse, const Tensor& like) {
  const char* op = "merge_attention";
  check_tensor(op, out_name, out, like.scalar_type(), {like.size(0), like.size(1), like.size(2)});
  check_tensor(op, lse_name, lse, ScalarType::Float, {like.size(0), like.size(1)});
  check_dense_rows(op, out_name, out);
  check_dense_rows(op, lse_name, lse);
  return {data<char>(out), data<float>(lse), out.stride(0), out.stride(1), lse.stride(0)};
}

void merge_attention_cpu(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, std::optional<Tensor> sinks,
                         Tensor out, std::optional<Tensor> lse) {
  const char* op = "merge_attention";
  check_tensor(op, "out_a", out_a, out_a.scalar_type(), {kAny, kAny, kAny});
  const Part a = part_of("out_a", out_a, "lse_a", lse_a, out_a), b = part_of("out_b", out_b, "lse_b", lse_b, out_a);
  Part result = part_of("out", out, "lse", lse ? *lse : lse_a, out_a);
  const int64_t num_rows = out_a.size(0), num_heads = out_a.size(1), dim = out_a.size(2);
  check_index(op, "sinks", sinks, {num_heads}, ScalarType::Float);
  const float* sink = data_or_null<float>(sinks);
  float* lse_out = lse ? mutable_data<float>(*lse) : nullptr;
  dispatch_float(op, "out_a", out_a.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    T* destination = mutable_data<T>(out);
    torch::stable::parallel_for(0, num_rows * num_heads, 16384 / (dim + 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const int64_t n = i / num_heads, h = i % num_heads;
        const MergeWeights w =
            merge_weights(a.lse[n * a.lse_stride + h], b.lse[n * b.lse_stride + h], sink ? sink + h : nullptr);
        const T* x = static_cast<const T*>(a.out) + n * a.stride_n + h * a.stride_h;
        const T* y = static_cast<const T*>(b.out) + n * b.stride_n + h * b.stride_h;
        T* z = destination + n * result.stride_n + h * result.stride_h;
        // An empty part may hold anything: it is left out, not multiplied by its zero.
        for (int64_t d = 0; d < dim; d++) {
          float sum = w.a == 0.0f ? 0.0f : w.a * to_float(x[d]);
          store(w.b == 0.0f ? sum : sum + w.b * to_float(y[d]), z + d);
        }
        if (lse_out) lse_out[n * result.lse_stride + h] = w.lse;
      }
    });
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("merge_attention", TORCH_BOX(&specdec::merge_attention_cpu));
}
