// mbarriers and the copies that report to them.
//
// A phase is complete when no arrivals are pending and no transaction bytes are outstanding; then the next begins with
// the initial count. A wait names the phase by its parity: on a fresh barrier parity 1 counts as complete.
#include <algorithm>

#include "hopper.h"
#include "internal.h"

namespace emulated {

struct Mbarrier {
  struct Copy {
    char* destination;
    std::vector<const char*> chunks;  // sources of its 16-byte chunks; null: zeros
    std::vector<uint32_t> clock;      // of the issuer, at the issue
    size_t bytes() const { return 16 * chunks.size(); }
  };
  struct Arrival {  // of a thread, once its first `count` cp.async copies have landed
    Thread* thread;
    uint64_t count;
    std::vector<uint32_t> clock;
  };
  uint32_t expected = 0, pending = 0, phase = 0;
  int64_t bytes = 0;                      // outstanding; negative when copies are ahead of their expectation
  std::vector<uint32_t> clock, complete;  // known to this phase's arrivals; to those of complete phases
  std::vector<Copy> copies;
  std::vector<Arrival> arrivals;
  std::vector<Thread*> waiting;
};

static size_t offset_of(const void* barrier, At at) {
  Block* block = self()->owner;
  size_t offset = static_cast<size_t>(static_cast<const char*>(barrier) - block->arena);
  if (offset + 8 > block->used) trap("mbarrier outside shared memory", at);
  if (offset % 8) trap("misaligned mbarrier", at);
  return offset;
}

static Mbarrier& find(const void* barrier, At at, const void* where) {
  size_t offset = offset_of(barrier, at);
  auto found = self()->owner->mbarriers.find(offset);
  if (found == self()->owner->mbarriers.end()) trap("mbarrier used before its init", at);
  if (grid.checks) shared_access(self(), offset, 8, false, true, where, false, false);  // ordered after the init?
  return *found->second;
}

static std::vector<uint32_t> clock_now(Thread* thread) {
  Block* block = thread->owner;
  const uint32_t* row = block->clock_of(thread->linear);
  return {row, row + block->num_clocks()};
}
static void join_clock(std::vector<uint32_t>& into, const std::vector<uint32_t>& news) {
  if (into.size() < news.size()) into.resize(news.size());
  for (size_t i = 0; i < news.size(); i++) into[i] = std::max(into[i], news[i]);
}

static void complete_phase(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase++;
  b.pending = b.expected;
  join_clock(b.complete, b.clock);
  for (Thread* thread : b.waiting) make_runnable(thread, false);
  b.waiting.clear();
}

static void take_arrivals(Mbarrier& b, uint32_t count, At at) {
  if (count > b.pending) trap("more arrivals on an mbarrier than it expects in a phase", at);
  b.pending -= count;
}

static void land(Mbarrier& b, const Mbarrier::Copy& copy) {
  for (size_t i = 0; i < copy.chunks.size(); i++)
    if (copy.chunks[i])
      memcpy(copy.destination + 16 * i, copy.chunks[i], 16);
    else
      memset(copy.destination + 16 * i, 0, 16);
  if (grid.checks) {
    Block* block = self()->owner;
    engine_wrote(block, copy.destination, copy.bytes());
    join_clock(b.clock, copy.clock);
    b.clock.back() = std::max(b.clock.back(), block->engine_clock);
  }
  b.bytes -= static_cast<int64_t>(copy.bytes());
}

static void land_all(Mbarrier& b, At at) {
  auto copies = std::move(b.copies);
  auto arrivals = std::move(b.arrivals);
  b.copies.clear();
  b.arrivals.clear();
  for (const auto& copy : copies) {
    land(b, copy);
    complete_phase(b);  // as soon as the counts say so, even if more copies are on their way
  }
  for (const auto& arrival : arrivals) {
    land_copies_until(arrival.thread, arrival.count);
    join_clock(b.clock, arrival.clock);
    take_arrivals(b, 1, at);
  }
  complete_phase(b);
}

__attribute__((noinline)) void mbarrier_init(void* barrier, uint32_t arrivals, At at) {
  size_t offset = offset_of(barrier, at);
  if (arrivals == 0 || arrivals >= 1u << 20) trap("mbarrier count outside 1 .. 2^20 - 1", at);
  if (grid.checks) shared_access(self(), offset, 8, true, false, __builtin_return_address(0), false, false);
  auto fresh = std::make_shared<Mbarrier>();
  fresh->expected = fresh->pending = arrivals;
  self()->owner->mbarriers[offset] = std::move(fresh);
}

__attribute__((noinline)) void mbarrier_arrive(void* barrier, uint32_t count, uint32_t bytes, At at) {
  Mbarrier& b = find(barrier, at, __builtin_return_address(0));
  Thread* thread = self();
  if (grid.checks) {
    join_clock(b.clock, clock_now(thread));
    thread->owner->clock_of(thread->linear)[thread->linear]++;
  }
  b.bytes += bytes;
  take_arrivals(b, count, at);
  complete_phase(b);
  if (shuffled_schedule()) yield();
}

__attribute__((noinline)) void mbarrier_expect(void* barrier, uint32_t bytes, At at) {
  Mbarrier& b = find(barrier, at, __builtin_return_address(0));
  b.bytes += bytes;
}

__attribute__((noinline)) void mbarrier_arrive_after_copies(void* barrier, At at) {
  Mbarrier& b = find(barrier, at, __builtin_return_address(0));
  Thread* thread = self();
  thread->promised = thread->forgotten + thread->copies.size();
  b.arrivals.push_back({thread, thread->promised, clock_now(thread)});
  if (grid.checks) {
    uint32_t& clock = thread->owner->clock_of(thread->linear)[thread->linear];
    for (size_t i = thread->copies.size(); i-- > thread->landed && !thread->copies[i].promised;)
      thread->copies[i].promised = clock;
    clock++;
  }
  for (Thread* waiter : b.waiting) make_runnable(waiter, false);  // one of them will land the copies
  b.waiting.clear();
}

__attribute__((noinline)) bool mbarrier_test(void* barrier, uint32_t parity, bool block, At at) {
  Mbarrier& b = find(barrier, at, __builtin_return_address(0));
  Thread* thread = self();
  if (shuffled_schedule()) yield();
  for (;;) {
    if ((b.phase & 1) != (parity & 1)) {
      if (grid.checks)
        for (size_t i = 0; i < b.complete.size(); i++) {
          uint32_t& mine = thread->owner->clock_of(thread->linear)[i];
          mine = std::max(mine, b.complete[i]);
        }
      return true;
    }
    if (!b.copies.empty() || !b.arrivals.empty()) {
      land_all(b, at);
      continue;
    }
    if (!block) {
      yield();
      return false;
    }
    thread->at = at;
    thread->state = State::at_barrier;
    b.waiting.push_back(thread);
    wait_here(thread);
  }
}

__attribute__((noinline)) void bulk_copy(void* destination, const void* source, uint32_t bytes, void* barrier, At at) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16)
    trap("bulk copy: addresses and size must be multiples of 16", at);
  if (bytes) check_source_range(source, bytes, at);
  std::vector<const char*> chunks;
  for (uint32_t i = 0; i < bytes; i += 16) chunks.push_back(static_cast<const char*>(source) + i);
  issue_bulk_copy(barrier, destination, std::move(chunks), at, __builtin_return_address(0));
}

// Chunks lie one behind the other in shared memory.
void issue_bulk_copy(void* barrier, void* destination, std::vector<const char*> chunks, At at, const void* where) {
  Mbarrier& b = find(barrier, at, where);
  Block* block = self()->owner;
  size_t offset = static_cast<size_t>(static_cast<char*>(destination) - block->arena);
  Mbarrier::Copy copy{static_cast<char*>(destination), std::move(chunks), clock_now(self())};
  if (offset % 16) trap("bulk copy: addresses and size must be multiples of 16", at);
  if (offset + copy.bytes() > block->used) trap("bulk copy: destination outside shared memory", at);
  if (grid.checks) {
    engine_write_begins(self(), offset, copy.bytes(), where);
    shared_access(self(), offset, copy.bytes(), true, false, where, false, true);
  }
  if (config.landing == Landing::early || (config.landing == Landing::random && (grid.random() & 1))) {
    land(b, copy);
    complete_phase(b);
    return;
  }
  memset(destination, 0xff, copy.bytes());
  b.copies.push_back(std::move(copy));
  for (Thread* waiter : b.waiting) make_runnable(waiter, false);
  b.waiting.clear();
}

void check_mbarriers_at_exit(Block* block) {
  for (auto& [offset, b] : block->mbarriers)
    if (!b->copies.empty())
      report("block ends with bulk copies that were never waited for (mbarrier at shared byte " +
                 std::to_string(offset) + ")",
             block);
}

void fence_async_proxy() {
  Thread* thread = self();
  if (!grid.checks) return;
  Block* block = thread->owner;
  uint32_t* row = block->clock_of(thread->linear);
  for (uint32_t i = 0; i < block->num_clocks(); i++) block->proxy_fenced[i] = std::max(block->proxy_fenced[i], row[i]);
  row[thread->linear]++;  // what follows is not covered
}

}  // namespace emulated
