// State of a launch, shared by the runtime's files.
//
//   Grid  one launch: the run queue, the random generator, `resident_blocks` slots
//   Block one resident block: its shared memory, barriers, warps, threads and their vector clocks
//   Thread one CUDA thread: a fiber, what it waits for, its cp.async queue, what it knows of other blocks
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulated.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMULATED_ASAN 1
#else
#define EMULATED_ASAN 0
#endif

namespace emulated {

extern std::string last_error[2];  // of a CUDA runtime, until check_launch takes it

constexpr uint32_t kMaxThreads = 1024;
constexpr size_t kSharedLimit = 227 << 10;  // largest dynamic shared memory of a block (sm_90)
constexpr size_t kArena = 256 << 10;        // arena of a block: dynamic, then static objects with red zones
constexpr size_t kPage = 4096;

struct Block;
struct Warp;
struct Grid;

enum class State : uint8_t { runnable, at_barrier, at_collective, done };

struct Mbarrier;  // mbarrier.cpp
struct WgmmaOp;   // wgmma.cpp

struct AsyncCopy {
  char* destination;
  const char* source;
  uint16_t bytes, source_bytes;
  bool landed;
  uint32_t promised;  // the issuer's clock when it promised the copy to an mbarrier; 0: it did not
};

// A vector clock by block: for each block it has heard of, the clock of every thread of that block. Shared and never
// changed once built, so that passing it through barriers and atomics costs a pointer.
using BlockClock = std::shared_ptr<const std::vector<uint32_t>>;
using Knowledge = std::shared_ptr<const std::map<uint32_t, BlockClock>>;

struct Thread : ThreadContext {
  Block* owner;
  Warp* warp;
  void* stack_pointer;
  char* stack;  // lowest usable address
  void* fake_stack;
  State state;
  uint32_t priority;
  // what it waits for
  const void* kind;
  uint32_t mask;
  void* argument;
  At at;
  // cp.async: copies issued, the first `landed` of them have arrived; `forgotten` more came before. A group is the
  // number of copies ever issued when it was committed.
  std::vector<AsyncCopy> copies;
  std::vector<uint64_t> groups;
  uint32_t landed;
  uint64_t forgotten;
  uint64_t promised;  // copies that an mbarrier waits for
  bool wgmma_fenced;
  // memory order between blocks
  Knowledge foreign;          // what it knows of other blocks
  Knowledge fence_release;    // what it knew at its last fence: handed on by later relaxed atomics
  Knowledge pending_acquire;  // read by relaxed atomics, to be learnt at the next fence
};

struct Warp {
  uint32_t waiting, exited;
  Thread* lane[32];
  // wgmma: issued and not yet committed, then one list a committed group
  std::vector<std::shared_ptr<WgmmaOp>> issued;
  std::vector<std::vector<std::shared_ptr<WgmmaOp>>> committed;
  int registers = 0;  // of a thread, once setmaxnreg has said so
};

struct Barrier {
  uint32_t arrived, expected, true_count;
  At at;
  std::vector<Thread*> waiting;
  std::vector<uint32_t> clock;  // of threads that arrived without waiting
  Knowledge foreign;
  uint32_t last_true, last_arrived;
};

// Stands for a thread in an Access: the copy engine, which lands bulk copies and runs on a clock of its own.
constexpr uint16_t kCopyEngine = 0xffff;

// One access as the detectors remember it. `async_proxy`: made by the copy engine, so wgmma sees it without a fence.
struct Access {
  const void* where;
  uint32_t clock, block;
  uint16_t thread;
  bool atomic, async_proxy;
};
// History of one byte of shared or global memory.
struct Cell {
  Access write;
  Access read[3];
  uint32_t generation;
  uint8_t num_reads;
  bool written, in_flight;
};

struct StaticObject {
  const void* key;
  char* address;
  size_t bytes;
};

struct Block {
  Grid* grid = nullptr;
  BlockContext context{};
  uint32_t index = 0;  // linear block index
  uint32_t num_threads = 0, live = 0;
  bool active = false, warned_copies = false;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[16], groups[8];
  char* arena = nullptr;
  size_t dynamic_bytes = 0, used = 0;
  std::vector<StaticObject> objects;
  char* stacks = nullptr;
  size_t stack_bytes = 0, num_stacks = 0;
  Cell* shadow = nullptr;  // kArena cells, mapped on first use
  uint32_t generation = 0;
  std::vector<uint32_t> clocks;  // a row of num_clocks() for each thread
  // Hopper's asynchronous units
  std::map<size_t, std::shared_ptr<Mbarrier>> mbarriers;  // by offset in the arena
  std::vector<uint16_t> wgmma_reads;                      // operands in flight, by 16-byte chunk of the arena
  std::vector<std::shared_ptr<WgmmaOp>> wgmma_ops[8];     // of each warpgroup, not yet retired by all its warps
  std::vector<uint32_t> proxy_fenced;                     // by clock: writes up to here are visible to wgmma
  uint32_t engine_clock = 0;
  int spare_registers = 0;  // given back by warps, in registers a thread
  std::vector<Thread*> want_registers;

  uint32_t num_clocks() const { return num_threads + 1; }  // the last one is the copy engine's
  uint32_t* clock_of(uint32_t thread) { return &clocks[size_t(thread) * num_clocks()]; }
  ~Block();
};

struct Grid {
  std::string name;
  Body body;
  void* closure;
  size_t closure_bytes;
  LaunchShape shape;
  uint64_t num_blocks, next_block;
  bool aborted, checks;
  uint64_t random_state;
  uint32_t preempt_countdown;
  std::vector<std::unique_ptr<Block>> slots;
  // run queue: a ring
  std::vector<Thread*> ring;
  uint32_t head, queued;
  // the host's own context
  void* host_stack_pointer;
  void* host_fake_stack;
  const void* host_stack_bottom;
  size_t host_stack_bytes;

  uint64_t random() {  // xorshift64*
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1DULL >> 16;
  }
};
extern Grid grid;               // the launch in progress
extern uint32_t launch_number;  // generation of the global shadow
extern bool hooks_quiet;        // a collective works on other lanes' stacks

inline Thread* self() {
  return static_cast<Thread*>(current);
}

// scheduler.cpp
void start_block(Block* block, uint64_t index);
void run_until_host();  // returns when a block has ended, all is blocked, or the launch is aborted
void make_runnable(Thread* thread, bool front);
void wait_here(Thread* thread);  // gives the processor away; someone else makes it runnable
[[noreturn]] void abort_launch();
bool shuffled_schedule();

// collectives.cpp
void thread_exits(Thread* thread);
// report.cpp
std::string place(At at);
std::string place(const void* where);
std::string thread_name(uint32_t thread);
void report(const std::string& what, const Block* block = nullptr, const Thread* thread = nullptr);
void report_once(const std::string& kind, const void* where_a, const void* where_b, const std::string& what);
// clocks.cpp
bool ordered_before(const Access& access, Thread* thread);
void join_threads(Block* block, Thread** threads, size_t count);
void reset_clocks(Block* block);
Knowledge join(const Knowledge& a, const Knowledge& b);
void learn(Thread* thread, const Knowledge& news);
Knowledge snapshot(Thread* thread);
void forget_atomics();
// access.cpp
void record_access(Cell& cell, Thread* thread, bool write, bool atomic, const void* where, bool same_value,
                   const char* space, size_t place_in_space, const char* object);
void shared_access(Thread* thread, size_t offset, size_t bytes, bool write, bool atomic, const void* where,
                   bool same_value, bool copy);
void global_access(Thread* thread, const void* address, size_t bytes, bool write, bool atomic, const void* where,
                   bool same_value);
void copies_landed(Thread* thread, const AsyncCopy& copy);
void engine_write_begins(Thread* thread, size_t offset, size_t bytes, const void* where);
void engine_wrote(Block* block, const char* destination, size_t bytes);
void operand_read_begins(Thread* thread, size_t offset, const void* where);
void operand_read_ends(Thread* thread, size_t offset, const void* where);
// global_memory.cpp
bool in_parameters(const void* address, size_t bytes);
// shared_memory.cpp
void land_copies_until(Thread* thread, uint64_t count);
// mbarrier.cpp, wgmma.cpp
void issue_bulk_copy(void* barrier, void* destination, std::vector<const char*> chunks, At at, const void* where);
void check_mbarriers_at_exit(Block* block);
void check_wgmma_at_exit(Thread* thread);

}  // namespace emulated
