// commit_kv, copy_pages and advance on the GPU. Rows move as bytes, so every cache dtype is served by one kernel.
//
// commit_kv: a block a (request, cache), all layers in one launch. Each warp works out the path's moves for itself, a
// lane a move, and its threads carry their own words of the row through them in order of the path (kv.h), so no byte is
// touched by two threads and no barrier is needed:
//
//   row        | thread 0 | thread 1 | ... | thread 127 | thread 0 | ...
//   moves 1-4    load four sources, then store four targets; then moves 5-8, ...
//
// The caches' addresses travel as kernel parameters, up to 256 (K and V of 128 layers) of up to 4 shapes a launch; more
// take another launch. Nothing is staged on the device, so a captured graph holds all it needs.
// Not handled here: page tables that name a page twice (as in kv.h).
#include "common/copy.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "kv/args.h"
#include "tree/tree.h"

namespace specdec {

constexpr int kCaches = 256, kShapes = 4;

struct CacheShape {  // bytes
  int64_t stride_page, stride_row, stride_head;
  int32_t heads, piece;
};

struct CacheTable {
  char* base[kCaches];
  uint8_t shape_of[kCaches];
  CacheShape shapes[kShapes];
  int32_t word;  // bytes a thread moves at once
};

struct CommitParams {
  CommitArgs call;
  CacheTable caches;
};

constexpr int kCommitThreads = 128;
constexpr int kMovesAtOnce = 4;

// This thread's words of one row through `count` moves: byte offsets of the rows inside the cache.
template <class Word>
__device__ __forceinline__ void move_words(char* base, const CacheShape& shape, const int64_t (&source)[kMovesAtOnce],
                                           const int64_t (&target)[kMovesAtOnce], int32_t count) {
  const int32_t each = shape.piece / static_cast<int32_t>(sizeof(Word)), words = each * shape.heads;
  for (int32_t word = threadIdx.x; word < words; word += kCommitThreads) {
    const int64_t at = word / each * shape.stride_head + word % each * static_cast<int64_t>(sizeof(Word));
    Word held[kMovesAtOnce];
#pragma unroll
    for (int32_t m = 0; m < kMovesAtOnce; m++)
      if (m < count) held[m] = *reinterpret_cast<const Word*>(base + source[m] + at);
#pragma unroll
    for (int32_t m = 0; m < kMovesAtOnce; m++)
      if (m < count) *reinterpret_cast<Word*>(base + target[m] + at) = held[m];
  }
}

// Grid: (requests handled, caches).
__global__ void __launch_bounds__(kCommitThreads) commit_kv_kernel(const CommitParams p) {
  const int lane = threadIdx.x % 32;
  const int32_t b = p.call.request(blockIdx.x);
  if (b < 0) return;
  const CacheShape shape = p.caches.shapes[p.caches.shape_of[blockIdx.y]];
  char* base = p.caches.base[blockIdx.y];
  const int32_t* path = p.call.accepted_nodes + int64_t{b} * p.call.width;
  const int32_t count = node_range(p.call.cu_nodes, b, 2147483647).count, page_size = p.call.page_size,
                limit = emitted_count(p.call.num_emitted[b], p.call.width);
  int32_t last = -1;  // entry before this step's
  for (int32_t step = 0; step < limit; step += 32) {
    const int32_t j = step + lane, node = j < limit ? path[j] : -1;
    int32_t before = __shfl_up_sync(kFullWarp, node, 1);
    if (lane == 0) before = last;
    last = __shfl_sync(kFullWarp, node, 31);
    const uint32_t rising = __ballot_sync(kFullWarp, j < limit && node > before && node < count);
    const int32_t length = rising == kFullWarp ? 32 : __ffs(static_cast<int>(~rising)) - 1;
    const Move move = lane < length ? p.call.move(b, node, j) : Move{-1, -1};
    int64_t source = 0, target = 0;
    if (moves(move)) {
      source = move.source / page_size * shape.stride_page + move.source % page_size * shape.stride_row;
      target = move.target / page_size * shape.stride_page + move.target % page_size * shape.stride_row;
    }
    for (uint32_t left = __ballot_sync(kFullWarp, moves(move)); left != 0;) {
      int64_t sources[kMovesAtOnce] = {}, targets[kMovesAtOnce] = {};
      int32_t taken = 0;
#pragma unroll
      for (int32_t m = 0; m < kMovesAtOnce; m++) {
        const int from = left ? __ffs(static_cast<int>(left)) - 1 : 0;
        sources[m] = __shfl_sync(kFullWarp, source, from);
        targets[m] = __shfl_sync(kFullWarp, target, from);
        taken += left != 0;
        left &= left - 1;
      }
      if (p.caches.word == 16)
        move_words<uint4>(base, shape, sources, targets, taken);
      else if (p.caches.word == 4)
        move_words<uint32_t>(base, shape, sources, targets, taken);
      else
        move_words<uint8_t>(base, shape, sources, targets, taken);
    }
    if (length < 32) return;
  }
}

struct CopyPagesParams {
  const int32_t *source, *target;  // [pairs]
  int32_t num_pages, rows;         // rows of a page
  CacheTable caches;
};

constexpr int kPageThreads = 256;

// A page of rows x heads x piece, four words a thread in flight.
template <class Word>
__device__ __forceinline__ void copy_page(char* target, const char* source, const CacheShape& shape, int32_t rows) {
  const int32_t each = shape.piece / static_cast<int32_t>(sizeof(Word)), row_words = each * shape.heads;
  const int64_t words = int64_t{rows} * row_words;
  for (int64_t first = threadIdx.x; first < words; first += 4 * kPageThreads) {
    Word held[4];
    int64_t at[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t word = first + i * kPageThreads;
      const int32_t inside = static_cast<int32_t>(word % row_words);
      at[i] = word / row_words * shape.stride_row + inside / each * shape.stride_head +
              inside % each * static_cast<int64_t>(sizeof(Word));
      if (word < words) held[i] = *reinterpret_cast<const Word*>(source + at[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i * kPageThreads < words) *reinterpret_cast<Word*>(target + at[i]) = held[i];
  }
}

// Grid: (pairs, caches).
__global__ void __launch_bounds__(kPageThreads) copy_pages_kernel(const CopyPagesParams p) {
  const int32_t a = p.source[blockIdx.x], b = p.target[blockIdx.x];
  if (a < 0 || b < 0 || a >= p.num_pages || b >= p.num_pages || a == b) return;
  const CacheShape shape = p.caches.shapes[p.caches.shape_of[blockIdx.y]];
  const char* source = p.caches.base[blockIdx.y] + a * shape.stride_page;
  char* target = p.caches.base[blockIdx.y] + b * shape.stride_page;
  if (p.caches.word == 16)
    copy_page<uint4>(target, source, shape, p.rows);
  else if (p.caches.word == 4)
    copy_page<uint32_t>(target, source, shape, p.rows);
  else
    copy_page<uint8_t>(target, source, shape, p.rows);
}

__global__ void __launch_bounds__(kCopyThreads)
    advance_kernel(const int32_t* num_emitted, int32_t* context_lens, int32_t requests) {
  const int32_t b = blockIdx.x * kCopyThreads + threadIdx.x;
  if (b < requests) context_lens[b] = advanced(context_lens[b], num_emitted[b]);
}

// ------------------------------------------------------------------ host
// Calls launch(table, caches in it) until all layers had their turn: once, for up to 256 caches of up to 4 shapes.
template <class Launch>
static void for_each_table(const Group& group, Launch&& launch) {
  CacheTable table = {};
  int32_t count = 0, shapes = 0;
  table.word = 16;
  for (size_t l = 0; l < group.layers.size(); l++) {
    const Layer& layer = group.layers[l];
    auto same = [&](const CacheShape& s) {
      return s.stride_page == layer.stride_page && s.stride_row == layer.stride_row &&
             s.stride_head == layer.stride_head && s.heads == layer.num_heads && s.piece == layer.piece;
    };
    int32_t shape = 0;
    while (shape < shapes && !same(table.shapes[shape])) shape++;
    if (count == kCaches || shape == kShapes) {
      launch(table, count);
      count = shapes = shape = 0;
      table.word = 16;
    }
    if (shape == shapes)
      table.shapes[shapes++] = {layer.stride_page, layer.stride_row, layer.stride_head,
                                static_cast<int32_t>(layer.num_heads), static_cast<int32_t>(layer.piece)};
    table.base[count] = layer.base;
    table.shape_of[count++] = static_cast<uint8_t>(shape);
    table.word = word_of({address_of(layer.base), layer.stride_page, layer.stride_row, layer.piece,
                          layer.num_heads > 1 ? layer.stride_head : 0},
                         table.word);
  }
  if (count) launch(table, count);
}

void commit_kv_cuda(Tensor page_table, Tensor context_lens, Tensor cu_nodes, Tensor accepted_nodes, Tensor num_emitted,
                    std::optional<Tensor> request_order, std::string kv_layout, std::vector<Tensor> k_caches,
                    std::vector<Tensor> v_caches) {
  const char* op = "commit_kv";
  const Group group = group_of(op, k_caches, v_caches, is_hnd(op, kv_layout));
  CommitParams p = {};
  p.call = check_commit_kv(page_table, context_lens, cu_nodes, accepted_nodes, num_emitted, request_order, group);
  if (p.call.handled == 0) return;
  DeviceGuard guard(page_table);
  for_each_table(group, [&](const CacheTable& table, int32_t count) {
    p.caches = table;
    SPECDEC_LAUNCH(commit_kv_kernel, dim3(p.call.handled, count), dim3(kCommitThreads), 0, current_stream(page_table),
                   p);
  });
  check_launch(op);
}

void copy_pages_cuda(Tensor src, Tensor dst, std::vector<Tensor> k_caches, std::vector<Tensor> v_caches) {
  const char* op = "copy_pages";
  check_copy_pages(src, dst);
  const Group group = group_of(op, k_caches, v_caches, false);  // both layouts: a page is a page
  CopyPagesParams p = {};
  p.source = data<int32_t>(src);
  p.target = data<int32_t>(dst);
  p.num_pages = static_cast<int32_t>(group.num_pages);
  p.rows = static_cast<int32_t>(group.page_size);
  const unsigned pairs = static_cast<unsigned>(src.numel());
  if (pairs == 0) return;
  DeviceGuard guard(src);
  for_each_table(group, [&](const CacheTable& table, int32_t count) {
    p.caches = table;
    SPECDEC_LAUNCH(copy_pages_kernel, dim3(pairs, count), dim3(kPageThreads), 0, current_stream(src), p);
  });
  check_launch(op);
}

void advance_cuda(Tensor num_emitted, Tensor context_lens) {
  check_advance(num_emitted, context_lens);
  const int32_t requests = static_cast<int32_t>(num_emitted.numel());
  if (requests == 0) return;
  DeviceGuard guard(context_lens);
  SPECDEC_LAUNCH(advance_kernel, dim3((requests + kCopyThreads - 1) / kCopyThreads), dim3(kCopyThreads), 0,
                 current_stream(context_lens), data<int32_t>(num_emitted), mutable_data<int32_t>(context_lens),
                 requests);
  check_launch("advance");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("commit_kv", TORCH_BOX(&specdec::commit_kv_cuda));
  m.impl("copy_pages", TORCH_BOX(&specdec::copy_pages_cuda));
  m.impl("advance", TORCH_BOX(&specdec::advance_cuda));
}
