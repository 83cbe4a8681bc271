// Bit-level number formats of device code, shared by the models and by translated PTX.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

inline float bits_to_float(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
inline uint32_t float_to_bits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}

inline float bf16_value(uint16_t bits) {
  return bits_to_float(static_cast<uint32_t>(bits) << 16);
}
inline float f16_value(uint16_t bits) {
  return _cvtsh_ss(bits);
}
inline float tf32_value(uint32_t bits) {
  return bits_to_float(bits & 0xffffe000u);
}  // the hardware drops 13 bits

inline uint16_t to_bf16(float x) {  // nearest even
  if (std::isnan(x)) return 0x7fff;
  uint32_t bits = float_to_bits(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t to_f16(float x) {
  return _cvtss_sh(x, 0);
}
inline uint32_t to_tf32(float x) {  // cvt.rna: nearest, ties away
  uint32_t bits = float_to_bits(x);
  return std::isfinite(x) ? (bits + 0x1000u) & 0xffffe000u : bits;
}

// fp8 of the OCP specification: e4m3 has no infinity (0x7f is NaN), e5m2 is half precision cut short.
inline float fp8_value(uint8_t bits, int exponent_bits) {
  if (exponent_bits == 5) return f16_value(static_cast<uint16_t>(bits << 8));
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return bits_to_float(0x7fffffffu);
  float magnitude = exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7)
                             : std::ldexp(static_cast<float>(mantissa), -9);
  return bits & 0x80 ? -magnitude : magnitude;
}
inline uint8_t to_fp8(float x, int exponent_bits) {  // nearest even, saturating to the largest finite value
  uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return static_cast<uint8_t>(exponent_bits == 4 ? 0x7f : 0x7f);
  int mantissa_bits = 7 - exponent_bits, least = exponent_bits == 4 ? -6 : -14;
  float largest = exponent_bits == 4 ? 448.0f : 57344.0f, magnitude = std::fabs(x);
  uint8_t largest_bits = exponent_bits == 4 ? 0x7e : 0x7b;
  if (magnitude >= largest) return sign | largest_bits;
  int exponent = magnitude == 0.0f ? least : std::max(least, std::ilogb(magnitude));
  auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
  int biased = exponent - least;  // a carry out of the mantissa moves into the exponent by itself
  int bits = units + (biased << mantissa_bits);
  return static_cast<uint8_t>(sign | std::min<int>(bits, largest_bits));
}

}  // namespace emulated
