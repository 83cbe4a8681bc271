// Buckets and padding counts: the math every backend shares.
#pragma once
#include <cstdint>

#include "common/hostdevice.h"

namespace specdec {

constexpr int32_t kMaxBuckets = 64;

// Bucket of a request with `nodes` nodes: the first whose size holds it, the last if none does; empty ones go first.
SPECDEC_HD int32_t bucket_of(int32_t nodes, const int64_t* sizes, int32_t num_buckets) {
  int32_t k = 0;
  while (k + 1 < num_buckets && nodes > sizes[k]) k++;
  return k;
}

SPECDEC_HD int32_t node_count(int32_t nodes) {
  return nodes > 0 ? nodes : 0;
}

// Rows a kernel computes for one (request, KV head): the group's query rows, rounded up to whole tiles.
SPECDEC_HD int64_t tiled_rows(int64_t nodes, int64_t group_size, int64_t tile_rows) {
  return (nodes * group_size + tile_rows - 1) / tile_rows * tile_rows;
}

// Columns of the statistics of one bucket.
constexpr int32_t kStatRequests = 0;  // requests in the bucket
constexpr int32_t kStatNodes = 1;     // their nodes
constexpr int32_t kStatBucketed = 2;  // node slots if each were padded to the bucket's size
constexpr int32_t kStatTileRows = 3;  // rows of ragged execution, tiles rounded up
constexpr int32_t kStatColumns = 4;

}  // namespace specdec
