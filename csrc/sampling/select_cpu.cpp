// The kept set of a row is the shortest prefix of the total order (logit descending, id ascending) whose weight reaches
// a budget: weight 1 and budget k for top-k, mass and top_p * total for top-p.
//
//   level 0   bins of 1/32 in (max - l) * tau         one pass with exp
//   level 1   the crossing bin, if few: listed and sorted
//   level 2+  else its key range in 1024 parts, until one logit value is left; then ties are counted by id
//
// Mostly that is not needed. Small k: the k-th largest of a first read's part maxima bounds what must be listed. Top-p:
// some 7,000 of the largest logits are listed while the total is summed, and the prefix usually ends among them.
#include "select_cpu.h"

#include <algorithm>

namespace specdec {
namespace {

constexpr int32_t kMaxListed = 16384;
constexpr double kListed = 7000.0;
constexpr float kLowest = -__builtin_huge_valf();

bool before(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

// Walks the tiles of what is kept so far (law.threshold, law.last_tie).
template <class Body>
void for_kept_tiles(const Row& row, const RowLaw& law, Scratch& work, Body&& body) {
  for (int32_t base = 0; base < row.size; base += kTileLogits) {
    int32_t n = load_tile(row, base, work.tile);
    drop_unkept(law, base, n, work.tile);
    body(base, n);
  }
}

void clear_list(Scratch& work) {
  work.listed = 0;
  work.list_logits.resize(kMaxListed + kTileLogits + kGroup);
  work.list_ids.resize(kMaxListed + kTileLogits + kGroup);
}

// Appends a span's logits in [low, high] to the list; false where they would be too many.
bool append_range(const Span& span, float low, float high, Scratch& work) {
  work.listed +=
      row_kernels().gather(span, low, high, work.list_logits.data() + work.listed, work.list_ids.data() + work.listed);
  return work.listed <= kMaxListed;
}

// Lists the kept logits in [low, high]; false as soon as there are too many.
bool list_range(const Row& row, const RowLaw& law, float low, float high, Scratch& work) {
  clear_list(work);
  if (law.threshold > low) low = law.threshold;
  for (int32_t base = 0; base < row.size; base += kTileLogits)
    if (!append_range(load_span(row, base, work), low, high, work)) return false;
  if (law.last_tie == kNoTie || low > law.threshold) return true;
  int32_t kept = 0;
  for (int32_t i = 0; i < work.listed; i++) {
    work.list_logits[kept] = work.list_logits[i];
    work.list_ids[kept] = work.list_ids[i];
    kept += law.keeps(work.list_logits[i], work.list_ids[i]);
  }
  work.listed = kept;
  return true;
}

// The listed logits in [low, high] as pairs to be sorted, in part.
void take_candidates(float low, float high, Scratch& work) {
  work.candidates.clear();
  for (int32_t base = 0; base < work.listed; base += kTileLogits) {
    int32_t n = std::min(work.listed - base, kTileLogits);
    Span span{work.list_logits.data() + base, LogitType::float32, base, n};
    int32_t found = row_kernels().gather(span, low, high, work.other, work.index);
    for (int32_t i = 0; i < found; i++) work.candidates.push_back({work.other[i], work.list_ids[work.index[i]]});
  }
}

struct Budget {
  bool by_mass;
  uint64_t wanted, above = 0;  // weight wanted in all, weight above the range under study
  uint64_t weight(const RowLaw& law, float logit) const { return by_mass ? law.mass_of(logit) : 1; }
};

// The prefix ends inside work.candidates.
void finish_in_list(RowLaw& law, Budget budget, Scratch& work) {
  std::sort(work.candidates.begin(), work.candidates.end(), before);
  for (const auto& [logit, id] : work.candidates) {
    budget.above += budget.weight(law, logit);
    law.threshold = logit;
    law.last_tie = id;
    if (budget.above >= budget.wanted) break;
  }
  law.mass = budget.above;
}

// The prefix ends among the ids whose logit equals `value`.
void finish_in_ties(const Row& row, RowLaw& law, Budget budget, float value, Scratch& work) {
  uint64_t one = budget.weight(law, value);
  uint64_t needed = one ? (budget.wanted - budget.above + one - 1) / one : 1, seen = 0;
  int32_t last = 0;
  for_kept_tiles(row, law, work, [&](int32_t base, int32_t n) {
    if (seen >= needed) return;
    clear_list(work);
    append_range({work.tile, LogitType::float32, base, n}, value, value, work);
    for (int32_t i = 0; i < work.listed && seen < needed; i++, seen++) last = work.list_ids[i];
  });
  law.threshold = value;
  law.last_tie = last;
  law.mass = budget.above + seen * one;
}

// Narrows the key range [low, high] that holds the end of the prefix until it can be listed.
void finish_in_range(const Row& row, RowLaw& law, Budget budget, uint32_t low, uint32_t high, Scratch& work) {
  while (low < high) {
    if (list_range(row, law, order_value(low), order_value(high), work)) {
      take_candidates(-kInfLogit, kInfLogit, work);
      return finish_in_list(law, budget, work);
    }
    int shift = 0;
    while (((high - low) >> shift) >= kBins) shift++;
    std::fill(work.hist, work.hist + kBins, 0);
    for_kept_tiles(row, law, work, [&](int32_t base, int32_t n) {
      clear_list(work);
      append_range({work.tile, LogitType::float32, base, n}, order_value(low), order_value(high), work);
      for (int32_t i = 0; i < work.listed; i++)
        work.hist[(order_key(work.list_logits[i]) - low) >> shift] += budget.weight(law, work.list_logits[i]);
    });
    int32_t bin = static_cast<int32_t>((high - low) >> shift);
    for (; bin > 0 && budget.above + work.hist[bin] < budget.wanted; bin--) budget.above += work.hist[bin];
    low += static_cast<uint32_t>(bin) << shift;
    uint32_t top = low + (1u << shift) - 1;
    high = top < high ? top : high;
  }
  finish_in_ties(row, law, budget, order_value(low), work);
}

// One pass: histogram over distance bins. `top_p` < 1 takes its budget from what the bins hold.
void select_by_bins(const Row& row, RowLaw& law, Budget budget, float top_p, Scratch& work) {
  float scale = law.tau * kBinsPerUnit;
  std::fill(work.hist, work.hist + kBins, 0);
  for_kept_tiles(row, law, work, [&](int32_t, int32_t n) {
    row_kernels().histogram(work.tile, n, weights_of(law), budget.by_mass, scale, work.hist);
  });
  if (top_p < 1.0f) {
    uint64_t total = 0;
    for (uint64_t mass : work.hist) total += mass;
    budget.wanted = top_p_budget(top_p, total);
  }
  int32_t bin = 0;
  for (; bin < kBins - 1 && budget.above + work.hist[bin] < budget.wanted; bin++) budget.above += work.hist[bin];
  uint32_t low, high;
  bin_keys(law, bin, scale, &low, &high);
  finish_in_range(row, law, budget, low, high, work);
}

float nth_largest(std::vector<float>& values, ptrdiff_t n, ptrdiff_t count) {
  std::nth_element(values.begin(), values.begin() + n, values.begin() + count, std::greater<float>());
  return std::max(values[n], -kInfLogit);
}

// The k-th largest maximum of a group: at most the k-th largest logit. Groups are joined while many are left.
float bound_of_largest(int32_t k, Scratch& work) {
  auto& parts = work.group_order = work.group_max;
  ptrdiff_t count = static_cast<ptrdiff_t>(parts.size());
  if (k > count) return -kInfLogit;
  for (; count % 2 == 0 && count / 2 >= 4 * k; count /= 2)
    for (ptrdiff_t i = 0; i < count / 2; i++) parts[i] = std::max(parts[i], parts[i + count / 2]);
  return nth_largest(parts, k - 1, count);
}

// A maximum of a group that about kListed logits reach, if they are spread evenly over the groups.
float bound_of_list(int32_t size, Scratch& work) {
  if (size <= kMaxListed) return -kInfLogit;
  constexpr ptrdiff_t kSample = 5;
  ptrdiff_t count = static_cast<ptrdiff_t>(work.group_max.size()) / kSample;
  work.group_order.resize(work.group_max.size());
  for (ptrdiff_t i = 0; i < count; i++) work.group_order[i] = work.group_max[i * kSample];
  double below = pow(1.0 - kListed / size, kGroupTokens);  // share of groups without one
  return nth_largest(work.group_order, static_cast<ptrdiff_t>((1.0 - below) * static_cast<double>(count - 1)), count);
}

// Top-p in one pass: the total, and the list of the largest logits; false where the prefix does not end in the list.
bool select_in_list(const Row& row, float top_p, RowLaw& law, uint64_t* total, Scratch& work) {
  float bound = std::max(bound_of_list(row.size, work), law.threshold);
  bool fits = true, far = is_far(law, work);
  clear_list(work);
  for (int32_t base = 0; base < row.size; base += kTileLogits) {
    Span span = load_span(row, base, work);
    *total += row_kernels().mass(span, weights_of(law), law.threshold, far);
    if (fits) fits = append_range(span, bound, kInfLogit, work);
  }
  if (!fits) return false;
  Budget budget{true, top_p_budget(top_p, *total)};
  const float scale = law.tau * kBinsPerUnit;
  std::fill(work.hist, work.hist + kBins, 0);
  std::fill_n(work.list_logits.begin() + work.listed, kGroup, kLowest);  // padding has no mass
  row_kernels().histogram(work.list_logits.data(), work.listed, weights_of(law), true, scale, work.hist);
  int32_t bin = 0;
  for (; bin < kBins && budget.above + work.hist[bin] < budget.wanted; bin++) budget.above += work.hist[bin];
  if (bin == kBins) return false;
  uint32_t low, high;
  bin_keys(law, bin, scale, &low, &high);
  take_candidates(order_value(low), order_value(high), work);
  finish_in_list(law, budget, work);
  return true;
}

void keep_largest(int32_t k, Scratch& work) {
  take_candidates(-kInfLogit, kInfLogit, work);
  size_t count = std::min(work.candidates.size(), static_cast<size_t>(k));
  std::partial_sort(work.candidates.begin(), work.candidates.begin() + count, work.candidates.end(), before);
  work.candidates.resize(count);
}

}  // namespace

void select_kept(Row row, int32_t top_k, float top_p, RowLaw& law, Scratch& work) {
  row.is_clean = law.is_clean();
  const float min_p_kept = law.threshold;
  if (top_k > 0 && list_range(row, RowLaw{}, bound_of_largest(top_k, work), kInfLogit, work)) {
    keep_largest(top_k, work);
    auto& list = work.candidates;
    while (list.size() > 1 && list.back().first < min_p_kept) list.pop_back();
    uint64_t total = 0;
    for (const auto& candidate : list) total += law.mass_of(candidate.first);
    finish_in_list(law, Budget{true, top_p < 1.0f ? top_p_budget(top_p, total) : ~0ull}, work);
    return;
  }
  if (top_k > 0) {
    select_by_bins(row, law, Budget{false, static_cast<uint64_t>(top_k)}, 1.0f, work);
    if (top_p < 1.0f) return select_by_bins(row, law, Budget{true, 0}, top_p, work);
    law.mass = 0;
    for_kept_tiles(row, law, work, [&](int32_t, int32_t n) {
      for (int32_t i = 0; i < n; i++) law.mass += law.mass_of(work.tile[i]);
    });
    return;
  }
  uint64_t total = 0;
  if (select_in_list(row, top_p, law, &total, work)) return;
  select_by_bins(row, law, Budget{true, top_p_budget(top_p, total)}, 1.0f, work);
}

}  // namespace specdec
