// The kept set of a row is the shortest prefix of the total order (logit descending, id ascending) whose weight reaches
// a budget: weight 1 and budget k for top-k, mass and top_p * total for top-p.
//
//   level 0   bins of 1/32 in (max - l) * tau         one pass with exp
//   level 1   the crossing bin, if few: listed and sorted
//   level 2+  else its key range in 1024 parts, until one logit value is left; then ties are counted by id
#include "select_cpu.h"

#include <algorithm>

namespace specdec {
namespace {

constexpr size_t kMaxCandidates = 8192;
constexpr float kLowest = -__builtin_huge_valf();

bool before(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

uint64_t mass_of(const RowLaw& law, float logit) {
  return static_cast<uint64_t>(llrintf(exp_nonpositive(law.scaled(logit)) * kMassScale));
}

// Walks the tiles of what is kept so far (law.threshold, law.last_tie).
template <class Body>
void for_kept_tiles(const Row& row, const RowLaw& law, Scratch& work, Body&& body) {
  float tile_max;
  for (int32_t base = 0; base < row.size; base += kTileLogits) {
    int32_t n = load_tile(row, base, work.tile, &tile_max, nullptr);
    drop_unkept(law, base, n, work.tile);
    body(base, n);
  }
}

// Lists the kept logits in [low, high]; false as soon as there are too many.
bool list_range(const Row& row, const RowLaw& law, float low, float high, Scratch& work) {
  work.candidates.clear();
  bool fits = true;
  for_kept_tiles(row, law, work, [&](int32_t base, int32_t n) {
    if (!fits) return;
    int32_t count = row_kernels().collect(work.tile, n, low, high, work.index);
    fits = work.candidates.size() + static_cast<size_t>(count) <= kMaxCandidates;
    for (int32_t i = 0; fits && i < count; i++)
      work.candidates.push_back({work.tile[work.index[i]], base + work.index[i]});
  });
  return fits;
}

struct Budget {
  bool by_mass;
  uint64_t wanted, above = 0;  // weight wanted in all, weight above the range under study
  uint64_t weight(const RowLaw& law, float logit) const { return by_mass ? mass_of(law, logit) : 1; }
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
    int32_t count = row_kernels().collect(work.tile, n, value, value, work.index);
    for (int32_t i = 0; i < count && seen < needed; i++, seen++) last = base + work.index[i];
  });
  law.threshold = value;
  law.last_tie = last;
  law.mass = budget.above + seen * one;
}

// Narrows the key range [low, high] that holds the end of the prefix until it can be listed.
void finish_in_range(const Row& row, RowLaw& law, Budget budget, uint32_t low, uint32_t high, Scratch& work) {
  while (low < high) {
    if (list_range(row, law, order_value(low), order_value(high), work)) return finish_in_list(law, budget, work);
    int shift = 0;
    while (((high - low) >> shift) >= kBins) shift++;
    std::fill(work.hist, work.hist + kBins, 0);
    for_kept_tiles(row, law, work, [&](int32_t, int32_t n) {
      int32_t count = row_kernels().collect(work.tile, n, order_value(low), order_value(high), work.index);
      for (int32_t i = 0; i < count; i++) {
        float logit = work.tile[work.index[i]];
        work.hist[(order_key(logit) - low) >> shift] += budget.weight(law, logit);
      }
    });
    int32_t bin = static_cast<int32_t>((high - low) >> shift);
    for (; bin > 0 && budget.above + work.hist[bin] < budget.wanted; bin--) budget.above += work.hist[bin];
    low += static_cast<uint32_t>(bin) << shift;
    uint32_t top = low + (1u << shift) - 1;
    high = top < high ? top : high;
  }
  finish_in_ties(row, law, budget, order_value(low), work);
}

// Keys of the logits in a distance bin: bins fall as logits rise, so both ends are found by bisection.
void bin_keys(const RowLaw& law, int32_t bin, float scale, uint32_t* low, uint32_t* high) {
  auto first_below = [&](int32_t limit) {  // smallest key whose bin is under `limit`
    uint32_t a = order_key(-kInfLogit), b = order_key(law.max);
    while (a < b) {
      uint32_t middle = a + (b - a) / 2;
      if (distance_bin(law.max, order_value(middle), scale) < limit)
        b = middle;
      else
        a = middle + 1;
    }
    return a;
  };
  *low = bin == kBins - 1 ? order_key(-kInfLogit) : first_below(bin + 1);
  *high = bin == 0 ? order_key(law.max) : first_below(bin) - 1;
}

// One pass: histogram over distance bins. `top_p` < 1 selects by mass, else by count (`budget.wanted` is k).
void select_by_bins(const Row& row, RowLaw& law, Budget budget, float top_p, Scratch& work) {
  float scale = law.tau * kBinsPerUnit;
  std::fill(work.hist, work.hist + kBins, 0);
  for_kept_tiles(row, law, work, [&](int32_t, int32_t n) {
    row_kernels().histogram(work.tile, n, law.max, budget.by_mass ? law.tau : 0.0f, scale, work.hist);
  });
  if (budget.by_mass) {
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

}  // namespace

bool largest_k(const Row& row, int32_t k, Scratch& work) {
  size_t groups = work.group_max.size();
  float bound = kLowest;
  if (static_cast<size_t>(k) <= groups) {  // the k-th largest group maximum is at most the k-th largest logit
    std::nth_element(work.group_max.begin(), work.group_max.begin() + (k - 1), work.group_max.end(),
                     [](float a, float b) { return a > b; });
    bound = work.group_max[k - 1];
  }
  if (bound == kLowest) bound = -kInfLogit;
  if (!list_range(row, RowLaw{}, bound, kInfLogit, work)) return false;
  size_t count = std::min(work.candidates.size(), static_cast<size_t>(k));
  std::partial_sort(work.candidates.begin(), work.candidates.begin() + count, work.candidates.end(), before);
  work.candidates.resize(count);
  return true;
}

RowLaw row_law_and_largest(const Row& row, float temperature, int32_t k, Scratch& work) {
  FilterParams params;
  params.temperature = temperature;
  RowLaw law = row_law(row, params, work, true, true);
  if (law.is_empty) return law;
  if (largest_k(row, k, work)) return law;
  // More ties than the list holds: the kept set of top-k, listed in two parts (above the ties, then the lowest ids).
  RowLaw kept = law;
  kept.mass = 0;
  select_by_bins(row, kept, Budget{false, static_cast<uint64_t>(k)}, 1.0f, work);
  work.candidates.clear();
  for_kept_tiles(row, kept, work, [&](int32_t base, int32_t n) {
    int32_t count = row_kernels().collect(work.tile, n, -kInfLogit, kInfLogit, work.index);
    for (int32_t i = 0; i < count; i++) work.candidates.push_back({work.tile[work.index[i]], base + work.index[i]});
  });
  std::sort(work.candidates.begin(), work.candidates.end(), before);
  return law;
}

void select_kept(const Row& row, int32_t top_k, float top_p, float lowest, RowLaw& law, Scratch& work) {
  if (top_k > 0 && largest_k(row, top_k, work)) {
    auto& list = work.candidates;
    while (list.size() > 1 && law.scaled(list.back().first) < lowest) list.pop_back();
    uint64_t total = 0;
    for (const auto& candidate : list) total += mass_of(law, candidate.first);
    finish_in_list(law, Budget{true, top_p < 1.0f ? top_p_budget(top_p, total) : ~0ull}, work);
    return;
  }
  float kept_min = law.max, tile_max;
  uint64_t total = 0;
  if (lowest > kLowest) {
    for (int32_t base = 0; base < row.size; base += kTileLogits) {
      int32_t n = load_tile(row, base, work.tile, &tile_max, nullptr);
      total += row_kernels().mass(work.tile, n, law.max, law.tau, lowest, &kept_min);
    }
    law.threshold = kept_min;
  }
  if (top_k > 0) select_by_bins(row, law, Budget{false, static_cast<uint64_t>(top_k)}, 1.0f, work);
  if (top_p < 1.0f) {
    select_by_bins(row, law, Budget{true, 0}, top_p, work);
  } else {
    law.mass = 0;
    for_kept_tiles(row, law, work, [&](int32_t, int32_t n) {
      law.mass += row_kernels().mass(work.tile, n, law.max, law.tau, kLowest, &kept_min);
    });
  }
}

}  // namespace specdec
