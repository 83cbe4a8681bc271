// expand_tree and rerank_tree on the GPU.
//
// expand_tree: a block a request. The children's scores are summed, each thread keeps the best key of its children, and
// k times the best of the block is taken: one block-wide minimum a beam entry, and only its thread looks for its next.
//
// rerank_tree: a block a request, then the last block to finish lays the requests out, all in one launch:
//
//   block b    own     a drawn candidate's own rank (sampled only)          workspace
//              key     walk to the root: least rank on the path, depth      shared, or workspace if there are many
//              select  bisection over keys: the kept ones are below a bound
//              list    kept candidates in order, each with its parent's new number          workspace
//   last one   offsets of the requests, then the lists are copied out and the workspace is zeroed
//
// A candidate deeper than 1023 needs more ancestors than a tree may have, so walks end there. A request that does not
// fit the rows left is selected again by the last block, with fewer nodes. The ticket acquires and releases
// (docs/cuda_on_cpu.md). Not handled here: more than 2^20 candidates a request (flagged).
#include "common/launch.cuh"
#include "common/planted.h"
#include "common/reduce.cuh"
#include "tree/args.h"

namespace specdec {

constexpr int kExpandThreads = 128;

struct LessKey {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return b < a ? b : a; }
};

// The best child of this thread that ranks behind `last`.
__device__ __forceinline__ uint64_t next_child(const float* sums, int32_t children, uint64_t last, bool any) {
  uint64_t best = kAbsent;
  for (int32_t i = threadIdx.x; i < children; i += kExpandThreads) {
    if (!score_present(sums[i])) continue;
    const uint64_t key = candidate_key(sums[i], 0, i);
    if ((any || key > last) && key < best) best = key;
  }
  return best;
}

// Grid: requests.
__global__ void __launch_bounds__(kExpandThreads) expand_tree_kernel(const ExpandTreeArgs p) {
  SPECDEC_SHARED(uint64_t, scratch, kExpandThreads / 32);
  const int64_t b = blockIdx.x;
  const int32_t children = p.children();
  float* sums = p.child_scores + b * children;
  for (int32_t i = threadIdx.x; i < children; i += kExpandThreads)
    sums[i] = p.sum(b, i / p.num_ranks, i % p.num_ranks);  // read again by this thread only, but for the winners
  __syncthreads();
  uint64_t mine = next_child(sums, children, 0, true);
  for (int32_t i = 0; i < p.k; i++) {
    const uint64_t best = block_reduce(mine, LessKey{}, kAbsent, scratch);
    if (threadIdx.x == 0) {
      p.beam[b * p.k + i] = best == kAbsent ? -1 : key_index(best);
      p.beam_scores[b * p.k + i] = best == kAbsent ? -INFINITY : sums[key_index(best)];
    }
    if (best == mine && best != kAbsent) mine = next_child(sums, children, best, false);
  }
}

constexpr int kRerankThreads = 256;
constexpr int32_t kSharedKeys = 1024;

struct RerankParams {
  RerankTreeArgs call;
  int32_t* ticket;  // workspace: [1], then [B] kept, [C] lists, [C] keys
  int32_t* kept;
  int32_t* lists;
  uint64_t* keys;
  int64_t workspace_words;
};

// What a block knows of its request.
struct Candidates {
  const float* scores;
  const int32_t* parents;
  float* own;  // null: the scores themselves
  int32_t count;
};

// Rank of candidate i by itself: -inf where it is not there.
__device__ __forceinline__ float own_rank(const Candidates& c, int32_t i) {
  if (c.own) return c.own[i];
  return score_present(c.scores[i]) && parent_valid(i, c.parents[i]) ? c.scores[i] : -INFINITY;
}

// As rank_candidates of rerank.h: the draft mass of the earlier siblings, in the order of the draws; a draw that was
// not made ends them.
__device__ __forceinline__ float drawn_rank(const Candidates& c, int32_t i) {
  const int32_t parent = c.parents[i];
  if (!score_present(c.scores[i]) || !parent_valid(i, parent)) return -INFINITY;
  const float above = parent == 0 ? 0.0f : c.scores[parent];
  double used = 0.0;
  for (int32_t j = parent + 1; j < i; j++) {
    if (c.parents[j] != parent) continue;
    if (!score_present(c.scores[j])) return -INFINITY;
    used += sibling_mass(c.scores[j], above);
  }
  return sampled_rank(above, used);
}

// Key by the least rank on the path to the root, kAbsent where the path is broken.
__device__ __forceinline__ uint64_t path_key(const Candidates& c, int32_t i) {
  float rank = i == 0 ? -INFINITY : own_rank(c, i);
  int32_t depth = 1;
  for (int32_t node = c.parents[i]; score_present(rank) && node > 0; node = c.parents[node], depth++) {
    const float above = own_rank(c, node);
    rank = above < rank ? above : rank;
    if (depth >= kMaxTreeNodes) rank = -INFINITY;
  }
  return score_present(rank) ? candidate_key(rank, depth, i) : kAbsent;
}

// A key so that exactly the `wanted` smallest of `count` keys lie below it (the last of them is no kAbsent).
__device__ __forceinline__ uint64_t bound_of_smallest(const uint64_t* keys, int32_t count, int32_t wanted,
                                                      int32_t* scratch) {
  if (wanted <= 0) return 0;
  uint64_t bound = 0;  // fewer than `wanted` keys lie below it
  for (int bit = 63; bit >= 0; bit--) {
    const uint64_t trial = bound | uint64_t{1} << bit;
    int32_t below = 0;
    for (int32_t i = threadIdx.x; i < count; i += kRerankThreads) below += keys[i] < trial;
    below = block_reduce(below, Sum{}, 0, scratch);
    if (below == wanted) return trial;
    if (below < wanted) bound = trial;
  }
  return bound + 1;
}

struct Selected {
  int32_t fitting, flags;  // nodes that would be kept if there were room
};

// Lists the best candidates of request b, root included, at most `rows_left`. A list entry is
// candidate | (parent's new number + 1) << 20.
__device__ __forceinline__ Selected select_request(const RerankParams& p, int32_t b, int64_t rows_left,
                                                   uint64_t* shared_keys, int32_t* shared_list, int32_t* scratch) {
  const NodeRange range = node_range(p.call.cu_candidates, b, p.call.total_candidates);
  const int32_t count = range.count < kMaxCandidates ? range.count : kMaxCandidates, wanted = p.call.num_nodes[b];
  int32_t* list = p.lists + range.begin;
  const Candidates c = {p.call.scores + range.begin, p.call.parents + range.begin,
                        p.call.sampled ? reinterpret_cast<float*>(list) : nullptr, count};
  int32_t flags = range.flags | (range.count > kMaxCandidates ? kFlagIndex : 0);
  if (p.call.sampled) {
    for (int32_t i = threadIdx.x; i < count; i += kRerankThreads) c.own[i] = i == 0 ? 0.0f : drawn_rank(c, i);
    __syncthreads();
  }
  uint64_t* keys = count <= kSharedKeys ? shared_keys : p.keys + range.begin;
  int32_t present = 0, bad = 0;
  for (int32_t i = threadIdx.x; i < count; i += kRerankThreads) {
    keys[i] = path_key(c, i);
    present += keys[i] != kAbsent;
    bad |= (i == 0 || score_present(c.scores[i])) && !parent_valid(i, c.parents[i]);
  }
  present = block_reduce(present, Sum{}, 0, scratch);
  if (__syncthreads_or(bad)) flags |= kFlagTree;
  const bool root = count > 0 || (flags & kFlagIndex);
  const int32_t fitting = root ? kept_nodes(wanted, present, 2147483647) : 0,
                kept = root ? kept_nodes(wanted, present, rows_left) : 0;
  if (count > 0) {
    const uint64_t bound = bound_of_smallest(keys, count, kept - 1, scratch);
    int32_t listed = 0;
    for (int32_t first = 0; first < count && kept > 0; first += kRerankThreads) {
      const int32_t i = first + static_cast<int32_t>(threadIdx.x);
      const bool keep = i < count && (i == 0 || keys[i] < bound);
      int32_t here = 0;
      const int32_t place = listed + block_exclusive_sum(static_cast<int32_t>(keep), &here, scratch);
      if (keep) shared_list[place] = i;
      listed += here;
    }
    __syncthreads();  // own ranks and keys are no longer needed
    for (int32_t i = threadIdx.x; i < count; i += kRerankThreads) {
      int32_t entry = 0;
      if (i < kept) {
        int32_t low = 0, high = i;  // the parent is an earlier entry
        const int32_t parent = c.parents[shared_list[i]];
        while (i > 0 && low < high) {
          const int32_t middle = (low + high) / 2;
          if (shared_list[middle] < parent)
            low = middle + 1;
          else
            high = middle;
        }
        entry = shared_list[i] | (i == 0 ? 0 : low + 1) << 20;
      }
      if (i < kept || p.call.sampled || rows_left < fitting) list[i] = entry;  // what is no entry is left zeroed
      if (count > kSharedKeys) keys[i] = 0;
    }
    __syncthreads();  // the shared arrays are free again
  }
  return {fitting, flags};
}

// Grid: max(1, requests).
__global__ void __launch_bounds__(kRerankThreads, 4) rerank_tree_kernel(const RerankParams p) {
  SPECDEC_SHARED(uint64_t, shared_keys, kSharedKeys);
  SPECDEC_SHARED(int32_t, shared_list, kMaxTreeNodes);
  SPECDEC_SHARED(int32_t, scratch, kRerankThreads / 32);
  SPECDEC_SHARED(int32_t, is_last, 1);
  const int32_t thread = threadIdx.x, requests = p.call.num_requests;
  if (requests > 0) {
    const int32_t b = blockIdx.x;
    const Selected selected = select_request(p, b, 2147483647, shared_keys, shared_list, scratch);
    if (thread == 0) {
      p.kept[b] = selected.fitting;
      p.call.flags[b] = selected.flags;
    }
  }
  __syncthreads();
  if (thread == 0) {
    const int32_t ticket =
        planted(Bug::ticket_without_fence) ? atomicAdd(p.ticket, 1) : ptx::atomic_add_acq_rel(p.ticket, 1);
    is_last[0] = ticket == static_cast<int32_t>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;

  // Offsets: the kept counts summed, cut at the rows there are.
  int64_t row = 0;
  for (int32_t first = 0; first < requests; first += kRerankThreads) {
    const int32_t b = first + thread, fitting = b < requests ? p.kept[b] : 0;
    int32_t here = 0;
    const int64_t at = row + block_exclusive_sum(fitting, &here, scratch);
    if (b < requests) {
      p.call.cu_nodes[b] = static_cast<int32_t>(at < p.call.total_nodes ? at : p.call.total_nodes);
      if (fitting > 0 && at + fitting > p.call.total_nodes) p.call.flags[b] |= kFlagIndex;
    }
    row += here;
  }
  row = row < p.call.total_nodes ? row : p.call.total_nodes;
  if (thread == 0) p.call.cu_nodes[requests] = static_cast<int32_t>(row);
  __syncthreads();
  for (int32_t b = 0; b < requests; b++) {  // the one request that is cut in two
    const int32_t room = p.call.cu_nodes[b + 1] - p.call.cu_nodes[b];
    if (room > 0 && room < p.kept[b]) select_request(p, b, room, shared_keys, shared_list, scratch);
  }
  for (int32_t b = thread / 32; b < requests; b += kRerankThreads / 32) {  // a warp a request
    const NodeRange range = node_range(p.call.cu_candidates, b, p.call.total_candidates);
    const int32_t begin = p.call.cu_nodes[b], kept = p.call.cu_nodes[b + 1] - begin;
    for (int32_t i = thread % 32; i < kept; i += 32) {
      const int32_t entry = range.count > 0 ? p.lists[range.begin + i] : 0;  // unsound offsets: the root alone
      p.call.selected[begin + i] = entry & (kMaxCandidates - 1);
      p.call.parents_out[begin + i] = (entry >> 20) - 1;
    }
  }
  for (int64_t i = row + thread; i < p.call.total_nodes; i += kRerankThreads)
    p.call.selected[i] = p.call.parents_out[i] = -1;
  __syncthreads();
  if (planted(Bug::counter_not_reset)) return;
  for (int64_t i = thread; i < p.workspace_words; i += kRerankThreads) p.ticket[i] = 0;
}

// ------------------------------------------------------------------ host
void expand_tree_cuda(Tensor scores, Tensor child_log_probs, int64_t k, Tensor child_scores, Tensor beam,
                      Tensor beam_scores) {
  const ExpandTreeArgs p = check_expand_tree(scores, child_log_probs, k, child_scores, beam, beam_scores);
  if (p.num_requests == 0) return;
  DeviceGuard guard(scores);
  SPECDEC_LAUNCH(expand_tree_kernel, dim3(p.num_requests), dim3(kExpandThreads), 0, current_stream(scores), p);
  check_launch("expand_tree");
}

void rerank_tree_cuda(Tensor scores, Tensor parents, Tensor cu_candidates, Tensor num_nodes, bool sampled,
                      std::optional<Tensor> workspace, Tensor selected, Tensor parents_out, Tensor cu_nodes,
                      Tensor flags) {
  const char* op = "rerank_tree";
  RerankParams p = {};
  p.call =
      check_rerank_tree(scores, parents, cu_candidates, num_nodes, sampled, selected, parents_out, cu_nodes, flags);
  const RerankWorkspace layout(p.call.num_requests, p.call.total_candidates);
  p.ticket = check_rerank_workspace(workspace, layout);
  p.kept = p.ticket + layout.kept;
  p.lists = p.ticket + layout.lists;
  p.keys = reinterpret_cast<uint64_t*>(p.ticket + layout.keys);
  p.workspace_words = layout.keys;  // every block zeroes its own keys
  DeviceGuard guard(scores);
  SPECDEC_LAUNCH(rerank_tree_kernel, dim3(p.call.num_requests > 0 ? p.call.num_requests : 1), dim3(kRerankThreads), 0,
                 current_stream(scores), p);
  check_launch(op);
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("expand_tree", TORCH_BOX(&specdec::expand_tree_cuda));
  m.impl("rerank_tree", TORCH_BOX(&specdec::rerank_tree_cuda));
}
