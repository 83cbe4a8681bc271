// A row of logits on the CPU and the vector kernels that walk it in tiles of 4096 (one table per instruction set).
#pragma once
#include <torch/csrc/stable/ops.h>

#include <mutex>
#include <vector>

#include "filters.h"
#include "philox_keys.h"
#include "race.h"
#include "row_source.h"

namespace specdec {

constexpr int32_t kGroup = 64;  // a kernel's inner step; tiles are padded to it with -inf

// Logits of ids base .. base + n - 1.
struct Span {
  const void* data;
  LogitType type;
  int32_t base, n;
  const char* next = nullptr;
};

struct Weights {
  float max, rate, lowest;
};
inline Weights weights_of(const RowLaw& law) {
  return {law.max, law.rate, law.lowest};
}

struct Hit {
  int32_t id;
  uint32_t word;
  float logit;
};

// What the Gumbel scan needs: a token can win only if logit >= floor and the float bits of its word are at most
// (logit - max) * rate * 2^23 + limit.
struct ScanArgs {
  float max, rate, floor, limit;
  PhiloxKeys keys;
};

// Kernels over spans of a row, or over tiles `x` of n cleaned logits padded with -inf to a multiple of kGroup. Every
// version gives the same bits.
struct RowKernels {
  int32_t lanes;
  // Flags of a span (NaN, +inf), its maximum and its minimum (but for NaN); groups (may be null): the maxima of its
  // groups (race.h). All others take cleaned logits.
  int32_t (*peek)(const Span& span, float* span_max, float* span_min, float* groups);
  void (*convert)(const Span& span, float* x);     // copies as float32 and pads
  int32_t (*find)(const Span& span, float value);  // lowest index, -1 if absent
  // Of the logits at or above `low`; far: some may lie below max + weights.lowest.
  uint64_t (*mass)(const Span& span, const Weights& weights, float low, bool far);
  uint64_t (*entropy)(const float* x, int32_t n, const Weights& weights, float tau);  // sum of round(-w log w 2^44)
  // Sum of round(max(wp * a - wq * b, 0) * 2^50), wp and wq the weights of x and y.
  uint64_t (*residual)(const float* x, const float* y, int32_t n, const Weights& of_x, const Weights& of_y, float a,
                       float b);
  // Appends logits in [low, high] and their ids to the lists (room for n + kGroup), ascending.
  int32_t (*gather)(const Span& span, float low, float high, float* logits, int32_t* ids);
  // hist[distance_bin] += mass, or += 1.
  void (*histogram)(const float* x, int32_t n, const Weights& weights, bool by_mass, float scale, uint64_t* hist);
  int32_t (*scan)(const Span& span, const ScanArgs& args, Hit* hits);
  // The same for n listed tokens, all at or above the floor. Up to kGroup entries behind the lists are read.
  int32_t (*scan_listed)(const float* logits, const int32_t* ids, int32_t n, const ScanArgs& args, Hit* hits);
};
constexpr double kResidualScale = 1125899906842624.0;  // 2^50

const RowKernels& row_kernels();  // for the instruction set now in force (common/cpu.h)
const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

// Buffers of one worker; a few hundred KiB whatever the vocabulary.
struct Scratch {
  alignas(64) float tile[kTileLogits];
  alignas(64) float other[kTileLogits + kGroup];
  int32_t index[kTileLogits + kGroup];
  Hit hits[kTileLogits];
  uint64_t hist[kBins];
  std::vector<float> group_max;    // of the row read last
  std::vector<float> group_order;  // its copy, to be reordered
  std::vector<float> race_max;     // of race_row, see keep_groups
  std::vector<float> race_bound;   // the logs of their bounds
  const void* race_row = nullptr;
  float row_min = 0.0f;  // of the row read last
  int32_t listed = 0;    // length of the two lists below
  std::vector<float> list_logits;
  std::vector<int32_t> list_ids;
  std::vector<std::pair<float, int32_t>> candidates;  // (logit, id), to be sorted
};
Scratch& scratch();

// body(begin, end, scratch of this thread) over whole tiles of a row: on all threads if this one is alone (fewer
// requests than threads), in one piece inside a parallel region. What bodies combine may not depend on the order.
template <class Body>
void over_tiles(int32_t size, Body&& body) {
  constexpr int64_t kFewTiles = 8;
  torch::stable::parallel_for(0, (size + kTileLogits - 1) / kTileLogits, kFewTiles, [&](int64_t begin, int64_t end) {
    int64_t last = end * kTileLogits;
    body(static_cast<int32_t>(begin * kTileLogits), static_cast<int32_t>(last < size ? last : size), scratch());
  });
}

float load_logit(const Row& row, int32_t id);  // one edited, cleaned logit
// Loads tile [base, base + returned n) with all edits: NaN -> -inf, +inf -> kInfLogit; `flags` collects what was seen.
int32_t load_tile(const Row& row, int32_t base, float* x, int32_t* flags = nullptr);
Span raw_span(const Row& row, int32_t base);  // logits [base, base + n) of a row as they are
// The same, cleaned: the row itself where nothing edits it, else loaded into work.tile.
Span load_span(const Row& row, int32_t base, Scratch& work);
void drop_unkept(const RowLaw& law, int32_t base, int32_t n, float* x);  // logits that the filters removed -> -inf

// The row's law under the filters: one read of the row, and a second one for the mass that hits the cache. A row that
// is only drawn from, not compared with, needs no mass unless a filter does (`need_mass` false leaves log_mass at 0).
RowLaw row_law(Row row, const FilterParams& params, Scratch& work, bool need_mass = true);
// The same from the statistics of its tiles, (maximum, sum of exp((l - maximum) / temperature)) each: no read of the
// row but of one tile, if it has no top-k or top-p. A maximum that is NaN or +inf, or not in its tile, sends us to the
// row.
RowLaw tiled_law(Row row, const float* tiles, const FilterParams& params, Scratch& work, bool need_mass);
// Puts aside the groups' maxima that row_law has just found (with need_mass), for a race in the same row.
void keep_groups(const Row& row, Scratch& work);
// race_max of the row: what was put aside, or read now.
void read_groups(Row row, Scratch& work);
// Only max, argmax and flags: all a greedy row or a coupled draw needs.
RowLaw row_argmax(Row row, Scratch& work);
// Sum of the masses of the logits at or above `low`; fours of neighbours share one rounding.
uint64_t row_mass(const Row& row, const RowLaw& law, float low, bool far = true);
// Whether the row read last has a logit so far down that its weight needs clamping.
bool is_far(const RowLaw& law, const Scratch& work);
double row_entropy(Row row, const RowLaw& law, Scratch& work);

}  // namespace specdec
