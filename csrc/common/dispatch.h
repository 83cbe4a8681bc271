// From a runtime dtype to a C++ type, in one place.
#pragma once
#include "check.h"
#include "numerics.h"

namespace specdec {

template <class T>
struct Type {
  using type = T;
};

// body(Type<T>{}) for the three dtypes of activations and logits.
template <class Body>
inline void dispatch_float(const char* op, const char* argument, ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::Float: return body(Type<float>{});
    case ScalarType::BFloat16: return body(Type<BFloat16>{});
    case ScalarType::Half: return body(Type<Half>{});
    default: fail(op, argument, "float32, bfloat16 or float16, got ", dtype_name(dtype));
  }
}

// body(Type<T>{}) for the five dtypes of a KV cache.
template <class Body>
inline void dispatch_kv(const char* op, const char* argument, ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::Float8_e4m3fn: return body(Type<Float8E4M3>{});
    case ScalarType::Float8_e5m2: return body(Type<Float8E5M2>{});
    default: return dispatch_float(op, argument, dtype, body);
  }
}

inline bool is_hnd(const char* op, const std::string& layout) {
  if (layout != "NHD" && layout != "HND") fail(op, "kv_layout", "'NHD' or 'HND', got '", layout, "'");
  return layout == "HND";
}

}  // namespace specdec
