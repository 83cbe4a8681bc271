// Host side of a CUDA file: stream, device, launch, registration. Includes no torch CUDA header, so it compiles beside
// a CPU-only torch; the stream comes from a weak symbol that only a CUDA torch defines.
//
// The same file compiled by g++ with SPECDEC_EMULATED launches on the CPU (tests/cuda_on_cpu) and registers its ops in
// another namespace, for CPU tensors.
#pragma once
#include <torch/csrc/stable/library.h>

#include <string_view>

#include "check.h"
#include "device.cuh"

#if defined(SPECDEC_EMULATED)

#define SPECDEC_STRINGIFY(x) #x
// SPECDEC_EMULATED_LIBRARY names the namespace of this build's variant.
#define SPECDEC_CUDA_LIBRARY(m) SPECDEC_CUDA_LIBRARY_(SPECDEC_EMULATED_LIBRARY, m)
#define SPECDEC_CUDA_LIBRARY_(library, m) STABLE_TORCH_LIBRARY_IMPL(library, CPU, m)

namespace specdec {
using Stream = int;
struct DeviceGuard {
  explicit DeviceGuard(const Tensor&) {}
};
inline Stream current_stream(const Tensor&) {
  return 0;
}
inline void allow_shared_memory(const void*, int64_t) {}
// *_sm90.cu are a library of their own (setup.py), and every library has a CUDA runtime, and a last error, of its own.
constexpr int kCudaRuntime = std::string_view(__BASE_FILE__).ends_with("_sm90.cu");
static inline void check_launch(const char* op) {
  ::emulated::check_launch(op, kCudaRuntime);
}
inline int multiprocessor_count(const Tensor&) {
  return 4;
}  // enough to make every split and wave path run
inline int64_t shared_memory_of_block(const Tensor&) {
  return (::emulated::hopper ? 227 : 163) << 10;
}  // as on sm_90 and sm_80
inline int64_t shared_memory_of_multiprocessor(const Tensor&) {
  return (::emulated::hopper ? 228 : 164) << 10;
}
template <class Kernel>
int architecture_of_code(Kernel*) {
  return ::emulated::config.path == ::emulated::Path::ptx ? ::emulated::ptx_architecture : 90;
}
}  // namespace specdec
#define SPECDEC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)               \
  (static_cast<void>(stream), ::emulated::calling_runtime = ::specdec::kCudaRuntime, \
   ::emulated::launch_kernel(#kernel, kernel, grid, block, shared_bytes, __VA_ARGS__))

#else

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>

#define SPECDEC_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(specdec, CUDA, m)

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace specdec {
using Stream = cudaStream_t;

inline void check_cuda(const char* op, cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(op) + ": CUDA: " + cudaGetErrorString(status));
}
// The last error is that of this library's CUDA runtime: whoever launches a kernel checks it in the same library.
inline void check_launch(const char* op) {
  check_cuda(op, cudaGetLastError());
}

// Makes the tensor's device current for its lifetime. torch's own guard: cudaSetDevice back to a device that nobody has
// used yet would give that one a context of some hundred MB, and not going back would change torch's current device.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) : guard_(tensor.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline Stream current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream) throw std::runtime_error("specdec: this torch has no CUDA");
  if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != 0)
    throw std::runtime_error("specdec: torch gave no current CUDA stream");
  return static_cast<Stream>(stream);
}

// Kernels with more than 48 KiB of dynamic shared memory must ask for it.
inline void allow_shared_memory(const void* kernel, int64_t bytes) {
  if (bytes > 48 << 10)
    check_cuda("shared memory",
               cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}
inline int device_attribute(const Tensor& tensor, cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda("device", cudaDeviceGetAttribute(&value, attribute, tensor.get_device_index()));
  return value;
}
inline int multiprocessor_count(const Tensor& tensor) {
  return device_attribute(tensor, cudaDevAttrMultiProcessorCount);
}
// Bytes of shared memory that one block may ask for, and that all blocks of a multiprocessor share.
inline int64_t shared_memory_of_block(const Tensor& tensor) {
  return device_attribute(tensor, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}
inline int64_t shared_memory_of_multiprocessor(const Tensor& tensor) {
  return device_attribute(tensor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
}
// The architecture that the code of a kernel was compiled for, as 90: PTX may be older than the device that runs it.
template <class Kernel>
int architecture_of_code(Kernel* kernel) {
  cudaFuncAttributes found;
  check_cuda("device", cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)));
  return found.ptxVersion;
}
// Whether sm_90a code runs here.
inline bool is_hopper(const Tensor& tensor) {
  return device_attribute(tensor, cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(tensor, cudaDevAttrComputeCapabilityMinor) == 0;
}
}  // namespace specdec
#define SPECDEC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)

#endif
