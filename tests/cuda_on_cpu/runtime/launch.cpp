// A launch: blocks are started in their slots until all have run.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

#include "c_api.h"
#include "internal.h"
#include "ptx_kernels.h"

namespace emulated {

Config config;
Grid grid{};
int planted_bug = 0;
bool hopper = false;
int ptx_architecture = 80;
int calling_runtime = 0;
std::string last_error[2];
static std::string refused_kernels;
static uint64_t launches = 0;

// Memory goes back without ASan's marks, or whoever gets these addresses next is accused.
static void unmap(void* memory, size_t bytes) {
#if EMULATED_ASAN
  __asan_unpoison_memory_region(memory, bytes);
#endif
  munmap(memory, bytes);
}

Block::~Block() {
  if (arena) unmap(arena, kArena);
  if (stacks) unmap(stacks, num_stacks * stack_bytes);
  if (shadow) munmap(shadow, kArena * sizeof(Cell));
}

static void* map_memory(size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Memory of a slot is kept between launches; each stack ends in a guard page.
static void prepare_slot(Block* block, uint32_t num_threads) {
  constexpr size_t stack_bytes = EMULATED_ASAN ? 256 << 10 : 64 << 10;
  if (!block->arena) block->arena = static_cast<char*>(map_memory(kArena));
  if (block->num_stacks < num_threads) {
    if (block->stacks) unmap(block->stacks, block->num_stacks * block->stack_bytes);
    block->stack_bytes = stack_bytes;
    block->num_stacks = num_threads;
    block->stacks = static_cast<char*>(map_memory(num_threads * stack_bytes));
    for (uint32_t i = 0; i < num_threads; i++) mprotect(block->stacks + i * stack_bytes, kPage, PROT_NONE);
  }
  block->num_threads = num_threads;
  block->threads.resize(num_threads);
  block->warps.resize((num_threads + 31) / 32);
  block->grid = &grid;
  block->active = false;
}

static void prepare_memory(Block* block) {
  block->objects.clear();
  block->mbarriers.clear();
  block->wgmma_reads.clear();
  for (auto& ops : block->wgmma_ops) ops.clear();
  block->spare_registers = 0;
  block->want_registers.clear();
  block->dynamic_bytes = block->used = grid.shape.shared_bytes;
#if EMULATED_ASAN
  __asan_poison_memory_region(block->arena, kArena);
  __asan_unpoison_memory_region(block->arena, block->used);
  __asan_unpoison_memory_region(block->stacks, block->num_stacks * block->stack_bytes);
#endif
  memset(block->arena, 0xff, block->used);  // NaN in every float format
  block->generation++;
  if (grid.checks) reset_clocks(block);
}

static void start_next_blocks() {
  for (auto& slot : grid.slots) {
    if (slot->active && slot->live == 0) slot->active = false;
    if (slot->active || grid.next_block == grid.num_blocks) continue;
    uint64_t order = grid.next_block++;
    prepare_memory(slot.get());
    start_block(slot.get(), config.schedule == Schedule::reverse ? grid.num_blocks - 1 - order : order);
  }
}

static void report_deadlock() {
  std::string text = "deadlock: no thread can run;";
  int shown = 0;
  for (auto& slot : grid.slots) {
    for (Thread& thread : slot->threads) {
      bool waits = slot->active && (thread.state == State::at_barrier || thread.state == State::at_collective);
      if (!waits || shown++ >= 4) continue;
      text += " " + thread_name(thread.linear) + " of block " + std::to_string(slot->index) + " waits at " +
              (thread.state == State::at_barrier ? "barrier " : "warp collective ") + place(thread.at) + ";";
    }
  }
  report(text + (shown > 4 ? " ..." : ""));
}

static bool refuse(const char* name, LaunchShape shape) {
  uint64_t threads = static_cast<uint64_t>(shape.block.x) * shape.block.y * shape.block.z;
  std::string fault;
  if (threads == 0 || threads > kMaxThreads) fault = "block of " + std::to_string(threads) + " threads";
  if (shape.shared_bytes > kSharedLimit) fault = std::to_string(shape.shared_bytes) + " bytes of shared memory";
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) fault = "empty grid";
  if (shape.grid.y > 65535 || shape.grid.z > 65535) fault = "grid dimension y or z over 65535";
  if (!refused_kernels.empty() && strstr(name, refused_kernels.c_str())) fault = "no kernel image";
  if (fault.empty()) return false;
  grid.name = name;
  report("launch refused: " + fault);
  last_error[calling_runtime] = "launch refused: " + fault;
  return true;
}

void check_launch(const char* op, int runtime) {
  std::string error;
  error.swap(last_error[runtime]);
  if (!error.empty()) throw std::runtime_error(std::string(op) + ": CUDA: " + error);
}

void launch(const char* name, LaunchShape shape, Body body, void* closure, size_t closure_bytes) {
  if (refuse(name, shape)) return;
  uint32_t num_threads = shape.block.x * shape.block.y * shape.block.z;
  grid.name = name;
  grid.body = body;
  grid.closure = closure;
  grid.closure_bytes = closure_bytes;
  grid.shape = shape;
  grid.num_blocks = static_cast<uint64_t>(shape.grid.x) * shape.grid.y * shape.grid.z;
  grid.next_block = 0;
  grid.aborted = false;
  grid.checks = config.checks;
  grid.random_state = config.seed * 0x9E3779B97F4A7C15ULL | 1;
  grid.preempt_countdown = config.preempt;
  grid.host_stack_bottom = nullptr;
  launch_number++;
  launches++;
  forget_atomics();
  size_t resident = std::min<uint64_t>(std::max<uint32_t>(config.resident_blocks, 1), grid.num_blocks);
  if (grid.slots.size() < resident) grid.slots.resize(resident);
  for (size_t i = 0; i < grid.slots.size(); i++) {
    if (!grid.slots[i]) grid.slots[i] = std::make_unique<Block>();
    if (i < resident) prepare_slot(grid.slots[i].get(), num_threads);
  }
  auto spare = std::vector<std::unique_ptr<Block>>();  // slots that this launch does not use
  while (grid.slots.size() > resident) {
    spare.push_back(std::move(grid.slots.back()));
    grid.slots.pop_back();
  }
  size_t ring = 2;
  while (ring < resident * num_threads + 1) ring *= 2;
  grid.ring.assign(ring, nullptr);
  grid.head = grid.queued = 0;
  hooks_quiet = false;
  for (;;) {
    start_next_blocks();
    if (grid.queued == 0) {
      bool blocked = std::any_of(grid.slots.begin(), grid.slots.end(), [](auto& slot) { return slot->active; });
      if (blocked) report_deadlock();
      break;
    }
    run_until_host();
    if (grid.aborted) break;
  }
  for (auto& slot : spare) grid.slots.push_back(std::move(slot));
}

// ------------------------------------------------------------------ translated PTX
std::map<std::string, PtxKernel>& ptx_kernels() {
  static std::map<std::string, PtxKernel> kernels;
  return kernels;
}

static bool launch_entry(const std::string& name, LaunchShape shape, const void* parameters, size_t bytes) {
  auto found = ptx_kernels().find(name);
  if (found == ptx_kernels().end()) return false;
  const PtxKernel& kernel = found->second;
  struct Call {
    void (*body)(const unsigned char*);
    alignas(64) unsigned char parameters[4096];  // inside the closure: kernels may take their address
  } call{kernel.body, {}};
  if (std::max(bytes, kernel.parameter_bytes) > sizeof call.parameters) return false;
  memcpy(call.parameters, parameters, bytes);
  shape.shared_bytes += kernel.static_shared_bytes;
  auto body = [](void* opaque) {
    auto* c = static_cast<Call*>(opaque);
    c->body(c->parameters);
  };
  launch(found->first.c_str(), shape, body, &call, sizeof call);
  return true;
}

// nvcc and g++ mangle names alike, so the host function leads to the PTX entry.
bool launch_ptx(const void* kernel, LaunchShape shape, const unsigned char* parameters, size_t bytes) {
  Dl_info info{};
  std::string name = dladdr(kernel, &info) && info.dli_sname && info.dli_saddr == kernel ? info.dli_sname : "?";
  if (launch_entry(name, shape, parameters, bytes)) return true;
  grid.name = name;
  report("no PTX of kernel '" + name + "' in this build");
  return false;
}

}  // namespace emulated

extern "C" {
void emulated_configure(int schedule, int landing, int path, uint64_t seed, uint32_t resident_blocks, uint32_t preempt,
                        int checks) {
  emulated::config = {static_cast<emulated::Schedule>(schedule),
                      static_cast<emulated::Landing>(landing),
                      static_cast<emulated::Path>(path),
                      seed,
                      resident_blocks,
                      preempt,
                      checks != 0};
}
void emulated_plant(int bug) {
  emulated::planted_bug = bug;
}
void emulated_hopper(int on) {
  emulated::hopper = on != 0;
}
void emulated_refuse_kernels(const char* part) {
  emulated::refused_kernels = part;
}
void emulated_ptx_architecture(int number) {
  emulated::ptx_architecture = number;
}
const char* emulated_last_kernel() {
  return emulated::grid.name.c_str();
}
uint64_t emulated_launch_count() {
  return emulated::launches;
}
int emulated_launch_entry(const char* name, const uint32_t* grid, const uint32_t* block, size_t dynamic_bytes,
                          const void* parameters, size_t bytes) {
  emulated::LaunchShape shape{dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), dynamic_bytes};
  return emulated::launch_entry(name, shape, parameters, bytes) ? 0 : -1;
}
}
