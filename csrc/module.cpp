// pybind11 module `_C`: what this build contains. The only file with pybind11; the package imports without it.
#include <pybind11/pybind11.h>

#ifndef SPECDEC_CUDA_ARCHS
#define SPECDEC_CUDA_ARCHS ""
#endif

PYBIND11_MODULE(_C, m) {
  m.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = __VERSION__;
    info["cpp_standard"] = static_cast<long>(__cplusplus);
    info["torch_abi"] = SPECDEC_TORCH_ABI;
    info["cuda_archs"] = SPECDEC_CUDA_ARCHS;
    return info;
  });
}
