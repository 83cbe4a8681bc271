// Fibers: the context switch, the run queue and its schedules.
#include <utility>

#include "internal.h"

namespace emulated {

ThreadContext* current = nullptr;

// Saves the callee-saved registers of the x86-64 System V ABI: about 10 ns, where swapcontext makes a system call.
extern "C" void emulated_switch(void** save, void* to);
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
.type emulated_switch,@function
emulated_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulated_switch,.-emulated_switch
)");

// A null `to` is the host.
static void switch_to(Thread* from, Thread* to) {
  current = to;
#if EMULATED_ASAN
  void** save = from ? (from->state == State::done ? nullptr : &from->fake_stack) : &grid.host_fake_stack;
  if (to)
    __sanitizer_start_switch_fiber(save, to->stack, to->owner->stack_bytes - kPage);
  else
    __sanitizer_start_switch_fiber(save, grid.host_stack_bottom, grid.host_stack_bytes);
#endif
  emulated_switch(from ? &from->stack_pointer : &grid.host_stack_pointer,
                  to ? to->stack_pointer : grid.host_stack_pointer);
#if EMULATED_ASAN
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(from ? from->fake_stack : grid.host_fake_stack, &bottom, &bytes);
#endif
}

bool shuffled_schedule() {
  return config.schedule != Schedule::sequential;
}

void make_runnable(Thread* thread, bool front) {
  uint32_t wrap = static_cast<uint32_t>(grid.ring.size()) - 1;
  thread->state = State::runnable;
  if (front)
    grid.ring[grid.head = (grid.head - 1) & wrap] = thread;
  else
    grid.ring[(grid.head + grid.queued) & wrap] = thread;
  grid.queued++;
}

// Takes the next fiber from the queue as the schedule wants it.
static Thread* take_next() {
  uint32_t wrap = static_cast<uint32_t>(grid.ring.size()) - 1;
  auto at = [&](uint32_t i) -> Thread*& { return grid.ring[(grid.head + i) & wrap]; };
  switch (config.schedule) {
    case Schedule::sequential: break;
    case Schedule::reverse: return at(--grid.queued);
    case Schedule::random: std::swap(at(0), at(static_cast<uint32_t>(grid.random() % grid.queued))); break;
    case Schedule::priority: {
      // Probabilistic concurrency testing: random priorities, so that one warp can run far ahead of the others, and now
      // and then the running warp falls to the bottom.
      uint32_t best = 0;
      for (uint32_t i = 1; i < grid.queued; i++)
        if (at(i)->priority > at(best)->priority) best = i;
      std::swap(at(0), at(best));
      if (grid.random() % 4096 == 0) {
        uint32_t bottom = static_cast<uint32_t>(grid.random() & 0xffff);
        for (Thread* mate : at(0)->warp->lane)
          if (mate) mate->priority = bottom << 5 | (mate->priority & 31);
      }
      break;
    }
  }
  Thread* next = at(0);
  grid.head = (grid.head + 1) & wrap;
  grid.queued--;
  return next;
}

void wait_here(Thread* thread) {
  if (grid.queued == 0) {
    switch_to(thread, nullptr);  // the host starts another block or reports the deadlock
    return;
  }
  Thread* next = take_next();
  if (next != thread) switch_to(thread, next);
}

void yield() {
  Thread* thread = self();
  if (!grid.queued) return;
  make_runnable(thread, config.schedule == Schedule::reverse);
  wait_here(thread);
}

void abort_launch() {
  grid.aborted = true;
  switch_to(self(), nullptr);
  __builtin_unreachable();
}

void run_until_host() {
  switch_to(nullptr, take_next());
  current = nullptr;
}

static void fiber_entry() {
  Thread* thread = self();
#if EMULATED_ASAN
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!grid.host_stack_bottom) {  // the first fiber is entered from the host's stack
    grid.host_stack_bottom = bottom;
    grid.host_stack_bytes = bytes;
  }
#endif
  grid.body(grid.closure);
  thread_exits(thread);
  // The last thread of a block goes back to the host, which may start the next block in this slot.
  if (thread->owner->live == 0 || grid.queued == 0)
    switch_to(thread, nullptr);
  else
    switch_to(thread, take_next());
  __builtin_unreachable();
}

// Gives every thread of `block` a fresh fiber and queues it.
void start_block(Block* block, uint64_t index) {
  const dim3 shape = grid.shape.grid, threads = grid.shape.block;
  block->index = static_cast<uint32_t>(index);
  block->context.block_index =
      make_uint3(static_cast<uint32_t>(index % shape.x), static_cast<uint32_t>(index / shape.x % shape.y),
                 static_cast<uint32_t>(index / (static_cast<uint64_t>(shape.x) * shape.y)));
  block->context.grid_dim = make_uint3(shape.x, shape.y, shape.z);
  block->context.block_dim = make_uint3(threads.x, threads.y, threads.z);
  block->active = true;
  block->live = block->num_threads;
  block->warned_copies = false;
  for (auto* set : {block->barriers, block->groups})
    for (int i = 0; i < (set == block->barriers ? 16 : 8); i++) set[i] = Barrier{};
  for (Warp& warp : block->warps) warp = Warp{0, 0xffffffffu, {}, {}, {}, 0};
  uint64_t warp_random = 0;
  for (uint32_t i = 0; i < block->num_threads; i++) {
    Thread& thread = block->threads[i];
    if (i % 32 == 0) warp_random = grid.random();
    // Warps get random priorities; inside a warp the lanes are a random affine permutation.
    uint32_t lane_rank =
        ((i & 31) * (2 * static_cast<uint32_t>(warp_random & 15) + 1) + static_cast<uint32_t>(warp_random >> 4)) & 31;
    thread = Thread{};
    thread.thread_index = make_uint3(i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y));
    thread.linear = i;
    thread.lane = i & 31;
    thread.block = &block->context;
    thread.owner = block;
    thread.warp = &block->warps[i / 32];
    thread.priority = static_cast<uint32_t>(warp_random >> 20 & 0xffffff) << 5 | lane_rank;
    thread.warp->lane[thread.lane] = &thread;
    thread.warp->exited &= ~(1u << thread.lane);
    thread.stack = block->stacks + i * block->stack_bytes + kPage;
    void** top = reinterpret_cast<void**>(thread.stack + block->stack_bytes - kPage);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&fiber_entry);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    thread.stack_pointer = top;
    make_runnable(&thread, false);
  }
}

}  // namespace emulated
