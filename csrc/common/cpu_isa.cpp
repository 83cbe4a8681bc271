#include "cpu.h"

namespace specdec {

std::atomic<int>& isa_limit() {
  static std::atomic<int> limit{static_cast<int>(Isa::amx)};
  return limit;
}

Isa isa() {
  static const Isa detected = detect_isa();
  int limit = isa_limit().load(std::memory_order_relaxed);
  return static_cast<int>(detected) < limit ? detected : static_cast<Isa>(limit);
}

}  // namespace specdec

// Called through ctypes by tests and by `info`: returns the level now in force (see Isa).
extern "C" __attribute__((visibility("default"))) int specdec_limit_isa(int limit) {
  if (limit >= 0) specdec::isa_limit().store(limit);
  return static_cast<int>(specdec::isa());
}
