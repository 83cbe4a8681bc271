// Number formats and log-domain scalars shared by every backend (g++, nvcc, CUDA-on-CPU).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "hostdevice.h"

namespace specdec {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

SPECDEC_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
SPECDEC_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

SPECDEC_HD float to_float(float x) {
  return x;
}
SPECDEC_HD float to_float(BFloat16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}
SPECDEC_HD float to_float(Half x) {
  // Multiplying by 2^112 rescales the exponent and normalises subnormals in one exact step.
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if ((x.bits & 0x7c00u) == 0x7c00u) return bits_float(sign | 0x7f800000u | (rest & 0x007fffffu));
  return bits_float(sign | float_bits(bits_float(rest) * bits_float(0x77800000u)));
}
SPECDEC_HD float to_float(Float8E5M2 x) {
  return to_float(Half{static_cast<uint16_t>(x.bits << 8)});
}
SPECDEC_HD float to_float(Float8E4M3 x) {  // e4m3fn: no infinities, NaN is 0x7f
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, rest = static_cast<uint32_t>(x.bits & 0x7fu) << 20;
  if ((x.bits & 0x7fu) == 0x7fu) return bits_float(sign | 0x7fc00000u);
  return bits_float(sign | float_bits(bits_float(rest) * bits_float(0x7b800000u)));  // 2^120
}

SPECDEC_HD BFloat16 to_bfloat16(float x) {  // round to nearest even, NaN stays quiet
  uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
SPECDEC_HD Half to_half(float x) {
  uint32_t bits = float_bits(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return Half{static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return Half{static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (rest < 0x38800000u) {  // subnormal half: add and take away 0.5 so that the FPU rounds at the right bit
    uint32_t rounded = float_bits(bits_float(rest) + 0.5f) - float_bits(0.5f);
    return Half{static_cast<uint16_t>(sign | rounded)};
  }
  rest += 0xc8000000u + 0xfffu + ((rest >> 13) & 1u);  // rebias by -112, round to nearest even
  return Half{static_cast<uint16_t>(sign | (rest >> 13))};
}

// float8: round to nearest even, saturate at the largest finite value (448, 57344), NaN stays NaN. Below the smallest
// normal number an addition makes the FPU round at the right bit, as in to_half.
SPECDEC_HD Float8E4M3 to_float8_e4m3(float x) {
  uint32_t bits = float_bits(x), sign = (bits >> 24) & 0x80u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return Float8E4M3{static_cast<uint8_t>(sign | 0x7fu)};
  if (rest > 0x43e00000u) return Float8E4M3{static_cast<uint8_t>(sign | 0x7eu)};
  if (rest < 0x3c800000u) {
    uint32_t rounded = float_bits(bits_float(rest) + 16384.0f) - float_bits(16384.0f);
    return Float8E4M3{static_cast<uint8_t>(sign | rounded)};
  }
  rest += 0xc4000000u + 0x7ffffu + ((rest >> 20) & 1u);  // rebias by -120
  return Float8E4M3{static_cast<uint8_t>(sign | (rest >> 20))};
}
SPECDEC_HD Float8E5M2 to_float8_e5m2(float x) {
  uint32_t bits = float_bits(x), sign = (bits >> 24) & 0x80u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return Float8E5M2{static_cast<uint8_t>(sign | 0x7fu)};
  if (rest > 0x47600000u) return Float8E5M2{static_cast<uint8_t>(sign | 0x7bu)};
  if (rest < 0x38800000u) {
    uint32_t rounded = float_bits(bits_float(rest) + 128.0f) - float_bits(128.0f);
    return Float8E5M2{static_cast<uint8_t>(sign | rounded)};
  }
  rest += 0xc8000000u + 0xfffffu + ((rest >> 21) & 1u);  // rebias by -112
  return Float8E5M2{static_cast<uint8_t>(sign | (rest >> 21))};
}

// Order-preserving unsigned key of a float: a < b iff key(a) < key(b). NaN must be removed first.
SPECDEC_HD uint32_t order_key(float x) {
  uint32_t bits = float_bits(x == 0.0f ? 0.0f : x);  // -0 and +0 are one logit
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
SPECDEC_HD float order_value(uint32_t key) {
  return bits_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

}  // namespace specdec
