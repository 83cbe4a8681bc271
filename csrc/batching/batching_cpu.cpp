// plan_buckets, pack_rows, unpack_rows, padding_stats on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "batching/batching.h"
#include "common/check.h"
#include "tree/tree.h"

namespace specdec {
namespace {

constexpr int64_t kGrainBytes = 1 << 17;

int32_t check_sizes(const char* op, const std::vector<int64_t>& sizes) {
  check_range(op, "len(bucket_sizes)", static_cast<int64_t>(sizes.size()), 1, kMaxBuckets);
  for (size_t k = 0; k < sizes.size(); k++)
    if (sizes[k] < 1 || (k && sizes[k] <= sizes[k - 1]))
      fail(op, "bucket_sizes", "rising sizes of at least 1, got ", sizes[k], " at index ", k);
  return static_cast<int32_t>(sizes.size());
}

void plan_buckets_cpu(Tensor num_nodes, std::vector<int64_t> bucket_sizes, Tensor order, Tensor bucket_offsets,
                      Tensor cu_nodes) {
  const char* op = "plan_buckets";
  const int64_t requests = num_nodes.numel();
  check_index(op, "num_nodes", num_nodes, {kAny});
  const int32_t buckets = check_sizes(op, bucket_sizes);
  check_index(op, "order", order, {requests});
  check_index(op, "bucket_offsets", bucket_offsets, {buckets + 1});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});

  const int32_t* nodes = data<int32_t>(num_nodes);
  int32_t *out = mutable_data<int32_t>(order), *offsets = mutable_data<int32_t>(bucket_offsets),
          *cu = mutable_data<int32_t>(cu_nodes);
  std::array<int32_t, kMaxBuckets + 1> next{};  // counting sort, stable
  int64_t total = 0;
  for (int64_t b = 0; b < requests; b++) {
    cu[b] = static_cast<int32_t>(total);
    total = std::min<int64_t>(INT32_MAX, total + node_count(nodes[b]));
    next[bucket_of(nodes[b], bucket_sizes.data(), buckets) + 1]++;
  }
  cu[requests] = static_cast<int32_t>(total);
  for (int32_t k = 0; k <= buckets; k++) offsets[k] = next[k] += k ? next[k - 1] : 0;
  for (int64_t b = 0; b < requests; b++)
    out[next[bucket_of(nodes[b], bucket_sizes.data(), buckets)]++] = static_cast<int32_t>(b);
}

// x [B, rows, ...] against a packed [total, ...]: item sizes must agree and be dense.
int64_t item_bytes(const char* op, const Tensor& padded, const char* padded_name, const Tensor& packed,
                   const char* packed_name) {
  if (padded.dim() < 2) fail(op, padded_name, "shape [B, rows, ...], got ", shape_text(padded));
  bool same = packed.dim() == padded.dim() - 1 && packed.scalar_type() == padded.scalar_type();
  for (int64_t d = 1; same && d < packed.dim(); d++) same = packed.size(d) == padded.size(d + 1);
  if (!same)
    fail(op, packed_name, "dtype and trailing shape of ", padded_name, " ", shape_text(padded), ", got ",
         shape_text(packed));
  int64_t bytes = static_cast<int64_t>(padded.element_size());
  for (int64_t d = packed.dim() - 1; d >= 1; d--) {
    if ((packed.size(d) > 1 && packed.stride(d) * static_cast<int64_t>(packed.element_size()) != bytes) ||
        (packed.size(d) > 1 && padded.stride(d + 1) * static_cast<int64_t>(padded.element_size()) != bytes))
      fail(op, padded_name, "dense items behind the row dimension, got a strided view");
    bytes *= packed.size(d);
  }
  return bytes;
}

void pack_rows_cpu(Tensor x, Tensor cu, Tensor out) {
  const char* op = "pack_rows";
  const int64_t bytes = item_bytes(op, x, "x", out, "out"), requests = x.size(0), total = out.size(0);
  check_index(op, "cu", cu, {requests + 1});
  const int32_t* offsets = data<int32_t>(cu);
  const char* source = data<char>(x);
  char* target = mutable_data<char>(out);
  const int64_t unit = static_cast<int64_t>(x.element_size()), request = x.stride(0) * unit, row = x.stride(1) * unit,
                packed = out.stride(0) * unit;
  torch::stable::parallel_for(0, requests, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes * x.size(1))),
                              [&](int64_t from, int64_t to) {
                                for (int64_t b = from; b < to; b++) {
                                  const NodeRange range = node_range(offsets, b, total);
                                  const int64_t rows = std::min<int64_t>(range.count, x.size(1));
                                  for (int64_t i = 0; i < range.count; i++) {
                                    char* place = target + (range.begin + i) * packed;
                                    if (i < rows)
                                      std::memcpy(place, source + b * request + i * row, bytes);
                                    else
                                      std::memset(place, 0, bytes);
                                  }
                                }
                              });
  for (int64_t i = tail_begin(offsets, requests, total); i < total; i++) std::memset(target + i * packed, 0, bytes);
}

void unpack_rows_cpu(Tensor x, Tensor cu, Tensor out) {
  const char* op = "unpack_rows";
  const int64_t bytes = item_bytes(op, out, "out", x, "x"), requests = out.size(0), total = x.size(0);
  check_index(op, "cu", cu, {requests + 1});
  const int32_t* offsets = data<int32_t>(cu);
  const char* source = data<char>(x);
  char* target = mutable_data<char>(out);
  const int64_t unit = static_cast<int64_t>(x.element_size()), request = out.stride(0) * unit,
                row = out.stride(1) * unit, packed = x.stride(0) * unit;
  torch::stable::parallel_for(0, requests,
                              std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes * out.size(1))),
                              [&](int64_t from, int64_t to) {
                                for (int64_t b = from; b < to; b++) {
                                  const NodeRange range = node_range(offsets, b, total);
                                  for (int64_t i = 0; i < out.size(1); i++) {
                                    char* place = target + b * request + i * row;
                                    if (i < range.count)
                                      std::memcpy(place, source + (range.begin + i) * packed, bytes);
                                    else
                                      std::memset(place, 0, bytes);
                                  }
                                }
                              });
}

void padding_stats_cpu(Tensor num_nodes, Tensor order, Tensor bucket_offsets, std::vector<int64_t> bucket_sizes,
                       int64_t tile_rows, int64_t group_size, Tensor stats) {
  const char* op = "padding_stats";
  const int64_t requests = num_nodes.numel();
  check_index(op, "num_nodes", num_nodes, {kAny});
  check_index(op, "order", order, {requests});
  const int32_t buckets = check_sizes(op, bucket_sizes);
  check_index(op, "bucket_offsets", bucket_offsets, {buckets + 1});
  check_range(op, "tile_rows", tile_rows, 1, 1 << 20);
  check_range(op, "group_size", group_size, 1, 1 << 20);
  check_index(op, "stats", stats, {buckets, kStatColumns}, ScalarType::Long);

  const int32_t *nodes = data<int32_t>(num_nodes), *members = data<int32_t>(order),
                *offsets = data<int32_t>(bucket_offsets);
  int64_t* out = mutable_data<int64_t>(stats);
  for (int32_t k = 0; k < buckets; k++) {
    const NodeRange range = node_range(offsets, k, requests);
    int64_t sums[kStatColumns] = {0, 0, 0, 0};
    for (int32_t i = 0; i < range.count; i++) {
      const int32_t b = members[range.begin + i];
      if (b < 0 || b >= requests) continue;
      const int64_t count = node_count(nodes[b]);
      sums[kStatRequests] += 1;
      sums[kStatNodes] += count;
      sums[kStatBucketed] += std::max(bucket_sizes[k], count);
      sums[kStatTileRows] += tiled_rows(count, group_size, tile_rows);
    }
    std::copy(sums, sums + kStatColumns, out + k * kStatColumns);
  }
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("plan_buckets", TORCH_BOX(&specdec::plan_buckets_cpu));
  m.impl("pack_rows", TORCH_BOX(&specdec::pack_rows_cpu));
  m.impl("unpack_rows", TORCH_BOX(&specdec::unpack_rows_cpu));
  m.impl("padding_stats", TORCH_BOX(&specdec::padding_stats_cpu));
}
