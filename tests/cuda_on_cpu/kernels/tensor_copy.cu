// ptx::tensor_copy and common/tensor_map.cuh, for the comparison of path A with path B and for planted misuse.
//
// One block clears a tile by ordinary stores, has the copy engine bring a box over it, and writes the box out as rows
// of 64 elements, out of the 128-byte swizzle.
#include "common/hopper.cuh"
#include "common/tensor_map.cuh"

namespace specdec {

enum class Misuse : int { none, short_announcement, long_announcement, no_proxy_fence, unwaited, misaligned, no_map };

struct First {
  int32_t at[5];
};

__global__ void __launch_bounds__(128)
    tensor_copy_kernel(const __grid_constant__ CUtensorMap map, const First first, uint4* out, int rows, Misuse way) {
  SPECDEC_DYNAMIC_SHARED(unsigned char, shared);
  SPECDEC_SHARED(uint64_t, full, 1);
#if defined(__CUDA_ARCH__)
  unsigned char* tile = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
#else
  unsigned char* tile = shared;
#endif
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&map);
  }
  for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) reinterpret_cast<uint4*>(tile)[i] = uint4{};
  if (way != Misuse::no_proxy_fence) ptx::fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int wrong = way == Misuse::short_announcement ? -16 : way == Misuse::long_announcement ? 16 : 0;
    ptx::mbarrier_arrive_expect(full, rows * 128 + wrong);
    const int32_t at[5] = {first.at[0], first.at[1], first.at[2], first.at[3], first.at[4]};
    ptx::tensor_copy(tile + (way == Misuse::misaligned ? 128 : 0), &map, at, full);
  }
  if (way != Misuse::unwaited) ptx::mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < rows * 8; i += blockDim.x)
    out[i] = *reinterpret_cast<const uint4*>(tile + i / 8 * 128 + ((i % 8 ^ (i / 8 & 7)) << 4));
}

}  // namespace specdec

// numbers: size[5], stride[4] in bytes, box[5], first[5]. 1: the encoder has refused.
extern "C" __attribute__((visibility("default"))) int run_tensor_copy(const void* source, uint4* out,
                                                                      const int64_t* numbers, int way) {
  using namespace specdec;
  TensorShape shape;
  First first;
  int rows = 1;
  for (int i = 0; i < 5; i++) {
    shape.size[i] = static_cast<cuuint64_t>(numbers[i]);
    if (i < 4) shape.stride[i] = static_cast<cuuint64_t>(numbers[5 + i]);
    shape.box[i] = static_cast<cuuint32_t>(numbers[9 + i]);
    first.at[i] = static_cast<int32_t>(numbers[14 + i]);
    rows *= i ? static_cast<int>(shape.box[i]) : 1;
  }
  CUtensorMap map = {};
  try {
    if (static_cast<Misuse>(way) != Misuse::no_map) map = tensor_map("tensor_copy", source, shape);
  } catch (const std::runtime_error&) {
    return 1;
  }
  SPECDEC_LAUNCH(tensor_copy_kernel, dim3(1), dim3(128), 2048 + rows * 128, 0, map, first, out, rows,
                 static_cast<Misuse>(way));
  return 0;
}
