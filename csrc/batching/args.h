// Arguments of the batching room's ops: the checks that every native backend runs before its first write.
#pragma once
#include <vector>

#include "batching/batching.h"
#include "common/check.h"

namespace specdec {

inline Buckets check_sizes(const char* op, const std::vector<int64_t>& sizes) {
  check_range(op, "len(bucket_sizes)", static_cast<int64_t>(sizes.size()), 1, kMaxBuckets);
  Buckets buckets = {};
  for (size_t k = 0; k < sizes.size(); k++) {
    if (sizes[k] < 1 || (k && sizes[k] <= sizes[k - 1]))
      fail(op, "bucket_sizes", "rising sizes of at least 1, got ", sizes[k], " at index ", k);
    buckets.size[k] = sizes[k];
  }
  buckets.count = static_cast<int32_t>(sizes.size());
  return buckets;
}

inline PlanBucketsArgs check_plan_buckets(const Tensor& num_nodes, const std::vector<int64_t>& bucket_sizes,
                                          const Tensor& order, const Tensor& bucket_offsets, const Tensor& cu_nodes) {
  const char* op = "plan_buckets";
  const int64_t requests = num_nodes.numel();
  check_index(op, "num_nodes", num_nodes, {kAny});
  const Buckets buckets = check_sizes(op, bucket_sizes);
  check_index(op, "order", order, {requests});
  check_index(op, "bucket_offsets", bucket_offsets, {buckets.count + 1});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  return {data<int32_t>(num_nodes),        mutable_data<int32_t>(order),   mutable_data<int32_t>(bucket_offsets),
          mutable_data<int32_t>(cu_nodes), static_cast<int32_t>(requests), buckets};
}

inline PaddingStatsArgs check_padding_stats(const Tensor& num_nodes, const Tensor& order, const Tensor& bucket_offsets,
                                            const std::vector<int64_t>& bucket_sizes, int64_t tile_rows,
                                            int64_t group_size, const Tensor& stats) {
  const char* op = "padding_stats";
  const int64_t requests = num_nodes.numel();
  check_index(op, "num_nodes", num_nodes, {kAny});
  check_index(op, "order", order, {requests});
  const Buckets buckets = check_sizes(op, bucket_sizes);
  check_index(op, "bucket_offsets", bucket_offsets, {buckets.count + 1});
  check_range(op, "tile_rows", tile_rows, 1, 1 << 20);
  check_range(op, "group_size", group_size, 1, 1 << 20);
  check_index(op, "stats", stats, {buckets.count, kStatColumns}, ScalarType::Long);
  return {data<int32_t>(num_nodes),
          data<int32_t>(order),
          data<int32_t>(bucket_offsets),
          mutable_data<int64_t>(stats),
          tile_rows,
          group_size,
          static_cast<int32_t>(requests),
          buckets};
}

// x [B, rows, ...] against a packed [total, ...]: item sizes must agree and be dense.
inline int64_t item_bytes(const char* op, const Tensor& padded, const char* padded_name, const Tensor& packed,
                          const char* packed_name) {
  if (padded.dim() < 2) fail(op, padded_name, "shape [B, rows, ...], got ", shape_text(padded));
  bool same = packed.dim() == padded.dim() - 1 && packed.scalar_type() == padded.scalar_type();
  for (int64_t d = 1; same && d < packed.dim(); d++) same = packed.size(d) == padded.size(d + 1);
  if (!same)
    fail(op, packed_name, "dtype and trailing shape of ", padded_name, " ", shape_text(padded), ", got ",
         shape_text(packed));
  const int64_t unit = static_cast<int64_t>(padded.element_size());
  int64_t bytes = unit;
  for (int64_t d = packed.dim() - 1; d >= 1; d--) {
    if (packed.size(d) > 1 && (packed.stride(d) * unit != bytes || padded.stride(d + 1) * unit != bytes))
      fail(op, padded_name, "dense items behind the row dimension, got a strided view");
    bytes *= packed.size(d);
  }
  return bytes;
}

// `padded` [B, rows, ...] beside `packed` [total, ...]: which is the source, the op knows.
inline RowsArgs check_rows_of(const char* op, const Tensor& padded, const char* padded_name, const Tensor& packed,
                              const char* packed_name, const Tensor& cu) {
  RowsArgs args = {};
  args.bytes = item_bytes(op, padded, padded_name, packed, packed_name);
  args.requests = static_cast<int32_t>(padded.size(0));
  args.rows = static_cast<int32_t>(padded.size(1));
  args.total = packed.size(0);
  check_index(op, "cu", cu, {padded.size(0) + 1});
  const int64_t unit = static_cast<int64_t>(padded.element_size());
  args.cu = data<int32_t>(cu);
  args.padded = const_cast<char*>(data<char>(padded));
  args.packed = const_cast<char*>(data<char>(packed));
  args.stride_request = padded.stride(0) * unit;
  args.stride_row = padded.stride(1) * unit;
  args.stride_packed = packed.stride(0) * unit;
  return args;
}

}  // namespace specdec
