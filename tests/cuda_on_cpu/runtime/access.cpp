// Every load and store of a kernel, judged: is it inside an object, initialised, ordered against the others?
//
// Path A: the kernel's translation unit is compiled with -fsanitize=thread but not linked with libtsan; the callbacks
// are ours (hooks.cpp), so each compiled access arrives here with its return address. Path B: the translated PTX calls
// check_read and check_write itself. Both memories share the history cells and the rule: two accesses to a byte, one of
// them a write, not both atomic, neither ordered before the other, are a race.
#include <sys/mman.h>

#include <algorithm>

#include "c_api.h"
#include "internal.h"

namespace emulated {

uint32_t launch_number = 0;
bool hooks_quiet = false;

void record_access(Cell& cell, Thread* thread, bool write, bool atomic, const void* where, bool same_value,
                   const char* space, size_t place_in_space, const char* object) {
  Block* block = thread->owner;
  auto conflict = [&](const Access& other) {
    bool same_thread = other.block == block->index && other.thread == thread->linear;
    return !same_thread && !(atomic && other.atomic) && !ordered_before(other, thread);
  };
  auto race = [&](const char* kind, const Access& other) {
    std::string other_block = other.block == block->index ? "" : " of block " + std::to_string(other.block);
    report_once(kind, where, other.where,
                std::string(kind) + " on " + space + " byte " + std::to_string(place_in_space) +
                    (*object ? " of '" + std::string(object) + "'" : "") + ": " + thread_name(thread->linear) + " at " +
                    place(where) + "  vs  " + thread_name(other.thread) + other_block + " at " + place(other.where));
  };
  // A store of the value that is already there changes nothing (Triton emits such stores for replicated lanes).
  if (cell.written && !same_value && conflict(cell.write))
    race(write ? "write-write race" : "read-after-write race", cell.write);
  Access now{where,        block->clock_of(thread->linear)[thread->linear],
             block->index, static_cast<uint16_t>(thread->linear),
             atomic,       false};
  if (write) {
    for (int i = 0; i < cell.num_reads && !same_value; i++)
      if (conflict(cell.read[i])) race("write-after-read race", cell.read[i]);
    cell.num_reads = 0;
    cell.write = now;
    cell.written = true;
    return;
  }
  // Keep three readers, preferring to replace one that this thread has already seen, then one of the same warp.
  int slot = 0;
  auto replaceable = [&](auto&& good) {
    for (slot = 0; slot < cell.num_reads; slot++)
      if (good(cell.read[slot])) return true;
    return false;
  };
  auto mine = [&](const Access& a) { return a.thread == thread->linear && a.block == block->index; };
  auto seen = [&](const Access& a) { return ordered_before(a, thread); };
  auto mate = [&](const Access& a) { return a.thread / 32 == thread->linear / 32 && a.block == block->index; };
  if (!replaceable(mine)) {
    if (cell.num_reads < 3)
      slot = cell.num_reads++;
    else if (!replaceable(seen) && !replaceable(mate))
      slot = static_cast<int>(grid.random() % 3);
  }
  cell.read[slot] = now;
}

static Cell& shared_cell(Block* block, size_t offset) {
  if (!block->shadow)
    block->shadow = static_cast<Cell*>(mmap(nullptr, kArena * sizeof(Cell), PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  Cell& cell = block->shadow[offset];
  if (cell.generation != block->generation) cell = Cell{.generation = block->generation};
  return cell;
}

void shared_access(Thread* thread, size_t offset, size_t bytes, bool write, bool atomic, const void* where,
                   bool same_value, bool copy) {
  Block* block = thread->owner;
  bool inside = offset + bytes <= block->dynamic_bytes;
  for (const StaticObject& object : block->objects) {
    size_t start = static_cast<size_t>(object.address - block->arena);
    inside |= offset >= start && offset + bytes <= start + object.bytes;
  }
  if (!inside) {
    report_once("outside", where, nullptr,
                std::string(write ? "write" : "read") + " outside every shared object, at shared byte " +
                    std::to_string(offset) + ": " + thread_name(thread->linear) + " at " + place(where));
    abort_launch();
  }
  for (size_t i = offset; i < offset + bytes; i++) {
    Cell& cell = shared_cell(block, i);
    if (cell.in_flight) {
      const char* kind =
          write ? "write to a cp.async destination in flight" : "read of a cp.async destination before its wait";
      report_once(kind, where, cell.write.where,
                  std::string(kind) + ", shared byte " + std::to_string(i) + ": " + thread_name(thread->linear) +
                      " at " + place(where) + "  vs  " + thread_name(cell.write.thread) + " at " +
                      place(cell.write.where));
      if (!copy) continue;
    }
    if (!cell.written && (!write || atomic))
      report_once("uninitialised", where, nullptr,
                  "read of uninitialised shared memory, byte " + std::to_string(i) + ": " +
                      thread_name(thread->linear) + " at " + place(where));
    if (write && !block->wgmma_reads.empty() && block->wgmma_reads[i / 16])
      report_once("operand", where, nullptr,
                  "write to a wgmma operand in flight, shared byte " + std::to_string(i) + ": " +
                      thread_name(thread->linear) + " at " + place(where));
    record_access(cell, thread, write, atomic, where, same_value, "shared", i, "");
    if (write) cell.in_flight = copy;
  }
}

// A bulk copy is issued: what ordinary stores and cp.async have left there must have been fenced, or may land later.
void engine_write_begins(Thread* thread, size_t offset, size_t bytes, const void* where) {
  Block* block = thread->owner;
  for (size_t i = offset; i < offset + bytes; i++) {
    const Access& write = shared_cell(block, i).write;
    if (!shared_cell(block, i).written || write.async_proxy || write.clock <= block->proxy_fenced[write.thread])
      continue;
    report_once("proxy", where, write.where,
                "bulk copy over bytes that were written without fence.proxy.async, shared byte " + std::to_string(i) +
                    ": " + thread_name(thread->linear) + " at " + place(where) + "  vs  " + thread_name(write.thread) +
                    " at " + place(write.where));
  }
}

// A bulk copy has landed: from now on its bytes count as written by the copy engine, at a new tick of the engine's
// clock.
void engine_wrote(Block* block, const char* destination, size_t bytes) {
  size_t offset = static_cast<size_t>(destination - block->arena);
  block->engine_clock++;
  for (size_t i = offset; i < offset + bytes; i++) {
    Cell& cell = shared_cell(block, i);
    cell.in_flight = false;
    cell.write.clock = block->engine_clock;
    cell.write.thread = kCopyEngine;
    cell.write.async_proxy = true;
  }
}

// wgmma reads 16 bytes of an operand: judged when it is issued, remembered as a read of `thread` when it has retired.
void operand_read_begins(Thread* thread, size_t offset, const void* where) {
  Block* block = thread->owner;
  for (size_t i = offset; i < offset + 16; i++) {
    Cell& cell = shared_cell(block, i);
    auto fault = [&](const char* what) {
      report_once(what, where, cell.write.where,
                  std::string(what) + ", shared byte " + std::to_string(i) + ": " + thread_name(thread->linear) +
                      " at " + place(where) +
                      (cell.written ? "  vs  " + thread_name(cell.write.thread) + " at " + place(cell.write.where)
                                    : std::string()));
    };
    const uint32_t writer = cell.write.thread == kCopyEngine ? block->num_threads : cell.write.thread;
    if (!cell.written)
      fault("wgmma operand was never written");
    else if (cell.in_flight)
      fault("wgmma operand is the destination of a copy in flight");
    else if (!ordered_before(cell.write, thread))
      fault("read-after-write race on a wgmma operand");
    else if (!cell.write.async_proxy && cell.write.clock > block->proxy_fenced[writer])
      fault("wgmma operand was written without fence.proxy.async");
  }
}
void operand_read_ends(Thread* thread, size_t offset, const void* where) {
  for (size_t i = offset; i < offset + 16; i++)
    record_access(shared_cell(thread->owner, i), thread, false, false, where, false, "shared", i, "");
}

// The copy's bytes count as written by the issuing thread, at its wait, or when it promised them to an mbarrier: then
// all who wait there know of them, and those whom the issuer tells later in another way.
void copies_landed(Thread* thread, const AsyncCopy& copy) {
  Block* block = thread->owner;
  size_t offset = static_cast<size_t>(copy.destination - block->arena);
  for (size_t i = offset; i < offset + copy.bytes; i++) {
    Cell& cell = shared_cell(block, i);
    if (!cell.in_flight || cell.write.thread != thread->linear) continue;
    cell.in_flight = false;
    cell.write.clock = copy.promised ? copy.promised : block->clock_of(thread->linear)[thread->linear];
  }
}

static void maybe_preempt() {
  if (!grid.preempt_countdown || --grid.preempt_countdown) return;
  grid.preempt_countdown = 1 + static_cast<uint32_t>(grid.random() % (2 * config.preempt));
  yield();
}

[[gnu::noinline]] static void check(const void* address, size_t bytes, bool write, const void* where,
                                    const void* value) {
  if (!current || hooks_quiet) return;
  Thread* thread = self();
  Block* block = thread->owner;
  const char* byte = static_cast<const char*>(address);
  if (byte >= thread->stack && byte < thread->stack + block->stack_bytes - kPage) return;
  size_t offset = static_cast<size_t>(byte - block->arena);
  bool same_value = value && memcmp(address, value, bytes) == 0;
  if (offset < kArena)
    shared_access(thread, offset, bytes, write, false, where, same_value, false);
  else
    global_access(thread, address, bytes, write, false, where, same_value);
  maybe_preempt();
}

void check_read(const void* address, size_t bytes, const void* where) {
  if (grid.checks) check(address, bytes, false, where, nullptr);
}
void check_write(const void* address, size_t bytes, const void* where, const void* value) {
  if (grid.checks) check(address, bytes, true, where, value);
}

}  // namespace emulated
