// One draw from a reweighted row. pick_token: argmax of log weight + Gumbel noise, in one pass that rarely takes a
// logarithm. race_token: from the maxima of the row's groups (race.h), mostly without reading the row.
#pragma once
#include "rows_cpu.h"

namespace specdec {

constexpr double kMaxGumbel = 46.0;                   // above the largest 64-bit Gumbel value, 45.1
constexpr int32_t kFirstStep = 64, kScanStep = 1024;  // the bar is refreshed after so many tokens

// Winner's score and id so far.
struct Leader {
  double score = kNegInf;
  int32_t id = -1;

  bool offer(double candidate, int32_t candidate_id) {
    if (candidate < score || (candidate == score && candidate_id >= id)) return false;
    score = candidate;
    id = candidate_id;
    return true;
  }
};

// Short steps first, while the bar is low and much passes it; multiples of kGroup, except at the end of a row. Over the
// tiles from `first` to `end`.
template <class Body>
void for_scan_steps(const Row& row, int32_t first, int32_t end, Scratch& work, Body&& body) {
  for (int32_t base = first; base < end; base += kTileLogits) {
    Span tile = load_span(row, base, work);
    int64_t bytes = tile.type == LogitType::float32 ? 4 : 2;
    for (int32_t begin = 0, step; begin < tile.n; begin += step) {
      int32_t scanned = base - first + begin;
      step = scanned < kFirstStep ? kFirstStep : scanned < kScanStep ? scanned : kScanStep;
      if (step > tile.n - begin) step = tile.n - begin;
      body(Span{static_cast<const char*>(tile.data) + begin * bytes, tile.type, base + begin, step,
                tile.next ? tile.next + begin * bytes : nullptr});
    }
  }
}

// A token with word u can only win if u * exp(to_beat) <= weight: -log1p(-u) >= u. In powers of two, the word as float
// bits (bits / 2^23 - 127 <= log2 of the word): bits / 2^23 <= (logit - max) * rate - to_beat * log2(e) + 127 + 32.
inline void aim(ScanArgs& args, const RowLaw& law, double to_beat) {
  float reach = static_cast<float>(law.max + (to_beat - kMaxGumbel) / law.tau);
  args.floor = reach > law.threshold ? reach : law.threshold;
  if (args.floor < -kInfLogit || args.floor != args.floor) args.floor = -kInfLogit;
  constexpr double kMargin = 2e-3;  // for float32 rounding of the comparison
  const double limit = 159.0 + kMargin - to_beat * 1.4426950408889634;
  // Float bits end at 255: where little or nothing is to be beaten every word passes, whatever its token's weight.
  const bool all = !(limit <= 254.0);
  args.rate = all ? 0.0f : law.rate;
  args.limit = static_cast<float>(all ? 254.0 : limit) * 8388608.0f;
}

// Tokens of a span that may win. Where filters leave few, noise is drawn for those alone and not for whole groups; a
// tile in which they are not few goes on without the list.
class Scanner {
 public:
  explicit Scanner(const RowLaw& law) : filtered_(law.threshold > -__builtin_huge_valf()) {}

  int32_t operator()(const Span& span, const ScanArgs& args, Scratch& work) {
    if (span.base % kTileLogits == 0) few_ = filtered_;
    if (!few_) return row_kernels().scan(span, args, work.hits);
    int32_t listed = row_kernels().gather(span, args.floor, kInfLogit, work.other, work.index);
    few_ = listed * kFew < span.n;
    return row_kernels().scan_listed(work.other, work.index, listed, args, work.hits);
  }

 private:
  static constexpr int32_t kFew = 6;  // a listed token costs about as much as five of a group
  const bool filtered_;
  bool few_ = false;
};

// `log_weight(id, logit)` may not exceed the row's own (logit - max) * tau; -inf excludes the id. Ids that the filters
// removed are never offered. Returns -1 where nothing has weight. Ties go to the lowest id.
template <class LogWeight>
int32_t pick_token(Row row, const RowLaw& law, const NoiseKey& key, LogWeight&& log_weight) {
  row.is_clean = law.is_clean();
  if (law.is_point) return log_weight(law.argmax, law.max) > kNegInf ? law.argmax : -1;
  auto offer = [&](Leader& best, int32_t id, float logit, uint32_t word) {
    if (!(logit >= -kInfLogit) || !law.keeps(logit, id)) return;
    double weight = log_weight(id, logit);
    if (weight > kNegInf) best.offer(weight + gumbel(key, static_cast<uint32_t>(id), word), id);
  };
  Philox words = draw(key.seed, key.position, key.purpose, static_cast<uint32_t>(law.argmax) >> 2, key.salt);
  Leader winner;
  offer(winner, law.argmax, law.max, words.word[law.argmax & 3]);  // a good first bar
  const Leader start = winner;
  std::mutex combining;
  over_tiles(row.size, [&](int32_t begin, int32_t end, Scratch& work) {
    Leader best = start;
    ScanArgs args{law.max, law.rate, 0.0f, 0.0f, PhiloxKeys(key)};
    Scanner scan(law);
    for_scan_steps(row, begin, end, work, [&](const Span& span) {
      aim(args, law, best.score);
      int32_t count = scan(span, args, work);
      for (int32_t h = 0; h < count; h++) offer(best, work.hits[h].id, work.hits[h].logit, work.hits[h].word);
    });
    std::lock_guard<std::mutex> lock(combining);
    if (best.id >= 0) winner.offer(best.score, best.id);
  });
  return winner.id;
}

inline int32_t pick_token(const Row& row, const RowLaw& law, const NoiseKey& key) {
  return pick_token(row, law, key, [&](int32_t, float logit) { return static_cast<double>(law.scaled(logit)); });
}

// The same law as pick_token, for weights below the row's own: 1/32 of the words, and only the groups that may win are
// looked into. The row's mass must be known.
template <class LogWeight>
int32_t race_token(Row row, const RowLaw& law, const NoiseKey& key, LogWeight&& log_weight, Scratch& work) {
  if (law.is_point) return pick_token(row, law, key, log_weight);
  row.is_clean = law.is_clean();
  read_groups(row, work);
  std::vector<float>& bounds = work.race_bound;
  bounds.resize(work.race_max.size());
  for (size_t g = 0; g < bounds.size(); g++)
    bounds[g] = work.race_max[g] >= law.threshold ? group_bound(law.scaled(work.race_max[g])) : -__builtin_huge_valf();
  Row groups;  // a row of log weights: its law is the default one
  groups.data = bounds.data();
  groups.size = static_cast<int32_t>(bounds.size());
  groups.is_clean = true;
  const RowLaw unit;
  NoiseKey clocks = key;
  clocks.purpose = kPurposeRace;
  Leader best;
  best.score = law.log_mass - log(kRaceEnd);
  auto race = [&](int32_t group, double bound, uint32_t word) {
    race_group(clocks, group, word, bound, best.score, best.id, [&](const Ring& ring) {
      if (ring.id >= row.size) return false;
      float logit = load_logit(row, ring.id);
      if (!(logit >= -kInfLogit) || !law.keeps(logit, ring.id) || !(ring.log_u < law.scaled(logit) - bound))
        return false;
      return ring.log_u < log_weight(ring.id, logit) - bound;
    });
  };
  const int32_t first = group_of(law.argmax);  // a good first bar
  Philox words = draw(clocks.seed, clocks.position, clocks.purpose, static_cast<uint32_t>(first) >> 2, clocks.salt);
  race(first, bounds[first], words.word[first & 3]);
  ScanArgs args{unit.max, unit.rate, 0.0f, 0.0f, PhiloxKeys(clocks)};
  for_scan_steps(groups, 0, groups.size, work, [&](const Span& span) {
    aim(args, unit, best.score);
    int32_t count = row_kernels().scan(span, args, work.hits);
    for (int32_t h = 0; h < count; h++)
      if (work.hits[h].id != first) race(work.hits[h].id, work.hits[h].logit, work.hits[h].word);
  });
  return best.id >= 0 ? best.id : pick_token(row, law, key, log_weight);
}

}  // namespace specdec
