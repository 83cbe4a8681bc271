// What draft_topk_cpu.cpp and its vector loops (draft_topk_kernels.h) share.
#pragma once
#include <cstdint>

namespace specdec {

struct DraftLogits {
  enum Type : int32_t { float32, bfloat16, float16 };
  const void* data;
  Type type;
};

struct DraftStep {
  float max;   // largest logit, -inf if there is none
  double sum;  // of 2^((logit - reference) * rate)
};

struct DraftTopkKernels {
  DraftStep (*weigh)(DraftLogits logits, int32_t n, float reference, float rate);
  // Logits of at least `low`, and their places, ascending.
  int32_t (*above)(DraftLogits logits, int32_t n, float low, float* values, int32_t* places);
};

const DraftTopkKernels& draft_topk_kernels_scalar();
const DraftTopkKernels& draft_topk_kernels_avx2();
const DraftTopkKernels& draft_topk_kernels_avx512();

}  // namespace specdec
