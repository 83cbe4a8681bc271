#include "cpu.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec {

#if defined(__x86_64__) && defined(__linux__)
namespace {
__attribute__((target("xsave"))) unsigned long long saved_state() {
  return __builtin_ia32_xgetbv(0);
}
}  // namespace
#endif

bool amx_usable() {
#if defined(SPECDEC_AMX_MODEL)
  return true;
#elif defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned tile_and_bf16 = 1u << 24 | 1u << 22;
  if ((d & tile_and_bf16) != tile_and_bf16) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE
  if ((saved_state() >> 17 & 3) != 3) return false;                     // the operating system saves tile state
  const int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

std::atomic<int>& isa_limit() {
  static std::atomic<int> limit{static_cast<int>(Isa::amx)};
  return limit;
}

Isa isa() {
  static const Isa detected = [] {
    Isa level = detect_isa();
    return level == Isa::avx512_bf16 && amx_usable() ? Isa::amx : level;
  }();
  int limit = isa_limit().load(std::memory_order_relaxed);
  return static_cast<int>(detected) < limit ? detected : static_cast<Isa>(limit);
}

}  // namespace specdec

// Called through ctypes by tests and by `info`: returns the level now in force (see Isa).
extern "C" __attribute__((visibility("default"))) int specdec_limit_isa(int limit) {
  if (limit >= 0) specdec::isa_limit().store(limit);
  return static_cast<int>(specdec::isa());
}
