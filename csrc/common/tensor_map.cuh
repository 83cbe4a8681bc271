// Tensor maps: what the copy engine of an sm_90 is told of a tensor (ptx::tensor_copy, hopper.cuh), encoded on the host
// by the driver. Its encoder is asked for by name, so that nothing links libcuda. Only *_sm90.cu files include this.
#pragma once
#include <cuda.h>

#include "launch.cuh"
#if !defined(SPECDEC_EMULATED)
#include <cudaTypedefs.h>
#endif

namespace specdec {

// A tensor of 16-bit elements and the box of it that one copy takes. Dimension 0 is dense and its box at most 128
// bytes; `stride` is in bytes, of dimensions 1 to 4.
struct TensorShape {
  cuuint64_t size[5], stride[4];
  cuuint32_t box[5];
};

#if defined(SPECDEC_EMULATED)
inline auto tensor_map_encoder(const char*) {
  return &::emulated::encode_tensor_map;
}
#else
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder(const char* op) {
  static const auto encoder = [op] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    check_cuda(op,
               cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
    check_cuda(op, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
    if (result != cudaDriverEntryPointSuccess || !found)
      throw std::runtime_error(std::string(op) +
                               ": CUDA: expected a driver with cuTensorMapEncodeTiled (12.0), found none");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return encoder;
}
#endif

// The map of a tensor at `base`, for copies in the 128-byte swizzle; what lies outside comes as zeros. Throws
// std::runtime_error where the driver has no encoder or refuses the shape.
inline CUtensorMap tensor_map(const char* op, const void* base, const TensorShape& shape) {
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      tensor_map_encoder(op)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(base), shape.size, shape.stride,
                             shape.box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string(op) + ": CUDA: the driver refused a tensor map (error " +
                             std::to_string(static_cast<int>(status)) + ")");
  return map;
}

}  // namespace specdec
