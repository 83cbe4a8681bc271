// Which row of logits belongs to a node of `verify`, and its law.
#include "verify_cpu.h"

namespace specdec {

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
  bool reported = params.is_processed();
  FilterParams filters = params.sampling.filters(b);
  if (params.tile_stats)
    return tiled_law(row, params.tile_stats + node * params.num_tiles * 2, filters, work, compared || reported);
  RowLaw law = row_law(row, filters, work, compared || reported);
  if (compared && !law.is_point) keep_groups(row, work);
  return law;
}

RowLaw draft_law_of(const VerifyParams& params, int64_t b, int64_t draft_row, Scratch& work, const void* next) {
  Row row = params.draft.row(draft_row);
  row.next = next;
  return row_law(row, params.draft_sampling.filters(b), work);
}

}  // namespace specdec
