// Arguments of `verify` on the CPU and the walk of one request through its draft tree.
#pragma once
#include <vector>

#include "acceptance.h"
#include "args_cpu.h"
#include "verify_args.h"

namespace specdec {

// A row's law, computed on first use: for all rows at once (eager) or only along the accepted path (lazy).
struct LawSlot {
  RowLaw law;
  int32_t owner = -1;  // request whose parameters shaped it; -1: not computed
};
static_assert(sizeof(LawSlot) == 64, "docs/sampling.md gives it");

// Verifies request b; `target_laws[N]` and `draft_laws[Rd]` hold what the eager form computed, or empty slots.
// next_node: root of the request this thread verifies next, -1 if none.
void verify_request(const VerifyParams& params, int64_t b, int64_t next_node, LawSlot* target_laws,
                    const LawSlot* draft_laws);

// `next`: the row that is probably read next, or null (Row::next).
RowLaw target_law_of(const VerifyParams& params, int64_t b, int64_t node, Scratch& work, const void* next);
RowLaw draft_law_of(const VerifyParams& params, int64_t b, int64_t draft_row, Scratch& work, const void* next);
// The logits of a target (draft) row, if rows of both kinds are as wide and of one type, as Row::next wants it.
const void* row_to_come(const VerifyParams& params, int64_t row, bool is_draft);

}  // namespace specdec
