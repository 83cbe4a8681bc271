// What a block computes for one node of `verify`: the laws of its rows, and sums over target and draft row.
#pragma once
#include "sampling/acceptance.h"
#include "sampling/rows_cuda.cuh"
#include "sampling/verify_args.h"

namespace specdec {

// The laws of one node, in shared memory (lazy form) or in the workspace (eager form).
struct NodeLaws {
  RowLaw target;  // what follows the node is drawn from it
  RowLaw raw;     // of the row as it came, at temperature 1
  RowLaw edited;  // of a greedy row's edited logits, at temperature 1
  RowLaw draft;   // its children were drawn from
  int64_t token;  // coupled: the target's own token
};

// The last token of a request, still to be drawn.
enum class DrawKind : int32_t { none, plain, one_hot, residual, block_one_hot };
struct Draw {
  DrawKind kind;
  int32_t node, draft_row, drafted;  // draft row of the residual; id of the one-hot law
  int32_t emitted, flags;            // of the request so far
  bool is_stored, has_last;  // the draft law is the stored one; there was a residual before the latest rejection
  double log_c, last_log_c;  // scales of the residual and of the one before
};

// What a launch does: all of a request (lazy), or its rows and the walk, or its last token (eager: two launches).
enum class Phase : int32_t { lazy, rows, last_token };

struct BlockVerify {
  VerifyParams call;
  const int32_t *d2t, *t2d;      // column_of for a block: its own map and its inverse
  const int32_t* request_order;  // [num_requests], or null: all, in order
  int32_t num_requests, max_nodes;
  Phase phase;
  int32_t* tickets;  // workspace: [2 B], zero before and after every call
  NodeLaws* laws;    // [N]
  Draw* draws;       // [B]
  Winner* winners;   // [B, splits]

  __device__ __forceinline__ int64_t request(int64_t i) const { return request_order ? request_order[i] : i; }
  __device__ __forceinline__ BlockRow target_row(int64_t node) const { return block_row(call.target.row(node)); }
  __device__ __forceinline__ BlockRow draft_row(int32_t index) const {
    BlockRow row = block_row(call.draft.row(index));
    row.d2t = d2t;
    row.t2d = t2d;
    row.num_ids = call.target.valid;
    return row;
  }
};

// Nodes of request b; `is_sound`: its offsets lie within the batch and the bound max_nodes.
struct NodeSpan {
  int64_t begin;
  int32_t count;
  bool is_sound;
};
__device__ __forceinline__ NodeSpan node_span(const BlockVerify& p, int64_t b) {
  const int64_t begin = p.call.cu_nodes[b], end = p.call.cu_nodes[b + 1];
  const bool is_sound = p.call.is_sound(begin, end) && end - begin <= p.max_nodes;
  return {is_sound ? begin : 0, is_sound ? static_cast<int32_t>(end - begin) : 0, is_sound};
}

// The children of a node in draw order that can be tried at all: not "never drafted" (-1), of the first one's kind,
// each id once. `trial` counts all siblings.
struct Kids {
  const BlockVerify& p;
  const int64_t b, begin;
  const int32_t count, node;
  int32_t kind = -1, first = -1, first_trial = 0, flags = 0;
  bool several = false;

  __device__ __forceinline__ Kids(const BlockVerify& params, int64_t request, const NodeSpan& span, int32_t of)
      : p(params), b(request), begin(span.begin), count(span.count), node(of) {}

  __device__ __forceinline__ int32_t token(int32_t kid) const { return p.call.draft_token_ids[begin + kid]; }
  __device__ __forceinline__ bool in_range(int32_t id) const { return id >= 0 && id < p.call.target.valid; }
  __device__ __forceinline__ int32_t row_of(int32_t kid) const {
    return p.call.has_draft_laws() ? p.call.draft_row_of(b, begin + kid) : -1;
  }
  // The next one in the list of siblings, whatever it is; -1 behind the last. A link that does not lead on ends it.
  __device__ __forceinline__ int32_t step(int32_t kid) const {
    const int32_t next = kid < 0 ? p.call.first_child[begin + node] : p.call.next_sibling[begin + kid];
    return next > (kid < 0 ? node : kid) && next < count ? next : -1;
  }
  __device__ __forceinline__ bool is_twin(int32_t kid) const {  // an earlier one has its id
    const int32_t id = token(kid);
    if (!in_range(id)) return false;
#pragma unroll 1
    for (int32_t e = step(-1); e >= 0 && e != kid; e = step(e))
      if (token(e) == id && row_of(e) == kind) return true;
    return false;
  }
  __device__ __forceinline__ void scan() {
    bool known = false;
    int32_t trial = 0;
#pragma unroll 1
    for (int32_t kid = step(-1); kid >= 0; kid = step(kid), trial++) {
      const int32_t id = token(kid), row = row_of(kid);
      if (id == -1) continue;
      if (!in_range(id)) flags |= kFlagTokenRange;
      if (row == -2) flags |= kFlagIndex;
      if (!known) kind = row, known = true;
      if (row != kind) flags |= kFlagSiblings;
      if (row == -2 || row != kind) continue;
      if (is_twin(kid)) {
        flags |= kFlagSiblings;
        continue;
      }
      several = first >= 0;
      if (first < 0) first = kid, first_trial = trial;
    }
  }
  // The next one that can be tried behind `kid`, and its trial.
  __device__ __forceinline__ int32_t after(int32_t kid, int32_t& trial) const {
    do {
      kid = step(kid);
      trial++;
    } while (kid >= 0 && (token(kid) == -1 || row_of(kid) != kind || is_twin(kid)));
    return kid;
  }
  // Whether one of them has this id (of the vocabulary).
  __device__ __forceinline__ bool has(int32_t id) const {
#pragma unroll 1
    for (int32_t kid = step(-1); kid >= 0; kid = step(kid))
      if (token(kid) == id && row_of(kid) == kind) return true;
    return false;
  }
};

// The law behind a node's sampled children, in target ids.
struct DraftView {
  const BlockVerify& p;
  BlockRow row;
  RowLaw law;

  __device__ __forceinline__ int32_t column(int32_t id) const {
    const int32_t c = p.t2d ? p.t2d[id] : id;
    return c >= 0 && c < p.call.draft.valid ? c : -1;
  }
  __device__ __forceinline__ float logit(int32_t c) const { return clean_logit(edited_logit(row, c)); }
  __device__ __forceinline__ double log_q(int32_t id) const {
    const int32_t c = id >= 0 && id < p.call.target.valid ? column(id) : -1;
    return c < 0 || law.is_empty ? kNegInf : law.log_prob(logit(c), c);
  }
};

// The draft logits of four neighbouring target ids.
__device__ __forceinline__ void read_draft_quad(const DraftView& draft, const RowReader& reader, int32_t first,
                                                int32_t ids, float (&y)[4]) {
  if (reader.wide && first + 4 <= draft.row.size) {
    uint4 unit = {};
    if (reader.narrow) {
      const uint2 half = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(draft.row.data) + first);
      unit.x = half.x, unit.y = half.y;
    } else {
      unit = ptx::load_stream_16(static_cast<const float*>(draft.row.data) + first);
    }
    return reader.unpack(unit, 0, y);
  }
  fill_four(y, [&](int e) -> float {
    const int32_t column = first + e < ids ? draft.column(first + e) : -1;
    return column >= 0 ? edited_logit(draft.row, column) : -INFINITY;
  });
}

// sum over the vocabulary of max(p - c q, 0)
__device__ __forceinline__ double block_residual_mass(const BlockRow& row, const RowLaw& law, const DraftView& draft,
                                                      double c, RowScratch& s) {
  constexpr double kScale = 1125899906842624.0;  // 2^50
  if (draft.law.is_empty) return 1.0;
  if (draft.law.is_point) {  // q is one-hot
    const int64_t id = draft.p.d2t ? int64_t{draft.law.argmax} + draft.p.d2t[draft.law.argmax] : draft.law.argmax;
    const bool exists = id >= 0 && id < row.size && draft.column(static_cast<int32_t>(id)) == draft.law.argmax;
    const int32_t only = static_cast<int32_t>(id);
    const double p = exists ? exp(law.log_prob(clean_logit(edited_logit(row, only)), only)) : 0.0;
    return 1.0 - fmin(c, p);
  }
  const float a = static_cast<float>(kMassScale / static_cast<double>(law.mass));
  const float b = static_cast<float>(c * (kMassScale / static_cast<double>(draft.law.mass)));
  const RowReader reader(draft.row);
  uint64_t sum = 0;
  for_quads<2>(row, [&](int32_t first, float (&x)[4]) {
    float y[4] = {};
    read_draft_quad(draft, reader, first, row.size, y);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int32_t column = draft.p.t2d && first + e < row.size ? draft.p.t2d[first + e] : first + e;
      const float l = clean_logit(x[e]), d = clean_logit(y[e]);
      const float p = __fmul_rn(law.weight(law.keeps(l, first + e) ? l : -INFINITY), a);
      const float q = __fmul_rn(draft.law.weight(draft.law.keeps(d, column) ? d : -INFINITY), b);
      sum += static_cast<uint64_t>(llrintf(fmaxf(__fsub_rn(p, q), 0.0f) * static_cast<float>(kScale)));
    }
  });
  return static_cast<double>(block_reduce(sum, Sum{}, uint64_t{0}, s.sums)) / kScale;
}

__device__ __forceinline__ double block_entropy(const BlockRow& row, const RowLaw& law, RowScratch& s) {
  if (law.is_point) return 0.0;
  uint64_t sum = 0;
  for_quads(row, [&](int32_t first, float (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float logit = clean_logit(x[e]);
      if (!(logit > -INFINITY) || !law.keeps(logit, first + e)) continue;
      const float d = fmaxf(logit - law.max, law.lowest) * law.tau;
      sum += static_cast<uint64_t>(llrintf(law.weight(logit) * d * -kMassScale));
    }
  });
  sum = block_reduce(sum, Sum{}, uint64_t{0}, s.sums);
  return law.log_mass + static_cast<double>(sum) / static_cast<double>(law.mass);
}

// The laws `first_view` .. `last_view` of a node (in the order of NodeLaws) that are needed, in shared memory. Returns
// which, as bits.
__device__ __forceinline__ uint32_t block_node_laws(const BlockVerify& p, int64_t b, const NodeSpan& span, int32_t node,
                                                    int first_view, int last_view, NodeLaws& out, RowScratch& s) {
  const VerifyParams& call = p.call;
  const int64_t n = span.begin + node;
  uint32_t done = 0;
#pragma unroll 1
  for (int view = first_view; view <= last_view; view++) {
    BlockRow row;
    FilterParams filters;
    bool need_mass = true;
    const float* tiles = nullptr;
    RowLaw* to = &out.target;
    if (view < 3) row = p.target_row(n);
    if (view == 0) {
      // A row that is only drawn from needs no mass: leaves, and every row of the coupled method.
      need_mass = (call.first_child[n] >= 0 && call.method != Method::coupled) || call.is_processed();
      filters = call.sampling.filters(b);
      if (call.method == Method::greedy) filters = FilterParams{}, filters.temperature = 0.0f;
      if (call.tile_stats) tiles = call.tile_stats + n * call.num_tiles * 2;
    } else if (view == 1) {
      if (!call.is_raw()) continue;
      row.allowed = nullptr;
      row.num_bias = 0;
      to = &out.raw;
    } else if (view == 2) {
      if (!call.is_processed() || !out.target.is_point) continue;
      to = &out.edited;
    } else {
      if (!call.has_draft_laws()) continue;
      Kids kids(p, b, span, node);
      kids.scan();
      if (kids.first < 0 || kids.kind < 0) continue;
      if (call.has_stored_law(b, kids.kind, kids.several || call.method == Method::block)) continue;
      row = p.draft_row(kids.kind);
      row.size = call.draft.valid;
      filters = call.draft_sampling.filters(b);
      to = &out.draft;
    }
    RowLaw law = block_row_law(row, filters, need_mass, tiles, s);
    if (view == 0 && call.method == Method::greedy) law.flags |= temperature_flags(call.sampling.temperature[b]);
    if (threadIdx.x == 0) *to = law;
    done |= 1u << view;
    __syncthreads();
  }
  return done;
}

}  // namespace specdec
