// The table of translated PTX entries in a library.
#pragma once
#include <cstddef>
#include <map>
#include <string>

namespace emulated {

struct PtxKernel {
  void (*body)(const unsigned char* parameters);
  size_t parameter_bytes, static_shared_bytes;
};
std::map<std::string, PtxKernel>& ptx_kernels();

}  // namespace emulated
