// A row of logits on the CPU and the vector kernels that walk it in tiles of 4096 (one table per instruction set).
#pragma once
#include <vector>

#include "../common/check.h"
#include "filters.h"
#include "noise.h"

namespace specdec {

enum class LogitType : int32_t { float32, bfloat16, float16 };

// One row and what edits it: columns at and behind `size` do not exist, `allowed` bits of 0 forbid, bias entries add.
struct Row {
  const void* data = nullptr;
  LogitType type = LogitType::float32;
  int32_t size = 0;
  const uint32_t* allowed = nullptr;
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_bias = 0;
  bool is_clean = false;  // known to hold neither NaN nor +inf once edited

  bool is_edited() const { return allowed != nullptr || num_bias > 0; }
};

constexpr int32_t kGroup = 64;       // a kernel's inner step; tiles are padded to it with -inf
constexpr int32_t kPeekStep = 1024;  // logits behind one set of part maxima

struct Hit {
  int32_t id;
  uint32_t word;
};

// What the Gumbel scan needs: a token can win only if its word u satisfies u * bar <= weight, logit >= floor.
struct ScanArgs {
  float max, tau, floor, bar;
  NoiseKey key;
};

// Tile kernels. `x` holds n cleaned logits, padded with -inf to a multiple of kGroup. Every version gives the same
// bits.
struct RowKernels {
  int32_t lanes;
  // Flags of logits [base, base + n) (NaN, +inf) and their maximum; groups (may be null): the maxima of `lanes`
  // disjoint parts of every kPeekStep logits.
  int32_t (*peek)(const void* data, LogitType type, int64_t base, int32_t n, float* tile_max, float* groups);
  // Copies logits [base, base + n) as float32 and pads them.
  void (*convert)(const void* data, LogitType type, int64_t base, int32_t n, float* x);
  int32_t (*find)(const float* x, int32_t n, float value);  // lowest index, -1 if absent
  // Sum of masses where (x - max) * tau >= lowest; *kept_min becomes the smallest logit that counted.
  uint64_t (*mass)(const float* x, int32_t n, float max, float tau, float lowest, float* kept_min);
  uint64_t (*entropy)(const float* x, int32_t n, float max, float tau);  // sum of round(-weight * log weight * 2^44)
  // Sum of round(max(wp * a - wq * b, 0) * 2^50), wp and wq the weights of x and y.
  uint64_t (*residual)(const float* x, const float* y, int32_t n, float max_x, float tau_x, float max_y, float tau_y,
                       float a, float b);
  // Indices with low <= logit <= high, ascending.
  int32_t (*collect)(const float* x, int32_t n, float low, float high, int32_t* out);
  // Appends logits in [low, high] and base + their indices to the lists (room for n + kGroup), ascending.
  int32_t (*gather)(const float* x, int32_t n, int32_t base, float low, float high, float* logits, int32_t* ids);
  // hist[distance_bin] += mass (tau > 0) or += 1 (tau == 0).
  void (*histogram)(const float* x, int32_t n, float max, float tau, float scale, uint64_t* hist);
  int32_t (*scan)(const float* x, int32_t n, int32_t base, const ScanArgs& args, Hit* hits);
};
constexpr double kResidualScale = 1125899906842624.0;  // 2^50

const RowKernels& row_kernels();  // for the instruction set now in force (common/cpu.h)
const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

// Buffers of one worker; a few hundred KiB whatever the vocabulary.
struct Scratch {
  alignas(64) float tile[kTileLogits];
  alignas(64) float other[kTileLogits];
  int32_t index[kTileLogits];
  Hit hits[kTileLogits];
  uint64_t hist[kBins];
  std::vector<float> group_max;
  int32_t listed = 0;  // length of the two lists below
  std::vector<float> list_logits;
  std::vector<int32_t> list_ids;
  std::vector<std::pair<float, int32_t>> candidates;  // (logit, id), to be sorted
};
Scratch& scratch();

float load_logit(const Row& row, int32_t id);  // one edited, cleaned logit
// Loads tile [base, base + returned n) with all edits: NaN -> -inf, +inf -> kInfLogit; `flags` collects what was seen.
int32_t load_tile(const Row& row, int32_t base, float* x, int32_t* flags = nullptr);
void drop_unkept(const RowLaw& law, int32_t base, int32_t n, float* x);  // logits that the filters removed -> -inf

struct FilterParams {
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = 0;
};
// The row's law under the filters: one read of the row, and a second one for the mass that hits the cache. A row that
// is only drawn from, not compared with, needs no mass unless a filter does (`need_mass` false leaves log_mass at 0).
// `want_groups` also leaves the maximum of every group of 64 in work.group_max.
RowLaw row_law(Row row, const FilterParams& params, Scratch& work, bool need_mass = true, bool want_groups = false);
// Only max, argmax and flags: all a greedy row or a coupled draw needs.
RowLaw row_argmax(Row row, Scratch& work);
double row_entropy(Row row, const RowLaw& law, Scratch& work);

// Rows of a [R, V] logits tensor with their edits.
struct RowSource {
  const char* data = nullptr;
  int64_t row_bytes = 0;
  LogitType type = LogitType::float32;
  int32_t columns = 0;  // width of the tensor
  int32_t valid = 0;    // columns that exist
  const uint32_t* allowed = nullptr;
  int64_t allowed_stride = 0;
  const int32_t *bias_cu = nullptr, *bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_entries = 0;
  int64_t num_rows = 0;

  Row row(int64_t index) const;
};

RowSource make_rows(const char* op, const char* name, const torch::stable::Tensor& logits, int64_t vocab_size,
                    const std::optional<torch::stable::Tensor>& allowed,
                    const std::optional<torch::stable::Tensor>& bias_cu,
                    const std::optional<torch::stable::Tensor>& bias_ids,
                    const std::optional<torch::stable::Tensor>& bias_values);

}  // namespace specdec
