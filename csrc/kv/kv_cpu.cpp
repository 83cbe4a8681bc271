// commit_kv, advance, copy_pages on the CPU. Rows are moved as bytes, so every cache dtype is served by one loop.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kv/args.h"
#include "kv/copy_cpu.h"
#include "tree/tree.h"

namespace specdec {
namespace {

constexpr int64_t kGrainBytes = 1 << 17;  // what a thread should move to be worth its wake-up

// A move with its slots taken apart once for all layers.
struct RowMove {
  int32_t source_page, source_row, target_page, target_row;
};

inline char* row_of(const Layer& layer, int32_t page, int32_t row) {
  return layer.base + page * layer.stride_page + row * layer.stride_row;
}

void move_row(const Layer& layer, const RowMove& move, const RowMove* next, bool stream) {
  const char* source = row_of(layer, move.source_page, move.source_row);
  char* target = row_of(layer, move.target_page, move.target_row);
  if (next) prefetch_bytes(row_of(layer, next->source_page, next->source_row), layer.piece);
  for (int64_t h = 0; h < layer.num_heads; h++)
    copy_bytes(target + h * layer.stride_head, source + h * layer.stride_head, layer.piece, stream);
}

void commit_kv_cpu(Tensor page_table, Tensor context_lens, Tensor cu_nodes, Tensor accepted_nodes, Tensor num_emitted,
                   std::optional<Tensor> request_order, std::string kv_layout, std::vector<Tensor> k_caches,
                   std::vector<Tensor> v_caches) {
  const Group group = group_of("commit_kv", k_caches, v_caches, is_hnd("commit_kv", kv_layout));
  const CommitArgs args =
      check_commit_kv(page_table, context_lens, cu_nodes, accepted_nodes, num_emitted, request_order, group);
  const int32_t page_size = args.page_size;

  // Planned once, then replayed for every layer. A path's moves stay together and in order (see kv.h).
  static thread_local std::vector<RowMove> plan;
  static thread_local std::vector<int32_t> path_starts;
  plan.clear();
  path_starts.clear();
  for (int32_t n = 0; n < args.handled; n++) {
    const int32_t b = args.request(n);
    if (b < 0) continue;
    const NodeRange range = node_range(args.cu_nodes, b, INT32_MAX);
    const int32_t* path = args.accepted_nodes + int64_t{b} * args.width;
    const int32_t length = path_length(path, args.num_emitted[b], args.width, range.count);
    const size_t start = plan.size();
    for (int32_t j = 0; j < length; j++) {
      const Move move = args.move(b, path[j], j);
      if (moves(move))
        plan.push_back(
            {move.source / page_size, move.source % page_size, move.target / page_size, move.target % page_size});
    }
    if (plan.size() > start) path_starts.push_back(static_cast<int32_t>(start));
  }
  if (plan.empty()) return;
  path_starts.push_back(static_cast<int32_t>(plan.size()));

  const RowMove* move = plan.data();  // thread_local: the workers must see this thread's arrays
  const int32_t* starts = path_starts.data();
  const int64_t paths = static_cast<int64_t>(path_starts.size()) - 1, units = paths * group.layers.size();
  const Layer& first = group.layers[0];
  const int64_t row_bytes = first.piece * first.num_heads, moved = static_cast<int64_t>(plan.size());
  const int64_t unit_bytes = std::max<int64_t>(1, moved * row_bytes / paths);
  const bool stream =
      isa() >= Isa::avx2 && moved * row_bytes * static_cast<int64_t>(group.layers.size()) > kStreamBytes;
  torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrainBytes / unit_bytes), [&](int64_t from, int64_t to) {
    for (int64_t unit = from; unit < to; unit++) {
      const Layer& layer = group.layers[unit / paths];
      const int64_t path = unit % paths;
      for (int32_t m = starts[path]; m < starts[path + 1]; m++)
        move_row(layer, move[m], m + 1 < moved ? move + m + 1 : nullptr, stream);
    }
    if (stream) stream_fence();
  });
}

void advance_cpu(Tensor num_emitted, Tensor context_lens) {
  check_advance(num_emitted, context_lens);
  const int32_t* emitted = data<int32_t>(num_emitted);
  int32_t* lens = mutable_data<int32_t>(context_lens);
  for (int64_t b = 0; b < num_emitted.numel(); b++) lens[b] = advanced(lens[b], emitted[b]);
}

void copy_pages_cpu(Tensor src, Tensor dst, std::vector<Tensor> k_caches, std::vector<Tensor> v_caches) {
  check_copy_pages(src, dst);
  const Group group = group_of("copy_pages", k_caches, v_caches, false);  // both layouts: a page is a page
  const int32_t *from_page = data<int32_t>(src), *to_page = data<int32_t>(dst);
  const int64_t pairs = src.numel(), units = pairs * group.layers.size();
  const Layer& first = group.layers[0];
  const int64_t page_bytes = std::max<int64_t>(1, group.page_size * first.piece * first.num_heads);
  torch::stable::parallel_for(0, units, std::max<int64_t>(1, kGrainBytes / page_bytes), [&](int64_t from, int64_t to) {
    for (int64_t unit = from; unit < to; unit++) {
      const Layer& layer = group.layers[unit / pairs];
      const int32_t a = from_page[unit % pairs], b = to_page[unit % pairs];
      if (a < 0 || b < 0 || a >= group.num_pages || b >= group.num_pages || a == b) continue;
      const char* source = layer.base + a * layer.stride_page;
      char* target = layer.base + b * layer.stride_page;
      if (layer.num_heads == 1 && layer.stride_row == layer.piece) {
        std::memcpy(target, source, group.page_size * layer.piece);
        continue;
      }
      for (int64_t r = 0; r < group.page_size; r++)
        for (int64_t h = 0; h < layer.num_heads; h++) {
          const int64_t offset = r * layer.stride_row + h * layer.stride_head;
          std::memcpy(target + offset, source + offset, layer.piece);
        }
    }
  });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("commit_kv", TORCH_BOX(&specdec::commit_kv_cpu));
  m.impl("advance", TORCH_BOX(&specdec::advance_cpu));
  m.impl("copy_pages", TORCH_BOX(&specdec::copy_pages_cpu));
}
