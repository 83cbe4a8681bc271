// The walk of one request through its draft tree: acceptance.h's rules applied to rows of logits.
#include <algorithm>

#include "draft_row_cpu.h"
#include "pick_cpu.h"

namespace specdec {

namespace {

class Walk {
 public:
  Walk(const VerifyParams& params, int64_t b, int64_t next_node, LawSlot* target_laws, const LawSlot* draft_laws)
      : p_(params),
        b_(b),
        next_node_(next_node),
        target_laws_(target_laws),
        work_(scratch()),
        draft_(params, b, draft_laws, work_) {
    work_.race_row = nullptr;
  }

  void run() {
    int64_t width = p_.max_depth + 1;
    tokens_ = p_.output_token_ids + b_ * width;
    nodes_ = p_.accepted_nodes + b_ * width;
    logprob_width_ = p_.logprobs == Logprobs::both ? 2 : 1;
    if (p_.logprobs != Logprobs::none) logprobs_ = p_.logprobs_out + b_ * width * logprob_width_;
    std::fill(tokens_, tokens_ + width, -1);
    std::fill(nodes_, nodes_ + width, -1);
    if (logprobs_) std::fill(logprobs_, logprobs_ + width * logprob_width_, 0.0f);
    begin_ = p_.cu_nodes[b_];
    int64_t end = p_.cu_nodes[b_ + 1];
    if (!p_.is_sound(begin_, end)) flags_ |= kFlagIndex, end = begin_;
    count_ = static_cast<int32_t>(end - begin_);
    if (count_ > 0) {
      if ((p_.tree_flags && p_.tree_flags[b_]) || !tree_is_sound()) flags_ |= kFlagTree, count_ = 1;
      if (p_.tree_flags) flags_ |= p_.tree_flags[b_];
      nodes_[0] = 0;
      if (p_.method == Method::block)
        walk_block();
      else if (p_.method == Method::typical)
        walk_typical();
      else
        walk_tree();
    }
    p_.num_emitted[b_] = emitted_;
    p_.flags[b_] = flags_;
  }

 private:
  // ---- the tree

  bool tree_is_sound() const {
    for (int32_t i = 0; i < count_; i++) {
      int32_t parent = p_.parents[begin_ + i], child = p_.first_child[begin_ + i], next = p_.next_sibling[begin_ + i];
      if (i == 0 ? parent != -1 || next != -1 : parent < 0 || parent >= i) return false;
      if (child != -1 && (child <= i || child >= count_ || p_.parents[begin_ + child] != i)) return false;
      if (next != -1 && (next <= i || next >= count_ || p_.parents[begin_ + next] != parent)) return false;
    }
    return true;
  }

  int32_t token(int32_t node) const { return p_.draft_token_ids[begin_ + node]; }
  bool in_range(int32_t id) const { return id >= 0 && id < p_.target.valid; }

  // Children of `node` in draw order that can be tried at all: not "never drafted" (-1), of the first one's kind.
  void list_children(int32_t node) {
    kids_.clear();
    trials_.clear();
    if (depth_ >= p_.max_depth || count_ == 1) return;
    int32_t kind = -3, trial = 0;
    for (int32_t kid = p_.first_child[begin_ + node]; kid != -1; kid = p_.next_sibling[begin_ + kid], trial++) {
      int32_t id = token(kid);
      if (id == -1) continue;
      if (!in_range(id)) flags_ |= kFlagTokenRange;
      if (p_.method == Method::rejection || p_.method == Method::block) {
        int32_t row = p_.draft_row_of(b_, begin_ + kid);
        if (row == -2) flags_ |= kFlagIndex;
        if (kind == -3) kind = row;
        if (row != kind) flags_ |= kFlagSiblings;
        if (row == -2 || row != kind) continue;
      }
      bool twice = in_range(id) && std::any_of(kids_.begin(), kids_.end(), [&](int32_t k) { return token(k) == id; });
      if (twice) flags_ |= kFlagSiblings;
      if (twice) continue;
      kids_.push_back(kid);
      trials_.push_back(trial);
    }
    kind_ = kind == -3 ? -1 : kind;
  }

  // ---- rows

  const RowLaw& target(int32_t node) {
    LawSlot& slot = target_laws_[begin_ + node];
    if (slot.owner != b_) {
      slot.law = target_law_of(p_, b_, begin_ + node, work_, behind(node));
      slot.owner = static_cast<int32_t>(b_);
    }
    flags_ |= slot.law.flags;
    return slot.law;
  }
  Row target_row(int32_t node) const { return p_.target.row(begin_ + node); }
  // What is probably read after a node's row: its children's draft row, else the first child's own.
  const void* behind(int32_t node) const {
    int32_t kid = p_.first_child[begin_ + node];
    if (kid < 0) return row_to_come(p_, next_node_, false);
    int32_t row = p_.method == Method::rejection || p_.method == Method::block ? p_.draft_row_of(b_, begin_ + kid) : -1;
    return row >= 0 ? row_to_come(p_, row, true) : row_to_come(p_, begin_ + kid, false);
  }
  const void* row_of_first_kid() const { return row_to_come(p_, begin_ + kids_[0], false); }

  // ---- randomness

  NoiseKey key(uint32_t purpose, int32_t depth, uint32_t salt = 0) const {
    return NoiseKey{p_.sampling.seed[b_], p_.sampling.position[b_] + depth, purpose, salt};
  }
  Coin coin(int32_t kid, int32_t trial, uint32_t purpose, int32_t depth, uint32_t salt = 0) const {
    if (p_.uniforms) return coin_from_value(p_.uniforms[begin_ + kid]);
    if (p_.uniforms64) return coin_from_value(p_.uniforms64[begin_ + kid]);
    return draw_coin(key(purpose, depth, salt), static_cast<uint32_t>(trial));
  }

  // ---- what goes out

  void write_token(int32_t node, const RowLaw& law, int32_t id) {
    tokens_[emitted_] = id;
    if (logprobs_) write_logprobs(p_.logprobs, target_row(node), law, id, work_, logprobs_ + emitted_ * logprob_width_);
    emitted_++;
  }
  void accept(int32_t node, const RowLaw& law, int32_t kid) {
    write_token(node, law, token(kid));
    nodes_[++depth_] = kid;
  }
  // The last token of the step, drawn from the target.
  void finish(int32_t node, const RowLaw& law) {
    Row row = target_row(node);
    row.next = row_to_come(p_, next_node_, false);
    int32_t id = pick_token(row, law, key(kPurposeEmit, depth_));
    write_token(node, law, id < 0 ? law.argmax : id);
  }
  // The same from what is left of it, `log_weight`; from the target where that is empty.
  template <class LogWeight>
  void recover(int32_t node, const RowLaw& law, LogWeight&& log_weight) {
    int32_t id = race_token(target_row(node), law, key(kPurposeEmit, depth_), log_weight, work_);
    if (id >= 0) return write_token(node, law, id);
    flags_ |= kFlagZeroResidual;
    finish(node, law);
  }
  auto residual(const RowLaw& law, double log_c) const {
    return [this, &law, log_c](int32_t id, float logit) {
      return log_residual(law.log_prob(logit, id), draft_.log_q(id), log_c) + law.log_mass;
    };
  }

  // ---- greedy, one-hot, sampled siblings, coupled: node by node from the root

  void walk_tree() {
    int32_t node = 0;
    while (node >= 0) {
      const RowLaw& law = target(node);
      list_children(node);
      if (law.is_empty) {  // dead row: id 0, nothing behind it
        write_token(node, law, 0);
        return;
      }
      if (law.is_point)
        node = match(node, law, law.argmax);
      else if (p_.method == Method::coupled)
        node = match(node, law, pick_token(target_row(node), law, key(kPurposeEmit, depth_)));
      else if (kids_.empty())
        finish(node, law), node = -1;
      else if (p_.method == Method::target_only || kind_ == -1)
        node = try_one_hot(node, law);
      else
        node = try_sampled(node, law);
    }
  }

  // Greedy and coupled: the target's own token is emitted in any case; a child that equals it is accepted.
  int32_t match(int32_t node, const RowLaw& law, int32_t id) {
    for (int32_t kid : kids_)
      if (token(kid) == id) {
        accept(node, law, kid);
        return kid;
      }
    write_token(node, law, id);
    return -1;
  }

  // Deterministic siblings: one coin against their cumulative mass (integers: exact), else the target without them.
  int32_t try_one_hot(int32_t node, const RowLaw& law) {
    Row row = target_row(node);
    double u = coin(p_.first_child[begin_ + node], 0, kPurposeAccept, depth_).u;
    double bar = u * static_cast<double>(law.mass);
    // A coin that a caller put on a boundary belongs to the next bucket although the logits round it; drawn coins have
    // 64 bits and need no such room.
    if (p_.uniforms || p_.uniforms64) bar *= 1.0 + 2.384185791015625e-7;
    uint64_t cumulative = 0;
    for (int32_t kid : kids_) {
      if (!in_range(token(kid))) continue;
      float logit = load_logit(row, token(kid));
      if (!law.keeps(logit, token(kid))) continue;
      cumulative += law.mass_of(logit);
      if (static_cast<double>(cumulative) > bar || cumulative >= law.mass) {
        accept(node, law, kid);
        return kid;
      }
    }
    recover(node, law, [&](int32_t id, float logit) {
      bool tried = std::any_of(kids_.begin(), kids_.end(), [&](int32_t kid) { return token(kid) == id; });
      return tried ? kNegInf : static_cast<double>(law.scaled(logit));
    });
    return -1;
  }

  // Siblings drawn without replacement from one draft row, in draw order.
  int32_t try_sampled(int32_t node, const RowLaw& law) {
    Row row = target_row(node);
    flags_ |= draft_.open(kind_, kids_.size() > 1, row_of_first_kid());
    SiblingState state;
    double last_c = 0.0;  // of the residual before the latest rejection
    bool stale = false;
    for (size_t i = 0; i < kids_.size() && !state.exhausted(); i++) {
      int32_t kid = kids_[i], id = token(kid);
      if (stale) {
        double Z = draft_.residual_mass(row, law, state.c);
        if (!(Z > 0.0)) {
          flags_ |= kFlagZeroResidual;
          state.c = last_c;
          break;
        }
        state.Z = Z;
      }
      double log_p = in_range(id) ? law.log_prob(load_logit(row, id), id) : kNegInf, q = draft_.log_q(id);
      if (p_.draft_log_probs && in_range(id)) {  // stored at draft time in float32: round both alike
        q = p_.draft_log_probs[begin_ + kid];
        log_p = static_cast<float>(log_p);
        if (q != q) q = kNegInf;
      }
      if (in_range(id) && !(q > kNegInf)) flags_ |= kFlagDraftMass;
      if (accepts(state.log_ratio(log_p, q), coin(kid, trials_[i], kPurposeAccept, depth_).log_u)) {
        accept(node, law, kid);
        return kid;
      }
      last_c = state.c;
      state.reject_scale();
      state.reject_draw(q);
      stale = true;
    }
    int32_t winner = race_token(row, law, key(kPurposeEmit, depth_), residual(law, state.log_c()), work_);
    if (winner < 0) {
      flags_ |= kFlagZeroResidual;
      recover(node, law, residual(law, last_c > 0.0 ? log(last_c) : kNegInf));
    } else {
      write_token(node, law, winner);
    }
    return -1;
  }

  // ---- block verification of a chain

  void walk_block() {
    uint32_t salt = static_cast<uint32_t>(p_.sampling.step_of(b_));
    std::vector<int32_t> path{0};
    std::vector<double> log_rho{0.0};
    int32_t cut = 0;
    for (int32_t node = 0;;) {
      const RowLaw& law = target(node);
      depth_ = static_cast<int32_t>(path.size()) - 1;
      list_children(node);
      if (p_.next_sibling[begin_ + node] != -1) flags_ |= kFlagTree;  // not a chain
      bool last = kids_.empty() || law.is_empty;
      if (law.is_point) {  // greedy rows: block and chain rule agree
        depth_ = 0;
        walk_tree();
        return;
      }
      if (!last && kind_ >= 0) flags_ |= draft_.open(kind_, true, row_of_first_kid());
      double rho = log_rho.back();
      if (depth_ > 0) {
        double chance = last ? exp(rho) : block_chance(rho, block_residual_mass(node, law, rho));
        if (coin(node, 0, kPurposeBlock, depth_ - 1, salt).u < chance) cut = depth_;
      }
      if (last) break;
      int32_t kid = kids_[0], id = token(kid);
      double log_p = in_range(id) ? law.log_prob(load_logit(target_row(node), id), id) : kNegInf;
      double q = kind_ >= 0 ? draft_.log_q(id) : 0.0;
      if (kind_ >= 0 && p_.draft_log_probs && in_range(id)) {
        q = p_.draft_log_probs[begin_ + kid];
        log_p = static_cast<float>(log_p);
        if (q != q) q = kNegInf;
      }
      if (in_range(id) && !(q > kNegInf)) flags_ |= kFlagDraftMass;
      log_rho.push_back(block_log_rho(rho, log_p, q));
      path.push_back(kid);
      if (!(log_rho.back() > kNegInf)) break;  // no cut behind a draft without target mass
      node = kid;
    }
    depth_ = 0;
    for (int32_t i = 0; i < cut; i++) accept(path[i], target(path[i]), path[i + 1]);
    const RowLaw& law = target(path[cut]);
    if (cut + 1 == static_cast<int32_t>(path.size())) return finish(path[cut], law);
    list_children(path[cut]);
    if (kind_ >= 0) {
      flags_ |= draft_.open(kind_, false, nullptr);
      return recover(path[cut], law, residual(law, -log_rho[cut]));
    }
    int32_t drafted = token(path[cut + 1]);
    recover(path[cut], law, [&](int32_t id, float logit) {
      double log_p = law.log_prob(logit, id);
      return log_residual(log_p, id == drafted ? 0.0 : kNegInf, -log_rho[cut]) + law.log_mass;
    });
  }

  // sum max(rho p - q, 0) = rho * sum max(p - q / rho, 0)
  double block_residual_mass(int32_t node, const RowLaw& law, double log_rho) {
    if (!(log_rho > kNegInf)) return 0.0;
    double rho = exp(log_rho);
    if (kind_ >= 0) return rho * draft_.residual_mass(target_row(node), law, 1.0 / rho);
    int32_t id = token(kids_[0]);
    double p = in_range(id) ? exp(law.log_prob(load_logit(target_row(node), id), id)) : 0.0;
    return rho * (1.0 - p) + std::max(rho * p - 1.0, 0.0);
  }

  // ---- Medusa's typical acceptance (lossy): the deepest node whose whole path passes, the first one among equals

  void walk_typical() {
    std::vector<int32_t> depth(count_, -1);
    depth[0] = 0;
    int32_t best = 0, last_parent = -1;
    double entropy = 0.0;
    for (int32_t i = 1; i < count_; i++) {
      int32_t parent = p_.parents[begin_ + i], id = token(i);
      if (depth[parent] < 0 || depth[parent] >= p_.max_depth || id == -1) continue;
      const RowLaw& law = target(parent);
      if (!in_range(id)) flags_ |= kFlagTokenRange;
      if (!in_range(id) || law.is_empty) continue;
      if (parent != last_parent) entropy = row_entropy(target_row(parent), law, work_);
      last_parent = parent;
      double log_p = law.log_prob(load_logit(target_row(parent), id), id);
      if (!(log_p > kNegInf) || !typical_accepts(log_p, entropy, p_.epsilon, p_.delta)) continue;
      depth[i] = depth[parent] + 1;
      if (depth[i] > depth[best]) best = i;
    }
    std::vector<int32_t> path;
    for (int32_t i = best; i != -1; i = p_.parents[begin_ + i]) path.insert(path.begin(), i);
    for (size_t i = 0; i + 1 < path.size(); i++) accept(path[i], target(path[i]), path[i + 1]);
    const RowLaw& law = target(best);
    if (law.is_empty) return write_token(best, law, 0);
    finish(best, law);
  }

  const VerifyParams& p_;
  const int64_t b_, next_node_;
  LawSlot* target_laws_;
  Scratch& work_;
  DraftRow draft_;
  int64_t begin_ = 0;
  int32_t count_ = 0, depth_ = 0, emitted_ = 0, flags_ = 0, kind_ = -1, logprob_width_ = 1;
  int32_t *tokens_ = nullptr, *nodes_ = nullptr;
  float* logprobs_ = nullptr;
  std::vector<int32_t> kids_, trials_;
};

}  // namespace

void verify_request(const VerifyParams& params, int64_t b, int64_t next_node, LawSlot* target_laws,
                    const LawSlot* draft_laws) {
  Walk(params, b, next_node, target_laws, draft_laws).run();
}

}  // namespace specdec
