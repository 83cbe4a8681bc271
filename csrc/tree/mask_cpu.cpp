// pack_mask, unpack_mask, tree_from_mask on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"
#include "tree/tree.h"

namespace specdec {
namespace {

constexpr int64_t kGrainBits = 1 << 18;

int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, kGrainBits / std::max<int64_t>(1, columns));
}

void pack_mask_cpu(Tensor mask, Tensor words) {
  const char* op = "pack_mask";
  check_tensor(op, "mask", mask, ScalarType::Bool, {kAny, kAny});
  const int64_t rows = mask.size(0), columns = mask.size(1), width = (columns + 31) / 32;
  check_dense_rows(op, "mask", mask);
  check_index(op, "words", words, {rows, width});

  const uint8_t* bits = data<uint8_t>(mask);
  int32_t* out = mutable_data<int32_t>(words);
  const int64_t stride = mask.stride(0);
  torch::stable::parallel_for(0, rows, row_grain(columns), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
      for (int64_t w = 0; w < width; w++) {
        const uint8_t* source = bits + row * stride + 32 * w;
        const int64_t count = std::min<int64_t>(32, columns - 32 * w);
        uint32_t word = 0;
        for (int64_t j = 0; j < count; j++) word |= static_cast<uint32_t>(source[j] != 0) << j;
        out[row * width + w] = static_cast<int32_t>(word);
      }
  });
}

void unpack_mask_cpu(Tensor words, Tensor mask) {
  const char* op = "unpack_mask";
  check_index(op, "words", words, {kAny, kAny});
  const int64_t rows = words.size(0), width = words.size(1);
  check_tensor(op, "mask", mask, ScalarType::Bool, {rows, kAny});
  const int64_t columns = mask.size(1);
  check_dense_rows(op, "mask", mask);
  if (columns > 32 * width) fail(op, "mask", "at most ", 32 * width, " columns, got ", columns);

  const int32_t* source = data<int32_t>(words);
  uint8_t* out = mutable_data<uint8_t>(mask);
  const int64_t stride = mask.stride(0);
  torch::stable::parallel_for(0, rows, row_grain(columns), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
      for (int64_t j = 0; j < columns; j++)
        out[row * stride + j] = static_cast<uint32_t>(source[row * width + j / 32]) >> (j % 32) & 1u;
  });
}

void tree_from_mask_cpu(Tensor tree_mask, Tensor cu_nodes, int64_t max_nodes, Tensor parents) {
  const char* op = "tree_from_mask";
  check_range(op, "max_nodes", max_nodes, 0, kMaxTreeNodes);
  check_index(op, "tree_mask", tree_mask, {kAny, kAny});
  const int64_t nodes = tree_mask.size(0), width = tree_mask.size(1);
  if (width < mask_words(static_cast<int32_t>(max_nodes)))
    fail(op, "tree_mask", "at least ", mask_words(static_cast<int32_t>(max_nodes)), " words a row, got ", width);
  check_index(op, "cu_nodes", cu_nodes, {kAny});
  if (cu_nodes.numel() < 1) fail(op, "cu_nodes", "shape [B + 1], got [0]");
  check_index(op, "parents", parents, {nodes});

  const int64_t requests = cu_nodes.numel() - 1;
  const int32_t *mask = data<int32_t>(tree_mask), *cu = data<int32_t>(cu_nodes);
  int32_t* out = mutable_data<int32_t>(parents);
  for (int64_t b = 0; b < requests; b++) {
    const NodeRange range = node_range(cu, b, nodes);
    const int32_t* rows = mask + range.begin * width;
    for (int32_t i = 0; i < range.count; i++) {
      int32_t parent = range.count > max_nodes ? -1 : parent_of_mask_row(rows + i * width, i);
      const int32_t* above = parent < 0 ? nullptr : rows + parent * width;
      if (parent >= 0 && !mask_row_valid(rows + i * width, above, i, range.count)) parent = -1;
      out[range.begin + i] = parent;
    }
  }
  for (int64_t row = tail_begin(cu, requests, nodes); row < nodes; row++) out[row] = -1;
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("pack_mask", TORCH_BOX(&specdec::pack_mask_cpu));
  m.impl("unpack_mask", TORCH_BOX(&specdec::unpack_mask_cpu));
  m.impl("tree_from_mask", TORCH_BOX(&specdec::tree_from_mask_cpu));
}
