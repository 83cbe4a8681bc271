// verify on the GPU, in one launch or two.
//
//   lazy    a block a request: the walk computes the laws of the rows it visits, then draws the last token
//   eager   1  a block a row (target rows, and draft rows behind a node's children): its law into the workspace; the
//              last block of a request, by ticket, walks the tree
//           2  blocks share the row of the last token; the last one of a request writes it
//
// Eager reads all rows at once and suits small batches; lazy reads accepted + 1 rows one after the other. Both take the
// CPU op's decisions, from the same bits. Tickets acquire and release, and are zero again when a launch ends: the
// workspace holds them from its start and everything else from its end, so that calls of any size can share it.
// Shared memory: 8.6 KiB and a bit a node. Not handled here: splitting a row over blocks but for the last token.
#include "common/launch.cuh"
#include "sampling/walk_cuda.cuh"

namespace specdec {

// Grid: requests; eager: requests x max_nodes x (1, or 2 with draft rows), then requests x splits of the row.
__global__ void __launch_bounds__(kRowThreads, 1) verify_kernel(const __grid_constant__ BlockVerify p) {
  SPECDEC_DYNAMIC_SHARED(uint32_t, passed);  // [max_nodes / 32]
  SPECDEC_SHARED(VerifyScratch, scratch, 1);
  SPECDEC_SHARED(int32_t, ticket, 1);
  const int64_t b = p.request(blockIdx.x);
  if (b < 0 || b >= p.call.sampling.count) return;
  BlockWalk walk(p, b, scratch[0], passed);
  walk.run(ticket);
}

// ------------------------------------------------------------------ host
// Workspace: tickets from its start, the rest from its end (_verify_workspace in specdec_kernels/sampling.py).
inline void place_workspace(BlockVerify& p, const Tensor& workspace) {
  const int64_t B = p.call.sampling.count, N = p.call.num_nodes;
  if (workspace.scalar_type() != ScalarType::Byte || !workspace.is_contiguous() || workspace.dim() != 1)
    fail("verify", "workspace", "a contiguous uint8 tensor of one dimension, got ", dtype_name(workspace.scalar_type()),
         " of shape ", shape_text(workspace));
  static_assert(sizeof(NodeLaws) == 232 && sizeof(Draw) == 48 && sizeof(Winner) == 16);
  const int64_t tickets = 2 * B * 4, slots = N * sizeof(NodeLaws) + B * (sizeof(Draw) + kMaxSplits * sizeof(Winner));
  char* data = mutable_data<char>(workspace);
  const int64_t behind = (reinterpret_cast<uintptr_t>(data) + workspace.size(0)) / 16 * 16 -
                         reinterpret_cast<uintptr_t>(data);  // end of whole words
  if (behind - slots < tickets || reinterpret_cast<uintptr_t>(data) % 4)
    fail("verify", "workspace", "at least ", tickets + slots + 16, " bytes, got ", workspace.size(0));
  p.tickets = reinterpret_cast<int32_t*>(data);
  p.laws = reinterpret_cast<NodeLaws*>(data + behind - N * sizeof(NodeLaws));
  p.draws = reinterpret_cast<Draw*>(p.laws) - B;
  p.winners = reinterpret_cast<Winner*>(p.draws) - B * kMaxSplits;
}

void verify_cuda(const Tensor& target_logits, const Tensor& draft_token_ids, const Tensor& cu_nodes,
                 const Tensor& parents, const Tensor& first_child, const Tensor& next_sibling,
                 const std::optional<Tensor>& tree_flags, const Tensor& temperature, const std::optional<Tensor>& top_k,
                 const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed,
                 const Tensor& position, const std::optional<Tensor>& step, const std::optional<Tensor>& draft_logits,
                 const std::optional<Tensor>& draft_rows, const std::optional<Tensor>& draft_temperature,
                 const std::optional<Tensor>& draft_top_k, const std::optional<Tensor>& draft_top_p,
                 const std::optional<Tensor>& draft_min_p, const std::optional<Tensor>& draft_log_probs,
                 const std::optional<Tensor>& draft_lse, const std::optional<Tensor>& d2t,
                 const std::optional<Tensor>& t2d, const std::optional<Tensor>& allowed,
                 const std::optional<Tensor>& bias_cu, const std::optional<Tensor>& bias_ids,
                 const std::optional<Tensor>& bias_values, const std::optional<Tensor>& uniforms,
                 const std::optional<Tensor>& request_order, const std::optional<Tensor>& tile_stats,
                 std::string method, int64_t vocab_size, int64_t max_nodes, int64_t max_depth,
                 std::string return_logprobs, double epsilon, double delta, std::string form,
                 const std::optional<Tensor>& workspace, const Tensor& output_token_ids, const Tensor& num_emitted,
                 const Tensor& accepted_nodes, const Tensor& flags, const std::optional<Tensor>& logprobs) {
  constexpr char op[] = "verify";
  BlockVerify p = {};
  p.call =
      check_verify(target_logits, draft_token_ids, cu_nodes, parents, first_child, next_sibling, tree_flags,
                   temperature, top_k, top_p, min_p, seed, position, step, draft_logits, draft_rows, draft_temperature,
                   draft_top_k, draft_top_p, draft_min_p, draft_log_probs, draft_lse, d2t, t2d, allowed, bias_cu,
                   bias_ids, bias_values, uniforms, request_order, tile_stats, method, vocab_size, max_depth,
                   return_logprobs, epsilon, delta, output_token_ids, num_emitted, accepted_nodes, flags, logprobs);
  check_range(op, "max_nodes", max_nodes, 0, 65535);
  Form wanted = parse_form(op, form);
  if (p.call.has_draft_laws() && d2t) {
    if (!t2d) fail(op, "t2d", "the inverse of d2t, got none");
    p.d2t = data<int32_t>(*d2t);
    p.t2d = data<int32_t>(*t2d);
  }
  p.request_order = data_or_null<int32_t>(request_order);
  p.num_requests = static_cast<int32_t>(request_order ? request_order->size(0) : p.call.sampling.count);
  p.max_nodes = static_cast<int32_t>(max_nodes);
  if (wanted == Form::automatic) {  // all rows take as long as the walk's few one after the other: four waves of blocks
    const int64_t rows = p.call.num_nodes * (p.call.has_draft_laws() ? 2 : 1);
    wanted = workspace && rows <= 4 * multiprocessor_count(target_logits) ? Form::eager : Form::lazy;
  }
  if (wanted == Form::eager && !workspace) fail(op, "workspace", "one for form 'eager', got none");
  if (wanted == Form::eager) place_workspace(p, *workspace);
  if (p.num_requests == 0) return;
  DeviceGuard guard(target_logits);
  const Stream stream = current_stream(target_logits);
  const unsigned requests = static_cast<unsigned>(p.num_requests), nodes = static_cast<unsigned>(max_nodes);
  const int64_t bits = (max_nodes + 31) / 32 * 4;
  p.phase = wanted == Form::lazy ? Phase::lazy : Phase::rows;
  const dim3 rows(requests, nodes ? nodes : 1, p.call.has_draft_laws() ? 2 : 1);
  SPECDEC_LAUNCH(verify_kernel, wanted == Form::lazy ? dim3(requests) : rows, dim3(kRowThreads), bits, stream, p);
  check_launch(op);
  // greedy and coupled leave nothing to be drawn
  if (wanted == Form::lazy || p.call.method == Method::greedy || p.call.method == Method::coupled) return;
  const int64_t units = p.call.target.valid / (4 * kRowThreads), device = multiprocessor_count(target_logits);
  int64_t splits = device / p.num_requests < units ? device / p.num_requests : units;
  splits = splits < 1 ? 1 : splits < kMaxSplits ? splits : kMaxSplits;
  p.phase = Phase::last_token;
  SPECDEC_LAUNCH(verify_kernel, dim3(requests, static_cast<unsigned>(splits)), dim3(kRowThreads), bits, stream, p);
  check_launch(op);
}

}  // namespace specdec

SPECDEC_CUDA_LIBRARY(m) {
  m.impl("verify", TORCH_BOX(&specdec::verify_cuda));
}
