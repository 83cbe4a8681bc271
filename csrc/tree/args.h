// Arguments of the tree room's ops: the checks that every native backend runs before its first write, and what is left
// of the tensors behind them.
#pragma once
#include <optional>

#include "common/check.h"
#include "tree/rerank.h"
#include "tree/tree.h"

namespace specdec {

inline TreeRows check_rows(const char* op, int64_t nodes, int64_t max_nodes, const Tensor& parents_out,
                           const Tensor& tree_mask, const Tensor& depths, const Tensor& positions,
                           const Tensor& first_child, const Tensor& next_sibling) {
  check_range(op, "max_nodes", max_nodes, 0, kMaxTreeNodes);
  check_index(op, "parents_out", parents_out, {nodes});
  check_index(op, "tree_mask", tree_mask, {nodes, mask_words(static_cast<int32_t>(max_nodes))});
  check_index(op, "depths", depths, {nodes});
  check_index(op, "positions", positions, {nodes});
  check_index(op, "first_child", first_child, {nodes});
  check_index(op, "next_sibling", next_sibling, {nodes});
  return {mutable_data<int32_t>(parents_out),     mutable_data<int32_t>(tree_mask),
          mutable_data<int32_t>(depths),          mutable_data<int32_t>(positions),
          mutable_data<int32_t>(first_child),     mutable_data<int32_t>(next_sibling),
          static_cast<int32_t>(tree_mask.size(1))};
}

struct BuildTreeArgs {
  const int32_t* parents;       // [N]
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* context_lens;  // [B]
  int32_t* flags;               // [B]
  TreeRows out;                 // [N], mask [N, words]
  int64_t total_nodes;
  int32_t num_requests, max_nodes, max_depth;
};

inline BuildTreeArgs check_build_tree(const Tensor& parents, const Tensor& cu_nodes, const Tensor& context_lens,
                                      int64_t max_nodes, int64_t max_depth, const Tensor& parents_out,
                                      const Tensor& tree_mask, const Tensor& depths, const Tensor& positions,
                                      const Tensor& first_child, const Tensor& next_sibling, const Tensor& flags) {
  const char* op = "build_tree";
  const int64_t requests = context_lens.numel(), nodes = parents.numel();
  check_index(op, "parents", parents, {kAny});
  check_index(op, "context_lens", context_lens, {kAny});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  BuildTreeArgs args = {};
  args.out = check_rows(op, nodes, max_nodes, parents_out, tree_mask, depths, positions, first_child, next_sibling);
  check_range(op, "max_depth", max_depth, 0, kMaxTreeNodes);
  check_index(op, "flags", flags, {requests});
  args.parents = data<int32_t>(parents);
  args.cu_nodes = data<int32_t>(cu_nodes);
  args.context_lens = data<int32_t>(context_lens);
  args.flags = mutable_data<int32_t>(flags);
  args.total_nodes = nodes;
  args.num_requests = static_cast<int32_t>(requests);
  args.max_nodes = static_cast<int32_t>(max_nodes);
  args.max_depth = static_cast<int32_t>(max_depth);
  return args;
}

struct ChainTreeArgs {
  const int32_t* num_drafts;    // [B]
  const int32_t* context_lens;  // [B]
  int32_t* cu_nodes;            // [B + 1]
  int32_t* flags;               // [B]
  TreeRows out;
  int64_t total_nodes;
  int32_t num_requests, max_nodes;
};

inline ChainTreeArgs check_chain_tree(const Tensor& num_drafts, const Tensor& context_lens, int64_t max_nodes,
                                      const Tensor& parents_out, const Tensor& cu_nodes, const Tensor& tree_mask,
                                      const Tensor& depths, const Tensor& positions, const Tensor& first_child,
                                      const Tensor& next_sibling, const Tensor& flags) {
  const char* op = "chain_tree";
  const int64_t requests = num_drafts.numel(), nodes = parents_out.numel();
  check_index(op, "num_drafts", num_drafts, {kAny});
  check_index(op, "context_lens", context_lens, {requests});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  ChainTreeArgs args = {};
  args.out = check_rows(op, nodes, max_nodes, parents_out, tree_mask, depths, positions, first_child, next_sibling);
  check_index(op, "flags", flags, {requests});
  args.num_drafts = data<int32_t>(num_drafts);
  args.context_lens = data<int32_t>(context_lens);
  args.cu_nodes = mutable_data<int32_t>(cu_nodes);
  args.flags = mutable_data<int32_t>(flags);
  args.total_nodes = nodes;
  args.num_requests = static_cast<int32_t>(requests);
  args.max_nodes = static_cast<int32_t>(max_nodes);
  return args;
}

struct ExpandTreeArgs {
  const float* scores;     // [B, parents], rows stride_b apart
  const float* log_probs;  // [B, parents, ranks], strided
  float* child_scores;     // [B, parents * ranks]
  int32_t* beam;           // [B, k]
  float* beam_scores;      // [B, k]
  int64_t stride_b, step_stride_b, step_stride_p;
  int32_t num_requests, num_parents, num_ranks, k;

  SPECDEC_HD int32_t children() const { return num_parents * num_ranks; }
  // Cumulative score of a child, -inf if it does not exist.
  SPECDEC_HD float sum(int64_t b, int32_t parent, int32_t rank) const {
    return present_or_none(scores[b * stride_b + parent] +
                           log_probs[b * step_stride_b + parent * step_stride_p + rank]);
  }
};

inline ExpandTreeArgs check_expand_tree(const Tensor& scores, const Tensor& child_log_probs, int64_t k,
                                        const Tensor& child_scores, const Tensor& beam, const Tensor& beam_scores) {
  const char* op = "expand_tree";
  check_tensor(op, "scores", scores, ScalarType::Float, {kAny, kAny});
  const int64_t requests = scores.size(0), parents = scores.size(1);
  check_tensor(op, "child_log_probs", child_log_probs, ScalarType::Float, {requests, parents, kAny});
  const int64_t ranks = child_log_probs.size(2), children = parents * ranks;
  check_dense_rows(op, "scores", scores);
  check_dense_rows(op, "child_log_probs", child_log_probs);
  check_range(op, "k", k, 0, kMaxTreeNodes);
  check_range(op, "children of a request", children, 0, kMaxCandidates - 1);
  check_index(op, "child_scores", child_scores, {requests, children}, ScalarType::Float);
  check_index(op, "beam", beam, {requests, k});
  check_index(op, "beam_scores", beam_scores, {requests, k}, ScalarType::Float);
  ExpandTreeArgs args = {};
  args.scores = data<float>(scores);
  args.log_probs = data<float>(child_log_probs);
  args.child_scores = mutable_data<float>(child_scores);
  args.beam = mutable_data<int32_t>(beam);
  args.beam_scores = mutable_data<float>(beam_scores);
  args.stride_b = scores.stride(0);
  args.step_stride_b = child_log_probs.stride(0);
  args.step_stride_p = child_log_probs.stride(1);
  args.num_requests = static_cast<int32_t>(requests);
  args.num_parents = static_cast<int32_t>(parents);
  args.num_ranks = static_cast<int32_t>(ranks);
  args.k = static_cast<int32_t>(k);
  return args;
}

struct RerankTreeArgs {
  const float* scores;           // [C]
  const int32_t* parents;        // [C]
  const int32_t* cu_candidates;  // [B + 1]
  const int32_t* num_nodes;      // [B]
  int32_t* selected;             // [N]
  int32_t* parents_out;          // [N]
  int32_t* cu_nodes;             // [B + 1]
  int32_t* flags;                // [B]
  int64_t total_candidates, total_nodes;
  int32_t num_requests;
  bool sampled;
};

inline RerankTreeArgs check_rerank_tree(const Tensor& scores, const Tensor& parents, const Tensor& cu_candidates,
                                        const Tensor& num_nodes, bool sampled, const Tensor& selected,
                                        const Tensor& parents_out, const Tensor& cu_nodes, const Tensor& flags) {
  const char* op = "rerank_tree";
  const int64_t requests = num_nodes.numel(), candidates = scores.numel(), nodes = selected.numel();
  check_index(op, "scores", scores, {kAny}, ScalarType::Float);
  check_index(op, "parents", parents, {candidates});
  check_index(op, "num_nodes", num_nodes, {kAny});
  check_index(op, "cu_candidates", cu_candidates, {requests + 1});
  check_index(op, "selected", selected, {kAny});
  check_index(op, "parents_out", parents_out, {nodes});
  check_index(op, "cu_nodes", cu_nodes, {requests + 1});
  check_index(op, "flags", flags, {requests});
  RerankTreeArgs args = {};
  args.scores = data<float>(scores);
  args.parents = data<int32_t>(parents);
  args.cu_candidates = data<int32_t>(cu_candidates);
  args.num_nodes = data<int32_t>(num_nodes);
  args.selected = mutable_data<int32_t>(selected);
  args.parents_out = mutable_data<int32_t>(parents_out);
  args.cu_nodes = mutable_data<int32_t>(cu_nodes);
  args.flags = mutable_data<int32_t>(flags);
  args.total_candidates = candidates;
  args.total_nodes = nodes;
  args.num_requests = static_cast<int32_t>(requests);
  args.sampled = sampled;
  return args;
}

// int32 words of rerank_tree's workspace on GPUs: a ticket, [B] kept counts, [C] lists, [C] 64-bit keys.
struct RerankWorkspace {
  int64_t kept, lists, keys, words;
  RerankWorkspace(int64_t requests, int64_t candidates)
      : kept(4),
        lists(kept + (requests + 3) / 4 * 4),
        keys(lists + (candidates + 3) / 4 * 4),
        words(keys + 2 * candidates) {}
};

inline int32_t* check_rerank_workspace(const std::optional<Tensor>& workspace, const RerankWorkspace& layout) {
  const char* op = "rerank_tree";
  if (!workspace) fail(op, "workspace", "uint8 [", 4 * layout.words, "] (workspace_size), got None");
  check_index(op, "workspace", *workspace, {kAny}, ScalarType::Byte);
  if (workspace->numel() < 4 * layout.words)
    fail(op, "workspace", "at least ", 4 * layout.words, " bytes, got ", workspace->numel());
  if (reinterpret_cast<uintptr_t>(workspace->const_data_ptr()) % 8)  // its keys
    fail(op, "workspace", "an address that 8 divides, got a view that begins elsewhere");
  return mutable_data<int32_t>(*workspace);
}

// A boolean mask [rows, columns], rows `stride` apart, beside its words [rows, width].
struct MaskArgs {
  uint8_t* mask;
  int32_t* words;
  int64_t rows, columns, stride, width;

  SPECDEC_HD bool bit(int64_t row, int64_t column) const {
    return static_cast<uint32_t>(words[row * width + column / 32]) >> (column % 32) & 1u;
  }
};

inline MaskArgs check_pack_mask(const Tensor& mask, const Tensor& words) {
  const char* op = "pack_mask";
  check_tensor(op, "mask", mask, ScalarType::Bool, {kAny, kAny});
  const int64_t rows = mask.size(0), columns = mask.size(1), width = (columns + 31) / 32;
  check_dense_rows(op, "mask", mask);
  check_index(op, "words", words, {rows, width});
  return {
      const_cast<uint8_t*>(data<uint8_t>(mask)), mutable_data<int32_t>(words), rows, columns, mask.stride(0), width};
}

inline MaskArgs check_unpack_mask(const Tensor& words, const Tensor& mask) {
  const char* op = "unpack_mask";
  check_index(op, "words", words, {kAny, kAny});
  const int64_t rows = words.size(0), width = words.size(1);
  check_tensor(op, "mask", mask, ScalarType::Bool, {rows, kAny});
  const int64_t columns = mask.size(1);
  check_dense_rows(op, "mask", mask);
  if (columns > 32 * width) fail(op, "mask", "at most ", 32 * width, " columns, got ", columns);
  return {
      mutable_data<uint8_t>(mask), const_cast<int32_t*>(data<int32_t>(words)), rows, columns, mask.stride(0), width};
}

struct TreeFromMaskArgs {
  const int32_t* tree_mask;  // [N, width]
  const int32_t* cu_nodes;   // [B + 1]
  int32_t* parents;          // [N]
  int64_t total_nodes, width;
  int32_t num_requests, max_nodes;

  // Parent of node i of a request according to the mask; -1 where its row is no row of a tree.
  SPECDEC_HD int32_t parent(NodeRange range, int32_t i) const {
    if (range.count > max_nodes) return -1;
    const int32_t* rows = tree_mask + range.begin * width;
    const int32_t above = parent_of_mask_row(rows + i * width, i);
    return above >= 0 && mask_row_valid(rows + i * width, rows + above * width, i, range.count) ? above : -1;
  }
};

inline TreeFromMaskArgs check_tree_from_mask(const Tensor& tree_mask, const Tensor& cu_nodes, int64_t max_nodes,
                                             const Tensor& parents) {
  const char* op = "tree_from_mask";
  check_range(op, "max_nodes", max_nodes, 0, kMaxTreeNodes);
  check_index(op, "tree_mask", tree_mask, {kAny, kAny});
  const int64_t nodes = tree_mask.size(0), width = tree_mask.size(1);
  if (width < mask_words(static_cast<int32_t>(max_nodes)))
    fail(op, "tree_mask", "at least ", mask_words(static_cast<int32_t>(max_nodes)), " words a row, got ", width);
  check_index(op, "cu_nodes", cu_nodes, {kAny});
  if (cu_nodes.numel() < 1) fail(op, "cu_nodes", "shape [B + 1], got [0]");
  check_index(op, "parents", parents, {nodes});
  return {data<int32_t>(tree_mask),
          data<int32_t>(cu_nodes),
          mutable_data<int32_t>(parents),
          nodes,
          width,
          static_cast<int32_t>(cu_nodes.numel() - 1),
          static_cast<int32_t>(max_nodes)};
}

}  // namespace specdec
