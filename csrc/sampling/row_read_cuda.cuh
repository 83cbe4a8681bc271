// A block's walk over one row of logits, four neighbouring ids at a time.
//
//   unit     16 bytes: 8 logits of two bytes or 4 of four; thread t takes units t, t + 256, ...
//   ahead    the units of the next kAhead rounds are on their way while one is worked on
//   quad     ids 4 q .. 4 q + 3 of a unit: one Philox call, one rounding of a mass
//
// A row that is edited, or does not begin on 16 bytes, is read element by element into units of 4 float32 logits.
#pragma once
#include "common/reduce.cuh"
#include "sampling/filters.h"
#include "sampling/row_source.h"

namespace specdec {

constexpr int kRowThreads = 256;
constexpr int kAhead = 3;

// Shared memory of a block that works on rows.
struct RowScratch {
  uint64_t bins[kBins];
  uint64_t sums[kRowThreads / 32];
  int32_t counts[kRowThreads / 32];
  uint64_t above, at;
  int32_t bin, id;
};

// Of a drafter's row, columns whose target id does not exist do not exist either.
struct BlockRow : Row {
  const int32_t* d2t = nullptr;  // target id - column, or null: the same id
  const int32_t* t2d = nullptr;  // column of a target id; two columns of one id: the one named here exists
  int64_t num_ids = 0;

  __device__ __forceinline__ bool exists(int32_t column) const {
    if (!d2t) return true;
    const int64_t id = int64_t{column} + d2t[column];
    return id >= 0 && id < num_ids && (!t2d || t2d[id] == column);
  }
};
__device__ __forceinline__ BlockRow block_row(const Row& row) {
  BlockRow out;
  static_cast<Row&>(out) = row;
  return out;
}

__device__ __forceinline__ float clean_logit(float x) {
  if (x != x) return -INFINITY;
  return x > kInfLogit ? kInfLogit : x;
}

// One logit after its edits, before cleaning.
__device__ __forceinline__ float edited_logit(const BlockRow& row, int32_t id) {
  if (row.allowed && !(row.allowed[id >> 5] >> (id & 31) & 1u)) return -INFINITY;
  if (!row.exists(id)) return -INFINITY;
  float x;
  if (row.type == LogitType::float32)
    x = static_cast<const float*>(row.data)[id];
  else if (row.type == LogitType::bfloat16)
    x = to_float(static_cast<const BFloat16*>(row.data)[id]);
  else
    x = to_float(static_cast<const Half*>(row.data)[id]);
#pragma unroll 1
  for (int32_t e = 0; e < row.num_bias; e++)
    if (row.bias_ids[e] == id) x += row.bias_values[e];
  return x;
}
// Four numbers by a loop that stands in the code once: value(e) for e = 0 .. 3.
template <class T, class Value>
__device__ __forceinline__ void fill_four(T (&x)[4], Value&& value) {
#pragma unroll 1
  for (int e = 0; e < 4; e++) {
    const T v = value(e);
    x[0] = e == 0 ? v : x[0];
    x[1] = e == 1 ? v : x[1];
    x[2] = e == 2 ? v : x[2];
    x[3] = v;
  }
}
template <class T>
__device__ __forceinline__ T one_of_four(const T (&x)[4], uint32_t e) {
  return e == 0 ? x[0] : e == 1 ? x[1] : e == 2 ? x[2] : x[3];
}

struct RowReader {
  const BlockRow& row;
  bool wide, narrow;  // loads of 16 bytes; units of 8 logits (two bytes each)

  __device__ __forceinline__ explicit RowReader(const BlockRow& r) : row(r) {
    wide = !r.is_edited() && !r.d2t && reinterpret_cast<uintptr_t>(r.data) % 16 == 0;
    narrow = wide && r.type != LogitType::float32;
  }
  __device__ __forceinline__ int32_t per_unit() const { return narrow ? 8 : 4; }
  __device__ __forceinline__ int32_t units() const { return (row.size + per_unit() - 1) / per_unit(); }

  __device__ __forceinline__ uint4 load(int32_t unit) const {
    if (wide && (unit + 1) * per_unit() <= row.size)
      return ptx::load_stream_16(static_cast<const char*>(row.data) + unit * 16);
    uint32_t word[4] = {};
    fill_four(word, [&](int e) -> uint32_t {  // an edited row, or the end of one: -inf behind it
      if (!narrow) {
        const int32_t id = unit * 4 + e;
        return float_bits(id < row.size ? edited_logit(row, id) : -INFINITY);
      }
      const int32_t id = unit * 8 + 2 * e;
      const uint32_t none = row.type == LogitType::bfloat16 ? 0xff80u : 0xfc00u;
      const uint16_t* data = static_cast<const uint16_t*>(row.data);
      return (id < row.size ? data[id] : none) | (id + 1 < row.size ? data[id + 1] : none) << 16;
    });
    return uint4{word[0], word[1], word[2], word[3]};
  }
  // Quad `half` of a unit.
  __device__ __forceinline__ void unpack(const uint4& unit, int half, float (&x)[4]) const {
    if (!narrow) {
      x[0] = bits_float(unit.x), x[1] = bits_float(unit.y), x[2] = bits_float(unit.z), x[3] = bits_float(unit.w);
      return;
    }
    const uint32_t words[2] = {half ? unit.z : unit.x, half ? unit.w : unit.y};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const uint16_t bits = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
      x[e] = row.type == LogitType::bfloat16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
    }
  }
};

// body(first id, x[4]) for this thread's quads of units [begin, end); logits behind the row are -inf. kDepth: rounds
// of loads on their way.
template <int kDepth = kAhead, class Body>
__device__ __forceinline__ void for_quads(const RowReader& reader, int32_t begin, int32_t end, Body&& body) {
  uint4 ahead[kDepth] = {};
  const int32_t first = begin + static_cast<int32_t>(threadIdx.x);
#pragma unroll 1
  for (int32_t unit = first - kDepth * kRowThreads; unit < end; unit += kRowThreads) {
    const int32_t coming = unit + kDepth * kRowThreads;
    const uint4 now = ahead[0];
#pragma unroll
    for (int i = 0; i + 1 < kDepth; i++) ahead[i] = ahead[i + 1];
    ahead[kDepth - 1] = coming < end ? reader.load(coming) : uint4{0, 0, 0, 0};
    if (unit < first) continue;
    const int halves = reader.narrow ? 2 : 1;
#pragma unroll 1
    for (int half = 0; half < halves; half++) {
      float x[4];
      reader.unpack(now, half, x);
      body(unit * reader.per_unit() + 4 * half, x);
    }
  }
}
template <int kDepth = kAhead, class Body>
__device__ __forceinline__ void for_quads(const BlockRow& row, Body&& body) {
  const RowReader reader(row);
  for_quads<kDepth>(reader, 0, reader.units(), body);
}

}  // namespace specdec
