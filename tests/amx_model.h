// The AMX tile instructions that attention_cpu_amx.cpp uses, in plain C++ (Intel SDM: LDTILECFG, TILELOADD, TDPBF16PS,
// TILESTORED), so that the shipped source runs on machines without AMX. A dimension outside the configuration aborts.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace amx_model {

struct Tile {
  int rows, row_bytes;
  alignas(64) uint8_t data[16][64];
};

struct State {
  bool configured;
  Tile tile[8];
};

inline State& state() {
  static thread_local State value;
  return value;
}

inline Tile& tile(int index) {
  if (!state().configured || index < 0 || index > 7 || state().tile[index].rows == 0) std::abort();
  return state().tile[index];
}

inline void load_config(const void* memory) {
  const uint8_t* bytes = static_cast<const uint8_t*>(memory);
  if (bytes[0] != 1 || bytes[1] != 0) std::abort();  // palette 1, start row 0
  for (int i = 2; i < 16; i++)
    if (bytes[i]) std::abort();
  std::memset(&state(), 0, sizeof(State));
  for (int i = 0; i < 8; i++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    if (row_bytes > 64 || bytes[48 + i] > 16) std::abort();
    state().tile[i].row_bytes = row_bytes;
    state().tile[i].rows = bytes[48 + i];
  }
  state().configured = true;
}

inline void load(int index, const void* base, int64_t stride) {
  Tile& t = tile(index);
  std::memset(t.data, 0, sizeof t.data);
  for (int r = 0; r < t.rows; r++) std::memcpy(t.data[r], static_cast<const char*>(base) + r * stride, t.row_bytes);
}

inline void store(int index, void* base, int64_t stride) {
  Tile& t = tile(index);
  for (int r = 0; r < t.rows; r++) std::memcpy(static_cast<char*>(base) + r * stride, t.data[r], t.row_bytes);
}

inline float widen(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  if ((word & 0x7f800000u) == 0) word &= 0x80000000u;  // subnormal inputs count as zero
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// C[m][n] += sum over pairs k of A[m][2k] B[k][2n] + A[m][2k+1] B[k][2n+1]
inline void dot(int c, int a, int b) {
  Tile &C = tile(c), &A = tile(a), &B = tile(b);
  if (A.row_bytes / 4 != B.rows || A.rows != C.rows || B.row_bytes != C.row_bytes) std::abort();
  const uint16_t *x = reinterpret_cast<const uint16_t*>(A.data), *y = reinterpret_cast<const uint16_t*>(B.data);
  for (int m = 0; m < C.rows; m++)
    for (int k = 0; k < A.row_bytes / 4; k++)
      for (int n = 0; n < C.row_bytes / 4; n++) {
        float sum;
        std::memcpy(&sum, C.data[m] + 4 * n, 4);
        sum += widen(x[m * 32 + 2 * k]) * widen(y[k * 32 + 2 * n]);
        sum += widen(x[m * 32 + 2 * k + 1]) * widen(y[k * 32 + 2 * n + 1]);
        std::memcpy(C.data[m] + 4 * n, &sum, 4);
      }
}

inline void zero(int index) {
  std::memset(tile(index).data, 0, sizeof(Tile::data));
}

inline void release() {
  std::memset(&state(), 0, sizeof(State));
}

}  // namespace amx_model

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_model::load_config
#define _tile_release amx_model::release
#define _tile_loadd amx_model::load
#define _tile_stored amx_model::store
#define _tile_zero amx_model::zero
#define _tile_dpbf16ps amx_model::dot
