// Shared memory of a block: the arena, static objects between red zones, and cp.async copies that arrive late.
#include <algorithm>

#include "internal.h"

namespace emulated {

void* dynamic_shared() {
  return self()->owner->arena;
}
uint32_t dynamic_shared_bytes() {
  return static_cast<uint32_t>(self()->owner->dynamic_bytes);
}

void* static_shared(const void* key, size_t bytes, size_t align) {
  Block* block = self()->owner;
  for (const StaticObject& object : block->objects)
    if (object.key == key) return object.address;
  size_t offset = (block->used + 64 + align - 1) / align * align;  // 64 bytes of red zone
  if (offset + bytes > kArena) trap("shared memory exhausted", {"", 0});
  block->used = offset + bytes;
  block->objects.push_back({key, block->arena + offset, bytes});
#if EMULATED_ASAN
  __asan_unpoison_memory_region(block->arena + offset, bytes);
#endif
  memset(block->arena + offset, 0xff, bytes);  // NaN in every float format
  return block->arena + offset;
}

static void land(AsyncCopy& copy) {
  memcpy(copy.destination, copy.source, copy.source_bytes);
  memset(copy.destination + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
  copy.landed = true;
}

// The destination holds NaN from the issue until the copy lands: at its wait (late), here (early), or by coin.
__attribute__((noinline)) void cp_async(void* destination, const void* source, int bytes, int source_bytes, At at) {
  Thread* thread = self();
  Block* block = thread->owner;
  auto misaligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) != 0; };
  if (misaligned(destination) || (source_bytes && misaligned(source))) trap("misaligned cp.async", at);
  size_t offset = static_cast<size_t>(static_cast<char*>(destination) - block->arena);
  if (offset + static_cast<size_t>(bytes) > block->used) trap("cp.async destination outside shared memory", at);
  if (source_bytes) check_source_range(source, static_cast<size_t>(source_bytes), at);
  if (grid.checks)
    shared_access(thread, offset, static_cast<size_t>(bytes), true, false, __builtin_return_address(0), false, true);
  AsyncCopy copy{static_cast<char*>(destination),
                 static_cast<const char*>(source),
                 static_cast<uint16_t>(bytes),
                 static_cast<uint16_t>(source_bytes),
                 false,
                 0};
  if (config.landing == Landing::early || (config.landing == Landing::random && (grid.random() & 1)))
    land(copy);
  else
    memset(destination, 0xff, static_cast<size_t>(bytes));
  thread->copies.push_back(copy);
}

void cp_async_commit() {
  Thread* thread = self();
  thread->groups.push_back(thread->forgotten + thread->copies.size());
}

void cp_async_wait(int groups_in_flight, bool all) {
  Thread* thread = self();
  if (all) cp_async_commit();
  size_t allowed = static_cast<size_t>(groups_in_flight);
  size_t finished = thread->groups.size() > allowed ? thread->groups.size() - allowed : 0;
  if (!finished) return;
  uint64_t count = thread->groups[finished - 1];
  thread->groups.erase(thread->groups.begin(), thread->groups.begin() + static_cast<long>(finished));
  land_copies_until(thread, count);
}

// Lands the first `count` copies that `thread` ever issued: at its wait, or at a wait on the mbarrier they report to.
void land_copies_until(Thread* thread, uint64_t count) {
  while (thread->forgotten + thread->landed < count) {
    AsyncCopy& copy = thread->copies[thread->landed++];
    if (!copy.landed) land(copy);
    if (grid.checks) copies_landed(thread, copy);
  }
  if (thread->landed == thread->copies.size()) {
    thread->forgotten += thread->landed;
    thread->copies.clear();
    thread->landed = 0;
  }
}

}  // namespace emulated
