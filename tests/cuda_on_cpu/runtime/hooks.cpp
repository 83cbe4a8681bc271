// The callbacks that g++ -fsanitize=thread plants before every load and store of a kernel file. libtsan is not linked:
// this file takes its place, so the "thread sanitizer" is our detector, which knows CUDA's barriers and memories.
#include "internal.h"

#define CALLER __builtin_return_address(0)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define EMULATED_HOOKS(n)                                                                          \
  void __tsan_read##n(void* address) {                                                             \
    if (emulated::grid.checks) emulated::check_read(address, n, CALLER);                           \
  }                                                                                                \
  void __tsan_write##n(void* address) {                                                            \
    if (emulated::grid.checks) emulated::check_write(address, n, CALLER);                          \
  }                                                                                                \
  void __tsan_unaligned_read##n(void* address) {                                                   \
    if (emulated::grid.checks) emulated::check_read(address, n, CALLER);                           \
  }                                                                                                \
  void __tsan_unaligned_write##n(void* address) {                                                  \
    if (emulated::grid.checks) emulated::check_write(address, n, CALLER);                          \
  }                                                                                                \
  /* A volatile access to global memory may be half of a hand-over: judged as a relaxed atomic. */ \
  void __tsan_volatile_read##n(void* address) {                                                    \
    emulated::check_atomic(address, n, false, emulated::Order::relaxed, CALLER);                   \
  }                                                                                                \
  void __tsan_volatile_write##n(void* address) {                                                   \
    emulated::check_atomic(address, n, true, emulated::Order::relaxed, CALLER);                    \
  }                                                                                                \
  void __tsan_unaligned_volatile_read##n(void* address) {                                          \
    __tsan_volatile_read##n(address);                                                              \
  }                                                                                                \
  void __tsan_unaligned_volatile_write##n(void* address) {                                         \
    __tsan_volatile_write##n(address);                                                             \
  }
EMULATED_HOOKS(1)
EMULATED_HOOKS(2)
EMULATED_HOOKS(4)
EMULATED_HOOKS(8)
EMULATED_HOOKS(16)
void __tsan_read_range(void* address, size_t bytes) {
  if (emulated::grid.checks) emulated::check_read(address, bytes, CALLER);
}
void __tsan_write_range(void* address, size_t bytes) {
  if (emulated::grid.checks) emulated::check_write(address, bytes, CALLER);
}

// Host code of the same file (static guards, shared pointers) uses real atomics; device atomics go through
// check_atomic.
#define EMULATED_ATOMICS(bits, T)                                                           \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                  \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                            \
  }                                                                                         \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                               \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                               \
  }                                                                                         \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                               \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                     \
  }                                                                                         \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                              \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                              \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                      \
  }                                                                                         \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* e, T v, int, int) {   \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                         \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* e, T v, int, int) {     \
    return __atomic_compare_exchange_n(p, e, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  }
EMULATED_ATOMICS(8, uint8_t)
EMULATED_ATOMICS(16, uint16_t)
EMULATED_ATOMICS(32, uint32_t)
EMULATED_ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}
}
