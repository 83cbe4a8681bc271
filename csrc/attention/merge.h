// merge_attention: attention over two disjoint key sets from the results over each, weighted by exp(lse). What every
// native backend shares; arguments are checked here, before the first write.
#pragma once
#include <cmath>
#include <optional>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/stored.h"

namespace specdec {

struct MergeWeights {
  float a, b, lse;
};

// out = a * out_a + b * out_b. A sink takes part in the normaliser and not in lse. Both parts empty: 0, 0, -inf.
SPECDEC_HD MergeWeights merge_weights(float lse_a, float lse_b, const float* sink) {
  float top = lse_a > lse_b ? lse_a : lse_b;
  if (lse_a == -INFINITY && lse_b == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  float weight_a = expf(lse_a - top), weight_b = expf(lse_b - top);
  float sum = weight_a + weight_b;
  float inverse = 1.0f / (sink ? sum + expf(*sink - top) : sum);
  return {weight_a * inverse, weight_b * inverse, top + logf(sum)};
}

// An empty part may hold anything: it is left out, not multiplied by its zero.
SPECDEC_HD float merged(const MergeWeights& w, float a, float b) {
  const float sum = w.a == 0.0f ? 0.0f : w.a * a;
  return w.b == 0.0f ? sum : sum + w.b * b;
}

template <class Void, class Float>
struct MergePart {  // out [num_rows, num_heads, dim] and lse [num_rows, num_heads]; strides in elements
  Void* out;
  Float* lse;
  int64_t stride_row, stride_head, lse_stride;
};

struct MergeArgs {
  MergePart<const void, const float> a, b;
  MergePart<void, float> to;  // lse: null if it is not wanted
  const float* sinks;         // [num_heads] or null
  int64_t num_rows, num_heads, dim;

  SPECDEC_HD MergeWeights weights(int64_t n, int64_t h) const {
    return merge_weights(a.lse[n * a.lse_stride + h], b.lse[n * b.lse_stride + h], sinks ? sinks + h : nullptr);
  }
};

inline void check_merge_part(const char* out_name, const Tensor& out, const char* lse_name, const Tensor* lse,
                             const Tensor& like) {
  const char* op = "merge_attention";
  check_tensor(op, out_name, out, like.scalar_type(), {like.size(0), like.size(1), like.size(2)});
  check_dense_rows(op, out_name, out);
  if (!lse) return;
  check_tensor(op, lse_name, *lse, ScalarType::Float, {like.size(0), like.size(1)});
  check_dense_rows(op, lse_name, *lse);
}

inline MergeArgs check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                             const std::optional<Tensor>& sinks, Tensor& out, std::optional<Tensor>& lse) {
  const char* op = "merge_attention";
  check_tensor(op, "out_a", out_a, out_a.scalar_type(), {kAny, kAny, kAny});
  check_merge_part("out_a", out_a, "lse_a", &lse_a, out_a);
  check_merge_part("out_b", out_b, "lse_b", &lse_b, out_a);
  check_merge_part("out", out, "lse", lse ? &*lse : nullptr, out_a);
  check_index(op, "sinks", sinks, {out_a.size(1)}, ScalarType::Float);
  return {{data<char>(out_a), data<float>(lse_a), out_a.stride(0), out_a.stride(1), lse_a.stride(0)},
          {data<char>(out_b), data<float>(lse_b), out_b.stride(0), out_b.stride(1), lse_b.stride(0)},
          {mutable_data<char>(out), lse ? mutable_data<float>(*lse) : nullptr, out.stride(0), out.stride(1),
           lse ? lse->stride(0) : 0},
          data_or_null<float>(sinks),
          out_a.size(0),
          out_a.size(1),
          out_a.size(2)};
}

}  // namespace specdec
