// What device code (the CUDA language model, generated PTX code, the models of asm wrappers) may call in the runtime.
//
// One fiber per CUDA thread, one operating-system thread in all. A fiber gives the processor away only inside the calls
// below, so between two of them a CUDA thread runs alone: that is what makes a schedule reproducible from its seed.
#pragma once
#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emulated {

extern bool hopper;           // host code: the device is an sm_90; set by emulated_hopper
extern int ptx_architecture;  // path B: what the PTX was compiled for; set by emulated_ptx_architecture
extern int calling_runtime;   // host code: the CUDA runtime (0, 1) whose library launches

// A source position: of the CUDA source on path A, of a PTX statement ("file:line < file:line", line 0) on path B.
struct At {
  const char* file;
  int line;
};
#define EMULATED_AT ::emulated::At at = {__builtin_FILE(), __builtin_LINE()}

struct BlockContext {
  uint3 block_index, grid_dim, block_dim;
};
struct ThreadContext {
  uint3 thread_index;
  uint32_t linear, lane;  // index inside the block, index inside the warp
  const BlockContext* block;
};
extern ThreadContext* current;  // the CUDA thread that runs now; null between launches

enum class Schedule : int { sequential, reverse, random, priority };
enum class Landing : int { late, early, random };  // when a cp.async copy arrives: at its wait, at issue, by coin
enum class Path : int { source, ptx };

struct Config {
  Schedule schedule = Schedule::sequential;
  Landing landing = Landing::late;
  Path path = Path::source;
  uint64_t seed = 1;
  uint32_t resident_blocks = 1;  // blocks whose threads interleave
  uint32_t preempt = 0;          // mean number of checked accesses between forced switches; 0: never
  bool checks = true;            // race, bounds and initialisation checks where the build reports accesses
};
extern Config config;

// ---- synchronisation
void barrier(int id, int count, bool wait, At at);    // count 0: every live thread of the block
int barrier_reduce(int kind, bool predicate, At at);  // kind 0 count, 1 and, 2 or
using Finish = void (*)(void** arguments, uint32_t mask);
void warp_collective(const void* kind, uint32_t mask, void* argument, Finish finish, At at);
using GroupFinish = void (*)(void** arguments);
void warpgroup_collective(const void* kind, void* argument, GroupFinish finish, At at);  // 128 threads
void sync_warp(uint32_t mask, At at);
void fence();  // __threadfence: releases what came before, acquires what relaxed atomics have read
void yield();
[[noreturn]] void trap(const char* what, At at);

// ---- shared memory
void* dynamic_shared();
uint32_t dynamic_shared_bytes();
void* static_shared(const void* key, size_t bytes, size_t align);  // one object a block and a key
void cp_async(void* destination, const void* source, int bytes, int source_bytes, At at);
void cp_async_commit();
void cp_async_wait(int groups_in_flight, bool all);

// ---- checked accesses. `where` is a return address (path A) or a Site* (path B).
enum class Order : int { plain, relaxed, acquire, release, acq_rel };
void check_read(const void* address, size_t bytes, const void* where);
void check_write(const void* address, size_t bytes, const void* where, const void* value = nullptr);
void check_atomic(const void* address, size_t bytes, bool write, Order order, const void* where);
void check_source_range(const void* address, size_t bytes, At at);  // global source of a bulk copy
struct Site {
  const char* where;
  char kind;
  int bytes;
};
void register_sites(const Site* sites, size_t count);

// ---- tensor cores (arguments as in PTX, one call a lane)
void ldmatrix(uint32_t* destination, const void* row, int count, bool transpose, At at, const void* where);
enum class Element : int { bf16, f16, tf32 };
void mma_m16n8(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, Element element, At at);

// ---- launch
using Body = void (*)(void* closure);
struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes;
};
void launch(const char* name, LaunchShape shape, Body body, void* closure, size_t closure_bytes);
bool launch_ptx(const void* kernel, LaunchShape shape, const unsigned char* parameters, size_t bytes);
size_t error_count();
void check_launch(const char* op, int runtime);  // cudaGetLastError: throws what refused a launch of that runtime

// Runs `kernel`: its C++ body on path A; on path B the translation of the PTX entry with the same mangled name.
template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   Arguments&&... arguments) {
  LaunchShape shape{grid, block, shared_bytes};
  std::tuple<std::remove_cv_t<Parameters>...> values(std::forward<Arguments>(arguments)...);
  if (config.path == Path::ptx) {
    unsigned char packed[4096] = {};
    size_t offset = 0;
    auto pack = [&](const auto& value) {
      using Value = std::remove_cvref_t<decltype(value)>;
      static_assert(std::is_trivially_copyable_v<Value>, "kernel parameters are copied bytewise");
      offset = (offset + alignof(Value) - 1) / alignof(Value) * alignof(Value);
      if (offset + sizeof(Value) <= sizeof packed) memcpy(packed + offset, &value, sizeof(Value));
      offset += sizeof(Value);
    };
    std::apply([&](const auto&... value) { (pack(value), ...); }, values);
    launch_ptx(reinterpret_cast<const void*>(kernel), shape, packed, offset);
    return;
  }
  struct Closure {
    void (*kernel)(Parameters...);
    decltype(values) arguments;
  } closure{kernel, std::move(values)};
  auto body = [](void* opaque) {
    auto* call = static_cast<Closure*>(opaque);
    std::apply(call->kernel, call->arguments);
  };
  launch(name, shape, body, &closure, sizeof closure);
}

// ---- lane-wise helpers of the language model, as templates on warp_collective
template <class T>
struct ShuffleArgument {
  T value, result;
  int source, width, mode;  // mode 0 index, 1 up, 2 down, 3 xor
};
template <class T>
T shuffle(uint32_t mask, T value, int source, int width, int mode, At at) {
  static char kind;
  ShuffleArgument<T> argument{value, value, source, width, mode};
  warp_collective(
      &kind, mask, &argument,
      [](void** arguments, uint32_t lanes) {
        for (int lane = 0; lane < 32; lane++) {
          if (!(lanes >> lane & 1)) continue;
          auto* mine = static_cast<ShuffleArgument<T>*>(arguments[lane]);
          int first = lane & ~(mine->width - 1), last = first + mine->width - 1, from = lane;
          if (mine->mode == 0) from = first | (mine->source & (mine->width - 1));
          if (mine->mode == 1 && lane - mine->source >= first) from = lane - mine->source;
          if (mine->mode == 2 && lane + mine->source <= last) from = lane + mine->source;
          if (mine->mode == 3 && (lane ^ mine->source) <= last) from = lane ^ mine->source;
          if (!(lanes >> from & 1)) trap("shuffle reads a lane outside its mask", {"", 0});
          mine->result = static_cast<ShuffleArgument<T>*>(arguments[from])->value;
        }
      },
      at);
  return argument.result;
}

struct VoteArgument {
  uint64_t value;
  uint32_t result;
};
inline uint32_t ballot(uint32_t mask, bool predicate, At at) {
  static char kind;
  VoteArgument argument{predicate, 0};
  warp_collective(
      &kind, mask, &argument,
      [](void** arguments, uint32_t lanes) {
        uint32_t votes = 0;
        for (int lane = 0; lane < 32; lane++)
          if (lanes >> lane & 1) votes |= uint32_t(static_cast<VoteArgument*>(arguments[lane])->value & 1) << lane;
        for (int lane = 0; lane < 32; lane++)
          if (lanes >> lane & 1) static_cast<VoteArgument*>(arguments[lane])->result = votes;
      },
      at);
  return argument.result;
}
inline uint32_t match_any(uint32_t mask, uint64_t value, At at) {
  static char kind;
  VoteArgument argument{value, 0};
  warp_collective(
      &kind, mask, &argument,
      [](void** arguments, uint32_t lanes) {
        for (int lane = 0; lane < 32; lane++) {
          if (!(lanes >> lane & 1)) continue;
          auto* mine = static_cast<VoteArgument*>(arguments[lane]);
          for (int other = 0; other < 32; other++)
            if (lanes >> other & 1 && static_cast<VoteArgument*>(arguments[other])->value == mine->value)
              mine->result |= 1u << other;
        }
      },
      at);
  return argument.result;
}
template <class T, class Operation>
T warp_reduce(uint32_t mask, T value, Operation, At at) {
  static char kind;
  ShuffleArgument<T> argument{value, value, 0, 32, 0};
  warp_collective(
      &kind, mask, &argument,
      [](void** arguments, uint32_t lanes) {
        bool first = true;
        T total{};
        for (int lane = 0; lane < 32; lane++) {
          if (!(lanes >> lane & 1)) continue;
          T mine = static_cast<ShuffleArgument<T>*>(arguments[lane])->value;
          total = first ? mine : Operation{}(total, mine);
          first = false;
        }
        for (int lane = 0; lane < 32; lane++)
          if (lanes >> lane & 1) static_cast<ShuffleArgument<T>*>(arguments[lane])->result = total;
      },
      at);
  return argument.result;
}

// Fibers share one OS thread, so a plain read-modify-write is atomic; check_atomic may switch before it, never inside.
// Out of line, so that the return address is the atomic's place in the kernel; not instrumented, or the hooks would
// take its two accesses for plain ones.
template <class T, class Update>
__attribute__((noinline, no_sanitize_thread)) T atomic_update(T* address, Order order, Update update,
                                                              const void* where = nullptr) {
  check_atomic(address, sizeof(T), true, order, where ? where : __builtin_return_address(0));
  T before = *address;
  *address = update(before);
  return before;
}

}  // namespace emulated
