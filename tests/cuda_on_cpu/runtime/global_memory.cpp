// Global memory: the tensors of the running op, and the history of the bytes it may write.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <unordered_map>

#include "c_api.h"
#include "internal.h"

namespace emulated {

struct Range {
  uintptr_t low, high;
  bool writable;
  std::string name;
};
static std::vector<Range> ranges;
static std::unordered_map<uintptr_t, std::vector<Cell>> shadow;  // by 256-byte line; read-only ranges need none
static uint32_t shadow_launch = 0;
constexpr uintptr_t kLine = 256;

// Constants and read-only data of this library: device code may read them, as it may read __constant__ memory.
static bool in_own_library(uintptr_t address) {
  static std::vector<std::pair<uintptr_t, uintptr_t>> segments;
  if (segments.empty()) {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
          bool own = false;
          std::vector<std::pair<uintptr_t, uintptr_t>> found;
          for (int i = 0; i < info->dlpi_phnum; i++) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_LOAD) continue;
            uintptr_t low = info->dlpi_addr + header.p_vaddr;
            found.emplace_back(low, low + header.p_memsz);
            auto here = reinterpret_cast<uintptr_t>(&segments);
            own |= here >= low && here < low + header.p_memsz;
          }
          if (own) segments = found;
          return own ? 1 : 0;
        },
        nullptr);
  }
  for (auto [low, high] : segments)
    if (address >= low && address < high) return true;
  return false;
}

// What the language model itself reads: thread indices, kernel parameters.
static bool in_launch_state(Thread* thread, uintptr_t address) {
  auto within = [&](const void* start, size_t bytes) {
    auto low = reinterpret_cast<uintptr_t>(start);
    return address >= low && address < low + bytes;
  };
  return within(static_cast<ThreadContext*>(thread), sizeof(ThreadContext)) ||
         within(&thread->owner->context, sizeof(BlockContext)) || within(grid.closure, grid.closure_bytes);
}

bool in_parameters(const void* address, size_t bytes) {
  auto low = reinterpret_cast<uintptr_t>(address), start = reinterpret_cast<uintptr_t>(grid.closure);
  return low >= start && low + bytes <= start + grid.closure_bytes;
}

static const Range* find_range(uintptr_t low, uintptr_t high, bool write) {
  static size_t last = 0;
  if (last < ranges.size() && low >= ranges[last].low && high <= ranges[last].high && (!write || ranges[last].writable))
    return &ranges[last];
  const Range* inside = nullptr;
  for (size_t i = 0; i < ranges.size(); i++) {
    if (low < ranges[i].low || high > ranges[i].high) continue;
    if (!inside || (ranges[i].writable && !inside->writable)) {
      inside = &ranges[i];
      last = i;
    }
  }
  return inside;
}

static std::string nearest(uintptr_t low) {
  const Range* best = nullptr;
  uintptr_t least = ~uintptr_t{0};
  for (const Range& range : ranges) {
    uintptr_t distance = low < range.low ? range.low - low : low >= range.high ? low - range.high : 0;
    if (distance < least) {
      least = distance;
      best = &range;
    }
  }
  if (!best) return "no tensor is registered";
  bool before = low < best->low;
  return std::to_string(least) + " bytes " + (before ? "before the start" : "past the end") + " of '" + best->name +
         "'";
}

[[noreturn]] static void outside(Thread* thread, uintptr_t low, size_t bytes, bool write, const std::string& at) {
  report("global " + std::string(write ? "write" : "read") + " of " + std::to_string(bytes) +
             " bytes outside every tensor (" + nearest(low) + ") at " + at,
         thread->owner, thread);
  abort_launch();
}

void global_access(Thread* thread, const void* address, size_t bytes, bool write, bool atomic, const void* where,
                   bool same_value) {
  if (ranges.empty()) return;  // a launch outside any op: nothing is known about its memory
  auto low = reinterpret_cast<uintptr_t>(address), high = low + bytes;
  const Range* range = find_range(low, high, write);
  if (!range) {
    if (!write && (in_launch_state(thread, low) || in_own_library(low))) return;
    outside(thread, low, bytes, write, place(where));
  }
  if (write && !range->writable) {
    report("write to '" + range->name + "', which the op's schema does not name as mutated, at " + place(where),
           thread->owner, thread);
    abort_launch();
  }
  if (!range->writable) return;
  if (shadow_launch != launch_number) {  // the end of a launch orders everything
    shadow.clear();
    shadow_launch = launch_number;
  }
  std::vector<Cell>* line = nullptr;
  for (uintptr_t byte = low; byte < high; byte++) {
    if (!line || byte % kLine == 0) {
      line = &shadow[byte / kLine];
      if (line->empty()) line->resize(kLine);
    }
    record_access((*line)[byte % kLine], thread, write, atomic, where, same_value, "global", byte - range->low,
                  range->name.c_str());
  }
}

void check_source_range(const void* address, size_t bytes, At at) {
  if (!grid.checks || ranges.empty()) return;
  auto low = reinterpret_cast<uintptr_t>(address);
  if (!find_range(low, low + bytes, false)) outside(self(), low, bytes, false, place(at));
}

}  // namespace emulated

extern "C" {
void emulated_register_tensor(const void* address, size_t bytes, int writable, const char* name) {
  auto low = reinterpret_cast<uintptr_t>(address);
  emulated::ranges.push_back({low, low + bytes, writable != 0, name});
}
void emulated_clear_tensors() {
  emulated::ranges.clear();
}
}
