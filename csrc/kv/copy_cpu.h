// Copying rows of bytes on the CPU.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cpu.h"

namespace specdec {

// Above this many bytes a call's targets do not stay in a cache until the next step reads them: then they are written
// around it, which spares reading every target line first.
constexpr int64_t kStreamBytes = 8 << 20;

inline bool can_stream(const void* target, int64_t bytes) {
  return bytes % 32 == 0 && reinterpret_cast<uintptr_t>(target) % 32 == 0;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void stream_bytes(char* target, const char* source, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
}
inline void stream_fence() {
  _mm_sfence();  // the threads that wait for this one do not know of streaming stores
}
#else
inline void stream_bytes(char* target, const char* source, int64_t bytes) {
  std::memcpy(target, source, bytes);
}
inline void stream_fence() {}
#endif

inline void copy_bytes(char* target, const char* source, int64_t bytes, bool stream) {
  if (stream && can_stream(target, bytes))
    stream_bytes(target, source, bytes);
  else
    std::memcpy(target, source, bytes);
}

// Asks for the lines of a row that will be copied next; the first ones are enough, the hardware follows.
inline void prefetch_bytes(const char* source, int64_t bytes) {
  for (int64_t i = 0; i < bytes && i < 1024; i += 64) __builtin_prefetch(source + i);
}

}  // namespace specdec
