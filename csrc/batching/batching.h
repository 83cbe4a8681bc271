// Buckets and padding counts: the math every backend shares.
#pragma once
#include <cstdint>

#include "common/hostdevice.h"

namespace specdec {

constexpr int32_t kMaxBuckets = 64;

// Bucket of a request with `nodes` nodes: the first whose size holds it, the last if none does; empty ones go first.
struct Buckets {
  int64_t size[kMaxBuckets];
  int32_t count;

  SPECDEC_HD int32_t of(int32_t nodes) const {
    int32_t k = 0;
    while (k + 1 < count && nodes > size[k]) k++;
    return k;
  }
};

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

// ---- what the ops get, checked (args.h)

struct PlanBucketsArgs {
  const int32_t* num_nodes;  // [requests]
  int32_t* order;            // [requests]
  int32_t* bucket_offsets;   // [buckets + 1]
  int32_t* cu_nodes;         // [requests + 1]
  int32_t requests;
  Buckets buckets;
};

struct PaddingStatsArgs {
  const int32_t* num_nodes;       // [requests]
  const int32_t* order;           // [requests]
  const int32_t* bucket_offsets;  // [buckets + 1]
  int64_t* stats;                 // [buckets, kStatColumns]
  int64_t tile_rows, group_size;
  int32_t requests;
  Buckets buckets;

  // Adds what one member of bucket k counts for.
  SPECDEC_HD void add(int32_t member, int32_t k, int64_t (&sums)[kStatColumns]) const {
    if (member < 0 || member >= requests) return;
    const int64_t count = node_count(num_nodes[member]);
    sums[kStatRequests] += 1;
    sums[kStatNodes] += count;
    sums[kStatBucketed] += buckets.size[k] > count ? buckets.size[k] : count;
    sums[kStatTileRows] += tiled_rows(count, group_size, tile_rows);
  }
};

// Rows of `bytes` bytes: padded [requests, rows], strided, beside packed [total].
struct RowsArgs {
  char *padded, *packed;
  const int32_t* cu;  // [requests + 1]
  int64_t stride_request, stride_row, stride_packed, bytes, total;
  int32_t requests, rows;

  SPECDEC_HD char* padded_row(int64_t b, int64_t i) const { return padded + b * stride_request + i * stride_row; }
  SPECDEC_HD char* packed_row(int64_t i) const { return packed + i * stride_packed; }
};

}  // namespace specdec
