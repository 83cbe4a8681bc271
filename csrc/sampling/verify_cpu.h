// Arguments of `verify` on the CPU and the walk of one request through its draft tree.
#pragma once
#include <vector>

#include "acceptance.h"
#include "args_cpu.h"

namespace specdec {

enum class Method { greedy, rejection, target_only, block, coupled, typical };

struct VerifyParams {
  Method method;
  RowSource target, draft;  // draft.data is null where every draft is deterministic
  SamplingArgs sampling, draft_sampling;
  const int32_t *draft_token_ids, *cu_nodes, *parents, *first_child, *next_sibling, *tree_flags;
  const int32_t* draft_rows;  // null: node n of request b has row n - b - 1
  const float *draft_log_probs, *draft_lse;
  const float* tile_stats;  // [N, num_tiles, 2], or null
  int64_t num_tiles;
  const int32_t* column_of;  // target id -> draft column or -1; null: the same id
  const float* uniforms;     // [N], or null
  const double* uniforms64;  // the same in float64
  Logprobs logprobs;
  double epsilon, delta;
  int32_t num_nodes, max_depth;
  int32_t *output_token_ids, *num_emitted, *accepted_nodes, *flags;
  float* logprobs_out;
};

// A row's law, computed on first use: for all rows at once (eager) or only along the accepted path (lazy).
struct LawSlot {
  RowLaw law;
  int32_t owner = -1;  // request whose parameters shaped it; -1: not computed
};

// Verifies request b; `target_laws[N]` and `draft_laws[Rd]` hold what the eager form computed, or empty slots.
// next_node: root of the request this thread verifies next, -1 if none.
void verify_request(const VerifyParams& params, int64_t b, int64_t next_node, LawSlot* target_laws,
                    const LawSlot* draft_laws);

// `next`: the row that is probably read next, or null (Row::next).
RowLaw target_law_of(const VerifyParams& params, int64_t b, int64_t node, Scratch& work, const void* next);
RowLaw draft_law_of(const VerifyParams& params, int64_t b, int64_t draft_row, Scratch& work, const void* next);
// The logits of a target (draft) row, if rows of both kinds are as wide and of one type, as Row::next wants it.
const void* row_to_come(const VerifyParams& params, int64_t row, bool is_draft);
int32_t draft_row_of(const VerifyParams& params, int64_t b, int64_t node);  // -1 deterministic, -2 out of range

}  // namespace specdec
