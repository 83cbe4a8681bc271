// What the C++ made of PTX calls: typed memory access, conversions, bit operations, shuffles, atomics.
#pragma once
#include <algorithm>
#include <limits>

#include "device_model.h"
#include "hopper.h"
#include "number_formats.h"
#include "ptx_kernels.h"

namespace emulated::ptx {

// ---- registers hold bits; these read them as another type
inline float F(uint32_t bits) {
  return bits_to_float(bits);
}
inline uint32_t U(float x) {
  return float_to_bits(x);
}
inline double D(uint64_t bits) {
  return __builtin_bit_cast(double, bits);
}
inline uint64_t UD(double x) {
  return __builtin_bit_cast(uint64_t, x);
}
inline float ftz(float x) {
  return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x;
}
inline At at_site(const Site& site) {
  return {site.where, 0};
}

// ---- memory. `site` carries kind and place of the statement.
template <int kBytes>
inline void check_alignment(uint64_t address, const Site& site) {
  if (address % kBytes) trap("misaligned access", at_site(site));
}
template <int kBytes>
inline char* shared_pointer(uint32_t offset, const Site& site) {
  check_alignment<kBytes>(offset, site);
  if (static_cast<uint64_t>(offset) + kBytes > dynamic_shared_bytes())
    trap("shared access out of bounds", at_site(site));
  return static_cast<char*>(dynamic_shared()) + offset;
}
template <int kBytes>
inline const char* load(const char* address, const Site& site) {
  check_alignment<kBytes>(reinterpret_cast<uint64_t>(address), site);
  check_read(address, kBytes, &site);
  return address;
}
template <int kBytes>
inline void store(char* address, const void* value, const Site& site) {
  check_alignment<kBytes>(reinterpret_cast<uint64_t>(address), site);
  check_write(address, kBytes, &site, value);
  memcpy(address, value, kBytes);
}
template <int kBytes>
inline const char* load_ordered(const char* address, Order order, const Site& site) {
  check_alignment<kBytes>(reinterpret_cast<uint64_t>(address), site);
  check_atomic(address, kBytes, false, order, &site);
  return address;
}
template <int kBytes>
inline void store_ordered(char* address, const void* value, Order order, const Site& site) {
  check_alignment<kBytes>(reinterpret_cast<uint64_t>(address), site);
  check_atomic(address, kBytes, true, order, &site);
  memcpy(address, value, kBytes);
}
template <class T, class Update>
inline T atomic(char* address, Order order, const Site& site, Update update) {
  check_alignment<sizeof(T)>(reinterpret_cast<uint64_t>(address), site);
  return atomic_update(reinterpret_cast<T*>(address), order, update, &site);
}
inline void copy_async(char* destination, const char* source, int bytes, uint32_t source_bytes, const Site& site) {
  cp_async(destination, source, bytes, static_cast<int>(std::min<uint32_t>(source_bytes, static_cast<uint32_t>(bytes))),
           at_site(site));
}

// ---- conversions
template <bool kBf16>
inline uint16_t to_half_bits(float x) {
  return kBf16 ? to_bf16(x) : to_f16(x);
}
template <bool kBf16>
inline float half_value(uint16_t bits) {
  return kBf16 ? bf16_value(bits) : f16_value(bits);
}
inline double round_as(double x, char mode) {  // n nearest even, z toward zero, m down, p up
  return mode == 'n' ? std::nearbyint(x) : mode == 'z' ? std::trunc(x) : mode == 'm' ? std::floor(x) : std::ceil(x);
}
template <class T>
inline T float_to_integer(double x, char mode) {  // saturates; NaN gives 0
  if (std::isnan(x)) return 0;
  x = round_as(x, mode);
  if (x <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(x);
}
template <class To, class From>
inline To saturate(From x) {
  using Wide = __int128;
  Wide low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
  return static_cast<To>(std::clamp(static_cast<Wide>(x), low, high));
}
inline uint32_t fp8x2_to_f16x2(uint16_t pair, int exponent_bits) {
  uint32_t low = to_f16(fp8_value(static_cast<uint8_t>(pair), exponent_bits));
  uint32_t high = to_f16(fp8_value(static_cast<uint8_t>(pair >> 8), exponent_bits));
  return high << 16 | low;
}
inline uint16_t floats_to_fp8x2(float high, float low, int exponent_bits) {
  return static_cast<uint16_t>(to_fp8(high, exponent_bits) << 8 | to_fp8(low, exponent_bits));
}

// Packed half arithmetic: compute in float32, round each result once.
template <bool kBf16, int kCount, class Operation, class... Operands>
inline uint32_t packed_half(Operation operation, Operands... operands) {
  uint32_t result = 0;
  for (int i = 0; i < kCount; i++) {
    float value = operation(half_value<kBf16>(static_cast<uint16_t>(static_cast<uint32_t>(operands) >> (16 * i)))...);
    result |= static_cast<uint32_t>(to_half_bits<kBf16>(value)) << (16 * i);
  }
  return result;
}

// ---- bits
template <class T>
inline T bit_field_extract(T a, uint32_t position, uint32_t length) {
  using Bits = std::make_unsigned_t<T>;
  constexpr uint32_t n = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  bool sign = false;
  if (std::is_signed_v<T> && length) sign = static_cast<Bits>(a) >> std::min(position + length - 1, n - 1) & 1;
  Bits result = 0;
  for (uint32_t i = 0; i < n; i++) {
    bool inside = i < length && position + i < n;
    result |= static_cast<Bits>(inside ? static_cast<Bits>(a) >> (position + i) & 1 : sign) << i;
  }
  return static_cast<T>(result);
}
template <class T>
inline T bit_field_insert(T field, T base, uint32_t position, uint32_t length) {
  constexpr uint32_t n = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (position >= n || !length) return base;
  length = std::min(length, n - position);
  T mask = length >= n ? ~T(0) : static_cast<T>((T(1) << length) - 1);
  return static_cast<T>((base & ~(mask << position)) | ((field & mask) << position));
}
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}
template <int kBits>
inline uint32_t leading_zeros(uint64_t x) {
  return x ? static_cast<uint32_t>(__builtin_clzll(x)) - (64 - kBits) : kBits;
}
inline uint32_t funnel_left(uint32_t low, uint32_t high, uint32_t shift, bool clamp) {
  shift = clamp ? std::min(shift, 32u) : shift & 31;
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << shift >> 32);
}
inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t shift, bool clamp) {
  shift = clamp ? std::min(shift, 32u) : shift & 31;
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift);
}

// ---- shfl.sync with PTX's operands: b lane or delta, c = segment mask << 8 | clamp
struct PtxShuffle {
  uint32_t value, b, c, result;
  char mode;
  bool valid;
};
inline uint32_t shuffle_sync(uint32_t value, uint32_t b, uint32_t c, uint32_t mask, char mode, bool& valid, At at) {
  static const char kind = 0;
  PtxShuffle argument{value, b, c, value, mode, false};
  warp_collective(
      &kind, mask, &argument,
      [](void** arguments, uint32_t lanes) {
        for (int lane = 0; lane < 32; lane++) {
          if (!(lanes >> lane & 1)) continue;
          auto* mine = static_cast<PtxShuffle*>(arguments[lane]);
          int offset = static_cast<int>(mine->b & 31), clamp = static_cast<int>(mine->c & 31);
          int segment = static_cast<int>(mine->c >> 8 & 31);
          int last = (lane & segment) | (clamp & ~segment), from = lane;
          switch (mine->mode) {
            case 'u': from = lane - offset, mine->valid = from >= last; break;
            case 'd': from = lane + offset, mine->valid = from <= last; break;
            case 'b': from = lane ^ offset, mine->valid = from <= last; break;
            default: from = (lane & segment) | (offset & ~segment), mine->valid = from <= last;
          }
          if (!mine->valid) from = lane;
          if (!(lanes >> from & 1)) trap("shfl.sync reads a lane outside its mask", {"", 0});
          mine->result = static_cast<PtxShuffle*>(arguments[from])->value;
        }
      },
      at);
  valid = argument.valid;
  return argument.result;
}

// Registers one translated entry when the library is loaded.
struct Registration {
  Registration(const char* name, void (*body)(const unsigned char*), size_t parameter_bytes, size_t shared_bytes,
               const Site* sites, size_t num_sites) {
    ptx_kernels()[name] = {body, parameter_bytes, shared_bytes};
    register_sites(sites, num_sites);
  }
};

}  // namespace emulated::ptx
