// build_tree, chain_tree on the CPU: one request per loop iteration, tree.h does the math.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"
#include "tree/tree.h"

namespace specdec {
namespace {

TreeRows rows_of(const Tensor& parents, const Tensor& tree_mask, const Tensor& depths, const Tensor& positions,
                 const Tensor& first_child, const Tensor& next_sibling) {
  return {mutable_data<int32_t>(parents),         mutable_data<int32_t>(tree_mask),
          mutable_data<int32_t>(depths),          mutable_data<int32_t>(positions),
          mutable_data<int32_t>(first_child),     mutable_data<int32_t>(next_sibling),
          static_cast<int32_t>(tree_mask.size(1))};
}

void check_rows(const char* op, int64_t nodes, int64_t max_nodes, const Tensor& parents_out, const Tensor& tree_mask,
                const Tensor& depths, const Tensor& positions, const Tensor& first_child, const Tensor& next_sibling) {
  check_range(op, "max_nodes", max_nodes, 0, kMaxTreeNodes);
  check_index(op, "parents_out", parents_out, {nodes});
  check_index(op, "tree_mask", tree_mask, {nodes, mask_words(static_cast<int32_t>(max_nodes))});
  check_index(op, "depths", depths, {nodes});
  check_index(op, "positions", positions, {nodes});
  check_index(op, "first_child", first_child, {nodes});
  check_index(op, "next_sibling", next_sibling, {nodes});
}

// Requests a thread takes at once: a fork costs as much as some ten thousand words written.
int64_t grain(int64_t requests, int64_t nodes, int64_t words) {
  int64_t cost = nodes * (words + 8) + requests;
  return std::max<int64_t>(1, requests * 65536 / std::max<int64_t>(1, cost));
}

void build_tree_cpu(Tensor parents, Tensor cu_nodes, Tensor context_lens, int64_t max_nodes, int64_t max_depth,
                    Tensor parents_out, Tensor tree_mask, Tensor depths, Tensor positions, Tensor first_child,
                    Tensor next_sibling, Tensor flags) {
  const char* op = "build_tree";
  const int64_t requests = context_lens.numel(), nodes = parents.numel();
  check_index(op, "parents", parents, {kAny});
  check_index(op, "context_lens", context_lens, {kAny});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_rows(op, nodes, max_nodes, parents_out, tree_mask, depths, positions, first_child, next_sibling);
  check_range(op, "max_depth", max_depth, 0, kMaxTreeNodes);
  check_index(op, "flags", flags, {requests});

  const TreeRows out = rows_of(parents_out, tree_mask, depths, positions, first_child, next_sibling);
  const int32_t *parent = data<int32_t>(parents), *cu = data<int32_t>(cu_nodes), *lens = data<int32_t>(context_lens);
  int32_t* flag = mutable_data<int32_t>(flags);
  torch::stable::parallel_for(0, requests, grain(requests, nodes, out.words), [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      NodeRange range = node_range(cu, b, nodes);
      flag[b] = build_request(parent + range.begin, range, lens[b], static_cast<int32_t>(max_nodes),
                              static_cast<int32_t>(max_depth), out);
    }
  });
  for (int64_t row = tail_begin(cu, requests, nodes); row < nodes; row++) write_inert_node(out, row);
}

void chain_tree_cpu(Tensor num_drafts, Tensor context_lens, int64_t max_nodes, Tensor parents_out, Tensor cu_nodes,
                    Tensor tree_mask, Tensor depths, Tensor positions, Tensor first_child, Tensor next_sibling,
                    Tensor flags) {
  const char* op = "chain_tree";
  const int64_t requests = num_drafts.numel(), nodes = parents_out.numel();
  check_index(op, "num_drafts", num_drafts, {kAny});
  check_index(op, "context_lens", context_lens, {requests});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_rows(op, nodes, max_nodes, parents_out, tree_mask, depths, positions, first_child, next_sibling);
  check_index(op, "flags", flags, {requests});

  const TreeRows out = rows_of(parents_out, tree_mask, depths, positions, first_child, next_sibling);
  const int32_t *drafts = data<int32_t>(num_drafts), *lens = data<int32_t>(context_lens);
  int32_t *cu = mutable_data<int32_t>(cu_nodes), *flag = mutable_data<int32_t>(flags);
  int64_t row = 0;
  for (int64_t b = 0; b < requests; b++) {
    cu[b] = static_cast<int32_t>(row);
    ChainSize size = chain_size(drafts[b], lens[b], static_cast<int32_t>(max_nodes), nodes - row);
    flag[b] = size.flags;
    if (size.flags && size.count) write_root(out, row, std::max(lens[b], 0));
    for (int32_t i = 0; !size.flags && i < size.count; i++) write_chain_node(out, row + i, i, size.count, lens[b]);
    row += size.count;
  }
  cu[requests] = static_cast<int32_t>(row);
  for (; row < nodes; row++) write_inert_node(out, row);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("build_tree", TORCH_BOX(&specdec::build_tree_cpu));
  m.impl("chain_tree", TORCH_BOX(&specdec::chain_tree_cpu));
}
