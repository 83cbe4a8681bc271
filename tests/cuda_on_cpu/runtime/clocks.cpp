// Who knows what: vector clocks inside a block, knowledge between blocks carried by atomics and fences.
//
// Inside a block a thread has a row of clocks; barriers and __syncwarp join rows. A shuffle, a vote or an mma orders no
// memory, as in PTX. Between blocks the only way is PTX's: the writer fences and then performs an atomic, the reader
// performs an atomic on the same word, sees it, and fences. So
//
//   fence   learns what earlier atomics of this thread have read, then takes a snapshot of all it knows;
//   atomic  leaves the snapshot of its thread's last fence at its address, and notes what lies there for the next
//   fence.
//
// The fence and the atomic must be the same thread's, in program order, as the PTX memory model has it: the other
// threads of a block hand over by a barrier before that fence. Blocks that do not run at the same time here are just as
// concurrent to the detector, since a GPU may run them together.
#include <algorithm>
#include <unordered_map>

#include "internal.h"

namespace emulated {

static std::unordered_map<uint64_t, Knowledge> left_at;  // by address of the atomic

void forget_atomics() {
  left_at.clear();
}

static BlockClock newer(const BlockClock& a, const BlockClock& b) {
  if (a == b) return a;
  bool a_wins = true, b_wins = true;
  for (size_t i = 0; i < a->size(); i++) {
    a_wins &= (*a)[i] >= (*b)[i];
    b_wins &= (*b)[i] >= (*a)[i];
  }
  if (a_wins) return a;
  if (b_wins) return b;
  auto both = std::make_shared<std::vector<uint32_t>>(*a);
  for (size_t i = 0; i < both->size(); i++) (*both)[i] = std::max((*a)[i], (*b)[i]);
  return both;
}

Knowledge join(const Knowledge& a, const Knowledge& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto both = std::make_shared<std::map<uint32_t, BlockClock>>(*a);
  for (const auto& [block, clock] : *b) {
    auto [at, fresh] = both->emplace(block, clock);
    if (!fresh) at->second = newer(at->second, clock);
  }
  return both;
}

// All that `thread` knows: other blocks, and its own block's clocks as it has seen them.
Knowledge snapshot(Thread* thread) {
  Block* block = thread->owner;
  const uint32_t* row = block->clock_of(thread->linear);
  auto all = std::make_shared<std::map<uint32_t, BlockClock>>();
  if (thread->foreign) *all = *thread->foreign;
  (*all)[block->index] = std::make_shared<const std::vector<uint32_t>>(row, row + block->num_clocks());
  return all;
}

void learn(Thread* thread, const Knowledge& news) {
  if (!news) return;
  Block* block = thread->owner;
  if (auto own = news->find(block->index); own != news->end()) {
    uint32_t* row = block->clock_of(thread->linear);
    for (uint32_t i = 0; i < block->num_clocks(); i++) row[i] = std::max(row[i], (*own->second)[i]);
  }
  thread->foreign = join(thread->foreign, news);
}

void fence() {
  Thread* thread = self();
  if (grid.checks) {
    learn(thread, thread->pending_acquire);
    thread->pending_acquire = nullptr;
    thread->fence_release = snapshot(thread);
    thread->owner->clock_of(thread->linear)[thread->linear]++;  // what follows is not covered by the snapshot
  }
  yield();
}

static void order_atomic(Thread* thread, const void* address, bool write, Order order) {
  Knowledge& left = left_at[reinterpret_cast<uint64_t>(address)];
  bool acquires = order == Order::acquire || order == Order::acq_rel;
  bool releases = order == Order::release || order == Order::acq_rel;
  if (acquires)
    learn(thread, left);
  else
    thread->pending_acquire = join(thread->pending_acquire, left);
  if (!write) return;
  if (releases) {
    left = join(left, snapshot(thread));
    thread->owner->clock_of(thread->linear)[thread->linear]++;
  } else {
    left = join(left, thread->fence_release);
  }
}

void check_atomic(const void* address, size_t bytes, bool write, Order order, const void* where) {
  // Spinning threads must let others run, and interleavings around atomics are the interesting ones.
  if (!write || shuffled_schedule()) yield();
  if (!grid.checks) return;
  Thread* thread = self();
  size_t offset = static_cast<size_t>(static_cast<const char*>(address) - thread->owner->arena);
  if (offset < kArena) {
    shared_access(thread, offset, bytes, write, true, where, false, false);
  } else {
    global_access(thread, address, bytes, write, true, where, false);
    order_atomic(thread, address, write, order);
  }
}

bool ordered_before(const Access& access, Thread* thread) {
  Block* block = thread->owner;
  const uint32_t index = access.thread == kCopyEngine ? block->num_threads : access.thread;
  if (access.block == block->index) return access.clock <= block->clock_of(thread->linear)[index];
  if (!thread->foreign) return false;
  auto known = thread->foreign->find(access.block);
  return known != thread->foreign->end() && access.clock <= (*known->second)[access.thread];
}

// Everyone learns what anyone knows; each then starts a new epoch.
void join_threads(Block* block, Thread** threads, size_t count) {
  static std::vector<uint32_t> all;
  all.assign(block->num_clocks(), 0);
  Knowledge foreign;
  for (size_t k = 0; k < count; k++) {
    const uint32_t* row = block->clock_of(threads[k]->linear);
    for (uint32_t i = 0; i < block->num_clocks(); i++) all[i] = std::max(all[i], row[i]);
    foreign = join(foreign, threads[k]->foreign);
  }
  for (size_t k = 0; k < count; k++) {
    uint32_t* row = block->clock_of(threads[k]->linear);
    std::copy(all.begin(), all.end(), row);
    row[threads[k]->linear]++;
    threads[k]->foreign = foreign;
  }
}

void reset_clocks(Block* block) {
  block->clocks.assign(static_cast<size_t>(block->num_threads) * block->num_clocks(), 0);
  block->proxy_fenced.assign(block->num_clocks(), 0);
  block->engine_clock = 0;
  for (uint32_t i = 0; i < block->num_threads; i++) block->clock_of(i)[i] = 1;
}

}  // namespace emulated
