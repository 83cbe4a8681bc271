// The walk of one request by one block, and what a block does before or after it in the eager form.
//
//   walking    node by node from the root: greedy, one-hot, sampled siblings, coupled
//   chain      block verification: every node is visited, the deepest cut counts
//   passing    typical acceptance: every parent is visited, the deepest path that passes counts
//   emitting   the path that chain or passing chose
//
// The laws of a visited node are computed here (lazy) or lie in the workspace (eager). The last token is drawn here
// (lazy) or left to the next launch (eager).
#pragma once
#include "sampling/walk_steps_cuda.cuh"

namespace specdec {

struct BlockWalk : WalkSteps {
  __device__ __forceinline__ BlockWalk(const BlockVerify& params, int64_t request, VerifyScratch& scratch,
                                       uint32_t* bits)
      : WalkSteps(params, request, scratch, bits) {}

  // Begins the walk: the outputs filled, the stage and the first node set; -1: nothing to walk.
  __device__ __forceinline__ int32_t start() {
    const bool is_sound = begin_request();
    if (!span.is_sound) flags |= kFlagIndex;
    if (span.count == 0) return -1;
    const int32_t told = p.call.tree_flags ? p.call.tree_flags[b] : 0;
    if (told || !is_sound) flags |= kFlagTree, span.count = 1;
    flags |= told;
    stage = p.call.method == Method::block ? Stage::chain : Stage::walking;
    if (p.call.method == Method::typical) {
      for (int32_t i = threadIdx.x; i < (span.count + 31) / 32; i += kRowThreads) passed[i] = i == 0;
      __syncthreads();
      passing.node = next_to_pass(0);
      stage = passing.node < 0 ? Stage::emitting : Stage::passing;
    }
    return 0;
  }

  // Rows: the laws of this block's node into the workspace; true in the last block of the request, which walks on.
  __device__ __forceinline__ bool store_laws(uint32_t done, int32_t id, int32_t* ticket) {
    const NodeLaws& laws = shared_laws();
    if (threadIdx.x == 0 && done) {
      NodeLaws& out = p.laws[span.begin + node];
      if (done & 1) out.target = laws.target, out.token = id;
      if (done & 2) out.raw = laws.raw;
      if (done & 4) out.edited = laws.edited;
      if (done & 8) out.draft = laws.draft;
    }
    return is_last_block(p.tickets + 2 * b, static_cast<int32_t>(gridDim.y * gridDim.z), ticket);
  }
  __device__ __forceinline__ int32_t depth_of_any(int32_t at) const {  // links may be unsound here
    int32_t levels = 0;
#pragma unroll 1
    for (; at > 0; levels++) {
      const int32_t parent = p.call.parents[span.begin + at];
      at = parent >= 0 && parent < at ? parent : 0;
    }
    return levels;
  }
  __device__ __forceinline__ const NodeLaws& laws_here() {
    const bool is_shared = p.phase == Phase::lazy || (p.phase == Phase::rows && before);
    return is_shared ? shared_laws() : p.laws[span.begin + node];
  }

  // One step of the walk at `node`; sets `next`. False where the walk begins again.
  __device__ __forceinline__ bool step(const NodeLaws& laws) {
    flags |= laws.target.flags;
    const bool at_end = stage == Stage::emitting && depth >= path_end;
    Kids kids(p, b, span, node);  // that can be tried; none where the outputs end
    if (stage == Stage::walking || stage == Stage::chain || (at_end && p.call.method == Method::block)) {
      if (depth < p.call.max_depth && span.count > 1) kids.scan();
      flags |= kids.flags;
    }
    if (stage == Stage::chain && p.call.next_sibling[span.begin + node] != -1) flags |= kFlagTree;  // not a chain
    if (stage == Stage::chain && laws.target.is_point) {  // greedy rows: block and chain rule agree
      if (threadIdx.x == 0)
        for (int32_t i = 1; i < chain.length; i++) nodes()[i] = -1;
      stage = Stage::walking;
      depth = 0;
      node = 0;
      return false;
    }
    bool choosing = false;  // the path is known now
    if (stage == Stage::walking) {
      next = step_walking(laws, kids);
    } else if (stage == Stage::chain) {
      next = step_chain(laws, kids);
      choosing = next < 0;
      path_end = chain.cut;
    } else if (stage == Stage::passing) {
      step_passing(laws);
      passing.node = next_to_pass(passing.node);
      if (passing.node >= 0) next = p.call.parents[span.begin + passing.node];
      choosing = passing.node < 0;
      path_end = passing.best_depth;
    } else if (!at_end) {
      depth++;
      next = emit(token(nodes()[depth]), nodes()[depth]);
    } else if (p.call.method == Method::block) {
      finish_chain(laws, kids);
    } else if (laws.target.is_empty) {
      emit(0, -1);
    } else {
      finish(DrawKind::plain);
    }
    draw.emitted = emitted;
    if (choosing) choose();
    return true;
  }

  // One loop for all phases, so that laws, walk and draw stand in the code once.
  __device__ __forceinline__ void run(int32_t* ticket) {
    const bool is_draft = p.phase == Phase::rows && blockIdx.z == 1;
    before = p.phase != Phase::lazy;
    if (p.phase == Phase::last_token) {
      draw = p.draws[b];
      if (draw.kind == DrawKind::none) return;
      emitted = draw.emitted;
      flags = draw.flags;
      node = draw.node;
    } else {
      node = before ? static_cast<int32_t>(blockIdx.y) : start();
    }
#pragma unroll 1
    while (before || node >= 0) {
      uint32_t done = 0;
      const bool wanted = p.phase == Phase::rows ? before && node < span.count : node != visited;
      visited = node;
      next = -1;
      if (wanted && p.phase != Phase::last_token)
        done = away([&] {
          const int first_view = is_draft ? 3 : 0, last_view = before && !is_draft ? 2 : 3;
          return block_node_laws(p, b, span, node, first_view, last_view, shared_laws(), s.rows);
        });
      if (!before) {
        if (!step(laws_here())) continue;
      } else if (p.phase == Phase::rows && p.call.method == Method::coupled && (done & 1) &&
                 !shared_laws().target.is_point) {
        finish(DrawKind::plain);
        draw.emitted = depth_of_any(node);
      }
      if (draw.kind != DrawKind::none && (before || p.phase == Phase::lazy)) {
        const int32_t splits = p.phase == Phase::last_token ? static_cast<int32_t>(gridDim.y) : 1;
        int32_t seen = 0;
        const NodeLaws& laws = laws_here();
        const int32_t id = away([&] { return block_last_token(p, b, span, laws, draw, splits, ticket, seen, s.rows); });
        if (id == kNotLast) return;
        flags |= seen;
        known = id;
        draw.kind = DrawKind::none;
        if (p.phase == Phase::lazy && p.call.method == Method::coupled) {  // the same node again, its token known
          has_known = true;
          continue;
        }
        if (p.phase != Phase::rows) emit(id, -1);
      }
      if (p.phase == Phase::rows && before) {
        draw = Draw{};
        if (!store_laws(done, known, ticket)) return;
        next = start();
      }
      if (has_pending) {
        const TokenWriter writer{p, first_output()};
        writer.write(emitted, span.begin + node, laws_here(), pending);
        emitted++;
      }
      before = has_pending = has_known = false;
      node = next;
    }
    draw.emitted = emitted;
    draw.flags = flags;
    if (threadIdx.x != 0) return;
    p.call.num_emitted[b] = emitted;
    p.call.flags[b] = flags;
    if (p.phase == Phase::rows) p.draws[b] = draw;
  }

  // Writes the path that chain or passing has chosen and moves to where emitting begins: the root, or the path's end
  // where nobody asks for the log-probabilities on the way.
  __device__ __forceinline__ void choose() {
    stage = Stage::emitting;
    __syncthreads();
    if (threadIdx.x == 0) {
      int32_t at = path_end;
      if (p.call.method == Method::block)
        for (int32_t i = path_end + 1; i < chain.length; i++) nodes()[i] = -1;
      else
        for (int32_t i = passing.best; i > 0; i = p.call.parents[span.begin + i]) nodes()[at--] = i;
    }
    __syncthreads();
    depth = 0;
    next = 0;
    while (p.call.logprobs == Logprobs::none && depth < path_end) {
      next = nodes()[++depth];
      if (threadIdx.x == 0) tokens()[emitted] = token(next);
      emitted++;
    }
  }
};

}  // namespace specdec
