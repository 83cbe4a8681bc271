// Host-side argument checks. A user's mistake is `op: argument: expected X, got Y` as std::invalid_argument, which
// Python sees as ValueError. Checks run before the first write.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] inline void fail(const char* op, const char* argument, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": " << argument << ": expected ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    default: return "another dtype";
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); d++) text += (d ? ", " : "") + std::to_string(tensor.size(d));
  return text + "]";
}

constexpr int64_t kAny = -1;  // wildcard in an expected shape

// dtype and shape; sizes equal to kAny match anything.
inline void check_tensor(const char* op, const char* argument, const Tensor& tensor, ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  if (tensor.scalar_type() != dtype) fail(op, argument, dtype_name(dtype), ", got ", dtype_name(tensor.scalar_type()));
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t d = 0;
  for (int64_t size : shape) {
    if (!same) break;
    same = size == kAny || tensor.size(d) == size;
    d++;
  }
  if (same) return;
  std::string wanted = "[";
  for (int64_t size : shape)
    wanted += (wanted.size() > 1 ? ", " : "") + (size == kAny ? std::string("*") : std::to_string(size));
  fail(op, argument, "shape ", wanted, "], got ", shape_text(tensor));
}

// The rule for index tensors: int32, contiguous.
inline void check_index(const char* op, const char* argument, const Tensor& tensor,
                        std::initializer_list<int64_t> shape, ScalarType dtype = ScalarType::Int) {
  check_tensor(op, argument, tensor, dtype, shape);
  if (!tensor.is_contiguous()) fail(op, argument, "a contiguous tensor, got strides of a view");
}

inline void check_index(const char* op, const char* argument, const std::optional<Tensor>& tensor,
                        std::initializer_list<int64_t> shape, ScalarType dtype = ScalarType::Int) {
  if (tensor) check_index(op, argument, *tensor, shape, dtype);
}

// The rule for data tensors: any strides, but the last dimension dense.
inline void check_dense_rows(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.dim() > 0 && tensor.numel() > 0 && tensor.size(tensor.dim() - 1) > 1 &&
      tensor.stride(tensor.dim() - 1) != 1)
    fail(op, argument, "a dense last dimension (stride 1), got stride ", tensor.stride(tensor.dim() - 1));
}

inline void check_range(const char* op, const char* argument, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail(op, argument, "a value in [", low, ", ", high, "], got ", value);
}

template <class T>
inline const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}
template <class T>
inline const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
inline T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace specdec
