// Which row of logits belongs to a node of `verify`, and its law.
#include "verify_cpu.h"

namespace specdec {

int32_t draft_row_of(const VerifyParams& params, int64_t b, int64_t node) {
  if (!params.draft.data) return -1;
  int64_t row = params.draft_rows ? params.draft_rows[node] : node - b - 1;
  if (row == -1) return -1;
  return row >= 0 && row < params.draft.num_rows ? static_cast<int32_t>(row) : -2;
}

const void* row_to_come(const VerifyParams& params, int64_t row, bool is_draft) {
  const RowSource &to = is_draft ? params.draft : params.target, &other = is_draft ? params.target : params.draft;
  if (row < 0 || (other.data && (to.type != other.type || to.valid < other.valid))) return nullptr;
  return to.data + row * to.row_bytes;
}

RowLaw target_law_of(const VerifyParams& params, int64_t b, int64_t node, Scratch& work, const void* next) {
  Row row = params.target.row(node);
  row.next = next;
  if (params.method == Method::greedy) {
    FilterParams greedy;
    greedy.temperature = 0.0f;
    RowLaw law = params.tile_stats
                     ? tiled_law(row, params.tile_stats + node * params.num_tiles * 2, greedy, work, false)
                     : row_argmax(row, work);
    law.flags |= temperature_flags(params.sampling.temperature[b]);
    return law;
  }
  // A row that is only drawn from needs no mass: leaves, and every row of the coupled method.
  bool compared = params.first_child[node] >= 0 && params.method != Method::coupled;
  bool reported = params.logprobs == Logprobs::processed || params.logprobs == Logprobs::both;
  FilterParams filters = params.sampling.filters(b);
  if (params.tile_stats)
    return tiled_law(row, params.tile_stats + node * params.num_tiles * 2, filters, work, compared || reported);
  return row_law(row, filters, work, compared || reported);
}

RowLaw draft_law_of(const VerifyParams& params, int64_t b, int64_t draft_row, Scratch& work, const void* next) {
  Row row = params.draft.row(draft_row);
  row.next = next;
  return row_law(row, params.draft_sampling.filters(b), work);
}

}  // namespace specdec
