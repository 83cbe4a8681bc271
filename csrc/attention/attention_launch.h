// Host side shared by the CUDA files of the room: what the machine allows, and the launchers, one file a pair of types.
#pragma once
#include "attention/attention_params.cuh"
#include "attention/plan_checks.h"
#include "common/launch.cuh"

#ifndef SPECDEC_FEW_HEAD_DIM  // the head dim that SPECDEC_FEW_INSTANCES keeps
#define SPECDEC_FEW_HEAD_DIM 64
#endif

namespace specdec {

// `kernel`: any of this library, which is compiled for one list of architectures. The tensor's device is current.
template <class Kernel>
MachineLimits machine_limits(const Tensor& tensor, Kernel* kernel) {
  const int64_t block = shared_memory_of_block(tensor), code = shared_of_architecture(architecture_of_code(kernel));
  return {multiprocessor_count(tensor), block, shared_memory_of_multiprocessor(tensor), block < code ? block : code};
}

// Runs the device planner (plan_cuda.cu).
void launch_plan(const PlanParams& p, Stream stream);

// Launches the tensor-core kernel of `tile_rows` rows for p's head dims; false where none is compiled, or none fits the
// machine. `blocks` is the grid: workers of a plan, or items times splits. `ask`: only says whether it would.
struct MmaLaunch {
  int tile_rows;
  int64_t blocks;
  MachineLimits machine;
  Stream stream;
  bool ask = false;
};
bool launch_mma_bfloat16(const AttentionParams& p, const MmaLaunch& launch);
bool launch_mma_bfloat16_float8(const AttentionParams& p, const MmaLaunch& launch);
bool launch_mma_float16(const AttentionParams& p, const MmaLaunch& launch);
bool launch_mma_float16_float8(const AttentionParams& p, const MmaLaunch& launch);

// Launches the Hopper kernel (attention_sm90.cu); false where it has none for p's head dims.
using HopperLaunch = bool (*)(const AttentionParams& p, const MmaLaunch& launch, bool bfloat16);

}  // namespace specdec
