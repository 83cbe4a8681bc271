// build_tree and chain_tree on the GPU.
//
// build_tree: one block a request, two warps that work at the same time on the parents in shared memory:
//
//   both warps   load the parents, judge them                         __syncthreads_or
//   warp 0       forward, 32 nodes a step: depths, positions, masks   warp 1  backward: next_sibling, first_child
//   both warps   too deep? then only the root remains                 __syncthreads
//
// Forward step on nodes 32 c .. 32 c + 31. Parents precede children, so a node's ancestors lie in this step or in
// finished rows. Five rounds of pointer doubling inside the warp give each lane its ancestors of this step as one mask
// word, and the topmost of them; that one's parent is a finished row, whose words below c are copied.
//
//   word:     0 .. c-1                      c                    c+1 ..
//   row i:    row of the outer parent   |   doubled lane bits  |   0
//
// Shared memory: 12 bytes a node (parent, depth, first child). Numerics: integers only.
// Not handled here: more than 1024 nodes a request (checked on the host).
#include "common/launch.cuh"
#include "common/planted.h"
#include "common/reduce.cuh"
#include "tree/args.h"

namespace specdec {

constexpr int kBuildThreads = 64;

// Depth, position and mask of every node; returns the deepest depth (in every lane).
__device__ __forceinline__ int32_t derive_rows(const TreeRows& out, const int32_t* parents, int32_t* depths,
                                               NodeRange range, int32_t context_len) {
  const int lane = threadIdx.x % 32;
  int32_t deepest = 0;
  for (int32_t step = 0; step * 32 < range.count; step++) {
    const int32_t node = step * 32 + lane;
    const bool active = node < range.count;
    const int32_t parent = active ? parents[node] : -1;
    // Pointer doubling over the lanes of this step; a lane whose parent lies before the step points at itself.
    uint32_t bits = 1u << (planted(Bug::shift_past_word) ? node : lane);
    int32_t jump = parent >= step * 32 ? parent - step * 32 : lane, hops = jump != lane;
#pragma unroll
    for (int round = 0; round < 5; round++) {
      if (planted(Bug::divergent_shuffle) && node == 1) continue;
      bits |= __shfl_sync(kFullWarp, bits, jump);
      hops += __shfl_sync(kFullWarp, hops, jump);
      jump = __shfl_sync(kFullWarp, jump, jump);
    }
    const int32_t outer = __shfl_sync(kFullWarp, parent, jump);  // parent of the topmost ancestor in this step
    const int32_t depth = hops + (outer < 0 ? 0 : depths[outer] + 1);
    if (active) {
      const int64_t row = int64_t{range.begin} + node;
      depths[node] = depth;
      deepest = depth > deepest ? depth : deepest;
      if (!planted(Bug::uninitialised_output) || node != range.count - 1) out.depths[row] = depth;
      out.positions[row] = context_len + depth;
      out.parents[row] = parent;
      const int32_t* above = out.tree_mask + (int64_t{range.begin} + outer) * out.words;
      int32_t* mask_row = out.tree_mask + row * out.words;
      for (int32_t word = 0; word < out.words; word++)
        mask_row[word] = word < step && outer >= 0 ? above[word] : word == step ? static_cast<int32_t>(bits) : 0;
    }
    if (!planted(Bug::no_syncwarp)) __syncwarp();  // the next step reads these depths and mask rows
  }
  return warp_max(deepest);
}

// Sibling links, backwards, 32 nodes a step: a node's next sibling is the nearest later lane with the same parent, else
// the first child its parent has so far.
__device__ __forceinline__ void link_siblings(const TreeRows& out, const int32_t* parents, int32_t* first_child,
                                              NodeRange range) {
  const int lane = threadIdx.x % 32;
  if (!planted(Bug::uninitialised_shared))
    for (int32_t node = lane; node < range.count; node += 32) first_child[node] = -1;
  __syncwarp();
  for (int32_t step = (range.count - 1) / 32; step >= 0; step--) {
    const int32_t node = step * 32 + lane;
    const bool child = node > 0 && node < range.count;
    const int32_t parent = child ? parents[node] : -1 - lane;  // what has no parent matches nobody
    const uint32_t peers = __match_any_sync(kFullWarp, parent);
    const uint32_t later = peers & ~((2u << lane) - 1u);  // 2 << 31 is 0: no later lane
    const int32_t known = child ? first_child[parent] : -1;
    __syncwarp();  // everybody has read before the first child changes
    if (child && (peers & ((1u << lane) - 1u)) == 0) first_child[parent] = node;
    __syncwarp();
    if (node < range.count)
      out.next_sibling[int64_t{range.begin} + node] = later ? step * 32 + __ffs(later) - 1 : known;
  }
  for (int32_t node = lane; node < range.count; node += 32)
    out.first_child[int64_t{range.begin} + node] = first_child[node];
}

__device__ __forceinline__ void reduce_to_root_block(const TreeRows& out, NodeRange range, int32_t context_len) {
  for (int32_t node = threadIdx.x; node < range.count; node += blockDim.x) {
    const int64_t row = int64_t{range.begin} + node;
    if (node == 0)
      write_root(out, row, context_len > 0 ? context_len : 0);
    else
      write_inert_node(out, row);
  }
}

// Rows that belong to no request.
__device__ __forceinline__ void write_tail(const TreeRows& out, int64_t from, int64_t to) {
  for (int64_t row = from + threadIdx.x; row < to; row += blockDim.x) write_inert_node(out, row);
}

// Grid: num_requests blocks, and one for the rows behind the batch.
__global__ void __launch_bounds__(kBuildThreads) build_tree_kernel(const BuildTreeArgs p) {
  SPECDEC_DYNAMIC_SHARED(int32_t, shared);
  SPECDEC_SHARED(int32_t, deepest, 1);
  const int32_t b = blockIdx.x, thread = threadIdx.x;
  if (b == p.num_requests) {
    int64_t from = tail_begin(p.cu_nodes, b, p.total_nodes);
    if (planted(Bug::block_race) && from > 0) from--;
    write_tail(p.out, from, p.total_nodes);
    return;
  }
  const NodeRange range = node_range(p.cu_nodes, b, p.total_nodes);
  const int32_t context_len = p.context_lens[b];
  int32_t* parents = shared;
  int32_t* depths = shared + p.max_nodes;
  int32_t* first_child = shared + 2 * p.max_nodes - (planted(Bug::shared_out_of_bounds) ? -2 * p.max_nodes : 0);

  int32_t flags = range.flags | (context_valid(context_len, range.count) ? 0 : kFlagIndex);
  bool bad = range.count > p.max_nodes;
  if (!bad) {
    for (int32_t node = thread; node < range.count; node += kBuildThreads) {
      const int32_t parent = p.parents[int64_t{range.begin} + node + (planted(Bug::global_out_of_bounds) ? 1 : 0)];
      parents[node] = parent;
      bad |= !parent_valid(node, parent);
    }
  }
  if (planted(Bug::divergent_barrier) && thread < 32)
    bad = __syncthreads_or(bad);
  else if (!planted(Bug::no_barrier_before_read))
    bad = __syncthreads_or(bad);
  if (bad) flags |= kFlagTree;
  if (flags == 0) {
    if (thread < 32) {
      const int32_t depth = derive_rows(p.out, parents, depths, range, context_len);
      if (thread == 0) deepest[0] = depth;
    } else {
      link_siblings(p.out, parents, first_child, range);
    }
    __syncthreads();
    if (deepest[0] > p.max_depth) flags = kFlagTree;
  }
  if (flags) reduce_to_root_block(p.out, range, context_len);
  if (thread == 0) p.flags[b] = flags;
}

constexpr int kChainThreads = 128;

// First row of request b. As long as everything fits it is the sum of the sizes before it; only behind a request that
// did not fit does a size depend on the rows left, and then one thread counts.
__device__ __forceinline__ int64_t chain_begin(const ChainTreeArgs& p, int32_t b, int64_t* scratch) {
  int64_t mine = 0;
  for (int32_t j = threadIdx.x; j < b; j += kChainThreads)
    mine += chain_size(p.num_drafts[j], p.context_lens[j], p.max_nodes, p.total_nodes).count;
  const int64_t total = block_reduce(mine, Sum{}, int64_t{0}, scratch);
  if (total <= p.total_nodes) return total;
  if (threadIdx.x == 0) {
    int64_t row = 0;
    for (int32_t j = 0; j < b; j++)
      row += chain_size(p.num_drafts[j], p.context_lens[j], p.max_nodes, p.total_nodes - row).count;
    scratch[0] = row;
  }
  __syncthreads();
  return scratch[0];
}

// Grid: num_requests blocks, and one for cu_nodes[B] and the rows behind the batch.
__global__ void __launch_bounds__(kChainThreads) chain_tree_kernel(const ChainTreeArgs p) {
  SPECDEC_SHARED(int64_t, scratch, kChainThreads / 32);
  const int32_t b = blockIdx.x;
  const int64_t begin = chain_begin(p, b, scratch);
  if (threadIdx.x == 0) p.cu_nodes[b] = static_cast<int32_t>(begin);
  if (b == p.num_requests) {
    write_tail(p.out, begin, p.total_nodes);
    return;
  }
  const int32_t context_len = p.context_lens[b];
  const ChainSize size = chain_size(p.num_drafts[b], context_len, p.max_nodes, p.total_nodes - begin);
  if (threadIdx.x == 0) p.flags[b] = size.flags;
  if (size.flags) {
    reduce_to_root_block(p.out, {static_cast<int32_t>(begin), size.count, 0}, context_len);
    return;
  }
  for (int32_t i = threadIdx.x; i < size.count; i += kChainThreads)
    write_chain_node(p.out, begin + i, i, size.count, context_len);
}

// ------------------------------------------------------------------ host
void build_tree_cuda(Tensor parents, Tensor cu_nodes, Tensor context_lens, int64_t max_nodes, int64_t max_depth,
                     Tensor parents_out, Tensor tree_mask, Tensor depths, Tensor positions, Tensor first_child,
                     Tensor next_sibling, Tensor flags) {
  const BuildTreeArgs p = check_build_tree(parents, cu_nodes, context_lens, max_nodes, max_depth, parents_out,
                                           tree_mask, depths, positions, first_child, next_sibling, flags);
  DeviceGuard guard(parents);
  const size_t shared_bytes = 3 * sizeof(int32_t) * static_cast<size_t>(max_nodes);
  SPECDEC_LAUNCH(build_tree_kernel, dim3(p.num_requests + 1), dim3(kBuildThreads), shared_bytes,
                 current_stream(parents), p);
  check_launch("build_tree");
}

void chain_tree_cuda(Tensor num_drafts, Tensor context_lens, int64_t max_nodes, Tensor parents_out, Tensor cu_nodes,
                     Tensor tree_mask, Tensor depths, Tensor positions, Tensor first_child, Tensor next_sibling,
                     Tensor flags) {
  const ChainTreeArgs p = check_chain_tree(num_drafts, context_lens, max_nodes, parents_out, cu_nodes, tree_mask,
                                           depths, positions, first_child, next_sibling, flags);
  DeviceGuard guard(num_drafts);
  SPECDEC_LAUNCH(chain_tree_kernel, dim3(p.num_requests + 1), dim3(kChainThreads), 0, current_stream(num_drafts), p);
  check_launch("chain_tree");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("build_tree", TORCH_BOX(&specdec::build_tree_cuda));
  m.impl("chain_tree", TORCH_BOX(&specdec::chain_tree_cuda));
}
