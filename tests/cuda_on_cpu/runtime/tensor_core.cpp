// ldmatrix and mma.sync: fragment layouts of the PTX manual, arithmetic in float32 in k order.
//
// m16n8 fragments, g = lane / 4, t = lane % 4. A register holds two 16-bit elements (k even, k odd):
//   A (16 x 16): a0 (g, 2t)  a1 (g+8, 2t)  a2 (g, 2t+8)  a3 (g+8, 2t+8)
//   B (16 x 8):  b0 (2t, g)  b1 (2t+8, g)
//   C (16 x 8):  c0 (g, 2t)  c1 (g, 2t+1)  c2 (g+8, 2t)  c3 (g+8, 2t+1)
// tf32 m16n8k8: one element a register: a0 (g, t) a1 (g+8, t) a2 (g, t+4) a3 (g+8, t+4); b0 (t, g) b1 (t+4, g).
#include "internal.h"
#include "number_formats.h"

namespace emulated {

struct MmaArgument {
  float* d;
  const uint32_t *a, *b;
  const float* c;
};

template <Element element, int K>
static void finish_mma(void** arguments, uint32_t) {
  float a[16][K], b[K][8], d[16][8];
  for (int lane = 0; lane < 32; lane++) {
    auto* mine = static_cast<MmaArgument*>(arguments[lane]);
    int g = lane / 4, t = lane % 4;
    if constexpr (element == Element::tf32) {
      for (int r = 0; r < 4; r++) a[g + 8 * (r % 2)][t + 4 * (r / 2)] = tf32_value(mine->a[r]);
      for (int r = 0; r < 2; r++) b[t + 4 * r][g] = tf32_value(mine->b[r]);
    } else {
      auto value = [](uint32_t pair, int half) {
        auto bits = static_cast<uint16_t>(pair >> (16 * half));
        return element == Element::bf16 ? bf16_value(bits) : f16_value(bits);
      };
      for (int r = 0; r < K / 4; r++)
        for (int half = 0; half < 2; half++) a[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + half] = value(mine->a[r], half);
      for (int r = 0; r < K / 8; r++)
        for (int half = 0; half < 2; half++) b[2 * t + 8 * r + half][g] = value(mine->b[r], half);
    }
    for (int i = 0; i < 4; i++) d[g + 8 * (i / 2)][2 * t + i % 2] = mine->c[i];
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < K; k++)
      for (int j = 0; j < 8; j++) d[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; lane++) {
    auto* mine = static_cast<MmaArgument*>(arguments[lane]);
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) mine->d[i] = d[g + 8 * (i / 2)][2 * t + i % 2];
  }
}

void mma_m16n8(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, Element element, At at) {
  static const char kinds[4] = {};
  MmaArgument argument{d, a, b, c};
  auto run = [&](int kind, Finish finish) { warp_collective(&kinds[kind], 0xffffffffu, &argument, finish, at); };
  if (element == Element::tf32 && k == 8) return run(0, finish_mma<Element::tf32, 8>);
  if (element == Element::bf16 && k == 16) return run(1, finish_mma<Element::bf16, 16>);
  if (element == Element::f16 && k == 16) return run(2, finish_mma<Element::f16, 16>);
  if (element == Element::f16 && k == 8) return run(3, finish_mma<Element::f16, 8>);
  trap("mma shape without a model", at);
}

struct MatrixArgument {
  uint32_t* destination;
  const char* row;
  int count;
  bool transpose;
};

// Lanes 8m .. 8m+7 name the rows of matrix m; lane (g, t) receives elements (g, 2t) and (g, 2t+1) of each.
static void finish_ldmatrix(void** arguments, uint32_t) {
  auto* first = static_cast<MatrixArgument*>(arguments[0]);
  for (int m = 0; m < first->count; m++) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; row++)
      memcpy(matrix[row], static_cast<MatrixArgument*>(arguments[m * 8 + row])->row, 16);
    for (int lane = 0; lane < 32; lane++) {
      int g = lane / 4, t = 2 * (lane % 4);
      uint16_t low = first->transpose ? matrix[t][g] : matrix[g][t];
      uint16_t high = first->transpose ? matrix[t + 1][g] : matrix[g][t + 1];
      static_cast<MatrixArgument*>(arguments[lane])->destination[m] = static_cast<uint32_t>(high) << 16 | low;
    }
  }
}

__attribute__((noinline)) void ldmatrix(uint32_t* destination, const void* row, int count, bool transpose, At at,
                                        const void* where) {
  static const char kinds[2] = {};
  Thread* thread = self();
  if (static_cast<int>(thread->lane) < count * 8) {
    size_t offset = static_cast<size_t>(static_cast<const char*>(row) - thread->owner->arena);
    if (offset + 16 > thread->owner->used) trap("ldmatrix row outside shared memory", at);
    if (offset % 16) trap("misaligned ldmatrix row", at);
    check_read(row, 16, where ? where : __builtin_return_address(0));
  }
  MatrixArgument argument{destination, static_cast<const char*>(row), count, transpose};
  warp_collective(&kinds[transpose], 0xffffffffu, &argument, finish_ldmatrix, at);
}

}  // namespace emulated
