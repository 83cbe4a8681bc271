// Rows of logits on the CPU: tiles with their edits, and the law of a row without filters that need a search.
#include "rows_cpu.h"

#include <atomic>
#include <cstring>

#include "select_cpu.h"

namespace specdec {

Scratch& scratch() {
  static thread_local Scratch work;
  return work;
}

namespace {

float clean(float x) {
  if (x != x) return -__builtin_huge_valf();
  return x > kInfLogit ? kInfLogit : x;
}

float raw_logit(const Row& row, int32_t id) {
  if (row.type == LogitType::float32) return static_cast<const float*>(row.data)[id];
  uint16_t bits = static_cast<const uint16_t*>(row.data)[id];
  return row.type == LogitType::bfloat16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
}

bool is_allowed(const Row& row, int32_t id) {
  return row.allowed == nullptr || (row.allowed[id >> 5] >> (id & 31) & 1u);
}

}  // namespace

Span raw_span(const Row& row, int32_t base) {
  int32_t n = row.size - base < kTileLogits ? row.size - base : kTileLogits;
  int64_t bytes = row.type == LogitType::float32 ? 4 : 2;
  const char* next = row.next ? static_cast<const char*>(row.next) + base * bytes : nullptr;
  return {static_cast<const char*>(row.data) + base * bytes, row.type, base, n, next};
}

float load_logit(const Row& row, int32_t id) {
  if (!is_allowed(row, id)) return -__builtin_huge_valf();
  float x = raw_logit(row, id);
  for (int32_t e = 0; e < row.num_bias; e++)
    if (row.bias_ids[e] == id) x += row.bias_values[e];
  return clean(x);
}

int32_t load_tile(const Row& row, int32_t base, float* x, int32_t* flags) {
  Span span = raw_span(row, base);
  int32_t n = span.n;
  row_kernels().convert(span, x);
  for (int32_t e = 0; e < row.num_bias; e++) {
    int64_t i = int64_t{row.bias_ids[e]} - base;
    if (i >= 0 && i < n) x[i] += row.bias_values[e];
  }
  if (row.allowed != nullptr) {
    for (int32_t w = 0; w * 32 < n; w++) {
      uint32_t word = row.allowed[(base >> 5) + w];
      if (word == ~0u) continue;
      for (int32_t i = 0; i < 32; i++)
        if (!(word >> i & 1u)) x[w * 32 + i] = -__builtin_huge_valf();
    }
  }
  if (row.is_clean) return n;
  int32_t seen = 0;
  for (int32_t i = 0; i < n; i++) {
    if (x[i] != x[i]) seen |= kFlagNanLogit;
    if (x[i] > kInfLogit) seen |= kFlagInfLogit;
    x[i] = clean(x[i]);
  }
  if (flags) *flags |= seen;
  return n;
}

Span load_span(const Row& row, int32_t base, Scratch& work) {
  if (row.is_clean && !row.is_edited()) return raw_span(row, base);
  int32_t n = load_tile(row, base, work.tile);
  return {work.tile, LogitType::float32, base, n};
}

void drop_unkept(const RowLaw& law, int32_t base, int32_t n, float* x) {
  if (law.threshold == -__builtin_huge_valf()) return;
  for (int32_t i = 0; i < n; i++) x[i] = x[i] < law.threshold ? -__builtin_huge_valf() : x[i];
  if (law.last_tie - base >= n) return;
  for (int32_t i = law.last_tie < base ? 0 : law.last_tie - base + 1; i < n; i++)
    if (x[i] == law.threshold) x[i] = -__builtin_huge_valf();
}

namespace {

// First read: maximum, flags and (if wanted) the maxima of the groups; then the lowest id of the maximum. Sets
// row.is_clean.
RowLaw first_read(Row& row, Scratch& work, std::vector<float>* groups) {
  RowLaw law;
  const RowKernels& kernels = row_kernels();
  float best = -__builtin_huge_valf();
  int32_t best_base = 0;
  work.row_min = __builtin_huge_valf();
  if (groups) groups->resize(num_groups(row.size));
  float* all_groups = groups ? groups->data() : nullptr;
  std::mutex combining;
  over_tiles(row.size, [&](int32_t begin, int32_t end, Scratch& mine) {
    float chunk_best = -__builtin_huge_valf(), chunk_min = __builtin_huge_valf();
    int32_t chunk_base = begin, flags = 0;
    for (int32_t base = begin; base < end; base += kTileLogits) {
      float* maxima = all_groups ? all_groups + base / kGroupBlock * kGroupLanes : nullptr;
      float span_max, span_min;
      int32_t seen = row.is_edited() ? kFlagNanLogit : kernels.peek(raw_span(row, base), &span_max, &span_min, maxima);
      if (seen) {  // edited, or to be cleaned first
        int32_t n = load_tile(row, base, mine.tile, &flags);
        kernels.peek({mine.tile, LogitType::float32, base, n}, &span_max, &span_min, maxima);
      }
      if (span_min < chunk_min) chunk_min = span_min;
      if (span_max > chunk_best) {
        chunk_best = span_max;
        chunk_base = base;
      }
    }
    std::lock_guard<std::mutex> lock(combining);
    law.flags |= flags;
    if (chunk_min < work.row_min) work.row_min = chunk_min;
    if (chunk_best > best || (chunk_best == best && chunk_base < best_base)) {
      best = chunk_best;
      best_base = chunk_base;
    }
  });
  row.is_clean = law.is_clean();
  law.max = best;
  if (!(best > -__builtin_huge_valf())) {
    law.flags |= kFlagDeadRow;
    law.max = 0.0f;
    law.is_point = law.is_empty = true;
    return law;
  }
  law.argmax = best_base + kernels.find(load_span(row, best_base, work), best);
  return law;
}

}  // namespace

void keep_groups(const Row& row, Scratch& work) {
  std::swap(work.group_max, work.race_max);
  work.race_row = row.data;
}

void read_groups(Row row, Scratch& work) {
  if (work.race_row == row.data) return;
  first_read(row, work, &work.race_max);
  work.race_row = row.data;
}

uint64_t row_mass(const Row& row, const RowLaw& law, float low, bool far) {
  std::atomic<uint64_t> mass{0};
  over_tiles(row.size, [&](int32_t begin, int32_t end, Scratch& mine) {
    uint64_t sum = 0;
    for (int32_t base = begin; base < end; base += kTileLogits)
      sum += row_kernels().mass(load_span(row, base, mine), weights_of(law), low, far);
    mass += sum;
  });
  return mass;
}

bool is_far(const RowLaw& law, const Scratch& work) {
  return !(work.row_min - law.max > law.lowest);
}

RowLaw row_argmax(Row row, Scratch& work) {
  RowLaw law = first_read(row, work, nullptr);
  law.is_point = true;
  return law;
}

RowLaw row_law(Row row, const FilterParams& params, Scratch& work, bool need_mass) {
  int32_t fault = temperature_flags(params.temperature);
  if (params.top_p != params.top_p || params.min_p != params.min_p) fault |= kFlagParameter;
  bool greedy = is_greedy(params.temperature);
  bool top_k = !greedy && params.top_k > 0 && params.top_k < row.size, top_p = !greedy && params.top_p < 1.0f;
  RowLaw law = first_read(row, work, top_k || top_p || need_mass ? &work.group_max : nullptr);
  law.flags |= fault;
  law.is_point = law.is_point || greedy;
  if (law.is_point) return law;
  law.set_temperature(params.temperature);
  law.threshold = min_p_threshold(law, params.min_p);
  if (top_k || top_p)
    select_kept(row, top_k ? params.top_k : 0, top_p ? params.top_p : 1.0f, law, work);
  else if (need_mass)
    law.mass = row_mass(row, law, law.threshold, is_far(law, work));
  if (law.mass) law.log_mass = log(static_cast<double>(law.mass) / kMassScale);
  return law;
}

RowLaw tiled_law(Row row, const float* tiles, const FilterParams& params, Scratch& work, bool need_mass) {
  bool greedy = is_greedy(params.temperature);
  bool listed = !greedy && ((params.top_k > 0 && params.top_k < row.size) || params.top_p < 1.0f);
  int32_t count = (row.size + kTileLogits - 1) / kTileLogits, best = 0;
  bool readable = !listed;  // top-k and top-p want the part maxima of a first read
  for (int32_t t = 0; t < count && readable; t++) {
    readable = tiles[2 * t] <= kInfLogit;  // neither NaN nor +inf
    if (tiles[2 * t] > tiles[2 * best]) best = t;
  }
  row.is_clean = true;
  RowLaw law;
  law.max = tiles[2 * best];
  int32_t at = readable ? row_kernels().find(load_span(row, best * kTileLogits, work), law.max) : -1;
  if (at < 0 || !(law.max > kNegInf)) {
    row.is_clean = false;
    return row_law(row, params, work, need_mass);
  }
  law.argmax = best * kTileLogits + at;
  law.flags = temperature_flags(params.temperature);
  if (params.top_p != params.top_p || params.min_p != params.min_p) law.flags |= kFlagParameter;
  law.is_point = greedy;
  if (greedy) return law;
  law.set_temperature(params.temperature);
  law.threshold = min_p_threshold(law, params.min_p);
  if (law.threshold > kNegInf) {
    if (need_mass) law.mass = row_mass(row, law, law.threshold);
  } else {
    for (int32_t t = 0; t < count; t++) {
      double mass = static_cast<double>(tiles[2 * t + 1]) * law.weight(tiles[2 * t]) * kMassScale;
      if (mass > 0.0 && mass < 9.2e18) law.mass += static_cast<uint64_t>(mass);
    }
  }
  if (law.mass) law.log_mass = log(static_cast<double>(law.mass) / kMassScale);
  return law;
}

double row_entropy(Row row, const RowLaw& law, Scratch& work) {
  row.is_clean = law.is_clean();
  if (law.is_point) return 0.0;
  uint64_t sum = 0;
  for (int32_t base = 0; base < row.size; base += kTileLogits) {
    int32_t n = load_tile(row, base, work.tile);
    drop_unkept(law, base, n, work.tile);
    sum += row_kernels().entropy(work.tile, n, weights_of(law), law.tau);
  }
  return law.log_mass + static_cast<double>(sum) / static_cast<double>(law.mass);
}

}  // namespace specdec
