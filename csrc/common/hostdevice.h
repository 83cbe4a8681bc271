// Macros that let the shared headers compile with g++, with nvcc and on the CUDA-on-CPU runtime.
#pragma once
#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
#define SPECDEC_HD inline __attribute__((always_inline))
#endif
