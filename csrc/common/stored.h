// Conversions by the type they go to.
#pragma once
#include "common/numerics.h"

namespace specdec {

// A float as a tensor of T holds it.
template <class T>
SPECDEC_HD T stored(float x);
template <>
SPECDEC_HD Float8E4M3 stored<Float8E4M3>(float x) {
  return to_float8_e4m3(x);
}
template <>
SPECDEC_HD Float8E5M2 stored<Float8E5M2>(float x) {
  return to_float8_e5m2(x);
}
template <>
SPECDEC_HD float stored<float>(float x) {
  return x;
}
template <>
SPECDEC_HD BFloat16 stored<BFloat16>(float x) {
  return to_bfloat16(x);
}
template <>
SPECDEC_HD Half stored<Half>(float x) {
  return to_half(x);
}

}  // namespace specdec
