// build_tree, chain_tree on the CPU: one request per loop iteration, tree.h does the math.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "tree/args.h"

namespace specdec {
namespace {

// Requests a thread takes at once: a fork costs as much as some ten thousand words written.
int64_t grain(int64_t requests, int64_t nodes, int64_t words) {
  int64_t cost = nodes * (words + 8) + requests;
  return std::max<int64_t>(1, requests * 65536 / std::max<int64_t>(1, cost));
}

void build_tree_cpu(Tensor parents, Tensor cu_nodes, Tensor context_lens, int64_t max_nodes, int64_t max_depth,
                    Tensor parents_out, Tensor tree_mask, Tensor depths, Tensor positions, Tensor first_child,
                    Tensor next_sibling, Tensor flags) {
  const BuildTreeArgs p = check_build_tree(parents, cu_nodes, context_lens, max_nodes, max_depth, parents_out,
                                           tree_mask, depths, positions, first_child, next_sibling, flags);
  const int64_t requests = p.num_requests, nodes = p.total_nodes;
  torch::stable::parallel_for(0, requests, grain(requests, nodes, p.out.words), [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      NodeRange range = node_range(p.cu_nodes, b, nodes);
      p.flags[b] = build_request(p.parents + range.begin, range, p.context_lens[b], p.max_nodes, p.max_depth, p.out);
    }
  });
  for (int64_t row = tail_begin(p.cu_nodes, requests, nodes); row < nodes; row++) write_inert_node(p.out, row);
}

void chain_tree_cpu(Tensor num_drafts, Tensor context_lens, int64_t max_nodes, Tensor parents_out, Tensor cu_nodes,
                    Tensor tree_mask, Tensor depths, Tensor positions, Tensor first_child, Tensor next_sibling,
                    Tensor flags) {
  const ChainTreeArgs p = check_chain_tree(num_drafts, context_lens, max_nodes, parents_out, cu_nodes, tree_mask,
                                           depths, positions, first_child, next_sibling, flags);
  int64_t row = 0;
  for (int32_t b = 0; b < p.num_requests; b++) {
    p.cu_nodes[b] = static_cast<int32_t>(row);
    const int32_t length = p.context_lens[b];
    const ChainSize size = chain_size(p.num_drafts[b], length, p.max_nodes, p.total_nodes - row);
    p.flags[b] = size.flags;
    if (size.flags && size.count) write_root(p.out, row, std::max(length, 0));
    for (int32_t i = 0; !size.flags && i < size.count; i++) write_chain_node(p.out, row + i, i, size.count, length);
    row += size.count;
  }
  p.cu_nodes[p.num_requests] = static_cast<int32_t>(row);
  for (; row < p.total_nodes; row++) write_inert_node(p.out, row);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("build_tree", TORCH_BOX(&specdec::build_tree_cpu));
  m.impl("chain_tree", TORCH_BOX(&specdec::chain_tree_cpu));
}
