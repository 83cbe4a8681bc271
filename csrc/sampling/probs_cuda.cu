// verify_probs on the GPU: a block of 256 threads a request. All threads take the same decisions; thread 0 writes.
//
// The last token by inverse CDF: tiles of 4096 ids, 16 neighbours a thread, sums in float64. The order of a sum is not
// the CPU op's: a coin within 1e-15 of a boundary may fall on its other side.
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "sampling/probs_args.h"

namespace specdec {

constexpr int kProbsThreads = 256;
constexpr int kProbsChunk = 16;
constexpr int32_t kProbsTile = kProbsThreads * kProbsChunk;

struct ProbsScratch {
  double sums[kProbsThreads / 32];
  int32_t counts[kProbsThreads / 32];
};

// The first id whose cumulative weight exceeds u * total (strictly); the last one with weight on rounding; -1 where
// nothing has weight. Pass 0 sums, pass 1 finds the tile: every thread whose end lies beyond the bar offers an id of
// its own, the lowest one counts.
template <class Weight>
__device__ __forceinline__ int32_t block_inverse_cdf(int32_t vocab, double u, ProbsScratch& s, Weight&& weight) {
  double bar = 0.0;
  int32_t last = -1;
  for (int pass = 0; pass < 2; pass++) {
    double cumulative = 0.0;
    for (int32_t base = 0; base < vocab; base += kProbsTile) {
      const int32_t first = base + static_cast<int32_t>(threadIdx.x) * kProbsChunk;
      double sum = 0.0, total = 0.0;
      for (int32_t id = first; id < first + kProbsChunk && id < vocab; id++) {
        const double w = weight(id);
        sum += w;
        if (w > 0.0) last = id;
      }
      const double before = cumulative + block_exclusive_sum(sum, &total, s.sums);
      if (pass == 1 && cumulative + total > bar) {
        int32_t offer = 2147483647;
        double mine = before;
        for (int32_t id = first; sum > 0.0 && before + sum > bar && id < first + kProbsChunk && id < vocab; id++) {
          const double w = weight(id);
          mine += w;
          if (w > 0.0) offer = id;
          if (w > 0.0 && mine > bar) break;
        }
        offer = block_reduce(offer, Minimum{}, 2147483647, s.counts);
        if (offer < vocab) return offer;
        break;
      }
      cumulative += total;
    }
    bar = u * cumulative;
    if (!(cumulative > 0.0)) break;
  }
  return block_reduce(last, Maximum{}, -1, s.counts);
}

// Grid: requests.
__global__ void __launch_bounds__(kProbsThreads, 4) verify_probs_kernel(const __grid_constant__ ProbsParams p) {
  SPECDEC_SHARED(ProbsScratch, scratch, 1);
  const int64_t b = blockIdx.x, width = p.max_depth + 1, begin = p.cu_nodes[b], count = p.cu_nodes[b + 1] - begin;
  int32_t *tokens = p.tokens + b * width, *accepted = p.accepted + b * width;
  for (int64_t i = threadIdx.x; i < width; i += kProbsThreads) tokens[i] = accepted[i] = -1;
  __syncthreads();
  int32_t flags = 0, depth = 0;
  const bool is_sound = begin >= 0 && count >= 0 && begin + count <= p.num_nodes;
  int64_t node = is_sound && count > 0 ? 0 : -1;
  if (!is_sound) flags = kFlagIndex;
  if (node == 0 && threadIdx.x == 0) accepted[0] = 0;
  while (node >= 0) {
    const int64_t row = begin + node;
    int64_t next = -1, drafted = -1, behind = -1;  // behind: the sibling that ends the list of those tried
    double cumulative = 0.0;
    // Whether an earlier sibling than `end` has this id.
    auto tried = [&](int32_t id, int64_t end) {
      if (p.rejection) return drafted >= 0 && p.ids[begin + drafted] == id;
      for (int32_t kid = depth < p.max_depth ? p.first_child[row] : -1; kid != -1 && kid != end;
           kid = p.next_sibling[begin + kid])
        if (p.ids[begin + kid] == id) return true;
      return false;
    };
    int64_t previous = node;
    for (int32_t kid = p.first_child[row]; kid != -1 && depth < p.max_depth; kid = p.next_sibling[begin + kid]) {
      if (kid <= previous || kid >= count) {
        flags |= kFlagTree;
        behind = kid;
        break;
      }
      previous = kid;
      const int32_t id = p.ids[begin + kid];
      if (id == -1) continue;
      if (id < -1 || id >= p.vocab) flags |= kFlagTokenRange;
      const bool twice = tried(id, kid);
      if (twice || (p.rejection && drafted >= 0)) flags |= kFlagSiblings;
      if (p.rejection && drafted < 0) {
        const double target = p.target_mass(row, id), draft = p.draft ? p.draft_mass(begin + kid, id) : 1.0;
        if (!(draft > 0.0) && id >= 0 && id < p.vocab) flags |= kFlagDraftMass;
        drafted = kid;
        if (draft > 0.0 && target > 0.0 && p.uniforms[begin + kid] * draft < target) next = kid;
      } else if (!p.rejection && !twice) {
        cumulative += p.target_mass(row, id);
        if (p.target_mass(row, id) > 0.0f && p.uniforms[begin + p.first_child[row]] < cumulative) next = kid;
      }
      if (next >= 0) break;
    }
    if (next >= 0) {
      if (threadIdx.x == 0) {
        tokens[depth] = p.ids[begin + next];
        accepted[depth + 1] = static_cast<int32_t>(next);
      }
      depth++;
      node = next;
      continue;
    }
    int32_t id = -1;
    for (int attempt = 0; attempt < 2 && id < 0; attempt++) {  // the residual, then the target itself
      if (attempt == 1) flags |= kFlagZeroResidual;
      id = block_inverse_cdf(p.vocab, p.final_uniforms[b], scratch[0], [&](int32_t v) -> double {
        const float target = p.target_mass(row, v);
        if (attempt == 1) return target;
        if (p.rejection && drafted >= 0 && p.draft) return fmaxf(0.0f, target - p.draft_mass(begin + drafted, v));
        return tried(v, behind) ? 0.0f : target;
      });
    }
    if (id < 0) flags |= kFlagDeadRow;
    if (threadIdx.x == 0) tokens[depth] = id < 0 ? 0 : id;
    depth++;
    node = -1;
  }
  if (threadIdx.x != 0) return;
  p.num_emitted[b] = depth;
  p.flags[b] = flags;
}

// ------------------------------------------------------------------ host
void verify_probs_cuda(const Tensor& target_probs, const std::optional<Tensor>& draft_probs,
                       const Tensor& draft_token_ids, const Tensor& cu_nodes, const Tensor& first_child,
                       const Tensor& next_sibling, const Tensor& uniforms, const Tensor& final_uniforms,
                       std::string method, int64_t max_depth, const Tensor& output_token_ids, const Tensor& num_emitted,
                       const Tensor& accepted_nodes, const Tensor& flags) {
  const ProbsParams p =
      check_verify_probs(target_probs, draft_probs, draft_token_ids, cu_nodes, first_child, next_sibling, uniforms,
                         final_uniforms, method, max_depth, output_token_ids, num_emitted, accepted_nodes, flags);
  if (p.num_requests == 0) return;
  DeviceGuard guard(target_probs);
  SPECDEC_LAUNCH(verify_probs_kernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kProbsThreads), 0,
                 current_stream(target_probs), p);
  check_launch("verify_probs");
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("verify_probs", TORCH_BOX(&specdec::verify_probs_cuda));
}
