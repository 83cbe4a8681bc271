// Copying rows of bytes on the device, in words of 16, 4 or 1 bytes.
#pragma once
#include <initializer_list>

#include "common/device.cuh"

namespace specdec {

// Bytes of the widest word that divides every one of the addresses, strides and sizes.
inline int32_t word_of(std::initializer_list<int64_t> values, int32_t widest = 16) {
  int64_t bits = widest;
  for (int64_t value : values) bits |= value;
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}
inline int64_t address_of(const void* pointer) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
}

// Words first, first + step, ... of a row; zeros where there is no source.
template <class Word>
__device__ __forceinline__ void copy_words(char* target, const char* source, int64_t bytes, int32_t first,
                                           int32_t step) {
  Word* __restrict__ out = reinterpret_cast<Word*>(target);
  const Word* __restrict__ in = reinterpret_cast<const Word*>(source);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Word));
#pragma unroll 4
  for (int64_t i = first; i < count; i += step) out[i] = source ? in[i] : Word{};
}
__device__ __forceinline__ void copy_row(char* target, const char* source, int64_t bytes, int32_t word, int32_t first,
                                         int32_t step) {
  if (word == 16)
    copy_words<uint4>(target, source, bytes, first, step);
  else if (word == 4)
    copy_words<uint32_t>(target, source, bytes, first, step);
  else
    copy_words<uint8_t>(target, source, bytes, first, step);
}

// A block of 128 threads for rows of `bytes`: x threads share a row, y rows run beside each other.
constexpr int kCopyThreads = 128;
inline dim3 copy_block(int64_t bytes, int32_t word) {
  unsigned x = 1;
  while (x < kCopyThreads && static_cast<int64_t>(x) * word < bytes) x *= 2;
  return dim3(x, kCopyThreads / x);
}
// Blocks of `rows_each` rows in grid dimension y, where kernels step on for more.
inline unsigned copy_blocks(int64_t rows, unsigned rows_each) {
  const int64_t blocks = (rows + rows_each - 1) / rows_each;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 65535 ? blocks : 65535);
}

constexpr int kEight = 8;  // elements a thread carries

template <class T>
struct Eight {
  T value[kEight];
};

// Eight neighbouring elements in words of up to 16 bytes.
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const T* from) {
  Eight<T> eight;
  constexpr int kBytes = kEight * sizeof(T);
  if constexpr (kBytes == 8) {
    const uint2 word = *reinterpret_cast<const uint2*>(from);
    memcpy(&eight, &word, 8);
  } else {
    uint4 words[kBytes / 16];
#pragma unroll
    for (int i = 0; i < kBytes / 16; i++) words[i] = reinterpret_cast<const uint4*>(from)[i];
    memcpy(&eight, words, kBytes);
  }
  return eight;
}
template <class T>
__device__ __forceinline__ void store_eight(T* to, const Eight<T>& eight) {
  constexpr int kBytes = kEight * sizeof(T);
  if constexpr (kBytes == 8) {
    uint2 word;
    memcpy(&word, &eight, 8);
    *reinterpret_cast<uint2*>(to) = word;
  } else {
    uint4 words[kBytes / 16];
    memcpy(words, &eight, kBytes);
#pragma unroll
    for (int i = 0; i < kBytes / 16; i++) reinterpret_cast<uint4*>(to)[i] = words[i];
  }
}

}  // namespace specdec
