// plan_buckets, pack_rows, unpack_rows, padding_stats on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "batching/args.h"
#include "tree/tree.h"

namespace specdec {
namespace {

constexpr int64_t kGrainBytes = 1 << 17;

void plan_buckets_cpu(Tensor num_nodes, std::vector<int64_t> bucket_sizes, Tensor order, Tensor bucket_offsets,
                      Tensor cu_nodes) {
  const PlanBucketsArgs p = check_plan_buckets(num_nodes, bucket_sizes, order, bucket_offsets, cu_nodes);
  std::array<int32_t, kMaxBuckets + 1> next{};  // counting sort, stable
  int64_t total = 0;
  for (int32_t b = 0; b < p.requests; b++) {
    p.cu_nodes[b] = static_cast<int32_t>(total);
    total = std::min<int64_t>(INT32_MAX, total + node_count(p.num_nodes[b]));
    next[p.buckets.of(p.num_nodes[b]) + 1]++;
  }
  p.cu_nodes[p.requests] = static_cast<int32_t>(total);
  for (int32_t k = 0; k <= p.buckets.count; k++) p.bucket_offsets[k] = next[k] += k ? next[k - 1] : 0;
  for (int32_t b = 0; b < p.requests; b++) p.order[next[p.buckets.of(p.num_nodes[b])]++] = b;
}

void copy_or_clear(char* target, const char* source, int64_t bytes, bool exists) {
  if (exists)
    std::memcpy(target, source, bytes);
  else
    std::memset(target, 0, bytes);
}

int64_t request_grain(const RowsArgs& p) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, p.bytes * p.rows));
}

void pack_rows_cpu(Tensor x, Tensor cu, Tensor out) {
  const RowsArgs p = check_rows_of("pack_rows", x, "x", out, "out", cu);
  torch::stable::parallel_for(0, p.requests, request_grain(p), [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const NodeRange range = node_range(p.cu, b, p.total);
      for (int64_t i = 0; i < range.count; i++)
        copy_or_clear(p.packed_row(range.begin + i), p.padded_row(b, i), p.bytes, i < p.rows);
    }
  });
  for (int64_t i = tail_begin(p.cu, p.requests, p.total); i < p.total; i++) std::memset(p.packed_row(i), 0, p.bytes);
}

void unpack_rows_cpu(Tensor x, Tensor cu, Tensor out) {
  const RowsArgs p = check_rows_of("unpack_rows", out, "out", x, "x", cu);
  torch::stable::parallel_for(0, p.requests, request_grain(p), [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const NodeRange range = node_range(p.cu, b, p.total);
      for (int64_t i = 0; i < p.rows; i++)
        copy_or_clear(p.padded_row(b, i), p.packed_row(range.begin + i), p.bytes, i < range.count);
    }
  });
}

void padding_stats_cpu(Tensor num_nodes, Tensor order, Tensor bucket_offsets, std::vector<int64_t> bucket_sizes,
                       int64_t tile_rows, int64_t group_size, Tensor stats) {
  const PaddingStatsArgs p =
      check_padding_stats(num_nodes, order, bucket_offsets, bucket_sizes, tile_rows, group_size, stats);
  for (int32_t k = 0; k < p.buckets.count; k++) {
    const NodeRange range = node_range(p.bucket_offsets, k, p.requests);
    int64_t sums[kStatColumns] = {};
    for (int32_t i = 0; i < range.count; i++) p.add(p.order[range.begin + i], k, sums);
    std::copy(sums, sums + kStatColumns, p.stats + k * kStatColumns);
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
