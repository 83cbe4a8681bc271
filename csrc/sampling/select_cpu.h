// Top-k and top-p on the CPU without sorting a row.
#pragma once
#include "rows_cpu.h"

namespace specdec {

// Sets law.threshold (on entry that of min-p), law.last_tie and law.mass. `top_k` 0 and `top_p` 1 are off.
void select_kept(Row row, int32_t top_k, float top_p, RowLaw& law, Scratch& work);

}  // namespace specdec
