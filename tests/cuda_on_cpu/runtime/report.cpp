// Reports: what went wrong, at which source lines, by which threads.
#include <dlfcn.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "c_api.h"
#include "internal.h"

namespace emulated {

constexpr size_t kMaxReports = 32;
static std::vector<std::string> reports;
static std::set<std::tuple<std::string, const void*, const void*>> seen;
struct SiteTable {
  const Site* first;
  size_t count;
};
static std::vector<SiteTable>& site_tables() {  // filled by static initialisers of generated code
  static std::vector<SiteTable> tables;
  return tables;
}
void register_sites(const Site* sites, size_t count) {
  site_tables().push_back({sites, count});
}

static std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

std::string place(At at) {
  if (!at.file || !*at.file) return "?";
  return base_name(at.file) + (at.line ? ":" + std::to_string(at.line) : "");
}

// The inlined call chain of a return address, innermost first: "reduce.cuh:31 < tree_cuda.cu:70".
static std::string symbolize(const void* address) {
  Dl_info info{};
  if (!dladdr(address, &info) || !info.dli_fname) return "?";
  char command[600], line[600];
  size_t offset = static_cast<size_t>(static_cast<const char*>(address) - 1 - static_cast<const char*>(info.dli_fbase));
  snprintf(command, sizeof command, "addr2line -i -e '%s' %#zx 2>/dev/null", info.dli_fname, offset);
  std::string chain;
  if (FILE* pipe = popen(command, "r")) {
    while (fgets(line, sizeof line, pipe)) {
      std::string frame = line;
      frame = frame.substr(0, frame.find_first_of(" \n"));
      if (frame.find("device_model.h") != std::string::npos || frame.find("emulated.h") != std::string::npos) continue;
      if (base_name(frame) == "tuple" || frame.find("/c++/") != std::string::npos) continue;
      chain += (chain.empty() ? "" : " < ") + base_name(frame);
    }
    pclose(pipe);
  }
  return chain.empty() ? "?" : chain;
}

std::string place(const void* where) {
  for (const SiteTable& table : site_tables()) {
    auto* site = static_cast<const Site*>(where);
    if (site >= table.first && site < table.first + table.count) return site->where;
  }
  static std::map<const void*, std::string> known;
  auto [entry, fresh] = known.emplace(where, "");
  if (fresh) entry->second = symbolize(where);
  return entry->second;
}

std::string thread_name(uint32_t thread) {
  if (thread == kCopyEngine) return "the copy engine";
  return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / 32) + " lane " +
         std::to_string(thread % 32) + ")";
}

void report(const std::string& what, const Block* block, const Thread* thread) {
  if (reports.size() >= kMaxReports) return;
  std::string text = what + " [kernel " + grid.name;
  if (block) {
    uint3 b = block->context.block_index;
    text += ", block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ")";
  }
  if (thread) text += ", " + thread_name(thread->linear);
  reports.push_back(text + "]");
}

// One report for each pair of places: a race in a loop is one fault.
void report_once(const std::string& kind, const void* where_a, const void* where_b, const std::string& what) {
  if (reports.size() >= kMaxReports || !seen.emplace(kind, where_a, where_b).second) return;
  report(what, current ? self()->owner : nullptr);
}

size_t error_count() {
  return reports.size();
}

void trap(const char* what, At at) {
  Thread* thread = self();
  if (!at.line && !*at.file && thread->at.file) at = thread->at;
  hooks_quiet = false;
  report("trap: " + std::string(what) + " at " + place(at), thread->owner, thread);
  abort_launch();
}

}  // namespace emulated

extern "C" {
size_t emulated_error_count() {
  return emulated::reports.size();
}
const char* emulated_error(size_t index) {
  return emulated::reports.at(index).c_str();
}
void emulated_clear_errors() {
  emulated::reports.clear();
  emulated::seen.clear();
  for (std::string& error : emulated::last_error) error.clear();
}
}
