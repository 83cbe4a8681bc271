// One KV tile against a block of query rows: the interface between the op (attention_cpu.cpp) and its vector kernels.
//
//   packed K  [D / pack units][64 keys]      packed V  [64 / pack units][Dv]      a unit is 32 bits: one float, or two
//                                                                                 bfloat16 (pack = 2) of one dot pair
//   scores [rows, 64] = Q x packed K      out [rows, Dv] += P x packed V          the same small matrix product
//
// K is transposed once a tile and shared by all group * nodes rows, so that its cost fades with the rows.
#pragma once
#include <cstdint>

#include "attention.h"

namespace specdec {

enum class Element : int { float32 = 0, bfloat16 = 1, float16 = 2, float8_e4m3 = 3, float8_e5m2 = 4 };

inline int element_bytes(Element element) {
  return element == Element::float32 ? 4 : element == Element::bfloat16 || element == Element::float16 ? 2 : 1;
}

constexpr int kLanes = 16;         // partial row sums a row, reduced once at the end
constexpr int kMaxBlockRows = 32;  // rows of one attend call
constexpr float kRescaleLog2 = 8;  // a running maximum is raised only when a score exceeds it by 2^8

// Cache lines of the next tile, asked for one by one while this tile is computed: hardware prefetching stops at page
// borders, and a burst of requests would stall the core that issues it.
struct Prefetch {
  const char* const* next;
  const char* const* last;  // asked for again and again once all are under way: cheaper than a branch
  int pace;                 // lines a packing step; product steps take one each
};

inline __attribute__((always_inline)) void prefetch_one(Prefetch& ahead) {
  __builtin_prefetch(*ahead.next, 0, 2);
  ahead.next += ahead.next < ahead.last;
}

inline void prefetch_step(Prefetch& ahead) {
  for (int i = 0; i < ahead.pace; i++) prefetch_one(ahead);
}

// C[rows][n] = (or +=) A[rows][units] x B[units][n]; ld*: elements from row to row.
struct ProductArgs {
  const uint32_t* a;
  int64_t lda;
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  int rows, n, units;
  bool accumulate;
  Prefetch* ahead;
};

struct AttendArgs {
  const uint32_t* q;        // [rows][head_dim / pack]
  const uint32_t* k;        // packed K
  const uint32_t* v;        // packed V
  const uint64_t* visible;  // [rows], null: every key of the tile
  bool careful;             // V holds a NaN or an infinity: never multiply it by a hidden key's zero
  int rows, head_dim, v_dim;
  float scale;     // scores to log2 units; with softcap: to units of the cap
  float cap;       // softcap * log2(e), 0: none
  float* out;      // [rows][v_dim], unnormalised
  float* row_max;  // [rows], log2 units, -inf: nothing seen
  float* row_sum;  // [rows][kLanes]
  Prefetch* ahead;
};

// Kernels of one instruction set and one compute type (float32, or bfloat16 pairs).
struct TileKernels {
  int block_rows;  // rows the driver passes at a time
  int pack;        // values a unit
  // dst[i] = src[i] in the compute type
  void (*convert)(const void* src, Element element, void* dst, int n);
  // rows: 64 pointers to key rows in the compute type
  void (*pack_k)(const void* const* rows, int head_dim, uint32_t* dst, Prefetch& ahead);
  // returns whether a value is NaN or infinite, looked at only when `check`
  bool (*pack_v)(const void* const* rows, int v_dim, uint32_t* dst, bool check, Prefetch& ahead);
  void (*attend)(const AttendArgs& args);
  // out[i] = x[i] * factor in `element`
  void (*store)(const float* x, float factor, void* out, Element element, int n);
  // y[i] += x[i] * factor
  void (*add_scaled)(const float* x, float factor, float* y, int n);
};

const TileKernels& scalar_kernels();
#if defined(__x86_64__)
const TileKernels& avx2_kernels();
const TileKernels& avx512_kernels();
const TileKernels& avx512_bf16_kernels();
const TileKernels& amx_kernels();
#endif

}  // namespace specdec
