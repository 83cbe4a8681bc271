// draft_topk: arguments, checked once for every native backend.
#pragma once
#include <optional>

#include "../common/check.h"
#include "law.h"

namespace specdec {

constexpr int32_t kMaxDrafts = 1024;  // ids of a row

struct DraftTopkArgs {
  const void* logits;  // [rows, columns], rows row_stride elements apart
  const int32_t* d2t;  // [d2t_size] offsets to target ids, or null
  int32_t* token_ids;  // [rows, k]
  float* log_probs;    // [rows, k]
  float* lse;          // [rows]
  int64_t rows, row_stride, vocab_size;
  int32_t valid, k;  // columns that may exist
  float tau;         // 1 / temperature

  SPECDEC_HD int64_t target_id(int32_t column) const { return d2t ? int64_t{column} + d2t[column] : column; }
  SPECDEC_HD bool exists(int32_t column) const {
    const int64_t id = target_id(column);
    return id >= 0 && id < vocab_size;
  }
};

inline DraftTopkArgs check_draft_topk(const Tensor& logits, const std::optional<Tensor>& d2t, int64_t k,
                                      double temperature, int64_t vocab_size, const Tensor& token_ids,
                                      const Tensor& log_probs, const Tensor& lse) {
  constexpr char op[] = "draft_topk";
  if (logits.dim() != 2) fail(op, "logits", "2 dimensions, got shape ", shape_text(logits));
  check_dense_rows(op, "logits", logits);
  const ScalarType dtype = logits.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half)
    fail(op, "logits", "float32, bfloat16 or float16, got ", dtype_name(dtype));
  check_range(op, "logits", logits.size(1), 1, kMaxVocab);
  if (vocab_size < 1) fail(op, "vocab_size", "a positive number of ids, got ", vocab_size);
  check_index(op, "d2t", d2t, {kAny});
  check_range(op, "k", k, 1, kMaxDrafts);
  const int64_t rows = logits.size(0), columns = logits.size(1);
  check_index(op, "token_ids", token_ids, {rows, k});
  check_index(op, "log_probs", log_probs, {rows, k}, ScalarType::Float);
  check_index(op, "lse", lse, {rows}, ScalarType::Float);
  if (!(temperature > kGreedyTemperature)) fail(op, "temperature", "a value above 1e-5, got ", temperature);
  DraftTopkArgs args = {};
  args.logits = data<char>(logits);
  args.d2t = data_or_null<int32_t>(d2t);
  args.token_ids = mutable_data<int32_t>(token_ids);
  args.log_probs = mutable_data<float>(log_probs);
  args.lse = mutable_data<float>(lse);
  args.rows = rows;
  args.row_stride = logits.stride(0);
  args.vocab_size = vocab_size;
  const int64_t limit = d2t ? d2t->size(0) : vocab_size;
  args.valid = static_cast<int32_t>(limit < columns ? limit : columns);
  args.k = static_cast<int32_t>(k);
  args.tau = 1.0f / static_cast<float>(temperature < kHighestTemperature ? temperature : kHighestTemperature);
  return args;
}

}  // namespace specdec
