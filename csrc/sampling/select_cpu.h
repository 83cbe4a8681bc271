// Top-k and top-p on the CPU without sorting a row.
#pragma once
#include "rows_cpu.h"

namespace specdec {

// Sets law.threshold, law.last_tie and law.mass. `top_k` 0 and `top_p` 1 are off; `lowest` is min-p's scaled distance.
void select_kept(Row row, int32_t top_k, float top_p, float lowest, RowLaw& law, Scratch& work);

}  // namespace specdec
