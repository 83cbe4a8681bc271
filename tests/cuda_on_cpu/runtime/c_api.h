// The runtime as Python's ctypes sees it.
#pragma once
#include <cstddef>
#include <cstdint>

#define EMULATED_EXPORT __attribute__((visibility("default")))
extern "C" {
EMULATED_EXPORT void emulated_configure(int schedule, int landing, int path, uint64_t seed, uint32_t resident_blocks,
                                        uint32_t preempt, int checks);
EMULATED_EXPORT void emulated_register_tensor(const void* address, size_t bytes, int writable, const char* name);
EMULATED_EXPORT void emulated_clear_tensors();
EMULATED_EXPORT size_t emulated_error_count();
EMULATED_EXPORT const char* emulated_error(size_t index);
EMULATED_EXPORT void emulated_clear_errors();
EMULATED_EXPORT uint64_t emulated_launch_count();
EMULATED_EXPORT uint64_t emulated_tensor_copies();   // issued since the library was loaded
EMULATED_EXPORT const char* emulated_last_kernel();  // its name, as written at the launch
EMULATED_EXPORT void emulated_plant(int bug);        // csrc/common/planted.h; builds with SPECDEC_PLANTED_AT_RUN_TIME
EMULATED_EXPORT void emulated_hopper(int on);        // whether kernels for sm_90a are chosen where an op has one
EMULATED_EXPORT void emulated_refuse_kernels(const char* part);  // launches of kernels with this in their name fail
EMULATED_EXPORT void emulated_ptx_architecture(int number);      // 80, 90: what path B's code was compiled for
// Launches a translated PTX kernel by name; 0, or -1 if there is none of that name.
EMULATED_EXPORT int emulated_launch_entry(const char* name, const uint32_t* grid, const uint32_t* block,
                                          size_t dynamic_bytes, const void* parameters, size_t bytes);
}
