// Barriers and warp collectives, with the checks that hardware does not make: divergence, absent lanes, deadlock.
#include <algorithm>

#include "internal.h"

namespace emulated {

static bool same_place(At a, At b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// ------------------------------------------------------------------ barriers
static void release_barrier(Block* block, Barrier& barrier) {
  if (grid.checks) {
    for (Thread* thread : barrier.waiting) {
      uint32_t* clock = block->clock_of(thread->linear);
      for (size_t i = 0; i < barrier.clock.size(); i++) clock[i] = std::max(clock[i], barrier.clock[i]);
      thread->foreign = join(thread->foreign, barrier.foreign);
    }
    join_threads(block, barrier.waiting.data(), barrier.waiting.size());
  }
  for (Thread* thread : barrier.waiting)
    if (thread->state == State::at_barrier) make_runnable(thread, false);
  barrier.last_true = barrier.true_count;
  barrier.last_arrived = barrier.arrived;
  barrier.waiting.clear();
  barrier.clock.clear();
  barrier.foreign = nullptr;
  barrier.arrived = barrier.true_count = 0;
}

static void arrive(Barrier& barrier, int id, int count, bool wait, At at) {
  Thread* thread = self();
  Block* block = thread->owner;
  thread->at = at;
  if (barrier.arrived == 0) {
    barrier.at = at;
    barrier.expected = static_cast<uint32_t>(count);
  } else if (count == 0 && !same_place(barrier.at, at)) {
    report("divergent barrier: " + place(at) + " meets " + place(barrier.at), block, thread);
    abort_launch();
  } else if (barrier.expected != static_cast<uint32_t>(count)) {
    report("barrier " + std::to_string(id) + " at " + place(at) + " counts other threads than at " + place(barrier.at),
           block, thread);
    abort_launch();
  }
  barrier.arrived++;
  if (wait) {
    barrier.waiting.push_back(thread);
  } else if (grid.checks) {
    uint32_t* clock = block->clock_of(thread->linear);
    barrier.clock.resize(block->num_clocks());
    for (uint32_t i = 0; i < block->num_clocks(); i++) barrier.clock[i] = std::max(barrier.clock[i], clock[i]);
    barrier.foreign = join(barrier.foreign, thread->foreign);
    clock[thread->linear]++;
  }
  uint32_t needed = count ? static_cast<uint32_t>(count) : block->live;
  if (barrier.arrived == needed) {
    // In shuffled schedules the last one queues with the others; otherwise it simply goes on.
    if (wait && shuffled_schedule()) thread->state = State::at_barrier;
    release_barrier(block, barrier);
    if (wait && shuffled_schedule()) wait_here(thread);
  } else if (wait) {
    thread->state = State::at_barrier;
    wait_here(thread);
  }
}

void barrier(int id, int count, bool wait, At at) {
  if (id < 0 || id > 15) trap("barrier index outside 0..15", at);
  if (count % 32) trap("barrier count is no multiple of the warp", at);
  arrive(self()->owner->barriers[id], id, count, wait, at);
}

int barrier_reduce(int kind, bool predicate, At at) {
  Barrier& b = self()->owner->barriers[0];
  b.true_count += predicate;
  arrive(b, 0, 0, true, at);
  // The next barrier cannot finish before this thread has arrived there, so the result is still ours.
  if (kind == 0) return static_cast<int>(b.last_true);
  return kind == 1 ? b.last_true == b.last_arrived : b.last_true != 0;
}

// ------------------------------------------------------------------ warps
static void finish_sync_warp(void**, uint32_t mask) {
  Thread* thread = self();
  Thread* lanes[32];
  size_t count = 0;
  for (int lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) lanes[count++] = thread->warp->lane[lane];
  if (grid.checks) join_threads(thread->owner, lanes, count);
}

// Every lane leaves its arguments and blocks; the last lane named in the mask computes for all of them.
void warp_collective(const void* kind, uint32_t mask, void* argument, Finish finish, At at) {
  Thread* thread = self();
  Block* block = thread->owner;
  Warp* warp = thread->warp;
  thread->kind = kind;
  thread->mask = mask;
  thread->argument = argument;
  thread->at = at;
  if (!(mask >> thread->lane & 1)) {
    report("warp collective at " + place(at) + ": the calling lane is not in its own mask", block, thread);
    abort_launch();
  }
  if (mask & warp->exited) {
    report("warp collective at " + place(at) + ": the mask names a lane that has exited or does not exist", block,
           thread);
    abort_launch();
  }
  warp->waiting |= 1u << thread->lane;
  if ((warp->waiting & mask) != mask) {
    thread->state = State::at_collective;
    wait_here(thread);
    return;
  }
  void* arguments[32] = {};
  for (int lane = 0; lane < 32; lane++) {
    if (!(mask >> lane & 1)) continue;
    Thread* mate = warp->lane[lane];
    // __syncwarp may be reached from different lines; everything else must be one instruction.
    bool differs =
        mate->kind != kind || mate->mask != mask || (finish != finish_sync_warp && !same_place(mate->at, at));
    if (differs) {
      report("divergent warp collective: lane " + std::to_string(thread->lane) + " at " + place(at) + " meets lane " +
                 std::to_string(lane) + " at " + place(mate->at),
             block, thread);
      abort_launch();
    }
    arguments[lane] = mate->argument;
  }
  hooks_quiet = true;
  finish(arguments, mask);
  hooks_quiet = false;
  warp->waiting &= ~mask;
  if (!shuffled_schedule()) {  // the same warp goes on, lane by lane
    for (int lane = 31; lane >= 0; lane--)
      if (mask >> lane & 1 && warp->lane[lane] != thread) make_runnable(warp->lane[lane], true);
    return;
  }
  for (int lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) make_runnable(warp->lane[lane], false);
  wait_here(thread);
}

void sync_warp(uint32_t mask, At at) {
  static const char kind = 0;
  warp_collective(&kind, mask, nullptr, finish_sync_warp, at);
}

// The 128 threads of a warpgroup meet, then one of them works for all (wgmma).
void warpgroup_collective(const void* kind, void* argument, GroupFinish finish, At at) {
  Thread* thread = self();
  Block* block = thread->owner;
  Barrier& group = block->groups[thread->linear / 128];
  thread->kind = kind;
  thread->argument = argument;
  thread->at = at;
  if (group.waiting.empty()) {
    group.at = at;
  } else if (!same_place(group.at, at) || group.waiting[0]->kind != kind) {
    report("divergent warpgroup instruction: " + place(at) + " meets " + place(group.at), block, thread);
    abort_launch();
  }
  group.waiting.push_back(thread);
  thread->state = State::at_barrier;
  if (group.waiting.size() < 128) {
    wait_here(thread);
    return;
  }
  void* arguments[128];
  for (Thread* mate : group.waiting) arguments[mate->linear % 128] = mate->argument;
  hooks_quiet = true;
  finish(arguments);
  hooks_quiet = false;
  std::vector<Thread*> mates = std::move(group.waiting);
  group.waiting.clear();
  for (Thread* mate : mates) make_runnable(mate, false);
  wait_here(thread);
}

// ------------------------------------------------------------------ exit
void thread_exits(Thread* thread) {
  Block* block = thread->owner;
  const uint64_t arrived = std::max(thread->forgotten + thread->landed, thread->promised);
  if (arrived < thread->forgotten + thread->copies.size() && !block->warned_copies) {
    block->warned_copies = true;
    report("thread exits with cp.async copies that were never waited for", block, thread);
  }
  check_wgmma_at_exit(thread);
  thread->state = State::done;
  thread->warp->exited |= 1u << thread->lane;
  block->live--;
  if (block->live == 0) check_mbarriers_at_exit(block);
  for (Thread* mate : thread->warp->lane) {
    if (mate && mate->state == State::at_collective && mate->mask >> thread->lane & 1) {
      report("warp collective at " + place(mate->at) + " waits for a lane that has exited", block, mate);
      abort_launch();
    }
  }
  // A barrier over all live threads needs one fewer now.
  for (Barrier& barrier : block->barriers)
    if (block->live && barrier.arrived && !barrier.expected && barrier.arrived == block->live)
      release_barrier(block, barrier);
}

}  // namespace emulated
