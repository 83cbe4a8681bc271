// One request's steps through its draft tree, taken by one block: acceptance.h's rules, as in walk_cpu.cpp. All threads
// take the same decisions; thread 0 writes.
#pragma once
#include "sampling/verify_draw_cuda.cuh"

namespace specdec {

enum class Stage : int32_t { walking, chain, passing, emitting };

// Block verification so far.
struct Chain {
  double log_rho, cut_log_rho;
  int32_t cut, length;  // length: nodes of the path
};
// Typical acceptance so far.
struct Passing {
  double entropy;
  int32_t node, best, best_depth, entropy_of;
};
// What a walk knows from step to step. Passes over rows need the registers, so it waits in shared memory meanwhile.
struct VerifyState {
  NodeSpan span;
  Draw draw;
  Chain chain;
  Passing passing;
  Stage stage;
  int32_t node, visited, next, path_end;  // path_end: last node of the path, by place
  int32_t depth, emitted, flags;
  int32_t pending, known;  // the token of this step; coupled: the target's own token here
  bool before;             // a step before the walk (rows), or instead of it (last token)
  bool has_pending, has_known;
};

constexpr int kLawWords = sizeof(NodeLaws) / 8, kStateWords = sizeof(VerifyState) / 8;
struct VerifyScratch {
  RowScratch rows;
  uint64_t laws[kLawWords];       // a NodeLaws
  uint64_t waiting[kStateWords];  // a VerifyState
};

struct WalkSteps : VerifyState {
  const BlockVerify& p;
  const int64_t b;
  VerifyScratch& s;
  uint32_t* passed;  // bits of nodes whose path passes (typical)

  __device__ __forceinline__ WalkSteps(const BlockVerify& params, int64_t request, VerifyScratch& scratch,
                                       uint32_t* bits)
      : VerifyState{}, p(params), b(request), s(scratch), passed(bits) {
    span = node_span(params, request);
    visited = -1;
    chain.length = 1;
    passing.entropy_of = -1;
    for (int i = threadIdx.x; i < kLawWords; i += kRowThreads) s.laws[i] = 0;  // copies read the padding too
    for (int i = threadIdx.x; i < kStateWords; i += kRowThreads) s.waiting[i] = 0;
    __syncthreads();  // a compiler may read ahead of the test that says whether there are laws
  }
  // A pass of the whole block over a row, during which the state waits.
  template <class Pass>
  __device__ __forceinline__ auto away(Pass&& pass) {
    VerifyState& waiting = *reinterpret_cast<VerifyState*>(s.waiting);
    __syncthreads();  // what waited before was fetched by all
    if (threadIdx.x == 0) waiting = *this;
    const auto result = pass();
    __syncthreads();
    static_cast<VerifyState&>(*this) = waiting;
    return result;
  }

  __device__ __forceinline__ int64_t first_output() const { return b * (p.call.max_depth + 1); }
  __device__ __forceinline__ int32_t* tokens() const { return p.call.output_token_ids + first_output(); }
  __device__ __forceinline__ int32_t* nodes() const { return p.call.accepted_nodes + first_output(); }
  __device__ __forceinline__ NodeLaws& shared_laws() { return *reinterpret_cast<NodeLaws*>(s.laws); }
  __device__ __forceinline__ int32_t token(int32_t node) const { return p.call.draft_token_ids[span.begin + node]; }
  __device__ __forceinline__ bool in_range(int32_t id) const { return id >= 0 && id < p.call.target.valid; }

  // Fills the outputs, and says whether the tree's links are as build_tree makes them.
  __device__ __forceinline__ bool begin_request() {
    const int32_t width = p.call.max_depth + 1, scale = p.call.logprobs == Logprobs::both ? 2 : 1;
    for (int32_t i = threadIdx.x; i < width; i += kRowThreads) {
      tokens()[i] = -1;
      nodes()[i] = i == 0 && span.count > 0 ? 0 : -1;
      for (int32_t j = 0; p.call.logprobs != Logprobs::none && j < scale; j++)
        p.call.logprobs_out[(first_output() + i) * scale + j] = 0.0f;
    }
    const int32_t *parents = p.call.parents + span.begin, *first_child = p.call.first_child + span.begin;
    const int32_t* next_sibling = p.call.next_sibling + span.begin;
    bool unsound = false;
    for (int32_t i = threadIdx.x; i < span.count; i += kRowThreads) {
      const int32_t parent = parents[i], child = first_child[i], next = next_sibling[i];
      unsound |= i == 0 ? parent != -1 || next != -1 : parent < 0 || parent >= i;
      unsound |= child != -1 && (child <= i || child >= span.count || parents[child] != i);
      unsound |= next != -1 && (next <= i || next >= span.count || parents[next] != parent);
    }
    return !__syncthreads_or(unsound);
  }

  __device__ __forceinline__ NoiseKey key(uint32_t purpose, int32_t at, uint32_t salt) const {
    return NoiseKey{p.call.sampling.seed[b], p.call.sampling.position[b] + at, purpose, salt};
  }
  __device__ __forceinline__ Coin coin(int32_t kid, int32_t trial, uint32_t purpose, int32_t at, uint32_t salt) const {
    if (p.call.uniforms) return coin_from_value(p.call.uniforms[span.begin + kid]);
    if (p.call.uniforms64) return coin_from_value(p.call.uniforms64[span.begin + kid]);
    return draw_coin(key(purpose, at, salt), static_cast<uint32_t>(trial));
  }

  __device__ __forceinline__ void open(DraftView& draft, const NodeLaws& laws, int32_t row, bool whole) {
    draft.row = p.draft_row(row);
    if (p.call.has_stored_law(b, row, whole)) {
      draft.law = p.call.stored_law(b, row);
    } else {
      draft.law = laws.draft;
      flags |= draft.law.flags & (kFlagNanLogit | kFlagInfLogit | kFlagParameter);
    }
  }

  // Every step emits one token at most; it is written at the end of the step.
  __device__ __forceinline__ int32_t emit(int32_t id, int32_t next) {
    pending = id;
    has_pending = true;
    return next;
  }
  __device__ __forceinline__ int32_t accept(int32_t kid) {
    depth++;
    if (threadIdx.x == 0) nodes()[depth] = kid;
    return emit(token(kid), kid);
  }
  __device__ __forceinline__ int32_t finish(DrawKind kind) {
    draw.kind = kind;
    draw.node = node;
    return -1;
  }

  // Greedy and coupled: the target's own token is emitted in any case; a child that equals it is accepted.
  __device__ __forceinline__ int32_t match(const Kids& kids, int32_t id) {
    int32_t trial = kids.first_trial;
#pragma unroll 1
    for (int32_t kid = kids.first; kid >= 0; kid = kids.after(kid, trial))
      if (token(kid) == id) return accept(kid);
    return emit(id, -1);
  }

  // Deterministic siblings: one coin against their cumulative mass (integers: exact), else the target without them.
  __device__ __forceinline__ int32_t try_one_hot(const NodeLaws& laws, const Kids& kids) {
    const BlockRow row = p.target_row(span.begin + node);
    const RowLaw& law = laws.target;
    const double u = coin(p.call.first_child[span.begin + node], 0, kPurposeAccept, depth, 0).u;
    double bar = u * static_cast<double>(law.mass);
    if (p.call.uniforms || p.call.uniforms64) bar *= 1.0 + 2.384185791015625e-7;  // see walk_cpu.cpp
    uint64_t cumulative = 0;
    int32_t trial = kids.first_trial;
#pragma unroll 1
    for (int32_t kid = kids.first; kid >= 0; kid = kids.after(kid, trial)) {
      const int32_t id = token(kid);
      if (!in_range(id)) continue;
      const float logit = clean_logit(edited_logit(row, id));
      if (!(logit > -INFINITY) || !law.keeps(logit, id)) continue;
      cumulative += law.mass_of(logit);
      if (static_cast<double>(cumulative) > bar || cumulative >= law.mass) return accept(kid);
    }
    return finish(DrawKind::one_hot);
  }

  // log p and log q of a drafted token, both rounded to float32 where q was stored at draft time.
  __device__ __forceinline__ void compare(const RowLaw& law, const DraftView& draft, bool sampled, int32_t kid,
                                          double& log_p, double& log_q) {
    const int32_t id = token(kid);
    const bool in_vocabulary = in_range(id);
    const BlockRow row = p.target_row(span.begin + node);
    log_p = in_vocabulary ? law.log_prob(clean_logit(edited_logit(row, id)), id) : kNegInf;
    log_q = sampled ? draft.log_q(id) : 0.0;
    if (sampled && p.call.draft_log_probs && in_vocabulary) {
      log_q = p.call.draft_log_probs[span.begin + kid];
      log_p = static_cast<float>(log_p);
      if (log_q != log_q) log_q = kNegInf;
    }
    if (in_vocabulary && !(log_q > kNegInf)) flags |= kFlagDraftMass;
  }

  // Siblings drawn without replacement from one draft row, in draw order.
  __device__ __forceinline__ int32_t try_sampled(const NodeLaws& laws, const Kids& kids) {
    const RowLaw law = laws.target;
    DraftView draft{p, BlockRow{}, RowLaw{}};
    open(draft, laws, kids.kind, kids.several);
    SiblingState state;
    double last_c = 0.0;  // of the residual before the latest rejection
    int32_t trial = kids.first_trial;
#pragma unroll 1
    for (int32_t kid = kids.first; kid >= 0 && !state.exhausted(); kid = kids.after(kid, trial)) {
      if (kid != kids.first) {
        const BlockRow row = p.target_row(span.begin + node);
        const double Z = away([&] { return block_residual_mass(row, law, draft, state.c, s.rows); });
        if (!(Z > 0.0)) {
          flags |= kFlagZeroResidual;
          state.c = last_c;
          break;
        }
        state.Z = Z;
      }
      double log_p, log_q;
      compare(law, draft, true, kid, log_p, log_q);
      if (accepts(state.log_ratio(log_p, log_q), coin(kid, trial, kPurposeAccept, depth, 0).log_u)) return accept(kid);
      last_c = state.c;
      state.reject_scale();
      state.reject_draw(log_q);
    }
    draw.draft_row = kids.kind;
    draw.is_stored = p.call.has_stored_law(b, kids.kind, kids.several);
    draw.has_last = true;
    draw.log_c = state.log_c();
    draw.last_log_c = last_c > 0.0 ? log(last_c) : kNegInf;
    return finish(DrawKind::residual);
  }

  __device__ __forceinline__ int32_t step_walking(const NodeLaws& laws, const Kids& kids) {
    if (laws.target.is_empty) return emit(0, -1);  // dead row: id 0, nothing behind it
    const bool told = p.call.method == Method::coupled && (p.phase == Phase::rows || has_known);
    if (told && p.phase == Phase::rows) known = static_cast<int32_t>(laws.token);
    if (laws.target.is_point || told) return match(kids, laws.target.is_point ? laws.target.argmax : known);
    if (p.call.method == Method::coupled) return finish(DrawKind::plain);
    if (kids.first < 0) return finish(DrawKind::plain);
    if (p.call.method == Method::target_only || kids.kind == -1) return try_one_hot(laws, kids);
    return try_sampled(laws, kids);
  }

  // Block verification at one node of the chain: the next one, or -1 behind the last. `depth` counts visited drafts.
  __device__ __forceinline__ int32_t step_chain(const NodeLaws& laws, const Kids& kids) {
    const RowLaw law = laws.target;
    const bool last = kids.first < 0 || law.is_empty, sampled = !last && kids.kind >= 0;
    DraftView draft{p, BlockRow{}, RowLaw{}};
    if (sampled) open(draft, laws, kids.kind, true);
    const double rho = chain.log_rho;
    if (depth > 0) {
      double chance = exp(rho);
      if (sampled) {
        const BlockRow row = p.target_row(span.begin + node);
        const double Z = away([&] { return block_residual_mass(row, law, draft, 1.0 / chance, s.rows); });
        chance = block_chance(rho, chance * Z);
      } else if (!last) {
        const int32_t id = token(kids.first);
        const BlockRow row = p.target_row(span.begin + node);
        const double mass = in_range(id) ? exp(law.log_prob(clean_logit(edited_logit(row, id)), id)) : 0.0;
        chance = block_chance(rho, chance * (1.0 - mass) + fmax(chance * mass - 1.0, 0.0));
      }
      const uint32_t salt = static_cast<uint32_t>(p.call.sampling.step_of(b));
      if (coin(node, 0, kPurposeBlock, depth - 1, salt).u < chance) {
        chain.cut = depth;
        chain.cut_log_rho = rho;
      }
    }
    if (last) return -1;
    double log_p, log_q;
    compare(law, draft, sampled, kids.first, log_p, log_q);
    chain.log_rho = block_log_rho(rho, log_p, log_q);
    depth++;
    chain.length = depth + 1;
    if (threadIdx.x == 0) nodes()[depth] = kids.first;
    return chain.log_rho > kNegInf ? kids.first : -1;  // no cut behind a draft without target mass
  }
  __device__ __forceinline__ void finish_chain(const NodeLaws& laws, const Kids& kids) {
    if (chain.cut + 1 == chain.length) {
      finish(DrawKind::plain);
      return;
    }
    draw.log_c = -chain.cut_log_rho;
    draw.drafted = token(kids.first);
    if (kids.kind >= 0) {
      DraftView draft{p, BlockRow{}, RowLaw{}};
      open(draft, laws, kids.kind, false);  // for its flags
      draw.draft_row = kids.kind;
      draw.is_stored = p.call.has_stored_law(b, kids.kind, false);
    }
    finish(kids.kind >= 0 ? DrawKind::residual : DrawKind::block_one_hot);
  }

  // Typical acceptance: the next node after `i` whose parent's law decides, -1 behind the last.
  __device__ __forceinline__ int32_t depth_of(int32_t node) const {
    int32_t levels = 0;
#pragma unroll 1
    for (; node > 0; levels++) node = p.call.parents[span.begin + node];
    return levels;
  }
  __device__ __forceinline__ int32_t next_to_pass(int32_t i) const {
#pragma unroll 1
    for (i++; i < span.count; i++) {
      const int32_t parent = p.call.parents[span.begin + i];
      if ((passed[parent >> 5] >> (parent & 31) & 1u) && token(i) != -1 && depth_of(parent) < p.call.max_depth)
        return i;
    }
    return -1;
  }
  __device__ __forceinline__ void step_passing(const NodeLaws& laws) {
    const int32_t i = passing.node, parent = p.call.parents[span.begin + i], id = token(i);
    const RowLaw law = laws.target;
    if (!in_range(id)) flags |= kFlagTokenRange;
    if (!in_range(id) || law.is_empty) return;
    const BlockRow row = p.target_row(span.begin + parent);
    if (parent != passing.entropy_of) {
      const double entropy = away([&] { return block_entropy(row, law, s.rows); });
      passing.entropy = entropy;
    }
    passing.entropy_of = parent;
    const double log_p = law.log_prob(clean_logit(edited_logit(row, id)), id);
    if (!(log_p > kNegInf) || !typical_accepts(log_p, passing.entropy, p.call.epsilon, p.call.delta)) return;
    __syncthreads();  // everyone has read the bits
    if (threadIdx.x == 0) passed[i >> 5] |= 1u << (i & 31);
    __syncthreads();
    const int32_t levels = depth_of(i);
    if (levels > passing.best_depth) passing.best = i, passing.best_depth = levels;
  }
};

}  // namespace specdec
