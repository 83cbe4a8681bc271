// Rows of logits and what edits them, as every native backend takes them from an op's arguments.
#pragma once
#include <optional>

#include "../common/check.h"
#include "law.h"

namespace specdec {

enum class LogitType : int32_t { float32, bfloat16, float16 };

// One row and what edits it: columns at and behind `size` do not exist, `allowed` bits of 0 forbid, bias entries add.
struct Row {
  const void* data = nullptr;
  LogitType type = LogitType::float32;
  int32_t size = 0;
  const uint32_t* allowed = nullptr;
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_bias = 0;
  bool is_clean = false;       // known to hold neither NaN nor +inf once edited
  const void* next = nullptr;  // a row of as many logits that is read next: it comes into the cache meanwhile

  SPECDEC_HD bool is_edited() const { return allowed != nullptr || num_bias > 0; }
};

struct FilterParams {
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = 0;
};
// Rows of a [R, V] logits tensor with their edits.
struct RowSource {
  const char* data = nullptr;
  int64_t row_bytes = 0;
  LogitType type = LogitType::float32;
  int32_t columns = 0;  // width of the tensor
  int32_t valid = 0;    // columns that exist
  const uint32_t* allowed = nullptr;
  int64_t allowed_stride = 0;
  const int32_t *bias_cu = nullptr, *bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_entries = 0;
  int64_t num_rows = 0;

  SPECDEC_HD Row row(int64_t index) const {
    Row row;
    row.data = data + index * row_bytes;
    row.type = type;
    row.size = valid;
    if (allowed) row.allowed = allowed + index * allowed_stride;
    if (bias_cu) {
      int32_t begin = bias_cu[index], end = bias_cu[index + 1];
      if (begin >= 0 && begin < end && end <= num_entries) {
        row.bias_ids = bias_ids + begin;
        row.bias_values = bias_values + begin;
        row.num_bias = end - begin;
      }
    }
    return row;
  }
};

inline RowSource make_rows(const char* op, const char* name, const Tensor& logits, int64_t vocab_size,
                           const std::optional<Tensor>& allowed, const std::optional<Tensor>& bias_cu,
                           const std::optional<Tensor>& bias_ids, const std::optional<Tensor>& bias_values) {
  RowSource source;
  if (logits.dim() != 2) fail(op, name, "2 dimensions, got shape ", shape_text(logits));
  check_dense_rows(op, name, logits);
  switch (logits.scalar_type()) {
    case ScalarType::Float: source.type = LogitType::float32; break;
    case ScalarType::BFloat16: source.type = LogitType::bfloat16; break;
    case ScalarType::Half: source.type = LogitType::float16; break;
    default: fail(op, name, "float32, bfloat16 or float16, got ", dtype_name(logits.scalar_type()));
  }
  check_range(op, name, logits.size(1), 1, kMaxVocab);
  if (vocab_size < 1) fail(op, "vocab_size", "a positive number of ids, got ", vocab_size);
  int64_t rows = logits.size(0), words = (logits.size(1) + 31) / 32;
  source.data = static_cast<const char*>(logits.const_data_ptr());
  source.row_bytes = logits.stride(0) * (source.type == LogitType::float32 ? 4 : 2);
  source.columns = static_cast<int32_t>(logits.size(1));
  source.valid = static_cast<int32_t>(vocab_size < logits.size(1) ? vocab_size : logits.size(1));
  source.num_rows = rows;
  if (allowed) {
    check_tensor(op, "allowed", *allowed, ScalarType::Int, {rows, words});
    check_dense_rows(op, "allowed", *allowed);
    source.allowed = data<uint32_t>(*allowed);
    source.allowed_stride = allowed->stride(0);
  }
  if (bias_cu) {
    if (!bias_ids || !bias_values) fail(op, "bias", "(cu_entries, ids, values), got a part of it");
    check_index(op, "bias cu_entries", *bias_cu, {rows + 1});
    check_index(op, "bias ids", *bias_ids, {kAny});
    check_index(op, "bias values", *bias_values, {bias_ids->size(0)}, ScalarType::Float);
    source.bias_cu = data<int32_t>(*bias_cu);
    source.bias_ids = data<int32_t>(*bias_ids);
    source.bias_values = data<float>(*bias_values);
    source.num_entries = static_cast<int32_t>(bias_ids->size(0));
  }
  return source;
}

}  // namespace specdec
